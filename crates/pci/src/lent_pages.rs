//! Pages of registers that a guest uses without an exit until they are taken back, for VMMs whose own mappings cannot be taken back.
//!
//! ```text
//!   BAR                        file
//!   0 .. n    registers        nothing    the VMM traps all accesses to these pages
//!   n         marker           marker     the VMM maps it into the guest, which may scribble on it; it means nothing
//!                              control    never in the guest: how far the registers are, and where the device's socket is
//! ```
//!
//! A VMM such as QEMU maps the marker page as it maps any page of a BAR that a file backs, and takes the mapping away when the BAR moves, is
//! disabled or is reset. A library in the VMM's process (`ioplane-interposer`) sees that in KVM's memory slots, finds the file behind the
//! mapping, and connects to the socket. There the device lends it pages, with a descriptor to map them from, and takes them back.
//!
//! ```text
//!   device --Lend, descriptor--> library: maps the pages, adds slots of its own --Lent--> device
//!   device --Take--------------> library: removes the slots, unmaps the pages --Taken--> device
//!                                library: the marker goes: the same, before the VMM's call --Taken--> device, and the connection ends
//! ```

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ioplane_memory::{Mapping, MappingError, Window};
use rustix::fs::SealFlags;
use rustix::io::Errno;

use crate::PAGE;
use crate::bars::{Bar, PageError, Pages, Touch};

/// The file's name, as `/proc/PID/maps` shows it behind `/memfd:`.
pub const NAME: &str = "ioplane-pages";
/// The first 8 bytes of the control page, little-endian: another layout, or other messages, get another number.
pub const MAGIC: u64 = u64::from_le_bytes(*b"ioplpgs1");
/// Offset in the control page of the bytes in front of the marker, in the BAR and in the file; 8 bytes, little-endian.
pub const REGISTERS: usize = 8;
/// Offset in the control page of the length of the socket's path, 8 bytes, little-endian.
pub const PATH_LEN: usize = 16;
/// Offset in the control page of the socket's path.
pub const PATH: usize = 24;
/// Longest path of a socket (`sun_path`, with its end).
pub const LONGEST: usize = 107;
/// Most pages of registers: as many as a message can name.
pub const MOST: u64 = 64;

/// Why no pages can be lent.
#[derive(Debug, thiserror::Error)]
pub enum LentPagesError {
    /// There is no memory, or there are no descriptors.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    /// The BAR has no room.
    #[error(transparent)]
    Page(#[from] PageError),
    /// The library could not reach the socket.
    #[error("{} is longer than {LONGEST} bytes, which no socket's path may be", .0.display())]
    Path(PathBuf),
    /// Too many pages, or not whole ones.
    #[error("a BAR of {0:#x} bytes cannot be lent by pages")]
    Size(u64),
}

/// The file, as whoever serves the device has it.
#[derive(Debug, Clone)]
pub struct LentPages {
    file: Arc<OwnedFd>,
    socket: PathBuf,
    registers: u64,
}

impl LentPages {
    /// One for a BAR with so many bytes of registers, a power of two, whose pages are lent at that socket.
    pub fn new(registers: u64, socket: &Path) -> Result<Self, LentPagesError> {
        let path = socket.as_os_str().as_bytes();
        if path.len() > LONGEST {
            return Err(LentPagesError::Path(socket.to_owned()));
        }
        if !registers.is_power_of_two() || !(PAGE..=MOST * PAGE).contains(&registers) {
            return Err(LentPagesError::Size(registers));
        }
        let mapping = Arc::new(Mapping::anonymous(NAME, registers + 2 * PAGE)?);
        let os = |error| LentPagesError::Mapping(MappingError::Os(error));
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(mapping.file(), seals).map_err(os)?;
        let file = mapping.file().try_clone_to_owned();
        let file = file.map_err(|error| os(Errno::from_io_error(&error).unwrap_or(Errno::MFILE)))?;
        let at = registers + PAGE;
        let control = Window::of_mapping(&mapping, at as usize, PAGE as usize)
            .ok_or(MappingError::Shape { offset: at, len: PAGE })?;
        control.put_u64(REGISTERS, registers);
        control.put_u64(PATH_LEN, path.len() as u64);
        for (n, byte) in path.iter().enumerate() {
            control.put_u8(PATH + n, *byte);
        }
        control.put_u64(0, MAGIC);
        Ok(LentPages { file: Arc::new(file), socket: socket.to_owned(), registers })
    }

    /// Another file with the same content: what a VMM has written into this one is not in it.
    pub fn renewed(&self) -> Result<Self, LentPagesError> {
        Self::new(self.registers, &self.socket)
    }

    /// `bar` with the marker page, twice as large; all pages of registers are trapped.
    pub fn offered_by(&self, bar: &Bar) -> Result<Bar, LentPagesError> {
        let mut offers = Bar::new(2 * self.registers, bar.space);
        offers.prefetchable = bar.prefetchable;
        let (offset, file) = (self.registers, self.file.clone());
        Ok(offers.with_pages(Pages { offset, len: PAGE, touch: Touch::Mapped, file, at: offset })?)
    }
}

/// What device and library say to each other, in [`PageMessage::BYTES`] each. Numbers count what was lent on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageMessage {
    /// Of the device, with a descriptor: these pages may be mapped.
    Lend {
        /// Which loan it is.
        number: u64,
        /// The pages of the BAR: bit 0 is the first one.
        pages: u64,
        /// Where the BAR begins in the file of the descriptor, in bytes.
        at: u64,
    },
    /// Of the device: they may no longer be.
    Take {
        /// Which loan.
        number: u64,
    },
    /// Of the library: it has mapped them, and shows them while the BAR is there.
    Lent {
        /// Which loan.
        number: u64,
    },
    /// Of the library: nothing of them is mapped any more.
    Taken {
        /// Which loan.
        number: u64,
    },
}

impl PageMessage {
    /// Bytes of a message.
    pub const BYTES: usize = 32;

    /// As it is sent: four little-endian numbers.
    pub fn bytes(self) -> [u8; Self::BYTES] {
        let words: [u64; 4] = match self {
            PageMessage::Lend { number, pages, at } => [1, number, pages, at],
            PageMessage::Take { number } => [2, number, 0, 0],
            PageMessage::Lent { number } => [3, number, 0, 0],
            PageMessage::Taken { number } => [4, number, 0, 0],
        };
        let mut bytes = [0; Self::BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// What was sent; `None` if it is no message.
    pub fn read(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let mut words = [0; 4];
        for (word, place) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(place.try_into().ok()?);
        }
        match words {
            [1, number, pages, at] => Some(PageMessage::Lend { number, pages, at }),
            [2, number, 0, 0] => Some(PageMessage::Take { number }),
            [3, number, 0, 0] => Some(PageMessage::Lent { number }),
            [4, number, 0, 0] => Some(PageMessage::Taken { number }),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::Space;

    #[test]
    fn a_bar_is_twice_as_large_and_has_a_marker() {
        let pages = LentPages::new(0x4000, Path::new("/run/f.pages")).expect("memory");
        let mut bar = Bar::new(0x4000, Space::Memory64);
        bar.prefetchable = true;
        let offers = pages.offered_by(&bar).expect("room");
        assert_eq!((offers.size, offers.space, offers.prefetchable), (0x8000, Space::Memory64, true));
        let marker = &offers.pages()[0];
        assert_eq!((marker.offset, marker.len, marker.at), (0x4000, PAGE, 0x4000));
        let file = marker.file.try_clone().expect("a descriptor");
        let mapping = Arc::new(Mapping::of_file(file, 0x5000, PAGE).expect("maps"));
        let control = Window::of_mapping(&mapping, 0, PAGE as usize).expect("a page");
        assert_eq!((control.load_u64(0), control.load_u64(REGISTERS)), (MAGIC, 0x4000));
        let len = control.load_u64(PATH_LEN) as usize;
        let path: Vec<u8> = (0..len).map(|n| control.load_u8(PATH + n)).collect();
        assert_eq!(path, b"/run/f.pages");
        // Who has it cannot hand another content to the next one.
        control.put_u8(PATH, b'x');
        let renewed = pages.renewed().expect("memory");
        let other = renewed.offered_by(&bar).expect("room").pages()[0].file.clone();
        assert!(!Arc::ptr_eq(&other, &marker.file));
        for size in [0, 0x5000] {
            assert_eq!(rustix::fs::ftruncate(&*marker.file, size), Err(Errno::PERM));
        }
    }

    #[test]
    fn what_cannot_be_lent_is_refused() {
        let long = PathBuf::from("x".repeat(LONGEST + 1));
        assert!(matches!(LentPages::new(PAGE, &long), Err(LentPagesError::Path(_))));
        for size in [0, 256, 0x3000, (MOST + 1) * PAGE, 2 * MOST * PAGE] {
            let refused = LentPages::new(size, Path::new("/run/f.pages"));
            assert!(matches!(refused, Err(LentPagesError::Size(_))), "{size:#x}");
        }
    }

    #[test]
    fn messages_are_read_as_they_were_sent() {
        let number = 7;
        let all = [
            PageMessage::Lend { number, pages: 0b1110, at: 1 << 40 },
            PageMessage::Take { number },
            PageMessage::Lent { number },
            PageMessage::Taken { number },
        ];
        for message in all {
            assert_eq!(PageMessage::read(&message.bytes()), Some(message));
        }
        assert_eq!(PageMessage::read(&[0; 32]), None);
        assert_eq!(PageMessage::read(&[0xff; 32]), None);
        let mut more = PageMessage::Take { number }.bytes();
        more[16] = 1;
        assert_eq!(PageMessage::read(&more), None);
    }
}
