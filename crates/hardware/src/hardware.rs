//! A PCI function of the host, as whoever hands it to a guest sees it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ioplane_memory::MemoryRegion;
use ioplane_pci::{BarMap, Identity, Irq, Irqs, Wire, WireError};

use crate::ranges::Ranges;

/// What hardware could not do.
#[derive(Debug, thiserror::Error)]
pub enum HardwareError {
    /// It has been unplugged, or answers with all ones.
    #[error("{function} is gone: it no longer answers")]
    Gone {
        /// Its address.
        function: String,
    },
    /// An access that it does not have.
    #[error("{function} has no BAR {bar} at {offset:#x}+{len}")]
    NoSuchRegister {
        /// Its address.
        function: String,
        /// Which BAR.
        bar: u8,
        /// Byte offset there.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// The IOMMU cannot translate these addresses.
    #[error(
        "{function} cannot reach {len:#x} bytes at bus address {iova:#x}: this host's IOMMU translates {ranges}; give the guest less \
         memory, or another card"
    )]
    Unreachable {
        /// Its address.
        function: String,
        /// First bus address.
        iova: u64,
        /// Bytes.
        len: u64,
        /// What it can.
        ranges: Ranges,
    },
    /// Nobody knows what is in it.
    #[error(
        "{function} is passed through unwatched: nobody knows its state, so that it can be neither saved nor loaded; add it with \
         `--mode virtual` if there is a model for it (`ioplane pci list`)"
    )]
    Unwatched {
        /// Its address.
        function: String,
    },
    /// It was reset by its registers and does not say that this has ended.
    #[error(
        "{function} has not come out of its reset in {} ms: it may be broken, or in use by somebody else; reset its slot or the host",
        after.as_millis()
    )]
    StuckInReset {
        /// Its address.
        function: String,
        /// How long it was waited for.
        after: Duration,
    },
    /// Its own memory may still hold what its last user left there.
    #[error(
        "{function}: its memory could not be wiped: {why}; power-cycle the host before another guest uses it"
    )]
    NotWiped {
        /// Its address.
        function: String,
        /// What failed.
        why: String,
    },
    /// There is no way to reset it.
    #[error(
        "{function} has no reset of its own, and there is no model that knows one by its registers: after its first guest remove it and add \
         it again, so that the host's driver sets it up"
    )]
    Unresettable {
        /// Its address.
        function: String,
    },
    /// It was given to somebody who keeps it.
    #[error(
        "{function} is busy: a process still has it open or mapped, and could drive it into the next guest's memory: end that process \
         (with a VFIO function open: {}), then try again",
        in_words(.holders)
    )]
    Kept {
        /// Its address.
        function: String,
        /// Processes that have some function of VFIO's: name and number.
        holders: Vec<(String, u32)>,
    },
    /// It could not be brought to where its guest has left it.
    #[error("{function} could not be brought to where its guest had it; reset it")]
    Lost {
        /// Its address.
        function: String,
    },
    /// Its guest went on with another one.
    #[error("{function} has no guest: its guest went on with another function; reset it")]
    Left {
        /// Its address.
        function: String,
    },
    /// Its configuration space is full.
    #[error("{function} has no room in its configuration space for what its driver has to find there")]
    NoRoom {
        /// Its address.
        function: String,
    },
    /// A write that its silicon does not allow. It was not made.
    #[error("{function} does not allow {what}: register {offset:#x} was not written")]
    Forbidden {
        /// Its address.
        function: String,
        /// The register.
        offset: u64,
        /// What is not allowed.
        what: &'static str,
    },
    /// It has been closed, and nobody has opened it anew.
    #[error("{function} is not open: nobody uses it")]
    Closed {
        /// Its address.
        function: String,
    },
    /// The operating system refused.
    #[error("{function}: {doing}: {source}")]
    Os {
        /// Its address.
        function: String,
        /// What was tried, and what to do about it.
        doing: String,
        /// Why not.
        source: std::io::Error,
    },
}

fn in_words(holders: &[(String, u32)]) -> String {
    let each: Vec<String> = holders.iter().take(8).map(|(name, pid)| format!("{name}, pid {pid}")).collect();
    if each.is_empty() { "none that /proc shows".to_owned() } else { each.join("; ") }
}

/// One function. Its owner is one thread at a time. Dropped, it is as idle as it was found: no bus mastering, no interrupt, nothing mapped.
pub trait Hardware: Send + 'static {
    /// Its address, as `0000:00:05.0`.
    fn name(&self) -> &str;

    /// Who it is.
    fn identity(&self) -> Identity;

    /// Its BARs; pages that may be mapped into a guest carry the file to map.
    fn bars(&self) -> &BarMap;

    /// Its interrupts.
    fn irqs(&self) -> Irqs;

    /// Reads registers, 1 to 8 bytes; of ports and of most cards 1, 2 or 4, aligned.
    fn read(&mut self, bar: u8, offset: u64, out: &mut [u8]) -> Result<(), HardwareError>;

    /// Writes registers.
    fn write(&mut self, bar: u8, offset: u64, bytes: &[u8]) -> Result<(), HardwareError>;

    /// Reads its own configuration space.
    fn read_config(&mut self, offset: u64, out: &mut [u8]) -> Result<(), HardwareError>;

    /// Writes it.
    fn write_config(&mut self, offset: u64, bytes: &[u8]) -> Result<(), HardwareError>;

    /// Lets the function reach `region` at bus addresses `iova ..`, for reading and, if it is writable, for writing. The region stays mapped until
    /// [`Hardware::unmap`] or drop; the implementation keeps it alive.
    fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError>;

    /// Takes that back, exactly as it was mapped. When it returns the function reaches it no more.
    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError>;

    /// Wires an interrupt to a guest's own descriptor, past us: for functions that are passed through as they are.
    fn wire(&mut self, irq: Irq, vector: u16, wire: Wire) -> Result<(), WireError>;

    /// Interrupts are ours from here on: [`Hardware::interrupt`] becomes readable at each. INTA# is masked by each until
    /// [`Hardware::unmask`]. Messages (of a function without INTA#) come only while it is a bus master.
    fn listen(&mut self) -> Result<(), HardwareError>;

    /// Readable while an interrupt waits for [`Hardware::take_interrupt`].
    fn interrupt(&self) -> Option<&Arc<OwnedFd>>;

    /// Takes the interrupts that came; whether any did.
    fn take_interrupt(&mut self) -> bool;

    /// INTA# may come again.
    fn unmask(&mut self) -> Result<(), HardwareError>;

    /// Lets go of the function, so that it can be opened anew: what was handed out by [`Hardware::bars`] is worth nothing to its
    /// next owner. As idle as after a drop; every other call fails then.
    fn close(&mut self) {}

    /// Opens it after [`Hardware::close`]. [`HardwareError::Kept`] as long as anybody has what was handed out before. In which state it
    /// is then nobody knows.
    fn reopen(&mut self) -> Result<(), HardwareError> {
        Ok(())
    }

    /// Resets the function by its own or the bus's means. `false`: it has none, its registers must do (a model's `reset`).
    fn reset(&mut self) -> Result<bool, HardwareError>;

    /// Lets it use memory of others (bus mastering), or no longer.
    fn master(&mut self, yes: bool) -> Result<(), HardwareError> {
        let mut command = [0; 2];
        self.read_config(ioplane_pci::spec::COMMAND as u64, &mut command)?;
        let command = u16::from_le_bytes(command);
        let bit = ioplane_pci::spec::COMMAND_MASTER;
        let wanted = if yes { command | bit } else { command & !bit };
        self.write_config(ioplane_pci::spec::COMMAND as u64, &wanted.to_le_bytes())
    }

    /// Whether it is still there: what is unplugged reads as all ones, which no vendor has (PCI 3.0, 6.2.1).
    fn answers(&mut self) -> Result<bool, HardwareError> {
        let mut vendor = [0; 2];
        self.read_config(ioplane_pci::spec::VENDOR_ID as u64, &mut vendor)?;
        Ok(vendor != [0xff; 2])
    }

    /// Where in the configuration space its capability `id` begins (PCI 3.0, 6.7).
    fn capability(&mut self, id: u8) -> Result<Option<u64>, HardwareError> {
        let mut byte = [0];
        let mut word = [0; 2];
        self.read_config(ioplane_pci::spec::STATUS as u64, &mut word)?;
        if u16::from_le_bytes(word) & ioplane_pci::spec::STATUS_CAPABILITIES == 0 {
            return Ok(None);
        }
        self.read_config(ioplane_pci::spec::CAPABILITIES as u64, &mut byte)?;
        // As many as there is room for: a list that runs in a circle ends.
        for _ in 0..(ioplane_pci::spec::CONFIG_SIZE - ioplane_pci::spec::HEADER_END) / 4 {
            let at = byte[0] & !3;
            if usize::from(at) < ioplane_pci::spec::HEADER_END {
                return Ok(None);
            }
            self.read_config(at.into(), &mut word)?;
            if word[0] == id {
                return Ok(Some(at.into()));
            }
            byte = [word[1]];
        }
        Ok(None)
    }
}
