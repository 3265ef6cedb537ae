//! `kill -9` at every named moment of a request's life: the guest sees a pause and no error, each request is answered
//! exactly once. The same without the journal must go wrong.
//!
//! Needs the feature `kill-points`; `script/test` runs it with that.
#![cfg(feature = "kill-points")]

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ioplane_testkit::crash::{Campaign, CrashLoad, End, Victim};
use ioplane_testkit::driver::DiskOp;
use ioplane_testkit::slow::SlowDisk;

const QUEUES: u16 = 2;
const DEPTH: u16 = 16;
const TIMES: u32 = 10;
const PATIENCE: Duration = Duration::from_secs(60);

struct Stage {
    directory: tempfile::TempDir,
    cores: u32,
    without_journal: bool,
    packed: bool,
}

impl Stage {
    fn new(without_journal: bool) -> Self {
        // Where the build is: tmpfs may be what the system's own place for files is, and has no O_DIRECT.
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let image = std::fs::File::create(directory.path().join("disk.img")).unwrap();
        image.set_len(CrashLoad::image_bytes(QUEUES)).unwrap();
        Stage { directory, cores: 1, without_journal, packed: false }
    }

    fn packed(without_journal: bool) -> Self {
        Stage { packed: true, ..Stage::new(without_journal) }
    }

    fn load(&self, seed: u64) -> CrashLoad {
        let make = if self.packed { CrashLoad::packed } else { CrashLoad::new };
        make(QUEUES, DEPTH, seed).unwrap()
    }

    fn victim(&self, environment: &[(&str, String)]) -> Victim {
        self.victim_on(&self.directory.path().join("disk.img"), environment)
    }

    fn victim_on(&self, image: &Path, environment: &[(&str, String)]) -> Victim {
        let socket = self.directory.path().join("disk.sock");
        let mut command = Command::new(env!("CARGO_BIN_EXE_smallest"));
        command.arg(&socket).arg(image).arg(QUEUES.to_string()).arg(self.cores.to_string());
        command.envs(environment.iter().map(|(name, value)| (*name, value.as_str())));
        if self.without_journal {
            command.env("IOPLANE_WITHOUT_JOURNAL", "1");
        }
        Victim::start(command, &socket).unwrap()
    }
}

fn campaign(stage: &Stage, lost_after: Duration) -> Result<u64, String> {
    let mut load = stage.load(0x5eed);
    load.lost_after = lost_after;
    let victim = |environment: &[(&str, String)]| stage.victim(environment);
    Campaign { victim: &victim, folder: stage.directory.path(), queues: QUEUES }.every_point(&mut load, TIMES)
}

#[test]
fn every_kill_point_ten_times_and_the_guest_cannot_tell() {
    let answered = campaign(&Stage::new(false), Duration::from_secs(60)).unwrap();
    assert!(answered > 1000);
}

#[test]
fn nor_with_packed_rings() {
    let answered = campaign(&Stage::packed(false), Duration::from_secs(60)).unwrap();
    assert!(answered > 1000);
}

/// The dead daemon's requests keep landing for a second or so: late writes over newer data, late reads into buffers that the
/// guest uses again, if replay does not wait for them.
#[test]
fn a_slow_disk_in_both_directions_is_waited_for() {
    let stage = Stage::new(false);
    let bytes = CrashLoad::image_bytes(QUEUES);
    let slow = match SlowDisk::new(stage.directory.path(), bytes, 128 << 10) {
        Ok(slow) => slow,
        Err(why) => {
            // Past the harness, which keeps what passing tests print to itself.
            let _ = writeln!(std::io::stderr(), "SKIPPED: crash replay on a slow disk was NOT tested: {why}");
            return;
        }
    };
    let mut load = stage.load(0x510);
    let mut waited = Vec::new();
    for round in 0..5 {
        let mut victim = stage.victim_on(Path::new(slow.device()), &[]);
        slow.slows(victim.id()).unwrap();
        let begun = Instant::now();
        load.connect(&mut victim, PATIENCE).unwrap().unwrap();
        waited.push(begun.elapsed());
        let time = Duration::from_millis(load.between(300, 900));
        assert_eq!(load.run(&mut victim, time).unwrap(), None);
        if round < 4 {
            victim.kill();
        } else {
            // The last one is let off the leash for the final look at every block.
            std::fs::write("/sys/fs/cgroup/blkio/cgroup.procs", victim.id().to_string())
                .or_else(|_| std::fs::write("/sys/fs/cgroup/cgroup.procs", victim.id().to_string()))
                .unwrap();
            load.settle().unwrap();
        }
    }
    println!("{} requests; a new daemon waited {waited:?} for the dead one's", load.answered);
    assert!(
        waited.iter().any(|time| *time > Duration::from_millis(300)),
        "nothing was under way at any death: {waited:?}"
    );
}

#[test]
fn without_the_journal_the_same_goes_wrong() {
    let wrong = campaign(&Stage::new(true), Duration::from_secs(5))
        .expect_err("crash replay does not depend on the journal?");
    println!("without the journal: {wrong}");
}

#[test]
fn without_the_journal_packed_rings_go_wrong_too() {
    let wrong = campaign(&Stage::packed(true), Duration::from_secs(5))
        .expect_err("crash replay does not depend on the journal?");
    println!("without the journal, packed: {wrong}");
}

#[test]
fn a_request_that_kills_the_daemon_twice_stops_its_own_queue_and_nobody_elses() {
    poison(&Stage::new(false));
    poison(&Stage::packed(false));
}

/// The other queue's core may have requests in hand at both deaths.
#[test]
fn nor_that_of_another_core() {
    for _ in 0..3 {
        poison(&Stage { cores: 2, ..Stage::new(false) });
    }
}

fn poison(stage: &Stage) {
    let mut load = stage.load(1);
    load.lost_after = Duration::from_secs(20);
    // A sector of queue 0's that nothing else uses: the daemon dies whenever it has parsed a request for it.
    let poison = CrashLoad::image_bytes(QUEUES) / 512 - 8;
    let environment = [("IOPLANE_KILL_AT_SECTOR", poison.to_string())];
    load.avoid(1, poison);
    let mut victim = stage.victim(&environment);
    load.connect(&mut victim, PATIENCE).unwrap().unwrap();
    load.run(&mut victim, Duration::from_millis(100)).unwrap();
    load.plant(0, DiskOp::Read, poison).unwrap();
    assert_eq!(load.run(&mut victim, Duration::from_secs(20)).unwrap(), Some(End::Killed), "first death");
    let mut victim = stage.victim(&environment);
    if load.connect(&mut victim, PATIENCE).unwrap().is_some() {
        assert_eq!(
            load.run(&mut victim, Duration::from_secs(20)).unwrap(),
            Some(End::Killed),
            "second death"
        );
    }
    assert_eq!(victim.ended(), Some(End::Killed));
    let mut victim = stage.victim(&environment);
    load.connect(&mut victim, PATIENCE).unwrap().unwrap();
    load.give_up(0);
    let before = load.answered;
    assert_eq!(load.run(&mut victim, Duration::from_millis(500)).unwrap(), None, "no third death");
    load.settle().unwrap();
    assert!(load.answered > before, "the other queue goes on");
}
