//! Channels do not allocate, and do without io_uring where that is forbidden.
#![allow(unsafe_code)]
// UNSAFETY: an allocator that counts, and a seccomp filter for a child process.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::process::Command;
use std::time::Duration;

use ioplane_memory::GuestRange;
use ioplane_storage::filter::{Delay, Fail, PowerCut, Stall};
use ioplane_storage::*;
use support::{Rig, image, ways};

struct Counting;

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if WATCHED.try_with(Cell::get).unwrap_or(false) {
            COUNT.with(|count| count.set(count.get() + 1));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if WATCHED.try_with(Cell::get).unwrap_or(false) {
            COUNT.with(|count| count.set(count.get() + 1));
        }
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn channels_neither_allocate_nor_free() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    let memory = || MemoryBacking::new(1 << 20).unwrap();
    let mut backings: Vec<(String, std::sync::Arc<dyn Backing>)> = vec![
        ("memory".into(), memory()),
        ("delay".into(), Delay::new(memory(), Duration::from_micros(5))),
        ("stall".into(), Stall::new(memory())),
        ("fail".into(), Fail::new(memory(), Vec::new())),
        ("power".into(), PowerCut::new(memory()).unwrap()),
    ];
    for (name, options) in ways(&path) {
        let own = folder.path().join(&name);
        std::fs::copy(&path, &own).unwrap();
        backings.push((name, FileBacking::open(FileOptions { path: own, ..options }).unwrap()));
    }
    for (name, backing) in backings {
        let mut rig = Rig::new(&*backing, 8);
        let ranges = [
            GuestRange { gpa: 1, len: 700 },
            GuestRange { gpa: 5000, len: 324 },
            GuestRange { gpa: 8192, len: 512 },
        ];
        // What its first operation takes from its core is made room for when a queue comes there.
        rig.read(0, 512).unwrap();
        WATCHED.set(true);
        for round in 0..100 {
            let ops = [
                Op::Write { offset: 0, from: &ranges },
                Op::Read { offset: 2048, into: &ranges[2..] },
                Op::Flush,
                Op::WriteZeroes { offset: 8192, len: 4096, unmap: round % 2 == 0 },
                Op::Discard { offset: 16384, len: 4096 },
            ];
            for (tag, op) in ops.iter().enumerate() {
                if let Submitted::Done(outcome) = rig.submit(op, Tag(tag as u16)) {
                    assert_eq!(outcome, Ok(()));
                }
            }
            rig.push();
            while rig.channel.in_flight() > 0 {
                rig.reap(&mut |_, outcome| assert_eq!(outcome, Ok(())));
            }
        }
        WATCHED.set(false);
        assert_eq!(COUNT.take(), 0, "{name}");
    }
}

const CHILD: &str = "IOPLANE_NO_IO_URING";

#[test]
fn threads_take_over_where_io_uring_is_forbidden() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD, &path)
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stderr));
    assert!(String::from_utf8_lossy(&child.stdout).contains("took threads"));
    assert_eq!(FileBacking::open(FileOptions::new(&path)).unwrap().engine(), Engine::IoUring);
}

#[test]
fn child() {
    let Ok(path) = std::env::var(CHILD) else { return };
    forbid_io_uring();
    let backing = FileBacking::open(FileOptions::new(&path)).unwrap();
    assert_eq!(backing.engine(), Engine::Threads);
    assert!(backing.why_threads().unwrap().contains("not permitted"));
    let mut rig = Rig::new(&*backing, 4);
    assert_eq!(rig.write(512, &[7; 512]), Ok(()));
    assert_eq!(rig.read(512, 512).unwrap(), [7; 512]);
    drop((rig, backing));
    let insisted = FileOptions { engine: EngineChoice::IoUring, ..FileOptions::new(&path) };
    assert!(FileBacking::open(insisted).unwrap_err().to_string().contains("engine = auto"));
    println!("took threads");
}

/// From here on io_uring_setup fails with EPERM in this thread.
fn forbid_io_uring() {
    let jump = |code, k, jt, jf| libc::sock_filter { code, jt, jf, k };
    let mut filter = [
        jump((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0, 0),
        jump((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, libc::SYS_io_uring_setup as u32, 0, 1),
        jump((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32, 0, 0),
        jump((libc::BPF_RET | libc::BPF_K) as u16, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: a valid program of that length; the filter only concerns this thread of this child.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

/// What guests do not align is copied by the I/O core when it reaps: however much has ended at once, one reap copies a part.
#[test]
fn hole_05_one_reap_copies_a_bounded_part_of_what_has_ended() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = image(folder.path(), 1 << 20);
    let options =
        FileOptions { direct: Direct::On, engine: EngineChoice::IoUring, ..FileOptions::new(&path) };
    let backing = FileBacking::open(options).unwrap();
    let mut rig = Rig::new(&*backing, 16);
    let crooked = [GuestRange { gpa: 1, len: 64 << 10 }];
    for tag in 0..16 {
        let op = Op::Read { offset: u64::from(tag) << 16, into: &crooked };
        assert_eq!(rig.submit(&op, Tag(tag)), Submitted::Pending);
    }
    rig.push();
    let mut reaps = 0;
    while rig.channel.in_flight() > 0 {
        // Time for the disk to end all of them: with less, a reap finds fewer.
        std::thread::sleep(Duration::from_millis(20));
        assert!(rig.readable(20_000), "the waker is silent over what was left to the next reap");
        let ended = rig.reap(&mut |_, outcome| assert_eq!(outcome, Ok(())));
        assert!(ended <= 4, "{ended} copies of 64 KiB in one reap");
        reaps += 1;
    }
    assert!(reaps >= 4);
}
