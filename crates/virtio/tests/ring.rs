//! What is taken can be given back, with a journal and without: neither the driver nor who comes after a crash sees it.

use std::sync::Arc;

use ioplane_memory::{Mapping, Window};
use ioplane_testkit::driver::{DriverRing, GuestMemory, Part, RingMode, RingPlace};
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::{VIRTIO_F_EVENT_IDX, VIRTIO_F_RING_PACKED};
use ioplane_virtio::{Batch, BufferAccess, Chain, GROUP, MOST_PLAIN, Ring, RingLayout, RingRequest};

const SIZE: u16 = 8;
/// Both kinds of ring.
const FORMATS: [u64; 2] = [VIRTIO_F_EVENT_IDX, VIRTIO_F_EVENT_IDX | VIRTIO_F_RING_PACKED];

struct Both {
    memory: GuestMemory,
    features: u64,
    driver: DriverRing,
    journal: Window,
    chain: Chain,
}

impl Both {
    fn new(features: u64) -> Self {
        let mut memory = GuestMemory::new(1 << 20).unwrap();
        let place = RingPlace::carve(&mut memory, SIZE).unwrap();
        let driver = DriverRing::new(memory.view(), place, RingMode::of(features)).unwrap();
        let region = Arc::new(Mapping::anonymous("journal", 4096).unwrap());
        let journal = Window::of_mapping(&region, 0, region_bytes(SIZE, features)).unwrap();
        Both { memory, features, driver, journal, chain: Chain::new() }
    }

    fn open(&self, journal: bool, base: Option<u32>) -> Ring {
        let place = self.driver.place();
        let layout = RingLayout { size: SIZE, desc: place.desc, avail: place.avail, used: place.used };
        let journal = journal.then(|| self.journal.clone());
        Ring::open(self.memory.view().clone(), &layout, self.features, base, journal, &[]).unwrap()
    }

    fn offer(&mut self, count: u16) {
        for _ in 0..count {
            let gpa = self.memory.alloc(16, 16).unwrap();
            let head = self.driver.chain(&[Part { gpa, len: 16, write: true }]).unwrap();
            self.driver.push(head);
        }
    }

    fn take(&mut self, ring: &mut Ring) -> Option<RingRequest> {
        ring.take(&mut self.chain).unwrap().map(|(taken, _)| taken)
    }
}

/// A new ring of every kind: split and packed, with a journal and without.
fn each_kind(test: impl Fn(Both, Ring, bool)) {
    for (journal, features) in
        [false, true].into_iter().flat_map(|journal| FORMATS.map(|format| (journal, format)))
    {
        let both = Both::new(features);
        let ring = both.open(journal, None);
        test(both, ring, journal);
    }
}

#[test]
fn what_is_given_back_is_taken_again_in_its_order() {
    each_kind(|mut both, mut ring, journal| {
        let base = ring.base();
        both.offer(3);
        let taken: Vec<_> = std::iter::from_fn(|| both.take(&mut ring)).collect();
        let heads: Vec<_> = taken.iter().map(RingRequest::head).collect();
        assert_eq!((heads.len(), ring.in_flight()), (3, 3));
        taken.into_iter().rev().for_each(|taken| ring.rewind(taken));
        assert_eq!((ring.in_flight(), ring.base(), ring.in_flight_heads()), (0, base, vec![]));
        // Whoever came now after a crash would find nothing in flight.
        assert_eq!(both.open(journal, None).in_flight_heads(), [0u16; 0]);
        assert!(!ring.has_more(), "all that is there has been looked at");
        assert!(!ring.ask_for_more());
        assert!(!both.driver.kick_needed(), "asked before these were there");
        both.offer(1);
        assert!(both.driver.kick_needed(), "asked for more than there was");
        assert!(ring.has_more());
        let taken: Vec<_> = std::iter::from_fn(|| both.take(&mut ring)).collect();
        assert_eq!(taken[..3].iter().map(RingRequest::head).collect::<Vec<_>>(), heads);
        taken.into_iter().for_each(|taken| ring.complete(taken, 1));
        ring.publish();
        assert_eq!(
            (0..4).map(|_| both.driver.pop().unwrap().unwrap().head).take(3).collect::<Vec<_>>(),
            heads
        );
        assert_eq!(both.open(journal, Some(ring.base())).in_flight_heads(), [0u16; 0]);
    });
}

#[test]
fn so_is_a_replay() {
    FORMATS.into_iter().for_each(replay_given_back);
}

fn replay_given_back(features: u64) {
    let mut both = Both::new(features);
    let mut ring = both.open(true, None);
    both.offer(2);
    let [first, second] = [0, 1].map(|_| both.take(&mut ring).unwrap());
    let heads = [first.head(), second.head()];
    // The disk below has both when the process dies.
    [&first, &second].into_iter().for_each(|taken| ring.release(taken));
    [first, second].into_iter().for_each(RingRequest::abandon);
    drop(ring);
    let mut ring = both.open(true, None);
    assert!(ring.replays());
    both.offer(1);
    let taken: Vec<_> = std::iter::from_fn(|| both.take(&mut ring)).collect();
    assert_eq!(taken.len(), 3);
    taken.into_iter().rev().for_each(|taken| ring.rewind(taken));
    assert_eq!(ring.in_flight_heads(), heads);
    assert_eq!(both.open(true, None).in_flight_heads(), heads);
    let (again, replayed) = ring.take(&mut both.chain).unwrap().unwrap();
    assert_eq!((again.head(), replayed), (heads[0], true));
    ring.complete(again, 1);
    ring.publish();
    assert_eq!(both.open(true, None).in_flight_heads(), heads[1..]);
}

#[test]
fn a_batch_ends_where_another_kind_begins() {
    each_kind(|mut both, mut ring, journal| {
        let mut batch = Batch::default();
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        assert!(batch.is_empty(), "nothing is there");
        both.offer(3);
        let gpa = both.memory.alloc(16, 16).unwrap();
        let part = |write| Part { gpa, len: 8, write };
        let two = both.driver.chain(&[part(true), part(true)]).unwrap();
        both.driver.push(two);
        let read = both.driver.chain(&[part(false)]).unwrap();
        both.driver.push(read);
        ring.take_plain(BufferAccess::Load, MOST_PLAIN, &mut batch);
        assert!(batch.is_empty(), "the first is to be written");
        ring.take_plain(BufferAccess::Store, 2, &mut batch);
        assert_eq!((batch.buffers().len(), ring.in_flight()), (2, 2));
        batch.settle(&mut ring, [5, 6].into_iter());
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        assert_eq!(batch.buffers().len(), 1, "not the chain of two");
        batch.settle(&mut ring, [7].into_iter());
        let chain = both.take(&mut ring).unwrap();
        assert_eq!(chain.head(), two);
        ring.complete(chain, 8);
        ring.take_plain(BufferAccess::Load, MOST_PLAIN, &mut batch);
        assert!(batch.buffers().eq([ioplane_memory::GuestRange { gpa, len: 8 }]));
        batch.settle(&mut ring, [0].into_iter());
        ring.publish();
        let written: Vec<u32> = (0..5).map(|_| both.driver.pop().unwrap().unwrap().len).collect();
        assert_eq!(written, [5, 6, 7, 8, 0]);
        assert_eq!(ring.in_flight(), 0);
        assert_eq!(both.open(journal, Some(ring.base())).in_flight_heads(), [0u16; 0]);
    });
}

#[test]
fn what_is_left_of_a_batch_is_there_again() {
    each_kind(|mut both, mut ring, journal| {
        let mut batch = Batch::default();
        both.offer(6);
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        let heads = ring.in_flight_heads();
        assert_eq!(heads.len(), 6);
        batch.settle(&mut ring, [1, 2].into_iter());
        assert_eq!(ring.in_flight(), 0);
        // The third cannot be carried out: it is in flight for ever, those after it are not.
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        assert_eq!(ring.in_flight_heads(), heads[2..]);
        batch.settle_fault(&mut ring, std::iter::empty());
        assert_eq!(ring.in_flight_heads(), heads[2..3]);
        ring.publish();
        assert_eq!(both.open(journal, Some(ring.base())).in_flight_heads().len(), usize::from(journal));
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        assert_eq!(ring.in_flight_heads(), heads[2..]);
        batch.settle(&mut ring, [0; 3].into_iter());
        ring.publish();
        let used: Vec<u16> = (0..5).map(|_| both.driver.pop().unwrap().unwrap().head).collect();
        assert_eq!(used, [&heads[..2], &heads[3..]].concat());
        assert_eq!(both.driver.pop().unwrap(), None);
    });
}

#[test]
fn what_is_to_be_replayed_is_in_no_batch() {
    FORMATS.into_iter().for_each(|features| {
        let mut both = Both::new(features);
        let mut ring = both.open(true, None);
        both.offer(1);
        let taken = both.take(&mut ring).unwrap();
        ring.release(&taken);
        taken.abandon();
        drop(ring);
        let mut ring = both.open(true, None);
        let mut batch = Batch::default();
        both.offer(1);
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        assert!(batch.is_empty());
        let again = both.take(&mut ring).unwrap();
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        assert_eq!(batch.buffers().len(), 1);
        batch.settle(&mut ring, [0].into_iter());
        ring.complete(again, 0);
    });
}

#[test]
fn looking_ahead_changes_nothing() {
    each_kind(|mut both, mut ring, journal| {
        assert!(ring.look_ahead(GROUP).requests().is_empty(), "nothing is there");
        both.offer(1);
        assert!(ring.look_ahead(GROUP).requests().is_empty(), "one is not looked at");
        both.offer(5);
        let (base, count) = (ring.base(), ring.look_ahead(GROUP).requests().len());
        assert!(count >= 2, "{count} of six");
        assert_eq!((ring.base(), ring.in_flight(), ring.in_flight_heads()), (base, 0, vec![]));
        assert_eq!(both.open(journal, Some(base)).in_flight_heads(), [0u16; 0]);
        let first: Vec<_> = ring.look_ahead(GROUP).requests().iter().map(|request| request.first).collect();
        let mut ranges = Vec::new();
        while let Some(taken) = both.take(&mut ring) {
            ranges.extend_from_slice(both.chain.writable());
            ring.complete(taken, 1);
        }
        assert_eq!(first, ranges[..first.len()], "what is seen is what is taken");
        assert_eq!(ranges.len(), 6);
        ring.publish();
    });
}
