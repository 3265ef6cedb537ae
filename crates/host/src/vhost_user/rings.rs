//! Rings: described, started, stopped. A ring is wanted while it is started (a kick) and enabled; a wanted ring has a
//! poller unless its memory is away or its guest has spoilt it.

use std::sync::Arc;
use std::time::Duration;

use ioplane_device::{Change, Interrupt, QueueSet};
use ioplane_virtio::VirtioDevice;
use ioplane_virtio::spec::feature::{VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES};
use ioplane_virtio::spec::split::MAX_SIZE;
use vhost::vhost_user::message::{
    VhostUserMsgValidator, VhostUserU64, VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued;

use super::fault::PeerFault;
use super::message::Message;
use super::peer::{Peer, UserRing};
use super::session::{Answer, Session};
use crate::eventfd::{self, PeerEventfd};

/// Where a packed ring begins: both indexes 0, both wrap counters 1.
const PACKED_START: u32 = 0x8000_8000;
/// How long requests of a backing that is stalled may take to end when their ring is to stop: QEMU's main thread waits for each ring.
const STALLED: Duration = Duration::from_millis(100);

impl<V: VirtioDevice> Session<V> {
    /// The ring of a message, which must exist.
    pub(super) fn ring(&self, index: u32) -> Result<u16, PeerFault> {
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

    pub(super) fn set_vring_num(&mut self, message: &Message) -> Result<Answer, PeerFault> {
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

    pub(super) fn set_vring_addr(&mut self, message: &Message) -> Result<Answer, PeerFault> {
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

    pub(super) fn set_vring_base(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let state = message.body::<VhostUserVringState>()?;
        let (index, num) = (state.index, state.num);
        let ring = self.still_ring(index)?;
        if num > u32::from(u16::MAX) && !self.peer.packed() {
            return Err(PeerFault::BadValue("SET_VRING_BASE: beyond 16 bits"));
        }
        let packed = self.peer.packed();
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            // DPDK's front end names the available position of a packed ring alone. Without a journal nothing is in flight where a
            // ring starts, so the used position is the same, unless this is the base that we returned ourselves.
            let half = packed && num <= u32::from(u16::MAX);
            let ours = setup.journal.is_some() || setup.base == Some(num);
            setup.base = Some(if half && !ours { num << 16 | num } else { num });
            setup.in_flight.clear();
        }
        Ok(Answer::None)
    }

    pub(super) async fn vring_base(&mut self, message: &Message) -> Result<Answer, PeerFault> {
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

    /// The same for SET_VRING_CALL and ERR, as what we signal by.
    fn vring_interrupt(
        &self,
        message: &mut Message,
        what: &'static str,
    ) -> Result<(u16, Option<Arc<dyn Interrupt>>), PeerFault> {
        let (ring, file) = self.vring_file(message, what)?;
        let call = file.map(PeerEventfd::new).transpose().map_err(PeerFault::NoInterrupts)?;
        Ok((ring, call.map(|call| Arc::new(call) as Arc<dyn Interrupt>)))
    }

    // What a message replaces while the ring runs is kept until its poller has let go of it: then it is closed or unmapped here,
    // and not on the core. And the next message waits until then, so that a front end has one order at a time in the mailbox.

    pub(super) async fn set_vring_kick(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (ring, file) = self.vring_file(message, "kicks")?;
        let kick = file.map(Arc::new);
        let _before =
            self.vdev()?.queue_mut(ring).and_then(|setup| std::mem::replace(&mut setup.kick, kick.clone()));
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

    pub(super) async fn set_vring_call(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (ring, call) = self.vring_interrupt(message, "interrupts")?;
        let _before =
            self.vdev()?.queue_mut(ring).and_then(|setup| std::mem::replace(&mut setup.call, call.clone()));
        self.running()?.apply(&QueueSet::from([ring]), &Change::Call(call)).done().await;
        Ok(Answer::None)
    }

    pub(super) fn set_vring_err(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (ring, error) = self.vring_interrupt(message, "errors")?;
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.error = error;
        }
        Ok(Answer::None)
    }

    pub(super) async fn set_vring_enable(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let state = message.body::<VhostUserVringState>()?;
        let (index, num) = (state.index, state.num);
        let ring = self.ring(index)?;
        // The specification knows 0 and 1. SPDK's front end sends the ring's size, and every backend takes it for "on".
        let on = num != 0;
        self.peer.rings[usize::from(ring)].enabled = on;
        if on {
            self.start_ring(ring).await?;
        } else {
            self.stop_ring(ring).await?;
        }
        Ok(Answer::None)
    }

    /// Whether any ring is to run.
    pub(super) fn wants_rings(&self) -> bool {
        self.peer.rings.iter().any(|ring| ring.started && ring.enabled)
    }

    /// Puts a poller on a ring that is started and enabled, unless it has one, or rings of the same device run behind another
    /// socket: then it waits for those.
    async fn start_ring(&mut self, ring: u16) -> Result<(), PeerFault> {
        let Some(wiring) = self.peer.rings.get(usize::from(ring)) else { return Ok(()) };
        if !(wiring.started && wiring.enabled) {
            return Ok(());
        }
        if !self.lease_claim.claim() {
            tracing::info!(
                queue = ring,
                "the device's rings run behind another socket: waiting for them to stop"
            );
            return Ok(());
        }
        // A driver without VERSION_1 is welcome: OVMF drives QEMU's transitional device so. The split ring of a legacy driver is
        // in the guest's byte order (virtio 1.3, 2.7.3), which is little-endian wherever this daemon runs.
        let (size, user) = (wiring.size, wiring.user);
        let vdev = self.vdev()?;
        let map = vdev.view().map();
        let layout = user.layout(size, map).ok_or(if map.regions().is_empty() {
            PeerFault::NoSharedMemory
        } else {
            PeerFault::BadValue("a ring outside the guest's memory")
        })?;
        let mut base = None;
        if let Some(setup) = vdev.queue_mut(ring) {
            setup.layout = layout;
            setup.enabled = true;
            base = setup.base;
        }
        let inherited = self.lease_claim.inherit(ring, base);
        if let Some(setup) = self.vdev()?.queue_mut(ring).filter(|setup| setup.in_flight.is_empty()) {
            setup.in_flight = inherited;
        }
        let placement = self.placement.clone();
        let running = self.running()?;
        // Opening a channel, and waiting for I/O of the dead before a replay, may block.
        let started = tokio::task::block_in_place(|| running.start(&QueueSet::from([ring]), &placement));
        if started.is_err() {
            // What was inherited stays to be done.
            self.leave(ring);
        }
        match started {
            // The queue has stopped with a fault of its guest's: that is the queue's end, not the connection's.
            Err(ioplane_device::DeviceError::Guest { queue, why }) => {
                tracing::warn!(queue, why, "a queue did not start");
                Ok(())
            }
            other => Ok(other?),
        }
    }

    /// Parks a ring's poller: drained if it can be, suspended if not.
    async fn stop_ring(&mut self, ring: u16) -> Result<(), PeerFault> {
        let queues = QueueSet::from([ring]);
        if let Some(setup) = self.vdev()?.queue_mut(ring) {
            setup.enabled = false;
        }
        let patience = self.stop_patience()?;
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
        self.leave(ring);
        Ok(())
    }

    /// How long requests may take to end when a ring is to stop. A front end that migrates cannot take along what has not ended.
    fn stop_patience(&mut self) -> Result<Duration, PeerFault> {
        let migrates = self.peer.features & VHOST_F_LOG_ALL != 0;
        let stalled = !migrates && self.vdev()?.model().is_stalled();
        Ok(if stalled { STALLED.min(self.patience) } else { self.patience })
    }

    /// Notes what a ring that has stopped leaves to the next holder of the lease.
    fn leave(&mut self, ring: u16) {
        let Session { device, lease_claim, .. } = self;
        if let Some(setup) = device.look().and_then(|vdev| vdev.queue(ring)) {
            lease_claim.leave(ring, setup.base, &setup.in_flight);
        }
    }

    /// Starts the rings that had to wait for their memory, if it is there now.
    pub(super) async fn start_waiting(&mut self) -> Result<(), PeerFault> {
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
}
