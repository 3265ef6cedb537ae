//! The file behind registers that a guest reads without an exit, for VMMs that cannot map a page for reading only.
//!
//! ```text
//!   page of the BAR    page of the file
//!   0  registers       0  registers  what reads return; the VMM traps all accesses to this page
//!   1  marker          1  marker     the VMM maps it into the guest, which may scribble on it; it means nothing
//!                      2  control    never in the guest: who asks for the registers, and the answer
//! ```
//!
//! A VMM such as QEMU maps the marker page as it maps any page of a BAR that a file backs, and takes the mapping away when the BAR moves,
//! is disabled or is reset. A library in the VMM's process (`ioplane-interposer`) sees that in KVM's memory slots, finds the file behind the
//! mapping, and has KVM map page 0 of it for reading only where page 0 of the BAR is.
//!
//! The library asks by writing a number that is not zero to [`WANTED`]. The device shows its registers from its next trapped access on,
//! and then writes the same number to [`GRANTED`]: the library may map the page. It writes 0 when it has taken the page away. Each
//! request has a number of its own, so an old answer is never taken for a new one.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_memory::{Mapping, MappingError, Window};
use rustix::fs::SealFlags;
use rustix::io::Errno;

use crate::PAGE;
use crate::bars::{Pages, Touch};

/// The file's name, as `/proc/PID/maps` shows it behind `/memfd:`.
pub const NAME: &str = "ioplane-registers";
/// The file's size in bytes. It is sealed against shrinking and growing.
pub const BYTES: u64 = 3 * PAGE;
/// Where the registers are, in the BAR and in the file.
pub const REGISTERS_AT: u64 = 0;
/// Where the marker page is, in the BAR and in the file.
pub const MARKER_AT: u64 = PAGE;
/// Where the control page is in the file.
pub const CONTROL_AT: u64 = 2 * PAGE;
/// The first 8 bytes of the control page, little-endian: another layout gets another number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"ioplreg1");
/// Offset in the control page of the number of the request, 8 bytes; 0: the page is not wanted.
pub const WANTED: usize = 8;
/// Offset in the control page of the number of the request that was granted, 8 bytes.
pub const GRANTED: usize = 16;

/// The file, as whoever serves the device has it.
#[derive(Debug)]
pub struct RegisterFile {
    registers: Window,
    control: Window,
    file: Arc<OwnedFd>,
}

impl RegisterFile {
    /// One with registers that are zero, which nobody wants.
    pub fn new() -> Result<Self, MappingError> {
        let mapping = Arc::new(Mapping::anonymous(NAME, BYTES)?);
        rustix::fs::fcntl_add_seals(mapping.file(), SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let cloned = mapping.file().try_clone_to_owned();
        let file =
            cloned.map_err(|error| MappingError::Os(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let window = |at| {
            Window::of_mapping(&mapping, at as usize, PAGE as usize)
                .ok_or(MappingError::Shape { offset: at, len: PAGE })
        };
        let (registers, control) = (window(REGISTERS_AT)?, window(CONTROL_AT)?);
        control.put_u64(0, MAGIC);
        Ok(RegisterFile { registers, control, file: Arc::new(file) })
    }

    /// What a BAR offers, whose first page the guest knows as its registers.
    pub fn marker(&self) -> Pages {
        Pages { offset: MARKER_AT, len: PAGE, touch: Touch::Mapped, file: self.file.clone(), at: MARKER_AT }
    }

    /// The page of registers.
    #[inline]
    pub fn registers(&self) -> &Window {
        &self.registers
    }

    /// A request that has not been granted: its number, or 0 if the page is no longer wanted.
    #[inline]
    pub fn request(&self) -> Option<u64> {
        let wanted = self.control.load_u64(WANTED);
        (wanted != self.control.load_u64(GRANTED)).then_some(wanted)
    }

    /// The page shows what the registers say, and goes on doing so until [`RegisterFile::request`] says otherwise; with 0: no longer.
    pub fn grant(&self, request: u64) {
        self.control.put_u64(GRANTED, request);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::{Bar, Space};

    /// The file as a library in the VMM's process has it.
    fn control(file: &RegisterFile) -> Window {
        let file = file.marker().file.try_clone().expect("a descriptor");
        let mapping = Mapping::of_file(file, CONTROL_AT, PAGE).expect("maps");
        Window::of_mapping(&Arc::new(mapping), 0, PAGE as usize).expect("a page")
    }

    #[test]
    fn a_request_is_granted_once() {
        let file = RegisterFile::new().expect("memory");
        let control = control(&file);
        assert_eq!(control.load_u64(0), MAGIC);
        assert_eq!(file.request(), None);
        control.put_u64(WANTED, 7);
        assert_eq!(file.request(), Some(7));
        file.grant(7);
        assert_eq!((file.request(), control.load_u64(GRANTED)), (None, 7));
        control.put_u64(WANTED, 0);
        assert_eq!(file.request(), Some(0));
        file.grant(0);
        assert_eq!((file.request(), control.load_u64(GRANTED)), (None, 0));
    }

    #[test]
    fn its_size_stays() {
        let file = RegisterFile::new().expect("memory");
        let marker = file.marker();
        let descriptor = marker.file.clone();
        let bar = Bar::new(2 * PAGE, Space::Memory32).with_pages(marker).expect("fits");
        assert_eq!((bar.pages()[0].offset, bar.pages()[0].at), (MARKER_AT, MARKER_AT));
        for size in [0, BYTES - 1, BYTES + 1] {
            assert_eq!(rustix::fs::ftruncate(&*descriptor, size), Err(Errno::PERM));
        }
    }
}
