use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::*;
use crate::slots::played::{PlayedSlots, region};

const VM: c_int = 9;
const REGISTERS: u64 = 0x4000;
const BAR: u64 = 0xfeb0_0000;
const MARKER: u64 = BAR + REGISTERS;
const MAPPED: u64 = 0x7f00_0000_0000;
const SLOTS: u32 = 509;
/// The highest number that is not a shadow page's.
const FIRST: u32 = SLOTS - RESERVED - 1;

/// What a device was told, in order; and how many runs of its pages are mapped.
#[derive(Debug, Default)]
struct Device {
    told: RefCell<Vec<u64>>,
    ended: Cell<bool>,
    mapped: Cell<usize>,
}

impl Link for Rc<Device> {
    fn taken(&self, number: u64) {
        // Whoever asks again for what has gone is told so, whatever has come since.
        let first = !self.told.borrow().contains(&number);
        assert!(!first || self.mapped.get() == 0, "unmapped before it is said");
        self.told.borrow_mut().push(number);
    }

    fn end(&self) {
        self.ended.set(true);
    }
}

struct Pages(Rc<Device>, u64, u64);

impl Pages {
    fn new(device: &Rc<Device>, first: u64, count: u64) -> Self {
        device.mapped.set(device.mapped.get() + 1);
        Pages(device.clone(), first, count)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.0.mapped.set(self.0.mapped.get() - 1);
    }
}

impl Run for Pages {
    fn pages(&self) -> (u64, u64) {
        (self.1, self.2)
    }
}

/// KVM with the VMM's slots and ours: number, address, bytes.
#[derive(Default)]
struct Machine {
    device: Rc<Device>,
    links: Cell<u64>,
    slots: PlayedSlots,
}

impl Machine {
    /// Where ours are: slots of the VMM have low numbers.
    fn ours(&self) -> Vec<(u32, u64, u64)> {
        self.slots.above(400)
    }
}

impl Host for Machine {
    type Link = Rc<Device>;
    type Run = Pages;

    fn find(&self, address: usize, id: u64) -> Option<(Rc<Device>, u64)> {
        let found = address as u64 == MAPPED;
        if found {
            self.links.set(id);
            self.device.ended.set(false);
        }
        found.then(|| (self.device.clone(), REGISTERS))
    }

    fn slots(&self, _vm: c_int) -> u32 {
        SLOTS
    }

    fn show(&self, _vm: c_int, slot: u32, address: u64, run: &Pages) -> bool {
        self.slots.put(slot, address, run.2 * PAGE)
    }

    fn hide(&self, _vm: c_int, slot: u32, address: u64, run: &Pages) {
        let at = (slot, address, run.2 * PAGE);
        assert!(self.slots.above(0).contains(&at), "hides what is not there: {at:x?}");
        self.slots.put(slot, 0, 0);
    }
}

type Tested = Follower<Rc<Device>, Pages>;

/// What the VMM's call does, with the follower around it. KVM accepts it, or nothing of the test makes sense.
fn sets(follower: &mut Tested, machine: &Machine, region: &kvm_userspace_memory_region) {
    follower.before(machine, VM, region);
    assert!(
        machine.slots.put(region.slot, region.guest_phys_addr, region.memory_size),
        "KVM refuses {region:x?} beside {:x?}",
        machine.slots
    );
    follower.after(machine, VM, region);
}

fn lends(follower: &mut Tested, machine: &Machine, number: u64, runs: &[(u64, u64)]) -> bool {
    let runs = runs.iter().map(|(first, count)| Pages::new(&machine.device, *first, *count)).collect();
    follower.lend(machine, machine.links.get(), number, runs)
}

/// With pages 1 to 3 lent, by number 1.
fn lent() -> (Tested, Machine) {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    assert_eq!(machine.ours(), [], "nothing is lent yet");
    assert!(lends(&mut follower, &machine, 1, &[(1, 3)]));
    assert_eq!(machine.ours(), [(FIRST, BAR + PAGE, 3 * PAGE)]);
    (follower, machine)
}

#[test]
fn what_is_lent_is_shown_until_it_is_taken() {
    let (mut follower, machine) = lent();
    let id = machine.links.get();
    follower.take(&machine, id, 1);
    assert_eq!((machine.ours(), machine.device.mapped.get()), (vec![], 0));
    assert_eq!(*machine.device.told.borrow(), [1]);
    // Asked twice, it says so twice; what was lent since is another loan.
    follower.take(&machine, id, 1);
    assert!(lends(&mut follower, &machine, 2, &[(1, 1), (3, 1)]));
    assert_eq!(machine.ours(), [(FIRST, BAR + PAGE, PAGE), (FIRST - 1, BAR + 3 * PAGE, PAGE)]);
    follower.take(&machine, id, 1);
    assert_eq!((machine.ours().len(), machine.device.mapped.get()), (2, 2));
    follower.take(&machine, id, 2);
    assert_eq!(*machine.device.told.borrow(), [1, 1, 1, 2]);
    assert_eq!(machine.ours(), []);
}

#[test]
fn they_go_with_their_marker() {
    let (mut follower, machine) = lent();
    follower.before(&machine, VM, &region(3, 0, 0, MAPPED));
    // Before the VMM's call: what follows it may be the end of the device.
    assert_eq!((machine.ours(), machine.device.mapped.get(), machine.device.ended.get()), (vec![], 0, true));
    assert_eq!(*machine.device.told.borrow(), [1]);
    assert!(!lends(&mut follower, &machine, 2, &[(1, 3)]), "nobody is there");
    assert_eq!(machine.device.mapped.get(), 0);
    // Elsewhere, by another slot: another connection.
    let before = machine.links.get();
    machine.slots.put(3, 0, 0);
    sets(&mut follower, &machine, &region(5, MARKER + 0x8000, PAGE, MAPPED));
    assert!(machine.links.get() > before && !machine.device.ended.get());
    assert!(lends(&mut follower, &machine, 1, &[(1, 3)]));
    assert_eq!(machine.ours(), [(FIRST, BAR + 0x8000 + PAGE, 3 * PAGE)]);
    // The same slot is moved, without having been taken away.
    sets(&mut follower, &machine, &region(5, MARKER, PAGE, MAPPED));
    assert_eq!((machine.ours(), machine.device.mapped.get()), (vec![], 0));
    assert!(lends(&mut follower, &machine, 1, &[(1, 3)]));
    assert_eq!(machine.ours(), [(FIRST, BAR + PAGE, 3 * PAGE)]);
}

#[test]
fn logging_of_changes_leaves_them_where_they_are() {
    let (mut follower, machine) = lent();
    let logged = kvm_userspace_memory_region { flags: 1, ..region(3, MARKER, PAGE, MAPPED) };
    follower.before(&machine, VM, &logged);
    follower.after(&machine, VM, &logged);
    assert_eq!((machine.ours().len(), follower.markers()), (1, 1));
}

#[test]
fn what_the_vmm_puts_there_has_the_place_until_it_goes() {
    let (mut follower, machine) = lent();
    sets(&mut follower, &machine, &region(7, BAR + 2 * PAGE, PAGE, 0x5000));
    assert_eq!(machine.ours(), []);
    assert_eq!(*machine.device.told.borrow(), [0; 0], "they stay mapped");
    // Beside it changes nothing.
    sets(&mut follower, &machine, &region(8, BAR - PAGE, PAGE, 0x6000));
    assert_eq!(machine.ours(), []);
    sets(&mut follower, &machine, &region(7, 0, 0, 0));
    assert_eq!(machine.ours(), [(FIRST, BAR + PAGE, 3 * PAGE)]);
    follower.take(&machine, machine.links.get(), 1);
    assert_eq!((machine.ours(), machine.device.mapped.get()), (vec![], 0));
}

#[test]
fn all_are_shown_or_none() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    // KVM has something there that is not known here.
    machine.slots.put(9, BAR + 3 * PAGE, PAGE);
    assert!(lends(&mut follower, &machine, 1, &[(1, 1), (3, 1)]));
    assert_eq!(machine.ours(), []);
    machine.slots.put(9, 0, 0);
    sets(&mut follower, &machine, &region(8, BAR - PAGE, PAGE, 0x6000));
    assert_eq!(machine.ours().len(), 2);
}

#[test]
fn the_vmm_has_the_number_that_it_wants() {
    let (mut follower, machine) = lent();
    sets(&mut follower, &machine, &region(FIRST, 0x10_0000, PAGE, 0x5000));
    assert_eq!(machine.ours(), [(FIRST, 0x10_0000, PAGE)], "the VMM's, and no number above it is left");
    follower.take(&machine, machine.links.get(), 1);
    assert_eq!(*machine.device.told.borrow(), [1]);
}

#[test]
fn a_device_that_is_gone_has_nothing_mapped() {
    let (mut follower, machine) = lent();
    follower.lost(&machine, machine.links.get());
    assert_eq!((machine.ours(), machine.device.mapped.get(), follower.markers()), (vec![], 0, 0));
    let (mut follower, machine) = lent();
    follower.end(&machine);
    assert_eq!((machine.ours(), machine.device.mapped.get(), follower.markers()), (vec![], 0, 0));
    // The VM is another one: its slots are not touched, and nothing stays mapped.
    let (mut follower, machine) = lent();
    follower.forget(VM);
    assert_eq!((machine.ours().len(), machine.device.mapped.get()), (1, 0));
    assert!(machine.device.ended.get());
}

#[test]
fn what_a_device_may_not_lend_is_not_shown() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    sets(&mut follower, &machine, &region(3, MARKER, PAGE, MAPPED));
    assert!(!lends(&mut follower, &machine, 1, &[(1, 4)]), "the marker is not a register");
    assert!(lends(&mut follower, &machine, 1, &[(1, 3)]));
    assert!(!lends(&mut follower, &machine, 2, &[(0, 1)]), "one loan at a time");
    assert_eq!((machine.ours().len(), machine.device.mapped.get()), (1, 1));
}

#[test]
fn other_slots_are_no_markers() {
    let (mut follower, machine) = (Follower::new(), Machine::default());
    let read_only = kvm_userspace_memory_region { flags: 2, ..region(1, MARKER, PAGE, MAPPED) };
    let others = [
        region(1, MARKER, PAGE, MAPPED + PAGE),
        region(1, MARKER, 2 * PAGE, MAPPED),
        region(1, REGISTERS - PAGE, PAGE, MAPPED),
        region(1 << 16 | 1, MARKER, PAGE, MAPPED),
        read_only,
    ];
    for other in others {
        follower.after(&machine, VM, &other);
        assert_eq!(follower.markers(), 0, "{other:x?}");
    }
    for number in 0..40 {
        let address = MARKER + u64::from(number) * 2 * REGISTERS;
        follower.after(&machine, VM, &region(number, address, PAGE, MAPPED));
    }
    assert_eq!(follower.markers(), MOST, "no more than that");
}
