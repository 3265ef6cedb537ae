//! Requests that were in hand when the process died: counted, tried one at a time, and what that is not.

use ioplane_memory::Window;
use ioplane_testkit::driver::{DriverRing, GuestMemory, Part, RingMode, RingPlace};
use ioplane_virtio::journal::{JournalFault, region_bytes};
use ioplane_virtio::spec::feature::{VIRTIO_F_EVENT_IDX, VIRTIO_F_RING_PACKED};
use ioplane_virtio::{Chain, Ring, RingFault, RingLayout, RingRequest};

const SIZE: u16 = 8;

/// A queue whose process dies and comes back.
struct Mortal {
    features: u64,
    memory: GuestMemory,
    place: RingPlace,
    journal: Window,
}

impl Mortal {
    /// With `count` requests made available.
    fn new(features: u64, count: usize) -> Self {
        let mut memory = GuestMemory::new(1 << 20).unwrap();
        let place = RingPlace::carve(&mut memory, SIZE).unwrap();
        let journal = memory.carve(region_bytes(SIZE, features) as u64, 64).unwrap();
        let mut driver = DriverRing::new(memory.view(), place, RingMode::of(features)).unwrap();
        let gpa = memory.alloc(64, 64).unwrap();
        for _ in 0..count {
            let head = driver.chain(&[Part { gpa, len: 64, write: true }]).unwrap();
            driver.push(head);
        }
        Mortal { features, memory, place, journal }
    }

    fn born(&self) -> Result<Ring, RingFault> {
        let RingPlace { size, desc, avail, used } = self.place;
        let layout = RingLayout { size, desc, avail, used };
        Ring::open(self.memory.view().clone(), &layout, self.features, None, Some(self.journal.clone()), &[])
    }
}

fn take(ring: &mut Ring) -> Option<(RingRequest, bool)> {
    ring.take(&mut Chain::new()).unwrap()
}

/// Takes one request and dies with it in hand.
fn die_with_it(mortal: &Mortal) {
    let mut ring = mortal.born().unwrap();
    take(&mut ring).unwrap().0.abandon();
}

fn suspects_of_different_queues_are_tried_one_after_the_other(features: u64) {
    let (one, two) = (Mortal::new(features, 1), Mortal::new(features, 2));
    die_with_it(&one);
    die_with_it(&two);
    let (mut first, mut second) = (one.born().unwrap(), two.born().unwrap());
    let (tried, replayed) = take(&mut first).unwrap();
    assert!(replayed);
    assert!(take(&mut second).is_none(), "two suspects are in hand at once");
    assert!(second.ask_for_kick(), "what waits is work: the core must not sleep on it");
    first.release(&tried);
    first.touch(&tried);
    assert!(take(&mut second).is_none(), "it will be in hand again when the disk gives it back");
    first.complete(tried, 0);
    assert!(take(&mut second).is_none(), "a death now would still find it marked");
    first.publish();
    let (tried, replayed) = take(&mut second).unwrap();
    assert!(replayed, "order is kept: the suspect comes before what is new");
    let (fresh, replayed) = take(&mut second).unwrap();
    assert!(!replayed);
    second.complete(tried, 0);
    second.complete(fresh, 0);
    second.publish();

    // A queue that goes away in the middle of a trial takes nobody else's turn with it.
    let (one, two) = (Mortal::new(features, 1), Mortal::new(features, 1));
    die_with_it(&one);
    die_with_it(&two);
    let (mut first, mut second) = (one.born().unwrap(), two.born().unwrap());
    take(&mut first).unwrap().0.abandon();
    assert!(take(&mut second).is_none());
    drop(first);
    take(&mut second).unwrap().0.abandon();
}

fn two_deaths_in_a_row_with_it_in_hand_stop_the_queue_and_nothing_less(features: u64) {
    let mortal = Mortal::new(features, 1);
    for _ in 0..3 {
        die_with_it(&mortal);
        // The next death finds it with the disk: it is spared, and starts from zero.
        let mut ring = mortal.born().unwrap();
        let (taken, _) = take(&mut ring).unwrap();
        ring.release(&taken);
        taken.abandon();
    }
    die_with_it(&mortal);
    die_with_it(&mortal);
    for _ in 0..2 {
        let fault = mortal.born().err();
        assert!(matches!(fault, Some(RingFault::Journal(JournalFault::Deadly(_)))), "{fault:?}");
    }
}

/// One after the other: whose turn it is, is the process's.
#[test]
fn in_hand() {
    for format in [0, VIRTIO_F_RING_PACKED] {
        let features = VIRTIO_F_EVENT_IDX | format;
        suspects_of_different_queues_are_tried_one_after_the_other(features);
        two_deaths_in_a_row_with_it_in_hand_stop_the_queue_and_nothing_less(features);
    }
}
