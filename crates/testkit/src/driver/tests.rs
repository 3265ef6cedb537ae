//! The driver against the letter of the specification: a device is played by hand through the raw ring.

use super::raw::RawDesc;
use super::spec::*;
use super::*;

fn ring(size: u16, event_idx: bool) -> (GuestMemory, DriverRing) {
    let mut memory = GuestMemory::new(1 << 20).unwrap();
    let place = RingPlace::carve(&mut memory, size).unwrap();
    let ring = DriverRing::new(memory.view(), place, RingMode { event_idx, packed: false }).unwrap();
    (memory, ring)
}

fn part(gpa: u64) -> Part {
    Part { gpa, len: 16, write: false }
}

/// Uses `head` as a device does.
fn use_head(ring: &DriverRing, head: u16, len: u32) {
    let raw = ring.raw();
    let idx = raw.used_idx();
    raw.set_used_entry(idx, head.into(), len);
    raw.set_used_idx(idx.wrapping_add(1));
}

#[test]
fn descriptors_come_back_and_run_out() {
    let (memory, mut ring) = ring(8, true);
    let gpa = memory.regions()[0].gpa;
    for _ in 0..100 {
        let first = ring.chain(&[part(gpa), part(gpa), part(gpa)]).unwrap();
        let second = ring.chain(&[part(gpa); 5]).unwrap();
        assert_eq!((ring.room(), ring.chain(&[part(gpa)])), (0, None));
        ring.push(second);
        ring.push(first);
        use_head(&ring, first, 7);
        assert_eq!(ring.pop(), Ok(Some(Used { head: first, len: 7 })));
        ring.free(first);
        use_head(&ring, second, 0);
        ring.pop().unwrap();
        ring.free(second);
        assert_eq!((ring.room(), ring.in_flight()), (8, 0));
    }
}

#[test]
fn kicks_follow_avail_event_over_the_wrap() {
    let (memory, mut ring) = ring(8, true);
    let gpa = memory.regions()[0].gpa;
    for turn in 0..70_000u32 {
        let (old, batch) = (ring.avail_idx(), 1 + turn % 3);
        let event = old.wrapping_add((turn % 7) as u16).wrapping_sub(3);
        ring.raw().set_avail_event(event);
        let heads: Vec<u16> = (0..batch).map(|_| ring.chain(&[part(gpa)]).unwrap()).collect();
        heads.iter().for_each(|head| ring.push(*head));
        // 2.7.10: kick if the index went past the event: some entry in old..new has the event's number.
        let wanted = (0..batch).any(|step| old.wrapping_add(step as u16) == event);
        assert_eq!(ring.kick_needed(), wanted, "old {old}, batch {batch}, event {event}");
        assert!(!ring.kick_needed(), "nothing was added since");
        for head in heads {
            use_head(&ring, head, 0);
            ring.pop().unwrap().unwrap();
            ring.free(head);
        }
    }
}

#[test]
fn without_event_idx_the_flags_decide() {
    let (memory, mut ring) = ring(8, false);
    let gpa = memory.regions()[0].gpa;
    for flags in [0, VIRTQ_USED_F_NO_NOTIFY] {
        let head = ring.chain(&[part(gpa)]).unwrap();
        ring.raw().set_used_flags(flags);
        ring.push(head);
        assert_eq!(ring.kick_needed(), flags == 0);
    }
    ring.disable_interrupts();
    assert_eq!(avail_flags(&memory, &ring), VIRTQ_AVAIL_F_NO_INTERRUPT);
    assert!(ring.enable_interrupts());
    assert_eq!(avail_flags(&memory, &ring), 0);
}

fn avail_flags(memory: &GuestMemory, ring: &DriverRing) -> u16 {
    memory.view().window(ring.place().avail, 2, 2).unwrap().load_u16(0)
}

#[test]
fn interrupts_are_asked_for_where_we_have_come_to() {
    let (memory, mut ring) = ring(8, true);
    let gpa = memory.regions()[0].gpa;
    for _ in 0..3 {
        let head = ring.chain(&[part(gpa)]).unwrap();
        ring.push(head);
        use_head(&ring, head, 0);
        assert!(!ring.enable_interrupts(), "something is there: do not sleep");
        ring.pop().unwrap();
        assert_eq!(ring.raw().used_event(), ring.last_used());
        assert!(ring.enable_interrupts());
        ring.disable_interrupts();
        assert_eq!(ring.raw().used_event(), 0);
        ring.free(head);
    }
}

#[test]
fn a_device_that_uses_twice_or_jumps_is_found_out() {
    let (memory, mut ring) = ring(8, true);
    let gpa = memory.regions()[0].gpa;
    let heads = [ring.chain(&[part(gpa)]).unwrap(), ring.chain(&[part(gpa)]).unwrap()];
    heads.iter().for_each(|head| ring.push(*head));
    use_head(&ring, heads[0], 0);
    ring.pop().unwrap();
    use_head(&ring, heads[0], 0);
    assert_eq!(ring.pop(), Err(DriverError::NotInFlight { at: 1, id: heads[0].into() }));
    ring.raw().set_used_idx(9);
    ring.reset();
    ring.raw().set_used_idx(1);
    assert_eq!(ring.pop(), Err(DriverError::UsedJumped { from: 0, to: 1, held: 0 }));
}

/// Follows the chain at `head` as a device does: (address, length, device writes).
fn walk(memory: &GuestMemory, disk: &mut Disk, head: u16) -> Vec<(u64, u32, bool)> {
    let size = disk.place().size;
    let table = memory.view().window(disk.place().desc, RingPlace::desc_bytes(size), 16).unwrap();
    let mut desc = RawDesc::read(&table, head.into());
    let mut table = table;
    if desc.flags & VIRTQ_DESC_F_INDIRECT != 0 {
        assert_eq!(desc.flags & VIRTQ_DESC_F_NEXT, 0);
        table = memory.view().window(desc.addr, desc.len.into(), 16).unwrap();
        desc = RawDesc::read(&table, 0);
    }
    let mut parts = Vec::new();
    loop {
        parts.push((desc.addr, desc.len, desc.flags & VIRTQ_DESC_F_WRITE != 0));
        if desc.flags & VIRTQ_DESC_F_NEXT == 0 {
            return parts;
        }
        desc = RawDesc::read(&table, desc.next.into());
    }
}

#[test]
fn disk_requests_lie_as_the_specification_says() {
    for shape in [Shape::Direct, Shape::Indirect] {
        let mut memory = GuestMemory::of(&[(0x8000_0000, 1 << 20), (0x1_4000_0000, 1 << 20)]).unwrap();
        let plan = DiskPlan { slots: 4, max_bytes: 16384, segments: 4, shape };
        let mut disk = Disk::new(&mut memory, 32, RingMode { event_idx: true, packed: false }, plan).unwrap();
        let cases = [
            (DiskOp::Read, 9, 16384, vec![(4096, true); 4], VIRTIO_BLK_T_IN, 9),
            (DiskOp::Write, 9, 5120, vec![(4096, false), (1024, false)], VIRTIO_BLK_T_OUT, 9),
            (DiskOp::Flush, 9, 0, vec![], VIRTIO_BLK_T_FLUSH, 0),
            (DiskOp::Id, 0, 0, vec![(20, true)], VIRTIO_BLK_T_GET_ID, 0),
            (DiskOp::Discard, 9, 8192, vec![(16, false)], VIRTIO_BLK_T_DISCARD, 0),
            (DiskOp::WriteZeroes { unmap: true }, 9, 512, vec![(16, false)], VIRTIO_BLK_T_WRITE_ZEROES, 0),
            (DiskOp::Other { kind: 77, write: true }, 5, 512, vec![(512, true)], 77, 5),
            (DiskOp::Read, 1, 512, vec![(512, true)], VIRTIO_BLK_T_IN, 1),
        ];
        for (op, sector, bytes, data, kind, header_sector) in cases {
            let token = disk.submit(op, sector, bytes).unwrap();
            let head = disk.head(token);
            let parts = walk(&memory, &mut disk, head);
            let (header, status) = (parts[0], parts[parts.len() - 1]);
            assert_eq!(
                (header, status.1, status.2),
                ((disk.header_gpa(token), 16, false), 1, true),
                "{op:?}"
            );
            let between: Vec<_> = parts[1..parts.len() - 1].iter().map(|p| (p.1, p.2)).collect();
            assert_eq!(between, data, "{op:?}");
            assert!(data.is_empty() || parts[1].0 == disk.data_gpa(token));
            let window = memory.view().window(header.0, 16, 8).unwrap();
            assert_eq!((window.load_u32(0), window.load_u64(8)), (kind, header_sector));
            if let DiskOp::Discard | DiskOp::WriteZeroes { .. } = op {
                let range = memory.view().window(parts[1].0, 16, 8).unwrap();
                let unmap = u32::from(op != DiskOp::Discard);
                assert_eq!((range.load_u64(0), range.load_u32(8)), (sector, bytes / 512));
                assert_eq!(range.load_u32(12), unmap);
            }
            memory.view().write(status.0, &[VIRTIO_BLK_S_UNSUPP]).unwrap();
            use_head(disk.ring(), head, 3);
            assert_eq!(disk.reap(), Ok(Some(Done { token, status: VIRTIO_BLK_S_UNSUPP, len: 3 })));
        }
        let tokens: Vec<_> = (0..4).map(|_| disk.submit(DiskOp::Read, 0, 512).unwrap()).collect();
        assert_eq!((disk.submit(DiskOp::Read, 0, 512), disk.in_flight()), (None, 4));
        let head = disk.head(tokens[2]);
        use_head(disk.ring(), head, 0);
        let done = disk.reap().unwrap().unwrap();
        assert_eq!((done.token, done.status), (tokens[2], Done::NO_STATUS));
        disk.reset().unwrap();
        assert_eq!((disk.in_flight(), disk.ring().avail_idx()), (0, 0));
        disk.submit(DiskOp::Flush, 0, 0).unwrap();
    }
}

#[test]
fn addresses_of_the_three_worlds_differ() {
    let mut memory = GuestMemory::of(&[(0, 8192), (1 << 32, 4096)]).unwrap();
    assert_eq!(memory.alloc(4096, 4096), Some(0));
    assert_eq!(memory.alloc(8192, 4096), None);
    assert_eq!(memory.alloc(4000, 1), Some(4096));
    assert_eq!(memory.alloc(4096, 1), Some(1 << 32));
    assert_eq!(memory.user_of((1 << 32) + 5), Some(memory::USER_BASE + (1 << 32) + 5));
    assert_eq!(memory.user_of(8192), None);
    assert!(memory.add(4096, 4096).is_err(), "overlaps");
    let index = memory.add(1 << 33, 4096).unwrap();
    memory.view().write(1 << 33, b"x").unwrap();
    memory.remove(index).unwrap();
    assert!(memory.view().write(1 << 33, b"x").is_err());
}
