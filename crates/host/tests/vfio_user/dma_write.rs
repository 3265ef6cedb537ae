//! Writes and reads that the client carries out for the server.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use ioplane_host::vfio_user::spec::{self, DmaAccess, Header, RegionAccess};
use ioplane_host::vfio_user::{DmaLayout, DmaWrite, DmaWriteError, DmaWritten, PendingReply};
use ioplane_testkit::toy::card::registers::DATA;
use ioplane_testkit::vfio_user::{Answer, VfioUserClient};
use zerocopy::{FromBytes, IntoBytes};

use super::{Served, eventually, memory, served};

const PATIENCE: Duration = Duration::from_secs(30);
/// Where the client's memory is for the device.
const AT: u64 = 1 << 30;
const LEN: u64 = 1 << 20;

type Reply = PendingReply<Result<DmaWritten, DmaWriteError>>;

/// A card, and a client whose memory has another number in each eight bytes.
fn connected() -> (Served, VfioUserClient, OwnedFd) {
    let card = served();
    let mut client = card.client();
    let memory = memory(LEN);
    let bytes: Vec<u8> = (0..LEN / 8).flat_map(|number| (number * 0x1_0001 + 1).to_le_bytes()).collect();
    assert_eq!(rustix::io::pwrite(&memory, &bytes, 0).unwrap(), bytes.len());
    client.map(AT, LEN, 0, Some(memory.as_fd())).unwrap();
    (card, client, memory)
}

fn bytes_of(memory: &OwnedFd, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    assert_eq!(rustix::io::pread(memory, &mut bytes, at).unwrap(), len);
    bytes
}

fn again(address: u64, len: u64) -> DmaWrite {
    DmaWrite::Again { address, len }
}

impl Served {
    fn writing(&self, writes: Vec<DmaWrite>) -> Reply {
        self.handle.write(writes, Instant::now() + PATIENCE)
    }
}

/// Where the structure with the short count has its data, and how long it is without them.
const SHORT_DATA: usize = 12;
const SHORT_BARE: usize = 16;

/// A command of the server: the access, and the data as a client of this kind finds them.
fn access(message: &Answer, layout: DmaLayout) -> (DmaAccess, Vec<u8>) {
    assert_eq!(message.header.flags & spec::FLAG_TYPE, spec::TYPE_COMMAND);
    let (mut head, _) = DmaAccess::read_from_prefix(&message.body).unwrap();
    head.count = u64::from(head.count as u32);
    let data = match layout {
        DmaLayout::Specification => &message.body[size_of::<DmaAccess>()..],
        DmaLayout::ShortCount => &message.body[SHORT_DATA..],
    };
    if message.header.command == spec::DMA_WRITE {
        assert!(head.count as usize <= message.body.len() - SHORT_BARE, "such a client refuses it: {head:?}");
    }
    (head, data[..data.len().min(head.count as usize)].to_vec())
}

fn answer(client: &VfioUserClient, to: &Header, body: &[u8], errno: Option<u32>) {
    let size = (size_of::<Header>() + body.len()) as u32;
    let flags = spec::TYPE_REPLY | if errno.is_some() { spec::FLAG_ERROR } else { 0 };
    let header = Header { size, flags, error: errno.unwrap_or(0), ..*to };
    client.send(&[header.as_bytes(), body].concat(), &[]).unwrap();
}

/// Answers one command as a client of this kind, with what its memory has or gets; says what was asked.
fn obey(client: &VfioUserClient, memory: &OwnedFd, layout: DmaLayout) -> (u16, u64, Vec<u8>) {
    let message = client.receive().unwrap();
    let (head, data) = access(&message, layout);
    if message.header.command == spec::DMA_WRITE {
        // QEMU answers by a header alone.
        rustix::io::pwrite(memory, &data, head.address - AT).unwrap();
        answer(client, &message.header, &[], None);
        return (spec::DMA_WRITE, head.address, data);
    }
    assert_eq!(message.header.command, spec::DMA_READ);
    let data = bytes_of(memory, head.address - AT, head.count as usize);
    let mut body = head.as_bytes().to_vec();
    match layout {
        DmaLayout::Specification => body.extend(&data),
        DmaLayout::ShortCount => {
            body.truncate(SHORT_DATA);
            body.extend(&data);
            body.extend([0; SHORT_BARE - SHORT_DATA]);
        }
    }
    answer(client, &message.header, &body, None);
    (spec::DMA_READ, head.address, data)
}

#[test]
fn both_layouts_are_found_out_and_kept() {
    for layout in [DmaLayout::Specification, DmaLayout::ShortCount] {
        let (card, client, memory) = connected();
        let mut wanted = bytes_of(&memory, 0, LEN as usize);
        wanted[0x8004..][..40].fill(7);
        let writes = vec![
            again(AT + 0x3000, 0x1800),
            // More than goes into one message.
            again(AT + 0x1_0800, 0x9000),
            DmaWrite::Bytes { address: AT + 0x8004, data: vec![7; 40] },
            // The last two pages of memory, but for a few bytes, and one behind it.
            again(AT + LEN - 0x1ff0, 0x2ff0),
        ];
        let pending = card.writing(writes);
        assert_eq!(obey(&client, &memory, layout).0, spec::DMA_READ, "it finds out first");
        let written: Vec<_> = (0..6)
            .map(|_| {
                let (command, address, data) = obey(&client, &memory, layout);
                (command, address - AT, data.len())
            })
            .collect();
        let places = [
            (0x3000, 0x1800),
            (0x1_0800, 0x8000),
            (0x1_8800, 0x1000),
            (0x8004, 40),
            (LEN - 0x1ff0, 0xff0),
            (LEN - 0x1000, 0x1000),
        ];
        assert_eq!(written, places.map(|(at, len)| (spec::DMA_WRITE, at, len)), "{layout:?}");
        let done = pending.wait().unwrap().unwrap();
        assert_eq!(done, DmaWritten { commands: 6, bytes: 0x1800 + 0x9000 + 40 + 0x1ff0, gone: 0x1000 });
        assert_eq!(bytes_of(&memory, 0, LEN as usize), wanted, "{layout:?}");
        // It is known from now on.
        let pending = card.writing(vec![again(AT, 8)]);
        assert_eq!(obey(&client, &memory, layout), (spec::DMA_WRITE, AT, 1u64.to_le_bytes().to_vec()));
        assert_eq!(pending.wait().unwrap().unwrap().commands, 1);
        assert!(card.handle.status().faults.is_empty(), "{:?}", card.handle.status());
    }
}

#[test]
fn memory_that_tells_nothing_gets_what_the_specification_has() {
    let card = served();
    let mut client = card.client();
    let memory = memory(LEN);
    client.map(AT, LEN, 0, Some(memory.as_fd())).unwrap();
    let pending = card.writing(vec![again(AT, 0x1000)]);
    // All is zero: nothing is read, and both kinds of client write what is there.
    let message = client.receive().unwrap();
    for layout in [DmaLayout::Specification, DmaLayout::ShortCount] {
        let (head, data) = access(&message, layout);
        assert_eq!((head.address, head.count, data), (AT, 0x1000, vec![0; 0x1000]));
    }
    answer(&client, &message.header, &[], None);
    assert_eq!(pending.wait().unwrap().unwrap().bytes, 0x1000);
}

#[test]
fn commands_of_the_client_wait_and_are_answered() {
    let (card, mut client, memory) = connected();
    let pending = card.writing((0..40).map(|page| again(AT + page * 0x1000, 0x1000)).collect());
    // The first is to find the layout out: from here on the server writes until all is answered.
    assert_eq!(obey(&client, &memory, DmaLayout::ShortCount).0, spec::DMA_READ);
    let mut crossed = Vec::new();
    for _ in 0..8 {
        let body = RegionAccess { offset: DATA, region: 0, count: 8 };
        let (id, bytes) = client.frame(spec::REGION_READ, body.as_bytes());
        client.send(&bytes, &[]).unwrap();
        crossed.push(id);
        (0..5).for_each(|_| drop(obey(&client, &memory, DmaLayout::ShortCount)));
    }
    assert_eq!(pending.wait().unwrap().unwrap().commands, 40);
    for id in crossed {
        client.expect(id, spec::REGION_READ).unwrap();
    }
    assert!(card.handle.status().faults.is_empty(), "{:?}", card.handle.status());
}

#[test]
fn who_sends_on_and_owes_an_answer_is_left() {
    let (card, mut client, _memory) = connected();
    let pending = card.writing(vec![again(AT, 0x1000)]);
    client.receive().unwrap();
    let body = RegionAccess { offset: DATA, region: 0, count: 8 };
    for _ in 0..100 {
        let (_, bytes) = client.frame(spec::REGION_READ, body.as_bytes());
        if client.send(&bytes, &[]).is_err() {
            break;
        }
    }
    assert_eq!(pending.wait().unwrap(), Err(DmaWriteError::NoClient));
    eventually("the end", || !card.handle.status().connected);
    let faults = card.handle.status().faults;
    assert!(faults.contains_key("too_many_commands"), "{faults:?}");
}

#[test]
fn what_the_client_refuses_is_said() {
    let (card, client, memory) = connected();
    let pending = card.writing(vec![again(AT + 0x1000, 0x1000), again(AT + 0x2000, 0x1000)]);
    obey(&client, &memory, DmaLayout::ShortCount);
    let message = client.receive().unwrap();
    answer(&client, &message.header, &[], Some(libc::ENODEV as u32));
    let refused = pending.wait().unwrap().unwrap_err();
    assert_eq!(refused, DmaWriteError::Refused { address: AT + 0x1000, len: 0x1000, errno: libc::ENODEV });
    assert!(refused.to_string().contains("bus mastering"), "{refused}");
    // The answer to the second, which nobody waits for, harms nothing.
    obey(&client, &memory, DmaLayout::ShortCount);
    let pending = card.writing(vec![again(AT, 8)]);
    obey(&client, &memory, DmaLayout::ShortCount);
    assert_eq!(pending.wait().unwrap().unwrap().commands, 1);
    assert!(card.handle.status().faults.is_empty(), "{:?}", card.handle.status());
}

#[test]
fn a_client_that_is_late_is_not_left() {
    let (card, mut client, memory) = connected();
    let pending = card.handle.write(vec![again(AT, 8)], Instant::now() + Duration::from_millis(50));
    assert_eq!(pending.wait().unwrap(), Err(DmaWriteError::Late));
    // It asked to read, to find the layout out.
    assert_eq!(obey(&client, &memory, DmaLayout::ShortCount).0, spec::DMA_READ);
    client.read64(0, DATA).unwrap();
    assert!(card.handle.status().faults.is_empty(), "{:?}", card.handle.status());
}

#[test]
fn an_answer_to_nothing_ends_the_connection() {
    let (card, client, memory) = connected();
    let pending = card.writing(vec![again(AT, 8)]);
    obey(&client, &memory, DmaLayout::ShortCount);
    let message = client.receive().unwrap();
    answer(&client, &Header { id: message.header.id.wrapping_add(1), ..message.header }, &[], None);
    assert_eq!(pending.wait().unwrap(), Err(DmaWriteError::NoClient));
    eventually("the end", || !card.handle.status().connected);
    let faults = card.handle.status().faults;
    assert!(faults.contains_key("unasked_answer"), "{faults:?}");
}

#[test]
fn without_a_client_nothing_is_written() {
    let card = served();
    assert_eq!(card.writing(vec![again(AT, 8)]).wait().unwrap(), Err(DmaWriteError::NoClient));
}

#[test]
fn what_the_client_reads_is_told_in_either_layout() {
    for layout in [DmaLayout::Specification, DmaLayout::ShortCount] {
        let (card, client, memory) = connected();
        // More than goes into one message.
        let pending = card.handle.read(AT + 0x1230, 0x9000, Instant::now() + PATIENCE);
        let asked: Vec<_> = (0..3)
            .map(|_| {
                let (command, address, data) = obey(&client, &memory, layout);
                assert_eq!(command, spec::DMA_READ);
                (address - AT, data.len())
            })
            .collect();
        assert_eq!(asked[1..], [(0x1230, 0x8000), (0x9230, 0x1000)], "it finds out first: {asked:x?}");
        assert_eq!(pending.wait().unwrap().unwrap(), bytes_of(&memory, 0x1230, 0x9000), "{layout:?}");
        assert!(card.handle.status().faults.is_empty(), "{:?}", card.handle.status());
    }
}

#[test]
fn what_the_client_does_not_read_is_said() {
    let (card, client, memory) = connected();
    let read = |len| card.handle.read(AT, len, Instant::now() + PATIENCE);
    let pending = read(16);
    obey(&client, &memory, DmaLayout::Specification);
    let message = client.receive().unwrap();
    answer(&client, &message.header, &[], Some(libc::EINVAL as u32));
    let unread = |errno| DmaWriteError::Unread { address: AT, len: 16, errno };
    assert_eq!(pending.wait().unwrap(), Err(unread(libc::EINVAL)));
    // Less than was asked for.
    let pending = read(16);
    let message = client.receive().unwrap();
    answer(&client, &message.header, &message.body[..16], None);
    assert_eq!(pending.wait().unwrap(), Err(unread(libc::EPROTO)));
    assert!(card.handle.status().connected);
    assert_eq!(read(0).wait().unwrap(), Ok(Vec::new()));
    let card = served();
    let pending = card.handle.read(AT, 16, Instant::now() + PATIENCE);
    assert_eq!(pending.wait().unwrap(), Err(DmaWriteError::NoClient));
}
