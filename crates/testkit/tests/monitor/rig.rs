//! A watched card with a guest, and a neighbour on its wire.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::{Access, Interrupt, RegisterAddress, SavedState};
use ioplane_embed::SharedDevice;
use ioplane_hardware::Hardware;
use ioplane_memory::{GuestMap, GuestView};
use ioplane_model::StateModel;
use ioplane_network::Mac;
use ioplane_nic::i82574::I82574;
use ioplane_nic::ne2000::{Ne2000, Ne2000Options};
use ioplane_nic::rtl8139::{Rtl8139, Rtl8139Options};
use ioplane_passthrough::monitor::{Monitor, MonitorOptions, Policies, Reading};
use ioplane_passthrough::{i82574, ne2000, rtl8139};
use ioplane_pci::{Function, Irq, Wire};
use ioplane_testkit::hand::HandCore;
use ioplane_testkit::nic::{Lan, Reach, readable};
use ioplane_testkit::simulated::{Bench, Simulated};
use ioplane_testkit::toy::ring::Counted;

pub const OWN: Mac = [0x52, 0x54, 0, 0, 0, 1];
pub const OTHER: Mac = [0x52, 0x54, 0, 0, 0, 2];
/// Bytes of guest memory.
pub const MEMORY: u64 = 1 << 20;

/// A watched function in front of its guest, with its interrupts.
pub struct Watched<F: Function> {
    pub front: SharedDevice<Monitor<Simulated<F>>>,
    pub line: Arc<Counted>,
    pub error: Arc<Counted>,
    pub bench: Bench<F>,
    seen: u64,
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(2)
}

impl<F: Function> Watched<F> {
    /// The monitor, while it runs.
    pub fn with<R>(&mut self, act: impl FnOnce(&mut Monitor<Simulated<F>>) -> R) -> R {
        let mut result = None;
        assert!(self.front.event(|monitor| result = Some(act(monitor))), "it is held");
        result.expect("the event happened")
    }

    /// Lets the hardware and the monitor do all that there is to do.
    pub fn turn(&mut self) {
        for _ in 0..1000 {
            self.bench.tick();
            if !self.with(|monitor| readable(monitor)) {
                return;
            }
            self.with(Monitor::attend);
        }
        panic!("attention() stays readable for ever");
    }

    /// How many interrupts came since it was asked last; the guest has acknowledged them.
    pub fn interrupts(&mut self) -> u64 {
        self.turn();
        self.with(|monitor| monitor.wire(Irq::Intx, 0, Wire::Unmask).expect("a NIC has INTA#"));
        let before = std::mem::replace(&mut self.seen, self.line.count());
        self.seen - before
    }

    pub fn reading(&self) -> Reading {
        self.front.look(Monitor::reading).expect("it is here")
    }

    pub fn faults(&self, name: &str) -> u64 {
        self.reading().faults_of(name)
    }

    /// Held where it is reusable; else the state that was in the way.
    pub fn hold(&self) -> Result<(), String> {
        match self.front.quiesce(Instant::now()).expect("it runs") {
            Ok(()) => Ok(()),
            Err(late) => {
                let reason = late.reason.clone();
                late.undrain().expect("it goes on");
                Err(reason)
            }
        }
    }

    /// Held wherever it is.
    pub fn force(&self) {
        if let Err(late) = self.front.quiesce(Instant::now()).expect("it runs") {
            late.suspend(soon()).expect("it stops");
        }
    }

    pub fn save(&self) -> SavedState {
        self.front.save().expect("a device that stands still can be saved")
    }

    pub fn resume(&self) {
        self.front.resume().expect("it goes on");
    }

    pub fn reset(&self) {
        self.force();
        let mut quiescent = self.front.take().expect("held");
        quiescent.reset();
        self.front.hold(quiescent).expect("away");
        self.resume();
    }

    /// Takes a state, while it is held; whether it was taken.
    pub fn loads(&self, state: &SavedState) -> bool {
        use ioplane_device::Device;
        let mut quiescent = self.front.take().expect("held");
        let loaded = quiescent.with(|monitor, proof| monitor.load(proof, state)).is_ok();
        self.front.hold(quiescent).expect("away");
        loaded
    }

    /// Goes on, with its state, on other hardware and in another monitor.
    pub fn moves_to(self, hardware: Simulated<F>, bench: Bench<F>, map: &Arc<GuestMap>) -> Self {
        let state = self.save();
        self.goes_on_as(&state, hardware, bench, map)
    }

    /// The same with a state that was saved at another time.
    pub fn goes_on_as(
        self,
        state: &SavedState,
        hardware: Simulated<F>,
        bench: Bench<F>,
        map: &Arc<GuestMap>,
    ) -> Self {
        let model = self.front.look(Monitor::model).expect("it is here");
        let mut fresh =
            Monitor::new(hardware, model, MonitorOptions::new("nic1")).expect("hardware that works");
        fresh.grow_memory(map.clone()).expect("an IOMMU with room");
        wire(&mut fresh, Irq::Intx, &self.line);
        wire(&mut fresh, Irq::Error, &self.error);
        self.front.transplant(fresh, state).expect("a state of its own");
        Watched { bench, ..self }
    }
}

impl<F: Function> Reach for Watched<F> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        self.front.access(at, op).map_err(|error| error.to_string())
    }
}

pub fn memory() -> Arc<GuestMap> {
    Arc::new(GuestMap::anonymous(MEMORY).expect("memory"))
}

pub fn view(map: &Arc<GuestMap>) -> GuestView {
    GuestView::new(map.clone())
}

/// Puts hardware under a monitor, with a guest's memory and wires.
pub fn watch<F: Function>(
    hardware: Simulated<F>,
    bench: Bench<F>,
    model: &'static StateModel,
    policies: Policies,
    map: &Arc<GuestMap>,
) -> Watched<F> {
    let options = MonitorOptions { policies, ..MonitorOptions::new("nic1") };
    let mut monitor = Monitor::new(hardware, model, options).expect("hardware that works");
    monitor.grow_memory(map.clone()).expect("an IOMMU with room");
    let (line, error) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
    wire(&mut monitor, Irq::Intx, &line);
    wire(&mut monitor, Irq::Error, &error);
    let front = SharedDevice::new(monitor, Arc::new(HandCore::default())).expect("it starts");
    Watched { front, line, error, bench, seen: 0 }
}

pub fn wire(function: &mut impl Function, irq: Irq, to: &Arc<Counted>) {
    let call: Arc<dyn Interrupt> = to.clone();
    function.wire(irq, 0, Wire::Call(Some(call))).expect("it has that interrupt");
}

pub fn rtl8139_card(lan: &Lan) -> (Simulated<Rtl8139>, Bench<Rtl8139>) {
    let options = Rtl8139Options { name: "card".into(), mac: OWN };
    let card = Rtl8139::new(options, Arc::new(GuestMap::default()), lan.port.clone()).expect("a card");
    Simulated::new("0000:00:05.0", card).expect("an eventfd")
}

pub fn rtl8139(policies: Policies) -> (Watched<Rtl8139>, Arc<GuestMap>, Lan) {
    let (lan, map) = (Lan::new(OWN, OTHER), memory());
    let (hardware, bench) = rtl8139_card(&lan);
    (watch(hardware, bench, &rtl8139::MODEL, policies, &map), map, lan)
}

pub fn i82574_card(lan: &Lan) -> (Simulated<I82574>, Bench<I82574>) {
    let card = I82574::new("card", OWN, lan.port.clone()).expect("a card");
    Simulated::new("0000:00:07.0", card).expect("an eventfd")
}

pub fn i82574(policies: Policies) -> (Watched<I82574>, Arc<GuestMap>, Lan) {
    let (lan, map) = (Lan::new(OWN, OTHER), memory());
    let (hardware, bench) = i82574_card(&lan);
    (watch(hardware, bench, &i82574::MODEL, policies, &map), map, lan)
}

pub fn ne2000_card(lan: &Lan) -> (Simulated<Ne2000>, Bench<Ne2000>) {
    let options = Ne2000Options { name: "card".into(), mac: OWN };
    let card = Ne2000::new(options, lan.port.clone()).expect("a card");
    Simulated::new("0000:00:06.0", card).expect("an eventfd")
}

pub fn ne2000(policies: Policies) -> (Watched<Ne2000>, Lan) {
    let lan = Lan::new(OWN, OTHER);
    let (hardware, bench) = ne2000_card(&lan);
    (watch(hardware, bench, &ne2000::MODEL, policies, &memory()), lan)
}

/// Hardware with nobody in between.
pub struct Bare<H>(pub H);

impl<H: Hardware> Reach for Bare<H> {
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        let done = match (at, op) {
            (RegisterAddress::Bar(bar, offset), Access::Read(out)) => self.0.read(bar, offset, out),
            (RegisterAddress::Bar(bar, offset), Access::Write(bytes)) => self.0.write(bar, offset, bytes),
            (RegisterAddress::Config(offset), Access::Read(out)) => self.0.read_config(offset, out),
            (RegisterAddress::Config(offset), Access::Write(bytes)) => self.0.write_config(offset, bytes),
        };
        done.map_err(|error| error.to_string())
    }
}
