//! The page of registers that a guest reads without us.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_memory::{Mapping, MappingError, Window};
use ioplane_pci::{PAGE, Pages, Touch};

use super::registers::SIZE;

/// A page in a file, and what it shows. The registers themselves are elsewhere: who maps the page for writing deceives itself only.
#[derive(Debug)]
pub(super) struct Shadow {
    window: Window,
    file: Arc<OwnedFd>,
    shown: [u8; SIZE],
    on: bool,
}

impl Shadow {
    /// A page that shows nothing.
    pub fn new() -> Result<Self, MappingError> {
        let mapping = Arc::new(Mapping::anonymous("rtl8139-registers", PAGE)?);
        let file = mapping.file().try_clone_to_owned().map_err(|_| MappingError::TooMany)?;
        let window = Window::of_mapping(&mapping, 0, SIZE).ok_or(MappingError::TooMany)?;
        Ok(Shadow { window, file: Arc::new(file), shown: [0; SIZE], on: false })
    }

    /// The page, for a BAR.
    pub fn pages(&self) -> Pages {
        Pages { offset: 0, len: PAGE, touch: Touch::Shadow, file: self.file.clone(), at: 0 }
    }

    /// Whether anybody looks at it.
    pub fn use_it(&mut self, yes: bool) {
        self.on = yes;
    }

    /// Whether anybody looks at it.
    pub fn used(&self) -> bool {
        self.on
    }

    /// Shows the registers as they are, each word at once. Called before an interrupt is signalled and before an access is answered, so
    /// whoever comes because of either finds nothing older.
    pub fn show(&mut self, registers: &[u8; SIZE]) {
        if !self.on || self.shown == *registers {
            return;
        }
        let words = self.shown.as_chunks_mut::<4>().0.iter_mut().zip(registers.as_chunks::<4>().0);
        for (at, (shown, word)) in (0..).step_by(4).zip(words) {
            if shown != word {
                self.window.put_u32(at, u32::from_le_bytes(*word));
                *shown = *word;
            }
        }
    }
}
