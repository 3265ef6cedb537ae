//! A saved state is a stranger's: it is taken whole, or refused by name, and then nothing has changed.

use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestView};
use ioplane_moving::{DirectStateError, MOST, MovingError, Unsent, check, seal};
use ioplane_nic::silicon::{SiliconViolation, VirtualFunction};

use crate::card::{Card, for_each_card};
use crate::hardware::{Host, MEMORY};
use crate::once::busy;

for_each_card!(
    version_length_and_checksum_are_looked_at_first,
    a_ring_outside_of_memory_and_another_model_are_refused,
    whatever_a_stranger_seals_is_refused_or_harmless,
    a_refused_state_changes_nothing,
);

const HEADER: usize = 12;

fn state<C: Card>() -> Vec<u8> {
    let mut driver = busy::<C>();
    assert!(driver.world.host.stop(Unsent::Wait));
    driver.world.host.movable.save().expect("it stands still")
}

fn memory(len: u64) -> GuestMap {
    GuestMap::anonymous(len).expect("memory")
}

fn refused<C: Card>(map: &GuestMap, bytes: &[u8]) -> DirectStateError {
    match check(C::DIRECT, map, bytes) {
        Err(MovingError::State(error)) => error,
        other => panic!("{other:?}"),
    }
}

fn version_length_and_checksum_are_looked_at_first<C: Card>() {
    let (state, map) = (state::<C>(), memory(MEMORY));
    check(C::DIRECT, &map, &state).expect("as it was saved");
    assert_eq!(seal(&state[HEADER..]), state, "the test seals as the code does");
    for len in 0..HEADER {
        assert_eq!(refused::<C>(&map, &state[..len]), DirectStateError::NotAState);
    }
    for len in HEADER..state.len() {
        let length = DirectStateError::Length { has: len - HEADER, says: state.len() - HEADER };
        assert_eq!(refused::<C>(&map, &state[..len]), length);
    }
    assert_eq!(refused::<C>(&map, &vec![0; MOST + 1]), DirectStateError::TooLarge(MOST + 1));
    let mut other = state.clone();
    other[4] = 1;
    assert_eq!(refused::<C>(&map, &other), DirectStateError::Version(1));
    for at in 0..state.len() {
        for bit in 0..8 {
            let mut flipped = state.clone();
            flipped[at] ^= 1 << bit;
            refused::<C>(&map, &flipped);
        }
    }
}

fn a_ring_outside_of_memory_and_another_model_are_refused<C: Card>() {
    let state = state::<C>();
    let DirectStateError::Impossible(why) = refused::<C>(&memory(0x1_0000), &state) else {
        panic!("it is refused")
    };
    assert!(why.contains("outside of the guest's memory"), "{why}");
    let mut body = state[HEADER..].to_vec();
    body[1] = b'x';
    assert!(matches!(refused::<C>(&memory(MEMORY), &seal(&body)), DirectStateError::OtherModel(_)));
    body.truncate(30);
    assert!(matches!(refused::<C>(&memory(MEMORY), &seal(&body)), DirectStateError::Damaged(_)));
    let long = [&state[HEADER..], &[0]].concat();
    assert!(matches!(refused::<C>(&memory(MEMORY), &seal(&long)), DirectStateError::Damaged(_)));
}

/// Whatever passes can be replayed: it ends, it breaks no rule that a driver could not break as well, and no head is ever written.
fn whatever_a_stranger_seals_is_refused_or_harmless<C: Card>() {
    let (state, map) = (state::<C>(), memory(MEMORY));
    let body = &state[HEADER..];
    let (mut passed, mut refusals) = (0, 0);
    for at in 0..body.len() {
        for value in [0, 1, 2, 7, 15, 16, 0x7f, 0x80, 0xff, body[at] ^ 1, body[at] ^ 0x10] {
            let mut other = body.to_vec();
            other[at] = value;
            let other = seal(&other);
            if check(C::DIRECT, &map, &other).is_err() {
                refusals += 1;
                continue;
            }
            passed += 1;
            let mut there = Host::<C>::new(VirtualFunction::new([2, 0, 0, 0, 0, 7], 0));
            there.movable.load(&other, &there.view).expect("it was checked");
            let outcome = there.replay();
            let refused = matches!(
                outcome,
                Ok(())
                    | Err(MovingError::Refused { .. }
                        | MovingError::Deadline { .. }
                        | MovingError::NoRing { .. }
                        | MovingError::State(_))
            );
            assert!(refused, "byte {at} as {value:#x}: {outcome:?}");
            let vf = there.silicon.vf();
            let own = |violation: &&SiliconViolation| !matches!(violation, SiliconViolation::Dma { .. });
            assert_eq!(vf.violations().iter().find(own), None, "byte {at} as {value:#x}");
        }
    }
    assert!(passed > 100 && refusals > 100, "{passed} passed, {refusals} were refused");
}

fn a_refused_state_changes_nothing<C: Card>() {
    let mut driver = busy::<C>();
    let bad = seal(&[0; 40]);
    let view = GuestView::new(Arc::new(memory(MEMORY)));
    assert!(matches!(driver.world.host.movable.load(&bad, &view), Err(MovingError::State(_))));
    driver.work();
    driver.finish();
}
