use std::cell::Cell;
use std::rc::Rc;

use super::*;
use crate::slots::played::{PlayedSlots, region};

const VM: c_int = 9;
const MARKER: u64 = 0xfeb0_1000;
const REGISTERS: u64 = 0xfeb0_0000;
const MAPPED: u64 = 0x7f00_0000_0000;
const SLOTS: u32 = 509;

/// A device that answers at once, unless it is deaf.
#[derive(Debug, Default)]
struct Wish {
    wanted: Cell<u64>,
    granted: Cell<u64>,
    deaf: Cell<bool>,
}

impl Registers for Rc<Wish> {
    fn want(&self, request: u64) {
        self.wanted.set(request);
    }

    fn granted(&self) -> u64 {
        if !self.deaf.get() {
            self.granted.set(self.wanted.get());
        }
        self.granted.get()
    }
}

/// KVM with the VMM's slots and ours: number, address, bytes.
#[derive(Default)]
struct Machine {
    wish: Rc<Wish>,
    slots: PlayedSlots,
}

impl Machine {
    /// Where ours is: slots of the VMM have low numbers.
    fn ours(&self) -> Vec<(u32, u64)> {
        self.slots.above(100).iter().map(|slot| (slot.0, slot.1)).collect()
    }
}

impl Host for Machine {
    type Registers = Rc<Wish>;

    fn find(&self, address: usize) -> Option<Rc<Wish>> {
        (address as u64 == MAPPED).then(|| self.wish.clone())
    }

    fn slots(&self, _vm: c_int) -> u32 {
        SLOTS
    }

    fn show(&self, _vm: c_int, slot: u32, address: u64, _registers: &Rc<Wish>) -> bool {
        self.slots.put(slot, address, PAGE)
    }

    fn hide(&self, _vm: c_int, slot: u32) {
        self.slots.put(slot, 0, 0);
    }
}

/// What the VMM's call does, with the follower around it. KVM accepts it, or nothing of the test makes sense.
fn sets(follower: &mut Follower<Rc<Wish>>, machine: &Machine, region: &kvm_userspace_memory_region) {
    follower.before(machine, VM, region);
    assert!(
        machine.slots.put(region.slot, region.guest_phys_addr, region.memory_size),
        "KVM refuses {region:x?} beside {:x?}",
        machine.slots
    );
    follower.after(machine, VM, region);
}

fn reads(follower: &mut Follower<Rc<Wish>>, machine: &Machine, address: u64) {
    if let Some(request) = follower.read_exits(VM, address) {
        follower.read_answered(machine, request);
    }
}

fn shown() -> (Follower<Rc<Wish>>, Machine) {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    reads(&mut follower, &machine, REGISTERS + 0x3e);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)]);
    (follower, machine)
}

#[test]
fn a_read_that_the_device_has_answered_shows_the_registers() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    assert_eq!((follower.waiting(), machine.ours()), (1, vec![]), "nobody has read them");
    assert_eq!(follower.read_exits(VM, REGISTERS - 1), None);
    assert_eq!(follower.read_exits(VM, MARKER), None);
    assert_eq!(follower.read_exits(VM + 1, REGISTERS), None, "another VM");
    let request = follower.read_exits(VM, REGISTERS + 0x3e).expect("asks");
    assert_eq!((machine.wish.wanted.get(), machine.ours()), (request, vec![]), "not before the answer");
    follower.read_answered(&machine, request);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)]);
    assert_eq!(follower.waiting(), 0);
    assert_eq!(follower.read_exits(VM, REGISTERS), None, "shown already");
}

#[test]
fn they_go_with_their_marker_and_come_back_with_it() {
    let (mut follower, machine) = shown();
    sets(&mut follower, &machine, &region(3, 0, 0, MAPPED));
    assert_eq!((machine.ours(), machine.wish.wanted.get(), follower.waiting()), (vec![], 0, 0));
    assert_eq!(follower.read_exits(VM, REGISTERS), None, "it is not the device's any more");
    // Elsewhere, by another slot.
    sets(&mut follower, &machine, &region(5, MARKER + 0x8000, PAGE, MAPPED));
    reads(&mut follower, &machine, REGISTERS + 0x8000);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS + 0x8000)]);
    // The same slot is moved, without having been taken away.
    sets(&mut follower, &machine, &region(5, MARKER, PAGE, MAPPED));
    assert_eq!(machine.ours(), []);
    reads(&mut follower, &machine, REGISTERS);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)]);
}

#[test]
fn logging_of_changes_leaves_them_where_they_are() {
    let (mut follower, machine) = shown();
    let logged = kvm_userspace_memory_region { flags: 1, ..region(3, MARKER, PAGE, MAPPED) };
    follower.before(&machine, VM, &logged);
    follower.after(&machine, VM, &logged);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)]);
    assert_eq!(follower.waiting(), 0);
}

#[test]
fn what_the_vmm_puts_there_has_the_place() {
    let (mut follower, machine) = shown();
    sets(&mut follower, &machine, &region(7, REGISTERS - PAGE, 2 * PAGE, 0x5000));
    assert_eq!(machine.ours(), []);
    // The read cannot exit there; if it seemed to, KVM would refuse.
    for _ in 0..TRIES {
        reads(&mut follower, &machine, REGISTERS);
    }
    assert_eq!((machine.ours(), follower.waiting()), (vec![], 0), "not tried for ever");
    sets(&mut follower, &machine, &region(7, 0, 0, 0));
    reads(&mut follower, &machine, REGISTERS);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)], "free again");
    // Beside it is not in the way.
    sets(&mut follower, &machine, &region(8, REGISTERS - PAGE, PAGE, 0x5000));
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)]);
}

#[test]
fn two_devices_have_two_numbers() {
    let (mut follower, machine) = shown();
    sets(&mut follower, &machine, &region(4, MARKER + 2 * PAGE, PAGE, MAPPED));
    reads(&mut follower, &machine, REGISTERS + 2 * PAGE);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS), (SLOTS - 2, REGISTERS + 2 * PAGE)]);
}

#[test]
fn the_vmm_has_the_number_that_it_wants() {
    let (mut follower, machine) = shown();
    sets(&mut follower, &machine, &region(SLOTS - 1, 0x10_0000, PAGE, 0x5000));
    assert_eq!(machine.ours(), [(SLOTS - 1, 0x10_0000)], "the VMM's");
    reads(&mut follower, &machine, REGISTERS);
    assert_eq!(machine.ours(), [(SLOTS - 1, 0x10_0000)], "it is not moved, and no number is left");
}

#[test]
fn without_a_grant_nothing_is_shown_and_the_requests_end() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    machine.wish.deaf.set(true);
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    for n in 0..TRIES {
        assert!(follower.read_exits(VM, REGISTERS).is_some(), "attempt {n}");
        follower.read_answered(&machine, u64::from(n) + 1);
        assert_eq!(machine.wish.wanted.get(), 0, "withdrawn");
    }
    assert_eq!((follower.read_exits(VM, REGISTERS), follower.waiting()), (None, 0));
    assert_eq!(machine.ours(), []);
}

#[test]
fn an_old_grant_is_none() {
    let (mut follower, machine) = shown();
    sets(&mut follower, &machine, &region(3, 0, 0, MAPPED));
    machine.wish.deaf.set(true);
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    let request = follower.read_exits(VM, REGISTERS).expect("asks");
    assert_ne!(request, machine.wish.granted.get());
    follower.read_answered(&machine, request);
    assert_eq!(machine.ours(), []);
}

#[test]
fn of_two_vcpus_that_ask_the_second_is_answered() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    let first = follower.read_exits(VM, REGISTERS).expect("asks");
    let second = follower.read_exits(VM, REGISTERS).expect("asks again");
    follower.read_answered(&machine, first);
    assert_eq!(machine.ours(), [], "not its own request");
    follower.read_answered(&machine, second);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)]);
}

#[test]
fn other_slots_are_no_markers() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    let read_only = kvm_userspace_memory_region { flags: 2, ..region(1, MARKER, PAGE, MAPPED) };
    let others = [
        region(1, MARKER, PAGE, MAPPED + PAGE),
        region(1, MARKER, 2 * PAGE, MAPPED),
        region(1, 0, PAGE, MAPPED),
        region(1 << 16 | 1, MARKER, PAGE, MAPPED),
        read_only,
    ];
    for other in others {
        follower.after(&machine, VM, &other);
        assert_eq!(follower.waiting(), 0, "{other:x?}");
    }
    for number in 0..40 {
        let address = MARKER + u64::from(number) * 2 * PAGE;
        follower.after(&machine, VM, &region(number, address, PAGE, MAPPED));
    }
    assert_eq!(follower.waiting(), MOST, "no more than that");
}

#[test]
fn when_it_ends_all_are_gone() {
    let (mut follower, machine) = shown();
    follower.end(&machine);
    assert_eq!((machine.ours(), follower.waiting(), machine.wish.wanted.get()), (vec![], 0, 0));
    let (mut follower, machine) = shown();
    follower.forget(VM);
    assert_eq!(follower.waiting(), 0);
    assert_eq!(machine.ours(), [(SLOTS - 1, REGISTERS)], "an old VM keeps what it has");
}
