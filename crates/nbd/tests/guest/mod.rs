//! A guest of a remote disk whose requests meet on a few blocks, and the history of what it has seen.
//!
//! Four clients of one disk. An exporter has one writer (docs/decisions/0052-claims.md), so they are the queues of one import, each with a connection of
//! its own, as a disk of four queues has them. Requests of one queue overlap as they like, and everybody reads everything meanwhile. Writes of the same bytes
//! are under way by one queue at a time: two connections have no order between them that a replay could keep (decision 44, "Two queues").
#![allow(dead_code, reason = "each test uses a part")]

use std::time::{Duration, Instant};

use ioplane_memory::GuestRange;
use ioplane_nbd::import::Import;
use ioplane_storage::{Op, Submitted, Tag};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::register::{Event, linearizable};
use super::rig::Rig;

pub const BLOCK: u64 = 4096;
/// Few, so that many requests meet on each.
pub const BLOCKS: u64 = 8;
pub const BYTES: u64 = BLOCKS * BLOCK;
pub const QUEUES: usize = 4;
/// Requests in flight of each queue.
pub const DEPTH: u16 = 16;
/// Blocks of one request, at most.
const LONGEST: u64 = 3;
/// Of sixteen requests: nine write, two flush, five read.
const FLUSHES: u64 = 10;
/// For what takes a second on a machine that has time.
const LIMIT: Duration = Duration::from_secs(60);

/// How many histories a test goes through: `usual`, or what the environment says.
pub fn histories(usual: u64) -> u64 {
    match std::env::var("IOPLANE_HISTORIES") {
        Ok(count) => count.parse().expect("IOPLANE_HISTORIES is a number"),
        Err(_) => usual,
    }
}

/// What a queue has in flight.
#[derive(Debug, Clone, Copy)]
struct Flying {
    block: u64,
    count: u64,
    begun: u64,
    /// What is written, if it writes.
    value: Option<u64>,
}

/// One queue of the guest.
pub struct Queue {
    pub rig: Rig,
    flying: Vec<Option<Flying>>,
}

impl Queue {
    fn new(import: &Import) -> Queue {
        Queue { rig: Rig::new(import, DEPTH), flying: vec![None; DEPTH.into()] }
    }

    fn writes(&self, block: u64, count: u64) -> bool {
        let overlaps = |f: &Flying| f.value.is_some() && f.block < block + count && block < f.block + f.count;
        self.flying.iter().flatten().any(overlaps)
    }
}

/// The guest, and what it has seen.
pub struct Guest {
    pub queues: Vec<Queue>,
    random: TestRng,
    clock: u64,
    value: u64,
    events: Vec<Vec<Event>>,
}

impl Guest {
    pub fn new(import: &Import, seed: u64) -> Guest {
        Guest {
            queues: (0..QUEUES).map(|_| Queue::new(import)).collect(),
            random: TestRng::from_seed(RngAlgorithm::ChaCha, &[seed.to_le_bytes(); 4].concat()),
            clock: 0,
            value: 0,
            events: vec![Vec::new(); BLOCKS as usize],
        }
    }

    /// Begins one request, if that queue has room for it.
    fn begin(&mut self, at: usize) -> bool {
        let Some(tag) = self.queues[at].flying.iter().position(Option::is_none) else { return false };
        let block = self.random.next_u64() % BLOCKS;
        let count = (1 + self.random.next_u64() % LONGEST).min(BLOCKS - block);
        let kind = self.random.next_u64() % 16;
        let other = self.queues.iter().enumerate().any(|(queue, it)| queue != at && it.writes(block, count));
        self.clock += 1;
        let rig = &mut self.queues[at].rig;
        // A place of its own for each in flight: a guest leaves a buffer alone while it is being written from.
        let gpa = tag as u64 * LONGEST * BLOCK;
        let range = [GuestRange { gpa, len: (count * BLOCK) as u32 }];
        let offset = block * BLOCK;
        let (op, value) = match kind {
            9..=FLUSHES => (Op::Flush, None),
            0 if !other => (Op::WriteZeroes { offset, len: count * BLOCK, unmap: false }, Some(0)),
            1..9 if !other => {
                self.value += 1;
                let bytes = self.value.to_le_bytes().repeat((count * BLOCK / 8) as usize);
                rig.view.write(gpa, &bytes).unwrap();
                (Op::Write { offset, from: &range }, Some(self.value))
            }
            _ => (Op::Read { offset, into: &range }, None),
        };
        let count = if matches!(op, Op::Flush) { 0 } else { count };
        // A flush with nothing to flush may end at once.
        if rig.submit(&op, Tag(tag as u16)) == Submitted::Pending {
            self.queues[at].flying[tag] = Some(Flying { block, count, begun: self.clock, value });
        } else {
            assert_eq!(count, 0, "{op:?} has ended at once");
        }
        true
    }

    /// Takes in what has ended. Says whether anything has, or what is wrong.
    fn reap(&mut self, at: usize) -> Result<bool, String> {
        let Queue { rig, flying } = &mut self.queues[at];
        if rig.channel.in_flight() == 0 {
            return Ok(false);
        }
        rig.push();
        let mut ended = Vec::new();
        rig.reap(&mut |tag, outcome| ended.push((tag, outcome)));
        for (tag, outcome) in &ended {
            outcome.map_err(|fault| format!("{tag:?} failed: {fault}"))?;
            self.clock += 1;
            let Flying { block, count, begun, value } = flying[usize::from(tag.0)].take().unwrap();
            for nth in 0..count {
                let mut bytes = vec![0; BLOCK as usize];
                rig.view.read(u64::from(tag.0) * LONGEST * BLOCK + nth * BLOCK, &mut bytes).unwrap();
                let read = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                if value.is_none() && !bytes.chunks(8).all(|word| word == read.to_le_bytes()) {
                    return Err(format!("a block of parts of several writes at {}", block + nth));
                }
                let event =
                    Event { begun, ended: self.clock, value: value.unwrap_or(read), write: value.is_some() };
                self.events[(block + nth) as usize].push(event);
            }
        }
        Ok(!ended.is_empty())
    }

    /// So many requests in all, until all have ended.
    pub fn go(&mut self, import: &Import, requests: u32) -> Result<(), String> {
        let mut begun = 0;
        let mut last = Instant::now();
        loop {
            let mut moved = false;
            for at in 0..QUEUES {
                for _ in 0..DEPTH {
                    if begun < requests && !self.random.next_u64().is_multiple_of(3) && self.begin(at) {
                        begun += 1;
                        moved = true;
                    }
                }
                moved |= self.reap(at)?;
            }
            if begun >= requests && self.queues.iter().all(|queue| queue.rig.channel.in_flight() == 0) {
                return Ok(());
            }
            if moved {
                last = Instant::now();
            } else if last.elapsed() > LIMIT {
                return Err(format!("nothing for {LIMIT:?}: {:#?}", import.status()));
            } else {
                self.wait();
            }
        }
    }

    /// Until something has ended on one of the queues, for 1 ms at most: another one may have copies to put back, of which nobody is told.
    fn wait(&self) {
        if self.queues.iter().any(|queue| queue.rig.channel.held_back()) {
            return;
        }
        let wakers = self.queues.iter().filter_map(|queue| queue.rig.channel.waker());
        let wakers: Vec<_> = wakers.collect();
        let mut wakers: Vec<_> = wakers.iter().map(|waker| PollFd::new(waker, PollFlags::IN)).collect();
        let time = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        rustix::event::poll(&mut wakers, Some(&time)).unwrap();
    }

    /// What `bytes` hold in the end is a read of everything.
    pub fn check(mut self, bytes: &[u8], seed: u64) -> Option<String> {
        for (block, events) in self.events.iter_mut().enumerate() {
            let value = u64::from_le_bytes(bytes[block * BLOCK as usize..][..8].try_into().unwrap());
            events.push(Event { begun: self.clock + 1, ended: self.clock + 1, value, write: false });
            if !linearizable(events.clone()) {
                return Some(format!("block {block} (seed {seed}) is no register: {events:#?}"));
            }
        }
        None
    }
}
