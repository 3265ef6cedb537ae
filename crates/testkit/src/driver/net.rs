//! One queue pair of a virtio-net device (virtio 1.3, 5.1.6) from the driver's side, and its control queue.
//!
//! ```text
//!   Pair: receive ring, filled with buffers made beforehand    take_frame -> read_frame -> (given back by the next)
//!         transmit ring, slots made beforehand                 send -> reap
//!   Commands: control queue, one command at a time             command -> ack
//! ```
//!
//! Written from the specification and from what Linux's driver does. Sending and receiving allocate nothing.

use ioplane_memory::{GuestView, Window};

use super::layout::{DriverError, Part, RingMode, RingPlace};
use super::memory::GuestMemory;
use super::ring::DriverRing;
use super::spec::DESC_SIZE;

/// Features of the device (5.1.3).
pub mod feature {
    pub const VIRTIO_NET_F_CSUM: u64 = 1 << 0;
    pub const VIRTIO_NET_F_GUEST_CSUM: u64 = 1 << 1;
    pub const VIRTIO_NET_F_CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    pub const VIRTIO_NET_F_MTU: u64 = 1 << 3;
    pub const VIRTIO_NET_F_MAC: u64 = 1 << 5;
    pub const VIRTIO_NET_F_GUEST_TSO4: u64 = 1 << 7;
    pub const VIRTIO_NET_F_GUEST_TSO6: u64 = 1 << 8;
    pub const VIRTIO_NET_F_GUEST_ECN: u64 = 1 << 9;
    pub const VIRTIO_NET_F_HOST_TSO4: u64 = 1 << 11;
    pub const VIRTIO_NET_F_HOST_TSO6: u64 = 1 << 12;
    pub const VIRTIO_NET_F_HOST_ECN: u64 = 1 << 13;
    pub const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
    pub const VIRTIO_NET_F_STATUS: u64 = 1 << 16;
    pub const VIRTIO_NET_F_CTRL_VQ: u64 = 1 << 17;
    pub const VIRTIO_NET_F_CTRL_RX: u64 = 1 << 18;
    pub const VIRTIO_NET_F_CTRL_VLAN: u64 = 1 << 19;
    pub const VIRTIO_NET_F_CTRL_RX_EXTRA: u64 = 1 << 20;
    pub const VIRTIO_NET_F_GUEST_ANNOUNCE: u64 = 1 << 21;
    pub const VIRTIO_NET_F_MQ: u64 = 1 << 22;
    pub const VIRTIO_NET_F_CTRL_MAC_ADDR: u64 = 1 << 23;
}

/// 5.1.6: the checksum from `csum_start` on is to be completed.
pub const VIRTIO_NET_HDR_F_NEEDS_CSUM: u8 = 1;
/// 5.1.6: the checksum has been verified.
pub const VIRTIO_NET_HDR_F_DATA_VALID: u8 = 2;
/// 5.1.6: one frame, as it is.
pub const VIRTIO_NET_HDR_GSO_NONE: u8 = 0;
/// 5.1.6: TCP over IPv4, to be segmented.
pub const VIRTIO_NET_HDR_GSO_TCPV4: u8 = 1;
/// 5.1.6: TCP over IPv6, to be segmented.
pub const VIRTIO_NET_HDR_GSO_TCPV6: u8 = 4;

/// 5.1.6.5: the command was carried out.
pub const VIRTIO_NET_OK: u8 = 0;
/// 5.1.6.5: it was not.
pub const VIRTIO_NET_ERR: u8 = 1;

/// The header before every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetHeader {
    /// VIRTIO_NET_HDR_F_*.
    pub flags: u8,
    /// VIRTIO_NET_HDR_GSO_*.
    pub gso_type: u8,
    /// Length of the headers, a hint.
    pub hdr_len: u16,
    /// Payload of each segment.
    pub gso_size: u16,
    /// Where the checksum begins.
    pub csum_start: u16,
    /// Where it is stored, from there on.
    pub csum_offset: u16,
    /// Buffers that hold the frame (not in the header of 10 bytes).
    pub num_buffers: u16,
}

impl NetHeader {
    /// Bytes of the header with `num_buffers`.
    pub const LONG: u32 = 12;
    /// Bytes of the header of a legacy driver without mergeable buffers.
    pub const SHORT: u32 = 10;

    /// As it lies in memory.
    pub fn to_bytes(self) -> [u8; Self::LONG as usize] {
        let mut bytes = [0; Self::LONG as usize];
        (bytes[0], bytes[1]) = (self.flags, self.gso_type);
        let words = [self.hdr_len, self.gso_size, self.csum_start, self.csum_offset, self.num_buffers];
        for (at, word) in bytes[2..].as_chunks_mut::<2>().0.iter_mut().zip(words) {
            *at = word.to_le_bytes();
        }
        bytes
    }

    pub fn from_bytes(bytes: [u8; Self::LONG as usize]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        NetHeader {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
            num_buffers: word(10),
        }
    }
}

/// How a frame lies in the transmit ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sending {
    /// Header and frame in one buffer, as Linux does where it can.
    Together,
    /// The header in a buffer of its own, then the frame.
    Apart,
    /// As `Apart`, in a table of their own (needs VIRTIO_F_INDIRECT_DESC).
    Indirect,
}

#[derive(Debug, Clone, Copy)]
pub struct PairPlan {
    /// Entries of each of the two rings.
    pub size: u16,
    /// Of both rings.
    pub mode: RingMode,
    /// Bytes of the header.
    pub header: u32,
    /// VIRTIO_NET_F_MRG_RXBUF: a frame may lie in several buffers.
    pub mergeable: bool,
    /// Receive buffers, at most `size`.
    pub buffers: u16,
    /// Bytes of each, header included.
    pub buffer_bytes: u32,
    /// Frames that can be on their way at once.
    pub slots: u16,
    /// Most bytes of one, without the header.
    pub slot_bytes: u32,
    /// How they lie in the ring.
    pub sending: Sending,
}

impl PairPlan {
    /// A pair as Linux makes it with mergeable buffers: rings of 256, buffers of 1536 bytes, frames of up to 64 KiB.
    pub fn mergeable(mode: RingMode) -> Self {
        PairPlan {
            size: 256,
            mode,
            header: NetHeader::LONG,
            mergeable: true,
            buffers: 256,
            buffer_bytes: 1536,
            slots: 16,
            slot_bytes: 66 << 10,
            sending: Sending::Together,
        }
    }
}

/// A frame that has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedFrame {
    pub header: NetHeader,
    /// Its bytes, without the header.
    pub len: usize,
}

#[derive(Debug)]
struct Slot {
    head: u16,
    /// The length that the descriptors were written for.
    len: Option<u32>,
}

/// One queue pair. Used by one thread.
#[derive(Debug)]
pub struct Pair {
    plan: PairPlan,
    view: GuestView,
    rx: DriverRing,
    tx: DriverRing,
    /// Receive buffer `n` lies at `rx_data + n * stride`, behind descriptor `rx_heads[n]`.
    rx_data: u64,
    rx_stride: u64,
    rx_heads: Vec<u16>,
    rx_owner: Vec<u16>,
    /// The frame taken last: its buffers, and how many bytes each holds.
    frame: Vec<(u16, u32)>,
    tx_data: u64,
    tx_stride: u64,
    tables: Window,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Slot of each head of ours.
    tx_owner: Vec<Option<u16>>,
}

/// Where the header lies in a transmit slot; the frame follows it.
const HEADER_AT: u64 = 64;

impl Pair {
    /// Carves both rings and everything in `plan` out of `memory`. The receive ring is empty until [`Pair::fill`].
    pub fn new(memory: &mut GuestMemory, plan: PairPlan) -> Result<Self, DriverError> {
        let places = [RingPlace::carve(memory, plan.size)?, RingPlace::carve(memory, plan.size)?];
        let rx = DriverRing::new(memory.view(), places[0], plan.mode)?;
        let tx = DriverRing::new(memory.view(), places[1], plan.mode)?;
        let rx_stride = u64::from(plan.buffer_bytes).next_multiple_of(64);
        let tx_stride = (HEADER_AT + u64::from(NetHeader::LONG + plan.slot_bytes)).next_multiple_of(64);
        let rx_data = memory.carve(u64::from(plan.buffers) * rx_stride, 4096)?.gpa();
        let tx_data = memory.carve(u64::from(plan.slots) * tx_stride, 4096)?.gpa();
        let tables = memory.carve(u64::from(plan.slots) * 2 * DESC_SIZE, 64)?;
        let mut pair = Pair {
            plan,
            view: memory.view().clone(),
            rx,
            tx,
            rx_data,
            rx_stride,
            rx_heads: Vec::new(),
            rx_owner: vec![0; plan.size.into()],
            frame: Vec::with_capacity(plan.buffers.into()),
            tx_data,
            tx_stride,
            tables,
            slots: Vec::new(),
            free: Vec::new(),
            tx_owner: Vec::new(),
        };
        pair.take_descriptors()?;
        Ok(pair)
    }

    fn take_descriptors(&mut self) -> Result<(), DriverError> {
        let full = DriverError::NoRoom { size: self.plan.size };
        self.rx_heads.clear();
        for buffer in 0..self.plan.buffers {
            let head = self.rx.reserve(1).ok_or(full)?;
            let gpa = self.rx_data + u64::from(buffer) * self.rx_stride;
            self.rx.lay(head, &[Part { gpa, len: self.plan.buffer_bytes, write: true }]);
            self.rx_owner[usize::from(head)] = buffer;
            self.rx_heads.push(head);
        }
        let each = if self.plan.sending == Sending::Apart { 2 } else { 1 };
        self.slots.clear();
        self.tx_owner = vec![None; self.plan.size.into()];
        for slot in 0..self.plan.slots {
            let head = self.tx.reserve(each).ok_or(full)?;
            self.tx_owner[usize::from(head)] = Some(slot);
            self.slots.push(Slot { head, len: None });
        }
        self.free = (0..self.plan.slots).rev().collect();
        self.frame.clear();
        Ok(())
    }

    /// Begins again with empty rings at index zero. Only while both queues are stopped; what was on its way is forgotten.
    pub fn reset(&mut self) -> Result<(), DriverError> {
        self.rx.reset();
        self.tx.reset();
        self.take_descriptors()
    }

    /// Where the rings lie: receive, transmit.
    pub fn places(&self) -> [RingPlace; 2] {
        [self.rx.place(), self.tx.place()]
    }

    /// The receive ring: kicks, interrupts, raw access.
    pub fn rx(&mut self) -> &mut DriverRing {
        &mut self.rx
    }

    /// The transmit ring. Chains that a test puts there itself come back by [`Pair::reap`] like others.
    pub fn tx(&mut self) -> &mut DriverRing {
        &mut self.tx
    }

    /// Makes up to `count` receive buffers available that never were, from buffer `from` on. Does not kick.
    pub fn fill_some(&mut self, from: u16, count: u16) {
        for buffer in from..from.saturating_add(count).min(self.plan.buffers) {
            self.rx.push(self.rx_heads[usize::from(buffer)]);
        }
    }

    /// Makes all receive buffers available: once, before anything is received.
    pub fn fill(&mut self) {
        self.fill_some(0, self.plan.buffers);
    }

    /// The next frame that has come. The buffers of the one before are made available again (without a kick).
    #[inline]
    pub fn take_frame(&mut self) -> Result<Option<ReceivedFrame>, DriverError> {
        self.give_back();
        self.hold_frame()
    }

    /// As [`Pair::take_frame`], but keeps the buffers of frames before: a driver that does not keep up.
    pub fn hold_frame(&mut self) -> Result<Option<ReceivedFrame>, DriverError> {
        self.frame.clear();
        let Some(first) = self.next_buffer()? else { return Ok(None) };
        let mut bytes = [0; NetHeader::LONG as usize];
        let header = self.plan.header as usize;
        self.view.read(self.buffer_gpa(first.0), &mut bytes[..header])?;
        let header = NetHeader::from_bytes(bytes);
        let mut len = first.1 as usize;
        self.frame.push(first);
        let count = if self.plan.mergeable { header.num_buffers } else { 1 };
        for _ in 1..count {
            // Published together (5.1.6.4): all of them are there.
            let next = self.next_buffer()?.ok_or(DriverError::HalfFrame { wanted: count })?;
            len += next.1 as usize;
            self.frame.push(next);
        }
        let len =
            len.checked_sub(self.plan.header as usize).ok_or(DriverError::HalfFrame { wanted: count })?;
        Ok(Some(ReceivedFrame { header, len }))
    }

    /// Makes the buffers of the frame taken last available again.
    #[inline]
    pub fn give_back(&mut self) {
        while let Some((buffer, _)) = self.frame.pop() {
            self.rx.push(self.rx_heads[usize::from(buffer)]);
        }
    }

    #[inline]
    fn next_buffer(&mut self) -> Result<Option<(u16, u32)>, DriverError> {
        let used = self.rx.pop()?;
        Ok(used.map(|used| (self.rx_owner[usize::from(used.head)], used.len)))
    }

    #[inline]
    fn buffer_gpa(&self, buffer: u16) -> u64 {
        self.rx_data + u64::from(buffer) * self.rx_stride
    }

    /// Copies the bytes of the frame taken last, without its header.
    pub fn read_frame(&self, out: &mut Vec<u8>) -> Result<(), DriverError> {
        out.clear();
        let mut skip = self.plan.header;
        for (buffer, len) in &self.frame {
            let (at, from) = (out.len(), u64::from(skip));
            out.resize(at + (len - skip) as usize, 0);
            self.view.read(self.buffer_gpa(*buffer) + from, &mut out[at..])?;
            skip = 0;
        }
        Ok(())
    }

    /// The slot that the next [`Pair::send`] takes; `None` while all are on their way.
    #[inline]
    pub fn next(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Guest address of a slot's frame, whose header lies before it.
    pub fn slot_gpa(&self, slot: u16) -> u64 {
        self.tx_data + u64::from(slot) * self.tx_stride + HEADER_AT
    }

    /// Puts a frame into the next slot and makes it available. Does not kick. False while all slots are on their way.
    pub fn send(&mut self, header: NetHeader, frame: &[u8]) -> Result<bool, DriverError> {
        let Some(slot) = self.next() else { return Ok(false) };
        self.write(slot, header, frame)?;
        Ok(self.send_again(frame.len() as u32))
    }

    /// Writes a frame into a slot that is not on its way.
    pub fn write(&self, slot: u16, header: NetHeader, frame: &[u8]) -> Result<(), DriverError> {
        let gpa = self.slot_gpa(slot);
        self.view
            .write(gpa - u64::from(self.plan.header), &header.to_bytes()[..self.plan.header as usize])?;
        Ok(self.view.write(gpa, frame)?)
    }

    /// Makes the next slot available with the `len` bytes of frame that are in it already. Does not kick.
    #[inline]
    pub fn send_again(&mut self, len: u32) -> bool {
        let Some(slot) = self.free.pop() else { return false };
        if self.slots[usize::from(slot)].len != Some(len) {
            self.describe(slot, len);
        }
        self.tx.push(self.slots[usize::from(slot)].head);
        true
    }

    #[cold]
    fn describe(&mut self, slot: u16, len: u32) {
        assert!(len <= self.plan.slot_bytes, "{len} bytes in a slot for {}", self.plan.slot_bytes);
        let (gpa, header) = (self.slot_gpa(slot), self.plan.header);
        let Slot { head, len: described } = &mut self.slots[usize::from(slot)];
        *described = Some(len);
        let apart = [
            Part { gpa: gpa - u64::from(header), len: header, write: false },
            Part { gpa, len, write: false },
        ];
        match self.plan.sending {
            Sending::Together => {
                let whole = Part { gpa: apart[0].gpa, len: header + len, write: false };
                self.tx.lay(*head, &[whole]);
            }
            Sending::Apart => self.tx.lay(*head, &apart),
            Sending::Indirect => self.tx.lay_indirect(*head, &apart, &self.tables, 2 * usize::from(slot)),
        }
    }

    /// Takes back what the device is done sending; says how many.
    #[inline]
    pub fn reap(&mut self) -> Result<u32, DriverError> {
        let mut count = 0;
        while let Some(used) = self.tx.pop()? {
            count += 1;
            match self.tx_owner[usize::from(used.head)] {
                Some(slot) => self.free.push(slot),
                None => self.tx.free(used.head),
            }
        }
        Ok(count)
    }

    /// Frames on their way out.
    pub fn sending(&self) -> u16 {
        self.tx.in_flight()
    }
}

/// Most bytes of one command.
const COMMAND: u64 = 4096;

/// The control queue, one command at a time.
#[derive(Debug)]
pub struct Commands {
    ring: DriverRing,
    view: GuestView,
    at: u64,
    ack: u64,
}

impl Commands {
    /// What the ack holds before the device stores one.
    pub const NO_ACK: u8 = 0xee;

    /// Carves a control queue of `size` entries out of `memory`.
    pub fn new(memory: &mut GuestMemory, size: u16, mode: RingMode) -> Result<Self, DriverError> {
        let place = RingPlace::carve(memory, size)?;
        let ring = DriverRing::new(memory.view(), place, mode)?;
        let at = memory.carve(COMMAND, 64)?.gpa();
        // The device writes there, and the driver nowhere near it.
        let ack = memory.carve(4096, 4096)?.gpa();
        Ok(Commands { ring, view: memory.view().clone(), at, ack })
    }

    pub fn place(&self) -> RingPlace {
        self.ring.place()
    }

    pub fn ring(&mut self) -> &mut DriverRing {
        &mut self.ring
    }

    /// Makes a command available: class, command and `data` in buffers of the lengths `pieces` (one buffer if empty), and a
    /// byte for the ack. Does not kick.
    pub fn put(&mut self, class: u8, command: u8, data: &[u8], pieces: &[u32]) -> Result<(), DriverError> {
        let bytes = [&[class, command], data].concat();
        self.view.write(self.at, &bytes)?;
        self.view.write(self.ack, &[Self::NO_ACK])?;
        let (mut parts, mut gpa) = (Vec::new(), self.at);
        let whole = [bytes.len() as u32];
        for len in if pieces.is_empty() { &whole } else { pieces } {
            parts.push(Part { gpa, len: *len, write: false });
            gpa += u64::from(*len);
        }
        parts.push(Part { gpa: self.ack, len: 1, write: true });
        let head = self.ring.chain(&parts).ok_or(DriverError::NoRoom { size: self.ring.place().size })?;
        self.ring.push(head);
        Ok(())
    }

    /// The answer to the command made available last, once it is there.
    pub fn ack(&mut self) -> Result<Option<u8>, DriverError> {
        let Some(used) = self.ring.pop()? else { return Ok(None) };
        self.ring.free(used.head);
        let mut ack = [0];
        self.view.read(self.ack, &mut ack)?;
        Ok(Some(ack[0]))
    }
}
