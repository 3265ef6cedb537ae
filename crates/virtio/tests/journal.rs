//! The in-flight region byte by byte: it outlives the daemon that wrote it, and the next one is perhaps of another version.

use std::sync::Arc;

use ioplane_memory::{Mapping, Window};
use ioplane_testkit::driver::{DriverRing, GuestMemory, Part, RingMode, RingPlace};
use ioplane_testkit::golden;
use ioplane_testkit::golden::Golden;
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::*;
use ioplane_virtio::{Chain, Ring, RingLayout, RingRequest};

const SIZE: u16 = 8;

struct Queue {
    memory: GuestMemory,
    features: u64,
    driver: DriverRing,
    buffers: u64,
}

impl Queue {
    fn new(features: u64) -> Self {
        let mut memory = GuestMemory::new(1 << 20).unwrap();
        let place = RingPlace::carve(&mut memory, SIZE).unwrap();
        let driver = DriverRing::new(memory.view(), place, RingMode::of(features)).unwrap();
        let buffers = memory.alloc(4096, 4096).unwrap();
        Queue { memory, features, driver, buffers }
    }

    /// A region of that content.
    fn region(&self, content: &[u8]) -> Window {
        let len = region_bytes(SIZE, self.features);
        let mapping = Arc::new(Mapping::anonymous("journal", 4096).unwrap());
        let region = Window::of_mapping(&mapping, 0, len).unwrap();
        content.iter().enumerate().for_each(|(at, byte)| region.put_u8(at, *byte));
        region
    }

    fn open(&self, region: &Window, base: Option<u32>) -> Ring {
        let RingPlace { size, desc, avail, used } = self.driver.place();
        let layout = RingLayout { size, desc, avail, used };
        let view = self.memory.view().clone();
        Ring::open(view, &layout, self.features, base, Some(region.clone()), &[]).unwrap()
    }

    /// Makes a chain of so many descriptors available.
    fn offer(&mut self, count: usize) {
        let parts: Vec<_> = (0..count as u64)
            .map(|n| Part { gpa: self.buffers + 64 * n, len: 8 + n as u32, write: n > 0 })
            .collect();
        let head = self.driver.chain(&parts).unwrap();
        self.driver.push(head);
    }
}

fn take(ring: &mut Ring) -> RingRequest {
    ring.take(&mut Chain::new()).unwrap().expect("something is available").0
}

fn content(region: &Window) -> Vec<u8> {
    (0..region.len()).map(|at| region.load_u8(at)).collect()
}

/// A queue's life, with what is in the region at each step.
fn lived(features: u64) -> (Queue, Vec<(String, Vec<u8>)>, u32) {
    let mut queue = Queue::new(features);
    let region = queue.region(&[]);
    let mut steps = Vec::new();
    let mut step = |what: &str| steps.push((what.to_owned(), content(&region)));
    let mut ring = queue.open(&region, None);
    step("begun");
    [2, 1, 3].into_iter().for_each(|count| queue.offer(count));
    let [first, second, third] = [(); 3].map(|()| take(&mut ring));
    step("three taken and in hand");
    ring.release(&first);
    ring.release(&second);
    step("the first two with the disk below");
    ring.touch(&second);
    ring.complete(second, 1);
    step("the second completed");
    ring.publish();
    step("the second published");
    queue.offer(1);
    let fourth = take(&mut ring);
    ring.rewind(fourth);
    step("a fourth taken and given back");
    [first, third].into_iter().for_each(RingRequest::abandon);
    let base = ring.base();
    drop(ring);
    let ring = queue.open(&region, Some(base));
    assert_eq!(ring.in_flight_heads().len(), 2);
    step("after a death with the third in hand");
    (queue, steps, base)
}

fn check(features: u64, golden: &Golden) {
    let (mut queue, steps, base) = lived(features);
    golden.check_parts(&steps);
    // A daemon of today goes on with what is stored.
    let region = queue.region(&golden.part("a fourth"));
    let mut ring = queue.open(&region, Some(base));
    let heads = ring.in_flight_heads();
    assert_eq!(heads.len(), 2);
    for head in heads {
        let (taken, replayed) = loop {
            // One suspect is tried at a time, and other tests have theirs.
            match ring.take(&mut Chain::new()).unwrap() {
                Some(taken) => break taken,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!((taken.head(), replayed), (head, true));
        ring.complete(taken, 0);
        ring.publish();
    }
    let fresh = take(&mut ring);
    ring.complete(fresh, 0);
    ring.publish();
    let mut used = 0;
    while let Some(done) = queue.driver.pop().unwrap() {
        queue.driver.free(done.head);
        used += 1;
    }
    assert_eq!(used, 4, "each is used once");
}

#[test]
fn of_a_split_ring() {
    check(VIRTIO_F_EVENT_IDX, &golden!("journal-split.region"));
}

#[test]
fn of_a_packed_ring() {
    check(VIRTIO_F_EVENT_IDX | VIRTIO_F_RING_PACKED, &golden!("journal-packed.region"));
}
