//! Packed rings against the testkit's driver, without a device: laps, chains, places, deaths.

mod packed_pair;

use ioplane_testkit::driver::RingPlace;
use ioplane_virtio::{Chain, Ring, RingLayout, RingRequest};
use packed_pair::{FEATURES, Pair};

fn take(ring: &mut Ring) -> RingRequest {
    ring.take(&mut Chain::new()).unwrap().expect("something is available").0
}

fn take_all(ring: &mut Ring) -> Vec<RingRequest> {
    let mut chain = Chain::new();
    std::iter::from_fn(|| ring.take(&mut chain).unwrap().map(|(taken, _)| taken)).collect()
}

/// Any size, any chain lengths, any order of completion, any batches, with a new device side now and then: the driver,
/// which checks every used descriptor, gets each buffer back once.
#[test]
fn laps_of_any_size_with_chains_of_any_length_in_any_order() {
    for size in [1u16, 2, 3, 7, 8, 61] {
        for journal in [false, true] {
            let mut pair = Pair::new(size);
            let mut ring = pair.open(None, journal).unwrap();
            let (mut held, mut out, mut back) = (Vec::new(), 0u32, 0u32);
            let mut dice = u64::from(size) << 8 | 1;
            let mut roll = |below: usize| {
                dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (dice >> 33) as usize % below
            };
            for _ in 0..4000 {
                match roll(6) {
                    0 | 1 => {
                        let count = 1 + roll(4);
                        if pair.driver.room() >= count {
                            pair.push(count);
                            out += 1;
                        }
                    }
                    2 => held.extend(take_all(&mut ring)),
                    3 if !held.is_empty() => ring.complete(held.swap_remove(roll(held.len())), 8),
                    4 => {
                        ring.publish();
                        back += pair.used().len() as u32;
                    }
                    // Stops and starts again: its places are all that it needs when nothing is in flight.
                    5 if held.is_empty() => {
                        ring.publish();
                        let base = ring.base();
                        assert!(ring.flights().is_empty());
                        ring.let_go();
                        drop(ring);
                        ring = pair.open(Some(base), journal).unwrap();
                        assert_eq!(ring.base(), base);
                        assert!(ring.accounts_for_all());
                    }
                    _ => {}
                }
            }
            held.extend(take_all(&mut ring));
            held.into_iter().for_each(|taken| ring.complete(taken, 0));
            ring.publish();
            back += pair.used().len() as u32;
            assert_eq!((out, pair.driver.in_flight()), (back, 0), "size {size}, journal {journal}");
        }
    }
}

/// A batch is completed and not shown when the process dies; the next one completes in another order, and the driver must not
/// find what lies behind.
#[test]
fn what_a_dead_process_had_completed_and_not_shown_is_never_found() {
    let mut pair = Pair::new(8);
    let ids = [pair.push(3), pair.push(1), pair.push(2)];
    let mut ring = pair.open(None, true).unwrap();
    for taken in take_all(&mut ring) {
        ring.release(&taken);
        ring.touch(&taken);
        ring.release(&taken);
        ring.complete(taken, 8);
    }
    drop(ring);
    assert_eq!(pair.used(), [0u16; 0], "nothing was shown");
    let mut ring = pair.open(None, true).unwrap();
    assert_eq!(ring.in_flight_heads(), ids);
    let mut again = take_all(&mut ring);
    assert!(again.iter().map(RingRequest::head).eq(ids));
    // The last first: its successor comes two places on, where the dead one has left nothing; then one, and there it has.
    let mut found = Vec::new();
    while let Some(taken) = again.pop() {
        ring.complete(taken, 8);
        ring.publish();
        found.extend(pair.used());
    }
    assert_eq!(found, [ids[2], ids[1], ids[0]]);
    let next = pair.push(1);
    let taken = take(&mut ring);
    assert_eq!(taken.head(), next);
    ring.complete(taken, 0);
    ring.publish();
    assert_eq!(pair.used(), [next]);
}

/// The front end's base is stale after a crash: with nothing in flight the journal still says where to go on.
#[test]
fn after_a_crash_the_journal_knows_the_places() {
    let mut pair = Pair::new(5);
    let mut ring = pair.open(Some(0x8000_8000), true).unwrap();
    for _ in 0..7 {
        pair.push(2);
        let taken = take(&mut ring);
        ring.complete(taken, 1);
        ring.publish();
        assert_eq!(pair.used().len(), 1);
    }
    drop(ring);
    let id = pair.push(3);
    let mut ring = pair.open(Some(0x8000_8000), true).unwrap();
    let taken = take(&mut ring);
    assert_eq!(taken.head(), id);
    ring.complete(taken, 1);
    ring.publish();
    assert_eq!(pair.used(), [id]);
}

#[test]
fn a_chain_given_back_is_the_next_again_and_leaves_no_trace() {
    for journal in [false, true] {
        let mut pair = Pair::new(4);
        let mut ring = pair.open(None, journal).unwrap();
        let mut out = Vec::new();
        for count in [1, 2, 3, 1, 2] {
            let id = pair.push(count);
            let base = ring.base();
            let taken = take(&mut ring);
            ring.rewind(taken);
            assert_eq!((ring.base(), ring.in_flight(), ring.in_flight_heads()), (base, 0, vec![]));
            let taken = take(&mut ring);
            assert_eq!(taken.head(), id);
            ring.complete(taken, 0);
            ring.publish();
            out.extend(pair.used());
        }
        assert_eq!(out.len(), 5);
        let id = pair.push(2);
        let taken = take(&mut ring);
        ring.rewind(taken);
        drop(ring);
        if journal {
            let mut ring = pair.open(None, true).unwrap();
            assert!(!ring.replays(), "what was given back is not in flight");
            let taken = take(&mut ring);
            assert_eq!(taken.head(), id);
            taken.abandon();
        }
    }
}

/// A queue that was suspended without a journal goes on from its state alone, although the ring has been overwritten.
#[test]
fn what_is_in_flight_travels_with_the_state() {
    let mut pair = Pair::new(8);
    let ids = [pair.push(2), pair.push(1)];
    let mut ring = pair.open(None, false).unwrap();
    let mut taken = take_all(&mut ring);
    // The second ends first, and its used descriptor lies where the first one's chain began.
    ring.complete(taken.pop().unwrap(), 8);
    ring.publish();
    taken.into_iter().for_each(RingRequest::abandon);
    let (base, flights) = (ring.base(), ring.flights());
    assert_eq!((flights.len(), flights[0].head, flights[0].descriptors.len()), (1, ids[0], 2));
    let RingPlace { size, desc, avail, used } = pair.place;
    let layout = RingLayout { size, desc, avail, used };
    let view = pair.memory.view().clone();
    let mut again = Ring::open(view, &layout, FEATURES, Some(base), None, &flights).unwrap();
    assert!(again.accounts_for_all());
    let mut chain = Chain::new();
    let (first, replayed) = again.take(&mut chain).unwrap().unwrap();
    assert!(replayed && first.head() == ids[0]);
    assert_eq!(chain.writable().iter().map(|range| range.gpa).collect::<Vec<_>>(), [pair.buffers; 2]);
    again.complete(first, 8);
    again.publish();
    assert_eq!(pair.used(), [ids[1], ids[0]]);
}

#[test]
fn a_place_that_no_ring_has_is_refused() {
    let pair = Pair::new(5);
    for base in [0x8000_8005, 0x8005_8000, 0x8001_8000, 0x0000_8001, 0xffff_ffff] {
        let fault = pair.open(Some(base), false).err().map(|fault| fault.name());
        assert_eq!(fault, Some("bad_start"), "{base:#x}");
    }
    let RingPlace { desc, avail, used, .. } = pair.place;
    for size in [0, 32769] {
        let layout = RingLayout { size, desc, avail, used };
        let ring = Ring::open(pair.memory.view().clone(), &layout, FEATURES, None, None, &[]);
        assert_eq!(ring.err().map(|fault| fault.name()), Some("bad_size"));
    }
}
