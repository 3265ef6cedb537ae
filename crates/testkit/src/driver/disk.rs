//! virtio-blk requests (virtio 1.3, 5.2.6) in slots made beforehand: submitting one stores a header and a ring entry.

use ioplane_memory::{GuestView, Window};

use super::layout::{DriverError, Part, RingMode, RingPlace};
use super::memory::GuestMemory;
use super::ring::DriverRing;
use super::spec::*;

/// What a request asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DiskOp {
    /// VIRTIO_BLK_T_IN.
    Read,
    /// VIRTIO_BLK_T_OUT.
    Write,
    /// VIRTIO_BLK_T_FLUSH: no data.
    Flush,
    /// VIRTIO_BLK_T_DISCARD of one range.
    Discard,
    /// VIRTIO_BLK_T_WRITE_ZEROES of one range, with or without leave to unmap.
    WriteZeroes {
        /// VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP.
        unmap: bool,
    },
    /// VIRTIO_BLK_T_GET_ID: 20 bytes into the data buffer.
    Id,
    /// Any type at all, with data that the device reads or writes.
    Other {
        /// The `type` field.
        kind: u32,
        /// Whether the device writes the data.
        write: bool,
    },
}

impl DiskOp {
    fn kind(self) -> u32 {
        match self {
            DiskOp::Read => VIRTIO_BLK_T_IN,
            DiskOp::Write => VIRTIO_BLK_T_OUT,
            DiskOp::Flush => VIRTIO_BLK_T_FLUSH,
            DiskOp::Discard => VIRTIO_BLK_T_DISCARD,
            DiskOp::WriteZeroes { .. } => VIRTIO_BLK_T_WRITE_ZEROES,
            DiskOp::Id => VIRTIO_BLK_T_GET_ID,
            DiskOp::Other { kind, .. } => kind,
        }
    }

    /// Whether the device writes the data part.
    fn writes(self) -> bool {
        matches!(self, DiskOp::Read | DiskOp::Id | DiskOp::Other { write: true, .. })
    }
}

/// How a request lies in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// A chain in the table itself: `segments` + 2 descriptors.
    Direct,
    /// One descriptor that points to a table, as Linux does where it can (needs VIRTIO_F_INDIRECT_DESC).
    Indirect,
}

/// How many requests may be in flight at once, and how large.
#[derive(Debug, Clone, Copy)]
pub struct DiskPlan {
    /// Requests in flight at most.
    pub slots: u16,
    /// Most data of one request, bytes; a multiple of `segments` sectors.
    pub max_bytes: u32,
    /// Equal parts that the data is split into.
    pub segments: u16,
    /// Direct or indirect.
    pub shape: Shape,
}

impl DiskPlan {
    /// `slots` requests of up to `max_bytes` in one piece.
    pub fn new(slots: u16, max_bytes: u32, shape: Shape) -> Self {
        DiskPlan { slots, max_bytes, segments: 1, shape }
    }
}

/// Names a request in flight: its slot, below [`DiskPlan::slots`], good for indexing the caller's own table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u16);

impl Token {
    #[inline]
    pub fn slot(self) -> usize {
        self.0.into()
    }
}

/// A request that the device is done with. Its data stays in place until the slot is submitted again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Done {
    pub token: Token,
    /// VIRTIO_BLK_S_*; [`Done::NO_STATUS`] if the device stored none.
    pub status: u8,
    /// Bytes the device says it wrote, status included.
    pub len: u32,
}

impl Done {
    /// What the status byte holds before the device stores one.
    pub const NO_STATUS: u8 = 0xee;

    /// Whether the status is VIRTIO_BLK_S_OK.
    #[inline]
    pub fn ok(&self) -> bool {
        self.status == VIRTIO_BLK_S_OK
    }
}

/// A slot's header and status share a cache line, as they do in Linux's request; its table has one of its own.
const CELL: usize = 64;
const STATUS_AT: usize = 16;

#[derive(Debug)]
struct Slot {
    head: u16,
    /// The data's direction and length that the descriptors were written for.
    template: Option<(bool, u32)>,
    data: u64,
}

/// A queue of a virtio-blk device from the driver's side. Used by one thread; allocates only in `new` and `reset`.
#[derive(Debug)]
pub struct Disk {
    ring: DriverRing,
    plan: DiskPlan,
    view: GuestView,
    cells: Window,
    tables: Window,
    table_bytes: usize,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Slot of each head.
    owner: Vec<u16>,
}

impl Disk {
    /// Carves a ring of `size` entries and everything in `plan` out of `memory`.
    pub fn new(
        memory: &mut GuestMemory,
        size: u16,
        mode: RingMode,
        plan: DiskPlan,
    ) -> Result<Self, DriverError> {
        let place = RingPlace::carve(memory, size)?;
        let ring = DriverRing::new(memory.view(), place, mode)?;
        let slots = u64::from(plan.slots);
        let table_bytes = (usize::from(plan.segments) + 2) * DESC_SIZE as usize;
        let table_bytes = table_bytes.next_multiple_of(CELL);
        let cells = memory.carve(slots * CELL as u64, CELL as u64)?;
        let tables = memory.carve(slots * table_bytes as u64, CELL as u64)?;
        let data = memory.carve(slots * u64::from(plan.max_bytes), 4096)?.gpa();
        let view = memory.view().clone();
        let owner = vec![0; size.into()];
        let mut disk =
            Disk { ring, plan, view, cells, tables, table_bytes, slots: Vec::new(), free: Vec::new(), owner };
        for slot in 0..slots {
            disk.slots.push(Slot { head: 0, template: None, data: data + slot * u64::from(plan.max_bytes) });
        }
        disk.take_descriptors()?;
        Ok(disk)
    }

    fn take_descriptors(&mut self) -> Result<(), DriverError> {
        let size = self.ring.place().size;
        let each = match self.plan.shape {
            Shape::Direct => usize::from(self.plan.segments) + 2,
            Shape::Indirect => 1,
        };
        for (index, slot) in self.slots.iter_mut().enumerate() {
            slot.head = self.ring.reserve(each).ok_or(DriverError::NoRoom { size })?;
            slot.template = None;
            self.owner[usize::from(slot.head)] = index as u16;
        }
        self.free = (0..self.plan.slots).rev().collect();
        Ok(())
    }

    /// Begins again with an empty ring at index zero. Only while the queue is stopped; what was in flight is forgotten.
    pub fn reset(&mut self) -> Result<(), DriverError> {
        self.ring.reset();
        self.take_descriptors()
    }

    /// The ring underneath: kicks, interrupts, raw access.
    #[inline]
    pub fn ring(&mut self) -> &mut DriverRing {
        &mut self.ring
    }

    pub fn place(&self) -> RingPlace {
        self.ring.place()
    }

    /// Requests in the device's hands.
    #[inline]
    pub fn in_flight(&self) -> u16 {
        self.ring.in_flight()
    }

    /// Guest address of the slot's data buffer of [`DiskPlan::max_bytes`].
    pub fn data_gpa(&self, token: Token) -> u64 {
        self.slots[token.slot()].data
    }

    /// Guest address of the slot's header (16 bytes; the status byte lies 16 behind it).
    pub fn header_gpa(&self, token: Token) -> u64 {
        self.cells.gpa() + (token.slot() * CELL) as u64
    }

    /// The slot's head descriptor, or buffer ID, for tests that spoil it through [`DriverRing::raw`].
    pub fn head(&self, token: Token) -> u16 {
        self.slots[token.slot()].head
    }

    /// The window on the slot's indirect table.
    pub fn table(&self, token: Token) -> Result<Window, DriverError> {
        let at = self.tables.gpa() + (token.slot() * self.table_bytes) as u64;
        Ok(self.view.window(at, self.table_bytes as u64, 16)?)
    }

    /// Copies the first bytes of the slot's data out: of a read that is done, before the slot is submitted again.
    pub fn read_data(&self, token: Token, out: &mut [u8]) -> Result<(), DriverError> {
        Ok(self.view.read(self.slots[token.slot()].data, out)?)
    }

    /// The slot that the next [`Disk::submit`] takes: fill its data first. `None` when all are in flight.
    #[inline]
    pub fn next(&self) -> Option<Token> {
        self.free.last().map(|slot| Token(*slot))
    }

    /// Fills the data of `token`, which is not in flight.
    pub fn write_data(&self, token: Token, bytes: &[u8]) -> Result<(), DriverError> {
        Ok(self.view.write(self.slots[token.slot()].data, bytes)?)
    }

    /// Makes a request available; does not kick. `sector` counts 512 bytes. `bytes` is the length of the data, and of the
    /// range for discard and write zeroes (whose data is the range itself); zero for flush. `None` when all slots are busy.
    #[inline]
    pub fn submit(&mut self, op: DiskOp, sector: u64, bytes: u32) -> Option<Token> {
        let token = Token(self.free.pop()?);
        self.prepare(token, op, sector, bytes);
        self.ring.push(self.slots[token.slot()].head);
        Some(token)
    }

    /// As [`Disk::submit`] up to the moment before it is made available: the caller may spoil it and then [`Disk::push`].
    pub fn stage(&mut self, op: DiskOp, sector: u64, bytes: u32) -> Option<Token> {
        let token = Token(self.free.pop()?);
        self.prepare(token, op, sector, bytes);
        Some(token)
    }

    /// Makes a staged request available.
    pub fn push(&mut self, token: Token) {
        self.ring.push(self.slots[token.slot()].head);
    }

    #[inline]
    fn prepare(&mut self, token: Token, op: DiskOp, sector: u64, bytes: u32) {
        let index = token.slot();
        let (len, header_sector) = match op {
            DiskOp::Read | DiskOp::Write | DiskOp::Other { .. } => (bytes, sector),
            DiskOp::Flush => (0, 0),
            DiskOp::Id => (VIRTIO_BLK_ID_BYTES, 0),
            DiskOp::Discard | DiskOp::WriteZeroes { .. } => {
                self.write_range(index, op, sector, bytes);
                (16, 0)
            }
        };
        let template = Some((op.writes(), len));
        if self.slots[index].template != template {
            self.write_template(index, op.writes(), len);
            self.slots[index].template = template;
        }
        let cell = index * CELL;
        self.cells.put_u32(cell, op.kind());
        self.cells.put_u64(cell + 8, header_sector);
        self.cells.put_u8(cell + STATUS_AT, Done::NO_STATUS);
    }

    /// The 16 bytes of `struct virtio_blk_discard_write_zeroes`.
    fn write_range(&self, index: usize, op: DiskOp, sector: u64, bytes: u32) {
        let unmap = matches!(op, DiskOp::WriteZeroes { unmap: true });
        let mut range = [0u8; 16];
        range[..8].copy_from_slice(&sector.to_le_bytes());
        range[8..12].copy_from_slice(&(bytes / SECTOR as u32).to_le_bytes());
        let flags = if unmap { VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP } else { 0 };
        range[12..].copy_from_slice(&flags.to_le_bytes());
        let _ = self.view.write(self.slots[index].data, &range);
    }

    /// Writes all descriptors of a slot: header, the data in as many segments as it takes, status.
    #[cold]
    fn write_template(&mut self, index: usize, write: bool, len: u32) {
        assert!(len <= self.plan.max_bytes, "{len} bytes in a slot for {}", self.plan.max_bytes);
        let slot = &self.slots[index];
        let cell = self.cells.gpa() + (index * CELL) as u64;
        let piece = (self.plan.max_bytes / u32::from(self.plan.segments)).max(1);
        let pieces = len.div_ceil(piece);
        let count = pieces as usize + 2;
        let part = |at: usize| {
            if at == 0 {
                return Part { gpa: cell, len: 16, write: false };
            }
            if at == count - 1 {
                return Part { gpa: cell + STATUS_AT as u64, len: 1, write: true };
            }
            let from = (at as u32 - 1) * piece;
            Part { gpa: slot.data + u64::from(from), len: piece.min(len - from), write }
        };
        let parts: Vec<Part> = (0..count).map(part).collect();
        let head = slot.head;
        match self.plan.shape {
            Shape::Direct => self.ring.lay(head, &parts),
            Shape::Indirect => {
                let from = index * self.table_bytes / DESC_SIZE as usize;
                self.ring.lay_indirect(head, &parts, &self.tables, from);
            }
        }
    }

    /// Takes the next completed request, if there is one; its slot is free again.
    #[inline]
    pub fn reap(&mut self) -> Result<Option<Done>, DriverError> {
        let Some(used) = self.ring.pop()? else { return Ok(None) };
        let slot = self.owner[usize::from(used.head)];
        self.free.push(slot);
        let status = self.cells.load_u8(usize::from(slot) * CELL + STATUS_AT);
        Ok(Some(Done { token: Token(slot), status, len: used.len }))
    }
}
