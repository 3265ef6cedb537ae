//! `nbd_requests`: a client that says anything to a running export, in any pieces, and stops reading now and then.
//!
//! Oracles: no panic; what the export says can be read by our own client: each reply is to a request in flight, and each request that came
//! whole before the end has one; the connection rests and goes on at any moment; it ends when its client has gone, and is given back.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use ioplane_device::{QueueSet, Quiescent, Running};
use ioplane_nbd::export::{Export, ExportOptions};
use ioplane_nbd::handshake::MetaContext;
use ioplane_nbd::handshake::server::Negotiated;
use ioplane_nbd::spec::*;
use ioplane_nbd::transmission::{ReplyEvent, ReplyReader, Request};
use ioplane_storage::{Backing, MemoryBacking};

use super::pieces;
use crate::Signature;
use crate::stage::Stage;

/// Longer than anything here takes: the stage has no thread.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of the disk.
const SIZE: u64 = 1 << 20;

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

/// The client's side.
struct Client {
    stream: UnixStream,
    reader: ReplyReader,
    /// Requests with their cookies, which are all different.
    asked: HashMap<u64, Request>,
    lost: bool,
}

impl Client {
    /// Takes what the export has said.
    fn listen(&mut self, signature: &mut Signature) {
        let mut buffer = vec![0; 64 << 10];
        while !self.lost {
            let mut input = match self.stream.read(&mut buffer) {
                Ok(0) => {
                    self.lost = true;
                    break;
                }
                Ok(read) => &buffer[..read],
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => {
                    self.lost = true;
                    break;
                }
            };
            loop {
                let asked = &self.asked;
                match self
                    .reader
                    .next(&mut input, |cookie| asked.get(&cookie).copied())
                    .expect("a sound reply")
                {
                    Some(ReplyEvent::Payload { length, .. }) => {
                        let take = input.len().min(length as usize);
                        input = &input[take..];
                        self.reader.advance(take as u32);
                        if take < length as usize {
                            break;
                        }
                    }
                    Some(ReplyEvent::Done { cookie }) => {
                        self.asked.remove(&cookie).expect("asked");
                        signature.saw("done");
                    }
                    Some(ReplyEvent::Error { error, .. }) => signature.count(error.into()),
                    Some(_) => {}
                    None => break,
                }
            }
        }
    }
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("fcntl");
    let backing: Arc<dyn Backing> = MemoryBacking::new(SIZE).expect("memory");
    let options = ExportOptions {
        read_only: !input.ratio(7, 8)?,
        connections: 1,
        depth: input.int_in_range(1..=8)?,
        memory: 64 << 10,
        largest: 32 << 10,
        // The stage has no thread: what a lookup finds is encoded in tests of the crate.
        holes: false,
        ..ExportOptions::default()
    };
    let export = Export::new("disk", backing, options).expect("an export");
    let ended = export.ended();
    let structured = input.ratio(1, 2)?;
    let negotiated = Negotiated {
        name: "disk".into(),
        info: export.published().info(),
        structured,
        contexts: if structured {
            vec![MetaContext { id: 1, name: BASE_ALLOCATION.into() }]
        } else {
            Vec::new()
        },
        keeps_blocks: true,
        by_name: false,
    };
    let stage = Stage::eager();
    let placement = stage.placement();
    let mut running: Running<Export> =
        Quiescent::new(export).resume(&*placement).expect("no queues to start");
    let queue = running
        .device_mut()
        .connect(std::os::fd::OwnedFd::from(ours), &negotiated, &[])
        .expect("a free place");
    let queues = QueueSet::from([queue]);
    running.start(&queues, &*placement).expect("a core");
    let mut client =
        Client { stream: theirs, reader: ReplyReader::new(structured), asked: HashMap::new(), lost: false };
    let (said, sound) = requests(input, &mut client.asked)?;
    for piece in pieces(input, &said)? {
        let mut left = piece;
        while !left.is_empty() && !client.lost {
            match client.stream.write(left) {
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => client.listen(signature),
                Err(_) => client.lost = true,
            }
            stage.run();
            if ended.try_next().is_some() {
                client.listen(signature);
                client.lost = true;
            }
        }
        match input.int_in_range(0..=7u8).unwrap_or(0) {
            0 => {
                running.drain(&queues);
                stage.run();
                assert!(running.wait_stopped(&queues, Instant::now() + PATIENCE), "it does not rest");
                if running.device().connections() == 0 {
                    client.listen(signature);
                    client.lost = true;
                } else {
                    running.start(&queues, &*placement).expect("a core");
                }
            }
            1 => stage.nap(true),
            2..=4 => client.listen(signature),
            _ => {}
        }
    }
    stage.run();
    client.listen(signature);
    stage.run();
    client.listen(signature);
    assert!(!sound || client.lost || client.asked.is_empty(), "no reply to {:?}", client.asked);
    drop(client);
    stage.run();
    running.drain(&queues);
    stage.run();
    assert!(stage.is_empty(), "the poller does not park");
    assert!(running.wait_stopped(&queues, Instant::now() + PATIENCE) && running.device().connections() == 0);
    Ok(())
}

/// Bytes of requests, and whether all of them are sound: framed as they should be, so that each has a reply.
fn requests(input: &mut Unstructured<'_>, asked: &mut HashMap<u64, Request>) -> Result<(Vec<u8>, bool)> {
    let (mut said, mut sound) = (Vec::new(), true);
    for cookie in 0..u64::from(input.int_in_range(1..=24u8)?) {
        let command = u16::from(input.int_in_range(0..=8u8)?);
        let flags = if !input.ratio(3, 4)? { input.int_in_range(0..=31u16)? } else { 0 };
        let mut offset = u64::from(input.int_in_range(0..=9u8)?) * 4096;
        let mut length = u32::from(input.int_in_range(0..=9u8)?) * 4096;
        if !input.ratio(7, 8)? {
            (offset, length) = (input.arbitrary()?, u32::from(input.arbitrary::<u16>()?));
        }
        let request = Request { flags, command, cookie, offset, length };
        let mut bytes = request.encode().to_vec();
        bytes.resize(bytes.len() + request.payload() as usize, cookie as u8);
        sound &= command != NBD_CMD_DISC;
        if !input.ratio(31, 32)? {
            // Not in the cookie: two requests of one cookie could not be told apart.
            let at = (16 + input.choose_index(Request::SIZE - 8)?) % Request::SIZE;
            bytes[at] ^= 1 << input.int_in_range(0..=7u8)?;
            sound = false;
            let mut header = [0; Request::SIZE];
            header.copy_from_slice(&bytes[..Request::SIZE]);
            if let Ok(request) = Request::decode(&header) {
                asked.insert(request.cookie, request);
            }
        }
        asked.entry(cookie).or_insert(request);
        said.extend(bytes);
    }
    Ok((said, sound))
}
