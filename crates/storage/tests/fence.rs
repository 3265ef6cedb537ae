//! The fence against the dead: after `open` nothing of an earlier process lands any more.
//!
//! A child writes through io_uring to a throttled disk and is killed with its writes in flight. The kernel still carries
//! them out, seconds later. `open` must wait for the last one, and know that it waits for a dead process.

mod support;

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ioplane_memory::GuestRange;
use ioplane_storage::*;
use support::{LoopDevice, Rig, skip};

const BLOCK: u64 = 64 << 10;
const BLOCKS: u16 = 12;
/// Bytes a second of the slow disk: the writes of the child take about three seconds.
const SPEED: u64 = 256 << 10;

/// A control group in which one block device is slow. Version 1 or 2, whichever has the controller here.
struct SlowGroup(PathBuf);

impl SlowGroup {
    fn new(device: &str) -> Result<SlowGroup, String> {
        let number = std::fs::metadata(device).map_err(|e| e.to_string())?.rdev();
        let number = format!("{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let name = format!("ioplane-fence-{}-{}", std::process::id(), number.replace(':', "-"));
        let mut tried = Vec::new();
        for (root, limits) in [
            ("/sys/fs/cgroup/blkio", vec![("blkio.throttle.write_bps_device", format!("{number} {SPEED}"))]),
            ("/sys/fs/cgroup", vec![("io.max", format!("{number} wbps={SPEED}"))]),
            ("/sys/fs/cgroup/unified", vec![("io.max", format!("{number} wbps={SPEED}"))]),
        ] {
            if limits[0].0 == "io.max" {
                let _ = std::fs::write(format!("{root}/cgroup.subtree_control"), "+io");
            }
            let group = Path::new(root).join(&name);
            if std::fs::create_dir(&group).is_err() {
                tried.push(format!("no groups in {root}"));
                continue;
            }
            let group = SlowGroup(group);
            match limits.iter().try_for_each(|(file, limit)| std::fs::write(group.0.join(file), limit)) {
                Ok(()) => return Ok(group),
                Err(e) => tried.push(format!("{root}: {e}")),
            }
        }
        Err(tried.join("; "))
    }
}

impl Drop for SlowGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// The child: this test binary again, with these in its environment.
const IMAGE: &str = "IOPLANE_FENCE_IMAGE";
const GROUP: &str = "IOPLANE_FENCE_GROUP";
const ENGINE: &str = "IOPLANE_FENCE_ENGINE";

#[test]
fn child() {
    let (Ok(path), Ok(group)) = (std::env::var(IMAGE), std::env::var(GROUP)) else { return };
    let engine = if std::env::var(ENGINE).as_deref() == Ok("Threads") {
        EngineChoice::Threads
    } else {
        EngineChoice::IoUring
    };
    std::fs::write(Path::new(&group).join("cgroup.procs"), std::process::id().to_string()).unwrap();
    let options = FileOptions { direct: Direct::On, engine, ..FileOptions::new(path) };
    let backing = FileBacking::open(options).unwrap();
    let mut rig = Rig::new(&*backing, BLOCKS);
    for tag in 0..BLOCKS {
        let gpa = u64::from(tag) * BLOCK;
        rig.view.write(gpa, &vec![tag as u8 + 1; BLOCK as usize]).unwrap();
        let from = [GuestRange { gpa, len: BLOCK as u32 }];
        let op = Op::Write { offset: u64::from(tag) * BLOCK, from: &from };
        assert_eq!(rig.submit(&op, Tag(tag)), Submitted::Pending);
    }
    rig.push();
    println!("\nsubmitted");
    std::thread::sleep(Duration::from_secs(600));
}

fn spawn(device: &str, group: &SlowGroup, engine: EngineChoice) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(IMAGE, device)
        .env(GROUP, &group.0)
        .env(ENGINE, format!("{engine:?}"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "submitted"), "the child did not come so far");
    child
}

/// How many of the child's blocks are on the disk.
fn landed(disk: &File) -> usize {
    #[repr(align(4096))]
    struct Block([u8; 4096]);
    let mut block = Block([0; 4096]);
    (0..u64::from(BLOCKS))
        .filter(|n| {
            disk.read_exact_at(&mut block.0, (n + 1) * BLOCK - 4096).unwrap();
            block.0.iter().all(|byte| u64::from(*byte) == n + 1)
        })
        .count()
}

/// A slow disk, or `None` after having said loudly why not.
fn slow_disk() -> Option<(LoopDevice, SlowGroup)> {
    let Some(device) = LoopDevice::new(16 << 20, 512) else {
        skip("the crash fence was NOT tested: no loop devices, or not root");
        return None;
    };
    match SlowGroup::new(&device.path) {
        Ok(group) => Some((device, group)),
        Err(why) => {
            skip(&format!("the crash fence was NOT tested: no way to make a disk slow here ({why})"));
            None
        }
    }
}

fn direct(path: &str) -> File {
    File::options().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

#[test]
fn open_waits_for_the_last_write_of_a_killed_process() {
    for engine in [EngineChoice::IoUring, EngineChoice::Threads] {
        let Some((device, group)) = slow_disk() else { return };
        let disk = direct(&device.path);
        let mut child = spawn(&device.path, &group, engine);

        // It lives: refused by name, however patient we are.
        let message = FileBacking::open(FileOptions::new(&device.path)).unwrap_err().to_string();
        assert!(message.contains(&format!("pid {}", child.id())), "{message}");

        child.kill().unwrap();
        let killed = Instant::now();
        let at_once = FileOptions { timeout: Duration::from_millis(500), ..FileOptions::new(&device.path) };
        // Even before it has been waited for, when it may still be seen to hold the image.
        match FileBacking::open(at_once) {
            Err(StorageError::NotQuiet { .. }) => {}
            other => panic!("{engine:?}: {other:?}"),
        }
        child.wait().unwrap();
        let before = landed(&disk);
        assert!(before < usize::from(BLOCKS), "{engine:?}: the disk was not slow: nothing was proven");

        let mut reports = 0;
        let backing =
            FileBacking::open_watched(FileOptions::new(&device.path), &mut |_| reports += 1).unwrap();
        let waited = killed.elapsed();
        let after = landed(&disk);
        // Threads die with what they had not begun; a ring's requests all land.
        if engine == EngineChoice::IoUring {
            assert_eq!(after, usize::from(BLOCKS), "a write was still to come when open returned");
        }
        // A process whose threads hang in system calls cannot be waited for before they return: nothing is left by then.
        assert!(reports > 0 || engine == EngineChoice::Threads);
        println!(
            "{engine:?}: {before} of {BLOCKS} blocks had landed 0.5 s after the kill, {after} when open returned after {waited:?}"
        );

        // What is written now stays: nothing stale comes after it.
        let mut rig = Rig::new(&*backing, 1);
        let zero = Op::WriteZeroes { offset: 0, len: u64::from(BLOCKS) * BLOCK, unmap: false };
        assert_eq!(rig.run(&zero), Ok(()));
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(landed(&disk), 0);
    }
}

/// Moves the four threads of a thread channel into a group, once they have all begun, and no other thread of this process.
fn move_disk_threads(group: &Path) {
    let mut moved = std::collections::BTreeSet::new();
    let deadline = Instant::now() + Duration::from_secs(60);
    while moved.len() < 4 {
        assert!(Instant::now() < deadline, "a channel has four threads, found {moved:?}");
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            if std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "disk") {
                std::fs::write(group, task.file_name().to_str().unwrap()).unwrap();
                moved.insert(task.file_name());
            }
        }
    }
}

/// Waits until a thread of a channel hangs in the disk: what is only queued when the channel goes is never begun.
fn wait_for_disk_threads() {
    let hangs = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.contains("(disk) D")
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while !std::fs::read_dir("/proc/self/task").unwrap().flatten().any(hangs) {
        assert!(Instant::now() < deadline, "no thread of the channel hangs in the disk: is it slow?");
    }
}

/// The same within one process: a channel that is dropped with writes in flight.
#[test]
fn orphaned_io_of_a_dropped_channel_is_waited_for() {
    for engine in [EngineChoice::IoUring, EngineChoice::Threads] {
        let Some((device, group)) = slow_disk() else { return };
        let disk = direct(&device.path);
        let backing =
            FileBacking::open(FileOptions { direct: Direct::On, engine, ..FileOptions::new(&device.path) })
                .unwrap();
        let mut rig = Rig::new(&*backing, BLOCKS);
        // Only this thread is slow (version 1), or this process (version 2); either way its writes are.
        let tasks = group.0.join("tasks");
        let (join, leave) = if tasks.exists() {
            (tasks, PathBuf::from("/sys/fs/cgroup/blkio/tasks"))
        } else {
            (group.0.join("cgroup.procs"), group.0.join("../cgroup.procs"))
        };
        if engine == EngineChoice::Threads && join.ends_with("tasks") {
            // The channel's threads write, not this one. Only those are moved: other tests run beside us.
            move_disk_threads(&join);
        } else {
            std::fs::write(&join, "0").unwrap();
        }
        for tag in 0..BLOCKS {
            let gpa = u64::from(tag) * BLOCK;
            rig.view.write(gpa, &vec![tag as u8 + 1; BLOCK as usize]).unwrap();
            let from = [GuestRange { gpa, len: BLOCK as u32 }];
            let op = Op::Write { offset: u64::from(tag) * BLOCK, from: &from };
            assert_eq!(rig.submit(&op, Tag(tag)), Submitted::Pending);
            // The last one is only noted.
            if tag == BLOCKS - 2 {
                rig.push();
            }
        }
        // The channel's own threads stay: they may not have begun yet, and end with the channel.
        if engine == EngineChoice::IoUring || !leave.ends_with("tasks") {
            let _ = std::fs::write(&leave, "0");
        }
        if engine == EngineChoice::Threads {
            wait_for_disk_threads();
        }
        let dropping = Instant::now();
        // The guest's memory goes with it as far as anybody here is concerned.
        drop(rig);
        assert!(
            dropping.elapsed() < Duration::from_millis(500),
            "dropping a channel does not wait for the disk"
        );
        assert!(!backing.wait_quiet(Instant::now()), "{engine:?}: the disk was not slow");
        assert!(!backing.wait_quiet(Instant::now() + Duration::from_millis(100)));
        assert!(backing.wait_quiet(Instant::now() + Duration::from_secs(30)));
        let after = landed(&disk);
        if engine == EngineChoice::IoUring {
            // The ring's core hands down what was only noted, and that is waited for, too.
            assert_eq!(after, usize::from(BLOCKS), "all that was submitted has landed");
        }
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(landed(&disk), after, "and nothing lands later");
        drop(backing);
        FileBacking::open(FileOptions::new(&device.path)).unwrap();
    }
}

/// Orphaned I/O keeps the image from the next backing of the same process, which reports why.
#[test]
fn an_image_with_orphaned_io_is_waited_for_not_refused() {
    let Some((device, group)) = slow_disk() else { return };
    let disk = direct(&device.path);
    let tasks = group.0.join("tasks");
    if !tasks.exists() {
        return skip("groups of single threads need version 1 of control groups");
    }
    let open = |timeout| FileBacking::open(FileOptions { timeout, ..FileOptions::new(&device.path) });
    let backing = open(Duration::ZERO).unwrap();
    let mut rig = Rig::new(&*backing, BLOCKS);
    std::fs::write(&tasks, "0").unwrap();
    for tag in 0..BLOCKS {
        let gpa = u64::from(tag) * BLOCK;
        rig.view.write(gpa, &vec![tag as u8 + 1; BLOCK as usize]).unwrap();
        let from = [GuestRange { gpa, len: BLOCK as u32 }];
        let op = Op::Write { offset: u64::from(tag) * BLOCK, from: &from };
        assert_eq!(rig.submit(&op, Tag(tag)), Submitted::Pending);
    }
    rig.push();
    let _ = std::fs::write("/sys/fs/cgroup/blkio/tasks", "0");
    drop((rig, backing));
    assert!(matches!(open(Duration::from_millis(500)), Err(StorageError::NotQuiet { .. })));
    open(Duration::from_secs(30)).unwrap();
    assert_eq!(landed(&disk), usize::from(BLOCKS));
}
