//! `vhost_user`: a front end that may send anything, in any order, with any descriptors, and change its memory meanwhile.
//!
//! Oracles: the session ends with a value (no panic, nothing endless), the device is given back when its front end is gone,
//! no descriptor and no mapping is left behind.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::time::Duration;

use arbitrary::{Result, Unstructured};
use ioplane_host::vhost_user::{Connection, Session};
use ioplane_memory::Limits;
use tokio::runtime::Runtime;

use crate::Signature;
use crate::blk_request::disk;
use crate::guest::descriptor;
use crate::stage::Stage;
use crate::wire::{self, drain};

/// Bytes of one file that a front end shares.
const FILE: u64 = 64 << 10;
/// Most messages of one run.
const MESSAGES: usize = 48;
/// The front end's own addresses begin here.
const USER: u64 = 0x7000_0000_0000;
/// Longer than any run can take: the device's patience with a queue that would not drain is 20 s.
const ENDLESS: Duration = Duration::from_secs(15);

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
    })
}

/// What the front end has in its hands.
#[derive(Default)]
struct FrontEnd {
    memory: Vec<OwnedFd>,
    kicks: Vec<OwnedFd>,
}

/// What happens between two messages.
enum Between {
    Nothing,
    Shrink(usize, u64),
    Poke(usize, u64, Vec<u8>),
    Kick(usize),
    Turn,
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("fcntl");
    let blk = disk(input)?;
    let mut front = FrontEnd::default();
    let mut between = Vec::new();
    let mut outcome = Ok(());
    let opening = input.ratio(7, 8)?;
    for number in 0..MESSAGES {
        let usual = OPENING.get(number).filter(|_| opening);
        let sent = match usual {
            Some(request) => send(&theirs, input, &mut front, *request),
            None if input.is_empty() => break,
            None => {
                input.int_in_range(0..=45u32).and_then(|request| send(&theirs, input, &mut front, request))
            }
        };
        if let Err(error) = sent.and_then(|()| pause(input, &front).map(|pause| between.push(pause))) {
            outcome = Err(error);
            break;
        }
    }
    let replies = theirs.try_clone().expect("dup");
    theirs.shutdown(std::net::Shutdown::Write).expect("shutdown");
    let serving = async {
        let stage = Stage::eager();
        let mut session =
            Session::new(blk, stage.placement(), Limits::default()).expect("a session").with_dirty_log(true);
        ours.set_nonblocking(true).expect("fcntl");
        let stream = tokio::net::UnixStream::from_std(ours).expect("registering");
        let mut connection = Connection::new(stream);
        let mut between = between.into_iter();
        let fault = loop {
            let message = match connection.receive().await {
                Ok(message) => message,
                Err(fault) => break fault,
            };
            signature.count(message.header.request as u64);
            if let Err(fault) = session.handle(message, &connection).await {
                break fault;
            }
            between.next().unwrap_or(Between::Nothing).happen(&front, &stage);
            drain(&replies);
        };
        signature.saw(fault.name());
        for meter in session.device().into_iter().flat_map(|device| device.device().meters()) {
            signature.count(meter.read().requests);
            signature.count(meter.read().faults);
        }
        drop(connection);
        session.forget_peer().await.expect("the device is given back");
        assert!(stage.is_empty(), "a poller is still on its core");
        let device = session.device().expect("the device is there");
        assert!(device.queues().is_empty() && device.device().view().map().regions().is_empty());
    };
    let ended = runtime().block_on(async { tokio::time::timeout(ENDLESS, serving).await });
    assert!(ended.is_ok(), "the session did not end within {ENDLESS:?}");
    outcome
}

/// A front end's usual beginning.
const OPENING: [u32; 13] = [15, 16, 2, 3, 5, 8, 10, 9, 12, 13, 18, 31, 32];

impl Between {
    fn happen(self, front: &FrontEnd, stage: &Stage) {
        match self {
            Between::Nothing => {}
            Between::Shrink(file, len) => {
                if let Some(file) = front.memory.get(file) {
                    let _ = rustix::fs::ftruncate(file, len);
                }
                stage.run();
            }
            Between::Poke(file, at, bytes) => {
                if let Some(file) = front.memory.get(file) {
                    let _ = rustix::io::pwrite(file, &bytes, at);
                }
            }
            Between::Kick(kick) => {
                if let Some(kick) = front.kicks.get(kick) {
                    let _ = rustix::io::write(kick, &1u64.to_ne_bytes());
                }
                stage.nap(false);
                stage.run();
            }
            Between::Turn => stage.run(),
        }
    }
}

fn pause(input: &mut Unstructured<'_>, front: &FrontEnd) -> Result<Between> {
    let file = front.memory.len().saturating_sub(1);
    Ok(match input.int_in_range(0..=15u8)? {
        0 => Between::Shrink(file, input.int_in_range(0..=FILE)?),
        1..=3 => {
            Between::Poke(file, u64::from(input.arbitrary::<u16>()?), input.arbitrary::<[u8; 8]>()?.to_vec())
        }
        4..=6 => {
            // One more request made available in the ring where the opening puts it.
            let idx = input.int_in_range(0..=12u16)?;
            Between::Poke(file, 0x3002, idx.to_le_bytes().to_vec())
        }
        7 => Between::Kick(input.int_in_range(0..=3)?),
        8..=10 => Between::Turn,
        _ => Between::Nothing,
    })
}

/// Sends one message: the body that the request should have, with mistakes.
fn send(theirs: &UnixStream, input: &mut Unstructured<'_>, front: &mut FrontEnd, request: u32) -> Result<()> {
    let mut files = Vec::new();
    let mut body = body(input, front, request, &mut files)?;
    let mut flags = 1u32 | if input.arbitrary()? { 8 } else { 0 };
    let mut size = body.len() as u32;
    match input.int_in_range(0..=63u8)? {
        0 => flags = input.arbitrary()?,
        1 => size = input.arbitrary()?,
        2 => body.truncate(input.int_in_range(0..=body.len())?),
        3 => {
            body.extend(input.arbitrary::<[u8; 16]>()?);
            size = body.len() as u32;
        }
        4 => files.push(file(input, front)?),
        5 => drop(files.pop()),
        6 if !body.is_empty() => {
            let at = input.choose_index(body.len())?;
            body[at] ^= input.arbitrary::<u8>()?;
        }
        _ => {}
    }
    let mut bytes = Vec::with_capacity(12 + body.len());
    for word in [request, flags, size] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(body);
    wire::send(theirs, input, &bytes, &files)
}

/// Some descriptor.
fn file(input: &mut Unstructured<'_>, front: &mut FrontEnd) -> Result<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, Mode, OFlags};
    Ok(match input.int_in_range(0..=7u8)? {
        0..=2 => memory(front),
        3..=4 => eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
        5 => rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("/dev/null"),
        6 => rustix::fs::memfd_create("empty", MemfdFlags::CLOEXEC).expect("a memfd"),
        _ => rustix::pipe::pipe().expect("a pipe").0,
    })
}

/// A file of guest memory with a ring in it: a few requests with direct descriptors.
fn memory(front: &mut FrontEnd) -> OwnedFd {
    let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, FILE).expect("ftruncate");
    let mut ring = Vec::new();
    for head in 0..16u64 {
        // Header, data, status: reads of sector zero, by the zeros that are there.
        let (addr, len, flags) =
            [(0x5000, 16, 1), (0x6000, 512, 3), (0x7000 + head, 1, 2)][(head % 3) as usize];
        ring.extend(descriptor(addr, len, flags, head as u16 + 1));
    }
    let _ = rustix::io::pwrite(&file, &ring, 0x1000);
    let heads: Vec<u8> = (0..8u16).flat_map(|slot| (slot % 5 * 3).to_le_bytes()).collect();
    let _ = rustix::io::pwrite(&file, &heads, 0x3004);
    let copy = file.try_clone().expect("dup");
    front.memory.push(copy);
    file
}

/// Mostly `usual`.
fn nearly(input: &mut Unstructured<'_>, usual: u64) -> Result<u64> {
    Ok(match input.int_in_range(0..=31u8)? {
        0 => input.arbitrary()?,
        1 => usual ^ (1 << input.int_in_range(0..=63u32)?),
        2 => usual.wrapping_add(u64::from(input.arbitrary::<u8>()?)),
        _ => usual,
    })
}

fn body(
    input: &mut Unstructured<'_>,
    front: &mut FrontEnd,
    request: u32,
    files: &mut Vec<OwnedFd>,
) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    let queue = if input.ratio(1, 8)? { input.arbitrary()? } else { 0u32 };
    match request {
        // SET_FEATURES, SET_PROTOCOL_FEATURES.
        2 => body.extend(nearly(input, 0x1_7000_0a54)?.to_le_bytes()),
        16 => body.extend(nearly(input, 0x922b)?.to_le_bytes()),
        // SET_MEM_TABLE.
        5 => {
            let count = input.int_in_range(1..=3u32)?;
            body.extend((nearly(input, count.into())? as u32).to_le_bytes());
            body.extend(0u32.to_le_bytes());
            for index in 0..u64::from(count) {
                region(input, index, &mut body)?;
                files.push(if input.ratio(1, 24)? { file(input, front)? } else { memory(front) });
            }
            // The first of this table has the ring: it is the one that is poked at, the last in the list.
            let table = front.memory.len().saturating_sub(count as usize);
            front.memory[table..].reverse();
        }
        // ADD_MEM_REG, REM_MEM_REG.
        37 | 38 => {
            body.extend(0u64.to_le_bytes());
            let index = input.int_in_range(0..=4)?;
            region(input, index, &mut body)?;
            if request == 37 {
                files.push(memory(front));
            }
        }
        // SET_VRING_NUM, BASE, ENABLE; GET_VRING_BASE.
        8 | 10 | 11 | 18 => {
            let usual = match request {
                8 => 8,
                18 => u64::from(!input.ratio(1, 6)?),
                _ => 0,
            };
            body.extend(queue.to_le_bytes());
            body.extend((nearly(input, usual)? as u32).to_le_bytes());
        }
        // SET_VRING_ADDR.
        9 => {
            body.extend(queue.to_le_bytes());
            body.extend(0u32.to_le_bytes());
            for part in [0x1000, 0x4000, 0x3000, 0] {
                body.extend(nearly(input, if part == 0 { 0 } else { USER + part })?.to_le_bytes());
            }
        }
        // SET_VRING_KICK, CALL, ERR.
        12..=14 => {
            let none = input.ratio(1, 8)?;
            body.extend(
                (nearly(input, u64::from(queue & 0xff) | if none { 0x100 } else { 0 })?).to_le_bytes(),
            );
            if !none {
                let usual =
                    || rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd");
                let descriptor = if input.ratio(1, 16)? { file(input, front)? } else { usual() };
                if request == 12 {
                    front.kicks.push(descriptor.try_clone().expect("dup"));
                }
                files.push(descriptor);
            }
        }
        // SET_BACKEND_REQ_FD.
        21 => {
            let (one, other) = UnixStream::pair().expect("a socket pair");
            drop(other);
            files.push(if input.arbitrary()? { one.into() } else { file(input, front)? });
        }
        // GET_CONFIG, SET_CONFIG.
        24 | 25 => {
            let size = input.int_in_range(0..=64u32)?;
            body.extend((nearly(input, 0)? as u32).to_le_bytes());
            body.extend((nearly(input, size.into())? as u32).to_le_bytes());
            body.extend(0u32.to_le_bytes());
            body.extend(std::iter::repeat_n(input.arbitrary::<u8>()?, size as usize));
        }
        // GET_INFLIGHT_FD, SET_INFLIGHT_FD.
        31 | 32 => {
            body.extend(nearly(input, if request == 31 { 0 } else { 256 })?.to_le_bytes());
            body.extend(nearly(input, 0)?.to_le_bytes());
            body.extend((nearly(input, 1)? as u16).to_le_bytes());
            body.extend((nearly(input, 8)? as u16).to_le_bytes());
            body.extend([0; 4]);
            if request == 32 {
                files.push(memory(front));
            }
        }
        _ if input.ratio(1, 8)? => body.extend(input.arbitrary::<[u8; 8]>()?),
        _ => {}
    }
    Ok(body)
}

fn region(input: &mut Unstructured<'_>, index: u64, body: &mut Vec<u8>) -> Result<()> {
    let at = index * FILE;
    body.extend(nearly(input, at)?.to_le_bytes());
    body.extend(nearly(input, FILE)?.to_le_bytes());
    body.extend(nearly(input, USER + at)?.to_le_bytes());
    body.extend(nearly(input, 0)?.to_le_bytes());
    Ok(())
}
