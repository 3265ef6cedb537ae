//! A NIC from its driver's side: a connection, memory of its own, and pairs of belts.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use ioplane_testkit::driver::GuestMemory;
use ioplane_testkit::driver::spec::*;
use ioplane_testkit::front::{F_PROTOCOL_FEATURES, FrontEnd, FrontEndRequest, Wants, protocol, vring_state};

use super::belt::{Belt, Mode, Slots, TAKE, Used};
use super::frame::{HEADER, NUM_BUFFERS, Size, Stamp, template};

/// Entries of each ring: QEMU's default.
pub const RING: u16 = 256;
/// Buffers of large frames in flight: what TCP's window leaves of a ring, and what a processor's cache holds.
const LARGE_SLOTS: u16 = 32;
/// Receive buffers: of large frames a page each, as Linux gives them (mergeable), else one for a whole frame. Not a
/// power of two apart, so that the headers do not all meet in the same few lines of a cache.
const PAGE: u32 = 4096;
const SMALL_BUFFER: u32 = 2048;
const APART: u32 = 64;

const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
const VIRTIO_NET_F_CSUM: u64 = 1 << 0;
const VIRTIO_NET_F_GUEST_CSUM: u64 = 1 << 1;
const VIRTIO_NET_F_MAC: u64 = 1 << 5;
const VIRTIO_NET_F_GUEST_TSO4: u64 = 1 << 7;
const VIRTIO_NET_F_GUEST_TSO6: u64 = 1 << 8;
const VIRTIO_NET_F_HOST_TSO4: u64 = 1 << 11;
const VIRTIO_NET_F_HOST_TSO6: u64 = 1 << 12;
const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
const VIRTIO_NET_F_STATUS: u64 = 1 << 16;
const VIRTIO_NET_F_MQ: u64 = 1 << 22;

/// What a NIC must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shape {
    /// Packed rings, else split ones.
    pub packed: bool,
    pub size: Size,
    pub pairs: u16,
}

impl Shape {
    fn wants(self) -> Wants {
        let mut features = VIRTIO_F_VERSION_1
            | VIRTIO_F_EVENT_IDX
            | VIRTIO_F_INDIRECT_DESC
            | VIRTIO_NET_F_MAC
            | VIRTIO_NET_F_STATUS
            | VIRTIO_NET_F_MRG_RXBUF;
        if self.packed {
            features |= VIRTIO_F_RING_PACKED;
        }
        if self.size == Size::Large {
            features |= VIRTIO_NET_F_CSUM
                | VIRTIO_NET_F_GUEST_CSUM
                | VIRTIO_NET_F_HOST_TSO4
                | VIRTIO_NET_F_HOST_TSO6
                | VIRTIO_NET_F_GUEST_TSO4
                | VIRTIO_NET_F_GUEST_TSO6;
        }
        if self.pairs > 1 {
            features |= VIRTIO_NET_F_MQ;
        }
        let protocol = protocol::MQ | protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS;
        Wants { features, protocol, acks: true }
    }

    /// Features without which the figures would not be what they say.
    fn needs(self) -> u64 {
        let wanted = self.wants().features;
        wanted
            & !(VIRTIO_F_EVENT_IDX | VIRTIO_NET_F_MAC | VIRTIO_NET_F_STATUS | VIRTIO_NET_F_HOST_TSO6)
            & !VIRTIO_NET_F_GUEST_TSO6
    }

    fn tx(self) -> Slots {
        let len = HEADER + self.size.bytes();
        if self.size == Size::Large {
            let stride = len.next_multiple_of(64) + APART;
            return Slots { count: LARGE_SLOTS, stride, len, part: PAGE, write: false };
        }
        // As far apart as the heads of small packets in Linux.
        let stride = len.max(640).next_multiple_of(64) + APART;
        Slots { count: RING, stride, len, part: len, write: false }
    }

    fn rx(self) -> Slots {
        let len = if self.size == Size::Large { PAGE } else { SMALL_BUFFER };
        Slots { count: RING, stride: len + APART, len, part: len, write: true }
    }
}

/// One end of the path.
pub struct Nic {
    /// The connection; none of a NIC whose rings somebody in this process answers.
    pub front: Option<FrontEnd>,
    /// Transmit belts, by pair.
    pub tx: Vec<Belt>,
    /// Receive belts, by pair.
    pub rx: Vec<Belt>,
    pub shape: Shape,
    pub mac: [u8; 6],
    /// Frames sent by each pair.
    sent: Vec<u64>,
    /// What is missing of the frame that is coming in, by pair.
    open: Vec<Open>,
    /// The eventfds of all queues' interrupts, to sleep on.
    calls: Vec<OwnedFd>,
    memory: GuestMemory,
}

/// The flow of a transmit buffer.
#[inline]
pub fn flow(pair: u16, slot: u16) -> u16 {
    pair * RING + slot
}

/// A frame of which some buffers have come.
#[derive(Debug, Clone, Copy, Default)]
struct Open {
    /// Buffers that are to come; zero between frames.
    buffers: u16,
    /// Bytes that came.
    bytes: u32,
}

impl Nic {
    /// Rings and buffers, filled with frames to `to`; nobody serves them yet.
    pub fn furnish(shape: Shape, mode: Mode, mac: [u8; 6], to: [u8; 6]) -> Result<Self> {
        let bytes = |slots: Slots| u64::from(slots.count) * u64::from(slots.stride) + (64 << 10);
        let each = bytes(shape.tx()) + bytes(shape.rx()) + (128 << 10);
        let mut memory = GuestMemory::new(u64::from(shape.pairs) * each + (64 << 10))?;
        memory.populate();
        let (mut tx, mut rx) = (Vec::new(), Vec::new());
        for _ in 0..shape.pairs {
            tx.push(Belt::new(&mut memory, RING, mode, shape.tx())?);
            rx.push(Belt::new(&mut memory, RING, mode, shape.rx())?);
        }
        let (sent, open) = (vec![0; shape.pairs.into()], vec![Open::default(); shape.pairs.into()]);
        let mut nic = Nic { front: None, tx, rx, shape, mac, sent, open, calls: Vec::new(), memory };
        nic.address(to, 0)?;
        Ok(nic)
    }

    /// Makes every frame one to `to`, filled after `salt`. Only while none is in flight.
    pub fn address(&mut self, to: [u8; 6], salt: u8) -> Result<()> {
        for (pair, belt) in (0..).zip(&self.tx) {
            for slot in 0..belt.slots().count {
                let bytes = template(self.shape.size, self.mac, to, flow(pair, slot), salt);
                self.memory.view().write(belt.buffers().gpa() + belt.at(slot) as u64, &bytes)?;
            }
        }
        Ok(())
    }

    /// Connects to the backend at `socket` and starts every ring, all receive buffers given.
    pub fn connect(socket: &Path, shape: Shape, mac: [u8; 6], to: [u8; 6]) -> Result<Self> {
        let front = FrontEnd::connect(socket, shape.wants())?;
        let features = front.features();
        let missing = shape.needs() & !features;
        ensure!(missing == 0, "the backend does not offer features {missing:#x} of {:#x}", shape.needs());
        let mode = Mode { packed: shape.packed, event_idx: features & VIRTIO_F_EVENT_IDX != 0 };
        let mut nic = Self::furnish(shape, mode, mac, to)?;
        front.share(&nic.memory)?;
        nic.front = Some(front);
        for pair in 0..shape.pairs {
            nic.start(2 * pair, true)?;
            nic.start(2 * pair + 1, false)?;
        }
        for pair in 0..shape.pairs {
            nic.refill(pair);
            nic.kick_rx(pair);
            nic.kick_tx(pair);
        }
        Ok(nic)
    }

    fn start(&mut self, index: u16, receives: bool) -> Result<()> {
        let belts = if receives { &self.rx } else { &self.tx };
        let belt = &belts[usize::from(index / 2)];
        let (place, base) = (belt.place(), belt.base());
        let front = self.front.as_mut().context("no connection")?;
        let user = |gpa| self.memory.user_of(gpa).context("a ring outside memory");
        front.tell(FrontEndRequest::SET_VRING_NUM, &vring_state(index, place.size.into()), &[])?;
        front.tell(FrontEndRequest::SET_VRING_BASE, &vring_state(index, base), &[])?;
        let mut body = vring_state(index, 0).to_vec();
        for address in [user(place.desc)?, user(place.used)?, user(place.avail)?, place.used] {
            body.extend_from_slice(&address.to_ne_bytes());
        }
        front.tell(FrontEndRequest::SET_VRING_ADDR, &body, &[])?;
        front.attach_events(index)?;
        let (_, call) = front.events(index).context("no eventfds")?;
        self.calls.push(call.as_fd().try_clone_to_owned()?);
        if front.features() & F_PROTOCOL_FEATURES != 0 {
            front.enable(index, true)?;
        }
        Ok(())
    }

    /// Gives every idle receive buffer of a pair to the device. True if it wants a kick.
    pub fn refill(&mut self, pair: u16) -> bool {
        let belt = &mut self.rx[usize::from(pair)];
        while let Some(slot) = belt.idle() {
            belt.put(slot);
        }
        belt.publish()
    }

    /// Kicks a pair's receive queue.
    pub fn kick_rx(&mut self, pair: u16) {
        if let Some(front) = &mut self.front {
            front.kick(2 * pair);
        }
    }

    /// Kicks a pair's transmit queue.
    pub fn kick_tx(&mut self, pair: u16) {
        if let Some(front) = &mut self.front {
            front.kick(2 * pair + 1);
        }
    }

    /// Takes back what was sent and sends up to `most` more frames by `pair`; kicks if that is wanted. Returns how many.
    #[inline]
    pub fn send(&mut self, pair: u16, most: u32) -> Result<u32> {
        let belt = &mut self.tx[usize::from(pair)];
        let number = &mut self.sent[usize::from(pair)];
        let mut sent = 0;
        if belt.idle_count() < most as usize {
            belt.reap()?;
        }
        while sent < most
            && let Some(slot) = belt.idle()
        {
            *number += 1;
            Stamp { flow: flow(pair, slot), number: *number }.put(
                belt.buffers(),
                belt.at(slot),
                self.shape.size,
            );
            belt.put(slot);
            sent += 1;
        }
        if sent > 0 && belt.publish() {
            self.kick_tx(pair);
        }
        Ok(sent)
    }

    /// Takes up to `most` (and a few more) frames that came by `pair`, shows the stamp of each to `look`, and gives the
    /// buffers back at once.
    #[inline]
    pub fn receive(
        &mut self,
        pair: u16,
        most: u32,
        mut look: impl FnMut(Stamp) -> Result<()>,
    ) -> Result<u32> {
        let (belt, size) = (&mut self.rx[usize::from(pair)], self.shape.size);
        let (mut frames, mut used) = (0, [Used::default(); TAKE]);
        let open = &mut self.open[usize::from(pair)];
        while frames < most {
            let count = belt.take(&mut used)?;
            for used in &used[..count] {
                if open.buffers == 0 {
                    let at = belt.at(used.slot);
                    open.buffers = belt.buffers().load_u16(at + NUM_BUFFERS).max(1);
                    look(Stamp::load(belt.buffers(), at, size))?;
                }
                open.buffers -= 1;
                open.bytes += used.len;
                belt.put(used.slot);
                if open.buffers == 0 {
                    if open.bytes != HEADER + size.bytes() {
                        bail!(
                            "a frame of {} bytes with its header, not {}",
                            open.bytes,
                            HEADER + size.bytes()
                        );
                    }
                    open.bytes = 0;
                    frames += 1;
                }
            }
            if count < TAKE {
                break;
            }
        }
        if belt.publish() {
            self.kick_rx(pair);
        }
        Ok(frames)
    }

    /// Takes one whole frame that came by `pair`, header and all, if there is one.
    pub fn collect(&mut self, pair: u16) -> Result<Option<Vec<u8>>> {
        let belt = &mut self.rx[usize::from(pair)];
        let (mut bytes, mut left, mut used) = (Vec::new(), 1, [Used::default()]);
        while left > 0 {
            if belt.take(&mut used)? == 0 {
                ensure!(
                    bytes.is_empty(),
                    "a frame ends {left} buffers too early: they were not used together"
                );
                return Ok(None);
            }
            let [Used { slot, len }] = used;
            if bytes.is_empty() {
                left = belt.buffers().load_u16(belt.at(slot) + NUM_BUFFERS).max(1);
            }
            let from = bytes.len();
            bytes.resize(from + len as usize, 0);
            self.memory.view().read(belt.buffers().gpa() + belt.at(slot) as u64, &mut bytes[from..])?;
            belt.put(slot);
            left -= 1;
        }
        if belt.publish() {
            self.kick_rx(pair);
        }
        Ok(Some(bytes))
    }

    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Sends one frame to `to` by the first pair, stamped as told; false if there is no room. The device sees it at the next
    /// [`Nic::show`].
    #[inline]
    pub fn send_to(&mut self, to: [u8; 6], stamp: Stamp) -> Result<bool> {
        let belt = &mut self.tx[0];
        if belt.idle_count() == 0 {
            belt.reap()?;
        }
        let Some(slot) = belt.idle() else { return Ok(false) };
        let at = belt.at(slot);
        let frame = at + HEADER as usize;
        belt.buffers().put_u32(frame, u32::from_le_bytes([to[0], to[1], to[2], to[3]]));
        belt.buffers().put_u16(frame + 4, u16::from_le_bytes([to[4], to[5]]));
        stamp.put(belt.buffers(), at, self.shape.size);
        belt.put(slot);
        Ok(true)
    }

    /// Shows the device what was sent, and kicks if that is wanted.
    #[inline]
    pub fn show(&mut self) {
        if self.tx[0].publish() {
            self.kick_tx(0);
        }
    }

    /// What was sent by `pair` so far.
    pub fn sent(&self, pair: u16) -> u64 {
        self.sent[usize::from(pair)]
    }

    /// Takes back whatever the device has sent; how many it still has.
    pub fn reap(&mut self) -> Result<u32> {
        let mut left = 0;
        for belt in &mut self.tx {
            belt.reap()?;
            left += u32::from(belt.in_flight());
        }
        Ok(left)
    }

    /// Says of every ring that interrupts are not wanted.
    pub fn quiet(&mut self) {
        self.tx.iter_mut().chain(&mut self.rx).for_each(Belt::quiet);
    }

    /// Asks for an interrupt at the next frame. False if there is one already.
    pub fn wake(&mut self) -> bool {
        self.rx.iter_mut().all(|belt| belt.wake_after(1))
    }

    /// The eventfds of its interrupts; [`Nic::notifications`] lowers them.
    pub fn calls(&self) -> &[OwnedFd] {
        &self.calls
    }

    /// Kicks sent and interrupts taken so far, all queues together.
    pub fn notifications(&mut self) -> (u64, u64) {
        let (mut kicks, mut calls) = (0, 0);
        let Some(front) = &mut self.front else { return (0, 0) };
        for index in 0..2 * self.shape.pairs {
            if let Some((kick, call)) = front.events(index) {
                call.take();
                kicks += kick.sum();
                calls += call.sum();
            }
        }
        (kicks, calls)
    }
}
