//! Single moves: what is refused, what is called off, what goes wrong on the way.

use ioplane_moving::{MOST, MovingError, Unsent};
use ioplane_nic::vf82576::{Vf82576, spec};

use crate::driver::Driver;
use crate::hardware::{Around, Host};
use crate::world::{Plan, World};

/// A driver in the middle of its work.
pub fn busy() -> Driver {
    let mut driver = Driver::new(World::new(Plan::at([])));
    driver.traffic(7);
    driver
}

/// Where its device goes to: an address of its own, the guest's memory as it was.
pub fn other(driver: &Driver, vf: Vf82576) -> Host {
    let there = Host::new(vf);
    there.view.write(0, &driver.world.host.memory()).expect("memory");
    there
}

fn vf() -> Vf82576 {
    Vf82576::new([2, 0x22, 0, 0, 0, 9], 5)
}

#[test]
fn called_off_it_goes_on_where_it_was() {
    let mut driver = busy();
    for _ in 0..5 {
        driver.world.host.movable.begin_copy(driver.world.host.view.clone()).expect("it runs");
        assert!(driver.world.host.movable.trapped(2) && !driver.world.host.movable.trapped(1));
        driver.traffic(2);
        assert!(driver.world.host.stop(Unsent::Wait));
        driver.world.host.replay().expect("the same function");
        assert!(!driver.world.host.movable.trapped(2), "it is no longer copied");
        driver.traffic(2);
    }
    driver.work();
    driver.finish();
}

#[test]
fn a_stopped_device_takes_no_access_and_a_running_one_is_not_saved() {
    let mut driver = busy();
    let movable = &mut driver.world.host.movable;
    assert!(matches!(movable.save(), Err(MovingError::Running)));
    assert!(driver.world.host.stop(Unsent::Wait));
    let movable = &mut driver.world.host.movable;
    assert!(matches!(movable.read(spec::STATUS), Err(MovingError::Stopped)));
    assert!(matches!(movable.write(spec::CTRL, spec::CTRL_RST), Err(MovingError::Stopped)));
    assert!(movable.save().is_ok());
}

#[test]
fn without_a_link_what_was_not_sent_is_sent_elsewhere() {
    let mut driver = busy();
    driver.drain();
    driver.world.host.silicon.vf().set_link(false);
    assert!(driver.send() && driver.send());
    assert!(!driver.world.host.stop(Unsent::Wait), "it cannot be sent");
    assert!(driver.world.host.stop(Unsent::Leave));
    let mut there = other(&driver, vf());
    let state = driver.world.host.movable.save().expect("it stands still");
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    driver.world.go_on(there);
    driver.finish();
}

/// The address was set by an administrator of the other host.
#[test]
fn an_address_that_is_refused_is_said_and_the_first_host_goes_on() {
    let mut driver = busy();
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut fixed = vf();
    fixed.set_mac([2, 0x33, 0, 0, 0, 1]);
    let mut there = other(&driver, fixed);
    there.movable.load(&state, &there.view).expect("a state");
    let refused = there.replay().expect_err("the address is another");
    assert!(matches!(refused, MovingError::Refused { message: "SET_MAC_ADDR" }), "{refused}");
    assert!(there.memory() == driver.world.host.memory());
    // The right address is not set again, which would be refused as well.
    let mut same = vf();
    same.set_mac(driver.world.mac);
    let mut there = other(&driver, same);
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("it is the guest's");
    driver.world.host.replay().expect("the first host has it still");
    driver.work();
    driver.finish();
}

/// Whatever breaks it off, guest memory is as it was, the hardware does nothing any more, and it can be tried again.
#[test]
fn broken_off_anywhere_it_leaves_memory_as_it_was_and_can_be_tried_again() {
    let mut driver = busy();
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    let memory = there.memory();
    there.movable.load(&state, &there.view).expect("a state");
    let mut broken = 0;
    for left in 1..4000 {
        let mut around = Around { silicon: there.silicon.clone(), left, sends: true, waits: 0 };
        match there.movable.replay(&there.view, &mut around) {
            Ok(()) => break,
            Err(MovingError::Deadline { .. }) => broken += 1,
            Err(other) => panic!("{other}"),
        }
        for _ in 0..5 {
            there.silicon.vf().receive(&crate::hardware::frame(driver.world.mac, 1, 60));
            there.silicon.vf().step();
        }
        assert!(there.memory() == memory, "broken off after {left} waits");
    }
    assert!(broken > 20, "{broken}");
    driver.world.go_on(there);
    driver.work();
    driver.finish();
}

#[test]
fn frames_that_do_not_come_are_waited_for_until_the_deadline() {
    let mut driver = busy();
    driver.run(1);
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    let mut around = Around { silicon: there.silicon.clone(), left: 60, sends: false, waits: 0 };
    // Strangers' frames come now and then, and do as well; the guest gets none of them.
    let outcome = there.movable.replay(&there.view, &mut around);
    assert!(matches!(outcome, Err(MovingError::Deadline { .. })), "{outcome:?}");
    assert!(outcome.unwrap_err().to_string().contains("ring receive 0"));
}

/// All that a driver can have said, in full: the state still fits.
#[test]
fn the_largest_state_fits() {
    let mut driver = busy();
    let mut multicast = [!0; 16];
    multicast[0] = spec::MESSAGE_MULTICAST | 30 << 16;
    driver.say(&multicast);
    driver.say(&[spec::MESSAGE_PROMISC | 3 << 16]);
    for vlan in 4064..4094 {
        driver.say(&[spec::MESSAGE_VLAN | 1 << 16, vlan]);
    }
    let pf = driver.world.host.silicon.vf().pf().clone();
    assert_eq!((pf.vlans.len(), pf.multicast.len()), (32, 30), "all that there is room for");
    driver.drain();
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    println!("{} bytes", state.len());
    // 34 registers, 9 counters, 16 words and 8 heads and tails take at most 5 bytes each: less than 250 more than here.
    assert!(state.len() + 250 <= MOST, "{} bytes", state.len());
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    let now = there.silicon.vf().pf().clone();
    assert_eq!((now.vlans, now.multicast, now.promiscuous), (pf.vlans, pf.multicast, pf.promiscuous));
    driver.world.go_on(there);
    driver.finish();
}

/// The physical function speaks by itself: the guest hears it, whatever else it says meanwhile.
#[test]
fn what_the_physical_function_says_reaches_the_guest() {
    let mut driver = busy();
    driver.drain();
    driver.world.host.silicon.vf().pf_says(0x100 | spec::MESSAGE_CTS);
    let mut seen = false;
    for _ in 0..10 {
        driver.world.tick();
        seen |= driver.world.read(spec::V2PMAILBOX) & spec::PFSTS != 0;
    }
    assert!(seen);
    // It is moved before the guest has read it.
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    driver.world.go_on(there);
    assert_eq!(driver.world.read(spec::VMBMEM), 0x100 | spec::MESSAGE_CTS);
    driver.world.write(spec::V2PMAILBOX, spec::VFU);
    driver.world.write(spec::V2PMAILBOX, spec::ACK);
    driver.work();
    driver.finish();
}

/// The hardware of these tests does notice: each rule, broken.
#[test]
fn the_silicon_s_rules_are_enforced() {
    use ioplane_nic::vf82576::SiliconViolation;
    use spec::*;
    let put = |vf: &mut Vf82576, offset: u64, value: u32| vf.write(offset, &value.to_le_bytes());
    let broken = |breaks: &dyn Fn(&mut Vf82576)| {
        let mut vf = vf();
        breaks(&mut vf);
        assert_eq!(vf.violations().len(), 1, "{:?}", vf.violations());
        vf.violations()[0]
    };
    let on = |vf: &mut Vf82576| {
        put(vf, RX + BAL, 0x1000);
        put(vf, RX + LEN, 256);
        put(vf, RX + DCTL, ENABLE);
    };
    assert_eq!(broken(&|vf| put(vf, RX + HEAD, 3)), SiliconViolation::Head { offset: RX + HEAD, value: 3 });
    let late = SiliconViolation::TailWhileOff { offset: TX + TAIL, value: 2 };
    assert_eq!(broken(&|vf| put(vf, TX + TAIL, 2)), late);
    assert_eq!(
        broken(&|vf| put(vf, TX + DCTL, ENABLE)),
        SiliconViolation::NotInitialised { offset: TX + DCTL }
    );
    assert_eq!(broken(&|vf| put(vf, VFGPRC, 0)), SiliconViolation::ReadOnly { offset: VFGPRC });
    assert_eq!(broken(&|vf| put(vf, VMBMEM, 1)), SiliconViolation::MailboxNotHeld { offset: VMBMEM });
    assert_eq!(broken(&|vf| vf.write(CTRL, &[0; 2])), SiliconViolation::Access { offset: CTRL, bytes: 2 });
    let outside = SiliconViolation::TailOutside { offset: RX + TAIL, value: 16 };
    assert_eq!(
        broken(&|vf| {
            on(vf);
            put(vf, RX + TAIL, 16);
        }),
        outside
    );
    assert_eq!(
        broken(&|vf| {
            on(vf);
            put(vf, RX + BAL, 0x2000);
        }),
        SiliconViolation::QueueOn { offset: RX + BAL }
    );
    assert_eq!(
        broken(&|vf| {
            vf.set_master(true);
            on(vf);
            put(vf, RX + TAIL, 5);
            vf.receive(&[0xff; 60]);
        }),
        SiliconViolation::Dma { iova: 0x1000 }
    );
    assert_eq!(
        broken(&|vf| {
            put(vf, V2PMAILBOX, VFU);
            put(vf, V2PMAILBOX, REQ);
            put(vf, V2PMAILBOX, VFU);
            put(vf, V2PMAILBOX, REQ);
        }),
        SiliconViolation::RequestOnRequest
    );
    assert_eq!(
        broken(&|vf| {
            put(vf, CTRL, CTRL_RST);
            put(vf, EIMS, 1);
        }),
        SiliconViolation::DuringReset { offset: EIMS }
    );
}
