//! Another function takes the place of one that a guest drives, behind the registers that a VMM sees: between two models of the silicon,
//! which record whoever breaks its rules.

mod carry;
mod lent;
mod silicon;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{Access, Device, Quiescent, RegisterAddress};
use ioplane_memory::{GuestMap, GuestView};
use ioplane_nic::silicon::QueueRegister::{self, *};
use ioplane_nic::silicon::spec::*;
use ioplane_passthrough::{CarryError, ExchangeError, Migratable, Passthrough};
use ioplane_pci::{Function, Irq, PAGE, Wire, spec as pci};
use silicon::{Around, Moved, Shared, Silicon, Vector, for_each_chip, frame, vf};

const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 7];
const RX_RING: u64 = 0x1000;
const TX_RING: u64 = 0x2000;
const BUFFERS: u64 = 0x8000;
const SLOTS: u32 = 16;

/// A guest with a driver of few words.
struct Guest<C: Moved> {
    device: Passthrough<Migratable<Silicon<C>>>,
    /// The function that it has.
    now: Shared<C>,
    view: GuestView,
    vectors: [Arc<Vector>; 3],
    received: Vec<u8>,
    rx_next: u32,
    tx_next: u32,
    /// Pages of registers that it uses past the device: bit 0 is page 0.
    mapped: u64,
}

/// A file that stands for registers which may be mapped.
fn zeros() -> Arc<OwnedFd> {
    Arc::new(OwnedFd::from(std::fs::File::open("/dev/zero").expect("a file")))
}

/// Served to a guest with this memory.
fn admitted<C: Moved>(hardware: Silicon<C>, map: &Arc<GuestMap>) -> Passthrough<Migratable<Silicon<C>>> {
    let migratable = Migratable::new(hardware, C::DIRECT).expect("a sound table");
    admitted_as(migratable, map)
}

fn admitted_as<C: Moved>(
    migratable: Migratable<Silicon<C>>,
    map: &Arc<GuestMap>,
) -> Passthrough<Migratable<Silicon<C>>> {
    let device = Passthrough::new("nic0", migratable, None).expect("hardware that works");
    let mut quiescent = Quiescent::new(device);
    quiescent.with(|device, proof| {
        device.admit(proof).expect("it is reset");
        device.replace_memory(proof, map.clone()).expect("mapped");
    });
    quiescent.into_device()
}

fn rx<C: Moved>(register: QueueRegister) -> u64 {
    C::LAYOUT.receive.at(register)
}

fn tx<C: Moved>(register: QueueRegister) -> u64 {
    C::LAYOUT.transmit.at(register)
}

impl<C: Moved> Guest<C> {
    fn new() -> Self {
        let (now, hardware) = Silicon::new(GUEST, 1000, BAR_SIZE);
        let map = Arc::new(GuestMap::anonymous(1 << 20).expect("memory"));
        Self::with(now, admitted(hardware, &map), map)
    }

    /// With this function, which it drives from here on.
    fn with(now: Shared<C>, device: Passthrough<Migratable<Silicon<C>>>, map: Arc<GuestMap>) -> Self {
        let (view, vectors, received) = (GuestView::new(map), Default::default(), Vec::new());
        let mut guest = Guest { device, now, view, vectors, received, rx_next: 0, tx_next: 0, mapped: 0 };
        guest.set_up();
        // VFIO waits for the end of a reset.
        for _ in 0..16 {
            vf(&guest.now).step();
        }
        guest.bring_up();
        guest
    }

    /// What its VMM and its firmware do.
    fn set_up(&mut self) {
        for (at, vector) in (0..).zip(self.vectors.clone()) {
            self.device.wire(Irq::Msix, at, Wire::Call(Some(vector))).expect("a vector");
        }
        self.config(pci::BAR0, &0xfe00_0000_u32.to_le_bytes());
        self.config(pci::COMMAND, &(pci::COMMAND_MEMORY | pci::COMMAND_MASTER).to_le_bytes());
    }

    fn config(&mut self, offset: usize, bytes: &[u8]) {
        self.device.access(RegisterAddress::Config(offset as u64), Access::Write(bytes));
    }

    fn read(&mut self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        if self.has_mapped(offset) {
            vf(&self.now).read(offset, &mut bytes);
        } else {
            self.device.access(RegisterAddress::Bar(0, offset), Access::Read(&mut bytes));
        }
        u32::from_le_bytes(bytes)
    }

    fn write(&mut self, offset: u64, value: u32) {
        if self.has_mapped(offset) {
            vf(&self.now).write(offset, &value.to_le_bytes());
        } else {
            self.device.access(RegisterAddress::Bar(0, offset), Access::Write(&value.to_le_bytes()));
        }
    }

    fn has_mapped(&self, offset: u64) -> bool {
        self.mapped >> (offset / PAGE) & 1 == 1
    }

    fn until(&mut self, bit: u32) {
        for _ in 0..200 {
            if self.read(C::LAYOUT.mailbox) & bit != 0 {
                return;
            }
            vf(&self.now).step();
        }
        panic!("{bit:#x} does not come");
    }

    fn bring_up(&mut self) {
        self.write(C::LAYOUT.control, CTRL_RST);
        self.until(RSTD);
        let [a, b, c, d, e, f] = GUEST;
        let mac = [MESSAGE_MAC, u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])];
        self.say([MESSAGE_RESET, 0, 0]);
        self.say(mac);
        for (queue, ring) in [(C::LAYOUT.receive, RX_RING), (C::LAYOUT.transmit, TX_RING)] {
            self.write(queue.at(BaseLow), ring as u32);
            self.write(queue.at(Length), SLOTS * DESCRIPTOR);
            self.write(queue.at(Head), 0);
            self.write(queue.at(Tail), 0);
            self.write(queue.at(Control), ENABLE);
        }
        self.write(C::LAYOUT.interrupts.queues, (IVAR_VALID | 1) << 8 | IVAR_VALID);
        self.write(C::LAYOUT.interrupts.mask, 7);
        for slot in 0..SLOTS {
            self.post(slot);
        }
        self.write(rx::<C>(Tail), SLOTS - 1);
    }

    fn say(&mut self, message: [u32; 3]) {
        self.write(C::LAYOUT.mailbox, VFU);
        for (at, word) in (0..).zip(message) {
            self.write(C::LAYOUT.memory + 4 * at, word);
        }
        self.write(C::LAYOUT.mailbox, REQ);
        self.until(PFSTS);
        self.write(C::LAYOUT.mailbox, ACK);
    }

    fn post(&mut self, slot: u32) {
        let mut descriptor = [0; 16];
        let address = BUFFERS + u64::from(slot) * 2048;
        descriptor[..8].copy_from_slice(&address.to_le_bytes());
        self.view.write(RX_RING + u64::from(slot) * 16, &descriptor).expect("memory");
    }

    /// Sends and receives a frame with this number.
    fn traffic(&mut self, number: u8) {
        let at = TX_RING + u64::from(self.tx_next) * 16;
        let data = frame([2, 0, 0, 0, 0, 2], number);
        self.view.write(0x7000, &data).expect("memory");
        let command = TX_DEXT | TX_DATA | TX_EOP | TX_RS | data.len() as u32;
        let mut descriptor = [0; 16];
        descriptor[..8].copy_from_slice(&0x7000_u64.to_le_bytes());
        descriptor[8..12].copy_from_slice(&command.to_le_bytes());
        self.view.write(at, &descriptor).expect("memory");
        self.tx_next = (self.tx_next + 1) % SLOTS;
        self.write(tx::<C>(Tail), self.tx_next);
        assert!(vf(&self.now).receive(&frame(GUEST, number)), "there is a buffer for frame {number}");
        for _ in 0..8 {
            vf(&self.now).step();
        }
        assert_eq!(vf(&self.now).take_sent(), [data], "frame {number} leaves, and nothing else");
        self.clean();
    }

    /// Takes what was received, and posts the buffers again.
    fn clean(&mut self) {
        loop {
            let at = RX_RING + u64::from(self.rx_next) * 16;
            let status = u32::from_le_bytes(self.view.bytes(at + 8).expect("memory"));
            if status & DD == 0 {
                return;
            }
            let buffer = BUFFERS + u64::from(self.rx_next) * 2048;
            self.received.push(u8::from_le_bytes(self.view.bytes(buffer + 20).expect("memory")));
            self.post(self.rx_next);
            let tail = self.rx_next;
            self.rx_next = (self.rx_next + 1) % SLOTS;
            self.write(rx::<C>(Tail), tail);
        }
    }

    /// What happens around another one, and around the one that it has.
    fn around(&self, other: &Shared<C>, sends: bool) -> (Around<C>, Around<C>) {
        let now = self.now.clone();
        let there = Around { vf: other.clone(), left_one: Some(now.clone()), sends, left: 4000 };
        (there, Around { vf: now, left_one: None, sends: true, left: 4000 })
    }

    fn exchange(&mut self, sends: bool) -> Result<(Silicon<C>, Shared<C>), ExchangeError> {
        let (other, hardware) = Silicon::new([2, 0, 0, 0, 0, 9], 77, BAR_SIZE);
        let hardware = hardware.mapped_from(zeros());
        let (mut there, mut back) = self.around(&other, sends);
        let (former, done) = self.device.exchange(hardware, &mut there, &mut back)?;
        assert!(done.state_bytes <= ioplane_moving::MOST && done.stop_accesses > 0, "{done:?}");
        Ok((former, std::mem::replace(&mut self.now, other)))
    }
}

for_each_chip!(
    a_guest_goes_on_with_another_function,
    a_move_that_fails_leaves_the_guest_its_function,
    queues_that_end_after_the_deadline_are_brought_back,
    what_cannot_take_its_place_is_refused_before_anything_stops,
    what_the_silicon_forbids_is_not_written,
    no_vmm_maps_its_registers,
);

fn no_vmm_maps_its_registers<C: Moved>() {
    let file = zeros();
    let hardware = Silicon::<C>::new(GUEST, 0, BAR_SIZE).1.mapped_from(file.clone());
    let mut device = admitted(hardware, &Arc::new(GuestMap::anonymous(1 << 20).expect("memory")));
    assert!(device.bars().bar(0).is_some_and(|bar| bar.pages().is_empty()));
    device.dismiss();
    assert_eq!(Arc::strong_count(&file), 1);
}

fn a_guest_goes_on_with_another_function<C: Moved>() {
    let mut guest = Guest::<C>::new();
    let mut number = 0;
    // Around the ring more than once, so that heads are anywhere.
    for _ in 0..5 {
        for _ in 0..7 {
            guest.traffic(number);
            number += 1;
        }
        let before = guest.read(C::LAYOUT.counters[0].low);
        let (former, left) = guest.exchange(true).expect("exchanged");
        assert_eq!(guest.read(C::LAYOUT.counters[0].low), before, "counters go on");
        assert_eq!(vf(&guest.now).pf().mac, GUEST, "the address goes along");
        let signalled = guest.vectors.each_ref().map(|vector| vector.count());
        assert!(signalled.iter().all(|count| *count > 0), "{signalled:?}");
        // The former reaches nothing and signals nobody any more.
        drop(former);
        assert!(!vf(&left).receive(&frame(GUEST, 200)), "it takes nothing in");
        for _ in 0..8 {
            vf(&left).step();
        }
        assert_eq!(vf(&left).violations(), []);
        guest.clean();
    }
    guest.traffic(number);
    assert_eq!(guest.received, (0..=number).collect::<Vec<u8>>(), "none is lost, none comes twice");
    assert_eq!(vf(&guest.now).violations(), []);
    assert_eq!(guest.device.faults(), Default::default());
}

fn a_move_that_fails_leaves_the_guest_its_function<C: Moved>() {
    let mut guest = Guest::<C>::new();
    for number in 0..5 {
        guest.traffic(number);
    }
    let refused = guest.exchange(false).map(drop).expect_err("no frames come there");
    assert!(matches!(refused, ExchangeError::BroughtBack(_)), "{refused}");
    for number in 5..9 {
        guest.traffic(number);
    }
    assert_eq!(guest.received, (0..9).collect::<Vec<u8>>());
    assert_eq!(vf(&guest.now).violations(), []);
    guest.exchange(true).expect("the next one works");
    guest.traffic(9);
}

fn queues_that_end_after_the_deadline_are_brought_back<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.traffic(0);
    let (other, hardware) = Silicon::new([2, 0, 0, 0, 0, 9], 77, BAR_SIZE);
    let (mut there, mut back) = guest.around(&other, true);
    // They are told to end at the first look; the silicon says so a step later.
    there.left = 1;
    let refused = guest.device.exchange(hardware, &mut there, &mut back).map(drop).expect_err("no time");
    assert!(matches!(refused, ExchangeError::BroughtBack(_)), "{refused}");
    guest.traffic(1);
    assert_eq!(guest.received, [0, 1]);
    assert_eq!(vf(&guest.now).violations(), []);
    // A function that is not brought back either answers nothing.
    let (other, hardware) = Silicon::new([2, 0, 0, 0, 0, 9], 77, BAR_SIZE);
    let (mut there, mut back) = guest.around(&other, true);
    (there.left, back.left) = (1, 0);
    let refused = guest.device.exchange(hardware, &mut there, &mut back).map(drop).expect_err("no time");
    assert!(matches!(refused, ExchangeError::Lost { .. }), "{refused}");
    assert_eq!(guest.read(C::LAYOUT.link.0), !0);
}

fn what_cannot_take_its_place_is_refused_before_anything_stops<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.traffic(0);
    let (other, hardware) = Silicon::new(GUEST, 0, 2 * BAR_SIZE);
    let (mut there, mut back) = guest.around(&other, true);
    let refused = guest.device.exchange(hardware, &mut there, &mut back).map(drop).expect_err("another BAR");
    assert!(matches!(refused, ExchangeError::OtherKind { why: "its BARs", .. }), "{refused}");
    // A frame that cannot leave is waited for, and it runs on.
    vf(&guest.now).set_link(false);
    guest.view.write(TX_RING + 16, &[0; 8]).expect("memory");
    let command = TX_DEXT | TX_DATA | TX_EOP | 60;
    guest.view.write(TX_RING + 24, &command.to_le_bytes()).expect("memory");
    guest.write(tx::<C>(Tail), 2);
    let refused = guest.exchange(true).map(drop).expect_err("the link is down");
    assert!(matches!(refused, ExchangeError::Failed(_)), "{refused}");
    vf(&guest.now).set_link(true);
    assert!(vf(&guest.now).receive(&frame(GUEST, 1)), "it runs on");
    guest.device.suspend().expect("suspended");
    let refused = guest.exchange(true).map(drop).expect_err("it is held");
    assert!(matches!(refused, ExchangeError::Unready(CarryError::Held)), "{refused}");
}

fn what_the_silicon_forbids_is_not_written<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.write(rx::<C>(Head), 3);
    assert_eq!(guest.device.hardware().hardware().forbidden(), 1);
    assert_eq!(guest.device.faults().accesses, 1);
    // A tail of a queue that was told to end comes late, and is dropped.
    guest.write(tx::<C>(Control), 0);
    guest.write(tx::<C>(Tail), 3);
    assert_eq!(guest.device.hardware().hardware().forbidden(), 1);
    assert_eq!(vf(&guest.now).violations(), []);
    // In two pieces, or beyond its end: not at all.
    let mut short = [0; 2];
    guest.device.access(RegisterAddress::Bar(0, C::LAYOUT.link.0), Access::Read(&mut short));
    assert_eq!((short, guest.read(BAR_SIZE)), ([0xff; 2], !0));
}
