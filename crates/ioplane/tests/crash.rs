//! `kill -9` of the daemon itself, under load: split and packed rings, one core and two, io_uring and threads, a disk that is
//! slow in both directions. The guest sees a pause and no error, each request is answered once, every read finds the last write.
//!
//! `IOPLANE_CRASH_KILLS=1000` is the long form; `script/test` takes a few dozen.
#![cfg(feature = "kill-points")]

mod daemon;

use std::io::Write;
use std::time::Duration;

use daemon::TestDaemon;
use ioplane_testkit::crash::{Campaign, CrashLoad, End};
use ioplane_testkit::slow::SlowDisk;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;
const SHORT: u32 = 48;
const PATIENCE: Duration = Duration::from_secs(60);

/// One kind of daemon.
#[derive(Debug, Clone, Copy)]
struct Kind {
    packed: bool,
    cores: usize,
    engine: &'static str,
}

impl Kind {
    fn all() -> Vec<Kind> {
        let mut all = Vec::new();
        for packed in [false, true] {
            for cores in [1, 2] {
                for engine in ["io_uring", "threads"] {
                    all.push(Kind { packed, cores, engine });
                }
            }
        }
        all
    }

    fn daemon(self, image: &str) -> TestDaemon {
        TestDaemon::new_beside_the_build(&format!(
            "{}[[disk]]\nname = \"file\"\npath = {image:?}\nqueues = {QUEUES}\nengine = \"{}\"\n",
            "[[core]]\nspin_us = 200\n".repeat(self.cores),
            self.engine
        ))
    }

    fn load(self, seed: u64) -> CrashLoad {
        let make = if self.packed { CrashLoad::packed } else { CrashLoad::new };
        make(QUEUES, DEPTH, seed).unwrap()
    }
}

fn kills() -> u32 {
    let text = std::env::var("IOPLANE_CRASH_KILLS").unwrap_or_default();
    if text.is_empty() { SHORT } else { text.parse().expect("IOPLANE_CRASH_KILLS is a number") }
}

#[test]
fn no_guest_can_tell_at_which_moment_its_daemon_was_killed() {
    let kinds = Kind::all();
    let each = kills().div_ceil(kinds.len() as u32);
    let mut sum = 0;
    for (n, kind) in kinds.into_iter().enumerate() {
        let daemon = kind.daemon("disk.img");
        daemon.image("disk.img", CrashLoad::image_bytes(QUEUES));
        let mut load = kind.load(0xdead + n as u64);
        let victim = |environment: &[(&str, String)]| daemon.victim("file", environment);
        let campaign = Campaign { victim: &victim, folder: daemon.folder.path(), queues: QUEUES };
        let outcome = campaign.mixed(&mut load, each, 2 * n);
        let (answered, hits) = outcome.unwrap_or_else(|why| panic!("{kind:?}: {why}\n{}", daemon.log()));
        println!("{kind:?}: {answered} requests over {each} kills, {hits} at the moment named");
        assert!(answered > u64::from(each), "{kind:?}: {answered} requests");
        sum += hits;
    }
    assert!(sum > kills() / 4, "{sum} of {} kills were at the moment named", kills());
}

/// What no campaign may pass: the same without the journal.
#[test]
fn without_the_journal_the_daemons_guests_can_tell() {
    for kind in [
        Kind { packed: false, cores: 1, engine: "io_uring" },
        Kind { packed: true, cores: 2, engine: "threads" },
    ] {
        let daemon = kind.daemon("disk.img");
        daemon.image("disk.img", CrashLoad::image_bytes(QUEUES));
        let mut load = kind.load(3);
        load.lost_after = Duration::from_secs(5);
        let victim = |environment: &[(&str, String)]| {
            let without = [("IOPLANE_WITHOUT_JOURNAL", "1".to_owned())];
            daemon.victim("file", &[environment, &without].concat())
        };
        let campaign = Campaign { victim: &victim, folder: daemon.folder.path(), queues: QUEUES };
        let wrong = campaign.mixed(&mut load, 60, 0).expect_err("the daemon does not depend on its journal?");
        println!("{kind:?} without the journal: {wrong}");
    }
}

/// A daemon on a slow disk is killed; the next one's disk is fast, so whatever of the dead one's is still to come would come
/// over newer data, and into buffers that the guest uses again. Twice in a row, too: the second dies while it waits or replays.
fn slow_then_fast(kind: Kind, slow: &SlowDisk, rounds: u32, without_fence: bool) -> Result<u64, String> {
    let daemon = kind.daemon(slow.device());
    let mut load = kind.load(0x510);
    load.lost_after = Duration::from_secs(30);
    let without: Vec<_> =
        without_fence.then(|| ("IOPLANE_WITHOUT_FENCE", "1".to_owned())).into_iter().collect();
    for round in 0..rounds {
        let mut victim = daemon.victim("file", &without);
        load.connect(&mut victim, PATIENCE)?.ok_or("the slow daemon died")?;
        slow.slows(victim.id()).map_err(|error| error.to_string())?;
        let time = Duration::from_millis(load.between(300, 900));
        if let Some(end) = load.run(&mut victim, time)? {
            return Err(format!("the slow daemon died by itself: {end:?}"));
        }
        victim.kill();
        if round % 2 == 1 {
            let mut second = daemon.victim("file", &without);
            let gap = Duration::from_millis(load.between(50, 300));
            let _ = load.connect(&mut second, gap);
            second.kill();
        }
        let mut victim = daemon.victim("file", &without);
        load.connect(&mut victim, PATIENCE)?.ok_or("the fast daemon died")?;
        if load.run(&mut victim, Duration::from_millis(1500))? == Some(End::Otherwise) {
            return Err("the fast daemon died by itself".into());
        }
        load.settle()?;
        victim.kill();
    }
    Ok(load.answered)
}

fn slow_disk(folder: &std::path::Path) -> Option<SlowDisk> {
    match SlowDisk::new(folder, CrashLoad::image_bytes(QUEUES), 128 << 10) {
        Ok(slow) => Some(slow),
        Err(why) => {
            // Past the harness, which keeps what passing tests print to itself.
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: kills of the daemon on a slow disk were NOT tested: {why}"
            );
            None
        }
    }
}

#[test]
fn a_daemon_waits_for_what_the_dead_one_left_on_a_slow_disk() {
    let rounds = (kills() / 24).max(2);
    for kind in [
        Kind { packed: false, cores: 1, engine: "io_uring" },
        Kind { packed: true, cores: 2, engine: "threads" },
    ] {
        // A disk of zeros for each.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let Some(slow) = slow_disk(folder.path()) else { return };
        let answered =
            slow_then_fast(kind, &slow, rounds, false).unwrap_or_else(|why| panic!("{kind:?}: {why}"));
        println!("{kind:?}: {answered} requests over {rounds} rounds on a slow disk");
    }
}

/// The control: a daemon that does not wait.
#[test]
fn without_the_fence_late_writes_of_a_dead_daemon_are_noticed() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let Some(slow) = slow_disk(folder.path()) else { return };
    let kind = Kind { packed: false, cores: 1, engine: "io_uring" };
    let wrong = slow_then_fast(kind, &slow, 10, true).expect_err("nothing depends on the fence?");
    println!("without the fence: {wrong}");
    assert!(wrong.contains("was acknowledged"), "another error: {wrong}");
}
