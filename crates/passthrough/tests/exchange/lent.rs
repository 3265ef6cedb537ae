//! Pages of registers are lent to the guest's VMM, which uses them past the daemon, and are back before anything of a move begins.

use std::path::Path;
use std::sync::Arc;

use ioplane_device::{Device, Quiescent};
use ioplane_memory::GuestMap;
use ioplane_nic::silicon::QueueRegister::*;
use ioplane_nic::silicon::spec::*;
use ioplane_passthrough::{Carry, CarryError, ExchangeError, Lent, Migratable, Passthrough};
use ioplane_pci::{Function, PAGE};

use super::silicon::{Moved, Silicon, for_each_chip, frame, vf};
use super::{GUEST, Guest, RX_RING, SLOTS, admitted_as, rx, tx, zeros};

/// Pages 1 to 3.
const ALL: u64 = 0b1110;

/// Served to a guest with this memory, by one that lends pages.
pub(super) fn admitted_lending<C: Moved>(
    hardware: Silicon<C>,
    map: &Arc<GuestMap>,
) -> Passthrough<Migratable<Silicon<C>>> {
    let socket = Path::new("/run/nic0.sock.pages");
    let lending = Migratable::lending(hardware.mapped_from(zeros()), C::DIRECT, socket);
    admitted_as(lending.expect("sound"), map)
}

impl<C: Moved> Guest<C> {
    fn lending() -> Self {
        let (now, hardware) = Silicon::new(GUEST, 1000, BAR_SIZE);
        let map = Arc::new(GuestMap::anonymous(1 << 20).expect("memory"));
        Self::with(now, admitted_lending(hardware, &map), map)
    }

    /// The VMM's library maps what it is lent.
    fn maps(&mut self) -> u64 {
        let Lent { at, pages, .. } = self.device.lend().expect("a guest that drives it");
        assert_eq!(at, 0);
        self.mapped = pages;
        pages
    }

    /// It has unmapped them.
    fn unmaps(&mut self) {
        self.mapped = 0;
        self.device.pages_are_back();
    }

    /// The driver begins anew, with rings that it has emptied.
    fn resets(&mut self) {
        (self.rx_next, self.tx_next) = (0, 0);
        // A reset of an 82599 leaves queues as they are.
        for control in [rx::<C>(Control), tx::<C>(Control)] {
            self.write(control, 0);
        }
        for _ in 0..16 {
            vf(&self.now).step();
        }
        self.bring_up();
    }

    fn is_whole(&self, frames: u8) {
        assert_eq!(self.received, (0..frames).collect::<Vec<u8>>(), "none is lost, none comes twice");
        assert_eq!(vf(&self.now).violations(), []);
        assert_eq!((self.device.faults(), self.device.hardware().hardware().forbidden()), Default::default());
    }
}

for_each_chip!(
    pages_are_lent_to_whoever_drives_the_function,
    a_guest_with_mapped_registers_goes_on_with_another_function,
    a_guest_with_mapped_registers_goes_to_another_host,
    no_step_is_made_while_pages_are_lent,
    what_a_driver_did_past_the_daemon_counts,
    the_next_client_gets_a_marker_of_its_own,
);

fn pages_are_lent_to_whoever_drives_the_function<C: Moved>() {
    let (_, hardware) = Silicon::<C>::new(GUEST, 0, BAR_SIZE);
    let mut device = admitted_lending(hardware, &Arc::new(GuestMap::anonymous(1 << 20).expect("memory")));
    let bar = device.bars().bar(0).expect("registers").clone();
    let areas: Vec<_> = bar.pages().iter().map(|pages| (pages.offset, pages.len)).collect();
    assert_eq!(
        (bar.size, areas),
        (2 * BAR_SIZE, vec![(BAR_SIZE, PAGE)]),
        "a VMM maps nothing but the marker"
    );
    assert!(device.lend().is_none(), "nobody drives it");
    let mut guest = Guest::<C>::lending();
    assert_eq!(guest.maps(), ALL);
    assert_eq!(guest.device.hardware().lent(), Some(ALL));
    assert!(guest.device.lend().is_none(), "one loan at a time");
    assert!(!guest.device.could_lend_more());
    let accesses = guest.device.accesses();
    for number in 0..7 {
        guest.traffic(number);
    }
    assert_eq!(guest.device.accesses(), accesses, "the daemon sees none of it");
    guest.unmaps();
    assert_eq!(guest.device.hardware().lent(), Some(0));
    guest.traffic(7);
    guest.is_whole(8);
    // One that was not added so lends nothing.
    let mut other = Guest::<C>::new();
    assert!(other.device.lend().is_none() && other.device.hardware().lent().is_none());
}

fn a_guest_with_mapped_registers_goes_on_with_another_function<C: Moved>() {
    let mut guest = Guest::<C>::lending();
    let mut number = 0;
    // Those of an 82599 lie between its rings' registers: they go on by an offset, so they are trapped after a move.
    let counters_apart = C::LAYOUT.counters[0].low < PAGE;
    for round in 0..5 {
        let pages = guest.maps();
        assert_eq!(pages, if round == 0 || counters_apart { ALL } else { 0b1000 });
        for _ in 0..7 {
            guest.traffic(number);
            number += 1;
        }
        let before = guest.read(C::LAYOUT.counters[0].low);
        guest.unmaps();
        guest.exchange(true).expect("exchanged");
        assert_eq!(guest.read(C::LAYOUT.counters[0].low), before, "counters go on");
        guest.clean();
    }
    // A driver that resets the function looks at counters anew, and has all pages again.
    guest.maps();
    assert!(!guest.device.could_lend_more());
    guest.resets();
    assert_eq!(guest.device.could_lend_more(), !counters_apart);
    guest.unmaps();
    assert_eq!(guest.maps(), ALL);
    guest.traffic(number);
    guest.is_whole(number + 1);
}

fn a_guest_with_mapped_registers_goes_to_another_host<C: Moved>() {
    let mut guest = Guest::<C>::lending();
    guest.maps();
    for number in 0..7 {
        guest.traffic(number);
    }
    guest.unmaps();
    guest.device.begin_log().expect("it runs");
    assert!(guest.device.lend().is_none(), "memory is copied: its accesses are seen");
    guest.traffic(7);
    assert!(!guest.device.written().is_empty());
    guest.device.end_log();
    assert_eq!(guest.maps(), ALL, "it was called off");
    guest.traffic(8);
    guest.unmaps();
    let carried = guest.rest();
    assert!(guest.device.lend().is_none(), "it stands still");
    let mut there = guest.arrives();
    assert!(there.device.lend().is_none(), "nobody drives it yet");
    there.device.load_carried(&carried).expect("sound");
    assert!(there.device.lend().is_none());
    there.set_up();
    there.replay(true).expect("brought back");
    guest.device.leave().expect("left");
    assert!(guest.device.lend().is_none(), "it is nobody's");
    there.clean();
    there.maps();
    there.traffic(9);
    there.is_whole(10);
}

fn no_step_is_made_while_pages_are_lent<C: Moved>() {
    let mut guest = Guest::<C>::lending();
    guest.maps();
    guest.traffic(0);
    let mapped = |refused: Result<(), CarryError>| matches!(refused, Err(CarryError::Mapped));
    assert!(mapped(guest.device.begin_log()));
    assert!(mapped(guest.device.rest().map(drop)));
    assert!(mapped(guest.device.may_load()));
    assert!(mapped(guest.device.leave()));
    let refused = guest.exchange(true).map(drop).expect_err("its guest would drive the one that it has left");
    assert!(matches!(refused, ExchangeError::Unready(CarryError::Mapped)), "{refused}");
    guest.traffic(1);
    guest.is_whole(2);
    // A guest that has had pages may have driven the function, whatever the daemon has seen since its last reset.
    let mut quiescent = Quiescent::new(guest.device);
    quiescent.with(Device::reset);
    let mut device = quiescent.into_device();
    device.pages_are_back();
    assert!(matches!(device.may_load(), Err(CarryError::Driven)));
}

/// Queues are switched on, and off, by registers that the guest has mapped: what comes to the daemon afterwards is judged by what the hardware says.
fn what_a_driver_did_past_the_daemon_counts<C: Moved>() {
    let mut guest = Guest::<C>::lending();
    guest.maps();
    guest.traffic(0);
    // The reset is trapped; what follows it is not.
    guest.resets();
    guest.traffic(1);
    guest.unmaps();
    guest.traffic(2);
    guest.is_whole(3);
    // A queue that was told to end past the daemon takes no tail, and whoever writes one has done nothing wrong.
    guest.maps();
    guest.write(rx::<C>(Control), 0);
    guest.unmaps();
    for _ in 0..16 {
        vf(&guest.now).step();
    }
    guest.write(rx::<C>(Tail), 5);
    assert!(!vf(&guest.now).receive(&frame(GUEST, 3)), "its queue is off");
    guest.is_whole(3);
    // It is off on the other function as well; the other queue goes on.
    guest.exchange(true).expect("exchanged");
    assert_eq!(guest.read(rx::<C>(Control)) & ENABLE, 0);
    assert_eq!(guest.read(tx::<C>(Control)) & ENABLE, ENABLE);
    guest.resets();
    assert_eq!(guest.maps(), ALL);
    guest.traffic(3);
    guest.is_whole(4);
    // The reset comes to the daemon, and only then are pages lent: a queue that is switched on past it takes tails.
    guest.unmaps();
    for control in [rx::<C>(Control), tx::<C>(Control)] {
        guest.write(control, 0);
    }
    for _ in 0..16 {
        vf(&guest.now).step();
    }
    guest.write(C::LAYOUT.control, CTRL_RST);
    guest.until(RSTD);
    guest.maps();
    guest.write(rx::<C>(BaseLow), RX_RING as u32);
    guest.write(rx::<C>(Length), SLOTS * DESCRIPTOR);
    guest.write(rx::<C>(Head), 0);
    guest.write(rx::<C>(Tail), 0);
    guest.write(rx::<C>(Control), ENABLE);
    for _ in 0..16 {
        vf(&guest.now).step();
    }
    guest.unmaps();
    guest.write(rx::<C>(Tail), 5);
    assert_eq!(guest.read(rx::<C>(Tail)), 5);
    guest.is_whole(4);
}

fn the_next_client_gets_a_marker_of_its_own<C: Moved>() {
    let map = Arc::new(GuestMap::anonymous(1 << 20).expect("memory"));
    let mut guest = Guest::<C>::lending();
    guest.maps();
    let marker = |device: &Passthrough<Migratable<Silicon<C>>>| {
        device.bars().bar(0).expect("registers").pages()[0].file.clone()
    };
    let before = marker(&guest.device);
    guest.device.dismiss();
    assert_eq!(guest.device.hardware().lent(), Some(0));
    let mut quiescent = Quiescent::new(guest.device);
    quiescent.with(|device, proof| {
        device.admit(proof).expect("it is reset");
        device.replace_memory(proof, map.clone()).expect("mapped");
    });
    let mut device = quiescent.into_device();
    assert!(!Arc::ptr_eq(&marker(&device), &before));
    assert!(device.lend().is_none(), "nobody drives it");
}
