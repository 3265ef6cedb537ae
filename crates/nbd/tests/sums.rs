//! Exports and imports in plain text over a network that changes bits: what it changes is noticed and named, and never given to anybody. Others are spoken to
//! as they want it.

#![expect(clippy::disallowed_types, reason = "a network of the tests, on threads of its own")]

#[path = "../../storage/tests/support/mod.rs"]
mod rig;
mod scripted;
mod support;

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ioplane_cores::Notify;
use ioplane_memory::GuestRange;
use ioplane_nbd::export::{ConnectionEnd, Ended, ExportOptions, WRONG_SUM};
use ioplane_nbd::handshake::ExportInfo;
use ioplane_nbd::handshake::client::{ClientHandshake, ClientOptions, ClientStep, ClientTls};
use ioplane_nbd::handshake::server::{ServerHandshake, ServerStep, TlsPolicy};
use ioplane_nbd::import::{AtStart, ConnectionState, Import, ImportOptions, ImportStatus, Unfenced};
use ioplane_nbd::spec::NBD_CMD_READ;
use ioplane_nbd::sums::{self, CRC32C, HEADER, RecordReader, RecordWriter, StreamSum};
use ioplane_nbd::transmission::Request;
use ioplane_nbd::{NbdError, Protection, Violation};
use ioplane_storage::{Backing, Fault, MemoryBacking, Op, Submitted, Tag};
use rig::Rig;
use support::listener::Listening;
use support::pattern;
use support::relay::{Way, relay, straight};

const SIZE: usize = 4 << 20;
/// Of one request.
const PART: usize = 48 << 10;
/// More than any handshake has.
const HANDSHAKE: usize = 1000;

fn exported(notify: Notify) -> Listening {
    let backing: Arc<dyn Backing> = MemoryBacking::new(SIZE as u64).unwrap();
    Listening::new(backing, ExportOptions::default(), notify)
}

fn options(port: u16) -> ImportOptions {
    ImportOptions {
        dead_after: Duration::from_secs(60),
        connect_timeout: Duration::from_secs(60),
        retry: (Duration::from_millis(5), Duration::from_millis(50)),
        unfenced: Unfenced::Replay,
        ..ImportOptions::new(format!("nbd://127.0.0.1:{port}/disk").parse().unwrap())
    }
}

/// One bit that is changed, on one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Flip {
    /// In what the client sends; otherwise in what the server does.
    requests: bool,
    /// Which byte of that.
    at: usize,
    bit: u8,
}

/// Changes a bit of each connection until no flips are left.
struct Network {
    port: u16,
    flips: Arc<Mutex<VecDeque<Flip>>>,
}

impl Network {
    fn to(server: u16, flips: impl IntoIterator<Item = Flip>) -> Network {
        let flips = Arc::new(Mutex::new(flips.into_iter().collect::<VecDeque<Flip>>()));
        let all = flips.clone();
        let ways = move || {
            let made = Arc::<AtomicBool>::default();
            [true, false].map(|requests| spoilt(requests, all.clone(), made.clone()))
        };
        Network { port: relay(move || server, ways), flips }
    }

    fn left(&self) -> usize {
        self.flips.lock().unwrap().len()
    }
}

/// The first of the flips is made if it is of this direction, its byte comes by, and none is `made` on this connection.
fn spoilt(requests: bool, flips: Arc<Mutex<VecDeque<Flip>>>, made: Arc<AtomicBool>) -> Way {
    let mut passed = 0;
    Box::new(move |bytes| {
        let mut flips = flips.lock().unwrap();
        if let Some(Flip { at, bit, .. }) = flips.front().copied().filter(|flip| flip.requests == requests)
            && !made.load(Ordering::SeqCst)
            && (passed..passed + bytes.len()).contains(&at)
        {
            bytes[at - passed] ^= 1 << bit;
            flips.pop_front();
            made.store(true, Ordering::SeqCst);
        }
        passed += bytes.len();
        Some(bytes.len())
    })
}

fn dice(seed: &mut u64) -> usize {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    (*seed >> 11) as usize
}

/// As many as are no failure of the device yet, in both directions.
fn drawn(seed: u64) -> Vec<Flip> {
    let mut dice_seed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut one = |number: usize| Flip {
        requests: (seed as usize + number).is_multiple_of(2),
        at: HANDSHAKE + dice(&mut dice_seed) % 150_000,
        bit: (dice(&mut dice_seed) % 8) as u8,
    };
    (0..4).map(&mut one).collect()
}

/// What a run came to.
struct Seen {
    /// Something was read that had not been written.
    wrong: Option<String>,
    flips: Vec<Flip>,
    status: ImportStatus,
    ends: Vec<Ended>,
}

/// Writes and reads over a network that changes bits, until it has changed all; then reads everything.
fn run(seed: u64, notify: Notify) -> Seen {
    let listening = exported(notify);
    let flips = drawn(seed);
    let network = Network::to(listening.address.port(), flips.clone());
    let import = scripted::import(options(network.port));
    let mut rig = Rig::new(&*import, 4);
    let mut wrong = None;
    let mut written = vec![vec![0; PART]; SIZE / PART];
    for round in 0.. {
        let place = round % written.len();
        let offset = (place * PART) as u64;
        written[place] = pattern(round as u64 * 64, PART, seed);
        rig.write(offset, &written[place]).unwrap();
        if rig.read(offset, PART as u32).unwrap() != written[place] {
            wrong.get_or_insert(format!("round {round}"));
        }
        if network.left() == 0 || wrong.is_some() {
            break;
        }
        assert!(round < 500, "{flips:?}: {} are never made", network.left());
    }
    for (place, bytes) in written.iter().enumerate() {
        if rig.read((place * PART) as u64, PART as u32).unwrap() != *bytes {
            wrong.get_or_insert(format!("place {place} in the end"));
        }
    }
    let status = import.status();
    drop(rig);
    drop(import);
    Seen { wrong, flips, status, ends: listening.close() }
}

fn is_of_sums(end: ConnectionEnd) -> bool {
    matches!(end, ConnectionEnd::Violation(violation) if violation.is_of_sums())
}

#[test]
fn what_a_network_changes_is_noticed_and_sent_again() {
    let (mut told, mut told_there, mut of_requests) = (0, 0, 0);
    for seed in 1..=12 {
        let notify = if seed % 3 == 0 { Notify::Polled } else { Notify::Notified };
        let Seen { wrong, flips, status, ends } = run(seed, notify);
        assert_eq!(wrong, None, "seed {seed}: {flips:?}");
        let connection = &status.connections[0];
        let ConnectionState::Connected { protection: Protection::Sums, .. } = connection.state else {
            panic!("seed {seed}: {connection:?}");
        };
        let requests = flips.iter().filter(|flip| flip.requests).count();
        // What the server has sent is noticed here, and what was sent to it is there, which tells it as far as the connection lasts.
        assert_eq!(connection.losses, flips.len() as u64, "seed {seed}: {flips:?}: {connection:?}");
        assert!(
            connection.changed >= (flips.len() - requests) as u64,
            "seed {seed}: {flips:?}: {connection:?}"
        );
        let noticed = ends.iter().filter(|ended| is_of_sums(ended.end)).count();
        // It is told of what was changed on its way here, as far as the connection lasts.
        assert!((requests..=flips.len()).contains(&noticed), "seed {seed}: {flips:?}: {ends:?}");
        told_there += noticed - requests;
        assert!(ends.iter().all(|ended| ended.end.name() != "violation"), "seed {seed}: {ends:?}");
        assert!(noticed == 0 || ends.iter().any(|ended| ended.end.name() == WRONG_SUM));
        told += connection.changed - (flips.len() - requests) as u64;
        of_requests += requests as u64;
    }
    println!("of {of_requests} changes of requests the client was told of {told}");
    assert!(told > 0 && told_there > 0, "of {of_requests}; the server of {told_there}");
}

/// As often as that, the network is not to be used: requests fail until a person decides.
#[test]
fn a_network_that_goes_on_changing_bits_is_a_failure() {
    let listening = exported(Notify::Notified);
    let flips = (0..5).map(|at| Flip { requests: false, at: HANDSHAKE + 1000 * at, bit: 3 });
    let network = Network::to(listening.address.port(), flips);
    let import = scripted::import(options(network.port));
    let mut rig = Rig::new(&*import, 4);
    assert_eq!(rig.read(0, 256 << 10), Err(Fault::Io(libc::EIO)));
    let status = scripted::until(&import, "stopped", |status| {
        matches!(status.connections[0].state, ConnectionState::Stopped { .. })
    });
    let ConnectionState::Stopped { why, .. } = &status.connections[0].state else { unreachable!() };
    assert!(why.contains("data were changed on the way on 5 connections"), "{why}");
    assert_eq!((status.connections[0].changed, status.connections[0].losses), (5, 5));
    import.retry();
    scripted::until(&import, "connected", |status| scripted::is_connected(&status.connections[0]));
    assert_eq!(rig.read(0, 256 << 10), Ok(vec![0; 256 << 10]));
}

/// Of the server's side of the handshake each byte is changed in turn: nobody gets a disk of another size, or one that is read-only or another instance.
#[test]
fn a_handshake_that_is_changed_is_noticed() {
    let listening = exported(Notify::Notified);
    let straight = scripted::import(options(listening.address.port()));
    let info = straight.info();
    let whole = (info.bytes, info.read_only, straight.status().instance);
    let (mut opened, mut refused, mut at) = (0, 0, 0);
    loop {
        let bit = (at * 5 % 8) as u8;
        let network = Network::to(listening.address.port(), [Flip { requests: false, at, bit }]);
        let limit = Duration::from_millis(500);
        let options =
            ImportOptions { connect_timeout: limit, at_start: AtStart::Refuse, ..options(network.port) };
        let result = scripted::runtime().block_on(Import::open(options));
        if network.left() > 0 {
            match result {
                // There are no more bytes.
                Ok(_) => break,
                // It was slow, and nothing was changed.
                Err(_) => continue,
            }
        }
        match result {
            Ok(import) => {
                let info = import.info();
                assert_eq!((info.bytes, info.read_only, import.status().instance), whole, "byte {at}");
                opened += 1;
            }
            Err(NbdError::Violation(violation)) => refused += usize::from(violation.is_of_sums()),
            Err(_) => {}
        }
        at += 1;
    }
    println!("of {at} bytes {refused} were noticed by sums, {opened} were of no account");
    assert!(at > 100 && refused > 30, "{refused} of {at}");
    // Where the server's word that it has sums is changed there are none; the rest is as it was.
    assert!(opened <= "ioplane:crc32c".len() + 1, "{opened} of {at}");
}

/// The server does nothing by queries of a client that were changed on the way: it might fence somebody off, or give a claim. That holds for each byte of them, those by
/// which it asks for sums included.
#[test]
fn changed_queries_are_not_carried_out() {
    let listening = exported(Notify::Notified);
    let port = listening.address.port();
    let queries = ["ioplane:instance", "ioplane:epoch=h/1/0/1", "ioplane:claim=h/ask/0/n"];
    let sum = sums::query("disk", queries);
    let contexts: Vec<String> = queries.map(String::from).into_iter().chain([sum.clone(), sum]).collect();
    assert!(shake(TcpStream::connect(("127.0.0.1", port)).unwrap(), contexts.clone()).is_ok());
    let asked: Vec<String> = listening.queries.try_iter().collect();
    assert_eq!(asked, queries);
    // The client's flags, a request for structured replies; the option, the export's name, the number of queries.
    let first = 4 + 16 + 16 + 4 + "disk".len() + 4;
    let mut at = first;
    for query in &contexts {
        // Behind its length: where that is changed the whole option is none.
        at += 4;
        for byte in at..at + query.len() {
            let flip = Flip { requests: true, at: byte, bit: (byte % 7) as u8 };
            let network = Network::to(port, [flip]);
            let shaken = shake(TcpStream::connect(("127.0.0.1", network.port)).unwrap(), contexts.clone());
            assert!(network.left() == 0 && shaken.is_err(), "byte {byte}");
            let why = listening.refused.recv_timeout(support::PATIENCE).unwrap();
            assert!(why.contains("the data were changed on the way"), "byte {byte}: {why}");
            let asked: Vec<String> = listening.queries.try_iter().collect();
            assert!(asked.is_empty(), "byte {byte}: {asked:?}");
        }
        at += query.len();
    }
}

/// All that the client says in its handshake is a part of the sum of its first request.
#[test]
fn a_changed_word_of_the_client_is_noticed_with_its_first_request() {
    let listening = exported(Notify::Notified);
    let mut client = ByHand::shake(&listening, b"something else");
    let request = client.request();
    client.stream.write_all(&request).unwrap();
    assert_eq!(client.received(1), (Vec::new(), Some(Violation::ChangedThere)));
    assert!(listening.close().iter().all(|ended| ended.end.name() == WRONG_SUM));
}

fn protection(import: &Import) -> Protection {
    spoken(import).0
}

/// How a connection is protected that begins now, and how many handshakes were changed before it.
fn spoken(import: &Import) -> (Protection, u64) {
    let mut rig = Rig::new(import, 1);
    let bytes = pattern(3, 20_000, 1);
    rig.write(512, &bytes[..19_968]).unwrap();
    assert!(rig.read(512, 19_968).unwrap() == bytes[..19_968]);
    let connection = import.status().connections.pop().unwrap();
    match connection.state {
        ConnectionState::Connected { protection, .. } => (protection, connection.changed),
        ref other => panic!("{other:?}"),
    }
}

/// A server that does not know sums does not select them: it is spoken to without.
#[test]
fn a_server_without_sums_is_used_as_before() {
    let backing: Arc<dyn Backing> = MemoryBacking::new(SIZE as u64).unwrap();
    let listening = Listening::without_sums(backing, ExportOptions::default(), Notify::Notified);
    assert_eq!(protection(&scripted::import(options(listening.address.port()))), Protection::None);
    let ends = listening.close();
    assert!(ends.iter().all(|ended| ended.end == ConnectionEnd::Disconnected), "{ends:?}");
    let listening = exported(Notify::Notified);
    assert_eq!(protection(&scripted::import(options(listening.address.port()))), Protection::Sums);
}

/// An exporter that has had sums has them still: without, its words were changed on the way. If that goes on, it is an older program by now.
#[test]
fn one_handshake_without_sums_is_not_believed_and_four_are() {
    let exported = |fenced: fn(Arc<dyn Backing>, ExportOptions, Notify) -> Listening| {
        fenced(MemoryBacking::new(SIZE as u64).unwrap(), ExportOptions::default(), Notify::Notified)
    };
    let (summed, bare) = (exported(Listening::fenced), exported(Listening::fenced_without_sums));
    let without = Arc::new(AtomicU32::new(0));
    let (left, places) = (without.clone(), [summed.address.port(), bare.address.port()]);
    let take = move || left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    let port = relay(move || places[usize::from(take().is_ok())], || [straight(), straight()]);
    for (handshakes, expected) in [(3, Protection::Sums), (9, Protection::None)] {
        without.store(0, Ordering::SeqCst);
        let import = scripted::import(options(port));
        assert_eq!(protection(&import), Protection::Sums);
        // Whoever comes next gets a server without.
        without.store(handshakes, Ordering::SeqCst);
        assert_eq!(spoken(&import), (expected, 3));
    }
}

/// The server has said why it ends the connection before the import finds that it takes nothing more.
#[test]
fn the_reason_is_read_although_nothing_can_be_sent_any_more() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (said, heard) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let [mut sent, _] = serve(&mut stream);
        stream.write_all(&sent.opening()).unwrap();
        stream.read_exact(&mut [0; HEADER + Request::SIZE]).unwrap();
        let mut writer = RecordWriter::new(sent);
        writer.seal_end().unwrap();
        stream.write_all(writer.unsent()).unwrap();
        // A reset, as of a host that has not read all.
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        drop(stream);
        said.send(()).unwrap();
    });
    let import = scripted::import(options(port));
    let mut rig = Rig::new(&*import, 4);
    let read = |rig: &mut Rig, tag| {
        let into = [GuestRange { gpa: 0, len: 512 }];
        let submitted = rig.submit(&Op::Read { offset: 0, into: &into }, Tag(tag));
        assert!(matches!(submitted, Submitted::Pending));
        rig.push();
    };
    read(&mut rig, 0);
    while heard.try_recv().is_err() {
        rig.push();
        std::thread::yield_now();
    }
    read(&mut rig, 1);
    // All that has come, and the end.
    rig.reap(&mut |_, _| {});
    let status = scripted::until(&import, "lost", |status| status.connections[0].losses > 0);
    assert_eq!(status.connections[0].changed, 1, "{status:?}");
}

/// The server's side of a handshake that gets sums; what was said in it, sent and received.
fn serve(stream: &mut TcpStream) -> [StreamSum; 2] {
    let mut handshake = ServerHandshake::new(TlsPolicy::Unsupported);
    let (mut sent, mut received) = (StreamSum::default(), StreamSum::default());
    // A byte at a time, as with `shake`.
    let mut byte = Vec::new();
    loop {
        let mut output = Vec::new();
        let step = handshake.next(&mut &byte[..], &mut output).unwrap();
        byte.clear();
        match &step {
            ServerStep::Find { .. } => {
                let (name, description) = Default::default();
                let info = ExportInfo { name, description, bytes: SIZE as u64, flags: 0, blocks: None };
                handshake.answer(Ok(info), &mut output);
            }
            ServerStep::Query { query, .. } => {
                handshake.context(sums::is_asked_by(query).then_some(CRC32C));
            }
            ServerStep::Read => {
                byte.resize(1, 0);
            }
            ServerStep::Transmission(_) | ServerStep::Send => {}
            other => panic!("{other:?}"),
        }
        sent.add(&output);
        stream.write_all(&output).unwrap();
        if let ServerStep::Transmission(_) = step {
            return [sent, received];
        }
        if !byte.is_empty() {
            stream.read_exact(&mut byte).unwrap();
            received.add(&byte);
        }
    }
}

/// By a socket of this host nobody asks for sums.
#[test]
fn a_socket_of_this_host_has_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let listening = exported(Notify::Notified);
    let port = listening.address.port();
    let heard = Arc::<Mutex<Vec<u8>>>::default();
    let all = heard.clone();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) =
                (client.unwrap(), TcpStream::connect(("127.0.0.1", port)).unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let heard = all.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                    heard.lock().unwrap().extend(&buffer[..bytes]);
                    if to.write_all(&buffer[..bytes]).is_err() {
                        break;
                    }
                }
                let _ = to.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || std::io::copy(&mut server, &mut client));
        }
    });
    let address = format!("nbd+unix:///disk?socket={}", path.display()).parse().unwrap();
    let import = scripted::import(ImportOptions { address, ..options(0) });
    // The server would have selected them.
    assert_eq!(protection(&import), Protection::None);
    let heard = heard.lock().unwrap();
    let said = |word: &[u8]| heard.windows(word.len()).any(|window| window == word);
    assert!(said(b"ioplane:instance") && !said(CRC32C.as_bytes()));
}

/// A client of others does not know that there are sums, and gets NBD as it is.
#[test]
fn a_client_without_sums_gets_plain_nbd() {
    let listening = exported(Notify::Notified);
    let stream = TcpStream::connect(listening.address).unwrap();
    let mut client = support::Client::shake(OwnedFd::from(stream).into(), true);
    let bytes = pattern(0, 100_000 / 512 * 512, 5);
    assert_eq!(client.write(0, &bytes).error, 0);
    assert!(client.read(0, bytes.len() as u32).data == bytes);
    client.disconnect();
}

/// A handshake that gets sums; what was said in it, sent and received. An error if the server ends it.
fn shake(mut stream: TcpStream, contexts: Vec<String>) -> std::io::Result<(TcpStream, [StreamSum; 2])> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(support::PATIENCE))?;
    let wants = ClientOptions { export: "disk".into(), tls: ClientTls::Never, structured: true, contexts };
    let mut handshake = ClientHandshake::new(wants).unwrap();
    let (mut sent, mut received) = (StreamSum::default(), StreamSum::default());
    loop {
        // A byte at a time: what follows the handshake is not taken for a part of it.
        let (mut byte, mut output) = ([0], Vec::new());
        let step = handshake.next(&mut &[][..], &mut output).unwrap();
        assert_eq!(step, ClientStep::Read);
        stream.read_exact(&mut byte)?;
        received.add(&byte);
        let step = handshake.next(&mut &byte[..], &mut output).unwrap();
        sent.add(&output);
        stream.write_all(&output)?;
        if let ClientStep::Transmission(connected) = step {
            assert!(connected.contexts.iter().any(|context| context.name == CRC32C));
            return Ok((stream, [sent, received]));
        }
    }
}

/// A client of ours as a test wants it: in the transmission phase, with sums.
struct ByHand {
    stream: TcpStream,
    writer: RecordWriter,
    reader: RecordReader,
}

impl ByHand {
    /// `said`: what it takes for a part of what it has said.
    fn shake(listening: &Listening, said: &[u8]) -> ByHand {
        let stream = TcpStream::connect(listening.address).unwrap();
        let (mut stream, spoken) = shake(stream, vec![CRC32C.to_owned()]).unwrap();
        let [mut sent, mut received] = spoken;
        let mut opening = [0; HEADER];
        stream.read_exact(&mut opening).unwrap();
        received.check_opening(opening).unwrap();
        sent.add(said);
        ByHand { stream, writer: RecordWriter::new(sent), reader: RecordReader::new(received) }
    }

    /// A record of a request to read 512 bytes.
    fn request(&mut self) -> Vec<u8> {
        let request = Request { flags: 0, command: NBD_CMD_READ, cookie: 1, offset: 0, length: 512 };
        let gather = &mut |into: &mut [u8]| {
            into.copy_from_slice(&request.encode());
            true
        };
        self.writer.seal(Request::SIZE, gather).unwrap();
        let record = self.writer.unsent().to_vec();
        self.writer.sent(record.len());
        record
    }

    /// What comes, until there are so many bytes or it ends; and how it ends.
    fn received(&mut self, bytes: usize) -> (Vec<u8>, Option<Violation>) {
        let (mut came, mut some) = (Vec::new(), [0; 600]);
        while came.len() < bytes {
            match self.reader.open() {
                Ok(Some(_)) => {
                    let bytes = self.reader.read(&mut some);
                    came.extend(&some[..bytes]);
                    continue;
                }
                Ok(None) => {}
                Err(violation) => return (came, Some(violation)),
            }
            match self.stream.read(self.reader.room()) {
                Ok(0) | Err(_) => break,
                Ok(bytes) => self.reader.received(bytes),
            }
        }
        (came, None)
    }
}

/// Whatever comes in place of a record: its sender is told, its connection ends, and nothing else does.
#[test]
fn a_client_that_lies_is_told_and_cut_off() {
    let listening = exported(Notify::Notified);
    let mut good = ByHand::shake(&listening, b"");
    let wrong: [fn(&mut ByHand) -> Vec<u8>; 5] = [
        // No record is that long.
        |_| vec![0x40, 1, 0xbf, 0xfe, 0, 0, 0, 0],
        |_| vec![0xff, 0xff, 0, 0, 0, 0, 0, 0],
        |_| vec![0xab; 100_000],
        // A request without records.
        |_| Request { flags: 0, command: NBD_CMD_READ, cookie: 1, offset: 0, length: 512 }.encode().to_vec(),
        // The same one twice.
        |client| {
            let record = client.request();
            [record.clone(), record].concat()
        },
    ];
    for (number, wrong) in wrong.into_iter().enumerate() {
        let mut client = ByHand::shake(&listening, b"");
        let bytes = wrong(&mut client);
        let _ = client.stream.write_all(&bytes);
        let (came, end) = client.received(usize::MAX);
        assert!(came.len() <= 20 + 8 + 512, "number {number}: {} bytes", came.len());
        // What it sends behind the lie may reset its connection before it has read.
        assert!(
            end == Some(Violation::ChangedThere) || (number == 2 && end.is_none()),
            "number {number}: {end:?}"
        );
    }
    let request = good.request();
    good.stream.write_all(&request).unwrap();
    assert_eq!(good.received(20 + 8 + 512).0.len(), 20 + 8 + 512);
    drop(good);
    let ends = listening.close();
    assert_eq!(ends.iter().filter(|ended| ended.end.name() == WRONG_SUM).count(), 5, "{ends:?}");
}

/// A byte at a time is as good as all at once.
#[test]
fn a_record_that_comes_slowly_is_a_record() {
    for notify in [Notify::Notified, Notify::Polled] {
        let listening = exported(notify);
        let mut client = ByHand::shake(&listening, b"");
        for byte in client.request() {
            client.stream.write_all(&[byte]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
        // A chunk of data: its header, its offset, its bytes.
        let (came, end) = client.received(20 + 8 + 512);
        assert_eq!((came.len(), end), (20 + 8 + 512, None));
    }
}

/// Without the sums being looked at, something that the network has changed is taken for what was written.
#[cfg(feature = "mutations")]
mod without {
    use ioplane_nbd::mutation::{Rule, remove};

    use super::*;

    const WITHOUT: &str = "IOPLANE_WITHOUT_RULE";

    /// In a process of its own: beside it, others run with all rules.
    #[test]
    fn the_rule_is_needed() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "without::the_rule", "--nocapture"])
            .env(WITHOUT, "Sum")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
        assert!(said.contains("without Sum: seed"), "{said}");
    }

    #[test]
    fn the_rule() {
        if std::env::var_os(WITHOUT).is_none() {
            return;
        }
        remove(Some(Rule::Sum));
        let wrong = (1..=12).find_map(|seed| run(seed, Notify::Notified).wrong.map(|wrong| (seed, wrong)));
        remove(None);
        let Some((seed, wrong)) = wrong else { panic!("nobody notices that {:?} is gone", Rule::Sum) };
        println!("without Sum: seed {seed}: {wrong}");
    }
}
