//! The session: what each message does to the device.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::{Access, At, Change, Device, Interrupt, Placement, Post, QueueSet, Quiescent, Running};
use ioplane_memory::GuestMap;
use ioplane_virtio::spec::feature::{VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES};
use ioplane_virtio::spec::split::MAX_SIZE;
use ioplane_virtio::{Vdev, VirtioDevice};
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::{
    BackendReq, FrontendReq, VhostUserConfig, VhostUserInflight, VhostUserMemory, VhostUserMemoryRegion,
    VhostUserMsgValidator, VhostUserSingleMemoryRegion, VhostUserU64, VhostUserVringAddr,
    VhostUserVringState,
};
use vm_memory::ByteValued;

use super::connection::{Connection, send};
use super::fault::PeerFault;
use super::message::{Message, backend_request, reply};
use super::peer::{Peer, UserRing, fresh_inflight, map_region, offered, open_inflight};
use crate::eventfd::{self, Call};

/// How long a quiescent point may take when the front end waits for it; then what is in flight is suspended.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);
/// Longest configuration space that is read or written (the specification's VHOST_USER_MAX_CONFIG_SIZE).
const MAX_CONFIG: u32 = 256;
/// Memory slots that we have.
const MAX_SLOTS: u64 = ioplane_memory::MAX_REGIONS as u64;
/// Where a packed ring begins: both indexes 0, both wrap counters 1.
const PACKED_START: u32 = 0x8000_8000;
/// Features of the transport itself.
const TRANSPORT: u64 = VHOST_USER_F_PROTOCOL_FEATURES;

/// Puts each queue on the core that it was moved to, or where the pool thinks best.
#[derive(Clone)]
pub(super) struct Seats {
    pool: Arc<dyn Placement>,
    moved: BTreeMap<u16, Arc<dyn Placement>>,
}

impl Placement for Seats {
    fn place(&self, device: &str, queue: u16) -> Arc<dyn Post> {
        self.moved.get(&queue).unwrap_or(&self.pool).place(device, queue)
    }
}

/// A device and what its front end has said. Owned by one task; the device runs all the time, with as many rings as the
/// front end has started.
pub struct Session<V: VirtioDevice> {
    /// `None` only inside a quiescent point.
    device: Option<Running<Vdev<V>>>,
    seats: Seats,
    pub(super) peer: Peer,
    /// How long a quiescent point that the front end waits for may take, before what is in flight is suspended.
    patience: Duration,
    /// The dirty log is offered.
    dirty_log: bool,
}

/// A message's answer, if it has one of its own.
pub(super) enum Answer {
    None,
    Body(Vec<u8>),
    BodyAndFile(Vec<u8>, ioplane_memory::Mapping),
}

impl<V: VirtioDevice> Session<V> {
    /// A device that waits for its front end. Its queues sit where `pool` says.
    pub fn new(model: V, pool: Arc<dyn Placement>) -> Result<Self, PeerFault> {
        let queues = model.info().queues;
        let device = Quiescent::new(Vdev::new(model, Arc::new(GuestMap::default())));
        let seats = Seats { pool, moved: BTreeMap::new() };
        let device = device.resume(&seats).map_err(|refused| PeerFault::Device(refused.error))?;
        Ok(Session {
            device: Some(device),
            seats,
            peer: Peer::new(queues),
            patience: PATIENCE,
            dirty_log: false,
        })
    }

    /// Another patience than twenty seconds with requests that do not end when the front end wants a ring to stop.
    pub fn with_patience(self, patience: Duration) -> Self {
        Session { patience, ..self }
    }

    /// Offers the dirty log, or does not: with it a VMM may migrate its VM while we serve it.
    pub fn with_dirty_log(self, dirty_log: bool) -> Self {
        Session { dirty_log, ..self }
    }

    /// The running device.
    pub fn device(&self) -> Option<&Running<Vdev<V>>> {
        self.device.as_ref()
    }

    /// The running device, for changes that need no quiescent point.
    pub fn device_mut(&mut self) -> Option<&mut Running<Vdev<V>>> {
        self.device.as_mut()
    }

    pub(super) fn running(&mut self) -> Result<&mut Running<Vdev<V>>, PeerFault> {
        self.device.as_mut().ok_or_else(lost)
    }

    fn vdev(&mut self) -> Result<&mut Vdev<V>, PeerFault> {
        Ok(self.running()?.device_mut())
    }

    /// Does what one message asks and answers it.
    pub async fn handle(&mut self, mut message: Message, connection: &Connection) -> Result<(), PeerFault> {
        let header = message.header;
        let outcome = self.obey(&mut message).await;
        match &outcome {
            Ok(Answer::Body(body)) => connection.send(&reply(header.request, body), None).await?,
            Ok(Answer::BodyAndFile(body, mapping)) => {
                connection.send(&reply(header.request, body), Some(mapping.file())).await?;
            }
            Ok(Answer::None) | Err(_) => {
                if header.need_reply && self.peer.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
                    let code = VhostUserU64::new(u64::from(outcome.is_err()));
                    connection.send(&reply(header.request, code.as_slice()), None).await?;
                }
            }
        }
        outcome.map(|_| ())
    }

    async fn obey(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        use FrontendReq as R;
        let request = message.header.request;
        let code = request as u32;
        match request {
            R::GET_FEATURES => {
                message.empty()?;
                let log = if self.dirty_log { VHOST_F_LOG_ALL } else { 0 };
                Ok(number(self.vdev()?.offers() | TRANSPORT | log))
            }
            R::SET_FEATURES => self.set_features(message.body::<VhostUserU64>()?.value).await,
            R::SET_OWNER | R::RESET_OWNER => message.empty().map(|()| Answer::None),
            R::GET_PROTOCOL_FEATURES => {
                message.empty()?;
                Ok(number(offered(self.dirty_log).bits()))
            }
            R::SET_PROTOCOL_FEATURES => {
                let bits = message.body::<VhostUserU64>()?.value;
                self.peer.protocol = VhostUserProtocolFeatures::from_bits(bits)
                    .filter(|features| offered(self.dirty_log).contains(*features))
                    .ok_or(PeerFault::BadFeatures(bits))?;
                Ok(Answer::None)
            }
            R::GET_QUEUE_NUM => {
                self.peer.needs(VhostUserProtocolFeatures::MQ, code)?;
                Ok(number(u64::from(self.vdev()?.info().queues)))
            }
            R::SET_MEM_TABLE => self.set_mem_table(message).await,
            R::GET_MAX_MEM_SLOTS => {
                self.peer.needs(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS, code)?;
                Ok(number(MAX_SLOTS))
            }
            R::ADD_MEM_REG => self.add_mem_reg(message).await,
            R::REM_MEM_REG => self.rem_mem_reg(message).await,
            R::SET_LOG_BASE => self.set_log_base(message).await,
            R::SET_VRING_NUM => self.set_vring_num(message),
            R::SET_VRING_ADDR => self.set_vring_addr(message),
            R::SET_VRING_BASE => self.set_vring_base(message),
            R::GET_VRING_BASE => self.get_vring_base(message).await,
            R::SET_VRING_KICK => self.set_vring_kick(message).await,
            R::SET_VRING_CALL => self.set_vring_call(message),
            R::SET_VRING_ERR => self.set_vring_err(message),
            R::SET_VRING_ENABLE => self.set_vring_enable(message).await,
            R::GET_CONFIG => self.get_config(message),
            R::SET_CONFIG => self.set_config(message),
            R::GET_INFLIGHT_FD => self.get_inflight(message),
            R::SET_INFLIGHT_FD => self.set_inflight(message),
            R::RESET_DEVICE => {
                self.peer.needs(VhostUserProtocolFeatures::RESET_DEVICE, code)?;
                message.empty()?;
                self.peer.rings.iter_mut().for_each(|ring| *ring = Default::default());
                let features = self.peer.features & !VHOST_F_LOG_ALL;
                self.at_quiescence(|quiescent| {
                    quiescent.reset();
                    // What was negotiated holds until the front end says otherwise; it may well say the same again.
                    quiescent.with(|vdev, _| vdev.accept(features, TRANSPORT));
                })
                .await?;
                Ok(Answer::None)
            }
            R::SET_BACKEND_REQ_FD => {
                self.peer.needs(VhostUserProtocolFeatures::BACKEND_REQ, code)?;
                let file = message.take_file()?;
                if rustix::net::sockopt::socket_domain(&file) != Ok(rustix::net::AddressFamily::UNIX) {
                    return Err(PeerFault::BadValue("SET_BACKEND_REQ_FD: not a unix socket"));
                }
                let stream = std::os::unix::net::UnixStream::from(file);
                stream.set_nonblocking(true).map_err(PeerFault::Broken)?;
                self.peer.back_channel = tokio::net::UnixStream::from_std(stream).ok();
                Ok(Answer::None)
            }
            _ => Err(PeerFault::UnknownRequest(code)),
        }
    }

    async fn set_features(&mut self, features: u64) -> Result<Answer, PeerFault> {
        let changed = features ^ self.peer.features;
        if features & VHOST_F_LOG_ALL != 0 && !self.dirty_log {
            return Err(PeerFault::BadFeatures(features));
        }
        // The log alone is switched while rings run.
        if changed & !VHOST_F_LOG_ALL != 0 {
            let running = !self.running()?.queues().is_empty();
            if running || !self.vdev()?.accept(features & !VHOST_F_LOG_ALL, TRANSPORT) {
                return Err(PeerFault::BadFeatures(features));
            }
        }
        self.peer.features = features;
        if changed & VHOST_F_LOG_ALL != 0 {
            self.switch_log().await?;
        }
        Ok(Answer::None)
    }

    async fn set_mem_table(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (memory, mut rest) = message.split::<VhostUserMemory>()?;
        let (count, padding) = (memory.num_regions as usize, memory.padding1);
        if padding != 0
            || count > super::message::MAX_FILES
            || rest.len() != count * size_of::<VhostUserMemoryRegion>()
        {
            return Err(PeerFault::BadValue("SET_MEM_TABLE's count and size contradict each other"));
        }
        let mut described = Vec::with_capacity(count);
        for _ in 0..count {
            let (bytes, later) = rest.split_at(size_of::<VhostUserMemoryRegion>());
            let mut region = VhostUserMemoryRegion::default();
            region.as_mut_slice().copy_from_slice(bytes);
            described.push(region);
            rest = later;
        }
        let files = message.take_files(count)?;
        let regions = described
            .iter()
            .zip(files)
            .map(|(region, file)| map_region(region, file))
            .collect::<Result<_, _>>()?;
        let map = Arc::new(GuestMap::new(regions)?);
        self.replace_memory(map).await?;
        self.start_waiting().await?;
        Ok(Answer::None)
    }

    /// All pollers come home before memory goes away under them; they go on with the new map.
    async fn replace_memory(&mut self, map: Arc<GuestMap>) -> Result<Answer, PeerFault> {
        let rings: Vec<_> = self.peer.rings.iter().map(|ring| ring.user.layout(ring.size, &map)).collect();
        self.at_quiescence(|quiescent| {
            quiescent.with(|vdev, still| {
                vdev.replace_memory(still, map);
                for (index, layout) in (0..).zip(rings) {
                    // The front end's addresses mean something else now. A ring that has no place waits for memory: while a VMM
                    // splits a region it takes the old one away before it adds the new ones.
                    match (vdev.queue_mut(index), layout) {
                        (Some(setup), Some(layout)) => setup.layout = layout,
                        (Some(setup), None) => setup.enabled = false,
                        (None, _) => {}
                    }
                }
            });
        })
        .await?;
        Ok(Answer::None)
    }

    async fn add_mem_reg(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS, message.header.request as u32)?;
        let region = message.body::<VhostUserSingleMemoryRegion>()?;
        let region = map_region(&region, message.take_file()?)?;
        let map = Arc::new(self.vdev()?.view().map().with(region)?);
        // Growing needs no quiescent point: the pollers take the new map when they acknowledge it.
        let running = self.running()?;
        let queues = running.queues();
        let applied = running.apply(&queues, &Change::Memory(map));
        applied.done().await;
        self.start_waiting().await?;
        Ok(Answer::None)
    }

    /// Starts the rings that had to wait for their memory, if it is there now.
    async fn start_waiting(&mut self) -> Result<(), PeerFault> {
        let on_duty = self.running()?.queues();
        for ring in 0..self.peer.rings.len() as u16 {
            let Peer { rings, .. } = &self.peer;
            let wiring = &rings[usize::from(ring)];
            let (user, size, wanted) = (wiring.user, wiring.size, wiring.started && wiring.enabled);
            let vdev = self.vdev()?;
            let faulty = vdev.queue(ring).is_none_or(|setup| setup.fault.is_some());
            let placed = user.layout(size, vdev.view().map()).is_some();
            if wanted && placed && !faulty && !on_duty.contains(&ring) {
                self.start_ring(ring).await?;
            }
        }
        Ok(())
    }

    async fn rem_mem_reg(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS, message.header.request as u32)?;
        let region = message.body::<VhostUserSingleMemoryRegion>()?;
        // Some front ends send the descriptor along; it is of no use.
        message.files.clear();
        let map = Arc::new(self.vdev()?.view().map().without(
            region.guest_phys_addr,
            region.memory_size,
            region.user_addr,
        )?);
        self.replace_memory(map).await
    }

    /// The ring of a message, which must exist.
    fn ring(&self, index: u32) -> Result<u16, PeerFault> {
        u16::try_from(index)
            .ok()
            .filter(|index| usize::from(*index) < self.peer.rings.len())
            .ok_or(PeerFault::NoSuchQueue(index))
    }

    /// The ring of a message, which must exist and stand still.
    fn still_ring(&mut self, index: u32) -> Result<u16, PeerFault> {
        let ring = self.ring(index)?;
        if self.running()?.queues().contains(&ring) { Err(PeerFault::RingInUse(index)) } else { Ok(ring) }
    }

    fn set_vring_num(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let state = message.body::<VhostUserVringState>()?;
        let (index, num) = (state.index, state.num);
        let ring = self.still_ring(index)?;
        // Packed rings may have any size (2.8.10.1).
        let size = u16::try_from(num).ok().filter(|size| (1..=MAX_SIZE).contains(size));
        self.peer.rings[usize::from(ring)].size = size
            .filter(|size| size.is_power_of_two() || self.peer.packed())
            .ok_or(PeerFault::BadValue("SET_VRING_NUM: not a power of two up to 32768"))?;
        Ok(Answer::None)
    }

    fn set_vring_addr(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let addr = message.body::<VhostUserVringAddr>()?;
        let user = UserRing { desc: addr.descriptor, avail: addr.available, used: addr.used };
        let index = addr.index;
        let ring = self.ring(index)?;
        if !addr.is_valid() {
            return Err(PeerFault::BadValue("SET_VRING_ADDR: misaligned addresses or unknown flags"));
        }
        if self.peer.rings[usize::from(ring)].user != user {
            self.still_ring(index)?;
        }
        self.peer.rings[usize::from(ring)].user = user;
        Ok(Answer::None)
    }

    fn set_vring_base(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let state = message.body::<VhostUserVringState>()?;
        let (index, num) = (state.index, state.num);
        let ring = self.still_ring(index)?;
        if num > u32::from(u16::MAX) && !self.peer.packed() {
            return Err(PeerFault::BadValue("SET_VRING_BASE: beyond 16 bits"));
        }
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.base = Some(num);
            setup.in_flight.clear();
        }
        Ok(Answer::None)
    }

    async fn get_vring_base(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let state = message.body::<VhostUserVringState>()?;
        let index = state.index;
        let ring = self.ring(index)?;
        self.peer.rings[usize::from(ring)].started = false;
        self.stop_ring(ring).await?;
        let base = self.vdev()?.queue(ring).and_then(|setup| setup.base);
        let base = base.unwrap_or(if self.peer.packed() { PACKED_START } else { 0 });
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            // The next start is the front end's to describe; a fault ends with the ring that had it.
            setup.enabled = false;
            setup.fault = None;
            setup.kick = None;
        }
        Ok(Answer::Body(VhostUserVringState::new(index, base).as_slice().to_vec()))
    }

    /// The queue and the descriptor of SET_VRING_KICK, CALL and ERR.
    fn vring_file(
        &self,
        message: &mut Message,
        what: &'static str,
    ) -> Result<(u16, Option<std::os::fd::OwnedFd>), PeerFault> {
        let value = message.body::<VhostUserU64>()?.value;
        let ring = self.ring((value & 0xff) as u32)?;
        if value & 0x100 != 0 {
            message.take_files(0)?;
            return Ok((ring, None));
        }
        let file = message.take_file()?;
        if !eventfd::check(&file) {
            return Err(PeerFault::NotAnEventfd(what));
        }
        Ok((ring, Some(file)))
    }

    async fn set_vring_kick(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (ring, file) = self.vring_file(message, "kicks")?;
        let kick = file.map(Arc::new);
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.kick = kick.clone();
        }
        let running = self.running()?;
        if running.queues().contains(&ring) {
            running.apply(&QueueSet::from([ring]), &Change::Kick(kick)).done().await;
            return Ok(Answer::None);
        }
        let wiring = &mut self.peer.rings[usize::from(ring)];
        wiring.started = true;
        if self.peer.features & VHOST_USER_F_PROTOCOL_FEATURES == 0 {
            // Without protocol features rings are born enabled.
            wiring.enabled = true;
        }
        self.start_ring(ring).await?;
        Ok(Answer::None)
    }

    fn set_vring_call(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (ring, file) = self.vring_file(message, "interrupts")?;
        let call = file.map(|file| Arc::new(Call::new(file)) as Arc<dyn Interrupt>);
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.call = call.clone();
        }
        // Nobody waits for it: what is signalled until then still reaches the descriptor that was there.
        drop(self.running()?.apply(&QueueSet::from([ring]), &Change::Call(call)));
        Ok(Answer::None)
    }

    fn set_vring_err(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (ring, file) = self.vring_file(message, "errors")?;
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.error = file.map(|file| Arc::new(Call::new(file)) as Arc<dyn Interrupt>);
        }
        Ok(Answer::None)
    }

    async fn set_vring_enable(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let state = message.body::<VhostUserVringState>()?;
        let (index, num) = (state.index, state.num);
        let ring = self.ring(index)?;
        if num > 1 {
            return Err(PeerFault::BadValue("SET_VRING_ENABLE: neither 0 nor 1"));
        }
        self.peer.rings[usize::from(ring)].enabled = num == 1;
        if num == 1 {
            self.start_ring(ring).await?;
        } else {
            self.stop_ring(ring).await?;
        }
        Ok(Answer::None)
    }

    /// Puts a poller on a ring that is started and enabled, unless it has one.
    async fn start_ring(&mut self, ring: u16) -> Result<(), PeerFault> {
        let Some(wiring) = self.peer.rings.get(usize::from(ring)) else { return Ok(()) };
        if !(wiring.started && wiring.enabled) {
            return Ok(());
        }
        // A driver without VERSION_1 is welcome: OVMF drives QEMU's transitional device so. The split ring of a legacy driver is
        // in the guest's byte order (virtio 1.3, 2.7.3), which is little-endian wherever this daemon runs.
        let (size, user) = (wiring.size, wiring.user);
        let vdev = self.vdev()?;
        let layout = user
            .layout(size, vdev.view().map())
            .ok_or(PeerFault::BadValue("a ring outside the guest's memory"))?;
        if let Some(setup) = vdev.queue_mut(ring) {
            setup.layout = layout;
            setup.enabled = true;
        }
        let seats = self.seats.clone();
        let running = self.running()?;
        // Opening a lane, and waiting for I/O of the dead before a replay, may block.
        let started = tokio::task::block_in_place(|| running.start(&QueueSet::from([ring]), &seats));
        match started {
            // The queue has stopped with a fault of its guest's: that is the queue's end, not the connection's.
            Err(ioplane_device::DeviceError::Guest { queue, why }) => {
                tracing::warn!(queue, why, "a queue did not start");
                Ok(())
            }
            other => Ok(other?),
        }
    }

    /// Brings a ring's poller home: drained if it can be, suspended if not.
    async fn stop_ring(&mut self, ring: u16) -> Result<(), PeerFault> {
        let queues = QueueSet::from([ring]);
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.enabled = false;
        }
        let patience = self.patience;
        let running = self.running()?;
        running.drain(&queues);
        if tokio::time::timeout(patience, running.stopped(&queues)).await.is_err() {
            tracing::warn!(
                queue = ring,
                "requests are stuck in the backing: the queue is suspended, they stay in the journal"
            );
            running.suspend(&queues);
            running.stopped(&queues).await;
        }
        Ok(())
    }

    /// Brings the whole device to a quiescent point, does `work` there, and resumes it.
    pub async fn at_quiescence<R>(
        &mut self,
        work: impl FnOnce(&mut Quiescent<Vdev<V>>) -> R,
    ) -> Result<R, PeerFault> {
        let mut quiescing = self.device.take().ok_or_else(lost)?.begin_quiesce();
        let _ = tokio::time::timeout(self.patience, quiescing.settled()).await;
        let mut quiescent = match quiescing.finish() {
            Ok(quiescent) => quiescent,
            Err(missed) => {
                tracing::warn!(
                    reason = missed.reason,
                    "the device is suspended: its requests stay in the journal"
                );
                let mut quiescing = missed.suspend().map_err(|refused| PeerFault::Device(refused.error))?;
                quiescing.settled().await;
                quiescing.finish().map_err(|missed| PeerFault::NotQuiescent(missed.reason.clone()))?
            }
        };
        let outcome = work(&mut quiescent);
        self.resume(quiescent)?;
        Ok(outcome)
    }

    /// As [`Session::at_quiescence`], but gives the device back as it was when it is not quiescent by `patience`.
    pub async fn at_quiescence_within<R>(
        &mut self,
        patience: Duration,
        work: impl FnOnce(&mut Quiescent<Vdev<V>>) -> R,
    ) -> Result<R, PeerFault> {
        let mut quiescing = self.device.take().ok_or_else(lost)?.begin_quiesce();
        let _ = tokio::time::timeout(patience, quiescing.settled()).await;
        match quiescing.finish() {
            Ok(mut quiescent) => {
                let outcome = work(&mut quiescent);
                self.resume(quiescent)?;
                Ok(outcome)
            }
            Err(missed) => {
                let reason = missed.reason.clone();
                let seats = self.seats.clone();
                match tokio::task::block_in_place(|| missed.undrain(&seats)) {
                    Ok((running, _)) => self.device = Some(running),
                    Err(refused) => return Err(PeerFault::Device(refused.error)),
                }
                Err(PeerFault::NotQuiescent(reason))
            }
        }
    }

    fn resume(&mut self, mut quiescent: Quiescent<Vdev<V>>) -> Result<(), PeerFault> {
        let seats = self.seats.clone();
        // Each round either resumes or finds one queue more whose guest has spoilt it, which is left out of the next.
        for _ in 0..=self.peer.rings.len() {
            match tokio::task::block_in_place(|| quiescent.resume(&seats)) {
                Ok(running) => {
                    self.device = Some(running);
                    return Ok(());
                }
                Err(refused) => {
                    tracing::warn!(error = %refused.error, "a queue did not resume");
                    quiescent = refused.kept;
                    if !matches!(refused.error, ioplane_device::DeviceError::Guest { .. }) {
                        // The backing failed: every queue waits for the front end to start it again.
                        quiescent.with(|vdev, _| {
                            for index in 0..vdev.info().queues {
                                vdev.queue_mut(index).into_iter().for_each(|setup| setup.enabled = false);
                            }
                        });
                    }
                }
            }
        }
        Err(PeerFault::NotQuiescent("no queue would resume".to_owned()))
    }

    fn get_config(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let (config, _) = self.config_header(message)?;
        let (offset, size) = (config.offset, config.size);
        let mut bytes = vec![0; size as usize];
        self.vdev()?.access(At::Config(u64::from(offset)), Access::Read(&mut bytes));
        let mut body = config.as_slice().to_vec();
        body.extend_from_slice(&bytes);
        Ok(Answer::Body(body))
    }

    fn set_config(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let (config, bytes) = self.config_header(message)?;
        let offset = config.offset;
        self.vdev()?.access(At::Config(u64::from(offset)), Access::Write(bytes));
        Ok(Answer::None)
    }

    fn config_header<'m>(&self, message: &'m Message) -> Result<(VhostUserConfig, &'m [u8]), PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::CONFIG, message.header.request as u32)?;
        let (config, rest) = message.split::<VhostUserConfig>()?;
        let (offset, size) = (config.offset, config.size);
        if size as usize != rest.len() || offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG) {
            return Err(PeerFault::BadValue(
                "a configuration access beyond 256 bytes, or whose size is not its payload's",
            ));
        }
        Ok((config, rest))
    }

    fn get_inflight(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::INFLIGHT_SHMFD, message.header.request as u32)?;
        let asked = message.body::<VhostUserInflight>()?;
        self.check_inflight(&asked)?;
        // QEMU 10 asks with its `queue-size` and lets the driver set up larger rings: room for the largest there can be.
        let largest = self.vdev()?.model().info().queue_size;
        let (mapping, bytes) = fresh_inflight(asked.num_queues, largest, self.peer.features)?;
        let body = VhostUserInflight::new(bytes, 0, asked.num_queues, asked.queue_size);
        Ok(Answer::BodyAndFile(body.as_slice().to_vec(), mapping))
    }

    fn set_inflight(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::INFLIGHT_SHMFD, message.header.request as u32)?;
        let inflight = message.body::<VhostUserInflight>()?;
        self.check_inflight(&inflight)?;
        let windows = open_inflight(&inflight, message.take_file()?, self.peer.features)?;
        if !self.running()?.queues().is_empty() {
            return Err(PeerFault::RingInUse(0));
        }
        for (index, window) in (0..).zip(windows) {
            if let Some(setup) = self.vdev()?.queue_mut(index) {
                setup.journal = Some(window);
            }
        }
        Ok(Answer::None)
    }

    fn check_inflight(&mut self, asked: &VhostUserInflight) -> Result<(), PeerFault> {
        let info = self.vdev()?.model().info();
        if asked.num_queues == 0
            || asked.num_queues > info.queues
            || asked.queue_size == 0
            || asked.queue_size > info.queue_size
        {
            return Err(PeerFault::BadValue(
                "an in-flight region for more, or larger, queues than the device has",
            ));
        }
        Ok(())
    }

    /// Tells the front end that the configuration has changed, if it listens.
    pub async fn config_changed(&mut self) -> Result<(), PeerFault> {
        self.vdev()?.config_changed();
        if let Some(back_channel) = &self.peer.back_channel {
            send(back_channel, &backend_request(BackendReq::CONFIG_CHANGE_MSG as u32, &[]), None).await?;
        }
        Ok(())
    }

    /// The front end is gone: everything it said is forgotten, the device waits for the next one.
    pub async fn forget_peer(&mut self) -> Result<(), PeerFault> {
        self.peer = Peer::new(self.peer.rings.len() as u16);
        self.at_quiescence(|quiescent| {
            quiescent.reset();
            quiescent.with(|vdev, still| {
                vdev.replace_memory(still, Arc::new(GuestMap::default()));
                vdev.apply(&QueueSet::new(), &Change::Log(None));
                for index in 0..vdev.info().queues {
                    vdev.queue_mut(index).into_iter().for_each(|setup| *setup = Default::default());
                }
            });
        })
        .await
    }

    /// Moves a queue to where `placement` says, and keeps it there from now on. On a missed deadline it stays.
    pub async fn move_queue(
        &mut self,
        queue: u16,
        placement: Arc<dyn Placement>,
        patience: Duration,
    ) -> Result<(), PeerFault> {
        let ring = self.ring(u32::from(queue))?;
        let queues = QueueSet::from([ring]);
        let old = self.seats.clone();
        self.seats.moved.insert(ring, placement);
        let new = self.seats.clone();
        let running = self.running()?;
        if !running.queues().contains(&ring) {
            return Ok(());
        }
        running.drain(&queues);
        if tokio::time::timeout(patience, running.stopped(&queues)).await.is_err() {
            let undrained = tokio::task::block_in_place(|| running.undrain(&queues, &old));
            self.seats = old;
            undrained?;
            return Err(PeerFault::NotQuiescent(format!("queue {ring} still has requests in flight")));
        }
        tokio::task::block_in_place(|| running.start(&queues, &new))?;
        Ok(())
    }
}

/// What is said while there is no device: a quiescent point ended without giving it back.
fn lost() -> PeerFault {
    PeerFault::NotQuiescent("the device was lost at a quiescent point".to_owned())
}

pub(super) fn number(value: u64) -> Answer {
    Answer::Body(VhostUserU64::new(value).as_slice().to_vec())
}

impl<V: VirtioDevice> std::fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("device", &self.device).field("peer", &self.peer).finish()
    }
}
