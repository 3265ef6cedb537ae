//! How a driver finds out that its function wants a page, and says where that is: a vendor-specific capability (PCI 3.0, 6.7 and appendix H)
//! that is put into the function's configuration space.
//!
//! ```text
//!   +00  id 09h, next, length, format     +04  signature     +08  page, low     +0c  page, high     +10  control
//! ```

use ioplane_hardware::{Hardware, HardwareError};
use ioplane_pci::spec;

use super::page;

/// Bytes of the capability.
const LEN: usize = 20;
const LOW: usize = 0x08;
const HIGH: usize = 0x0c;
const CONTROL: usize = 0x10;

/// Written to the control word: the page is ready; zero: it is no longer there.
const ANNOUNCE: u32 = 1;
/// Read from it: nobody has announced a page.
pub(super) const NONE: u32 = 0;
/// The page is believed.
pub(super) const BELIEVED: u32 = 1;
/// It is not; the daemon says why.
pub(super) const REFUSED: u32 = 2;

/// The same under the names that the driver's header has.
#[cfg(test)]
pub(super) fn names() -> [(&'static str, u32); 9] {
    [
        ("CAP_ID", spec::CAP_VENDOR.into()),
        ("CAP_LEN", LEN as u32),
        ("CAP_SIGNATURE", 4),
        ("CAP_LOW", LOW as u32),
        ("CAP_HIGH", HIGH as u32),
        ("CAP_CONTROL", CONTROL as u32),
        ("ANNOUNCE", ANNOUNCE),
        ("BELIEVED", BELIEVED),
        ("REFUSED", REFUSED),
    ]
}

/// What a driver wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wish {
    /// This page is shared from now on.
    Announce(u64),
    /// None is.
    Withdraw,
}

/// The capability.
#[derive(Debug)]
pub(super) struct Capability {
    at: usize,
    /// The byte of the capability before it that leads to it.
    link: usize,
    bytes: [u8; LEN],
}

/// Bytes of a capability of the hardware's, at least.
fn length(id: u8, said: u8) -> usize {
    match id {
        0x01 => 8,
        spec::CAP_MSI => 24,
        spec::CAP_VENDOR => usize::from(said).max(4),
        spec::CAP_EXPRESS => 60,
        spec::CAP_MSIX => 12,
        // One that is not known here may be as long as it likes.
        _ => spec::CONFIG_SIZE,
    }
}

impl Capability {
    /// Finds room for it, behind the capabilities of the hardware. `None`: there is none.
    pub(super) fn new<H: Hardware>(hardware: &mut H) -> Result<Option<Capability>, HardwareError> {
        let mut config = vec![0; spec::CONFIG_SIZE];
        for at in (0..spec::CONFIG_SIZE).step_by(4) {
            hardware.read_config(at as u64, &mut config[at..at + 4])?;
        }
        Ok(Capability::among(&config))
    }

    fn among(config: &[u8]) -> Option<Capability> {
        let has = u16::from_le_bytes([config[spec::STATUS], config[spec::STATUS + 1]]);
        let mut found: Vec<usize> = Vec::new();
        let mut link = spec::CAPABILITIES;
        let listed = has & spec::STATUS_CAPABILITIES != 0;
        while let Some(at) = listed.then(|| usize::from(config[link] & !3)) {
            if at < spec::HEADER_END {
                break;
            }
            if found.contains(&at) {
                return None;
            }
            found.push(at);
            link = at + 1;
        }
        let mut taken = [false; spec::CONFIG_SIZE];
        taken[..spec::HEADER_END].fill(true);
        for at in &found {
            // One ends where another begins at the latest.
            let next = found.iter().copied().filter(|other| other > at).min().unwrap_or(spec::CONFIG_SIZE);
            let end = (at + length(config[*at], config[at + 2])).min(next);
            taken[*at..end].fill(true);
        }
        let free = |at: &usize| !taken[*at..at + LEN].contains(&true);
        let at = (spec::HEADER_END..=spec::CONFIG_SIZE - LEN).rev().filter(|at| at % 4 == 0).find(free)?;
        let mut bytes = [0; LEN];
        bytes[..4].copy_from_slice(&[spec::CAP_VENDOR, 0, LEN as u8, page::FORMAT as u8]);
        bytes[4..8].copy_from_slice(&page::MAGIC.to_le_bytes());
        Some(Capability { at, link, bytes })
    }

    fn word(&self, at: usize) -> u32 {
        let [a, b, c, d] = [0, 1, 2, 3].map(|n| self.bytes[at + n]);
        u32::from_le_bytes([a, b, c, d])
    }

    /// What the control word says from now on.
    pub(super) fn say(&mut self, state: u32) {
        self.bytes[CONTROL..].copy_from_slice(&state.to_le_bytes());
    }

    /// As at power-on.
    pub(super) fn reset(&mut self) {
        self.bytes[LOW..].fill(0);
    }

    /// What a page of memory at `gpa` is, of a function whose state came from another host.
    pub(super) fn announced(&mut self, gpa: u64) {
        self.bytes[LOW..CONTROL].copy_from_slice(&gpa.to_le_bytes());
        self.say(BELIEVED);
    }

    /// Puts itself over what the hardware says of its configuration space.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) {
        for (at, byte) in (offset..).zip(out) {
            let Ok(at) = usize::try_from(at) else { return };
            if at == self.link {
                *byte = self.at as u8;
            } else if at == spec::STATUS {
                *byte |= spec::STATUS_CAPABILITIES as u8;
            } else if let Some(own) = at.checked_sub(self.at).and_then(|at| self.bytes.get(at)) {
                *byte = *own;
            }
        }
    }

    /// Whether a byte is its own.
    pub(super) fn has(&self, at: u64) -> bool {
        at.checked_sub(self.at as u64).is_some_and(|at| at < LEN as u64)
    }

    /// A driver writes it.
    pub(super) fn write(&mut self, offset: u64, bytes: &[u8]) -> Option<Wish> {
        let mut control = None;
        for (at, byte) in (offset..).zip(bytes) {
            if !self.has(at) {
                continue;
            }
            let at = (at - self.at as u64) as usize;
            match at {
                LOW..CONTROL => self.bytes[at] = *byte,
                CONTROL => control = Some(u32::from(*byte)),
                _ => {}
            }
        }
        let page = u64::from(self.word(LOW)) | u64::from(self.word(HIGH)) << 32;
        control.map(|word| if word == ANNOUNCE { Wish::Announce(page) } else { Wish::Withdraw })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As an 82576's virtual function has it.
    fn config() -> Vec<u8> {
        let mut config = vec![0; spec::CONFIG_SIZE];
        config[spec::STATUS] = spec::STATUS_CAPABILITIES as u8;
        config[spec::CAPABILITIES] = 0x70;
        config[0x70..0x72].copy_from_slice(&[spec::CAP_MSIX, 0xa0]);
        config[0xa0..0xa2].copy_from_slice(&[spec::CAP_EXPRESS, 0]);
        config
    }

    #[test]
    fn it_is_behind_the_last_one_where_there_is_room() {
        let capability = Capability::among(&config()).unwrap();
        assert_eq!((capability.at, capability.link), (0xec, 0xa1));
        let mut seen = config();
        capability.read(0, &mut seen);
        assert_eq!(seen[0xa1], 0xec);
        assert_eq!(seen[0xec..0xf4], [9, 0, 20, 1, b'i', b'o', b'C', b'P']);
        // Alone it begins the list. In a list without an end, and without room, there is none.
        let mut circle = config();
        circle[0xa1] = 0x70;
        assert!(Capability::among(&circle).is_none());
        let mut none = config();
        none[spec::STATUS] = 0;
        let alone = Capability::among(&none).unwrap();
        let mut seen = none;
        alone.read(0, &mut seen);
        assert_eq!((seen[spec::STATUS], seen[spec::CAPABILITIES]), (0x10, 0xec));
        let mut unknown = config();
        unknown[0x40..0x42].copy_from_slice(&[0x55, 0x70]);
        unknown[spec::CAPABILITIES] = 0x40;
        assert_eq!(Capability::among(&unknown).map(|capability| capability.at), Some(0xec));
        unknown[0xa0] = 0x55;
        assert_eq!(Capability::among(&unknown).map(|capability| capability.at), Some(0x8c));
        unknown[0x70] = 0x55;
        assert!(Capability::among(&unknown).is_none());
    }

    #[test]
    fn a_driver_says_where_its_page_is() {
        let mut capability = Capability::among(&config()).unwrap();
        assert_eq!(capability.write(0xf4, &0x1234_5000_u32.to_le_bytes()), None);
        assert_eq!(capability.write(0xf8, &1_u32.to_le_bytes()), None);
        let announced = capability.write(0xfc, &1_u32.to_le_bytes());
        assert_eq!(announced, Some(Wish::Announce(0x1_1234_5000)));
        capability.say(BELIEVED);
        assert_eq!(capability.word(CONTROL), BELIEVED);
        assert_eq!(capability.write(0xfc, &[0]), Some(Wish::Withdraw));
        // What is not to be written stays.
        assert_eq!(capability.write(0xec, &[0xff; 8]), None);
        assert_eq!(capability.word(4), page::MAGIC);
        capability.reset();
        assert_eq!((capability.word(LOW), capability.word(HIGH), capability.word(CONTROL)), (0, 0, NONE));
    }
}
