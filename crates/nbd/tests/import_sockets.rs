//! Histories on real sockets: four clients of one of our exporters, by TCP, through relays that delay, stall and cut by seed, and that deliver late what they
//! had taken in. They are those of a disk whose requests each take effect once (docs/decisions/0044-remote-requests-once.md), and the checker of
//! import_histories.rs notices when a rule of replays is taken out.
//!
//! ```text
//!   4 x (import, 16 requests in flight) --TCP--> relay --TCP--> exporter on an I/O core, memory of 8 blocks
//! ```
//!
//! Each 4 KiB block is a register. Everybody reads everything; writes of one client overlap each other, those of two clients do not: two connections have no
//! order between them that a replay could keep (decision 44, "Two queues").

#![expect(clippy::disallowed_types, reason = "clients and relays of the tests, on threads of their own")]

mod register;
#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ioplane_cores::Notify;
use ioplane_memory::GuestRange;
use ioplane_nbd::export::ExportOptions;
use ioplane_nbd::import::{AtStart, Confirmed, Fence, ImportOptions, Unfenced};
use ioplane_storage::{Backing, MemoryBacking, Op, Submitted, Tag};
use register::*;
use rig::Rig;
use scripted::import;
use support::listener::{Ending, Listening};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 8;
const CLIENTS: u64 = 4;
const DEPTH: u16 = 16;
/// Of each client.
const OPERATIONS: u32 = 80;
const SEEDS: u64 = 50;
/// So many of a client's connections are cut at most.
const CUTS: u64 = 10;
/// For what takes a second on a machine that has time.
const LIMIT: Duration = Duration::from_secs(60);
/// How soon silence counts as a loss: some stalls are shorter, some longer.
const SILENCE: Duration = Duration::from_millis(120);

/// Between a client and the exporter. Its threads end with their connections, the listening one in [`TcpRelay::end`].
struct TcpRelay {
    address: SocketAddr,
    /// As the exporter sees them, in the order in which they were made.
    connections: Arc<Mutex<Vec<SocketAddr>>>,
    stop: Arc<AtomicBool>,
    /// Listens, and hands out the threads of its connections.
    listens: JoinHandle<Vec<JoinHandle<()>>>,
}

impl TcpRelay {
    fn to(exporter: SocketAddr, seed: u64) -> TcpRelay {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::<Mutex<Vec<SocketAddr>>>::default();
        let stop = Arc::new(AtomicBool::new(false));
        let (made, stopped) = (connections.clone(), stop.clone());
        let listens = std::thread::spawn(move || {
            let (mut seed, mut threads) = (seed, Vec::new());
            for (number, client) in (0..).zip(listener.incoming()) {
                if stopped.load(Ordering::Acquire) {
                    break;
                }
                let (client, server) = (client.unwrap(), TcpStream::connect(exporter).unwrap());
                [&client, &server].iter().for_each(|stream| stream.set_nodelay(true).unwrap());
                made.lock().unwrap().push(server.local_addr().unwrap());
                let fate = Fate::draw(&mut seed, number);
                let state = Arc::new(Connection { client, server, silent: AtomicBool::new(false), fate });
                for requests in [true, false] {
                    let (state, dice) = (state.clone(), dice(&mut seed) | 1);
                    threads.push(std::thread::spawn(move || state.carry(requests, dice)));
                }
            }
            threads
        });
        TcpRelay { address, connections, stop, listens }
    }

    /// Waits for what is late. The client must be gone.
    fn end(self) {
        self.stop.store(true, Ordering::Release);
        let _ = TcpStream::connect(self.address);
        self.listens.join().unwrap().into_iter().for_each(|thread| thread.join().unwrap());
    }
}

/// Of all histories of this process.
static TALLY: Tally = Tally { cuts: AtomicU64::new(0), late: AtomicU64::new(0), replays: AtomicU64::new(0) };

/// What histories went through.
struct Tally {
    /// Connections that were cut.
    cuts: AtomicU64,
    /// After which what the client had sent was delivered to the exporter's host.
    late: AtomicU64,
    /// Requests that clients sent again.
    replays: AtomicU64,
}

/// What becomes of a connection.
#[derive(Debug, Clone, Copy)]
struct Fate {
    /// It is cut after so many bytes of requests, or of replies.
    requests: usize,
    replies: usize,
    /// The client is not told: it hears nothing more.
    in_silence: bool,
    /// What the client had sent by then arrives, so much later.
    late: Option<Duration>,
}

impl Fate {
    fn draw(seed: &mut u64, number: u64) -> Fate {
        let bytes = (dice(seed) % 120_000) as usize;
        let (requests, replies) = match (number < CUTS, one_in(2, seed)) {
            (false, _) => (usize::MAX, usize::MAX),
            (true, true) => (bytes, usize::MAX),
            (true, false) => (usize::MAX, bytes),
        };
        let late = (!one_in(3, seed)).then(|| Duration::from_millis(5 + dice(seed) % 60));
        Fate { requests, replies, in_silence: one_in(4, seed), late }
    }
}

struct Connection {
    client: TcpStream,
    server: TcpStream,
    /// It has been cut.
    silent: AtomicBool,
    fate: Fate,
}

impl Connection {
    /// One direction, until it ends.
    fn carry(&self, requests: bool, mut seed: u64) {
        let (mut from, mut to) =
            if requests { (&self.client, &self.server) } else { (&self.server, &self.client) };
        let mut left = if requests { self.fate.requests } else { self.fate.replies };
        let mut buffer = vec![0; 16 << 10];
        loop {
            let room = 1 + dice(&mut seed) as usize % buffer.len();
            let count = match from.read(&mut buffer[..room]) {
                Ok(count @ 1..) => count,
                _ => break,
            };
            if one_in(64, &mut seed) {
                std::thread::sleep(Duration::from_millis(20 + dice(&mut seed) % 160));
            } else if one_in(4, &mut seed) {
                std::thread::sleep(Duration::from_micros(dice(&mut seed) % 1500));
            }
            let passes = count.min(left);
            left -= passes;
            let silent = self.silent.load(Ordering::Acquire);
            if silent && requests {
                self.end_late(buffer[..count].to_vec());
                return;
            }
            if silent || to.write_all(&buffer[..passes]).is_err() {
                break;
            }
            if passes < count {
                self.silent.store(true, Ordering::Release);
                TALLY.cuts.fetch_add(1, Ordering::Relaxed);
                if !self.fate.in_silence {
                    let _ = self.client.shutdown(Shutdown::Both);
                }
                if requests {
                    self.end_late(buffer[passes..count].to_vec());
                    return;
                }
                // The other direction notices, with the next request at the latest.
                return;
            }
        }
        if requests && self.silent.load(Ordering::Acquire) {
            self.end_late(Vec::new());
            return;
        }
        if !self.silent.load(Ordering::Acquire) {
            let _ = (self.client.shutdown(Shutdown::Both), self.server.shutdown(Shutdown::Both));
        }
    }

    /// The connection has been cut, and what the client had sent until it noticed arrives late, or never.
    fn end_late(&self, mut sent: Vec<u8>) {
        let mut buffer = vec![0; 64 << 10];
        let patience = SILENCE * 4;
        self.client.set_read_timeout(Some(patience)).unwrap();
        while let Ok(count @ 1..) = (&self.client).read(&mut buffer) {
            sent.extend_from_slice(&buffer[..count]);
        }
        if let Some(late) = self.fate.late {
            std::thread::sleep(late);
            let delivered = (&self.server).write_all(&sent).is_ok() && !sent.is_empty();
            TALLY.late.fetch_add(delivered.into(), Ordering::Relaxed);
            // Until the exporter has read all of it, or has ended the connection.
            let _ = self.server.shutdown(Shutdown::Write);
            self.server.set_read_timeout(Some(LIMIT)).unwrap();
            let end = loop {
                match (&self.server).read(&mut buffer) {
                    Ok(1..) => {}
                    end => break end,
                }
            };
            let kind = end.err().map(|error| error.kind());
            assert!(kind != Some(ErrorKind::WouldBlock), "the exporter keeps a connection that has ended");
        }
        let _ = (self.client.shutdown(Shutdown::Both), self.server.shutdown(Shutdown::Both));
    }
}

/// The exporter ends all connections of a client but its newest.
struct OldOnesEnd {
    exporter: Ending,
    connections: Arc<Mutex<Vec<SocketAddr>>>,
}

impl std::fmt::Debug for OldOnesEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OldOnesEnd")
    }
}

impl Fence for OldOnesEnd {
    fn confirm<'a>(&'a self, _instance: &'a str, _epoch: u32) -> Confirmed<'a> {
        let mut older = self.connections.lock().unwrap().clone();
        older.pop();
        Box::pin(async {
            self.exporter.end(older).await;
            Ok(())
        })
    }
}

/// What all clients of a history share.
struct Shared {
    clock: AtomicU64,
    value: AtomicU64,
    events: Mutex<Vec<Vec<Event>>>,
    /// Who writes to each block, and with how many requests.
    writers: Mutex<Vec<(u64, u32)>>,
}

impl Shared {
    fn now(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Whether `client` may write there now; if so, it does from now on.
    fn begins_write(&self, client: u64, blocks: std::ops::Range<u64>) -> bool {
        let mut writers = self.writers.lock().unwrap();
        let writers = &mut writers[blocks.start as usize..blocks.end as usize];
        let free = writers.iter().all(|(writer, count)| *count == 0 || *writer == client);
        if free {
            writers.iter_mut().for_each(|writer| *writer = (client, writer.1 + 1));
        }
        free
    }

    fn ends_write(&self, blocks: std::ops::Range<u64>) {
        let mut writers = self.writers.lock().unwrap();
        writers[blocks.start as usize..blocks.end as usize].iter_mut().for_each(|writer| writer.1 -= 1);
    }
}

/// A request in flight.
#[derive(Clone, Copy)]
struct Flying {
    block: u64,
    count: u64,
    begun: u64,
    /// What it writes.
    value: Option<u64>,
}

/// What one client does; what is wrong, if anything is.
fn client(number: u64, seed: u64, options: ImportOptions, shared: &Shared) -> Option<String> {
    let import = import(options);
    let mut rig = Rig::new(&*import, DEPTH);
    let mut seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number + 1) << 17 | 1;
    for _ in 0..8 {
        dice(&mut seed);
    }
    let mut flying: Vec<Option<Flying>> = vec![None; DEPTH.into()];
    let mut begun = 0;
    while begun < OPERATIONS || rig.channel.in_flight() > 0 {
        while begun < OPERATIONS
            && let Some(tag) = flying.iter().position(Option::is_none)
        {
            begun += 1;
            let block = dice(&mut seed) % BLOCKS;
            let count = (1 + dice(&mut seed) % 3).min(BLOCKS - block);
            let gpa = tag as u64 * 3 * BLOCK;
            let range = [GuestRange { gpa, len: (count * BLOCK) as u32 }];
            let (kind, offset) = (dice(&mut seed) % 16, block * BLOCK);
            let writes = kind < 8 && shared.begins_write(number, block..block + count);
            let value = writes.then(|| shared.value.fetch_add(1, Ordering::SeqCst) + 1);
            if let Some(value) = value {
                rig.view.write(gpa, &value.to_le_bytes().repeat((count * BLOCK / 8) as usize)).unwrap();
            }
            let (op, count) = match (kind, value) {
                (15, _) => (Op::Flush, 0),
                (_, Some(_)) => (Op::Write { offset, from: &range }, count),
                (_, None) => (Op::Read { offset, into: &range }, count),
            };
            let begun = shared.now();
            if rig.submit(&op, Tag(tag as u16)) == Submitted::Pending {
                flying[tag] = Some(Flying { block, count, begun, value });
            } else if count > 0 {
                return Some(format!("{op:?} has ended at once"));
            }
        }
        rig.push();
        let mut ended = Vec::new();
        rig.reap(&mut |tag, outcome| ended.push((tag, outcome)));
        for (tag, outcome) in &ended {
            if let Err(fault) = outcome {
                return Some(format!("{tag:?} failed: {fault}"));
            }
            let now = shared.now();
            let Flying { block, count, begun, value } = flying[usize::from(tag.0)].take().unwrap();
            if value.is_some() {
                shared.ends_write(block..block + count);
            }
            for at in 0..count {
                let mut bytes = vec![0; BLOCK as usize];
                rig.view.read(u64::from(tag.0) * 3 * BLOCK + at * BLOCK, &mut bytes).unwrap();
                let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                if !bytes.chunks(8).all(|word| word == found.to_le_bytes()) {
                    return Some(format!("a block of parts of several writes at {}", block + at));
                }
                let event =
                    Event { begun, ended: now, value: value.unwrap_or(found), write: value.is_some() };
                shared.events.lock().unwrap()[(block + at) as usize].push(event);
            }
        }
        let waits = ended.is_empty() && rig.channel.in_flight() > 0 && !rig.channel.held_back();
        if waits && !rig.readable(LIMIT.as_millis() as u64) {
            return Some(format!("nothing for {LIMIT:?}: {:#?}", import.status()));
        }
    }
    let replays: u64 = import.status().connections.iter().map(|connection| connection.replays).sum();
    TALLY.replays.fetch_add(replays, Ordering::Relaxed);
    None
}

/// Runs one history; `None` if it is that of a disk, else what is wrong with it.
fn history(seed: u64) -> Option<String> {
    let memory = MemoryBacking::new(BLOCKS * BLOCK).unwrap();
    let backing: Arc<dyn Backing> = memory.clone();
    let options = ExportOptions { connections: 64, ..ExportOptions::default() };
    let exporter = Listening::fenced(backing, options, Notify::Notified);
    let shared = Shared {
        clock: AtomicU64::new(0),
        value: AtomicU64::new(0),
        events: Mutex::new(vec![Vec::new(); BLOCKS as usize]),
        writers: Mutex::new(vec![(0, 0); BLOCKS as usize]),
    };
    let wrong = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let (address, exporter, shared) = (exporter.address, exporter.fence.clone(), &shared);
                scope.spawn(move || {
                    let relay = TcpRelay::to(address, (seed << 8 | number) * 2 + 1);
                    let connections = relay.connections.clone();
                    let options = ImportOptions {
                        dead_after: SILENCE,
                        connect_timeout: Duration::from_secs(1),
                        retry: (Duration::from_millis(1), Duration::from_millis(20)),
                        unfenced: Unfenced::Replay,
                        // A connection may be cut in its handshake, the first one too.
                        at_start: AtStart::Wait,
                        fence: Some(Arc::new(OldOnesEnd { exporter, connections })),
                        // From the guest's memory, or from copies.
                        retain: if seed.is_multiple_of(2) { 1 << 20 } else { 0 },
                        ..ImportOptions::new(format!("nbd://{}/disk", relay.address).parse().unwrap())
                    };
                    let wrong = client(number, seed, options, shared);
                    relay.end();
                    wrong
                })
            })
            .collect();
        clients.into_iter().filter_map(|client| client.join().unwrap()).next()
    });
    if wrong.is_some() {
        return wrong;
    }
    // What the disk holds in the end is one read more.
    let end = shared.now();
    let mut rig = Rig::new(&*memory, 1);
    for (block, mut events) in (0..).zip(shared.events.into_inner().unwrap()) {
        let bytes = rig.read(block * BLOCK, 8).unwrap();
        let value = u64::from_le_bytes(bytes.try_into().unwrap());
        events.push(Event { begun: end, ended: end, value, write: false });
        if !linearizable(events.clone()) {
            return Some(format!("block {block} (seed {seed}) is no register: {events:#?}"));
        }
    }
    None
}

/// Two at a time, since they mostly wait, and silence counts soon: the first that is wrong.
fn first_wrong(seeds: u64) -> Option<(u64, String)> {
    let (next, wrong) = (AtomicU64::new(1), Mutex::new(None));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed > seeds || wrong.lock().unwrap().is_some() {
                        return;
                    }
                    if let Some(why) = history(seed) {
                        *wrong.lock().unwrap() = Some((seed, why));
                    }
                }
            });
        }
    });
    wrong.into_inner().unwrap()
}

#[test]
fn every_history_is_that_of_a_disk() {
    let begin = Instant::now();
    if let Some((seed, wrong)) = first_wrong(SEEDS) {
        panic!("seed {seed}: {wrong}");
    }
    let [cuts, late, replays] =
        [&TALLY.cuts, &TALLY.late, &TALLY.replays].map(|count| count.load(Ordering::Relaxed));
    println!(
        "{SEEDS} histories in {:?}: {cuts} cuts, {late} delivered late, {replays} replays",
        begin.elapsed()
    );
    assert!(cuts > 0 && late > 0 && replays > 0);
}

/// With each rule taken out, some history is not that of a disk. Each in a process of its own: beside it, others run with all of them.
#[cfg(feature = "mutations")]
mod without {
    use ioplane_nbd::mutation::Rule;

    use super::*;

    #[test]
    fn each_rule_is_needed() {
        each_is_noticed(&["Replay", "AnsweredOnce", "OneWriter", "Fence"], "without::a_rule");
    }

    #[test]
    fn a_rule() {
        let rules = [Rule::Replay, Rule::AnsweredOnce, Rule::OneWriter, Rule::Fence];
        let Some(name) = taken_out() else { return };
        let rule = *rules.iter().find(|rule| format!("{rule:?}") == name).unwrap();
        ioplane_nbd::mutation::remove(Some(rule));
        let wrong = first_wrong(SEEDS * 4);
        ioplane_nbd::mutation::remove(None);
        let Some((seed, wrong)) = wrong else { panic!("nobody notices that {rule:?} is gone") };
        println!("without {rule:?}: seed {seed}: {}", wrong.lines().next().unwrap_or_default());
    }
}
