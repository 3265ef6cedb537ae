//! The same in steps, as two daemons do it: another host's function, in another copy of the guest's memory.

use std::sync::Arc;

use ioplane_device::{Device, Quiescent};
use ioplane_memory::{GuestMap, GuestView, MemoryRegion, RegionSpec};
use ioplane_moving::{GuestAddress, MovingError, PAGE};
use ioplane_nic::silicon::QueueRegister::*;
use ioplane_nic::silicon::spec::*;
use ioplane_passthrough::{Carried, Carry, CarryError, ExchangeError, Motion};
use ioplane_pci::{Function, spec as pci};

use super::silicon::{Around, Moved, Shared, Silicon, for_each_chip, frame, vf};
use super::{GUEST, Guest, RX_RING, SLOTS, TX_RING, admitted, rx};

fn around<C: Moved>(of: &Shared<C>, sends: bool) -> Around<C> {
    Around { vf: of.clone(), left_one: None, sends, left: 4000 }
}

impl<C: Moved> Guest<C> {
    /// Its processors stand still, and so does its function.
    pub(super) fn rest(&mut self) -> Carried {
        let mut looks = 0;
        while !self.device.rest().expect("it comes to rest") {
            vf(&self.now).step();
            looks += 1;
            assert!(looks < 100, "it does not come to rest");
        }
        assert_eq!(self.device.motion(), Motion::Still);
        self.device.carried().expect("it stands still")
    }

    /// The same guest on another host: its memory has been copied, its VMM knows nothing of the function yet.
    pub(super) fn arrives(&self) -> Self {
        let (now, hardware) = Silicon::new([2, 0, 0, 0, 0, 9], 77, BAR_SIZE);
        let map = Arc::new(GuestMap::anonymous(1 << 20).expect("memory"));
        let device = match self.device.hardware().lent() {
            Some(_) => super::lent::admitted_lending(hardware, &map),
            None => admitted(hardware, &map),
        };
        for _ in 0..16 {
            vf(&now).step();
        }
        let view = GuestView::new(map);
        let mut bytes = vec![0; 1 << 20];
        self.view.read(0, &mut bytes).expect("memory");
        view.write(0, &bytes).expect("memory");
        Guest {
            device,
            now,
            view,
            vectors: Default::default(),
            received: self.received.clone(),
            rx_next: self.rx_next,
            tx_next: self.tx_next,
            mapped: 0,
        }
    }

    pub(super) fn replay(&mut self, sends: bool) -> Result<(), CarryError> {
        let mut around = around(&self.now, sends);
        let replayed = self.device.replay(&mut around)?;
        assert!(replayed.accesses > 0);
        Ok(())
    }
}

for_each_chip!(
    a_guest_goes_on_with_a_function_of_another_host,
    pages_that_the_function_writes_while_memory_is_copied_are_named,
    memory_that_comes_while_it_is_copied_is_logged_too,
    what_fails_elsewhere_goes_on_here,
    a_function_runs_only_as_its_vmm_had_set_it_up,
    queues_that_were_told_to_end_are_brought_back,
    steps_out_of_order_change_nothing,
    what_its_guest_has_said_goes_ahead,
    what_was_said_ahead_is_forgotten_with_a_reset_and_with_its_vmm,
);

fn a_guest_goes_on_with_a_function_of_another_host<C: Moved>() {
    let mut guest = Guest::<C>::new();
    let own = GuestAddress { address: GUEST, vlan: None };
    let mut number = 0;
    for _ in 0..5 {
        for _ in 0..7 {
            guest.traffic(number);
            number += 1;
        }
        let before = guest.read(C::LAYOUT.counters[0].low);
        assert_eq!(guest.device.addresses().first(), Some(&own), "its guest is here");
        let carried = guest.rest();
        assert!(carried.state.len() <= ioplane_moving::MOST);
        assert_eq!(guest.device.addresses(), [], "and may be elsewhere soon");
        let mut there = guest.arrives();
        there.device.load_carried(&carried).expect("taken");
        assert_eq!(there.device.motion(), Motion::Still);
        guest.device.leave().expect("left");
        assert_eq!((guest.device.addresses(), there.device.addresses()), (vec![], vec![]));
        assert!(!vf(&guest.now).receive(&frame(GUEST, 200)), "the former takes nothing in");
        assert_eq!(guest.read(C::LAYOUT.link.0), !0, "and answers nothing");
        there.set_up();
        there.replay(true).expect("it goes on");
        assert_eq!(there.device.motion(), Motion::Runs);
        assert_eq!(there.device.addresses().first(), Some(&own), "where it goes on it is found");
        assert!(there.vectors.iter().all(|vector| vector.count() > 0), "each vector is signalled");
        assert_eq!(there.read(C::LAYOUT.counters[0].low), before, "counters go on");
        assert_eq!(vf(&there.now).pf().mac, GUEST, "the address goes along");
        assert_eq!(vf(&guest.now).violations(), []);
        there.clean();
        guest = there;
    }
    guest.traffic(number);
    assert_eq!(guest.received, (0..=number).collect::<Vec<u8>>(), "none is lost, none comes twice");
    assert_eq!(vf(&guest.now).violations(), []);
}

/// Pages in which two guests differ.
fn differ<C: Moved>(one: &Guest<C>, other: &Guest<C>) -> Vec<u64> {
    let page = |guest: &Guest<C>, at: u64| {
        let mut bytes = vec![0; PAGE as usize];
        guest.view.read(at * PAGE, &mut bytes).expect("memory");
        bytes
    };
    (0..(1 << 20) / PAGE).filter(|at| page(one, *at) != page(other, *at)).collect()
}

/// Copies a page, as a VMM does that knows it as written.
fn send<C: Moved>(from: &Guest<C>, to: &Guest<C>, page: u64) {
    let mut bytes = vec![0; PAGE as usize];
    from.view.read(page * PAGE, &mut bytes).expect("memory");
    to.view.write(page * PAGE, &bytes).expect("memory");
}

fn pages_that_the_function_writes_while_memory_is_copied_are_named<C: Moved>() {
    // The driver writes the rings and the frame that it sends: those its VMM knows.
    let drivers = [RX_RING / PAGE, TX_RING / PAGE, 7];
    for logged in [true, false] {
        let mut guest = Guest::<C>::new();
        for number in 0..5 {
            guest.traffic(number);
        }
        if logged {
            guest.device.begin_log().expect("it runs");
        }
        let copied = guest.arrives();
        for number in 5..25 {
            guest.traffic(number);
        }
        let carried = guest.rest();
        let named = guest.device.written();
        assert_eq!(guest.device.logs(), logged);
        for page in drivers {
            send(&guest, &copied, page);
        }
        let written = differ(&guest, &copied);
        assert!(!written.is_empty(), "frames were received meanwhile");
        if !logged {
            assert!(named.is_empty());
            continue;
        }
        let missed: Vec<u64> = written.into_iter().filter(|page| !named.contains(page)).collect();
        assert_eq!(missed, [] as [u64; 0], "of {named:?}");
        assert!(guest.device.written().is_empty(), "named once");
        named.iter().for_each(|page| send(&guest, &copied, *page));
        let mut there = Guest {
            received: guest.received.clone(),
            rx_next: guest.rx_next,
            tx_next: guest.tx_next,
            ..copied
        };
        there.device.load_carried(&carried).expect("taken");
        there.set_up();
        there.replay(true).expect("it goes on");
        guest.device.leave().expect("left");
        there.traffic(25);
        assert_eq!(there.received, (0..=25).collect::<Vec<u8>>());
    }
}

fn memory_that_comes_while_it_is_copied_is_logged_too<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.device.begin_log().expect("it runs");
    // What a VMM does that has moved memory about: another region, into which the driver posts its buffers.
    let more = GuestMap::anonymous(1 << 20).expect("memory");
    let spec = more.regions()[0].spec().expect("a file");
    let above = MemoryRegion::map(RegionSpec { gpa: 1 << 20, ..spec }).expect("mapped");
    let mut regions = guest.view.map().regions().to_vec();
    regions.push(above);
    let map = Arc::new(GuestMap::new(regions).expect("two regions"));
    guest.device.grow_memory(map.clone()).expect("mapped");
    guest.view = GuestView::new(map);
    // The first slot has a frame now, so the last one can be posted, and gets the sixteenth.
    let buffer: u64 = (1 << 20) + 5 * PAGE;
    assert!(vf(&guest.now).receive(&frame(GUEST, 0)), "there is a buffer");
    let mut descriptor = [0; 16];
    descriptor[..8].copy_from_slice(&buffer.to_le_bytes());
    guest.view.write(RX_RING + u64::from(SLOTS - 1) * 16, &descriptor).expect("memory");
    guest.write(rx::<C>(Tail), 0);
    for number in 1..SLOTS as u8 {
        assert!(vf(&guest.now).receive(&frame(GUEST, number)), "there is a buffer for frame {number}");
    }
    for _ in 0..8 {
        vf(&guest.now).step();
    }
    let bytes: [u8; 21] = guest.view.bytes(buffer).expect("memory");
    assert_eq!(bytes[20], SLOTS as u8 - 1, "it went there");
    guest.rest();
    assert!(guest.device.written().contains(&(buffer / PAGE)));
    // It goes on here: nothing is logged any more.
    guest.replay(true).expect("it goes on");
    assert!(!guest.device.logs());
    // A client that leaves takes its log along.
    guest.device.begin_log().expect("it runs");
    guest.device.dismiss();
    assert!(!guest.device.logs());
}

fn what_fails_elsewhere_goes_on_here<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.traffic(0);
    let carried = guest.rest();
    let mut there = guest.arrives();
    there.device.load_carried(&carried).expect("taken");
    there.set_up();
    let refused = there.replay(false).expect_err("no frames come there");
    assert!(matches!(refused, CarryError::Failed(MovingError::Fill(_))), "{refused}");
    assert_eq!(there.device.motion(), Motion::Still, "it has its state, and may be tried again");
    drop(there);
    guest.replay(true).expect("it goes on here");
    guest.traffic(1);
    // And once more, to where it works at the second try.
    let carried = guest.rest();
    let mut there = guest.arrives();
    there.device.load_carried(&carried).expect("taken");
    there.set_up();
    there.replay(false).expect_err("no frames come there");
    there.replay(true).expect("they do");
    guest.device.leave().expect("left");
    there.traffic(2);
    assert_eq!(there.received, [0, 1, 2]);
    assert_eq!(vf(&there.now).violations(), []);
    assert_eq!(vf(&guest.now).violations(), []);
}

fn a_function_runs_only_as_its_vmm_had_set_it_up<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.traffic(0);
    let carried = guest.rest();
    let mut there = guest.arrives();
    there.device.load_carried(&carried).expect("taken");
    let lacks = |there: &mut Guest<C>| match there.replay(true) {
        Err(CarryError::NotSetUp(lacks)) => lacks,
        other => panic!("{other:?}"),
    };
    assert_eq!(lacks(&mut there), "its command register is 0x0000 and was 0x0006");
    // INTx may be off meanwhile: whoever moves a guest switches it off.
    let command = pci::COMMAND_MEMORY | pci::COMMAND_MASTER | pci::COMMAND_INTX_DISABLE;
    there.config(pci::COMMAND, &command.to_le_bytes());
    assert_eq!(lacks(&mut there), "its BAR 0 is 0x00000000 and was 0xfe000000");
    there.config(pci::BAR0, &0xfe00_0000_u32.to_le_bytes());
    assert_eq!(lacks(&mut there), "its vector 0 signals nobody");
    // Carried on before it has run: as it came.
    assert_eq!(there.rest(), carried);
    there.set_up();
    there.replay(true).expect("it goes on");
    there.traffic(1);
    assert_eq!(there.received, [0, 1]);
}

fn queues_that_were_told_to_end_are_brought_back<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.traffic(0);
    // They are told to end at the first look; the silicon says so a step later.
    assert!(!guest.device.rest().expect("they end"));
    assert_eq!(guest.device.motion(), Motion::Stopping);
    assert!(matches!(guest.device.carried(), Err(CarryError::Runs)));
    guest.replay(true).expect("it goes on");
    guest.traffic(1);
    assert_eq!(guest.received, [0, 1]);
    assert_eq!(vf(&guest.now).violations(), []);
}

fn steps_out_of_order_change_nothing<C: Moved>() {
    let mut guest = Guest::<C>::new();
    guest.traffic(0);
    let mut there = guest.arrives();
    assert!(matches!(guest.device.carried(), Err(CarryError::Runs)));
    assert!(matches!(guest.device.leave(), Err(CarryError::Runs)));
    assert!(matches!(guest.replay(true), Err(CarryError::Runs)));
    guest.traffic(1);
    let carried = guest.rest();
    // A state goes into no function that a guest drives, nor into one that has one.
    let mut other = Guest::<C>::new();
    assert!(matches!(other.device.load_carried(&carried), Err(CarryError::Driven)));
    other.traffic(0);
    assert!(matches!(guest.device.load_carried(&carried), Err(CarryError::Still)));
    let (_, hardware) = Silicon::<C>::new([2, 0, 0, 0, 0, 8], 77, BAR_SIZE);
    let (mut ahead, mut back) = (around(&guest.now, true), around(&guest.now, true));
    let refused =
        guest.device.exchange(hardware, &mut ahead, &mut back).map(drop).expect_err("it stands still");
    assert!(matches!(refused, ExchangeError::Unready(CarryError::Still)), "{refused}");
    // A stranger's bytes are refused whole: it takes the right ones afterwards.
    let mut wrong = carried.clone();
    wrong.state[20] ^= 1;
    assert!(matches!(there.device.load_carried(&wrong), Err(CarryError::Failed(MovingError::State(_)))));
    assert_eq!(there.device.motion(), Motion::Runs);
    there.device.load_carried(&carried).expect("taken");
    // One that is held, or that nobody uses, takes no step.
    guest.device.suspend().expect("suspended");
    assert!(matches!(guest.device.leave(), Err(CarryError::Held)));
    let (_, hardware) = Silicon::<C>::new([2, 0, 0, 0, 0, 8], 77, BAR_SIZE);
    let migratable = ioplane_passthrough::Migratable::new(hardware, C::DIRECT).expect("sound");
    let mut nobodys = ioplane_passthrough::Passthrough::new("nic0", migratable, None).expect("it works");
    assert!(matches!(nobodys.load_carried(&carried), Err(CarryError::NoGuest)));
    assert!(matches!(nobodys.rest(), Err(CarryError::NoGuest)));
}

const VLAN: u32 = 77;

impl<C: Moved> Guest<C> {
    fn said(&mut self) -> Vec<u8> {
        self.device.said().expect("it runs")
    }

    fn go_ahead(&mut self, said: &[u8]) -> Result<u64, CarryError> {
        let mut around = around(&self.now, false);
        self.device.go_ahead(said, &mut around)
    }

    fn is_in_vlan(&self) -> bool {
        vf(&self.now).pf().vlans.contains(&(VLAN as u16))
    }
}

/// One whose guest is in a VLAN, and where that guest goes: it is in that VLAN too, and the guest runs here.
fn gone_ahead<C: Moved>() -> (Guest<C>, Guest<C>) {
    let mut guest = Guest::<C>::new();
    guest.say([MESSAGE_VLAN | 1 << 16, VLAN, 0]);
    guest.traffic(0);
    let mut there = guest.arrives();
    let said = guest.said();
    assert_eq!(there.go_ahead(&said).expect("it is nobody's"), 2, "RESET and the VLAN");
    assert!(there.is_in_vlan() && !vf(&there.now).is_master());
    assert_ne!(vf(&there.now).pf().mac, GUEST);
    (guest, there)
}

fn what_its_guest_has_said_goes_ahead<C: Moved>() {
    let (mut guest, mut there) = gone_ahead::<C>();
    for number in 1..4 {
        assert!(!vf(&there.now).receive(&frame(GUEST, number)), "the guest is elsewhere");
        guest.traffic(number);
    }
    let mut tagged = frame(GUEST, 9);
    tagged.splice(12..12, [0x81, 0, 0, VLAN as u8]);
    assert!(!vf(&there.now).receive(&tagged), "the guest is elsewhere");
    let said = guest.said();
    let taken = vf(&there.now).pf().taken;
    assert_eq!((there.go_ahead(&said).expect("the same"), vf(&there.now).pf().taken), (2, taken));
    let carried = guest.rest();
    assert!(matches!(guest.device.said(), Err(CarryError::Failed(MovingError::Stopped))));
    there.device.load_carried(&carried).expect("taken");
    assert_eq!(there.device.ahead(), 2);
    there.set_up();
    let mut frames = around(&there.now, true);
    let replayed = there.device.replay(&mut frames).expect("it goes on");
    assert_eq!((replayed.messages, replayed.ahead), (1, 2), "the address");
    guest.device.leave().expect("left");
    there
        .view
        .write(0, &{
            let mut bytes = vec![0; 1 << 20];
            guest.view.read(0, &mut bytes).expect("memory");
            bytes
        })
        .expect("memory");
    assert!(there.is_in_vlan() && vf(&there.now).is_master() && vf(&there.now).pf().mac == GUEST);
    assert_eq!(vf(&there.now).violations(), []);
    // And once more, to a function whose physical function was set otherwise meanwhile.
    let (mut guest, mut there) = gone_ahead::<C>();
    let carried = guest.rest();
    there.device.is_under(None);
    there.device.load_carried(&carried).expect("taken");
    there.set_up();
    let mut frames = around(&there.now, true);
    let replayed = there.device.replay(&mut frames).expect("it goes on");
    assert_eq!((replayed.messages, replayed.ahead), (3, 0), "all of them");
    guest.device.leave().expect("left");
    there.traffic(1);
    assert_eq!(there.received, [0, 1]);
}

fn what_was_said_ahead_is_forgotten_with_a_reset_and_with_its_vmm<C: Moved>() {
    let forgotten = |there: &Guest<C>| there.device.ahead() == 0 && !there.is_in_vlan();
    let (mut guest, mut there) = gone_ahead::<C>();
    assert!(there.device.forget_ahead().expect("it works") && forgotten(&there));
    assert!(!there.device.forget_ahead().expect("nothing to do"));
    let said = guest.said();
    assert!(there.go_ahead(&said).is_ok() && there.is_in_vlan(), "once more");
    // The VMM resets its machine.
    let mut quiescent = Quiescent::new(there.device);
    quiescent.with(|device, proof| device.reset(proof));
    there.device = quiescent.into_device();
    assert!(forgotten(&there));
    // Its guest uses it: what it finds is a function that was reset, and it may be a bus master.
    assert!(there.go_ahead(&said).is_ok());
    there.set_up();
    assert!(vf(&there.now).is_master());
    assert!(matches!(there.go_ahead(&said), Err(CarryError::Driven)), "somebody is about to");
    there.write(C::LAYOUT.interrupts.mask, 0);
    assert!(forgotten(&there) && vf(&there.now).is_master());
    assert!(matches!(there.go_ahead(&said), Err(CarryError::Driven)));
    // Its VMM ends, and another one comes.
    let (_, mut there) = gone_ahead::<C>();
    there.device.dismiss();
    assert!(matches!(there.go_ahead(&said), Err(CarryError::NoGuest)));
    let mut quiescent = Quiescent::new(there.device);
    quiescent.with(|device, proof| device.admit(proof).expect("it is reset"));
    there.device = quiescent.into_device();
    assert!(forgotten(&there));
    // A stranger's word.
    assert!(matches!(there.go_ahead(&said[1..]), Err(CarryError::Failed(MovingError::State(_)))));
    assert!(forgotten(&there));
    // One that a guest drives takes none.
    assert!(matches!(guest.go_ahead(&said), Err(CarryError::Driven)));
}
