//! The driver of packed rings against the letter of the specification: a device is played by hand through the raw ring.

use super::raw::RawPackedDesc;
use super::spec::*;
use super::*;

const AVAIL: u16 = VIRTQ_DESC_F_AVAIL;
const USED: u16 = VIRTQ_DESC_F_USED;

fn ring(size: u16, event_idx: bool) -> (GuestMemory, DriverRing) {
    let mut memory = GuestMemory::new(1 << 20).unwrap();
    let place = RingPlace::carve(&mut memory, size).unwrap();
    let ring = DriverRing::new(memory.view(), place, RingMode { event_idx, packed: true }).unwrap();
    (memory, ring)
}

fn part(gpa: u64, write: bool) -> Part {
    Part { gpa, len: 16, write }
}

/// Uses buffer `id` at the free-running place `at`, as a device does.
fn use_buffer(ring: &DriverRing, at: u32, id: u16, len: u32) {
    let size = u32::from(ring.place().size);
    let flags = if (at / size).is_multiple_of(2) { AVAIL | USED } else { 0 };
    let flags = flags | if len > 0 { VIRTQ_DESC_F_WRITE } else { 0 };
    ring.raw_packed().set_desc((at % size) as u16, RawPackedDesc { addr: 0, len, id, flags });
}

#[test]
fn chains_lie_as_the_specification_says() {
    let (memory, mut ring) = ring(5, true);
    let gpa = memory.regions()[0].gpa;
    let id = ring.chain(&[part(gpa, false), part(gpa + 64, false), part(gpa + 128, true)]).unwrap();
    ring.push(id);
    let descs: Vec<_> = (0..4).map(|slot| ring.raw_packed().desc(slot)).collect();
    assert_eq!(descs.iter().map(|d| d.addr).collect::<Vec<_>>(), [gpa, gpa + 64, gpa + 128, 0]);
    let next = VIRTQ_DESC_F_NEXT;
    let flags: Vec<_> = descs.iter().map(|d| d.flags).collect();
    assert_eq!(flags, [AVAIL | next, AVAIL | next, AVAIL | VIRTQ_DESC_F_WRITE, 0]);
    assert_eq!(descs[2].id, id);
    assert!(!ring.has_used());
    use_buffer(&ring, 0, id, 7);
    assert_eq!(ring.pop(), Ok(Some(Used { head: id, len: 7 })));
    assert!(!ring.has_used(), "one used descriptor for all three");
    // Over the end: two descriptors in this lap, one in the next.
    ring.push(id);
    let flags = [3, 4, 0].map(|slot| ring.raw_packed().desc(slot).flags);
    assert_eq!(flags, [AVAIL | next, AVAIL | next, USED | VIRTQ_DESC_F_WRITE]);
    use_buffer(&ring, 3, id, 0);
    assert_eq!(ring.pop(), Ok(Some(Used { head: id, len: 0 })), "a length without WRITE says nothing");
    ring.free(id);
    let mut table = memory.view().window(gpa + 4096, 64, 16).unwrap();
    let id = ring.chain_indirect(&[part(gpa, false), part(gpa, true)], &table).unwrap();
    ring.push(id);
    let whole = ring.raw_packed().desc(1);
    assert_eq!((whole.addr, whole.len, whole.id), (table.gpa(), 32, id));
    assert_eq!(whole.flags, USED | VIRTQ_DESC_F_INDIRECT);
    table = memory.view().window(gpa + 4096, 32, 16).unwrap();
    assert_eq!(RawPackedDesc::read(&table, 1).flags & VIRTQ_DESC_F_WRITE, VIRTQ_DESC_F_WRITE);
}

#[test]
fn buffers_come_back_in_any_order_and_twice_is_found_out() {
    let (memory, mut ring) = ring(8, true);
    let gpa = memory.regions()[0].gpa;
    let mut at = 0;
    for _ in 0..100 {
        let first = ring.chain(&[part(gpa, true); 3]).unwrap();
        let second = ring.chain(&[part(gpa, true); 5]).unwrap();
        assert_eq!((ring.room(), ring.chain(&[part(gpa, true)])), (0, None));
        ring.push(first);
        ring.push(second);
        use_buffer(&ring, at, second, 1);
        use_buffer(&ring, at + 5, first, 2);
        assert_eq!(ring.pop(), Ok(Some(Used { head: second, len: 1 })));
        assert_eq!(ring.pop(), Ok(Some(Used { head: first, len: 2 })));
        assert_eq!((ring.pop(), ring.in_flight()), (Ok(None), 0));
        ring.free(first);
        ring.free(second);
        at += 8;
    }
    let id = ring.chain(&[part(gpa, true)]).unwrap();
    ring.push(id);
    use_buffer(&ring, at, id, 1);
    use_buffer(&ring, at + 1, id, 1);
    ring.pop().unwrap();
    assert!(matches!(ring.pop(), Err(DriverError::NotInFlight { .. })));
}

#[test]
fn kicks_follow_the_event_over_laps_and_flags_without_it() {
    let (memory, mut ring) = ring(8, true);
    let gpa = memory.regions()[0].gpa;
    let mut at = 0u32;
    for turn in 0..1000u32 {
        let batch = 1 + turn % 3;
        // Somewhere from two before to six behind; where it lies in the laps decides about the wrap bit.
        let event = (at + turn % 9).saturating_sub(2);
        let bits = (event % 8) as u16 | if (event / 8).is_multiple_of(2) { 0x8000 } else { 0 };
        ring.raw_packed().set_device_event(bits, RING_EVENT_FLAGS_DESC);
        let ids: Vec<u16> = (0..batch).map(|_| ring.chain(&[part(gpa, true)]).unwrap()).collect();
        ids.iter().for_each(|id| ring.push(*id));
        assert_eq!(ring.kick_needed(), (at..at + batch).contains(&event), "at {at}, {batch}, event {event}");
        assert!(!ring.kick_needed(), "nothing was added since");
        for id in ids {
            use_buffer(&ring, at, id, 0);
            at += 1;
            ring.pop().unwrap().unwrap();
            ring.free(id);
        }
    }
    for (flags, wanted) in [(RING_EVENT_FLAGS_ENABLE, true), (RING_EVENT_FLAGS_DISABLE, false)] {
        let id = ring.chain(&[part(gpa, true)]).unwrap();
        ring.raw_packed().set_device_event(0, flags);
        ring.push(id);
        assert_eq!(ring.kick_needed(), wanted);
    }
}

#[test]
fn interrupts_are_asked_for_where_we_have_come_to() {
    for event_idx in [true, false] {
        let (memory, mut ring) = ring(4, event_idx);
        let gpa = memory.regions()[0].gpa;
        assert_eq!(ring.raw_packed().driver_event().1, RING_EVENT_FLAGS_ENABLE);
        for at in 0..9 {
            let id = ring.chain(&[part(gpa, true)]).unwrap();
            ring.push(id);
            use_buffer(&ring, at, id, 0);
            assert!(!ring.enable_interrupts(), "something is there: do not sleep");
            ring.pop().unwrap().unwrap();
            let (place, flags) = ring.raw_packed().driver_event();
            let next = at + 1;
            if event_idx {
                assert_eq!(u32::from(place & 0x7fff), next % 4);
                assert_eq!(
                    (place & 0x8000 != 0, flags),
                    ((next / 4).is_multiple_of(2), RING_EVENT_FLAGS_DESC)
                );
            } else {
                assert_eq!(flags, RING_EVENT_FLAGS_ENABLE);
            }
            assert!(ring.enable_interrupts());
            ring.disable_interrupts();
            assert_eq!(ring.raw_packed().driver_event().1, RING_EVENT_FLAGS_DISABLE);
            ring.free(id);
        }
    }
}
