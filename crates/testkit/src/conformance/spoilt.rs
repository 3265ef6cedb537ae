//! States of virtio devices that none can be in, made from good ones.
//!
//! The types here say what the saved bytes mean, field by field, on purpose without the device's own: they check each other.

use ioplane_device::SavedState;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::virtio::{SIZE, SLOTS};

#[derive(Debug, Clone, Serialize, Deserialize)]
struct MmioV1 {
    registers: RegistersV1,
    vdev: SavedState,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct RegistersV1 {
    device_features_sel: u32,
    driver_features_sel: u32,
    driver_features: u64,
    queue_sel: u32,
    status: u32,
    config_generation: u32,
    interrupt_status: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct VdevV2 {
    features: u64,
    queues: Vec<QueueV2>,
    own: Vec<u8>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct QueueV2 {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    base: Option<u32>,
    in_flight: Vec<FlightV1>,
    enabled: bool,
}

/// Head, and the descriptors of a packed ring: address, length, flags.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct FlightV1 {
    head: u16,
    descriptors: Vec<(u64, u32, u16)>,
}

impl QueueV2 {
    /// `heads` are in flight besides, each of one descriptor.
    fn fly(&mut self, heads: impl IntoIterator<Item = u16>) {
        for head in heads {
            self.ahead(1);
            self.in_flight.push(FlightV1 { head, descriptors: Vec::new() });
        }
    }

    /// The device has taken `count` more.
    fn ahead(&mut self, count: u16) {
        let base = self.base.expect("a ring that has run");
        self.base = Some((base as u16).wrapping_add(count).into());
    }
}

fn decode<T: DeserializeOwned>(state: &SavedState) -> T {
    postcard::from_bytes(&state.body).expect("a good state decodes")
}

fn encode<T: Serialize>(state: &SavedState, value: &T) -> SavedState {
    SavedState { body: postcard::to_stdvec(value).expect("a state encodes"), ..state.clone() }
}

/// What is done to a good state.
type Spoil = fn(&mut VdevV2);

/// What only split rings cannot be in.
const SPLIT: [(&str, Spoil); 2] = [
    ("a size that is no power of two", |vdev| vdev.queues[0].size = 100),
    ("requests in flight that were never made available", |vdev| {
        // The guest may have made some available while the device was held, but never as many as that.
        vdev.queues[0].fly(0..2 * SLOTS);
    }),
];

/// What only packed rings cannot be in.
const PACKED: [(&str, Spoil); 5] = [
    ("a place beyond the ring", |vdev| vdev.queues[0].base = Some(0x8000_8000 | u32::from(SIZE))),
    ("a used place beyond the ring", |vdev| vdev.queues[0].base = Some(0x8000_8000 | u32::from(SIZE) << 16)),
    ("used places ahead of the available ones", |vdev| vdev.queues[0].base = Some(0x8001_8000)),
    ("more than the ring in flight", |vdev| {
        let descriptors = vec![(0, 0, 1); usize::from(SIZE) + 1];
        vdev.queues[0].in_flight.push(FlightV1 { head: 1, descriptors });
    }),
    ("a request without a descriptor", |vdev| {
        vdev.queues[0].in_flight.push(FlightV1 { head: 1, descriptors: Vec::new() });
    }),
];

/// From a good state of a virtio device behind MMIO registers.
pub(super) fn of_mmio(good: &SavedState, packed: bool) -> Vec<(String, SavedState)> {
    let mmio: MmioV1 = decode(good);
    let vdev: VdevV2 = decode(&mmio.vdev);
    let mut spoils: Vec<(&str, Spoil)> = vec![
        ("requests taken that are neither used nor in flight", |vdev| vdev.queues[0].ahead(3)),
        ("features that were never offered", |vdev| vdev.features |= 1 << 60),
        ("a ring outside memory", |vdev| vdev.queues[1].desc = 0x10),
        ("a ring at the end of the address space", |vdev| vdev.queues[0].used = u64::MAX - 3),
        ("a ring off its alignment", |vdev| vdev.queues[0].desc += 8),
        ("a size beyond the device's largest", |vdev| vdev.queues[0].size = 4096),
        ("a queue that runs without a size", |vdev| vdev.queues[1].size = 0),
        ("a request in flight twice", |vdev| vdev.queues[0].fly([1, 1])),
        ("a request in flight beyond the table", |vdev| vdev.queues[0].fly([u16::MAX])),
        ("a queue too few", |vdev| drop(vdev.queues.pop())),
        ("a queue too many", |vdev| vdev.queues.push(vdev.queues[0].clone())),
        ("nothing of the device's own", |vdev| vdev.own.clear()),
    ];
    if packed {
        spoils.extend(PACKED);
    } else {
        spoils.extend(SPLIT);
    }
    let mut states: Vec<_> = spoils
        .iter()
        .map(|(what, spoil)| {
            let mut spoilt = vdev.clone();
            spoil(&mut spoilt);
            let state = MmioV1 { vdev: encode(&mmio.vdev, &spoilt), ..mmio.clone() };
            ((*what).to_owned(), encode(good, &state))
        })
        .collect();
    let mut longer = good.clone();
    longer.body.push(0);
    states.push(("a byte too many".to_owned(), longer));
    let teapot = SavedState { kind: "teapot".to_owned(), ..mmio.vdev.clone() };
    states.push(("another device inside".to_owned(), encode(good, &MmioV1 { vdev: teapot, ..mmio })));
    states
}

/// What a front end can give back to a server is the in-flight region (vhost-user, "Inflight I/O tracking"), of which
/// the first queue's part begins the region, `bases` bytes into the state. The bases it does not get to choose: the
/// region decides.
pub(super) fn of_regions(good: &SavedState, bases: usize) -> Vec<(String, SavedState)> {
    type Spoil = fn(&mut [u8], used: u16);
    const AT_VERSION: usize = 8;
    const AT_DESC_NUM: usize = 10;
    const AT_LAST_BATCH_HEAD: usize = 12;
    const AT_USED_IDX: usize = 14;
    const ENTRIES: usize = 16;
    let spoils: [(&str, Spoil); 6] = [
        ("an in-flight region of the future", |region, _| region[AT_VERSION] = 9),
        ("requests in flight that were never made available", |region, _| {
            // The guest may have made some available while the rings stood still, but never as many as that.
            region[ENTRIES..].chunks_mut(ENTRIES).take(2 * usize::from(SLOTS)).for_each(|entry| entry[0] = 1);
        }),
        ("more in flight than the queue has", |region, _| {
            region[ENTRIES..].chunks_mut(ENTRIES).take(SIZE.into()).for_each(|entry| entry[0] = 1);
        }),
        ("a request in flight in a queue of another size", |region, _| {
            region[ENTRIES] = 1;
            region[AT_DESC_NUM..][..2].copy_from_slice(&(SIZE / 2).to_le_bytes());
        }),
        ("a batch that begins beyond the table", |region, used| {
            region[ENTRIES] = 1;
            region[AT_LAST_BATCH_HEAD..][..2].copy_from_slice(&SIZE.to_le_bytes());
            region[AT_USED_IDX..][..2].copy_from_slice(&used.wrapping_sub(1).to_le_bytes());
        }),
        ("a batch larger than the queue", |region, used| {
            region[ENTRIES] = 1;
            region[AT_USED_IDX..][..2].copy_from_slice(&used.wrapping_sub(SIZE + 1).to_le_bytes());
        }),
    ];
    let spoilt = |(what, spoil): (&str, Spoil)| {
        let mut state = good.clone();
        let region = &mut state.body[bases..];
        let used = u16::from_le_bytes([region[AT_USED_IDX], region[AT_USED_IDX + 1]]);
        spoil(region, used);
        (what.to_owned(), state)
    };
    spoils.map(spoilt).into()
}

/// As [`of_regions`], of a packed ring.
pub(super) fn of_packed_regions(good: &SavedState, bases: usize) -> Vec<(String, SavedState)> {
    type Spoil = fn(&mut [u8]);
    const AT_VERSION: usize = 8;
    const AT_DESC_NUM: usize = 10;
    const AT_FREE_HEAD: usize = 12;
    const AT_OLD_FREE_HEAD: usize = 14;
    const AT_USED_IDX: usize = 16;
    const AT_OLD_USED_IDX: usize = 18;
    const ENTRIES: usize = 32;
    const NEXT: usize = 2;
    const LAST: usize = 4;
    const NUM: usize = 6;
    const ID: usize = 16;
    fn put(region: &mut [u8], at: usize, value: u16) {
        region[at..at + 2].copy_from_slice(&value.to_le_bytes());
    }
    fn take(region: &[u8], at: usize) -> u16 {
        u16::from_le_bytes([region[at], region[at + 1]])
    }
    /// Where entry `index` begins.
    fn entry(index: u16) -> usize {
        ENTRIES + ENTRIES * usize::from(index)
    }
    /// Puts one more chain of one descriptor in flight: the first entry of the free list.
    fn fly(region: &mut [u8], id: u16) -> usize {
        let free = take(region, AT_OLD_FREE_HEAD);
        let at = entry(free);
        let next = take(region, at + NEXT);
        put(region, AT_FREE_HEAD, next);
        put(region, AT_OLD_FREE_HEAD, next);
        (region[at], region[at + NUM]) = (1, 1);
        put(region, at + LAST, free);
        put(region, at + ID, id);
        at
    }
    let spoils: [(&str, Spoil); 12] = [
        ("an in-flight region of the future", |region| region[AT_VERSION] = 9),
        ("a request in flight in a queue of another size", |region| {
            fly(region, 0);
            put(region, AT_DESC_NUM, SIZE / 2);
        }),
        ("a free list that begins beyond the table", |region| {
            put(region, AT_FREE_HEAD, SIZE + 1);
            put(region, AT_OLD_FREE_HEAD, SIZE + 1);
        }),
        ("a free list that loops", |region| {
            let free = take(region, AT_OLD_FREE_HEAD);
            put(region, entry(free) + NEXT, free);
        }),
        ("a free list that leaves it", |region| {
            let free = take(region, AT_OLD_FREE_HEAD);
            put(region, entry(free) + NEXT, u16::MAX);
        }),
        ("entries in no list", |region| {
            put(region, AT_FREE_HEAD, SIZE);
            put(region, AT_OLD_FREE_HEAD, SIZE);
        }),
        ("a place beyond the ring", |region| {
            put(region, AT_USED_IDX, SIZE);
            put(region, AT_OLD_USED_IDX, SIZE);
        }),
        ("a chain of no descriptors", |region| {
            let at = fly(region, 0);
            put(region, at + NUM, 0);
        }),
        ("a chain that runs into the free list", |region| {
            let at = fly(region, 0);
            put(region, at + NUM, 2);
        }),
        ("a chain that ends elsewhere", |region| {
            let at = fly(region, 0);
            put(region, at + LAST, SIZE - 1);
        }),
        ("a buffer ID beyond the ring", |region| {
            fly(region, SIZE);
        }),
        ("a buffer ID twice", |region| {
            fly(region, 7);
            fly(region, 7);
        }),
    ];
    let spoilt = |(what, spoil): (&str, Spoil)| {
        let mut state = good.clone();
        spoil(&mut state.body[bases..]);
        (what.to_owned(), state)
    };
    spoils.map(spoilt).into()
}
