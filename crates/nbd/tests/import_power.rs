//! Histories through power cuts of the exporter's host: what a disk had acknowledged and not flushed is lost in part, and the guest must not notice
//! (docs/decisions/0050-retained-writes.md). The checker notices when a rule of retained writes is taken out.
//!
//! Two queues, each with a connection. Each 4 KiB block is a register, as in import_histories.rs.

#![expect(clippy::disallowed_types, reason = "servers of the tests, on threads of their own")]

mod register;
#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use ioplane_memory::GuestRange;
use ioplane_nbd::import::{Import, ImportOptions};
use ioplane_nbd::spec::*;
use ioplane_storage::{Fault, Op, Submitted, Tag};
use proptest::prelude::Rng;
use proptest::test_runner::{RngAlgorithm, TestRng};
use register::*;
use rig::Rig;
use scripted::*;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 4;
const BYTES: u64 = BLOCKS * BLOCK;
const DEPTH: u16 = 6;
const QUEUES: usize = 2;
const OPERATIONS: u32 = 160;
const CUTS: u32 = 6;
/// Of sixteen operations: nine write, two flush, five read.
const FLUSHES: u64 = 10;

/// A host whose disk has a write cache, and whose power fails now and then.
struct Host {
    seed: u64,
    disk: Mutex<Cached>,
    /// What the server says of itself to those who connect.
    terms: OnceLock<Arc<Mutex<Terms>>>,
}

struct Cached {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    boot: u32,
    seed: u64,
}

fn instance(boot: u32) -> String {
    format!("image@{boot}")
}

impl Host {
    /// Serves an export until the test ends.
    fn start(seed: u64, serve: impl Fn(&Host, Session) + Send + Sync + 'static) -> (Arc<Host>, Server) {
        let empty = vec![0; BYTES as usize];
        let disk = Cached { bytes: empty.clone(), durable: empty, boot: 0, seed: seed | 1 };
        let host = Arc::new(Host { seed, disk: Mutex::new(disk), terms: OnceLock::new() });
        let serving = host.clone();
        let terms = Terms { bytes: BYTES, instance: Some(instance(0)), ..Terms::default() };
        let server = Server::start(terms, move |session| serve(&serving, session));
        let _ = host.terms.set(server.terms.clone());
        (host, server)
    }

    /// Of each block that was not flushed the disk has the new content, or the old. Connections end as their threads notice.
    fn cut_power(&self) {
        let mut disk = self.disk.lock().unwrap();
        let Cached { bytes, durable, boot, seed } = &mut *disk;
        for block in 0..BLOCKS {
            let range = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
            if one_in(2, seed) {
                durable[range.clone()].copy_from_slice(&bytes[range]);
            }
        }
        bytes.copy_from_slice(durable);
        *boot += 1;
        self.terms.get().unwrap().lock().unwrap().instance = Some(instance(*boot));
    }

    /// The disk has nothing but what was flushed.
    fn lose_all(&self) {
        let mut disk = self.disk.lock().unwrap();
        disk.bytes = disk.durable.clone();
        disk.boot += 1;
        self.terms.get().unwrap().lock().unwrap().instance = Some(instance(disk.boot));
    }

    /// Carries a request out, if the host has not been without power since the client connected.
    fn carry_out(&self, asked: &Asked, told: &Option<String>) -> Option<Vec<u8>> {
        let mut disk = self.disk.lock().unwrap();
        if *told != Some(instance(disk.boot)) {
            return None;
        }
        let range = asked.offset as usize..asked.offset as usize + asked.length as usize;
        match asked.command {
            NBD_CMD_READ => return Some(disk.bytes[range].to_vec()),
            NBD_CMD_WRITE => disk.bytes[range].copy_from_slice(&asked.data),
            NBD_CMD_WRITE_ZEROES => disk.bytes[range].fill(0),
            NBD_CMD_FLUSH => disk.durable = disk.bytes.clone(),
            _ => {}
        }
        Some(Vec::new())
    }

    fn has_power_for(&self, told: &Option<String>) -> bool {
        *told == Some(instance(self.disk.lock().unwrap().boot))
    }

    /// Carries out what it has in any order, answers in any order, and cuts its own power.
    fn serve(&self, mut session: Session) {
        let mut seed = self.seed ^ u64::from(session.number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let told = session.instance.clone();
        if one_in(3, &mut seed) && session.number < 12 {
            session.sends = (dice(&mut seed) % 60_000) as usize;
        }
        let mut held: Vec<Asked> = Vec::new();
        // Replies, and those that come long after others.
        let (mut unsaid, mut late): (Vec<Vec<u8>>, Vec<Vec<u8>>) = Default::default();
        while self.has_power_for(&told) {
            let idle = held.is_empty() && unsaid.is_empty();
            let wait = held.is_empty() || (held.len() < 5 && !one_in(3, &mut seed));
            if wait && readable_within(&session.stream, if idle { 1 } else { 0 }) {
                let Some(asked) = session.next() else { return };
                held.push(asked);
                continue;
            }
            let replies = if unsaid.is_empty() || one_in(24, &mut seed) { &mut late } else { &mut unsaid };
            if !replies.is_empty() && (held.is_empty() || one_in(3, &mut seed)) {
                let reply = replies.swap_remove(dice(&mut seed) as usize % replies.len());
                if !session.send(&reply) {
                    return;
                }
                continue;
            }
            if held.is_empty() {
                continue;
            }
            let asked = held.swap_remove(dice(&mut seed) as usize % held.len());
            let Some(data) = self.carry_out(&asked, &told) else { return };
            let reply = session.reply(&asked, &data);
            let lags = match asked.command {
                NBD_CMD_FLUSH => one_in(2, &mut seed),
                NBD_CMD_WRITE => one_in(6, &mut seed),
                _ => false,
            };
            if lags {
                late.push(reply)
            } else {
                unsaid.push(reply)
            }
            let cuts = self.disk.lock().unwrap().boot;
            if cuts < CUTS && one_in(24, &mut seed) {
                self.cut_power();
            }
        }
    }
}

impl Host {
    /// Carries out everything at once, and in its first boot answers no write of [`UNANSWERED`]; with `late`, a flush only behind the next write.
    fn serve_in_order(&self, mut session: Session, late: bool) {
        let told = session.instance.clone();
        let first = told == Some(instance(0));
        let mut flushed = None;
        while self.has_power_for(&told) {
            if !readable_within(&session.stream, 1) {
                continue;
            }
            let Some(asked) = session.next() else { return };
            let Some(data) = self.carry_out(&asked, &told) else { return };
            let reply = session.reply(&asked, &data);
            if first && asked.data.first() == Some(&UNANSWERED) {
                continue;
            }
            if first && late && asked.command == NBD_CMD_FLUSH {
                flushed = Some(reply);
                continue;
            }
            session.send(&reply);
            if let Some(reply) = flushed.take() {
                session.send(&reply);
            }
        }
    }
}

const UNANSWERED: u8 = 99;

/// A write of one block, begun.
fn begin_write(rig: &mut Rig, tag: u16, block: u64, value: u8) {
    let gpa = u64::from(tag) * BLOCK;
    rig.view.write(gpa, &[value; BLOCK as usize]).unwrap();
    let from = [GuestRange { gpa, len: BLOCK as u32 }];
    assert_eq!(rig.submit(&Op::Write { offset: block * BLOCK, from: &from }, Tag(tag)), Submitted::Pending);
    rig.push();
}

/// Reaps until the operation with that tag has succeeded.
fn wait_for(rig: &mut Rig, tag: u16) {
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    let mut ended = false;
    while !ended {
        assert!(std::time::Instant::now() < end, "{tag} does not end");
        rig.push();
        rig.reap(&mut |of, outcome| ended |= outcome == Ok(()) && of == Tag(tag));
    }
}

/// A write that is acknowledged after a flush was carried out, and before that was answered. `None` if it survives.
fn write_behind_a_flush() -> Option<String> {
    let (host, server) = Host::start(1, |host, session| host.serve_in_order(session, true));
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let mut rig = Rig::new(&*import, DEPTH);
    begin_write(&mut rig, 0, 0, 1);
    wait_for(&mut rig, 0);
    assert_eq!(rig.submit(&Op::Flush, Tag(1)), Submitted::Pending);
    rig.push();
    begin_write(&mut rig, 2, 0, 2);
    let mut left = 2;
    while left > 0 {
        rig.push();
        rig.reap(&mut |_, outcome| left -= usize::from(outcome == Ok(())));
    }
    host.lose_all();
    let read = rig.read(0, BLOCK as u32).map(|bytes| bytes[0]);
    (read != Ok(2)).then(|| format!("read: {read:?}"))
}

/// A copy that is kept only since an older write of its queue has no answer, of a block that the other queue has written and flushed since. `None` if that
/// newer write survives.
fn durable_copy() -> Option<String> {
    let (host, server) = Host::start(1, |host, session| host.serve_in_order(session, false));
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let (mut one, mut other) = (Rig::new(&*import, DEPTH), Rig::new(&*import, DEPTH));
    begin_write(&mut one, 0, 3, UNANSWERED);
    begin_write(&mut one, 1, 0, 1);
    wait_for(&mut one, 1);
    assert_eq!(other.run(&Op::Flush), Ok(()));
    begin_write(&mut other, 0, 0, 2);
    wait_for(&mut other, 0);
    assert_eq!(other.run(&Op::Flush), Ok(()));
    host.lose_all();
    wait_for(&mut one, 0);
    let read = other.read(0, BLOCK as u32).map(|bytes| bytes[0]);
    (read != Ok(2)).then(|| format!("read: {read:?}"))
}

#[test]
fn what_is_durable_is_known_exactly() {
    assert_eq!((write_behind_a_flush(), durable_copy()), (None, None));
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
struct Queue {
    rig: Rig,
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
struct Guest {
    queues: Vec<Queue>,
    random: TestRng,
    clock: u64,
    value: u64,
    events: Vec<Vec<Event>>,
}

impl Guest {
    fn new(import: &Import, seed: u64) -> Guest {
        Guest {
            queues: (0..QUEUES).map(|_| Queue::new(import)).collect(),
            random: TestRng::from_seed(RngAlgorithm::ChaCha, &[seed.to_le_bytes(); 4].concat()),
            clock: 0,
            value: 0,
            events: vec![Vec::new(); BLOCKS as usize],
        }
    }

    /// Begins one operation, if it may. Writes of the same bytes are under way by one queue at a time: see the decision.
    fn begin(&mut self, at: usize) {
        let Some(tag) = self.queues[at].flying.iter().position(Option::is_none) else { return };
        let block = self.random.next_u64() % BLOCKS;
        let count = (1 + self.random.next_u64() % 3).min(BLOCKS - block);
        let kind = self.random.next_u64() % 16;
        let writes = kind < 9;
        let other = self.queues.iter().enumerate().any(|(queue, it)| queue != at && it.writes(block, count));
        if writes && other {
            return;
        }
        self.clock += 1;
        let rig = &mut self.queues[at].rig;
        let gpa = tag as u64 * 3 * BLOCK;
        let range = [GuestRange { gpa, len: (count * BLOCK) as u32 }];
        let offset = block * BLOCK;
        let (op, value) = match kind {
            0 => (Op::WriteZeroes { offset, len: count * BLOCK, unmap: false }, Some(0)),
            1..9 => {
                self.value += 1;
                let bytes = self.value.to_le_bytes().repeat((count * BLOCK / 8) as usize);
                rig.view.write(gpa, &bytes).unwrap();
                (Op::Write { offset, from: &range }, Some(self.value))
            }
            9..=FLUSHES => (Op::Flush, None),
            _ => (Op::Read { offset, into: &range }, None),
        };
        let count = if matches!(kind, 9..=FLUSHES) { 0 } else { count };
        assert_eq!(rig.submit(&op, Tag(tag as u16)), Submitted::Pending);
        self.queues[at].flying[tag] = Some(Flying { block, count, begun: self.clock, value });
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
                rig.view.read(u64::from(tag.0) * 3 * BLOCK + nth * BLOCK, &mut bytes).unwrap();
                let read = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                if value.is_none() && !bytes.chunks(8).all(|word| word == read.to_le_bytes()) {
                    return Err(format!("a block of parts of several writes at {block}"));
                }
                let event =
                    Event { begun, ended: self.clock, value: value.unwrap_or(read), write: value.is_some() };
                self.events[(block + nth) as usize].push(event);
            }
        }
        Ok(!ended.is_empty())
    }

    /// Operations until so many have begun, and all have ended.
    fn go(&mut self, import: &Import) -> Result<(), String> {
        let mut begun = 0;
        let mut last = std::time::Instant::now();
        loop {
            for at in 0..QUEUES {
                for _ in 0..DEPTH {
                    if begun < OPERATIONS && !self.random.next_u64().is_multiple_of(3) {
                        begun += 1;
                        self.begin(at);
                    }
                }
                if self.reap(at)? {
                    last = std::time::Instant::now();
                }
            }
            if begun >= OPERATIONS && self.queues.iter().all(|queue| queue.rig.channel.in_flight() == 0) {
                return Ok(());
            }
            if last.elapsed() > std::time::Duration::from_secs(60) {
                return Err(format!("nothing for 60 s: {:#?}", import.status()));
            }
            if self.queues.iter().all(|queue| queue.flying.iter().all(Option::is_some)) || begun >= OPERATIONS
            {
                self.queues[0].rig.readable(1);
            }
        }
    }

    /// What `bytes` hold in the end is a read of everything.
    fn check(mut self, bytes: &[u8], seed: u64) -> Option<String> {
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

/// Runs one history; `None` if it is that of a disk without power cuts, else what is wrong with it.
fn history(seed: u64) -> Option<String> {
    let (host, server) = Host::start(seed, Host::serve);
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let mut guest = Guest::new(&import, seed);
    if let Err(wrong) = guest.go(&import) {
        return Some(wrong);
    }
    // One more cut, which only those survive that are written again: a flush is the last word.
    host.cut_power();
    let flushed = guest.queues[0].rig.run(&Op::Flush);
    if flushed != Ok(()) {
        return Some(format!("the last flush failed: {flushed:?}"));
    }
    let durable = host.disk.lock().unwrap().durable.clone();
    guest.check(&durable, seed)
}

const SEEDS: u64 = 40;

#[test]
fn every_history_is_that_of_a_disk_without_power_cuts() {
    for seed in 1..=SEEDS {
        if let Some(wrong) = history(seed) {
            panic!("seed {seed}: {wrong}");
        }
    }
}

/// An importer that dies with unflushed writes, an exporter that loses power meanwhile, and the importer's successor. `None` if that one
/// answers nothing before a person has decided.
fn succession() -> Option<String> {
    let (host, server) = Host::start(1, Host::serve);
    let folder = tempfile::tempdir().unwrap();
    let mark: Option<PathBuf> = Some(folder.path().join("mark"));
    let options = || ImportOptions { mark: mark.clone(), ..server.options() };
    let first = import(options());
    let mut rig = Rig::new(&*first, 4);
    rig.write(0, &[1; 4096]).unwrap();
    rig.run(&Op::Flush).unwrap();
    rig.write(0, &[2; 4096]).unwrap();
    // Dead, and with it its copies: what is left is the mark.
    drop((rig, first));
    host.cut_power();
    let second = import(options());
    let mut rig = Rig::new(&*second, 4);
    let read = rig.read(0, 4096);
    if read != Err(Fault::Io(libc::EIO)) {
        return Some(format!("answered: {:?}", read.map(|bytes| bytes[0])));
    }
    let status = until(&second, "stopped", |status| !status.retained);
    assert!(status.dirty, "{status:?}");
    assert_eq!(rig.write(0, &[3; 4096]), Err(Fault::Io(libc::EIO)));
    second.retry();
    until(&second, "accepted", |status| status.connections.iter().any(is_connected));
    assert_eq!(rig.write(0, &[3; 4096]), Ok(()));
    assert_eq!(rig.read(0, 4096), Ok(vec![3; 4096]));
    // From now on all is kept again.
    let status = second.status();
    assert!(status.dirty && status.retained, "{status:?}");
    None
}

#[test]
fn a_successor_answers_nothing_before_a_person_has_decided() {
    assert_eq!(succession(), None);
}

/// With each rule taken out, some history is not that of a disk without power cuts.
#[cfg(feature = "mutations")]
mod without {
    use ioplane_nbd::mutation::Rule;

    use super::*;

    const RULES: [Rule; 6] = [
        Rule::Retain,
        Rule::AllQueues,
        Rule::InOrder,
        Rule::CoveredByFlush,
        Rule::NotTheDurable,
        Rule::Complete,
    ];

    /// Each rule in a process of its own: beside it, others run with all of them.
    #[test]
    fn each_rule_is_needed() {
        let names = RULES.map(|rule| format!("{rule:?}"));
        each_is_noticed(&names.each_ref().map(String::as_str), "without::a_rule");
    }

    #[test]
    fn a_rule() {
        let Some(name) = taken_out() else { return };
        let rule = *RULES.iter().find(|rule| format!("{rule:?}") == name).unwrap();
        ioplane_nbd::mutation::remove(Some(rule));
        let wrong = match rule {
            Rule::Complete => succession().map(|wrong| (1, wrong)),
            Rule::CoveredByFlush => write_behind_a_flush().map(|wrong| (1, wrong)),
            Rule::NotTheDurable => durable_copy().map(|wrong| (1, wrong)),
            _ => (1..=SEEDS * 10).find_map(|seed| history(seed).map(|wrong| (seed, wrong))),
        };
        ioplane_nbd::mutation::remove(None);
        let Some((seed, wrong)) = wrong else { panic!("nobody notices that {rule:?} is gone") };
        println!("without {rule:?}: seed {seed}: {}", wrong.lines().next().unwrap_or_default());
    }
}
