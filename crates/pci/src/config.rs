//! The configuration space of a function: a type 0 header and a list of capabilities (PCI 3.0, 6.1 and 6.7).

use crate::bars::{BarMap, Space};
use crate::function::Irqs;
use crate::spec;

/// Who a function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Identity {
    /// Vendor.
    pub vendor: u16,
    /// Device, by that vendor.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Class, subclass, programming interface, from the highest byte: 0x020000 is an Ethernet controller.
    pub class: u32,
    /// Vendor and device of the board.
    pub subsystem: (u16, u16),
}

/// A capability to be offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Capability {
    /// So many MSI vectors, a power of two up to 32, with 64-bit addresses; perhaps with mask bits.
    Msi {
        /// Vectors.
        vectors: u16,
        /// Whether each can be masked.
        masking: bool,
    },
    /// So many MSI-X vectors; where the table and the pending bits lie.
    Msix {
        /// Vectors.
        vectors: u16,
        /// BAR and offset of the table.
        table: (u8, u32),
        /// BAR and offset of the pending bits.
        pending: (u8, u32),
    },
    /// PCI Express with function-level reset.
    Express,
    /// Vendor-specific bytes, which the guest can only read.
    Vendor(Vec<u8>),
}

/// What a write to the configuration space has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigChange {
    /// The command register: [`ConfigSpace::command`].
    Command,
    /// Function-level reset was asked for.
    Reset,
    /// Something else, or nothing.
    Other,
}

/// The bytes, and which bits of them can be written.
#[derive(Debug, Clone)]
pub struct ConfigSpace {
    bytes: Box<[u8; spec::CONFIG_SIZE]>,
    writable: Box<[u8; spec::CONFIG_SIZE]>,
    /// As at power-on.
    fresh: Box<[u8; spec::CONFIG_SIZE]>,
    express: Option<usize>,
    next: usize,
    last: usize,
}

impl ConfigSpace {
    /// Of a function with these BARs and interrupts, without capabilities.
    pub fn new(identity: &Identity, bars: &BarMap, irqs: Irqs) -> Self {
        let zero = || Box::new([0; spec::CONFIG_SIZE]);
        let (bytes, writable, fresh) = (zero(), zero(), zero());
        let mut space = ConfigSpace {
            bytes,
            writable,
            fresh,
            express: None,
            next: spec::HEADER_END,
            last: spec::CAPABILITIES,
        };
        space.put(spec::VENDOR_ID, &identity.vendor.to_le_bytes());
        space.put(spec::DEVICE_ID, &identity.device.to_le_bytes());
        space.put(spec::REVISION_ID, &[identity.revision]);
        space.put(spec::CLASS_CODE, &identity.class.to_le_bytes()[..3]);
        space.put(spec::SUBSYSTEM_VENDOR_ID, &identity.subsystem.0.to_le_bytes());
        space.put(spec::SUBSYSTEM_ID, &identity.subsystem.1.to_le_bytes());
        let mut command = spec::COMMAND_MASTER | spec::COMMAND_PARITY | spec::COMMAND_SERR;
        if irqs.intx > 0 {
            space.put(spec::INTERRUPT_PIN, &[1]);
            command |= spec::COMMAND_INTX_DISABLE;
        }
        for (index, bar) in bars.iter() {
            let at = spec::BAR0 + 4 * usize::from(index);
            let mask = !(bar.size - 1);
            let kind = match bar.space {
                Space::Port => spec::BAR_IO,
                Space::Memory32 => 0,
                Space::Memory64 => spec::BAR_MEMORY_64,
            };
            let kind = if bar.prefetchable { kind | spec::BAR_PREFETCHABLE } else { kind };
            space.put(at, &kind.to_le_bytes());
            let low = mask as u32 & if bar.space == Space::Port { !0x3 } else { !0xf };
            space.allow(at, &low.to_le_bytes());
            if bar.space == Space::Memory64 {
                space.allow(at + 4, &((mask >> 32) as u32).to_le_bytes());
            }
            command |= if bar.space == Space::Port { spec::COMMAND_IO } else { spec::COMMAND_MEMORY };
        }
        space.allow(spec::COMMAND, &command.to_le_bytes());
        for byte in [spec::CACHE_LINE_SIZE, spec::LATENCY_TIMER, spec::INTERRUPT_LINE] {
            space.allow(byte, &[0xff]);
        }
        space
    }

    /// What the function says of itself: there again after a reset.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.fresh[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn allow(&mut self, at: usize, bits: &[u8]) {
        self.writable[at..at + bits.len()].copy_from_slice(bits);
    }

    fn get16(&self, at: usize) -> u16 {
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    /// Offers a capability; says at which offset. `None` if there is no room for it.
    pub fn add(&mut self, capability: &Capability) -> Option<usize> {
        type Writable = Vec<(usize, Vec<u8>)>;
        let (id, body, writable): (u8, Vec<u8>, Writable) = match capability {
            Capability::Msi { vectors, masking } => {
                let log = u16::from(vectors.clamp(&1, &32).next_power_of_two().trailing_zeros() as u8);
                let masks = if *masking { spec::MSI_MASKING } else { 0 };
                let control = log << 1 | spec::MSI_64 | masks;
                let mut body = control.to_le_bytes().to_vec();
                body.resize(if *masking { 22 } else { 12 }, 0);
                let mut writable = vec![
                    (2, (spec::MSI_ENABLE | 7 << 4).to_le_bytes().to_vec()),
                    (4, vec![0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
                    (12, vec![0xff, 0xff]),
                ];
                if *masking {
                    writable.push((16, vec![0xff; 4]));
                }
                (spec::CAP_MSI, body, writable)
            }
            Capability::Msix { vectors, table, pending } => {
                let mut body = (vectors.clamp(&1, &2048) - 1).to_le_bytes().to_vec();
                body.extend((table.1 & !7 | u32::from(table.0 & 7)).to_le_bytes());
                body.extend((pending.1 & !7 | u32::from(pending.0 & 7)).to_le_bytes());
                let control = spec::MSIX_ENABLE | spec::MSIX_FUNCTION_MASK;
                (spec::CAP_MSIX, body, vec![(2, control.to_le_bytes().to_vec())])
            }
            Capability::Express => {
                let mut body = spec::EXPRESS_INTEGRATED.to_le_bytes().to_vec();
                body.extend(spec::EXPRESS_FLR.to_le_bytes());
                body.resize(58, 0);
                // Error reporting, relaxed ordering, payload and read request sizes; the reset bit reads as zero.
                (spec::CAP_EXPRESS, body, vec![(8, vec![0xff, 0x7f])])
            }
            Capability::Vendor(bytes) => {
                let len = u8::try_from(bytes.len() + 3).ok()?;
                let mut body = vec![len];
                body.extend(bytes);
                (spec::CAP_VENDOR, body, Vec::new())
            }
        };
        let at = self.next;
        let end = at + 2 + body.len();
        if end > spec::CONFIG_SIZE {
            return None;
        }
        let place = u8::try_from(at).ok()?;
        self.put(self.last, &[place]);
        self.put(at, &[id, 0]);
        self.put(at + 2, &body);
        for (offset, bits) in writable {
            self.allow(at + offset, &bits);
        }
        if id == spec::CAP_EXPRESS {
            self.express = Some(at);
        }
        let status = self.get16(spec::STATUS) | spec::STATUS_CAPABILITIES;
        self.put(spec::STATUS, &status.to_le_bytes());
        (self.last, self.next) = (at + 1, end.next_multiple_of(4));
        Some(at)
    }

    /// A read by the guest. What lies beyond the end reads as all ones.
    pub fn read(&self, offset: u64, out: &mut [u8]) {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in out.iter_mut().enumerate() {
            *byte = self.bytes.get(start.saturating_add(at)).copied().unwrap_or(0xff);
        }
    }

    /// A write by the guest. Bits that cannot be written keep their value.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> ConfigChange {
        let before = self.command();
        let mut change = ConfigChange::Other;
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        for (at, byte) in bytes.iter().enumerate() {
            let at = start.saturating_add(at);
            if at >= spec::CONFIG_SIZE {
                break;
            }
            let mask = self.writable[at];
            self.bytes[at] = self.bytes[at] & !mask | byte & mask;
            // The upper byte of device control: initiate function-level reset.
            let reset = self.express.is_some_and(|e| at == e + spec::EXPRESS_DEVICE_CONTROL + 1);
            if reset && byte & (spec::EXPRESS_INITIATE_FLR >> 8) as u8 != 0 {
                change = ConfigChange::Reset;
            }
        }
        match change {
            ConfigChange::Other if self.command() != before => ConfigChange::Command,
            other => other,
        }
    }

    /// The command register.
    pub fn command(&self) -> u16 {
        self.get16(spec::COMMAND)
    }

    /// Whether the function may use memory of others.
    pub fn bus_master(&self) -> bool {
        self.command() & spec::COMMAND_MASTER != 0
    }

    /// Whether the command register forbids INTA#.
    pub fn intx_disabled(&self) -> bool {
        self.command() & spec::COMMAND_INTX_DISABLE != 0
    }

    /// The interrupt bit of the status register.
    pub fn set_interrupt(&mut self, up: bool) {
        let status = self.get16(spec::STATUS);
        let status = if up { status | spec::STATUS_INTERRUPT } else { status & !spec::STATUS_INTERRUPT };
        self.bytes[spec::STATUS..spec::STATUS + 2].copy_from_slice(&status.to_le_bytes());
    }

    /// As at power-on: what a function-level reset does.
    pub fn reset(&mut self) {
        self.bytes = self.fresh.clone();
    }

    /// What the guest has written: to be saved. All of the space.
    pub fn save(&self) -> Vec<u8> {
        self.bytes.to_vec()
    }

    /// Takes saved bytes over: of these only what a guest can have written. False if they are not as many as there should be.
    pub fn load(&mut self, saved: &[u8]) -> bool {
        if saved.len() != spec::CONFIG_SIZE {
            return false;
        }
        let fixed = self.fresh.iter().zip(self.writable.iter());
        for ((byte, saved), (fresh, mask)) in self.bytes.iter_mut().zip(saved).zip(fixed) {
            *byte = fresh & !mask | saved & mask;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::Bar;

    fn space() -> ConfigSpace {
        let identity =
            Identity { vendor: 0x10ec, device: 0x8139, revision: 0x20, class: 0x020000, subsystem: (1, 2) };
        let bars =
            BarMap::new().with(0, Bar::new(256, Space::Port)).with(1, Bar::new(1 << 33, Space::Memory64));
        ConfigSpace::new(&identity, &bars, Irqs { intx: 1, ..Irqs::default() })
    }

    fn word(space: &ConfigSpace, at: usize) -> u32 {
        let mut bytes = [0; 4];
        space.read(at as u64, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    #[test]
    fn a_bar_tells_its_size() {
        let mut space = space();
        assert_eq!(word(&space, 0), 0x8139_10ec);
        assert_eq!(word(&space, 8), 0x0200_0020);
        for at in (0x10..0x28).step_by(4) {
            space.write(at, &[0xff; 4]);
        }
        assert_eq!(word(&space, 0x10), 0xffff_ff01);
        assert_eq!((word(&space, 0x14), word(&space, 0x18)), (4, 0xffff_fffe));
        assert_eq!(word(&space, 0x1c), 0, "no such BAR");
        let mut beyond = [0; 4];
        space.read(254, &mut beyond);
        assert_eq!(beyond, [0, 0, 0xff, 0xff]);
        assert_eq!(space.write(u64::MAX, &[1; 8]), ConfigChange::Other);
    }

    #[test]
    fn the_command_register_and_reset_are_told() {
        let mut space = space();
        assert_eq!(space.write(4, &[0xff, 0xff]), ConfigChange::Command);
        assert_eq!(space.command(), 0x547, "I/O, memory, master, parity, SERR, interrupt disable");
        assert!(space.bus_master() && space.intx_disabled());
        assert_eq!(space.write(4, &[0xff, 0xff]), ConfigChange::Other, "nothing new");
        let at = space.add(&Capability::Express).expect("room");
        assert_eq!(space.write(at as u64 + 8, &[0, 0x80]), ConfigChange::Reset);
        assert_eq!(word(&space, at + 8) & 0x8000, 0, "the bit reads as zero");
        space.set_interrupt(true);
        assert_eq!(word(&space, 4) >> 16 & 8, 8);
        space.reset();
        assert_eq!(space.command(), 0);
    }

    #[test]
    fn capabilities_form_a_list_until_there_is_no_room() {
        let mut space = space();
        let msi = space.add(&Capability::Msi { vectors: 4, masking: true }).expect("room");
        let msix = Capability::Msix { vectors: 3, table: (3, 0), pending: (3, 0x800) };
        let msix = space.add(&msix).expect("room");
        let vendor = space.add(&Capability::Vendor(vec![7, 8, 9])).expect("room");
        let mut at = word(&space, 0x34) as u8;
        let mut seen = Vec::new();
        while at != 0 {
            let head = word(&space, at.into());
            seen.push((usize::from(at), head as u8));
            at = (head >> 8) as u8;
        }
        assert_eq!(seen, [(msi, spec::CAP_MSI), (msix, spec::CAP_MSIX), (vendor, spec::CAP_VENDOR)]);
        assert_eq!(word(&space, msix) >> 16, 2, "one less than there are");
        assert_eq!(word(&space, msix + 8), 0x803);
        assert_eq!(word(&space, msi) >> 16, 0x184, "four vectors, 64 bits, masks");
        assert_eq!(space.add(&Capability::Vendor(vec![0; 253])), None, "too long for its length field");
        assert_eq!(space.add(&Capability::Vendor(vec![0; 200])), None, "no room");
    }

    #[test]
    fn loaded_bytes_change_only_what_a_guest_could() {
        let mut space = space();
        space.write(4, &[7, 0]);
        let saved = space.save();
        space.reset();
        assert!(space.load(&saved));
        assert_eq!(space.command(), 7);
        assert!(space.load(&[0xff; 256]));
        assert_eq!(word(&space, 0), 0x8139_10ec);
        assert!(!space.load(&[0; 255]));
    }
}
