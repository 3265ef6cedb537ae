//! Descriptor chains: the buffers of one request, read once and checked. The same for both kinds of ring.

use ioplane_memory::mutation::reads_twice;
use ioplane_memory::{GuestRange, GuestView, Span};

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
    descriptors: u32,
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
            descriptors: 0,
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

    /// Descriptors with a buffer that were read for it, kept or not: what reading it has cost.
    #[inline]
    pub fn descriptors(&self) -> u32 {
        self.descriptors
    }

    /// Forgets the last request.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
        (self.readable_bytes, self.writable_bytes, self.overlong) = (0, 0, false);
        self.descriptors = 0;
    }

    /// Adds the buffer of one descriptor of the request `head`.
    #[inline]
    pub(super) fn add(&mut self, desc: &Descriptor, head: u16) -> Result<(), RingFault> {
        self.descriptors += 1;
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

/// What a descriptor says (2.7.5, 2.8.13), but for the order it stands in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Descriptor {
    /// Guest address of the buffer, or of a table of descriptors.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// VIRTQ_DESC_F_*.
    pub flags: u16,
}

impl Descriptor {
    /// Itself: `again` is called only where a test has taken out that descriptors are read once.
    #[inline(always)]
    pub(super) fn once(self, again: impl FnOnce() -> Descriptor) -> Descriptor {
        if !reads_twice() {
            return self;
        }
        // Time for a driver's thread to come in between.
        (0..64).for_each(|_| std::hint::spin_loop());
        Descriptor { len: again().len, ..self }
    }

    /// The table that an indirect descriptor refers to, and how many descriptors it has.
    #[inline]
    pub(super) fn table<'v>(&self, view: &'v GuestView, head: u16) -> Result<(Span<'v>, u64), RingFault> {
        let bytes = u64::from(self.len);
        let count = bytes / DESC_SIZE;
        if count == 0 || bytes % DESC_SIZE != 0 || count > MAX_INDIRECT {
            return Err(RingFault::BadIndirect(head));
        }
        // The specification asks for no alignment of the table; it is copied out, not accessed in place.
        Ok((view.span(self.addr, bytes)?, count))
    }
}
