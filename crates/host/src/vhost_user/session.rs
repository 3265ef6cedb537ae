//! The session: what each message does to the device.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ioplane_device::{Change, CoreSender, Device, Lifecycle, Placement, QueueSet, Quiescent, Running};
use ioplane_memory::{Account, GuestMap, Limits, MapError};
use ioplane_virtio::spec::feature::{VHOST_F_LOG_ALL, VHOST_USER_F_PROTOCOL_FEATURES};
use ioplane_virtio::{Vdev, VirtioDevice};
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::{FrontendReq, VhostUserU64};
use vm_memory::ByteValued;

use super::connection::Connection;
use super::fault::PeerFault;
use super::lease::{LeaseClaim, RingLease};
use super::message::{Message, reply};
use super::peer::Peer;

/// How long a quiescent point may take when the front end waits for it; then what is in flight is suspended.
pub const PATIENCE: Duration = Duration::from_secs(20);
/// Memory slots that we have.
const MAX_SLOTS: u64 = ioplane_memory::MAX_REGIONS as u64;
/// Features of the transport itself.
pub(super) const TRANSPORT: u64 = VHOST_USER_F_PROTOCOL_FEATURES;

/// Puts each queue on the core that it was moved to, or where the pool thinks best.
#[derive(Clone)]
pub(super) struct QueuePlacement {
    pub(super) pool: Arc<dyn Placement>,
    pub(super) moved: BTreeMap<u16, Arc<dyn Placement>>,
}

impl Placement for QueuePlacement {
    fn place(&self, device: &str, queue: u16) -> Arc<dyn CoreSender> {
        self.moved.get(&queue).unwrap_or(&self.pool).place(device, queue)
    }
}

/// A device and what its front end has said. Owned by one task; the device runs all the time, with as many rings as the
/// front end has started.
pub struct Session<V: VirtioDevice> {
    /// Runs, but for a quiescent point, and for one after which no queue would resume: then it waits there for the next front end.
    pub(super) device: Lifecycle<Vdev<V>>,
    pub(super) placement: QueuePlacement,
    pub(super) peer: Peer,
    /// What its front ends may map, and have mapped.
    pub(super) account: Account,
    /// How long a quiescent point that the front end waits for may take, before what is in flight is suspended.
    pub(super) patience: Duration,
    /// The dirty log is offered.
    pub(super) dirty_log: bool,
    /// Held while rings are to run.
    pub(super) lease_claim: LeaseClaim,
}

/// A message's answer, if it has one of its own.
pub(super) enum Answer {
    None,
    Body(Vec<u8>),
    BodyAndFile(Vec<u8>, ioplane_memory::Mapping),
}

impl<V: VirtioDevice> Session<V> {
    /// A device that waits for its front end, which may take of memory what `limits` say. Its queues sit where `pool` says.
    pub fn new(model: V, pool: Arc<dyn Placement>, limits: Limits) -> Result<Self, PeerFault> {
        let account = Account::new(limits).map_err(MapError::from)?;
        let queues = model.info().queues;
        let device = Quiescent::new(Vdev::new(model, Arc::new(GuestMap::default())));
        let placement = QueuePlacement { pool, moved: BTreeMap::new() };
        let device = device.resume(&placement).map_err(|refused| PeerFault::Device(refused.error))?;
        Ok(Session {
            device: device.into(),
            placement,
            peer: Peer::new(queues),
            account,
            patience: PATIENCE,
            dirty_log: false,
            lease_claim: LeaseClaim::new(RingLease::default()),
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

    /// Shares the device with other sockets: its rings run while it holds `lease`. Before any front end comes.
    pub fn with_lease(mut self, lease: RingLease) -> Self {
        if let Ok(vdev) = self.vdev() {
            let meters = lease.meters(vdev.meters()).to_vec();
            vdev.share_meters(&meters);
        }
        Session { lease_claim: LeaseClaim::new(lease), ..self }
    }

    /// The running device.
    pub fn device(&self) -> Option<&Running<Vdev<V>>> {
        match &self.device {
            Lifecycle::Running(running) => Some(running),
            _ => None,
        }
    }

    /// The running device, for changes that need no quiescent point.
    pub fn device_mut(&mut self) -> Option<&mut Running<Vdev<V>>> {
        self.device.running().ok()
    }

    pub(super) fn running(&mut self) -> Result<&mut Running<Vdev<V>>, PeerFault> {
        self.device.running().map_err(|error| PeerFault::NotQuiescent(error.to_string()))
    }

    pub(super) fn vdev(&mut self) -> Result<&mut Vdev<V>, PeerFault> {
        Ok(self.running()?.device_mut())
    }

    /// Does what one message asks and answers it.
    pub async fn handle(&mut self, mut message: Message, connection: &Connection) -> Result<(), PeerFault> {
        let header = message.header;
        let outcome = self.obey(&mut message).await;
        if outcome.is_ok() && header.request == FrontendReq::GET_VRING_BASE {
            self.rest_if_stopped();
        }
        if outcome.is_ok() && !self.wants_rings() {
            // Before the answer: whoever hears it may start the rings elsewhere.
            self.lease_claim.release();
        }
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

    /// Whoever hears that the last ring has stopped may start the rings on another host.
    fn rest_if_stopped(&mut self) {
        if self.peer.rings.iter().any(|ring| ring.started) {
            return;
        }
        let migrates = self.peer.features & VHOST_F_LOG_ALL != 0;
        if let Ok(vdev) = self.vdev() {
            vdev.model_mut().rest(migrates);
        }
    }

    async fn obey(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        use FrontendReq as R;
        let request = message.header.request;
        let code = request as u32;
        match request {
            R::GET_FEATURES => {
                message.empty()?;
                Ok(number(self.offered_features()?))
            }
            R::SET_FEATURES => self.set_features(message.body::<VhostUserU64>()?.value).await,
            R::SET_OWNER | R::RESET_OWNER => message.empty().map(|()| Answer::None),
            R::GET_PROTOCOL_FEATURES => {
                message.empty()?;
                Ok(number(self.offered_protocol()?.bits()))
            }
            R::SET_PROTOCOL_FEATURES => self.set_protocol_features(message.body::<VhostUserU64>()?.value),
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
            R::SET_LOG_FD => self.set_log_fd(message),
            R::SET_VRING_NUM => self.set_vring_num(message),
            R::SET_VRING_ADDR => self.set_vring_addr(message),
            R::SET_VRING_BASE => self.set_vring_base(message),
            R::GET_VRING_BASE => self.vring_base(message).await,
            R::SET_VRING_KICK => self.set_vring_kick(message).await,
            R::SET_VRING_CALL => self.set_vring_call(message).await,
            R::SET_VRING_ERR => self.set_vring_err(message),
            R::SET_VRING_ENABLE => self.set_vring_enable(message).await,
            R::GET_CONFIG => self.device_config(message),
            R::SET_CONFIG => self.set_config(message),
            R::GET_INFLIGHT_FD => self.inflight_region(message),
            R::SET_INFLIGHT_FD => self.set_inflight(message),
            R::SEND_RARP => self.send_rarp(message),
            R::NET_SET_MTU => self.net_set_mtu(message),
            R::RESET_DEVICE => self.reset_device(message).await,
            R::SET_BACKEND_REQ_FD => self.set_back_channel(message),
            _ => Err(PeerFault::UnknownRequest(code)),
        }
    }

    /// Ready when rings that had to wait for those of another socket may run, or may not; see [`Session::start_granted`].
    pub async fn granted(&mut self) -> Result<(), PeerFault> {
        self.lease_claim.granted().await
    }

    /// Starts the rings that had to wait for those of another socket.
    pub async fn start_granted(&mut self) -> Result<(), PeerFault> {
        self.start_waiting().await
    }

    /// The front end is gone: everything it said is forgotten, the device waits for the next one.
    pub async fn forget_peer(&mut self) -> Result<(), PeerFault> {
        self.peer = Peer::new(self.peer.rings.len() as u16);
        self.at_quiescence(|quiescent| {
            quiescent.reset();
            quiescent.with(|vdev, proof| {
                vdev.model_mut().forget_guest();
                vdev.replace_memory(proof, Arc::new(GuestMap::default()));
                vdev.apply(&QueueSet::new(), &Change::Log(None));
                for index in 0..vdev.info().queues {
                    vdev.queue_mut(index).into_iter().for_each(|setup| *setup = Default::default());
                }
            });
        })
        .await?;
        self.lease_claim.release();
        Ok(())
    }

    /// Whether a migration is between two sockets of the device: rings wait for others, or have left requests to them.
    pub(super) fn is_passing_on(&self) -> bool {
        self.lease_claim.waits() || self.lease_claim.owes()
    }

    /// Whether rings of this socket run, or wait to.
    pub fn ownership(&self) -> (bool, bool) {
        (self.lease_claim.holds(), self.lease_claim.waits())
    }
}

pub(super) fn number(value: u64) -> Answer {
    Answer::Body(VhostUserU64::new(value).as_slice().to_vec())
}

impl<V: VirtioDevice> std::fmt::Debug for Session<V> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("device", &self.device).field("peer", &self.peer).finish()
    }
}
