//! `vfio_user`: a client that may send anything, in any order, with any descriptors, and change its memory meanwhile.
//!
//! Oracles: the session ends with a value (no panic, nothing endless), the device is given back when its client is gone: reset,
//! without memory, without wires; no descriptor that was refused is left open.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use arbitrary::{Result, Unstructured};
use ioplane_device::{Presence, Quiescent};
use ioplane_host::vfio_user::{Connection, Session, spec};
use ioplane_pci::AnyFunction;
use ioplane_testkit::toy::ToyCard;
use ioplane_testkit::toy::card::registers;

use crate::Signature;
use crate::stage::Stage;
use crate::wire::{self, drain};

/// Bytes of one file that a client shares.
const FILE: u64 = 64 << 10;
/// Most messages of one run.
const MESSAGES: usize = 48;
/// The device's own patience: most of these devices are busy for ever.
const PATIENCE: Duration = Duration::from_millis(1);
/// Longer than any run can take.
const ENDLESS: Duration = Duration::from_secs(15);

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = talk(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

/// What the client has in its hands.
struct Client {
    stream: UnixStream,
    memory: Vec<OwnedFd>,
    events: Vec<OwnedFd>,
    /// Given away again and again; nobody may keep it.
    pipe: OwnedFd,
}

/// What happens between two messages.
enum Between {
    Nothing,
    Shrink(usize, u64),
    Poke(usize, u64, u64),
    /// An eventfd of the client's is written: the resume descriptor, perhaps.
    Event(usize),
    /// The device's hardware has something to say.
    Hardware,
    /// A forced stop fails from here on, or no more.
    Stubborn(bool),
}

fn talk(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let began = Instant::now();
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    theirs.set_nonblocking(true).expect("fcntl");
    let (reader, pipe) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).expect("a pipe");
    let mut client = Client { stream: theirs, memory: Vec::new(), events: Vec::new(), pipe };
    let mut between = Vec::new();
    let mut outcome = Ok(());
    let opening = input.ratio(15, 16)?;
    for number in 0..MESSAGES {
        let usual = OPENING.get(number).filter(|_| opening);
        let sent = match usual {
            Some(command) => send(input, &mut client, *command),
            None if input.is_empty() => break,
            None => input.int_in_range(0..=20u16).and_then(|command| send(input, &mut client, command)),
        };
        if let Err(error) = sent.and_then(|()| pause(input).map(|pause| between.push(pause))) {
            outcome = Err(error);
            break;
        }
    }
    client.stream.shutdown(std::net::Shutdown::Write).expect("shutdown");

    let card = ToyCard::default();
    let (seen, event) = (card.seen(), card.event());
    let placement = Stage::patient().placement();
    let running = Quiescent::new(Box::new(card) as AnyFunction).resume(&*placement).expect("it runs");
    let mut session = Session::new(running, placement.clone(), PATIENCE).expect("a session");
    let mut connection = Connection::new(ours).expect("a connection");
    let mut between = between.into_iter();
    let fault = loop {
        let message = match connection.receive() {
            Ok(Some(message)) => message,
            Ok(None) => continue,
            Err(fault) => break fault,
        };
        assert!(message.body.len() <= spec::MAX_MESSAGE as usize && message.files.len() <= spec::MAX_FILES);
        signature.count(message.header.command.into());
        if let Err(fault) = session.handle(message, &connection) {
            break fault;
        }
        between.next().unwrap_or(Between::Nothing).happen(&client, &event, &seen);
        session.attend();
        drain(&client.stream);
    };
    signature.saw(fault.name());
    let status = session.status();
    for (name, count) in &status.faults {
        signature.saw(name);
        signature.count(*count);
    }
    for number in [status.dma_maps, status.dma_shared, status.irqs, status.forced, status.region_writes] {
        signature.count(number);
    }
    assert!(status.dma_shared <= status.dma_maps && status.dma_shared == seen.ranges.load(SeqCst));
    drop(connection);
    seen.stubborn.store(false, SeqCst);
    let resets = seen.resets.load(SeqCst);
    session.forget_client().expect("the device is given back");
    assert_eq!((seen.resets.load(SeqCst), seen.ranges.load(SeqCst)), (resets + 1, 0));
    assert!(!seen.shadows.load(SeqCst) && session.status().dma_maps == 0);
    assert_eq!(session.device().presence(), Presence::Running);
    // No wire is left: whatever it signals now, nobody hears it.
    let signalled = session.status().irqs;
    for (register, value) in
        [(registers::LINE, 1), (registers::MSI, 1), (registers::MSIX, 2), (registers::ERROR, 0)]
    {
        let bytes = u64::to_le_bytes(value);
        let at = ioplane_device::RegisterAddress::Bar(0, register);
        let access = ioplane_device::Access::Write(&bytes);
        session.device().access(at, access, &*placement, PATIENCE).expect("it runs").expect("it is done");
    }
    assert_eq!(session.status().irqs, signalled, "a wire is left");
    drop(session);
    drop(client);
    assert_eq!(rustix::io::read(&reader, &mut [0; 1]), Ok(0), "a descriptor is left");
    assert!(began.elapsed() < ENDLESS, "the session took {:?}", began.elapsed());
    outcome
}

/// A client's usual beginning.
const OPENING: [u16; 14] = [
    spec::VERSION,
    spec::DMA_MAP,
    spec::DMA_MAP,
    spec::DEVICE_GET_INFO,
    spec::DEVICE_GET_REGION_INFO,
    spec::DEVICE_GET_IRQ_INFO,
    spec::REGION_READ,
    spec::DEVICE_SET_IRQS,
    spec::DEVICE_SET_IRQS,
    spec::REGION_WRITE,
    spec::DMA_UNMAP,
    spec::DMA_MAP,
    spec::REGION_WRITE,
    spec::DMA_UNMAP,
];

impl Between {
    fn happen(self, client: &Client, event: &OwnedFd, seen: &ioplane_testkit::toy::card::Seen) {
        match self {
            Between::Nothing => {}
            Between::Shrink(file, len) => {
                if let Some(file) = client.memory.get(file) {
                    let _ = rustix::fs::ftruncate(file, len);
                }
            }
            Between::Poke(file, at, value) => {
                if let Some(file) = client.memory.get(file) {
                    let _ = rustix::io::pwrite(file, &value.to_le_bytes(), at);
                }
            }
            Between::Event(event) => {
                if let Some(event) = client.events.get(event) {
                    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
                }
            }
            Between::Hardware => {
                let _ = rustix::io::write(event, &1u64.to_ne_bytes());
            }
            Between::Stubborn(yes) => seen.stubborn.store(yes, SeqCst),
        }
    }
}

fn pause(input: &mut Unstructured<'_>) -> Result<Between> {
    Ok(match input.int_in_range(0..=31u8)? {
        0 => Between::Shrink(input.int_in_range(0..=3)?, input.int_in_range(0..=FILE)?),
        1..=2 => {
            Between::Poke(input.int_in_range(0..=3)?, input.int_in_range(0..=FILE - 8)?, input.arbitrary()?)
        }
        3..=4 => Between::Event(input.int_in_range(0..=3)?),
        5..=7 => Between::Hardware,
        8 => Between::Stubborn(input.arbitrary()?),
        _ => Between::Nothing,
    })
}

/// Sends one message: the body that the command should have, with mistakes.
fn send(input: &mut Unstructured<'_>, client: &mut Client, command: u16) -> Result<()> {
    let mut files = Vec::new();
    let mut body = body(input, client, command, &mut files)?;
    let mut flags = if input.ratio(1, 16)? { spec::FLAG_NO_REPLY } else { 0 };
    let mut size = None;
    match input.int_in_range(0..=63u8)? {
        0 => flags = input.arbitrary()?,
        1 => size = Some(input.arbitrary()?),
        2 => body.truncate(input.int_in_range(0..=body.len())?),
        3 => body.extend(input.arbitrary::<[u8; 16]>()?),
        4 => files.push(file(input, client)?),
        5 => drop(files.pop()),
        6 if !body.is_empty() => {
            let at = input.choose_index(body.len())?;
            body[at] ^= input.arbitrary::<u8>()?;
        }
        7 => {
            for _ in 0..20 {
                files.push(client.pipe.try_clone().expect("dup"));
            }
        }
        _ => {}
    }
    let size = size.unwrap_or(16 + body.len() as u32);
    let mut bytes = Vec::with_capacity(16 + body.len());
    bytes.extend(input.arbitrary::<u16>()?.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    for word in [size, flags, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(body);
    wire::send(&client.stream, input, &bytes, &files)
}

fn eventfd(client: &mut Client) -> OwnedFd {
    use rustix::event::{EventfdFlags, eventfd};
    let event = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
    client.events.push(event.try_clone().expect("dup"));
    event
}

fn memory(client: &mut Client) -> OwnedFd {
    let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, FILE).expect("ftruncate");
    client.memory.push(file.try_clone().expect("dup"));
    file
}

/// Some descriptor.
fn file(input: &mut Unstructured<'_>, client: &mut Client) -> Result<OwnedFd> {
    use rustix::fs::{MemfdFlags, Mode, OFlags};
    Ok(match input.int_in_range(0..=7u8)? {
        0..=2 => memory(client),
        3..=4 => eventfd(client),
        5 => rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("/dev/null"),
        6 => rustix::fs::memfd_create("empty", MemfdFlags::CLOEXEC).expect("a memfd"),
        _ => client.pipe.try_clone().expect("dup"),
    })
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

/// Pages that the client may have mapped, or nearly.
fn range(input: &mut Unstructured<'_>) -> Result<(u64, u64)> {
    let at = input.int_in_range(0..=7u64)? * (FILE / 4);
    let size = input.int_in_range(1..=4u64)? * (FILE / 4);
    Ok((nearly(input, at)?, nearly(input, size)?))
}

const VERSIONS: [&str; 6] = [
    r#"{"capabilities":{"max_msg_fds":8,"ioplane_shadow_pages":true}}"#,
    r#"{"capabilities":{"max_msg_fds":8,"max_data_xfer_size":1048576,"pgsizes":4096}}"#,
    r#"{"capabilities":{"max_msg_fds":1e400}}"#,
    r#"{"capabilities":null}"#,
    "{}",
    "[[[[",
];

fn body(
    input: &mut Unstructured<'_>,
    client: &mut Client,
    command: u16,
    files: &mut Vec<OwnedFd>,
) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    let put32 = |body: &mut Vec<u8>, value: u64| body.extend((value as u32).to_le_bytes());
    match command {
        spec::VERSION => {
            put32(&mut body, nearly(input, 0)?);
            let usual =
                if input.ratio(7, 8)? { input.int_in_range(0..=1)? } else { input.choose_index(6)? };
            body.extend(VERSIONS[usual].as_bytes());
            body.push(0);
        }
        spec::DMA_MAP => {
            put32(&mut body, 32);
            put32(&mut body, nearly(input, 3)?);
            let (at, size) = range(input)?;
            body.extend(nearly(input, 0)?.to_le_bytes());
            body.extend(at.to_le_bytes());
            body.extend(size.to_le_bytes());
            if input.ratio(3, 4)? {
                files.push(if input.ratio(1, 16)? { file(input, client)? } else { memory(client) });
            }
        }
        spec::DMA_UNMAP => {
            put32(&mut body, 24);
            let all = input.ratio(1, 8)?;
            put32(&mut body, nearly(input, if all { 2 } else { 0 })?);
            let (at, size) = if input.ratio(1, 4)? { (0, 1 << 63) } else { range(input)? };
            body.extend(at.to_le_bytes());
            body.extend(size.to_le_bytes());
        }
        spec::DEVICE_GET_INFO | spec::DEVICE_GET_IRQ_INFO | spec::DEVICE_GET_REGION_IO_FDS => {
            put32(&mut body, nearly(input, 16)?);
            put32(&mut body, nearly(input, 0)?);
            let index = input.int_in_range(0..=5)?;
            put32(&mut body, nearly(input, index)?);
            put32(&mut body, 0);
        }
        spec::DEVICE_GET_REGION_INFO => {
            let room = *input.choose(&[32, 64, 96, 200])?;
            put32(&mut body, nearly(input, room)?);
            put32(&mut body, 0);
            let index = input.int_in_range(0..=9)?;
            put32(&mut body, nearly(input, index)?);
            body.extend([0; 20]);
        }
        spec::DEVICE_SET_IRQS => {
            let data = *input.choose(&[1u64, 2, 4, 4, 4])?;
            let action = *input.choose(&[8u64, 16, 32, 32])?;
            let index = input.int_in_range(0..=4u64)?;
            let most = if index == 1 || index == 2 { 4 } else { 1 };
            let start = input.int_in_range(0..=most - 1)?;
            let count = input.int_in_range(0..=most - start)?;
            put32(&mut body, 20);
            put32(&mut body, nearly(input, data | action)?);
            put32(&mut body, nearly(input, index)?);
            put32(&mut body, nearly(input, start)?);
            put32(&mut body, nearly(input, count)?);
            if data == 2 {
                body.extend((0..count).map(|n| (n & 1) as u8));
            } else if data == 4 && input.ratio(7, 8)? {
                for _ in 0..count {
                    files.push(if input.ratio(1, 16)? { file(input, client)? } else { eventfd(client) });
                }
            }
        }
        spec::REGION_READ | spec::REGION_WRITE => {
            let region = *input.choose(&[0u64, 0, 0, 2, 7])?;
            let offset = input.int_in_range(0..=9u64)? * 8;
            let count = if input.ratio(7, 8)? { 8 } else { input.int_in_range(0..=512)? };
            body.extend(nearly(input, offset)?.to_le_bytes());
            put32(&mut body, nearly(input, region)?);
            put32(&mut body, nearly(input, count)?);
            if command == spec::REGION_WRITE {
                let value = input.int_in_range(0..=4u64)? * *input.choose(&[1, FILE / 4])?;
                body.extend(value.to_le_bytes().into_iter().cycle().take(count as usize));
            }
        }
        _ if input.ratio(1, 8)? => body.extend(input.arbitrary::<[u8; 8]>()?),
        _ => {}
    }
    Ok(body)
}
