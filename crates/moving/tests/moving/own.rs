//! What only the 82599 has: versions of messages, lists of addresses, queues by a hash, wide counters, registers that a reset leaves.

use ioplane_moving::{MovingError, Unsent};
use ioplane_nic::vf82599::spec::*;
use ioplane_nic::vf82599::{Chip82599, Vf82599};

use crate::card::Ixgbevf;
use crate::driver::Driver;
use crate::hardware::{Host, frame};
use crate::once::{busy, other, vf};
use crate::world::{Plan, World};

/// Its device stands still, and this is its state.
fn saved(driver: &mut Driver<Ixgbevf>) -> Vec<u8> {
    assert!(driver.world.host.stop(Unsent::Wait));
    driver.world.host.movable.save().expect("it stands still")
}

/// Moves it to this function.
fn move_to(driver: &mut Driver<Ixgbevf>, function: Vf82599) {
    let state = saved(driver);
    let mut there = other(driver, function);
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    driver.world.go_on(there);
}

/// A move to this function is refused by its physical function, with this message; the first host goes on.
fn refused_by(function: Vf82599, message: &str) {
    let mut driver = busy::<Ixgbevf>();
    if message == "SET_LPE" {
        driver.change_mtu(3000);
    }
    let state = saved(&mut driver);
    let mut there = other(&driver, function);
    there.movable.load(&state, &there.view).expect("a state");
    let refused = there.replay().expect_err("it is refused");
    assert!(matches!(refused, MovingError::Refused { message: own } if own == message), "{refused}");
    driver.world.host.replay().expect("the first host has it still");
    driver.work();
    driver.finish();
}

#[test]
fn a_physical_function_with_an_older_driver_refuses() {
    let mut older = vf::<Chip82599>();
    older.set_newest_api(API_1_2);
    refused_by(older, "API_NEGOTIATE");
}

#[test]
fn a_port_without_long_frames_refuses() {
    let mut short = vf::<Chip82599>();
    short.set_jumbo(false);
    refused_by(short, "SET_LPE");
}

#[test]
fn the_version_is_agreed_upon_before_what_needs_it() {
    let mut driver = busy::<Ixgbevf>();
    for (index, last) in [(3, 7), (1, 8), (2, 9)] {
        driver.say(&[MESSAGE_MACVLAN | index << 16, 0x0000_9902, last]);
    }
    let before = driver.world.host.silicon.vf().pf().clone();
    assert_eq!((before.api, before.promiscuous), (API_1_4, XCAST_MULTI));
    assert_eq!(
        before.more,
        [[2, 0x99, 0, 0, 8, 0], [2, 0x99, 0, 0, 9, 0]],
        "a list begins anew with number one"
    );
    move_to(&mut driver, vf());
    let now = driver.world.host.silicon.vf().pf().clone();
    assert_eq!((now.api, now.promiscuous, &now.more), (API_1_4, XCAST_MULTI, &before.more));
    // Number zero empties the list.
    driver.say(&[MESSAGE_MACVLAN, 0, 0]);
    move_to(&mut driver, vf());
    assert!(driver.world.host.silicon.vf().pf().more.is_empty());
    driver.finish();
}

/// What is not kept is not said either: the physical function does not hear of it.
#[test]
fn what_cannot_be_kept_is_refused() {
    const IPSEC_ADD: u32 = 0xd;
    let mut driver = busy::<Ixgbevf>();
    let taken = driver.world.host.silicon.vf().pf().taken;
    let answer = driver.ask(&[IPSEC_ADD, 1, 2, 3]);
    assert_eq!(answer[0], IPSEC_ADD | MESSAGE_NACK | MESSAGE_CTS);
    assert_eq!(driver.world.host.silicon.vf().pf().taken, taken, "it was not asked");
    // Its driver reads that word again, and takes it for a sign of life.
    driver.watchdog();
    for index in 1..=10 {
        driver.say(&[MESSAGE_MACVLAN | index << 16, 2, index]);
    }
    let answer = driver.ask(&[MESSAGE_MACVLAN | 11 << 16, 2, 11]);
    assert_eq!(answer[0] & (MESSAGE_NACK | MESSAGE_CTS), MESSAGE_NACK | MESSAGE_CTS);
    assert_eq!(driver.world.host.silicon.vf().pf().more.len(), 10);
    driver.work();
    driver.finish();
}

/// A function whose physical function gave it fewer queues than the guest uses.
#[test]
fn fewer_queues_are_not_enough() {
    let mut driver = busy::<Ixgbevf>();
    let state = saved(&mut driver);
    let mut there = other(&driver, Vf82599::with_queues([2, 0, 0, 0, 0, 5], 7, 1));
    let memory = there.memory();
    there.movable.load(&state, &there.view).expect("a state");
    let outcome = there.replay().expect_err("it has no second queue");
    assert!(matches!(outcome, MovingError::NoRing { ring: "transmit 1" }), "{outcome}");
    assert!(there.memory() == memory);
    driver.world.host.replay().expect("the first host has it still");
    driver.work();
    driver.finish();
}

/// Each queue gets frames, before and after; the other host's key shares them out otherwise.
#[test]
fn both_queues_are_brought_to_where_they_were() {
    let mut driver = busy::<Ixgbevf>();
    let heads = |driver: &mut Driver<Ixgbevf>| {
        [0, 1].map(|queue| {
            let mut head = [0; 4];
            driver.world.host.silicon.vf().read(RX + HEAD + queue * QUEUE_STRIDE, &mut head);
            u32::from_le_bytes(head)
        })
    };
    let mut moved = [0; 2];
    for number in 0..12 {
        driver.traffic(1);
        // The wire is still from here on, so that nothing but dummies moves a head.
        driver.world.injecting = false;
        driver.run(4);
        let before = heads(&mut driver);
        move_to(&mut driver, Vf82599::new([2, 0x77, 0, 0, 0, number], 9));
        assert_eq!(heads(&mut driver), before, "where they were");
        for (moved, head) in moved.iter_mut().zip(before) {
            *moved += u32::from(head > 0);
        }
        driver.world.injecting = true;
    }
    assert!(moved.iter().all(|count| *count > 6), "{moved:?} moves of each head");
    driver.finish();
}

/// A counter of 36 bits in two registers: the halves belong together, whatever lies between their reads.
#[test]
fn the_high_half_of_a_counter_is_that_of_its_low_half() {
    let mut driver = Driver::<Ixgbevf>::new(World::new(Plan::at([])));
    // From here on the monitor answers: counters go on from what the guest saw.
    move_to(&mut driver, vf());
    let low = driver.world.read(VFGORC_LSB);
    let high = driver.world.read(VFGORC_MSB);
    assert_eq!((low, high), (0xffff_ff00, 0xf), "a frame below a carry");
    let mut now = u64::from(high) << 32 | u64::from(low);
    let mut carries = 0;
    for number in 0..200 {
        let low = driver.world.read(VFGORC_LSB);
        driver.traffic(1);
        if number % 20 == 7 {
            move_to(&mut driver, Vf82599::new([2, 0x55, 0, 0, 0, number], 0xffff_0000 + u32::from(number)));
        }
        let high = driver.world.read(VFGORC_MSB);
        let next = u64::from(high) << 32 | u64::from(low);
        let more = next.wrapping_sub(now) & 0xf_ffff_ffff;
        assert!(more < 1 << 20, "from {now:#x} to {next:#x}");
        carries += u32::from(next >> 32 != now >> 32);
        now = next;
    }
    assert_eq!(carries, 1, "the run crosses a carry");
    driver.world.read(VFGORC_LSB);
    driver.finish();
}

/// After a move the pages with counters are the monitor's until the driver has reset the device and looks at them anew.
#[test]
fn pages_with_counters_stay_trapped_until_the_driver_resets() {
    let mut driver = busy::<Ixgbevf>();
    let trapped = |driver: &Driver<Ixgbevf>| [0, 1, 2, 3].map(|page| driver.world.host.movable.trapped(page));
    assert_eq!(trapped(&driver), [true, false, false, false]);
    move_to(&mut driver, vf());
    assert_eq!(trapped(&driver), [true, true, true, false]);
    driver.traffic(5);
    assert_eq!(trapped(&driver), [true, true, true, false]);
    assert!(!driver.world.host.movable.counters_anew(), "the driver has seen counters that go on");
    driver.reset_task();
    assert_eq!(trapped(&driver), [true, false, false, false]);
    driver.work();
    driver.finish();
}

/// A reset leaves queues on, and heads where they were: whoever had the function before.
#[test]
fn a_function_that_was_left_as_it_ran_is_taken() {
    let mut before = busy::<Ixgbevf>();
    let mut driver = busy::<Ixgbevf>();
    let state = saved(&mut driver);
    // The guest that had it is gone, and nobody has stopped it.
    before.world.collect();
    let silicon = before.world.host.silicon.clone();
    let head = |register: u64| {
        let mut bytes = [0; 4];
        silicon.vf().read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    };
    silicon.vf().reset();
    assert!(head(RX + HEAD) > 0 && head(RX + DCTL) & ENABLE != 0, "as it was");
    let mut there = Host { view: before.world.host.view.clone(), ..before.world.host };
    there.movable.was_reset();
    there.view.write(0, &driver.world.host.memory()).expect("memory");
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a function like another");
    driver.world.go_on(there);
    driver.work();
    driver.finish();
}

/// Frames of the physical function come to the guest no more once it runs.
#[test]
fn a_frame_of_the_second_queue_comes_once() {
    let mut driver = busy::<Ixgbevf>();
    driver.drain();
    move_to(&mut driver, vf());
    let mac = driver.world.mac;
    let taken: usize = (4000..4060)
        .filter(|number| driver.world.host.silicon.vf().receive(&frame(mac, *number, 80)))
        .count();
    assert!(taken > 15, "{taken} have room: more than one queue has");
    let before = driver.received.len();
    driver.run(4);
    assert_eq!(driver.received.len(), before + taken);
}

/// A guest that reboots has its function reset as it runs: queues read as on, and are nowhere.
#[test]
fn a_function_that_was_reset_as_it_ran_is_moved() {
    let mut driver = busy::<Ixgbevf>();
    driver.world.host.silicon.vf().reset();
    driver.world.host.movable.was_reset();
    let mut control = [0; 4];
    driver.world.host.silicon.vf().read(RX + DCTL, &mut control);
    assert_ne!(u32::from_le_bytes(control) & ENABLE, 0, "it reads as on");
    let state = saved(&mut driver);
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    assert_eq!(there.movable.read(RX + DCTL).expect("hardware that works") & ENABLE, 0);
    assert_eq!(there.silicon.vf().violations(), []);
}
