//! Descriptor chains: the buffers of one request, read once and checked.

use ioplane_memory::{GuestRange, GuestView, Window};

use super::RingFault;
use crate::spec::split::*;

/// Most buffers of one request that are kept. A driver that respects `seg_max` never comes near; a longer chain is walked to
/// its end, and [`Chain::overlong`] says so.
pub const MAX_BUFFERS: usize = 256;
/// Most descriptors in an indirect table: the size of the largest queue that anybody uses.
const MAX_INDIRECT: u64 = 1024;

/// The buffers of one request. One for each poller, used again and again: it never allocates after [`Chain::new`].
#[derive(Debug)]
pub struct Chain {
    readable: Vec<GuestRange>,
    writable: Vec<GuestRange>,
    readable_bytes: u64,
    writable_bytes: u64,
    overlong: bool,
}

impl Default for Chain {
    fn default() -> Self {
        Self::new()
    }
}

impl Chain {
    /// Room for any chain.
    pub fn new() -> Self {
        Chain {
            readable: Vec::with_capacity(MAX_BUFFERS),
            writable: Vec::with_capacity(MAX_BUFFERS),
            readable_bytes: 0,
            writable_bytes: 0,
            overlong: false,
        }
    }

    /// What the device may read, in order.
    #[inline]
    pub fn readable(&self) -> &[GuestRange] {
        &self.readable
    }

    /// What the device may write, in order. Of an overlong chain the last one is always the chain's last.
    #[inline]
    pub fn writable(&self) -> &[GuestRange] {
        &self.writable
    }

    /// Bytes that the device may read.
    #[inline]
    pub fn readable_bytes(&self) -> u64 {
        self.readable_bytes
    }

    /// Bytes that the device may write.
    #[inline]
    pub fn writable_bytes(&self) -> u64 {
        self.writable_bytes
    }

    /// Whether the chain had more buffers than are kept: the request cannot be carried out, only answered.
    #[inline]
    pub fn overlong(&self) -> bool {
        self.overlong
    }

    /// Reads the chain that begins at `head`. Every descriptor is read exactly once: a driver that changes it meanwhile
    /// changes nothing.
    #[inline]
    pub(super) fn read(
        &mut self,
        view: &GuestView,
        table: &Window,
        size: u16,
        indirect: bool,
        head: u16,
    ) -> Result<(), RingFault> {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes, self.overlong) = (0, 0, false);
        let mut index = head;
        for _ in 0..size {
            if index >= size {
                return Err(RingFault::BadDescriptor(index));
            }
            let desc = Descriptor::parse(table.bytes(usize::from(index) * DESC_SIZE as usize));
            if desc.flags & VIRTQ_DESC_F_INDIRECT != 0 {
                if !indirect || desc.flags & VIRTQ_DESC_F_NEXT != 0 {
                    return Err(RingFault::BadIndirect(index));
                }
                return self.read_indirect(view, &desc, head);
            }
            self.add(&desc, head)?;
            if desc.flags & VIRTQ_DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = desc.next;
        }
        Err(RingFault::Loop(head))
    }

    #[inline]
    fn read_indirect(&mut self, view: &GuestView, desc: &Descriptor, head: u16) -> Result<(), RingFault> {
        let bytes = u64::from(desc.len);
        let count = bytes / DESC_SIZE;
        if count == 0 || bytes % DESC_SIZE != 0 || count > MAX_INDIRECT {
            return Err(RingFault::BadIndirect(head));
        }
        // The specification asks for no alignment of the table; it is copied out, not accessed in place.
        let table = view.window(desc.addr, bytes, 1)?;
        let mut index = 0u64;
        for _ in 0..count {
            if index >= count {
                return Err(RingFault::BadDescriptor(index as u16));
            }
            let desc = Descriptor::parse(table.bytes((index * DESC_SIZE) as usize));
            if desc.flags & VIRTQ_DESC_F_INDIRECT != 0 {
                return Err(RingFault::BadIndirect(head));
            }
            self.add(&desc, head)?;
            if desc.flags & VIRTQ_DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = u64::from(desc.next);
        }
        Err(RingFault::Loop(head))
    }

    #[inline]
    fn add(&mut self, desc: &Descriptor, head: u16) -> Result<(), RingFault> {
        let range = GuestRange { gpa: desc.addr, len: desc.len };
        let (list, bytes) = if desc.flags & VIRTQ_DESC_F_WRITE != 0 {
            (&mut self.writable, &mut self.writable_bytes)
        } else {
            if !self.writable.is_empty() {
                return Err(RingFault::ReadableAfterWritable(head));
            }
            (&mut self.readable, &mut self.readable_bytes)
        };
        *bytes += u64::from(desc.len);
        if self.readable_bytes + self.writable_bytes > u64::from(u32::MAX) {
            return Err(RingFault::TooLong(head));
        }
        if list.len() < MAX_BUFFERS {
            list.push(range);
        } else {
            self.overlong = true;
            list[MAX_BUFFERS - 1] = range;
        }
        Ok(())
    }
}

/// One descriptor (2.7.5).
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    #[inline]
    fn parse(bytes: [u8; DESC_SIZE as usize]) -> Self {
        let word = u128::from_le_bytes(bytes);
        Descriptor {
            addr: word as u64,
            len: (word >> 64) as u32,
            flags: (word >> 96) as u16,
            next: (word >> 112) as u16,
        }
    }
}
