//! Swaps of running disks: a guest writes all the time, every read finds the last write, and all other bytes are where they were. What a disk has left is
//! refused by its mark: images are not locked, but where the lock is what is tested.

mod daemon;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use daemon::load;
use daemon::reader::Reader;
use daemon::terminal::Terminal;
use daemon::{Said, TestDaemon};
use ioplane_testkit::crash::CrashLoad;
use serde_json::Value;

const QUEUES: u16 = 2;
/// One for each queue.
const CORES: &str = "[[core]]\nspin_us = 200\n[[core]]\nspin_us = 200\n";
const DEPTH: u16 = 16;
/// More than the guest writes to.
const BYTES: u64 = 12 << 20;
/// Longer than anything here takes on a loaded machine.
const LONG: Duration = Duration::from_secs(120);

/// What the image holds where the guest writes nothing.
fn pattern() -> Vec<u8> {
    let mut state = 7u64;
    let words = (CrashLoad::image_bytes(QUEUES)..BYTES).step_by(8).flat_map(|at| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(at);
        // Holes, too.
        if at / (1 << 20) % 3 == 1 { [0; 8] } else { state.to_le_bytes() }
    });
    words.collect()
}

/// An image, and a daemon whose disk `data` it is, with a configuration that has nothing else.
fn with_image() -> (TestDaemon, PathBuf) {
    with_image_on(TestDaemon::new_beside_the_build("").without_locks())
}

fn with_image_on(mut daemon: TestDaemon) -> (TestDaemon, PathBuf) {
    let image = daemon.image("old.img", BYTES);
    let file = std::fs::File::options().write(true).open(&image).unwrap();
    file.write_all_at(&pattern(), CrashLoad::image_bytes(QUEUES)).unwrap();
    daemon.configure(&format!("{CORES}[[disk]]\nname = \"data\"\npath = {image:?}\nqueues = {QUEUES}\n"));
    daemon.start();
    (daemon, image)
}

fn load_on(daemon: &TestDaemon, seed: u64) -> CrashLoad {
    let mut load = CrashLoad::new(QUEUES, DEPTH, seed).unwrap();
    load.lost_after = LONG;
    load.attach(&daemon.path("data.sock")).unwrap();
    load
}

/// The guest goes on until `met`.
fn step_until(load: &mut CrashLoad, met: impl FnMut() -> bool) {
    load::step_until(load, met, String::new);
}

/// The same until the disk's swap has come so far.
fn step_until_swap_is(load: &mut CrashLoad, daemon: &TestDaemon, wanted: &str) {
    load::step_until(load, || state(daemon) == wanted, || daemon.disk("data")["swap"].to_string());
}

/// The same until the command draws its bar.
fn step_until_shown(load: &mut CrashLoad, daemon: &TestDaemon, terminal: &Terminal) {
    let told = || format!("{:?}, {}", terminal.shown(), daemon.disk("data")["swap"]);
    load::step_until(load, || terminal.shown().contains(BAR), told);
}

/// A command, while the guest goes on.
fn beside(load: &mut CrashLoad, daemon: &TestDaemon, args: &[&str]) -> Said {
    let command = std::thread::spawn(daemon.later(args));
    step_until(load, || command.is_finished());
    command.join().unwrap()
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What the guest does not write to is what it was.
fn rest_is_right(image: &Path) {
    let mut rest = vec![0; (BYTES - CrashLoad::image_bytes(QUEUES)) as usize];
    std::fs::File::open(image).unwrap().read_exact_at(&mut rest, CrashLoad::image_bytes(QUEUES)).unwrap();
    assert!(rest == pattern(), "{} differs", image.display());
}

fn state(daemon: &TestDaemon) -> String {
    daemon.disk("data")["swap"]["state"].as_str().unwrap_or("none").to_owned()
}

fn path_of(disk: &Value) -> &str {
    disk["backing"]["path"].as_str().unwrap_or_default()
}

/// Whether an image has a mark.
fn is_marked(image: &Path, mark: &str) -> bool {
    let mut text = [0u8; 4096];
    rustix::fs::getxattr(image, format!("user.ioplane.{mark}"), &mut text[..]).is_ok()
}

#[test]
fn a_running_disk_goes_on_with_another_image() {
    let (mut daemon, old) = with_image();
    let new = daemon.path("new.img");
    let mut load = load_on(&daemon, 21);
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    println!("{}", said.out.trim());
    let disk = daemon.disk("data");
    assert_eq!((path_of(&disk), &disk["swap"]["state"]), (text(&new), &"done".into()), "{disk}");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    load.settle().unwrap();
    rest_is_right(&new);
    // The old one says what has become of it, to whoever asks.
    let refused = daemon.refused(&["disk", "add", "other", "--path", text(&old)]);
    assert!(refused.contains("is superseded") && refused.contains("setfattr -x"), "{refused}");
    let refused = daemon.refused(&["publish", "disk", "other", "--path", text(&old)]);
    assert!(refused.contains("is superseded"), "{refused}");
    assert!(!is_marked(&new, "unfinished") && is_marked(&old, "superseded"));
    // It stays so.
    daemon.kill9();
    daemon.start();
    load.attach(&daemon.path("data.sock")).unwrap();
    load.settle().unwrap();
    assert_eq!(path_of(&daemon.disk("data")), text(&new));
    // And back, over what is there.
    let refused = daemon.refused(&["swap", "data", "--to", text(&old)]);
    assert!(refused.contains("--overwrite"), "{refused}");
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&old), "--overwrite"]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    load.settle().unwrap();
    rest_is_right(&old);
    assert!(!is_marked(&old, "superseded") && is_marked(&new, "superseded"));
}

#[test]
fn a_disk_goes_to_memory_and_back() {
    let (daemon, old) = with_image();
    let mut load = load_on(&daemon, 22);
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", "memory"]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    load.settle().unwrap();
    let new = daemon.path("new.img");
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    load.settle().unwrap();
    rest_is_right(&new);
    assert!(is_marked(&old, "superseded"));
}

/// A daemon that publishes two empty images, `data` and `other`.
fn exporter() -> TestDaemon {
    let mut exporter = TestDaemon::new_beside_the_build("");
    let mut text = "[[core]]\n".to_owned();
    for name in ["data", "other"] {
        let image = exporter.image(&format!("{name}.img"), BYTES);
        text += &format!("[[export]]\nname = {name:?}\npath = {image:?}\n");
    }
    exporter.configure(&text);
    exporter.start();
    exporter
}

fn uri(exporter: &TestDaemon, name: &str) -> String {
    let socket = exporter.path(&format!("{name}.sock"));
    format!("nbd+unix:///{name}?socket={}", socket.display())
}

/// The point of it: a disk of another machine becomes a local one, and the network is not needed any more. And the other way.
#[test]
fn a_disk_of_another_machine_becomes_a_local_one() {
    let mut exporter = exporter();
    let other = exporter.path("other.img");
    let data = std::fs::File::options().write(true).open(exporter.path("data.img")).unwrap();
    data.write_all_at(&pattern(), CrashLoad::image_bytes(QUEUES)).unwrap();
    let uri = |name: &str| uri(&exporter, name);
    let mut importer = TestDaemon::new_beside_the_build("[[core]]\nspin_us = 200\n");
    importer.start();
    let queues = QUEUES.to_string();
    let said = importer.cli(&["disk", "add", "data", "--remote", &uri("data"), "--queues", &queues]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut load = load_on(&importer, 23);
    let new = importer.path("new.img");
    let said = beside(&mut load, &importer, &["swap", "data", "--to", text(&new)]);
    assert_eq!(said.code, 0, "{}{}", said.err, importer.log());
    println!("{}", said.out.trim());
    let refused = importer.refused(&["disk", "add", "again", "--remote", &uri("data")]);
    assert!(refused.contains("is superseded"), "{refused}");
    let refused = importer.refused(&["swap", "data", "--to", &uri("other")]);
    assert!(refused.contains("--overwrite"), "{refused}");
    let said = beside(&mut load, &importer, &["swap", "data", "--to", &uri("other"), "--overwrite"]);
    assert_eq!(said.code, 0, "{}{}", said.err, importer.log());
    let said = beside(&mut load, &importer, &["swap", "data", "--to", text(&new), "--overwrite"]);
    assert_eq!(said.code, 0, "{}{}", said.err, importer.log());
    exporter.kill9();
    load.settle().unwrap();
    rest_is_right(&new);
    rest_is_right(&other);
    assert_eq!(importer.disk("data")["totals"]["errors"]["io"], 0);
}

/// Requests that do not end cannot be waited for, and what they write would be in no copy: the swap is refused, and the disk is as it was. Once its
/// server answers, the next swap misses none of them.
#[test]
fn a_swap_waits_for_what_was_under_way_before_its_mirror() {
    let exporter = exporter();
    let mut importer = TestDaemon::new_beside_the_build(CORES);
    importer.start();
    let queues = QUEUES.to_string();
    let uri = uri(&exporter, "data");
    let said = importer.cli(&["disk", "add", "data", "--remote", &uri, "--queues", &queues]);
    assert_eq!(said.code, 0, "{}", said.err);
    let mut load = load_on(&importer, 27);
    let new = importer.path("new.img");
    exporter.signal("STOP");
    // Whatever it has is under way now.
    load::step_until_remote(&mut load, &importer, |remote| remote["in_flight"].as_u64() >= Some(8));
    let said = beside(&mut load, &importer, &["swap", "data", "--to", text(&new)]);
    assert_ne!(said.code, 0, "{}", said.out);
    assert!(said.err.contains("requests of the guest do not end"), "{}", said.err);
    assert!(!new.exists(), "it was made for the swap");
    exporter.signal("CONT");
    let said = beside(&mut load, &importer, &["swap", "data", "--to", text(&new)]);
    assert_eq!(said.code, 0, "{}{}", said.err, importer.log());
    load.settle().unwrap();
    assert_eq!(importer.disk("data")["totals"]["errors"]["io"], 0);
}

#[test]
fn a_swap_that_is_cancelled_leaves_the_disk_as_it_was() {
    let (daemon, old) = with_image();
    let new = daemon.path("new.img");
    let mut load = load_on(&daemon, 24);
    let begin = ["swap", "data", "--to", text(&new), "--rate", "4K", "--detach"];
    let said = beside(&mut load, &daemon, &begin);
    assert_eq!(said.code, 0, "{}", said.err);
    step_until(&mut load, || daemon.disk("data")["swap"]["copied"].as_u64() > Some(0));
    assert_eq!(state(&daemon), "copying");
    assert!(is_marked(&new, "unfinished"));
    // One thing at a time.
    for args in [
        &["disk", "resize", "data", "16M"][..],
        &["disk", "replace", "data", "--memory", "16M"],
        &["disk", "remove", "data", "--force"],
        &["swap", "data", "--to", "memory"],
        &["upgrade"],
    ] {
        let refused = daemon.refused(args);
        assert!(refused.contains("is being swapped"), "{args:?}: {refused}");
    }
    let said = beside(&mut load, &daemon, &["swap", "data", "--cancel"]);
    assert_eq!(said.code, 0, "{}", said.err);
    assert_eq!(state(&daemon), "cancelled");
    assert!(!new.exists(), "what was made for it is gone");
    // Ctrl-C does the same.
    let mut command = Command::new(env!("CARGO_BIN_EXE_ioplane"));
    command.arg("--socket").arg(daemon.path("control.sock")).args(&begin[..6]);
    let mut command = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    step_until(&mut load, || {
        daemon.disk("data")["swap"]["copied"].as_u64() > Some(0) && state(&daemon) == "copying"
    });
    daemon.signal_to(command.id().into(), "INT");
    step_until(&mut load, || command.try_wait().unwrap().is_some());
    assert_eq!(command.wait().unwrap().code(), Some(1));
    assert_eq!(state(&daemon), "cancelled");
    assert!(daemon.refused(&["swap", "data", "--cancel"]).contains("not being swapped"));
    load.settle().unwrap();
    assert_eq!(path_of(&daemon.disk("data")), text(&old));
    assert!(!is_marked(&old, "superseded"));
    rest_is_right(&old);
    assert_eq!(daemon.disk("data")["totals"]["errors"]["io"], 0);
}

/// The guest does not wait for a network that it does not need.
#[test]
fn a_target_whose_server_dies_leaves_the_disk_as_it_was() {
    let mut exporter = exporter();
    let (daemon, old) = with_image();
    let to = uri(&exporter, "other");
    let mut load = load_on(&daemon, 27);
    let begin = ["swap", "data", "--to", &to, "--overwrite", "--detach", "--rate", "64K"];
    let said = beside(&mut load, &daemon, &begin);
    assert_eq!(said.code, 0, "{}", said.err);
    step_until(&mut load, || daemon.disk("data")["swap"]["copied"].as_u64() > Some(0));
    exporter.kill9();
    step_until(&mut load, || state(&daemon) == "failed");
    let disk = daemon.disk("data");
    let error = disk["swap"]["error"].as_str().unwrap();
    assert!(error.contains("the new backing failed: Connection timed out"), "{error}");
    load.settle().unwrap();
    assert_eq!((path_of(&disk), disk["totals"]["errors"]["io"].as_u64()), (text(&old), Some(0)), "{disk}");
    rest_is_right(&old);
    assert!(!is_marked(&old, "superseded"));
    // What got there is known to be no copy, and may be overwritten.
    exporter.start();
    let refused = daemon.refused(&["disk", "add", "again", "--remote", &to]);
    assert!(refused.contains("is an unfinished copy"), "{refused}");
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", &to]);
    assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
    let refused = daemon.refused(&["swap", "data", "--to", &to]);
    assert!(refused.contains("is on") && refused.contains("already"), "{refused}");
    load.settle().unwrap();
    rest_is_right(&exporter.path("other.img"));
}

/// Room for a part of it.
#[test]
fn a_target_that_is_full_leaves_the_disk_as_it_was() {
    let (daemon, old) = with_image();
    let small = daemon.path("small");
    std::fs::create_dir(&small).unwrap();
    let mounted =
        rustix::mount::mount("small", &small, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=4m"));
    if let Err(why) = mounted {
        eprintln!("SKIPPED: a swap to a full file system was NOT tested: mounting one: {why}");
        return;
    }
    let new = small.join("new.img");
    let mut load = load_on(&daemon, 25);
    let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
    let settled = load.settle();
    let (disk, gone) = (daemon.disk("data"), !new.exists());
    let unmounted = rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH);
    settled.unwrap();
    unmounted.unwrap();
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(said.err.contains("No space left") && said.err.contains("make room"), "{}", said.err);
    assert!(gone, "what was made for it is gone");
    assert_eq!((path_of(&disk), &disk["swap"]["state"]), (text(&old), &"failed".into()), "{disk}");
    assert_eq!(disk["totals"]["errors"]["io"], 0, "{disk}");
    rest_is_right(&old);
}

#[test]
fn what_cannot_be_swapped_to_is_said() {
    let (daemon, old) = with_image_on(TestDaemon::new_beside_the_build(""));
    let refused = |args: &[&str], words: &str| {
        let said = daemon.refused(&[&["swap", "data", "--to"], args].concat());
        assert!(said.contains(words), "{args:?}: {said}");
    };
    refused(&[text(&old)], "--overwrite");
    refused(&[text(&old), "--overwrite"], "in use");
    refused(&["/nowhere/new.img"], "/nowhere/new.img");
    let longer = daemon.image("longer.img", 2 * BYTES);
    refused(&[text(&longer)], "one size");
    refused(&["memory", "--rate", "1"], "never end");
    // Another disk uses it: it keeps its length.
    let said = daemon.cli(&["disk", "add", "other", "--path", text(&longer)]);
    assert_eq!(said.code, 0, "{}", said.err);
    refused(&[text(&longer), "--overwrite"], "in use");
    assert_eq!(daemon.disk("data")["swap"], Value::Null);
    assert_eq!(std::fs::metadata(&longer).unwrap().len(), 2 * BYTES);
}

/// Killed at a moment of the swap: the next daemon serves the one backing that has everything, and the other is not to be used.
#[cfg(feature = "kill-points")]
#[test]
fn a_daemon_that_is_killed_in_a_swap_comes_back_with_the_disk_whole() {
    for (moment, switched) in [
        ("begun", false),
        ("mirroring", false),
        ("synced", false),
        ("marked", false),
        ("unmarked", false),
        ("recorded", true),
        ("failed", true),
        ("undone", false),
        ("switched", true),
    ] {
        let (mut daemon, old) = with_image();
        let new = daemon.path("new.img");
        let mut load = load_on(&daemon, 26);
        std::fs::write(daemon.path("kill"), format!("swap {moment}")).unwrap();
        let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
        assert_ne!(said.code, 0, "{moment}: {}", said.out);
        daemon.kill9();
        std::fs::remove_file(daemon.path("kill")).unwrap();
        assert_eq!(
            is_marked(&new, "unfinished"),
            !["unmarked", "recorded", "failed", "undone", "switched"].contains(&moment),
            "{moment}"
        );
        daemon.start();
        let end = Instant::now() + LONG;
        while load.attach(&daemon.path("data.sock")).is_err() {
            assert!(Instant::now() < end, "{moment}: {}", daemon.log());
        }
        let (right, wrong) = if switched { (&new, &old) } else { (&old, &new) };
        assert_eq!(path_of(&daemon.disk("data")), text(right), "{moment}");
        load.settle().unwrap_or_else(|why| panic!("{moment}: {why}"));
        rest_is_right(right);
        let refused = daemon.refused(&["disk", "add", "other", "--path", text(wrong)]);
        let why = if switched { "is superseded" } else { "is an unfinished copy" };
        assert!(refused.contains(why), "{moment}: {refused}");
        if !switched {
            // Begun anew, over what the dead one has left.
            let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
            assert_eq!(said.code, 0, "{moment}: {}{}", said.err, daemon.log());
            load.settle().unwrap();
            rest_is_right(&new);
        }
    }
}

/// The new backing fails when it is already noted that the disk is on it: nothing that it lacks has been answered, and all of that is undone, whether
/// it can still be marked or not.
#[cfg(feature = "kill-points")]
#[test]
fn a_target_that_fails_in_the_commit_leaves_the_disk_as_it_was() {
    for how in ["swap fails", "swap fails unmarkable"] {
        let (mut daemon, old) = with_image();
        let new = daemon.path("new.img");
        let mut load = load_on(&daemon, 28);
        std::fs::write(daemon.path("kill"), how).unwrap();
        let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
        let failed = said.err.contains("the new backing failed: Input/output error");
        assert!(said.code == 1 && failed, "{how}: {}", said.err);
        assert_eq!((state(&daemon).as_str(), path_of(&daemon.disk("data"))), ("failed", text(&old)));
        assert!(!new.exists() && !is_marked(&old, "superseded"));
        let complains = daemon.log().contains("an unfinished copy cannot be marked");
        assert_eq!(complains, how.ends_with("unmarkable"), "{}", daemon.log());
        std::fs::remove_file(daemon.path("kill")).unwrap();
        load.settle().unwrap();
        rest_is_right(&old);
        assert_eq!(daemon.disk("data")["totals"]["errors"]["io"], 0);
        // What is noted is the old one, too.
        daemon.kill9();
        daemon.start();
        load.attach(&daemon.path("data.sock")).unwrap();
        let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
        assert_eq!(said.code, 0, "{}{}", said.err, daemon.log());
        load.settle().unwrap();
        rest_is_right(&new);
    }
}

/// A guest that writes everywhere, as fast as it can, while its disk is swapped with this option; what is left when both backings are written at first, and
/// whether the guest was ever held. How much slower it is then counts in crates/storage/tests/hold.rs, by a clock of the test.
fn outrun(more: &[&str]) -> (u64, bool) {
    const DISK: u64 = 128 << 20;
    const SECTORS: u64 = (64 << 10) / 512;
    let mut daemon =
        TestDaemon::new_beside_the_build(&format!("{CORES}[[disk]]\nname = \"data\"\nmemory = \"128M\"\n"));
    daemon.start();
    let mut guest = Reader::connect(&daemon, "data");
    let (mut written, mut flying, mut chunk) = (0u64, 0usize, 0u64);
    let mut write = || {
        while guest.write(chunk * SECTORS) {
            (chunk, flying) = ((chunk + 1) % (DISK / (64 << 10)), flying + 1);
        }
        let ended = guest.reap();
        (written, flying) = (written + ended as u64, flying - ended);
        std::thread::yield_now();
        written
    };
    let new = daemon.path("new.img");
    // The copy takes two seconds a pass, in each of which the guest is everywhere.
    let swap = [&["swap", "data", "--to", text(&new), "--rate", "64M", "--detach"], more].concat();
    let said = daemon.cli(&swap);
    assert_eq!(said.code, 0, "{}", said.err);
    let (mut mirrored, mut was_held) = (0, false);
    let end = Instant::now() + LONG;
    let swap = loop {
        let look = Instant::now() + Duration::from_millis(100);
        while Instant::now() < look {
            write();
        }
        let swap = daemon.disk("data")["swap"].clone();
        was_held |= swap["holding"] == true;
        match swap["state"].as_str().unwrap() {
            "copying" => assert!(Instant::now() < end, "{swap}"),
            "mirroring" => mirrored = mirrored.max(swap["left"].as_u64().unwrap()),
            _ if swap["pause_us"].is_u64() => break swap,
            _ => {}
        }
    };
    assert_eq!((&swap["state"], &swap["holding"]), (&"done".into(), &false.into()), "{swap}");
    // It goes on: more than it had in flight when it was let go.
    let before = write();
    while write() < before + 1000 {
        assert!(Instant::now() < end, "{before} writes, and no more");
    }
    assert_eq!(daemon.disk("data")["totals"]["errors"]["io"], 0);
    (mirrored, was_held)
}

#[test]
fn a_guest_that_writes_faster_than_the_copy_is_held_if_somebody_says_so() {
    let (mirrored, was_held) = outrun(&[]);
    println!("not held: {} MiB are left when mirroring begins", mirrored >> 20);
    assert!(mirrored > 64 << 20 && !was_held, "{mirrored}");
    let (mirrored, was_held) = outrun(&["--hold", "8M"]);
    println!("held: {} MiB", mirrored >> 20);
    assert!(mirrored <= 32 << 20 && was_held, "{mirrored}");
    let (daemon, _) = with_image();
    let new = daemon.path("new.img");
    let refused = daemon.refused(&["swap", "data", "--to", text(&new), "--hold", "1M"]);
    assert!(refused.contains("give at least 4M"), "{refused}");
}

/// What `indicatif` draws bars of, done and left.
const BAR: [char; 2] = ['█', '░'];
/// Erases the line of the cursor.
const ERASE: &str = "\x1b[2K";

/// A bar was drawn, with bytes beside it; and it was taken away before what the command says in the end, which has `words`.
fn drawn_and_cleared(shown: &str, words: &str) {
    let bar = shown.rfind(BAR).unwrap_or_else(|| panic!("no bar: {shown:?}"));
    let line = &shown[bar..];
    assert!(line.contains("/12.00 MiB") && line.contains("/s"), "{line:?}");
    let erased = bar + line.find(ERASE).unwrap_or_else(|| panic!("the bar stays: {line:?}"));
    let said = shown.find(words).unwrap_or_else(|| panic!("{words:?} is not said: {shown:?}"));
    assert!(erased < said, "{words:?} is said beside the bar: {shown:?}");
}

#[test]
fn a_bar_is_drawn_on_a_terminal_and_taken_away() {
    let (daemon, _) = with_image();
    let new = daemon.path("new.img");
    let mut load = load_on(&daemon, 31);
    let terminal = Terminal::start(&daemon, &["swap", "data", "--to", text(&new), "--rate", "8M"]);
    step_until(&mut load, || state(&daemon) == "done");
    let (code, shown) = terminal.end();
    assert_eq!(code, 0, "{shown}");
    drawn_and_cleared(&shown, "done: on");
    load.settle().unwrap();
    rest_is_right(&new);
    // Nobody sees one without a terminal, or with -q.
    let back = [&["swap", "data", "--to", "memory"][..], &["--rate", "8M"]].concat();
    let said = beside(&mut load, &daemon, &back);
    assert!(said.code == 0 && !said.err.contains(BAR) && !said.out.contains(BAR), "{}{}", said.out, said.err);
    let other = daemon.path("other.img");
    let terminal = Terminal::start(&daemon, &["-q", "swap", "data", "--to", text(&other), "--rate", "8M"]);
    step_until(&mut load, || path_of(&daemon.disk("data")) == text(&other));
    let (code, shown) = terminal.end();
    assert!(code == 0 && !shown.contains(BAR), "{shown:?}");
    load.settle().unwrap();
}

#[test]
fn ctrl_c_while_a_bar_is_drawn_cancels_the_swap_and_a_window_that_is_closed_does_not() {
    const CTRL_C: u8 = 3;
    let (daemon, old) = with_image();
    let new = daemon.path("new.img");
    let mut load = load_on(&daemon, 32);
    let mut terminal = Terminal::start(&daemon, &["swap", "data", "--to", text(&new), "--rate", "1M"]);
    step_until_shown(&mut load, &daemon, &terminal);
    terminal.press(CTRL_C);
    step_until_swap_is(&mut load, &daemon, "cancelled");
    let (code, shown) = terminal.end();
    assert_eq!(code, 1, "{shown:?}");
    drawn_and_cleared(&shown, "was cancelled");
    let disk = daemon.disk("data");
    assert_eq!((path_of(&disk), &disk["totals"]["errors"]["io"]), (text(&old), &0.into()), "{disk}");
    load.settle().unwrap();
    rest_is_right(&old);

    // The command is gone with its terminal, and nobody has cancelled anything.
    let terminal = Terminal::start(&daemon, &["swap", "data", "--to", text(&new), "--rate", "4M"]);
    step_until_shown(&mut load, &daemon, &terminal);
    terminal.close();
    assert_ne!(state(&daemon), "cancelled");
    step_until_swap_is(&mut load, &daemon, "done");
    assert_eq!(path_of(&daemon.disk("data")), text(&new));
    load.settle().unwrap();
    rest_is_right(&new);
}

/// Each rule that the daemon keeps is taken out in turn, and what it is for goes wrong.
#[cfg(feature = "kill-points")]
mod without {
    use super::*;

    /// Swaps beside a guest to `new.img`, kills the daemon at `moment` if it does not end before, and starts the next one; `reboots`: what is in the run
    /// directory goes.
    fn killed_at(
        rule: Option<&'static str>,
        moment: &str,
        reboots: bool,
    ) -> (TestDaemon, CrashLoad, PathBuf) {
        let (mut daemon, _) =
            with_image_on(TestDaemon::new_beside_the_build("").without_locks().without_rule(rule));
        let new = daemon.path("new.img");
        let mut load = load_on(&daemon, 29);
        std::fs::write(daemon.path("kill"), format!("swap {moment}")).unwrap();
        let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&new)]);
        assert_ne!(said.code, 0, "{moment}: {}", said.out);
        daemon.kill9();
        std::fs::remove_file(daemon.path("kill")).unwrap();
        if reboots {
            std::fs::remove_file(daemon.path("state.json")).unwrap();
        }
        daemon.start();
        (daemon, load, new)
    }

    /// The host loses power in a swap.
    fn power(rule: Option<&'static str>) -> Option<&'static str> {
        let (daemon, _, new) = killed_at(rule, "mirroring", true);
        let said = daemon.cli(&["disk", "add", "other", "--path", text(&new)]);
        (said.code == 0).then_some("a copy that is not whole is a disk")
    }

    /// The daemon dies when the guest has the new backing.
    fn switched(rule: Option<&'static str>) -> Option<&'static str> {
        let (daemon, mut load, new) = killed_at(rule, "switched", false);
        daemon.until(|| load.attach(&daemon.path("data.sock")).is_ok());
        if path_of(&daemon.disk("data")) != text(&new) {
            return Some("the disk is on what it has left");
        }
        load.settle().unwrap();
        None
    }

    /// Somebody wants what the disk has left.
    fn left(rule: Option<&'static str>) -> Option<&'static str> {
        let (daemon, old) =
            with_image_on(TestDaemon::new_beside_the_build("").without_locks().without_rule(rule));
        let mut load = load_on(&daemon, 30);
        let said = beside(&mut load, &daemon, &["swap", "data", "--to", text(&daemon.path("new.img"))]);
        assert_eq!(said.code, 0, "{}", said.err);
        load.settle().unwrap();
        let said = daemon.cli(&["disk", "add", "other", "--path", text(&old)]);
        (said.code == 0).then_some("what the disk has left is another one's")
    }

    #[test]
    fn each_rule_of_the_daemon_is_needed() {
        assert_eq!([power, switched, left].map(|test| test(None)), [None; 3]);
        assert_eq!(power(Some("TargetMarked")), Some("a copy that is not whole is a disk"));
        assert_eq!(switched(Some("SwitchRecorded")), Some("the disk is on what it has left"));
        assert_eq!(left(Some("OldRefused")), Some("what the disk has left is another one's"));
    }
}
