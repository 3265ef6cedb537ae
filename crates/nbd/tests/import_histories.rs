//! Histories of reads, writes and flushes through connections that are lost again and again: they are those of a disk whose requests
//! each take effect once (docs/decisions/0044-remote-requests-once.md), and the checker notices when a rule of replays is taken out.
//!
//! Four queues of one import, 16 requests each, on eight blocks: why they are not four imports stands in guest/mod.rs. How many histories:
//! [`SEEDS`], or `IOPLANE_HISTORIES`.
//!
//! Each 4 KiB block is a register, each written value unique. A history is checked block by block: some order of the operations must
//! explain all reads, in which an operation that ended before another began comes first (Wing and Gong's search).

#![expect(clippy::disallowed_types, reason = "servers of the tests, on threads of their own")]

mod guest;
mod register;
#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use guest::{BYTES, Guest, histories};
use ioplane_nbd::import::{Confirmed, Fence};
#[cfg(feature = "mutations")]
use ioplane_nbd::mutation::Rule;
use ioplane_nbd::spec::*;
use proptest::prelude::*;
use proptest::test_runner::Config;
use register::*;
use scripted::*;

/// Of all queues.
const REQUESTS: u32 = 320;
/// Of all queues: so many connections are cut at most.
const CUTS: u32 = 32;
/// Requests that a connection's server has before it carries one out.
const HELD: usize = 12;

/// A server that mixes the order of what it has, cuts connections, and leaves requests of lost ones to be carried out late.
struct Disorder {
    disk: Arc<Disk>,
    seed: u64,
    /// Requests that it has carried out.
    carried_out: AtomicU64,
    /// Writes of connections that are gone, which the server still has: it carries them out behind so many others, as servers without a fence may.
    late: Mutex<Vec<(u64, Asked)>>,
}

impl Disorder {
    /// What is due, or all that is late.
    fn carry_out_late(&self, all: bool) {
        let now = self.carried_out.load(Ordering::Relaxed);
        // Whoever finds nothing more to be late may rely on it.
        let mut late = self.late.lock().unwrap();
        let due = late.extract_if(.., |(due, _)| all || *due <= now);
        due.for_each(|(_, asked)| drop(self.disk.carry_out(&asked)));
    }

    fn serve(&self, mut session: Session) {
        let mut seed = self.seed ^ u64::from(session.number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        // The first connections are cut after a while, at any byte of what is sent or read.
        if session.number < CUTS {
            let cut = (dice(&mut seed) % 90_000) as usize;
            if one_in(2, &mut seed) {
                session.sends = cut;
            } else {
                session.reads = cut;
            }
        }
        let mut held: Vec<Asked> = Vec::new();
        // Replies to what has been carried out.
        let mut unsaid: Vec<Vec<u8>> = Vec::new();
        loop {
            // Reads on while something is there, so that there is an order to mix.
            let wait = held.is_empty() || (held.len() < HELD && !one_in(3, &mut seed));
            if wait && readable(&session.stream, held.is_empty() && unsaid.is_empty()) {
                let Some(asked) = session.next() else { break };
                held.push(asked);
                continue;
            }
            if !unsaid.is_empty() && (held.is_empty() || one_in(4, &mut seed)) {
                let reply = unsaid.swap_remove(dice(&mut seed) as usize % unsaid.len());
                if !session.send(&reply) {
                    break;
                }
                continue;
            }
            if held.is_empty() {
                continue;
            }
            self.carry_out_late(false);
            self.carried_out.fetch_add(1, Ordering::Relaxed);
            let asked = held.swap_remove(dice(&mut seed) as usize % held.len());
            let data = self.disk.carry_out(&asked);
            let reply = session.reply(&asked, &data);
            if asked.command == NBD_CMD_WRITE {
                unsaid.push(reply);
            } else if !session.send(&reply) {
                break;
            }
        }
        // The connection is lost. What is held is carried out now, or later, or never.
        for asked in held {
            match dice(&mut seed) % 3 {
                0 => drop(self.disk.carry_out(&asked)),
                1 if asked.command == NBD_CMD_WRITE || asked.command == NBD_CMD_WRITE_ZEROES => {
                    let due = self.carried_out.load(Ordering::Relaxed) + 20 + dice(&mut seed) % 100;
                    self.late.lock().unwrap().push((due, asked));
                }
                _ => {}
            }
        }
    }
}

/// The exporter's side of the fence: everything of older connections has landed, or never will.
struct LateWritesLand(Arc<Disorder>);

impl std::fmt::Debug for LateWritesLand {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LateWritesLand")
    }
}

impl Fence for LateWritesLand {
    fn confirm<'a>(&'a self, _instance: &'a str, _epoch: u32) -> Confirmed<'a> {
        Box::pin(async {
            self.0.carry_out_late(true);
            Ok(())
        })
    }
}

/// Requests that were sent again, in all histories of this process.
static REPLAYS: AtomicU64 = AtomicU64::new(0);

/// Runs one history; `None` if it is that of a disk, else what is wrong with it.
fn history(seed: u64) -> Option<String> {
    let disk = Disk::new(BYTES);
    let carried_out = AtomicU64::new(0);
    let disorder = Disorder { disk: disk.clone(), seed, carried_out, late: Mutex::default() };
    let disorder = Arc::new(disorder);
    let serving = disorder.clone();
    let terms = Terms { bytes: BYTES, instance: Some("one".into()), ..Terms::default() };
    let server = Server::start(terms, move |session| serving.serve(session));
    let fence = Some(Arc::new(LateWritesLand(disorder.clone())) as Arc<dyn Fence>);
    // From the guest's memory, or from copies.
    let retain = if seed.is_multiple_of(2) { 1 << 20 } else { 0 };
    let import = import(ioplane_nbd::import::ImportOptions { fence, retain, ..server.options() });
    let mut guest = Guest::new(&import, seed);
    if let Err(wrong) = guest.go(&import, REQUESTS) {
        return Some(wrong);
    }
    // What the disk holds in the end is one read more.
    disorder.carry_out_late(true);
    let replays: u64 = import.status().connections.iter().map(|connection| connection.replays).sum();
    REPLAYS.fetch_add(replays, Ordering::Relaxed);
    let bytes = disk.bytes.lock().unwrap();
    guest.check(&bytes, seed)
}

/// Unless the environment says how many.
const SEEDS: u64 = 500;

#[test]
fn every_history_is_that_of_a_disk() {
    let count = histories(SEEDS);
    for seed in 1..=count {
        if let Some(wrong) = history(seed) {
            panic!("seed {seed}: {wrong}");
        }
    }
    let replays = REPLAYS.load(Ordering::Relaxed);
    println!("{count} histories, {replays} replays");
    assert!(replays > count, "hardly anything is sent again");
}

/// With each rule taken out, some history is not that of a disk. One test, since a rule is out for the whole process.
#[cfg(feature = "mutations")]
fn some_history_is_wrong_without(rule: Rule) {
    ioplane_nbd::mutation::remove(Some(rule));
    let wrong = (1..=SEEDS).find_map(|seed| history(seed).map(|wrong| (seed, wrong)));
    ioplane_nbd::mutation::remove(None);
    let Some((seed, wrong)) = wrong else { panic!("nobody notices that {rule:?} is gone") };
    let first: String = wrong.lines().take(1).collect();
    println!("without {rule:?}: seed {seed}: {first}");
}

/// Each rule in a process of its own: beside it, others run with all of them.
#[cfg(feature = "mutations")]
#[test]
fn each_rule_is_needed() {
    each_is_noticed(&["Replay", "AnsweredOnce", "OneWriter", "Fence"], "without_a_rule");
}

#[cfg(feature = "mutations")]
#[test]
fn without_a_rule() {
    let Some(name) = taken_out() else { return };
    let rules = [Rule::Replay, Rule::AnsweredOnce, Rule::OneWriter, Rule::Fence];
    some_history_is_wrong_without(*rules.iter().find(|rule| format!("{rule:?}") == name).unwrap());
}

#[test]
fn the_checker_tells_a_register_from_what_is_none() {
    let write = |begun, ended, value| Event { begun, ended, value, write: true };
    let read = |begun, ended, value| Event { begun, ended, value, write: false };
    assert!(linearizable(vec![write(1, 4, 1), read(2, 3, 0), read(2, 3, 1), read(5, 6, 1)]));
    assert!(linearizable(vec![write(1, 9, 1), write(2, 8, 2), read(3, 4, 2), read(5, 6, 1)]));
    // Back to an older value.
    assert!(!linearizable(vec![write(1, 2, 1), write(3, 4, 2), read(5, 6, 1)]));
    // Twice in effect.
    assert!(!linearizable(vec![write(1, 9, 1), write(2, 8, 2), read(3, 3, 1), read(4, 4, 2), read(5, 5, 1)]));
    // Never in effect.
    assert!(!linearizable(vec![write(1, 2, 1), read(3, 4, 0)]));
}

proptest! {
    #![proptest_config(Config { cases: 200, failure_persistence: None, ..Config::default() })]
    /// What one register has said in a row is always accepted, however the times are stretched.
    #[test]
    fn the_checker_accepts_what_a_register_says(steps in prop::collection::vec((any::<bool>(), 0u64..4, 0u64..4), 1..30)) {
        let mut value = 0;
        let events = steps.iter().enumerate().map(|(at, (write, before, after))| {
            let time = 10 * (at as u64 + 1);
            if *write {
                value = time;
            }
            Event { begun: time - before * 3, ended: time + after * 3, value, write: *write }
        });
        prop_assert!(linearizable(events.collect()));
    }
}
