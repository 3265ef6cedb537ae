//! Histories through power cuts of the exporter's host: what a disk had acknowledged and not flushed is lost in part, and the guest must not notice
//! (docs/decisions/0050-retained-writes.md). The checker notices when a rule of retained writes is taken out.
//!
//! Four queues, each with a connection, as in import_histories.rs; each 4 KiB block is a register. How many histories: [`SEEDS`], or
//! `IOPLANE_HISTORIES`.

#![expect(clippy::disallowed_types, reason = "servers of the tests, on threads of their own")]

mod guest;
mod register;
#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use guest::{BLOCK, BLOCKS, BYTES, DEPTH, Guest, histories};
use ioplane_memory::GuestRange;
use ioplane_nbd::import::{ConnectionState, ConnectionStatus, ImportOptions};
use ioplane_nbd::spec::*;
use ioplane_storage::{Fault, Op, Submitted, Tag};
use register::*;
use rig::Rig;
use scripted::*;

/// Of all queues.
const REQUESTS: u32 = 240;
const CUTS: u32 = 6;
/// Of all queues: so many connections are cut by the network at most.
const LOSSES: u32 = 24;
/// Requests that a connection's server has before it carries one out.
const HELD: usize = 12;

/// A host whose disk has a write cache, and whose power fails now and then.
struct Host {
    seed: u64,
    disk: Mutex<Cached>,
    /// What the server says of itself to those who connect.
    terms: OnceLock<Arc<Mutex<Terms>>>,
    /// See [`serve_a_disk_that_fails`].
    flush_failed: AtomicBool,
}

struct Cached {
    bytes: Vec<u8>,
    durable: Vec<u8>,
    /// Blocks that a flush makes durable. One that has failed takes them for clean, as Linux does with its page cache.
    dirty: [bool; BLOCKS as usize],
    boot: u32,
    seed: u64,
}

impl Cached {
    fn flush(&mut self) {
        for block in 0..BLOCKS as usize {
            let range = block * BLOCK as usize..(block + 1) * BLOCK as usize;
            if std::mem::take(&mut self.dirty[block]) {
                self.durable[range.clone()].copy_from_slice(&self.bytes[range]);
            }
        }
    }
}

fn instance(boot: u32) -> String {
    format!("image@{boot}")
}

impl Host {
    /// Serves an export until the test ends.
    fn start(seed: u64, serve: impl Fn(&Host, Session) + Send + Sync + 'static) -> (Arc<Host>, Server) {
        let empty = vec![0; BYTES as usize];
        let dirty = [false; BLOCKS as usize];
        let disk = Cached { bytes: empty.clone(), durable: empty, dirty, boot: 0, seed: seed | 1 };
        let host = Arc::new(Host {
            seed,
            disk: Mutex::new(disk),
            terms: OnceLock::new(),
            flush_failed: AtomicBool::new(false),
        });
        let serving = host.clone();
        let terms = Terms { bytes: BYTES, instance: Some(instance(0)), ..Terms::default() };
        let server = Server::start(terms, move |session| serve(&serving, session));
        let _ = host.terms.set(server.terms.clone());
        (host, server)
    }

    /// Of each block that was not flushed the disk has the new content, or the old. Connections end as their threads notice.
    fn cut_power(&self) {
        let mut disk = self.disk.lock().unwrap();
        let Cached { bytes, durable, dirty, boot, seed } = &mut *disk;
        for block in 0..BLOCKS {
            let range = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
            if one_in(2, seed) {
                durable[range.clone()].copy_from_slice(&bytes[range]);
            }
        }
        bytes.copy_from_slice(durable);
        *dirty = [false; BLOCKS as usize];
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
        let blocks = range.start / BLOCK as usize..range.end / BLOCK as usize;
        match asked.command {
            NBD_CMD_READ => return Some(disk.bytes[range].to_vec()),
            NBD_CMD_WRITE => disk.bytes[range].copy_from_slice(&asked.data),
            NBD_CMD_WRITE_ZEROES => disk.bytes[range].fill(0),
            NBD_CMD_FLUSH => disk.flush(),
            _ => {}
        }
        if matches!(asked.command, NBD_CMD_WRITE | NBD_CMD_WRITE_ZEROES) {
            disk.dirty[blocks].fill(true);
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
        if one_in(3, &mut seed) && session.number < LOSSES {
            session.sends = (dice(&mut seed) % 60_000) as usize;
        }
        let mut held: Vec<Asked> = Vec::new();
        // Replies, and those that come long after others.
        let (mut unsaid, mut late): (Vec<Vec<u8>>, Vec<Vec<u8>>) = Default::default();
        while self.has_power_for(&told) {
            let idle = held.is_empty() && unsaid.is_empty();
            let wait = held.is_empty() || (held.len() < HELD && !one_in(3, &mut seed));
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

/// A server whose first flush fails, and which is started again then, as the same instance.
fn serve_a_disk_that_fails(host: &Host, mut session: Session) {
    let told = session.instance.clone();
    while host.has_power_for(&told) {
        if !readable_within(&session.stream, 1) {
            continue;
        }
        let Some(asked) = session.next() else { return };
        if asked.command == NBD_CMD_FLUSH && !host.flush_failed.swap(true, Ordering::SeqCst) {
            host.disk.lock().unwrap().dirty = [false; BLOCKS as usize];
            session.send(&simple(&asked, NBD_EIO));
            return;
        }
        let Some(data) = host.carry_out(&asked, &told) else { return };
        let reply = session.reply(&asked, &data);
        session.send(&reply);
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

/// A flush fails, the exporter is started again, and the next flush succeeds: what the first one should have covered is not durable, since it was taken for
/// clean. `None` if it survives.
fn failed_flush() -> Option<String> {
    let (host, server) = Host::start(1, serve_a_disk_that_fails);
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let mut rig = Rig::new(&*import, DEPTH);
    begin_write(&mut rig, 0, 0, 1);
    wait_for(&mut rig, 0);
    assert_eq!(rig.run(&Op::Flush), Err(Fault::Io(libc::EIO)));
    assert_eq!(rig.run(&Op::Flush), Ok(()));
    host.lose_all();
    let read = rig.read(0, BLOCK as u32).map(|bytes| bytes[0]);
    (read != Ok(1)).then(|| format!("read: {read:?}"))
}

#[test]
fn what_is_durable_is_known_exactly() {
    assert_eq!((write_behind_a_flush(), durable_copy(), failed_flush()), (None, None, None));
}

/// Runs one history; `None` if it is that of a disk without power cuts, else what is wrong with it.
fn history(seed: u64) -> Option<String> {
    let (host, server) = Host::start(seed, Host::serve);
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let mut guest = Guest::new(&import, seed);
    if let Err(wrong) = guest.go(&import, REQUESTS) {
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

/// Unless the environment says how many.
const SEEDS: u64 = 500;

#[test]
fn every_history_is_that_of_a_disk_without_power_cuts() {
    for seed in 1..=histories(SEEDS) {
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

/// A server of a disk that a process now dead has left unflushed, whose flushes go on failing if it says so: each makes it another instance, as exporters of ours are.
fn serve_accepted(host: &Host, mut session: Session) {
    let told = session.instance.clone();
    while host.has_power_for(&told) {
        if !readable_within(&session.stream, 1) {
            continue;
        }
        let Some(asked) = session.next() else { return };
        if asked.command == NBD_CMD_FLUSH && host.flush_failed.load(Ordering::SeqCst) {
            let mut disk = host.disk.lock().unwrap();
            disk.boot += 1;
            host.terms.get().unwrap().lock().unwrap().instance = Some(instance(disk.boot));
            session.send(&simple(&asked, NBD_EIO));
            return;
        }
        let Some(data) = host.carry_out(&asked, &told) else { return };
        let reply = session.reply(&asked, &data);
        session.send(&reply);
    }
}

/// What of a disk has copies is written again when a person accepts it, and what is in the exporter's cache is flushed. Without that its next power cut would take what
/// had survived.
#[test]
fn a_disk_that_is_accepted_is_flushed() {
    let (host, server) = Host::start(1, serve_accepted);
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let mut rig = Rig::new(&*import, DEPTH);
    begin_write(&mut rig, 0, 0, 1);
    wait_for(&mut rig, 0);
    // It fails when the writes are written again to the next instance, too.
    host.flush_failed.store(true, Ordering::SeqCst);
    assert_eq!(rig.run(&Op::Flush), Err(Fault::Io(libc::EIO)));
    until(&import, "stopped", |status| {
        matches!(status.connections[0].state, ConnectionState::Stopped { .. })
    });
    assert_eq!(rig.read(0, BLOCK as u32), Err(Fault::Io(libc::EIO)));
    {
        // Of another client, which is gone.
        let mut disk = host.disk.lock().unwrap();
        disk.bytes[BLOCK as usize..2 * BLOCK as usize].fill(9);
        disk.dirty[1] = true;
    }
    host.flush_failed.store(false, Ordering::SeqCst);
    import.retry();
    until(&import, "accepted", |status| is_connected(&status.connections[0]));
    assert!(!import.status().dirty);
    host.lose_all();
    let read = |rig: &mut Rig, block: u64| rig.read(block * BLOCK, BLOCK as u32).map(|bytes| bytes[0]);
    assert_eq!([0, 1].map(|block| read(&mut rig, block)), [Ok(1), Ok(9)]);
}

/// It could never be used again otherwise.
#[test]
fn a_disk_whose_flushes_go_on_failing_is_accepted_as_it_is() {
    let (host, server) = Host::start(1, serve_accepted);
    let import = import(ImportOptions { retain: 1 << 20, ..server.options() });
    let mut rigs = [(); 2].map(|()| Rig::new(&*import, DEPTH));
    begin_write(&mut rigs[0], 0, 0, 1);
    wait_for(&mut rigs[0], 0);
    host.flush_failed.store(true, Ordering::SeqCst);
    assert_eq!(rigs[0].run(&Op::Flush), Err(Fault::Io(libc::EIO)));
    for _ in 0..2 {
        until(&import, "stopped", |status| {
            let stopped = |one: &ConnectionStatus| matches!(one.state, ConnectionState::Stopped { .. });
            status.connections.iter().all(stopped)
        });
        let doubts = import.doubts();
        import.retry();
        until(&import, "accepted", |status| status.connections.iter().all(is_connected));
        assert_eq!(import.doubts(), doubts + 1, "once, by all of its channels");
        for rig in &mut rigs {
            assert_eq!(rig.read(0, BLOCK as u32), Ok(vec![1; BLOCK as usize]));
        }
        // What is acknowledged from now on is not given up with what was.
        begin_write(&mut rigs[1], 0, 1, 2);
        wait_for(&mut rigs[1], 0);
        assert!(import.status().dirty);
        assert_eq!(rigs[1].run(&Op::Flush), Err(Fault::Io(libc::EIO)));
    }
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

    const RULES: [Rule; 7] = [
        Rule::Retain,
        Rule::AllQueues,
        Rule::InOrder,
        Rule::CoveredByFlush,
        Rule::NotTheDurable,
        Rule::Complete,
        Rule::FailedFlush,
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
            Rule::FailedFlush => failed_flush().map(|wrong| (1, wrong)),
            Rule::NotTheDurable => durable_copy().map(|wrong| (1, wrong)),
            _ => (1..=SEEDS).find_map(|seed| history(seed).map(|wrong| (seed, wrong))),
        };
        ioplane_nbd::mutation::remove(None);
        let Some((seed, wrong)) = wrong else { panic!("nobody notices that {rule:?} is gone") };
        println!("without {rule:?}: seed {seed}: {}", wrong.lines().next().unwrap_or_default());
    }
}
