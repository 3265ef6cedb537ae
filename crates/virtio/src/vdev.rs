//! `Vdev`: a virtio device with its queues and its guest's memory, whatever transport drives it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{
    Access, Activation, BlockDevice, Change, Device, DeviceError, DeviceInfo, Effect, Interrupt, Meter,
    Parked, QueueSet, QuiescenceProof, RegisterAddress, SavedState, Share, StateError,
};
use ioplane_memory::{GuestMap, GuestView, Window};
use ioplane_scheduler::LimitSet;
use serde::{Deserialize, Serialize};

use crate::device::{QueueStart, VirtioDevice};
use crate::ring::{Descriptor, InFlightRequest, Ring, RingFault, RingLayout};
use crate::spec::feature::{VHOST_USER_F_PROTOCOL_FEATURES, VIRTIO_F_RING_PACKED};

/// Version of [`VdevV2`]. [`VdevV1`] is still read.
const VERSION: u32 = 2;

/// How one queue is set up. A transport fills it in; it is read when the queue starts.
#[derive(Debug, Default)]
pub struct QueueSetup {
    /// Where the driver put the ring.
    pub layout: RingLayout,
    /// Where to go on, see [`Ring::base`]; `None`: at the ring's beginning.
    pub base: Option<u32>,
    /// Requests to replay, left by a suspended poller.
    pub in_flight: Vec<InFlightRequest>,
    /// The transport wants the queue to run.
    pub enabled: bool,
    /// The driver's kick.
    pub kick: Option<Arc<OwnedFd>>,
    /// How to interrupt the driver.
    pub call: Option<Arc<dyn Interrupt>>,
    /// How to report a fault.
    pub error: Option<Arc<dyn Interrupt>>,
    /// Memory that outlives us, to keep the journal of what is in flight in.
    pub journal: Option<Window>,
    /// Why it stopped for good.
    pub fault: Option<RingFault>,
}

/// What is saved of one queue.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct QueueV2 {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    base: Option<u32>,
    in_flight: Vec<InFlightRequestV1>,
    enabled: bool,
}

/// What is saved of one request in flight: its head, and the descriptors of a packed ring (address, length, flags).
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct InFlightRequestV1 {
    head: u16,
    descriptors: Vec<(u64, u32, u16)>,
}

/// What is saved of a virtio device.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct VdevV2 {
    features: u64,
    queues: Vec<QueueV2>,
    own: Vec<u8>,
}

/// What was saved of one queue when all rings were split.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct QueueV1 {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    base: u16,
    in_flight: Vec<u16>,
    enabled: bool,
}

/// What was saved of a virtio device when all rings were split.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct VdevV1 {
    features: u64,
    queues: Vec<QueueV1>,
    own: Vec<u8>,
}

impl From<VdevV1> for VdevV2 {
    fn from(old: VdevV1) -> Self {
        let flight = |head| InFlightRequestV1 { head, descriptors: Vec::new() };
        let queue = |old: QueueV1| QueueV2 {
            size: old.size,
            desc: old.desc,
            avail: old.avail,
            used: old.used,
            base: Some(old.base.into()),
            in_flight: old.in_flight.into_iter().map(flight).collect(),
            enabled: old.enabled,
        };
        VdevV2 { features: old.features, queues: old.queues.into_iter().map(queue).collect(), own: old.own }
    }
}

impl From<&InFlightRequest> for InFlightRequestV1 {
    fn from(flight: &InFlightRequest) -> Self {
        let descriptors = flight.descriptors.iter().map(|desc| (desc.addr, desc.len, desc.flags)).collect();
        InFlightRequestV1 { head: flight.head, descriptors }
    }
}

impl From<&InFlightRequestV1> for InFlightRequest {
    fn from(saved: &InFlightRequestV1) -> Self {
        let descriptor =
            |(addr, len, flags): &(u64, u32, u16)| Descriptor { addr: *addr, len: *len, flags: *flags };
        InFlightRequest { head: saved.head, descriptors: saved.descriptors.iter().map(descriptor).collect() }
    }
}

/// A virtio device, its queues, and the memory of its guest.
pub struct Vdev<V: VirtioDevice> {
    info: DeviceInfo,
    model: V,
    view: GuestView,
    features: u64,
    queues: Vec<QueueSetup>,
    meters: Vec<Arc<Meter>>,
}

impl<V: VirtioDevice> Vdev<V> {
    /// A device that nobody has set up yet.
    pub fn new(model: V, memory: Arc<GuestMap>) -> Self {
        let own = model.info();
        let info = DeviceInfo { name: own.name.clone(), kind: own.kind, queues: own.queues };
        let queues = (0..info.queues).map(|_| QueueSetup::default()).collect();
        let meters = (0..info.queues).map(|_| Arc::new(Meter::default())).collect();
        Vdev { info, model, view: GuestView::new(memory), features: 0, queues, meters }
    }

    /// The model.
    pub fn model(&self) -> &V {
        &self.model
    }

    /// The model, to change what needs no quiescent point (what does, asks for a [`QuiescenceProof`]).
    pub fn model_mut(&mut self) -> &mut V {
        &mut self.model
    }

    /// Features accepted by the driver.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Feature bits that the device offers: its model's, and packed rings.
    pub fn offers(&self) -> u64 {
        self.model.features() | VIRTIO_F_RING_PACKED
    }

    /// The driver accepts `features`. Refuses what was not offered (and takes nothing then).
    pub fn accept(&mut self, features: u64, transport: u64) -> bool {
        if features & !(self.offers() | transport) != 0 {
            return false;
        }
        self.features = features;
        self.model.accept(features & self.model.features());
        true
    }

    /// The set-up of a queue.
    pub fn queue(&self, index: u16) -> Option<&QueueSetup> {
        self.queues.get(usize::from(index))
    }

    /// The set-up of a queue, to fill in. What a running poller already uses does not change by it.
    pub fn queue_mut(&mut self, index: u16) -> Option<&mut QueueSetup> {
        self.queues.get_mut(usize::from(index))
    }

    /// Counts of every queue.
    pub fn meters(&self) -> &[Arc<Meter>] {
        &self.meters
    }

    /// Counts into `meters` from now on: those of another front end's instance of the same device. Before any queue starts.
    pub fn share_meters(&mut self, meters: &[Arc<Meter>]) {
        if meters.len() == self.meters.len() {
            self.meters = meters.to_vec();
        }
    }

    /// The guest's memory.
    pub fn view(&self) -> &GuestView {
        &self.view
    }

    /// The guest's memory is another from now on.
    pub fn replace_memory(&mut self, _proof: &QuiescenceProof, map: Arc<GuestMap>) {
        self.view.set_map(map);
    }

    fn open_ring(&self, index: u16) -> Result<Ring, RingFault> {
        let setup = self.queues.get(usize::from(index)).ok_or(RingFault::BadDescriptor(index))?;
        if setup.layout.size > self.model.info().queue_size {
            return Err(RingFault::BadSize(setup.layout.size));
        }
        if let Some(fault) = setup.fault {
            return Err(fault);
        }
        let (view, journal) = (self.view.clone(), setup.journal.clone());
        Ring::open(view, &setup.layout, self.features, setup.base, journal, &setup.in_flight)
    }

    /// Checks a loaded queue against the memory that its driver left behind: hostile input.
    fn check_loaded(&self, index: u16, saved: &QueueV2, features: u64) -> Result<(), StateError> {
        let impossible = |what: String| StateError::Impossible(format!("queue {index}: {what}"));
        let size = saved.size;
        let packed = features & VIRTIO_F_RING_PACKED != 0;
        if size > self.model.info().queue_size
            || (size != 0 && !size.is_power_of_two() && !packed)
            || (saved.enabled && size == 0)
        {
            return Err(impossible(format!("size {size}")));
        }
        if !saved.enabled {
            return Ok(());
        }
        let layout = RingLayout { size, desc: saved.desc, avail: saved.avail, used: saved.used };
        let in_flight: Vec<InFlightRequest> = saved.in_flight.iter().map(InFlightRequest::from).collect();
        let ring = Ring::open(self.view.clone(), &layout, features, saved.base, None, &in_flight)
            .map_err(|fault| impossible(fault.to_string()))?;
        if !ring.accounts_for_all() {
            return Err(impossible("requests were taken that are neither used nor in flight".to_owned()));
        }
        Ok(())
    }
}

impl<V: VirtioDevice> Device for Vdev<V> {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Only the device-specific configuration; the rest is the transport's.
    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        let RegisterAddress::Config(offset) = at else { return Effect::None };
        let offset = u32::try_from(offset).unwrap_or(u32::MAX);
        match op {
            Access::Read(out) => self.model.read_config(offset, out),
            Access::Write(bytes) => self.model.write_config(offset, bytes),
        }
        Effect::None
    }

    fn active(&self) -> QueueSet {
        let enabled = |(_, setup): &(u16, &QueueSetup)| setup.enabled && setup.fault.is_none();
        (0..).zip(&self.queues).filter(enabled).map(|(index, _)| index).collect()
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        for index in activation.queues().clone() {
            let ring = match self.open_ring(index) {
                Ok(ring) => ring,
                Err(fault) => {
                    let setup =
                        self.queues.get_mut(usize::from(index)).ok_or(DeviceError::NoSuchQueue(index))?;
                    setup.fault = Some(fault);
                    if let Some(meter) = self.meters.get(usize::from(index)) {
                        let mut tally = meter.tally();
                        tally.faults += 1;
                        meter.publish(&tally);
                    }
                    if let Some(error) = &setup.error {
                        error.signal();
                    }
                    return Err(DeviceError::Guest { queue: index, why: fault.to_string() });
                }
            };
            let setup = &mut self.queues[usize::from(index)];
            let start = QueueStart {
                index,
                ring,
                kick: setup.kick.clone(),
                call: setup.call.clone(),
                error: setup.error.clone(),
                meter: self.meters[usize::from(index)].clone(),
            };
            activation.add(index, self.model.start_queue(start)?);
        }
        Ok(())
    }

    fn queue_limits(&self, queue: u16) -> LimitSet {
        self.model.queue_limits(queue)
    }

    fn share(&self) -> Share {
        self.model.share()
    }

    fn block_device(&self) -> Option<BlockDevice> {
        self.model.block_device()
    }

    fn deactivate(&mut self, parked: Parked) {
        let index = usize::from(parked.queue());
        let state = self.model.stop_queue(parked);
        if let Some(setup) = self.queues.get_mut(index) {
            setup.base = state.base;
            setup.in_flight = state.in_flight;
            setup.fault = state.fault;
        }
    }

    /// Pollers made from now on see it too.
    fn apply(&mut self, _queues: &QueueSet, change: &Change) {
        match change {
            Change::Log(log) => self.view.set_log(log.clone()),
            Change::Memory(map) => self.view.set_map(map.clone()),
            Change::Call(_)
            | Change::Kick(_)
            | Change::Share(_)
            | Change::Limits(_)
            | Change::BlockDevice(_)
            | Change::Own(_) => {}
        }
    }

    fn save(&self, proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        let queue = |setup: &QueueSetup| QueueV2 {
            size: setup.layout.size,
            desc: setup.layout.desc,
            avail: setup.layout.avail,
            used: setup.layout.used,
            base: setup.base,
            in_flight: setup.in_flight.iter().map(InFlightRequestV1::from).collect(),
            // A queue that its guest has spoilt does not run again before a reset, there no more than here.
            enabled: setup.enabled && setup.fault.is_none(),
        };
        let saved = VdevV2 {
            features: self.features,
            queues: self.queues.iter().map(queue).collect(),
            own: self.model.save_own(proof),
        };
        let body = postcard::to_stdvec(&saved).map_err(|error| DeviceError::Below(Box::new(error)))?;
        Ok(SavedState { kind: self.info.kind.to_owned(), version: VERSION, body })
    }

    fn load(&mut self, proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        let damaged = |error: postcard::Error| StateError::Damaged(error.to_string());
        let (saved, rest): (VdevV2, _) = if state.version == 1 {
            let body = state.expect(self.info.kind, 1)?;
            let (saved, rest): (VdevV1, _) = postcard::take_from_bytes(body).map_err(damaged)?;
            (saved.into(), rest)
        } else {
            postcard::take_from_bytes(state.expect(self.info.kind, VERSION)?).map_err(damaged)?
        };
        if !rest.is_empty() {
            return Err(StateError::Damaged(format!("{} bytes too many", rest.len())).into());
        }
        if saved.queues.len() != self.queues.len() {
            let (saved, here) = (saved.queues.len(), self.queues.len());
            return Err(
                StateError::Impossible(format!("{saved} queues saved, this device has {here}")).into()
            );
        }
        if !removed(Invariant::DistrustsLoaded) {
            if saved.features & !(self.offers() | VHOST_USER_F_PROTOCOL_FEATURES) != 0 {
                let what = "features that this device does not offer".to_owned();
                return Err(StateError::Impossible(what).into());
            }
            for (index, queue) in (0..).zip(&saved.queues) {
                self.check_loaded(index, queue, saved.features)?;
            }
        }
        self.model.load_own(proof, &saved.own).map_err(StateError::Impossible)?;
        self.features = saved.features;
        for (setup, queue) in self.queues.iter_mut().zip(saved.queues) {
            setup.layout =
                RingLayout { size: queue.size, desc: queue.desc, avail: queue.avail, used: queue.used };
            setup.base = queue.base;
            setup.in_flight = queue.in_flight.iter().map(InFlightRequest::from).collect();
            setup.enabled = queue.enabled;
            setup.fault = None;
        }
        Ok(())
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {
        self.features = 0;
        self.model.reset_own();
        for setup in &mut self.queues {
            let (call, kick, error) = (setup.call.take(), setup.kick.take(), setup.error.take());
            *setup = QueueSetup { call, kick, error, ..QueueSetup::default() };
        }
    }
}
