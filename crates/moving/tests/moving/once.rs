//! Single moves: what is refused, what is called off, what goes wrong on the way.

use ioplane_moving::{GuestAddress, MOST, MovingError, PAGE, Unsent};
use ioplane_nic::silicon::{Chip, VirtualFunction, spec};

use crate::card::{Card, for_each_card};
use crate::driver::Driver;
use crate::hardware::{Around, Host};
use crate::world::{Plan, World};

for_each_card!(
    called_off_it_goes_on_where_it_was,
    a_stopped_device_takes_no_access_and_a_running_one_is_not_saved,
    without_a_link_what_was_not_sent_is_sent_elsewhere,
    an_address_that_is_refused_is_said_and_the_first_host_goes_on,
    broken_off_anywhere_it_leaves_memory_as_it_was_and_can_be_tried_again,
    frames_that_do_not_come_are_waited_for_until_the_deadline,
    the_largest_state_fits,
    what_the_physical_function_says_reaches_the_guest,
    where_it_goes_on_it_has_its_guests_addresses,
);

/// A driver in the middle of its work.
pub fn busy<C: Card>() -> Driver<C> {
    let mut driver = Driver::new(World::new(Plan::at([])));
    driver.traffic(7);
    driver
}

/// Where its device goes to: an address of its own, the guest's memory as it was.
pub fn other<C: Card>(driver: &Driver<C>, vf: VirtualFunction<C::Chip>) -> Host<C> {
    let there = Host::new(vf);
    there.view.write(0, &driver.world.host.memory()).expect("memory");
    there
}

pub fn vf<C: Chip>() -> VirtualFunction<C> {
    VirtualFunction::new([2, 0x22, 0, 0, 0, 9], 5)
}

fn called_off_it_goes_on_where_it_was<C: Card>() {
    let mut driver = busy::<C>();
    for _ in 0..5 {
        driver.world.host.movable.begin_copy(driver.world.host.view.clone()).expect("it runs");
        let page = (C::Chip::LAYOUT.receive.from / PAGE) as usize;
        assert!(driver.world.host.movable.trapped(page));
        driver.traffic(2);
        assert!(driver.world.host.stop(Unsent::Wait));
        driver.world.host.replay().expect("the same function");
        // Those who look at counters on that page would see dummies counted.
        assert!(C::RELEARNS || !driver.world.host.movable.trapped(page), "it is no longer copied");
        driver.traffic(2);
    }
    driver.work();
    driver.finish();
}

fn a_stopped_device_takes_no_access_and_a_running_one_is_not_saved<C: Card>() {
    let mut driver = busy::<C>();
    let movable = &mut driver.world.host.movable;
    assert!(matches!(movable.save(), Err(MovingError::Running)));
    assert!(driver.world.host.stop(Unsent::Wait));
    let movable = &mut driver.world.host.movable;
    assert!(matches!(movable.read(C::Chip::LAYOUT.link.0), Err(MovingError::Stopped)));
    assert!(matches!(movable.write(C::Chip::LAYOUT.control, spec::CTRL_RST), Err(MovingError::Stopped)));
    assert!(movable.save().is_ok());
}

fn without_a_link_what_was_not_sent_is_sent_elsewhere<C: Card>() {
    let mut driver = busy::<C>();
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
fn an_address_that_is_refused_is_said_and_the_first_host_goes_on<C: Card>() {
    let mut driver = busy::<C>();
    C::one_address(&mut driver);
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
fn broken_off_anywhere_it_leaves_memory_as_it_was_and_can_be_tried_again<C: Card>() {
    let mut driver = busy::<C>();
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    let memory = there.memory();
    there.movable.load(&state, &there.view).expect("a state");
    let mut broken = 0;
    for left in 1..4000 {
        let mut around = Around { silicon: there.silicon.clone(), left, sends: true, waits: 0, filled: 0 };
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

fn frames_that_do_not_come_are_waited_for_until_the_deadline<C: Card>() {
    let mut driver = busy::<C>();
    driver.run(1);
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    let mut around = Around { silicon: there.silicon.clone(), left: 60, sends: false, waits: 0, filled: 0 };
    // Strangers' frames come now and then, and do as well; the guest gets none of them.
    let outcome = there.movable.replay(&there.view, &mut around);
    assert!(matches!(outcome, Err(MovingError::Deadline { .. })), "{outcome:?}");
    assert!(outcome.unwrap_err().to_string().contains("ring receive 0"));
}

/// All that a driver can have said, in full: the state still fits.
fn the_largest_state_fits<C: Card>() {
    let mut driver = busy::<C>();
    let mut multicast = [!0; 16];
    multicast[0] = spec::MESSAGE_MULTICAST | 30 << 16;
    driver.say(&multicast);
    driver.say(&C::PROMISCUOUS);
    for vlan in 4096 - C::VLANS..4094 {
        driver.say(&[spec::MESSAGE_VLAN | 1 << 16, vlan]);
    }
    C::fill(&mut driver);
    let pf = driver.world.host.silicon.vf().pf().clone();
    assert_eq!((pf.vlans.len(), pf.multicast.len()), (C::VLANS as usize, 30), "all that there is room for");
    driver.drain();
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    println!("{} bytes", state.len());
    assert!(state.len() + C::MORE <= MOST, "{} bytes", state.len());
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    let now = there.silicon.vf().pf().clone();
    assert_eq!((now.vlans, now.multicast, now.promiscuous), (pf.vlans, pf.multicast, pf.promiscuous));
    assert_eq!(now.more, pf.more);
    driver.world.go_on(there);
    driver.finish();
}

/// The physical function speaks by itself: the guest hears it, whatever else it says meanwhile.
fn what_the_physical_function_says_reaches_the_guest<C: Card>() {
    let mut driver = busy::<C>();
    driver.drain();
    driver.world.host.silicon.vf().pf_says(0x100 | spec::MESSAGE_CTS);
    let mut seen = false;
    for _ in 0..10 {
        driver.world.tick();
        seen |= driver.world.read(C::Chip::LAYOUT.mailbox) & spec::PFSTS != 0;
    }
    assert!(seen);
    // It is moved before the guest has read it.
    assert!(driver.world.host.stop(Unsent::Wait));
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    there.movable.load(&state, &there.view).expect("a state");
    there.replay().expect("a host");
    driver.world.go_on(there);
    assert_eq!(driver.world.read(C::Chip::LAYOUT.memory), 0x100 | spec::MESSAGE_CTS);
    driver.world.write(C::Chip::LAYOUT.mailbox, spec::VFU);
    driver.world.write(C::Chip::LAYOUT.mailbox, spec::ACK);
    driver.work();
    driver.finish();
}

/// Of a guest with two further addresses and two VLANs.
fn where_it_goes_on_it_has_its_guests_addresses<C: Card>() {
    let mut driver = busy::<C>();
    let guest: Vec<GuestAddress> = driver.world.host.movable.addresses().expect("it runs");
    let pf = driver.world.host.silicon.vf().pf().clone();
    let own = [driver.world.mac].into_iter().chain(pf.more.iter().copied());
    let vlans: Vec<u16> = pf.vlans.iter().copied().filter(|vlan| *vlan != 0).collect();
    assert_eq!((pf.more.len(), &vlans[..]), (2, &[10, 30][..]));
    let places = [None, Some(10), Some(30)];
    let expected: Vec<GuestAddress> =
        own.flat_map(|address| places.map(|vlan| GuestAddress { address, vlan })).collect();
    assert_eq!(guest, expected, "the own one first, without a tag");
    assert!(driver.world.host.stop(Unsent::Wait));
    assert_eq!(driver.world.host.movable.addresses().expect("it stands"), [], "they may be another's");
    let state = driver.world.host.movable.save().expect("it stands still");
    let mut there = other(&driver, vf());
    assert_eq!(there.movable.addresses().expect("it runs"), [], "nobody uses it");
    there.movable.load(&state, &there.view).expect("a state");
    assert_eq!(there.movable.addresses().expect("it stands"), [], "it does not go on yet");
    there.replay().expect("a host");
    assert_eq!(there.movable.addresses().expect("it runs"), guest);
    driver.world.go_on(there);
    driver.finish();
}
