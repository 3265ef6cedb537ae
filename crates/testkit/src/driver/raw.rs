//! Any field of a ring, any value: what a hostile or broken guest does.

use ioplane_memory::Window;

use super::spec::*;

/// A descriptor as it lies in the table.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawDesc {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// VIRTQ_DESC_F_*.
    pub flags: u16,
    pub next: u16,
}

impl RawDesc {
    /// Writes it as entry `index` of any table of descriptors, an indirect one for instance.
    pub fn write(self, table: &Window, index: usize) {
        let at = DESC_SIZE as usize * index;
        table.put_u64(at, self.addr);
        table.put_u32(at + 8, self.len);
        table.put_u16(at + 12, self.flags);
        table.put_u16(at + 14, self.next);
    }

    pub fn read(table: &Window, index: usize) -> Self {
        let at = DESC_SIZE as usize * index;
        RawDesc {
            addr: table.load_u64(at),
            len: table.load_u32(at + 8),
            flags: table.load_u16(at + 12),
            next: table.load_u16(at + 14),
        }
    }
}

/// The bytes of a ring without the driver's books. Indexes beyond the ring panic: the test is wrong, not the device.
#[derive(Debug, Clone, Copy)]
pub struct RawRing<'a> {
    pub(super) size: u16,
    pub(super) desc: &'a Window,
    pub(super) avail: &'a Window,
    pub(super) used: &'a Window,
}

impl RawRing<'_> {
    /// Entries.
    pub fn size(&self) -> u16 {
        self.size
    }

    pub fn desc(&self, id: u16) -> RawDesc {
        RawDesc::read(self.desc, id.into())
    }

    /// Overwrites descriptor `id`.
    pub fn set_desc(&self, id: u16, desc: RawDesc) {
        desc.write(self.desc, id.into());
    }

    pub fn set_avail_flags(&self, flags: u16) {
        self.avail.put_u16(0, flags);
    }

    pub fn avail_idx(&self) -> u16 {
        self.avail.load_u16(2)
    }

    pub fn set_avail_idx(&self, idx: u16) {
        self.avail.put_u16(2, idx);
    }

    /// Overwrites entry `slot` of the available ring.
    pub fn set_avail_entry(&self, slot: u16, head: u16) {
        self.avail.put_u16(4 + 2 * usize::from(slot & (self.size - 1)), head);
    }

    /// Puts `head` at the end of the available ring and publishes it, whatever it names.
    pub fn offer(&self, head: u16) {
        let idx = self.avail_idx();
        self.set_avail_entry(idx, head);
        self.set_avail_idx(idx.wrapping_add(1));
    }

    /// `used_event`: at which used index the driver wants an interrupt.
    pub fn used_event(&self) -> u16 {
        self.avail.load_u16(4 + 2 * usize::from(self.size))
    }

    pub fn set_used_event(&self, value: u16) {
        self.avail.put_u16(4 + 2 * usize::from(self.size), value);
    }

    pub fn used_flags(&self) -> u16 {
        self.used.load_u16(0)
    }

    pub fn set_used_flags(&self, flags: u16) {
        self.used.put_u16(0, flags);
    }

    pub fn used_idx(&self) -> u16 {
        self.used.load_u16(2)
    }

    /// Overwrites `used.idx`, which is the device's: a guest can.
    pub fn set_used_idx(&self, idx: u16) {
        self.used.put_u16(2, idx);
    }

    /// Entry `slot` of the used ring: id and length.
    pub fn used_entry(&self, slot: u16) -> (u32, u32) {
        let at = 4 + USED_SIZE as usize * usize::from(slot & (self.size - 1));
        (self.used.load_u32(at), self.used.load_u32(at + 4))
    }

    /// Overwrites entry `slot` of the used ring.
    pub fn set_used_entry(&self, slot: u16, id: u32, len: u32) {
        let at = 4 + USED_SIZE as usize * usize::from(slot & (self.size - 1));
        self.used.put_u32(at, id);
        self.used.put_u32(at + 4, len);
    }

    /// `avail_event`: at which available index the device wants a kick.
    pub fn avail_event(&self) -> u16 {
        self.used.load_u16(4 + USED_SIZE as usize * usize::from(self.size))
    }

    pub fn set_avail_event(&self, value: u16) {
        self.used.put_u16(4 + USED_SIZE as usize * usize::from(self.size), value);
    }
}

/// A descriptor of a packed ring (2.8.13).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RawPackedDesc {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Buffer ID.
    pub id: u16,
    /// VIRTQ_DESC_F_*.
    pub flags: u16,
}

impl RawPackedDesc {
    /// Writes it as entry `index` of any table of descriptors, the flags last.
    pub fn write(self, table: &Window, index: usize) {
        let at = DESC_SIZE as usize * index;
        table.put_u64(at, self.addr);
        table.put_u32(at + 8, self.len);
        table.put_u16(at + 12, self.id);
        table.put_u16(at + 14, self.flags);
    }

    pub fn read(table: &Window, index: usize) -> Self {
        let at = DESC_SIZE as usize * index;
        RawPackedDesc {
            flags: table.load_u16(at + 14),
            addr: table.load_u64(at),
            len: table.load_u32(at + 8),
            id: table.load_u16(at + 12),
        }
    }
}

/// As [`RawRing`], of a packed ring.
#[derive(Debug, Clone, Copy)]
pub struct RawPacked<'a> {
    pub(super) desc: &'a Window,
    pub(super) driver: &'a Window,
    pub(super) device: &'a Window,
}

impl RawPacked<'_> {
    /// The descriptor in place `slot`.
    pub fn desc(&self, slot: u16) -> RawPackedDesc {
        RawPackedDesc::read(self.desc, slot.into())
    }

    pub fn set_desc(&self, slot: u16, desc: RawPackedDesc) {
        desc.write(self.desc, slot.into());
    }

    /// The driver's event suppression structure: offset and wrap counter, flags.
    pub fn driver_event(&self) -> (u16, u16) {
        let word = self.driver.load_u32(0);
        (word as u16, (word >> 16) as u16)
    }

    pub fn set_driver_event(&self, place: u16, flags: u16) {
        self.driver.put_u32(0, u32::from(place) | u32::from(flags) << 16);
    }

    /// The device's event suppression structure.
    pub fn device_event(&self) -> (u16, u16) {
        let word = self.device.load_u32(0);
        (word as u16, (word >> 16) as u16)
    }

    /// Overwrites it, which is the device's: a guest can.
    pub fn set_device_event(&self, place: u16, flags: u16) {
        self.device.put_u32(0, u32::from(place) | u32::from(flags) << 16);
    }
}
