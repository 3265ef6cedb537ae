//! Histories of reads, writes and flushes through connections that are lost again and again: they are those of a disk whose requests
//! each take effect once (docs/decisions/0044-remote-requests-once.md), and the checker notices when a rule of replays is taken out.
//!
//! Each 4 KiB block is a register, each written value unique. A history is checked block by block: some order of the operations must
//! explain all reads, in which an operation that ended before another began comes first (Wing and Gong's search).

#![expect(clippy::disallowed_types, reason = "servers of the tests, on threads of their own")]

mod register;
#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use ioplane_memory::GuestRange;
use ioplane_nbd::import::{Confirmed, Fence};
use ioplane_nbd::mutation::Rule;
use ioplane_nbd::spec::*;
use ioplane_storage::{Op, Submitted, Tag};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng};
use register::*;
use rig::Rig;
use scripted::*;

const BLOCK: u64 = 4096;
/// Few, so that many operations meet on each.
const BLOCKS: u64 = 4;
const DEPTH: u16 = 8;
const OPERATIONS: u32 = 120;

/// A server that mixes the order of what it has, cuts connections, and leaves requests of lost ones to be carried out late.
struct Disorder {
    disk: Arc<Disk>,
    seed: u64,
    /// Writes of connections that are gone, which the server still has.
    late: Mutex<VecDeque<Asked>>,
    /// It carries them out by and by, as servers without a fence may.
    lingers: bool,
}

impl Disorder {
    fn carry_out_late(&self) {
        if let Some(asked) = self.late.lock().unwrap().pop_front() {
            self.disk.carry_out(&asked);
        }
    }

    fn serve(&self, mut session: Session) {
        let mut seed = self.seed ^ u64::from(session.number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        // The first connections are cut after a while, at any byte of what is sent or read.
        if session.number < 12 {
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
            let wait = held.is_empty() || (held.len() < 6 && !one_in(3, &mut seed));
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
            if self.lingers && one_in(16, &mut seed) {
                self.carry_out_late();
            }
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
                1 if asked.command == NBD_CMD_WRITE => self.late.lock().unwrap().push_back(asked),
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
            while !self.0.late.lock().unwrap().is_empty() {
                self.0.carry_out_late();
            }
            Ok(())
        })
    }
}

/// Runs one history; `None` if it is that of a disk, else what is wrong with it.
fn history(seed: u64, lingers: bool) -> Option<String> {
    let disk = Disk::new(BLOCKS * BLOCK);
    let disorder = Disorder { disk: disk.clone(), seed, late: Mutex::default(), lingers };
    let disorder = Arc::new(disorder);
    let serving = disorder.clone();
    let terms = Terms { bytes: BLOCKS * BLOCK, instance: Some("one".into()), ..Terms::default() };
    let server = Server::start(terms, move |session| serving.serve(session));
    let fence = Some(Arc::new(LateWritesLand(disorder.clone())) as Arc<dyn Fence>);
    // From the guest's memory, or from copies.
    let retain = if seed.is_multiple_of(2) { 1 << 20 } else { 0 };
    let import = import(ioplane_nbd::import::ImportOptions { fence, retain, ..server.options() });
    let mut rig = Rig::new(&*import, DEPTH);
    let mut random = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed.to_le_bytes(); 4].concat());
    let mut clock = 0u64;
    let mut flying: Vec<Option<(u64, u64, u64, bool)>> = vec![None; DEPTH.into()];
    let mut events: Vec<Vec<Event>> = vec![Vec::new(); BLOCKS as usize];
    let (mut begun, mut value) = (0, 0u64);
    while begun < OPERATIONS || rig.channel.in_flight() > 0 {
        while begun < OPERATIONS
            && let Some(tag) = flying.iter().position(Option::is_none)
        {
            begun += 1;
            clock += 1;
            let block = random.next_u64() % BLOCKS;
            let count = (1 + random.next_u64() % 3).min(BLOCKS - block);
            // A place of its own for each in flight: a guest leaves a buffer alone while it is being written from.
            let gpa = tag as u64 * 3 * BLOCK;
            let range = [GuestRange { gpa, len: (count * BLOCK) as u32 }];
            let kind = random.next_u64() % 8;
            if kind == 7 {
                if rig.submit(&Op::Flush, Tag(tag as u16)) == Submitted::Pending {
                    flying[tag] = Some((0, 0, clock, false));
                }
                continue;
            }
            let write = kind < 4;
            if write {
                value += 1;
                let bytes: Vec<u8> = value.to_le_bytes().repeat((count * BLOCK / 8) as usize);
                rig.view.write(gpa, &bytes).unwrap();
            }
            let offset = block * BLOCK;
            let op =
                if write { Op::Write { offset, from: &range } } else { Op::Read { offset, into: &range } };
            assert_eq!(rig.submit(&op, Tag(tag as u16)), Submitted::Pending);
            flying[tag] = Some((block, count, if write { clock << 32 | value } else { clock << 32 }, write));
        }
        rig.push();
        let mut ended = Vec::new();
        rig.reap(&mut |tag, outcome| ended.push((tag, outcome)));
        for (tag, outcome) in &ended {
            if let Err(fault) = outcome {
                return Some(format!("{tag:?} failed: {fault}"));
            }
            clock += 1;
            let (block, count, noted, write) = flying[usize::from(tag.0)].take().unwrap();
            for at in 0..count {
                let gpa = u64::from(tag.0) * 3 * BLOCK + at * BLOCK;
                let mut bytes = vec![0; BLOCK as usize];
                rig.view.read(gpa, &mut bytes).unwrap();
                let value = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                if !bytes.chunks(8).all(|word| word == value.to_le_bytes()) {
                    return Some(format!("a block of parts of several writes at {block}"));
                }
                let value = if write { noted & 0xffff_ffff } else { value };
                events[(block + at) as usize].push(Event { begun: noted >> 32, ended: clock, value, write });
            }
        }
        if ended.is_empty()
            && rig.channel.in_flight() > 0
            && !rig.channel.held_back()
            && !rig.readable(20_000)
        {
            return Some(format!("nothing for 20 s: {:#?}", import.status()));
        }
    }
    // What the disk holds in the end is one read more.
    if lingers {
        while !disorder.late.lock().unwrap().is_empty() {
            disorder.carry_out_late();
        }
    }
    let bytes = disk.bytes.lock().unwrap();
    for (block, events) in events.iter_mut().enumerate() {
        let value = u64::from_le_bytes(bytes[block * BLOCK as usize..][..8].try_into().unwrap());
        events.push(Event { begun: clock + 1, ended: clock + 1, value, write: false });
        if !linearizable(events.clone()) {
            return Some(format!("block {block} (seed {seed}) is no register: {events:#?}"));
        }
    }
    None
}

const SEEDS: u64 = 60;

#[test]
fn every_history_is_that_of_a_disk() {
    for seed in 1..=SEEDS {
        if let Some(wrong) = history(seed, true) {
            panic!("seed {seed}: {wrong}");
        }
    }
}

/// With each rule taken out, some history is not that of a disk. One test, since a rule is out for the whole process.
#[cfg(feature = "mutations")]
fn some_history_is_wrong_without(rule: Rule) {
    ioplane_nbd::mutation::remove(Some(rule));
    let wrong = (1..=SEEDS * 5).find_map(|seed| history(seed, true).map(|wrong| (seed, wrong)));
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
