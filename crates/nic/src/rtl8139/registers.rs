//! The register file: what every read gives, and what a write of any width means for each register.
//!
//! No read of this chip has an effect. So the bytes here are all that a guest can see, and a page of them is what it may map.

use super::spec::*;

/// Bytes of registers.
pub(super) const SIZE: usize = REGISTERS as usize;

/// A register: where it begins, how many bytes it has (1, 2 or 4), and which of its bits can ever be other than at power-on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Register {
    at: u64,
    width: u64,
    varies: u32,
}

const fn register(at: u64, width: u64, varies: u32) -> Register {
    Register { at, width, varies }
}

/// All that are wider than a byte, or whose bits can change. What is not here is a byte that never changes.
const REGISTERS_THERE: &[Register] = &[
    register(IDR0, 4, !0),
    register(IDR0 + 4, 2, 0xffff),
    register(MAR0, 4, !0),
    register(MAR0 + 4, 4, !0),
    register(TSD0, 4, !0),
    register(TSD0 + 4, 4, !0),
    register(TSD0 + 8, 4, !0),
    register(TSD0 + 12, 4, !0),
    register(TSAD0, 4, !0),
    register(TSAD0 + 4, 4, !0),
    register(TSAD0 + 8, 4, !0),
    register(TSAD0 + 12, 4, !0),
    register(RBSTART, 4, !0),
    register(CR, 1, (CR_RE | CR_TE | CR_BUFE) as u32),
    register(CAPR, 2, 0xffff),
    register(CBR, 2, 0xfffc),
    register(IMR, 2, INT_ALL as u32),
    register(ISR, 2, INT_ALL as u32),
    register(TCR, 4, TCR_WRITABLE),
    register(RCR, 4, RCR_WRITABLE),
    register(TCTR, 4, !0),
    register(MPC, 4, MPC_COUNT),
    register(CR9346, 1, (EEM | EECS | EESK | EEDI | EEDO) as u32),
    register(CONFIG0, 1, CONFIG0_WRITABLE as u32),
    register(CONFIG1, 1, CONFIG1_WRITABLE as u32),
    register(TIMER_INT, 4, !0),
    register(CONFIG3, 1, CONFIG3_WRITABLE as u32),
    register(CONFIG4, 1, CONFIG4_WRITABLE as u32),
    register(MULINT, 2, MULINT_WRITABLE as u32),
    register(TSAD, 2, 0xffff),
    register(BMCR, 2, BMCR_WRITABLE as u32),
    register(BMSR, 2, 0),
    register(ANAR, 2, 0xffff),
    register(ANLPAR, 2, 0),
    register(ANER, 2, 0),
    register(CSCR, 2, 0),
    register(CONFIG5, 1, CONFIG5_WRITABLE as u32),
    register(RMS, 2, 0xffff),
    register(CPCR, 2, CPCR_WRITABLE as u32),
    register(INTR_MITIGATE, 2, 0),
    register(RDSAR, 4, !0),
    register(RDSAR + 4, 4, !0),
    register(ETTHR, 1, ETTHR_WRITABLE as u32),
];

/// What a guest can write of these (data sheet, section 5).
pub(super) const TCR_WRITABLE: u32 = 0x030f_07f0;
pub(super) const RCR_WRITABLE: u32 = 0x0f03_ffbf;
pub(super) const CONFIG0_WRITABLE: u8 = 0x07;
pub(super) const CONFIG1_WRITABLE: u8 = 0xf3;
pub(super) const CONFIG3_WRITABLE: u8 = 0x70;
pub(super) const CONFIG4_WRITABLE: u8 = 0xf5;
pub(super) const CONFIG5_WRITABLE: u8 = 0x7f;
pub(super) const MULINT_WRITABLE: u16 = 0x0fff;
pub(super) const BMCR_WRITABLE: u16 = BMCR_SPD | BMCR_ANE | BMCR_DUPLEX;
pub(super) const CPCR_WRITABLE: u16 =
    CPCR_TXEN | CPCR_RXEN | CPCR_MULRW | CPCR_DAC | CPCR_RXCHKSUM | CPCR_RXVLAN;
pub(super) const ETTHR_WRITABLE: u8 = 0x3f;
/// Bits of the count in [`MPC`].
pub(super) const MPC_COUNT: u32 = 0x00ff_ffff;

/// For each byte the register that it is of.
const LAYOUT: [Register; SIZE] = {
    let mut layout = [register(0, 1, 0); SIZE];
    let mut at = 0;
    while at < SIZE {
        layout[at] = register(at as u64, 1, 0);
        at += 1;
    }
    let mut next = 0;
    while next < REGISTERS_THERE.len() {
        let here = REGISTERS_THERE[next];
        let mut byte = 0;
        while byte < here.width {
            layout[(here.at + byte) as usize] = here;
            byte += 1;
        }
        next += 1;
    }
    layout
};

/// A write to one register: which, its value with the bytes that were not written as they are, and which bits were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Write {
    pub at: u64,
    pub value: u32,
    pub lanes: u32,
}

/// The bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Registers([u8; SIZE]);

impl Registers {
    /// As at power-on, with that address.
    pub fn new(mac: [u8; 6]) -> Self {
        let mut new = Registers([0; SIZE]);
        new.0[..6].copy_from_slice(&mac);
        new.reset();
        new.put(CONFIG1, 1, (CONFIG1_IOMAP | CONFIG1_MEMMAP).into());
        new.put(CONFIG3, 1, CONFIG3_FBTBEN.into());
        new.put(RERID, 1, 0x10);
        // The link is up, and the partner can do everything.
        new.put(MSR, 1, (MSR_TXFCE | MSR_RXFCE | MSR_AUX).into());
        new.put(BMCR, 2, BMCR_ANE.into());
        new.put(BMSR, 2, 0x7809 | u32::from(BMSR_LINK | BMSR_ANDONE));
        new.put(ANAR, 2, 0x05e1);
        new.put(ANLPAR, 2, 0x05e1);
        new.put(ANER, 2, 1);
        new.put(CSCR, 2, 0x0340);
        new
    }

    /// What a software reset changes (data sheet, 5.7): not the addresses, the hash, the PHY, the configuration.
    pub fn reset(&mut self) {
        for at in (TSD0..TSD0 + 16).step_by(4) {
            self.put(at, 4, TSD_OWN);
        }
        for at in (TSAD0..RBSTART + 4).step_by(4).chain([RCR, MPC, TIMER_INT, RDSAR, RDSAR + 4]) {
            self.put(at, 4, 0);
        }
        for at in [CBR, IMR, ISR, MULINT, CPCR] {
            self.put(at, 2, 0);
        }
        self.put(CR, 1, CR_BUFE.into());
        self.put(CAPR, 2, 0u16.wrapping_sub(CAPR_SHORT).into());
        self.put(TCR, 4, TCR_HWVERID_8139CP);
        self.put(ETTHR, 1, 0);
        self.sum_up();
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8; SIZE] {
        &self.0
    }

    /// A register of `width` bytes.
    #[inline]
    pub fn get(&self, at: u64, width: u64) -> u32 {
        let mut bytes = [0; 4];
        let (at, width) = (at as usize, width as usize);
        bytes[..width].copy_from_slice(&self.0[at..at + width]);
        u32::from_le_bytes(bytes)
    }

    #[inline]
    pub fn u8(&self, at: u64) -> u8 {
        self.0[at as usize]
    }

    #[inline]
    pub fn u16(&self, at: u64) -> u16 {
        self.get(at, 2) as u16
    }

    #[inline]
    pub fn u32(&self, at: u64) -> u32 {
        self.get(at, 4)
    }

    #[inline]
    pub fn u64(&self, at: u64) -> u64 {
        u64::from(self.u32(at)) | u64::from(self.u32(at + 4)) << 32
    }

    #[inline]
    pub fn put(&mut self, at: u64, width: u64, value: u32) {
        let (at, width) = (at as usize, width as usize);
        self.0[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
    }

    /// Puts the bits of `value` that `writable` has.
    pub fn put_bits(&mut self, at: u64, width: u64, value: u32, writable: u32) {
        self.put(at, width, self.get(at, width) & !writable | value & writable);
    }

    /// The station address.
    pub fn mac(&self) -> [u8; 6] {
        let mut mac = [0; 6];
        mac.copy_from_slice(&self.0[..6]);
        mac
    }

    /// The multicast hash.
    pub fn hash(&self) -> &[u8] {
        &self.0[MAR0 as usize..MAR0 as usize + 8]
    }

    /// C mode: bytes of the receive buffer.
    pub fn buffer(&self) -> u32 {
        8192 << ((self.u32(RCR) & RCR_RBLEN) >> RCR_RBLEN_SHIFT)
    }

    /// Adds interrupt causes.
    pub fn raise(&mut self, causes: u16) {
        self.put(ISR, 2, (self.u16(ISR) | causes).into());
    }

    /// One packet missed more.
    pub fn missed(&mut self) {
        self.put(MPC, 4, self.u32(MPC).wrapping_add(1) & MPC_COUNT);
    }

    /// The status of all four descriptors of C mode from that of each.
    pub fn sum_up(&mut self) {
        let mut all = 0;
        for n in 0..TSDS {
            let status = self.u32(TSD0 + 4 * n);
            for (bit, shift) in [(TSD_OWN, 0), (TSD_TABT, 4), (TSD_TUN, 8), (TSD_TOK, 12)] {
                all |= u32::from(status & bit != 0) << (shift + n);
            }
        }
        self.put(TSAD, 2, all);
    }

    /// Splits a write of any width at any offset into writes to registers, by rising offset.
    pub fn split(&self, offset: u64, bytes: &[u8], mut each: impl FnMut(Write)) {
        let mut at = 0;
        while at < bytes.len() {
            let Some(here) = usize::try_from(offset).ok().and_then(|o| LAYOUT.get(o.checked_add(at)?)) else {
                return;
            };
            let skip = (offset + at as u64 - here.at) as usize;
            let len = (here.width as usize - skip).min(bytes.len() - at);
            let mut value = self.get(here.at, here.width).to_le_bytes();
            let mut lanes = [0; 4];
            value[skip..skip + len].copy_from_slice(&bytes[at..at + len]);
            lanes[skip..skip + len].fill(0xff);
            each(Write { at: here.at, value: u32::from_le_bytes(value), lanes: u32::from_le_bytes(lanes) });
            at += len;
        }
    }

    /// Whether a guest can have brought the chip from here to these bytes. `Err`: which is wrong.
    pub fn check(&self, saved: &[u8]) -> Result<(), String> {
        let saved: &[u8; SIZE] =
            saved.try_into().map_err(|_| format!("{} bytes of registers", saved.len()))?;
        for (at, layout) in LAYOUT.iter().enumerate() {
            let varies = (layout.varies >> (8 * (at as u64 - layout.at))) as u8;
            if (saved[at] ^ self.0[at]) & !varies != 0 {
                return Err(format!("register {at:#04x} cannot be {:#04x}", saved[at]));
            }
        }
        Ok(())
    }

    /// Takes bytes over that have been checked.
    pub fn load(&mut self, saved: &[u8]) {
        for (byte, saved) in self.0.iter_mut().zip(saved) {
            *byte = *saved;
        }
        self.sum_up();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_has_every_register_once() {
        for (n, here) in REGISTERS_THERE.iter().enumerate() {
            assert!(matches!(here.width, 1 | 2 | 4) && here.at.is_multiple_of(here.width), "{here:x?}");
            assert!(here.width == 4 || here.varies >> (8 * here.width) == 0, "{here:x?}");
            for other in &REGISTERS_THERE[n + 1..] {
                assert!(here.at + here.width <= other.at, "{here:x?} overlaps {other:x?}");
            }
        }
    }

    #[test]
    fn a_wide_write_is_one_to_each_register() {
        let registers = Registers::new([2, 0, 0, 0, 0, 1]);
        let mut writes = Vec::new();
        registers.split(IMR - 1, &[0xaa, 1, 2, 3, 4, 5], |write| {
            writes.push((write.at, write.value, write.lanes))
        });
        assert_eq!(
            writes,
            [(CBR, 0xaa00, 0xff00), (IMR, 0x0201, 0xffff), (ISR, 0x0403, 0xffff), (TCR, 0x7480_0005, 0xff)]
        );
        writes.clear();
        registers.split(0xfe, &[9; 8], |write| writes.push((write.at, write.value, write.lanes)));
        assert_eq!(writes, [(0xfe, 9, 0xff), (0xff, 9, 0xff)], "and nothing beyond the end");
        registers.split(u64::MAX - 1, &[9; 8], |write| panic!("{write:?}"));
    }

    #[test]
    fn only_what_can_vary_is_loaded() {
        let fresh = Registers::new([2, 0, 0, 0, 0, 1]);
        for at in 0..SIZE {
            for bit in 0..8 {
                let mut saved = *fresh.bytes();
                saved[at] ^= 1 << bit;
                let other = Registers::new([2, 0, 0, 0, 0, 2]);
                let layout = LAYOUT[at];
                let varies = layout.varies >> (8 * (at as u64 - layout.at)) >> bit & 1 != 0;
                assert_eq!(other.check(&saved).is_ok(), varies, "bit {bit} of {at:#x}");
            }
        }
        assert!(Registers::new([0; 6]).check(&[0; 255]).is_err());
    }
}
