#![allow(dead_code)] // each test file uses its part of the rig
//! NICs with their guests' memory and drivers on one switch, and a core turned by hand.

pub mod packet;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_device::{Interrupt, MeterReading, QueueSet, Quiescent, Running};
use ioplane_network::{DropReason, Mac, PortOptions, PortReading, Switch, SwitchSettings};
use ioplane_testkit::driver::net::{Commands, NetHeader, Pair, PairPlan, ReceivedFrame};
use ioplane_testkit::driver::{GuestMemory, RingMode, RingPlace};
use ioplane_testkit::hand::HandCore;
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::net::{Net, NetOptions};
use ioplane_virtio::spec::feature::VIRTIO_F_RING_PACKED;
use ioplane_virtio::{Chain, Ring, RingLayout, Vdev, VirtioDevice};

/// Counts interrupts.
#[derive(Debug, Default)]
pub struct CountedInterrupt(pub AtomicU64);

impl Interrupt for CountedInterrupt {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Everything on one switch and one core.
pub struct Lan {
    pub switch: Arc<Switch>,
    pub core: HandCore,
}

/// How a NIC and its driver are made.
#[derive(Clone)]
pub struct Wants {
    pub features: u64,
    /// Packed rings.
    pub packed: bool,
    pub pairs: u16,
    pub control: bool,
    pub mtu: u16,
    pub port: PortOptions,
    /// The driver's part, but for what the features say.
    pub plan: PairPlan,
    /// Receive buffers that are made available at once.
    pub filled: u16,
    /// Of these, those that a process before us had in hand when it died.
    pub suspects: u16,
    /// Entries of the control queue.
    pub commands: u16,
}

impl Wants {
    pub fn new(number: u8) -> Self {
        let name = format!("nic{number}");
        Wants {
            features: u64::MAX,
            packed: false,
            pairs: 1,
            control: true,
            mtu: 1500,
            port: PortOptions { mac: Some(mac(number)), ..PortOptions::new(&name) },
            plan: PairPlan::mergeable(RingMode::default()),
            filled: u16::MAX,
            suspects: 0,
            commands: 16,
        }
    }

    pub fn without(self, features: u64) -> Self {
        Wants { features: self.features & !features, ..self }
    }
}

/// The address of a NIC.
pub fn mac(number: u8) -> Mac {
    [0x52, 0x54, 0, 0, 0, number]
}

pub struct Nic {
    pub memory: GuestMemory,
    pub pairs: Vec<Pair>,
    pub commands: Option<Commands>,
    pub running: Option<Running<Vdev<Net>>>,
    pub interrupts: Vec<Arc<CountedInterrupt>>,
    pub core: HandCore,
    pub mac: Mac,
}

impl Lan {
    pub fn new() -> Self {
        Self::with(SwitchSettings::default())
    }

    pub fn with(settings: SwitchSettings) -> Self {
        Lan { switch: Switch::new("lan", settings), core: HandCore::polling() }
    }

    /// On that core.
    pub fn on(core: HandCore) -> Self {
        Lan { core, ..Self::new() }
    }

    pub fn plug(&self, number: u8) -> Nic {
        self.plug_with(Wants::new(number))
    }

    /// A NIC whose driver has set all of its queues up.
    pub fn plug_with(&self, wants: Wants) -> Nic {
        let own = wants.port.mac.unwrap_or(mac(0));
        let port = PortOptions { pairs: wants.pairs, mtu: wants.mtu, ..wants.port };
        let options = NetOptions {
            name: port.name.clone(),
            mac: own,
            pairs: wants.pairs,
            queue_size: 1024,
            mtu: wants.mtu,
            control: wants.control,
        };
        let mut memory = GuestMemory::new(8 << 20).unwrap();
        let net = Net::new(options, self.switch.plug(port).unwrap());
        let mut vdev = Vdev::new(net, memory.view().map().clone());
        let ring = if wants.packed { VIRTIO_F_RING_PACKED } else { 0 };
        let features = vdev.model().features() & wants.features | ring;
        assert!(vdev.accept(features, 0));
        let mode = RingMode::of(features);
        let mergeable = features & (1 << 15) != 0;
        let header = if mergeable || features & (1 << 32) != 0 { NetHeader::LONG } else { NetHeader::SHORT };
        let plan = PairPlan { mode, mergeable, header, ..wants.plan };
        let mut pairs: Vec<_> = (0..wants.pairs).map(|_| Pair::new(&mut memory, plan).unwrap()).collect();
        pairs.iter_mut().for_each(|pair| pair.fill_some(0, wants.filled));
        let mut places: Vec<RingPlace> = pairs.iter().flat_map(Pair::places).collect();
        let commands = wants.control.then(|| Commands::new(&mut memory, wants.commands, mode).unwrap());
        // Without MQ the control queue is the third (5.1.2).
        places.truncate(if features & (1 << 22) == 0 && wants.control { 2 } else { usize::MAX });
        places.extend(commands.as_ref().map(Commands::place));
        let interrupts: Vec<_> = places.iter().map(|_| Arc::new(CountedInterrupt::default())).collect();
        for ((index, place), interrupt) in (0..).zip(&places).zip(&interrupts) {
            let setup = vdev.queue_mut(index).unwrap();
            let RingPlace { size, desc, avail, used } = *place;
            setup.layout = RingLayout { size, desc, avail, used };
            setup.enabled = true;
            setup.call = Some(interrupt.clone());
            setup.kick = Some(eventfd());
        }
        if wants.suspects > 0 {
            let setup = vdev.queue_mut(0).unwrap();
            let journal = memory.carve(region_bytes(setup.layout.size, features) as u64, 64).unwrap();
            let view = memory.view().clone();
            let mut ring =
                Ring::open(view, &setup.layout, features, None, Some(journal.clone()), &[]).unwrap();
            for _ in 0..wants.suspects {
                let (taken, _) = ring.take(&mut Chain::new()).unwrap().unwrap();
                taken.abandon();
            }
            setup.journal = Some(journal);
        }
        let running = Quiescent::new(vdev).resume(&self.core).unwrap();
        self.core.turn();
        Nic { memory, pairs, commands, running: Some(running), interrupts, core: self.core.clone(), mac: own }
    }

    /// A NIC like `nic`, in the same place, that nobody has set up yet.
    pub fn fresh(&self, nic: &Nic, pairs: u16) -> Vdev<Net> {
        let name = format!("nic{}", nic.mac[5]);
        let port = PortOptions { mac: Some(nic.mac), pairs, ..PortOptions::new(&name) };
        let options = NetOptions { name, mac: nic.mac, pairs, queue_size: 1024, mtu: 1500, control: true };
        let net = Net::new(options, self.switch.plug(port).unwrap());
        Vdev::new(net, nic.memory.view().map().clone())
    }

    /// Turns until nothing moves any more.
    pub fn settle(&self) {
        self.core.turn_until_idle(10_000);
    }
}

pub fn eventfd() -> Arc<OwnedFd> {
    use rustix::event::{EventfdFlags, eventfd};
    Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

impl Nic {
    pub fn running(&mut self) -> &mut Running<Vdev<Net>> {
        self.running.as_mut().unwrap()
    }

    /// The guest is gone, and its port with it.
    pub fn unplug(self) {
        drop(self.running);
        self.core.turn();
    }

    /// Its port's counts.
    pub fn reading(&self) -> PortReading {
        self.running.as_ref().unwrap().device().model().port().reading()
    }

    /// Frames that were dropped for `cause` on their way out of here.
    pub fn sent_dropped(&self, cause: DropReason) -> u64 {
        self.reading().sent.dropped(cause)
    }

    /// Frames for it that were dropped for `cause`.
    pub fn received_dropped(&self, cause: DropReason) -> u64 {
        self.reading().received.dropped(cause)
    }

    /// Sends one frame by pair 0.
    pub fn send(&mut self, header: NetHeader, frame: &[u8]) {
        let pair = &mut self.pairs[0];
        assert!(pair.send(header, frame).unwrap(), "a free slot");
        self.core.turn_until_idle(1000);
        assert_eq!(pair.reap().unwrap(), 1, "what is sent is completed in the poll that takes it");
    }

    /// Everything that has come on a pair.
    pub fn receive_on(&mut self, pair: usize) -> Vec<(NetHeader, Vec<u8>)> {
        let mut frames = Vec::new();
        loop {
            self.core.turn_until_idle(1000);
            let before = frames.len();
            let pair = &mut self.pairs[pair];
            while let Some(ReceivedFrame { header, len }) =
                pair.take_frame().expect("the device kept to the protocol")
            {
                let mut bytes = Vec::new();
                pair.read_frame(&mut bytes).unwrap();
                assert_eq!(bytes.len(), len);
                frames.push((header, bytes));
            }
            if frames.len() == before {
                return frames;
            }
        }
    }

    /// Everything that has come on pair 0.
    pub fn receive(&mut self) -> Vec<(NetHeader, Vec<u8>)> {
        self.receive_on(0)
    }

    /// Puts one command; the ack.
    pub fn command(&mut self, class: u8, command: u8, data: &[u8]) -> u8 {
        self.command_in(class, command, data, &[])
    }

    /// In buffers of those lengths.
    pub fn command_in(&mut self, class: u8, command: u8, data: &[u8], pieces: &[u32]) -> u8 {
        let commands = self.commands.as_mut().unwrap();
        commands.put(class, command, data, pieces).unwrap();
        self.core.turn_until_idle(1000);
        commands.ack().unwrap().expect("the command was not answered")
    }

    pub fn counts(&mut self, queue: usize) -> MeterReading {
        self.core.turn();
        self.running().device().meters()[queue].read()
    }

    /// Stops a queue; its fault, by name.
    pub fn fault(&mut self, queue: u16) -> Option<&'static str> {
        let queues = QueueSet::from([queue]);
        let core = self.core.clone();
        self.running().drain(&queues);
        core.turn_until_idle(1000);
        core.turn();
        assert!(self.running().wait_stopped(&queues, std::time::Instant::now()), "it did not stop");
        self.running().device().queue(queue).unwrap().fault.map(|fault| fault.name())
    }

    pub fn interrupts(&self, queue: usize) -> u64 {
        self.interrupts[queue].0.load(Ordering::Relaxed)
    }

    /// Brings the whole device to a quiescent point.
    pub fn quiesce(&mut self) -> Quiescent<Vdev<Net>> {
        let mut quiescing = self.running.take().unwrap().begin_quiesce();
        self.core.turn_until_idle(1000);
        self.core.turn();
        assert!(quiescing.is_settled());
        quiescing.finish().unwrap()
    }

    pub fn resume(&mut self, quiescent: Quiescent<Vdev<Net>>) {
        self.running = Some(quiescent.resume(&self.core).unwrap());
        self.core.turn();
    }
}
