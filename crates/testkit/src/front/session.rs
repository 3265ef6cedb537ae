//! The conversation with a back end, and what is kept when it breaks.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use super::super::driver::RingPlace;
use super::super::driver::memory::{GuestMemory, SharedRegion};
use super::event::EventFd;
use super::terms::{
    FrontError, InFlight, Wants, config_bytes, inflight_bytes, region_bytes, vring_state, wire_error,
};
use super::wire::{BACKEND_CONFIG_CHANGE, FrontEndRequest, FrontSocket, FrontSocketError, NEED_REPLY, REPLY};
use super::{F_PROTOCOL_FEATURES, protocol};

/// A front end and its connection. Dropping it closes the socket: to a back end, the VMM died.
#[derive(Debug)]
pub struct FrontEnd {
    wire: FrontSocket,
    wants: Wants,
    features: u64,
    protocol: u64,
    inflight: Option<InFlight>,
    /// Kick and call of each queue that was ever started.
    events: Vec<Option<(EventFd, EventFd)>>,
    /// Our end of the channel on which the back end asks.
    asked: Option<FrontSocket>,
}

type Result<T> = std::result::Result<T, FrontError>;

impl FrontEnd {
    /// Connects to the socket at `path` and negotiates; nothing is shared yet.
    pub fn connect(path: &Path, wants: Wants) -> Result<Self> {
        Self::begin(FrontSocket::connect(path).map_err(FrontError::Connect)?, wants)
    }

    /// As [`FrontEnd::connect`] over a socket that is connected already.
    pub fn on(socket: UnixStream, wants: Wants) -> Result<Self> {
        Self::begin(FrontSocket::on(socket).map_err(FrontError::Connect)?, wants)
    }

    fn begin(wire: FrontSocket, wants: Wants) -> Result<Self> {
        let mut front = FrontEnd {
            wire,
            wants,
            features: 0,
            protocol: 0,
            inflight: None,
            events: Vec::new(),
            asked: None,
        };
        front.negotiate()?;
        Ok(front)
    }

    fn negotiate(&mut self) -> Result<()> {
        (self.protocol, self.asked) = (0, None);
        let offered = self.ask_u64(FrontEndRequest::GET_FEATURES)?;
        if offered & F_PROTOCOL_FEATURES != 0 {
            let protocol = self.ask_u64(FrontEndRequest::GET_PROTOCOL_FEATURES)? & self.wants.protocol;
            self.tell(FrontEndRequest::SET_PROTOCOL_FEATURES, &protocol.to_ne_bytes(), &[])?;
            self.protocol = protocol;
        }
        if self.has(protocol::BACKEND_REQ) {
            let (ours, theirs) = UnixStream::pair()
                .map_err(|error| wire_error(FrontEndRequest::SET_BACKEND_REQ_FD, error.into()))?;
            self.tell(FrontEndRequest::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
            self.asked = Some(FrontSocket::on(ours).map_err(FrontError::Connect)?);
        }
        self.tell(FrontEndRequest::SET_OWNER, &[], &[])?;
        self.features = offered & (self.wants.features | F_PROTOCOL_FEATURES);
        self.tell(FrontEndRequest::SET_FEATURES, &self.features.to_ne_bytes(), &[])
    }

    /// Closes the connection at once, in both directions; what is kept stays for [`FrontEnd::reconnect`].
    pub fn hang_up(&mut self) {
        let _ = self.wire.socket().shutdown(std::net::Shutdown::Both);
        self.asked = None;
    }

    /// Drops the connection and makes another, as QEMU does when the daemon died: negotiates again and hands the in-flight
    /// region over. Memory and rings must be shared and started again, with the bases the caller thinks right.
    pub fn reconnect(&mut self, path: &Path) -> Result<()> {
        self.wire = FrontSocket::connect(path).map_err(FrontError::Connect)?;
        self.negotiate()?;
        match self.inflight.take() {
            Some(inflight) if self.has(protocol::INFLIGHT_SHMFD) => self.give_inflight(inflight),
            kept => {
                self.inflight = kept;
                Ok(())
            }
        }
    }

    /// The features in force (device features, transport bits included).
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The protocol features in force.
    pub fn protocol(&self) -> u64 {
        self.protocol
    }

    /// Whether all of `features` are negotiated protocol features.
    pub fn has(&self, features: u64) -> bool {
        self.protocol & features == features
    }

    /// The bare socket: raw and hostile messages.
    pub fn wire(&self) -> &FrontSocket {
        &self.wire
    }

    /// How many queues the back end has (GET_QUEUE_NUM); one without MQ.
    pub fn queue_count(&self) -> Result<u64> {
        if self.has(protocol::MQ) { self.ask_u64(FrontEndRequest::GET_QUEUE_NUM) } else { Ok(1) }
    }

    /// How many memory slots it takes (GET_MAX_MEM_SLOTS); eight without CONFIGURE_MEM_SLOTS.
    pub fn memory_slots(&self) -> Result<u64> {
        if self.has(protocol::CONFIGURE_MEM_SLOTS) {
            self.ask_u64(FrontEndRequest::GET_MAX_MEM_SLOTS)
        } else {
            Ok(8)
        }
    }

    /// Shares all of `memory`: region by region where CONFIGURE_MEM_SLOTS is negotiated, as QEMU does, else as one table.
    pub fn share(&self, memory: &GuestMemory) -> Result<()> {
        if self.has(protocol::CONFIGURE_MEM_SLOTS) {
            return memory.regions().iter().try_for_each(|region| self.plug(region));
        }
        self.share_table(memory)
    }

    /// Shares all of `memory` in one SET_MEM_TABLE, replacing what was shared.
    pub fn share_table(&self, memory: &GuestMemory) -> Result<()> {
        let regions = memory.regions();
        let mut body = Vec::new();
        body.extend_from_slice(&(regions.len() as u32).to_ne_bytes());
        body.extend_from_slice(&[0; 4]);
        for region in regions {
            body.extend_from_slice(&region_bytes(region));
        }
        let fds: Vec<_> = regions.iter().map(SharedRegion::file).collect();
        self.tell(FrontEndRequest::SET_MEM_TABLE, &body, &fds)
    }

    /// Shares one region more (ADD_MEM_REG).
    pub fn plug(&self, region: &SharedRegion) -> Result<()> {
        let mut body = [0u8; 40];
        body[8..].copy_from_slice(&region_bytes(region));
        self.tell(FrontEndRequest::ADD_MEM_REG, &body, &[region.file()])
    }

    /// Takes a region back (REM_MEM_REG).
    pub fn unplug(&self, region: &SharedRegion) -> Result<()> {
        let mut body = [0u8; 40];
        body[8..].copy_from_slice(&region_bytes(region));
        self.tell(FrontEndRequest::REM_MEM_REG, &body, &[])
    }

    /// Asks for an in-flight region (GET_INFLIGHT_FD) and hands it back (SET_INFLIGHT_FD), as QEMU does before the first
    /// start. Kept over [`FrontEnd::reconnect`].
    pub fn track_inflight(&mut self, queues: u16, size: u16) -> Result<()> {
        let request = FrontEndRequest::GET_INFLIGHT_FD;
        if !self.has(protocol::INFLIGHT_SHMFD) {
            return Err(FrontError::NotOffered(request));
        }
        self.send(request, 0, &inflight_bytes(0, 0, queues, size), &[])?;
        let mut reply = self.wire.reply(request).map_err(|error| wire_error(request, error))?;
        let garbled = || wire_error(request, FrontSocketError::Garbled("no in-flight region".into()));
        let number =
            |at: usize| reply.body.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_ne_bytes);
        let (len, offset) = number(0).zip(number(8)).ok_or_else(garbled)?;
        let file = reply.fds.pop().ok_or_else(garbled)?;
        self.give_inflight(InFlight { file, len, offset, queues, size })
    }

    /// Gives the back end this in-flight region, and keeps it.
    pub fn give_inflight(&mut self, inflight: InFlight) -> Result<()> {
        let InFlight { len, offset, queues, size, .. } = inflight;
        let body = inflight_bytes(len, offset, queues, size);
        let told = self.tell(FrontEndRequest::SET_INFLIGHT_FD, &body, &[inflight.file.as_fd()]);
        self.inflight = Some(inflight);
        told
    }

    /// The in-flight region that is kept.
    pub fn inflight(&self) -> Option<&InFlight> {
        self.inflight.as_ref()
    }

    /// How many requests of queue `index` the in-flight region says are in flight (split rings: a header of 16 bytes, then as
    /// many for each descriptor, of which the first byte says so). None without a region, or one that has no such queue.
    pub fn marked(&self, index: u16) -> Option<usize> {
        let inflight = self.inflight.as_ref()?;
        let each = (inflight.len / u64::from(inflight.queues)) as usize & !63;
        let mut bytes = vec![0; each];
        let at = inflight.offset + u64::from(index) * each as u64;
        let read = rustix::io::pread(&inflight.file, &mut bytes, at).ok()?;
        let entries = bytes[..read].chunks_exact(16).skip(1).take(usize::from(inflight.size));
        Some(entries.filter(|entry| entry[0] == 1).count())
    }

    /// Starts queue `index` on the ring at `place`: number, base, addresses, kick, call, enable. `base` is where to go on:
    /// the ring's beginning, what [`FrontEnd::stop`] returned, or after a crash what the driver knows (`Ring::base`).
    pub fn start(&mut self, index: u16, memory: &GuestMemory, place: RingPlace, base: u32) -> Result<()> {
        self.describe(index, memory, place, base)?;
        self.attach_events(index)?;
        if self.features & F_PROTOCOL_FEATURES != 0 { self.enable(index, true) } else { Ok(()) }
    }

    /// SET_VRING_NUM, SET_VRING_BASE and SET_VRING_ADDR: the part of a start that only describes.
    pub fn describe(&self, index: u16, memory: &GuestMemory, place: RingPlace, base: u32) -> Result<()> {
        let user = |gpa| memory.user_of(gpa).ok_or(FrontError::NoSuchAddress(gpa));
        self.tell(FrontEndRequest::SET_VRING_NUM, &vring_state(index, place.size.into()), &[])?;
        self.tell(FrontEndRequest::SET_VRING_BASE, &vring_state(index, base), &[])?;
        let mut body = vring_state(index, 0).to_vec();
        // Index and flags, then descriptor table, used ring, available ring, log address: in this order.
        for address in [user(place.desc)?, user(place.used)?, user(place.avail)?, place.used] {
            body.extend_from_slice(&address.to_ne_bytes());
        }
        self.tell(FrontEndRequest::SET_VRING_ADDR, &body, &[])
    }

    /// SET_VRING_KICK and SET_VRING_CALL with the queue's eventfds, made at the first call and kept from then on.
    pub fn attach_events(&mut self, index: u16) -> Result<()> {
        let at = usize::from(index);
        if self.events.len() <= at {
            self.events.resize_with(at + 1, || None);
        }
        if self.events[at].is_none() {
            self.events[at] = Some((EventFd::new()?, EventFd::new()?));
        }
        let Some((kick, call)) = &self.events[at] else { return Ok(()) };
        let body = u64::from(index).to_ne_bytes();
        self.tell(FrontEndRequest::SET_VRING_KICK, &body, &[kick.as_fd()])?;
        self.tell(FrontEndRequest::SET_VRING_CALL, &body, &[call.as_fd()])
    }

    /// SET_VRING_ENABLE.
    pub fn enable(&self, index: u16, on: bool) -> Result<()> {
        self.tell(FrontEndRequest::SET_VRING_ENABLE, &vring_state(index, on.into()), &[])
    }

    /// Stops queue `index` (GET_VRING_BASE) and returns where it stopped: the available index of a split ring, both positions
    /// of a packed one.
    pub fn stop(&self, index: u16) -> Result<u32> {
        let request = FrontEndRequest::GET_VRING_BASE;
        self.send(request, 0, &vring_state(index, 0), &[])?;
        let reply = self.wire.reply(request).map_err(|error| wire_error(request, error))?;
        let base = reply.body.get(4..8).and_then(|b| b.try_into().ok()).map(u32::from_ne_bytes);
        base.ok_or_else(|| wire_error(request, FrontSocketError::Garbled("no base".into())))
    }

    /// The kick and the call of queue `index`, once it was started.
    #[inline]
    pub fn events(&mut self, index: u16) -> Option<&mut (EventFd, EventFd)> {
        self.events.get_mut(usize::from(index))?.as_mut()
    }

    /// The kicks of all queues, by their numbers: `None` of one that was never started.
    pub fn kicks(&mut self) -> impl Iterator<Item = Option<&mut EventFd>> {
        self.events.iter_mut().map(|events| events.as_mut().map(|(kick, _)| kick))
    }

    #[inline]
    pub fn kick(&mut self, index: u16) {
        if let Some((kick, _)) = self.events(index) {
            kick.signal();
        }
    }

    /// `len` bytes of the configuration space from `offset` (GET_CONFIG).
    pub fn config(&self, offset: u32, len: u32) -> Result<Vec<u8>> {
        let request = FrontEndRequest::GET_CONFIG;
        if !self.has(protocol::CONFIG) {
            return Err(FrontError::NotOffered(request));
        }
        let mut body = config_bytes(offset, len);
        body.resize(body.len() + len as usize, 0);
        self.send(request, 0, &body, &[])?;
        let mut reply = self.wire.reply(request).map_err(|error| wire_error(request, error))?;
        if reply.body.len() != 12 + len as usize {
            return Err(FrontError::Refused { request, code: reply.body.len() as u64 });
        }
        Ok(reply.body.split_off(12))
    }

    /// The disk's size in sectors of 512 bytes, from its configuration space.
    pub fn capacity(&self) -> Result<u64> {
        let bytes = self.config(0, 8)?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// Writes configuration space (SET_CONFIG), the write-back switch for instance.
    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> Result<()> {
        let mut body = config_bytes(offset, bytes.len() as u32);
        body.extend_from_slice(bytes);
        self.tell(FrontEndRequest::SET_CONFIG, &body, &[])
    }

    /// RESET_DEVICE where negotiated; nothing else does the same.
    pub fn reset(&self) -> Result<()> {
        if !self.has(protocol::RESET_DEVICE) {
            return Err(FrontError::NotOffered(FrontEndRequest::RESET_DEVICE));
        }
        self.tell(FrontEndRequest::RESET_DEVICE, &[], &[])
    }

    /// Waits up to `time` for the back end to say that the configuration changed; false if it did not.
    pub fn config_changed(&self, time: Duration) -> Result<bool> {
        let request = FrontEndRequest::SET_BACKEND_REQ_FD;
        let wire = self.asked.as_ref().ok_or(FrontError::NotOffered(request))?;
        let failed = |error| wire_error(request, error);
        wire.patience(time.max(Duration::from_millis(1))).map_err(failed)?;
        match wire.receive() {
            Ok(message) => {
                if message.flags & NEED_REPLY != 0 {
                    wire.send(message.request, REPLY, &0u64.to_ne_bytes(), &[]).map_err(failed)?;
                }
                Ok(message.request == BACKEND_CONFIG_CHANGE)
            }
            Err(FrontSocketError::Timeout) => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    fn send(&self, request: FrontEndRequest, flags: u32, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.wire.send(request as u32, flags, body, fds).map_err(|error| wire_error(request, error))
    }

    /// Sends a request that has no reply of its own; waits for the acknowledgement where that is negotiated and wanted.
    pub fn tell(&self, request: FrontEndRequest, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        let ack = self.wants.acks && self.has(protocol::REPLY_ACK);
        self.send(request, if ack { NEED_REPLY } else { 0 }, body, fds)?;
        if ack {
            let reply = self.wire.reply(request).and_then(|reply| reply.u64());
            let code = reply.map_err(|error| wire_error(request, error))?;
            if code != 0 {
                return Err(FrontError::Refused { request, code });
            }
        }
        Ok(())
    }

    /// Sends a request without body whose reply is one number.
    pub fn ask_u64(&self, request: FrontEndRequest) -> Result<u64> {
        self.send(request, 0, &[], &[])?;
        self.wire.reply(request).and_then(|reply| reply.u64()).map_err(|error| wire_error(request, error))
    }
}
