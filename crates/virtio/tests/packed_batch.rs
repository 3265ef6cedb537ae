//! Batches in packed rings: where they end, what the driver sees of them, and what a fault or a death in the middle of one leaves.

mod packed_pair;

use ioplane_memory::Window;
use ioplane_virtio::{Batch, BufferAccess, Chain, MOST_PLAIN, Ring};
use packed_pair::Pair;

/// Bytes of a descriptor.
const DESC: usize = 16;
/// Where its second word lies: length, buffer ID, flags.
const TAIL: usize = 8;

impl Pair {
    /// The ring's descriptors.
    fn desc(&self) -> Window {
        let bytes = u64::from(self.place.size) * DESC as u64;
        self.memory.view().window(self.place.desc, bytes, 16).unwrap()
    }

    fn tails(&self) -> Vec<u64> {
        let desc = self.desc();
        (0..usize::from(self.place.size)).map(|index| desc.load_u64(DESC * index + TAIL)).collect()
    }
}

/// Takes all that there is, batch by batch; the sizes of the batches.
fn serve(ring: &mut Ring, most: usize, written: u32) -> Vec<usize> {
    let (mut batch, mut sizes) = (Batch::default(), Vec::new());
    loop {
        ring.take_plain(BufferAccess::Store, most, &mut batch);
        let count = batch.buffers().len();
        if count == 0 {
            return sizes;
        }
        sizes.push(count);
        batch.settle(ring, std::iter::repeat_n(written, count));
    }
}

/// Wherever in a line, and in the ring, a batch begins and however long it is: the driver gets each buffer once, in order.
#[test]
fn batches_of_any_length_from_any_place_wrap() {
    for size in [1u16, 2, 3, 4, 5, 7, 8, 13, 64] {
        for journal in [false, true] {
            for most in [1, 3, 4, 5, MOST_PLAIN] {
                let mut pair = Pair::new(size);
                let mut ring = pair.open(None, journal).unwrap();
                for turn in 0..3 * usize::from(size) {
                    let count = turn % usize::from(size) + 1;
                    let ids: Vec<_> = (0..count).map(|_| pair.push(1)).collect();
                    let sizes = serve(&mut ring, most, turn as u32);
                    // None is cut short where the ring wraps.
                    let whole = count / most;
                    assert_eq!(sizes.iter().sum::<usize>(), count, "size {size}, {most} at most");
                    assert!(sizes[..whole].iter().all(|length| *length == most), "{sizes:?}");
                    ring.publish();
                    let wanted: Vec<_> = ids.into_iter().map(|id| (id, turn as u32)).collect();
                    assert_eq!(pair.used_bytes(), wanted);
                }
                assert_eq!((ring.in_flight(), pair.driver.in_flight()), (0, 0));
            }
        }
    }
}

/// A chain of several descriptors that goes on at the ring's beginning stands between batches.
#[test]
fn a_chain_across_the_wrap_ends_a_batch() {
    for journal in [false, true] {
        let mut pair = Pair::new(8);
        let mut ring = pair.open(None, journal).unwrap();
        for _ in 0..6 {
            pair.push(1);
        }
        assert_eq!(serve(&mut ring, MOST_PLAIN, 8), [6]);
        ring.publish();
        assert_eq!(pair.used_bytes().len(), 6);
        // Its three descriptors are the last two of the ring and the first one.
        let ids = [1, 3, 1, 1].map(|count| pair.push(count));
        assert_eq!(serve(&mut ring, MOST_PLAIN, 1), [1]);
        let mut chain = Chain::new();
        let (taken, _) = ring.take(&mut chain).unwrap().unwrap();
        assert_eq!((taken.head(), chain.writable().len()), (ids[1], 3));
        assert_eq!(serve(&mut ring, MOST_PLAIN, 2), [2]);
        ring.complete(taken, 3);
        ring.publish();
        assert_eq!(pair.used_bytes(), [(ids[0], 1), (ids[2], 2), (ids[3], 2), (ids[1], 3)]);
    }
}

/// Until it is published nothing of a batch is in the ring; then all of it.
#[test]
fn a_batch_is_shown_at_once() {
    let mut pair = Pair::new(16);
    let mut ring = pair.open(None, false).unwrap();
    for _ in 0..5 {
        let ids: Vec<_> = (0..7).map(|_| pair.push(1)).collect();
        let before = pair.tails();
        assert_eq!(serve(&mut ring, MOST_PLAIN, 4), [7]);
        assert_eq!((pair.tails(), ring.unpublished()), (before, 7));
        assert_eq!(pair.used_bytes(), []);
        ring.publish();
        assert_eq!(pair.used_bytes().into_iter().map(|(id, _)| id).collect::<Vec<_>>(), ids);
    }
}

/// What cannot be taken ends the batch before it; what was before it is answered.
#[test]
fn a_fault_in_the_middle_of_a_batch_leaves_what_was_before_it() {
    // A buffer ID that is in flight twice, one beyond the ring, a table where none may be; in the same line as the batch's beginning and beyond.
    for at in [1usize, 2, 5] {
        for (what, name) in
            [("twice", "head_in_flight"), ("beyond", "bad_descriptor"), ("loop", "descriptor_loop")]
        {
            for journal in [false, true] {
                let mut pair = Pair::new(8);
                let mut ring = pair.open(None, journal).unwrap();
                let ids: Vec<_> = (0..8).map(|_| pair.push(1)).collect();
                let desc = pair.desc();
                match what {
                    "twice" => desc.put_u16(DESC * at + 12, ids[at - 1]),
                    "beyond" => desc.put_u16(DESC * at + 12, 8),
                    // Every one from here on goes on.
                    _ => (at..8).for_each(|index| {
                        desc.put_u16(DESC * index + 14, desc.load_u16(DESC * index + 14) | 1)
                    }),
                }
                let mut batch = Batch::default();
                ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
                assert_eq!(batch.buffers().len(), at, "{what} at {at}");
                let fault = ring.take(&mut Chain::new()).expect_err("a fault");
                assert_eq!(fault.name(), name, "at {at}");
                batch.settle(&mut ring, std::iter::repeat_n(8, at));
                ring.publish();
                let used: Vec<_> = pair.used_bytes().into_iter().map(|(id, _)| id).collect();
                assert_eq!(used, ids[..at], "{what} at {at}, journal {journal}");
                assert_eq!(ring.in_flight(), 0);
            }
        }
    }
}

/// A batch of which the last ones are given back (a budget or a limit cut it) is taken again from there.
#[test]
fn a_batch_that_is_cut_is_taken_again_from_there() {
    for journal in [false, true] {
        let mut pair = Pair::new(7);
        let mut ring = pair.open(None, journal).unwrap();
        for turn in 0..20u32 {
            let ids: Vec<_> = (0..6).map(|_| pair.push(1)).collect();
            let done = turn as usize % 6;
            let mut batch = Batch::default();
            ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
            assert_eq!(ring.in_flight(), 6);
            batch.settle(&mut ring, std::iter::repeat_n(turn, done));
            ring.publish();
            assert_eq!(ring.in_flight(), 0, "those given back are not in flight");
            assert_eq!(serve(&mut ring, MOST_PLAIN, turn), [6 - done]);
            ring.publish();
            assert_eq!(pair.used_bytes(), ids.into_iter().map(|id| (id, turn)).collect::<Vec<_>>());
        }
    }
}

/// A process dies with a batch in hand, part of it completed and not shown: all of it is taken again, in order.
#[test]
fn a_batch_that_dies_is_taken_again_whole() {
    for completed in 0..=5 {
        let mut pair = Pair::new(8);
        let ids: Vec<_> = (0..5).map(|_| pair.push(1)).collect();
        let mut ring = pair.open(None, true).unwrap();
        let mut batch = Batch::default();
        ring.take_plain(BufferAccess::Store, MOST_PLAIN, &mut batch);
        for (nth, (taken, _)) in batch.take().enumerate() {
            ring.release(&taken);
            if nth < completed { ring.complete(taken, 8) } else { taken.abandon() }
        }
        drop(ring);
        assert_eq!(pair.used_bytes(), [], "nothing was shown");
        let mut ring = pair.open(None, true).unwrap();
        assert_eq!(ring.in_flight_heads(), ids);
        let mut chain = Chain::new();
        for _ in &ids {
            let (taken, replayed) = ring.take(&mut chain).unwrap().unwrap();
            assert!(replayed);
            ring.complete(taken, 8);
        }
        ring.publish();
        assert_eq!(pair.used_bytes().into_iter().map(|(id, _)| id).collect::<Vec<_>>(), ids);
    }
}
