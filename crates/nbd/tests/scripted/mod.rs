//! A server that does what a test says, on a Unix socket. It shares no code with the crate but the names of constants.
#![allow(dead_code)]
#![allow(clippy::disallowed_types, reason = "a server of the tests, on threads of its own")]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ioplane_nbd::import::{ConnectionState, ConnectionStatus, Import, ImportOptions, ImportStatus, Unfenced};
use ioplane_nbd::spec::*;

/// What the handshake tells.
#[derive(Debug, Clone)]
pub struct Terms {
    pub bytes: u64,
    pub flags: u16,
    pub structured: bool,
    /// Minimum and preferred block, maximum payload.
    pub blocks: Option<[u32; 3]>,
    pub instance: Option<String>,
    pub reservations: Option<Reservations>,
}

/// A server that keeps requests per second for its client.
#[derive(Debug, Clone)]
pub struct Reservations {
    /// What it has for that client: more than that is refused.
    pub free: Arc<AtomicU32>,
    /// What it was asked to keep, and what it keeps: requests per second.
    pub asked: Arc<Mutex<Vec<u64>>>,
    pub kept: Arc<AtomicU32>,
    /// It closes the connection when it has carried out what it was asked.
    pub silent: Arc<AtomicBool>,
    /// It has read what it was asked, and neither carries it out nor answers.
    pub slow: Arc<AtomicBool>,
    /// The numbers of the questions.
    pub orders: Arc<Mutex<Vec<u64>>>,
}

impl Default for Reservations {
    fn default() -> Self {
        let (asked, kept, silent, slow, orders) = Default::default();
        Reservations { free: Arc::new(AtomicU32::new(1000)), asked, kept, silent, slow, orders }
    }
}

impl Reservations {
    /// The name of the context in its reply, if its query is among these; nothing more if it does not answer.
    fn answer(&self, queries: &str) -> Option<String> {
        let Some((_, query)) = queries.split_once("ioplane:reserve=") else {
            let asks = queries.contains("ioplane:reserve");
            return Some(if asks { "ioplane:reserve".to_owned() } else { String::new() });
        };
        let requests: u64 = query.split('/').nth(1).unwrap().parse().unwrap();
        let order = queries.split_once("ioplane:order=").expect("each question has a number").1;
        let digits = order.split_once(|c: char| !c.is_ascii_digit()).unwrap().0;
        self.orders.lock().unwrap().push(digits.parse().unwrap());
        self.asked.lock().unwrap().push(requests);
        while self.slow.load(Ordering::Acquire) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let free = self.free.load(Ordering::Acquire);
        if requests > u64::from(free) && requests != u64::from(self.kept.load(Ordering::Acquire)) {
            return Some(format!("ioplane:reserve=refused/{free} are free"));
        }
        self.kept.store(requests as u32, Ordering::Release);
        let answers = !self.silent.load(Ordering::Acquire);
        answers.then(|| format!("ioplane:reserve=granted/{requests}/0"))
    }
}

/// All that a server can do.
pub const ALL: u16 = NBD_FLAG_HAS_FLAGS
    | NBD_FLAG_SEND_FLUSH
    | NBD_FLAG_SEND_FUA
    | NBD_FLAG_SEND_TRIM
    | NBD_FLAG_SEND_WRITE_ZEROES
    | NBD_FLAG_CAN_MULTI_CONN;

impl Default for Terms {
    fn default() -> Self {
        Terms {
            bytes: 1 << 20,
            flags: ALL,
            structured: true,
            blocks: None,
            instance: None,
            reservations: None,
        }
    }
}

/// A request as the server reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    pub flags: u16,
    pub command: u16,
    pub cookie: u64,
    pub offset: u64,
    pub length: u32,
    pub data: Vec<u8>,
}

/// One connection in the transmission phase.
pub struct Session {
    pub stream: UnixStream,
    pub structured: bool,
    /// Counted from 0.
    pub number: u32,
    /// What the client was told.
    pub instance: Option<String>,
    /// Bytes that it still reads, and sends, before it closes.
    pub reads: usize,
    pub sends: usize,
}

impl Session {
    fn fill(&mut self, bytes: &mut [u8]) -> bool {
        let take = bytes.len().min(self.reads);
        self.reads -= take;
        self.stream.read_exact(&mut bytes[..take]).is_ok() && take == bytes.len()
    }

    /// The next request, `None` at the end.
    pub fn next(&mut self) -> Option<Asked> {
        let mut header = [0; 28];
        if !self.fill(&mut header) {
            return None;
        }
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap());
        assert_eq!(word(0), 0x2560_9513, "the client lost its place");
        let (flags, command) = ((word(4) >> 16) as u16, word(4) as u16);
        let mut asked =
            Asked { flags, command, cookie: long(8), offset: long(16), length: word(24), data: Vec::new() };
        if command == NBD_CMD_WRITE {
            asked.data = vec![0; asked.length as usize];
            let mut data = std::mem::take(&mut asked.data);
            if !self.fill(&mut data) {
                return None;
            }
            asked.data = data;
        }
        (command != NBD_CMD_DISC).then_some(asked)
    }

    /// Sends `bytes`, or as many as it may; false once it should close.
    pub fn send(&mut self, bytes: &[u8]) -> bool {
        let take = bytes.len().min(self.sends);
        self.sends -= take;
        self.stream.write_all(&bytes[..take]).is_ok() && take == bytes.len()
    }

    /// The reply to a request that has succeeded: one chunk, or a simple reply.
    pub fn reply(&self, asked: &Asked, data: &[u8]) -> Vec<u8> {
        match (self.structured && asked.command == NBD_CMD_READ, asked.command) {
            (true, _) => data_chunk(asked, 1, asked.offset, data),
            _ => [&simple(asked, 0)[..], data].concat(),
        }
    }
}

pub fn simple(asked: &Asked, error: u32) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &asked.cookie.to_be_bytes()].concat()
}

pub fn chunk(asked: &Asked, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
    let length = payload.len() as u32;
    [
        &0x668e_33efu32.to_be_bytes()[..],
        &flags.to_be_bytes(),
        &kind.to_be_bytes(),
        &asked.cookie.to_be_bytes(),
        &length.to_be_bytes(),
        payload,
    ]
    .concat()
}

pub fn data_chunk(asked: &Asked, flags: u16, offset: u64, data: &[u8]) -> Vec<u8> {
    chunk(asked, flags, NBD_REPLY_TYPE_OFFSET_DATA, &[&offset.to_be_bytes()[..], data].concat())
}

pub fn hole_chunk(asked: &Asked, flags: u16, offset: u64, len: u32) -> Vec<u8> {
    chunk(asked, flags, NBD_REPLY_TYPE_OFFSET_HOLE, &[&offset.to_be_bytes()[..], &len.to_be_bytes()].concat())
}

/// The bytes of an export, and what was done to them.
#[derive(Debug)]
pub struct Disk {
    pub bytes: Mutex<Vec<u8>>,
    pub done: Mutex<Vec<Asked>>,
}

impl Disk {
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Disk { bytes: Mutex::new(vec![0; bytes as usize]), done: Mutex::default() })
    }

    /// Carries a request out; the data of a read.
    pub fn carry_out(&self, asked: &Asked) -> Vec<u8> {
        self.done.lock().unwrap().push(Asked { data: Vec::new(), ..asked.clone() });
        let mut bytes = self.bytes.lock().unwrap();
        let range = asked.offset as usize..asked.offset as usize + asked.length as usize;
        match asked.command {
            NBD_CMD_READ => return bytes[range].to_vec(),
            NBD_CMD_WRITE => bytes[range].copy_from_slice(&asked.data),
            NBD_CMD_WRITE_ZEROES => bytes[range].fill(0),
            _ => {}
        }
        Vec::new()
    }

    /// How many requests of a command were carried out.
    pub fn count(&self, command: u16) -> usize {
        self.done.lock().unwrap().iter().filter(|asked| asked.command == command).count()
    }
}

type Behaviour = dyn Fn(Session) + Send + Sync;

/// See the module. Its threads end with their connections; the listening one when it is dropped.
pub struct Server {
    pub terms: Arc<Mutex<Terms>>,
    pub accepted: Arc<AtomicU32>,
    folder: tempfile::TempDir,
    stop: Arc<AtomicBool>,
}

impl Server {
    /// `behave` has each connection once it is in the transmission phase.
    pub fn start(terms: Terms, behave: impl Fn(Session) + Send + Sync + 'static) -> Server {
        let server = Server {
            terms: Arc::new(Mutex::new(terms)),
            accepted: Arc::default(),
            folder: tempfile::tempdir().unwrap(),
            stop: Arc::default(),
        };
        let listener = UnixListener::bind(server.path()).unwrap();
        let (terms, accepted, stop) = (server.terms.clone(), server.accepted.clone(), server.stop.clone());
        let behave: Arc<Behaviour> = Arc::new(behave);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Acquire) {
                    return;
                }
                let (terms, behave) = (terms.lock().unwrap().clone(), behave.clone());
                let number = accepted.fetch_add(1, Ordering::AcqRel);
                std::thread::spawn(move || {
                    if let Some(session) = shake_hands(stream.unwrap(), &terms, number) {
                        behave(session);
                    }
                });
            }
        });
        server
    }

    /// A server that carries out what it is asked, in order.
    pub fn obedient(terms: Terms) -> (Server, Arc<Disk>) {
        let disk = Disk::new(terms.bytes);
        let served = disk.clone();
        (Server::start(terms, move |session| obey(session, &served)), disk)
    }

    pub fn path(&self) -> PathBuf {
        self.folder.path().join("nbd.sock")
    }

    /// Quick to notice and quick to come back, and told to replay.
    pub fn options(&self) -> ImportOptions {
        let address = format!("nbd+unix:///x?socket={}", self.path().display());
        ImportOptions {
            retry: (Duration::from_millis(1), Duration::from_millis(20)),
            unfenced: Unfenced::Replay,
            ..ImportOptions::new(address.parse().unwrap())
        }
    }

    /// Connections so far.
    pub fn connections(&self) -> u32 {
        self.accepted.load(Ordering::Acquire)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = UnixStream::connect(self.path());
    }
}

/// Serves `session` as asked.
pub fn obey(mut session: Session, disk: &Disk) {
    while let Some(asked) = session.next() {
        let data = disk.carry_out(&asked);
        let reply = session.reply(&asked, &data);
        if !session.send(&reply) {
            return;
        }
    }
}

fn shake_hands(mut stream: UnixStream, terms: &Terms, number: u32) -> Option<Session> {
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03").ok()?;
    stream.read_exact(&mut [0; 4]).ok()?;
    let mut structured = false;
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).ok()?;
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let mut data = vec![0; u32::from_be_bytes(header[12..].try_into().unwrap()) as usize];
        stream.read_exact(&mut data).ok()?;
        let reply = |kind: u32, data: &[u8]| {
            let length = data.len() as u32;
            let start = NBD_REP_MAGIC.to_be_bytes();
            [&start[..], &option.to_be_bytes(), &kind.to_be_bytes(), &length.to_be_bytes(), data].concat()
        };
        let mut out = Vec::new();
        match option {
            NBD_OPT_STRUCTURED_REPLY if terms.structured => {
                structured = true;
                out.extend(reply(NBD_REP_ACK, &[]));
            }
            NBD_OPT_SET_META_CONTEXT => {
                if let Some(instance) = &terms.instance {
                    let context =
                        [&[0, 0, 0, 1][..], format!("ioplane:instance={instance}").as_bytes()].concat();
                    out.extend(reply(NBD_REP_META_CONTEXT, &context));
                }
                if let Some(reservations) = &terms.reservations {
                    let name = reservations.answer(&String::from_utf8_lossy(&data))?;
                    if !name.is_empty() {
                        let context = [&[0, 0, 0, 2][..], name.as_bytes()].concat();
                        out.extend(reply(NBD_REP_META_CONTEXT, &context));
                    }
                }
                out.extend(reply(NBD_REP_ACK, &[]));
            }
            NBD_OPT_GO => {
                let flags = terms.flags.to_be_bytes();
                out.extend(reply(NBD_REP_INFO, &[&[0, 0][..], &terms.bytes.to_be_bytes(), &flags].concat()));
                if let Some(blocks) = terms.blocks {
                    let blocks = blocks.map(u32::to_be_bytes).concat();
                    out.extend(reply(NBD_REP_INFO, &[&[0, 3][..], &blocks].concat()));
                }
                out.extend(reply(NBD_REP_ACK, &[]));
            }
            _ => out.extend(reply(NBD_REP_ERR_UNSUP, &[])),
        }
        stream.write_all(&out).ok()?;
        if option == NBD_OPT_GO {
            let instance = terms.instance.clone();
            return Some(Session {
                stream,
                structured,
                number,
                instance,
                reads: usize::MAX,
                sends: usize::MAX,
            });
        }
    }
}

/// The runtime of all imports of a test program.
pub fn runtime() -> &'static tokio::runtime::Runtime {
    static RUNTIME: std::sync::OnceLock<tokio::runtime::Runtime> = std::sync::OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
    })
}

pub fn import(options: ImportOptions) -> Arc<Import> {
    runtime().block_on(Import::open(options)).unwrap()
}

pub fn is_connected(connection: &ConnectionStatus) -> bool {
    matches!(connection.state, ConnectionState::Connected { .. })
}

/// Looks at the status until it is as wanted; fails after 10 s.
pub fn until(import: &Import, what: &str, wanted: impl Fn(&ImportStatus) -> bool) -> ImportStatus {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let status = import.status();
        if wanted(&status) {
            return status;
        }
        assert!(Instant::now() < deadline, "not {what} within 10 s: {status:#?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
