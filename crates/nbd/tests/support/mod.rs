//! An export on a core of its own, and a client that says exactly what a test wants it to say.

#![allow(dead_code, reason = "each test uses a part")]

pub mod hand;
pub mod listener;
pub mod relay;

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{Core, CoreSettings, Notify};
use ioplane_device::{CoreId, QueueSet, Quiescent, Running};
use ioplane_nbd::export::{AcceptedClient, Ended, Export, ExportOptions, Handshakes, PublishedExport};
use ioplane_nbd::handshake::client::{ClientHandshake, ClientOptions, ClientStep, ClientTls, Connected};
use ioplane_nbd::spec::*;
use ioplane_nbd::transmission::{Extent, ReplyEvent, ReplyReader, Request};
use ioplane_storage::Backing;

/// Longer than anything here may take.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// An export that runs.
pub struct Server {
    pub core: Core,
    pub running: Option<Running<Export>>,
    pub published: PublishedExport,
    pub handshakes: Handshakes,
    pub tokio: tokio::runtime::Runtime,
}

impl Server {
    pub fn new(backing: Arc<dyn Backing>) -> Server {
        Server::with(backing, ExportOptions::default(), Notify::Notified)
    }

    pub fn with(backing: Arc<dyn Backing>, options: ExportOptions, notify: Notify) -> Server {
        let core = Core::start(CoreId(0), CoreSettings { notify, ..CoreSettings::default() }).unwrap();
        let export = Export::new("disk", backing, options).unwrap();
        let published = export.published();
        let running = Quiescent::new(export).resume(&core).unwrap();
        let handshakes = Handshakes::new(4, PATIENCE);
        Server { core, running: Some(running), published, handshakes, tokio: runtime() }
    }

    pub fn running(&mut self) -> &mut Running<Export> {
        self.running.as_mut().expect("it runs")
    }

    /// The server's side of one handshake, with a client on another thread.
    pub fn accept(&self, stream: UnixStream) -> AcceptedClient<tokio::net::UnixStream> {
        stream.set_nonblocking(true).unwrap();
        self.tokio.block_on(async {
            let stream = tokio::net::UnixStream::from_std(stream).unwrap();
            self.handshakes.accept(stream, &self.published).await.unwrap().expect("a client that stays")
        })
    }

    /// A client in the transmission phase, and its queue.
    pub fn connect(&mut self, structured: bool) -> (Client, u16) {
        self.connect_told(structured, None)
    }

    /// The same; it was told of an instance when so many flushes had failed.
    pub fn connect_told(&mut self, structured: bool, failed: Option<u64>) -> (Client, u16) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let client = std::thread::spawn(move || Client::shake(theirs, structured));
        let AcceptedClient { stream, negotiated, ahead } = self.accept(ours);
        let client = client.join().unwrap();
        let socket = OwnedFd::from(stream.into_std().unwrap());
        let queue = self.running().device_mut().connect(socket, &negotiated, &ahead).unwrap();
        if let Some(failed) = failed {
            self.running().device_mut().bind(queue, failed);
        }
        self.start(queue);
        (client, queue)
    }

    /// A client by TCP that has entered by the export's name, and its queue.
    pub fn connect_by_tcp(&mut self) -> (TcpStream, u16) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.write_all(&hello()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let (handshakes, published) = (&self.handshakes, &self.published);
        let accepted = self.tokio.block_on(async {
            handshakes.accept(tokio::net::TcpStream::from_std(stream).unwrap(), published).await
        });
        let AcceptedClient { stream, negotiated, ahead } = accepted.unwrap().expect("a client that stays");
        assert!(negotiated.by_name && !negotiated.structured);
        let socket = OwnedFd::from(stream.into_std().unwrap());
        let queue = self.running().device_mut().connect(socket, &negotiated, &ahead).unwrap();
        self.start(queue);
        (client, queue)
    }

    pub fn start(&mut self, queue: u16) {
        let core: &Core = &self.core;
        self.running.as_mut().unwrap().start(&QueueSet::from([queue]), core).unwrap();
    }

    /// The next connection that ends, given back.
    pub fn ended(&mut self) -> Ended {
        let ended = self.running().device().ended();
        let ended = self.tokio.block_on(async { tokio::time::timeout(PATIENCE, ended.next()).await });
        let ended = ended.expect("no connection has ended");
        self.stop(ended.queue);
        ended
    }

    /// Parks the poller of a queue.
    pub fn stop(&mut self, queue: u16) {
        let queues = QueueSet::from([queue]);
        self.running().drain(&queues);
        assert!(self.running().wait_stopped(&queues, Instant::now() + PATIENCE), "it does not stop");
    }

    pub fn hold(&mut self) -> Quiescent<Export> {
        let running = self.running.take().expect("it runs");
        running.quiesce(Instant::now() + PATIENCE).unwrap_or_else(|missed| panic!("{missed:?}"))
    }

    pub fn resume(&mut self, quiescent: Quiescent<Export>) {
        self.running = Some(quiescent.resume(&self.core).unwrap());
    }
}

/// What a client says to enter the export `disk`: flags, and an option `NBD_OPT_EXPORT_NAME`.
pub fn hello() -> Vec<u8> {
    let mut hello = 3_u32.to_be_bytes().to_vec();
    hello.extend(IHAVEOPT.to_be_bytes());
    hello.extend(NBD_OPT_EXPORT_NAME.to_be_bytes());
    hello.extend(4_u32.to_be_bytes());
    hello.extend(b"disk");
    hello
}

/// A reply.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Reply {
    pub cookie: u64,
    pub error: u32,
    pub message: String,
    pub data: Vec<u8>,
    pub extents: Vec<(u32, Extent)>,
}

/// The client's side of a connection, by blocking calls.
pub struct Client {
    pub stream: UnixStream,
    pub connected: Connected,
    reader: ReplyReader,
    pub in_flight: HashMap<u64, (Request, Reply)>,
    input: Vec<u8>,
    next: u64,
}

impl Client {
    pub fn shake(mut stream: UnixStream, structured: bool) -> Client {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let contexts = vec![BASE_ALLOCATION.to_owned()];
        let wants = ClientOptions { export: "disk".into(), tls: ClientTls::Never, structured, contexts };
        let mut handshake = ClientHandshake::new(wants).unwrap();
        let (mut buffer, mut output) = ([0; 4096], Vec::new());
        let mut filled = 0;
        loop {
            let mut input = &buffer[..filled];
            let step = handshake.next(&mut input, &mut output).unwrap();
            let rest = input.to_vec();
            stream.write_all(&output).unwrap();
            output.clear();
            match step {
                ClientStep::Read => filled = stream.read(&mut buffer).unwrap(),
                ClientStep::StartTls => panic!("no TLS was asked for"),
                ClientStep::Transmission(connected) => {
                    let reader = ReplyReader::new(connected.structured);
                    let in_flight = HashMap::new();
                    return Client { stream, connected, reader, in_flight, input: rest, next: 1 };
                }
            }
            assert!(filled > 0, "the server has closed the connection");
        }
    }

    /// Bytes of a request, noted down as in flight.
    pub fn encode(&mut self, command: u16, flags: u16, offset: u64, length: u32) -> Vec<u8> {
        let cookie = self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.next += 1;
        let request = Request { flags, command, cookie, offset, length };
        self.in_flight.insert(cookie, (request, Reply { cookie, ..Reply::default() }));
        request.encode().to_vec()
    }

    pub fn send(&mut self, command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> u64 {
        let mut bytes = self.encode(command, flags, offset, length);
        let cookie = u64::from_be_bytes(bytes[8..16].try_into().unwrap());
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
        cookie
    }

    /// The next reply that is complete; `None` when the server has closed the connection.
    pub fn reply(&mut self) -> Option<Reply> {
        loop {
            let mut input = &self.input[..];
            let in_flight = &self.in_flight;
            let find = |cookie| in_flight.get(&cookie).map(|(request, _)| *request);
            let event = self.reader.next(&mut input, find).unwrap();
            let used = self.input.len() - input.len();
            self.input.drain(..used);
            match event {
                None => {
                    let mut buffer = [0; 32 << 10];
                    match self.stream.read(&mut buffer) {
                        Ok(0) => return None,
                        Ok(read) => self.input.extend(&buffer[..read]),
                        Err(error) if error.kind() == ErrorKind::ConnectionReset => return None,
                        // The process was stopped and goes on.
                        Err(error) if error.kind() == ErrorKind::Interrupted => {}
                        Err(error) => panic!("no reply: {error}"),
                    }
                }
                Some(ReplyEvent::Payload { cookie, offset, length }) => {
                    let take = self.input.len().min(length as usize);
                    if take == 0 {
                        let mut buffer = [0; 32 << 10];
                        match self.stream.read(&mut buffer) {
                            Ok(0) => panic!("cut off in the data of a read"),
                            Ok(read) => self.input.extend(&buffer[..read]),
                            Err(error) if error.kind() == ErrorKind::Interrupted => {}
                            Err(error) => panic!("no data: {error}"),
                        }
                        continue;
                    }
                    let (request, reply) = self.in_flight.get_mut(&cookie).unwrap();
                    reply.data.resize(request.length as usize, 0xee);
                    let at = (offset - request.offset) as usize;
                    reply.data[at..at + take].copy_from_slice(&self.input[..take]);
                    self.input.drain(..take);
                    self.reader.advance(take as u32);
                }
                Some(ReplyEvent::Hole { cookie, offset, length }) => {
                    let (request, reply) = self.in_flight.get_mut(&cookie).unwrap();
                    reply.data.resize(request.length as usize, 0xee);
                    let at = (offset - request.offset) as usize;
                    reply.data[at..at + length as usize].fill(0);
                }
                Some(ReplyEvent::BlockStatus { cookie, context, extent }) => {
                    self.in_flight.get_mut(&cookie).unwrap().1.extents.push((context, extent));
                }
                Some(ReplyEvent::Error { cookie, error, .. }) => {
                    let message = String::from_utf8_lossy(self.reader.message()).into_owned();
                    let (_, reply) = self.in_flight.get_mut(&cookie).unwrap();
                    (reply.error, reply.message) = (error, message);
                }
                Some(ReplyEvent::Done { cookie }) => {
                    let (_, reply) = self.in_flight.remove(&cookie).unwrap();
                    return Some(reply);
                }
            }
        }
    }

    /// One request, and its reply.
    pub fn call(&mut self, command: u16, flags: u16, offset: u64, length: u32, data: &[u8]) -> Reply {
        let cookie = self.send(command, flags, offset, length, data);
        let reply = self.reply().expect("a reply");
        assert_eq!(reply.cookie, cookie);
        reply
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Reply {
        self.call(NBD_CMD_WRITE, 0, offset, data.len() as u32, data)
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Reply {
        self.call(NBD_CMD_READ, 0, offset, length, &[])
    }

    /// Says goodbye, and waits until the server has closed the connection.
    pub fn disconnect(mut self) {
        let request = Request { flags: 0, command: NBD_CMD_DISC, cookie: 0, offset: 0, length: 0 };
        self.stream.write_all(&request.encode()).unwrap();
        assert_eq!(self.reply(), None);
    }
}

/// Bytes that tell where they belong.
pub fn pattern(offset: u64, length: usize, salt: u64) -> Vec<u8> {
    let words = (offset / 8..).map(|word| (word ^ (salt << 40)).wrapping_mul(0x2545_f491_4f6c_dd1d));
    words.flat_map(u64::to_le_bytes).take(length).collect()
}
