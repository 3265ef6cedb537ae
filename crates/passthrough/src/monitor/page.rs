//! Shadow reads: a page that the guest reads without an exit, with what its registers would say.
//!
//! Only registers whose reading has no effect are in it. It is written before the guest can know that something changed: after
//! each write to a register, and before each interrupt. What the device changes by itself without an interrupt (a timer) is as
//! old as the last of these.

use std::sync::Arc;

use ioplane_memory::{Mapping, MappingError, PAGE, Window};
use ioplane_pci::{Pages, Touch};

use super::Monitor;
use super::bus::bit;
use super::plan::Role;
use crate::Hardware;
use crate::model::{Reads, RegisterId};

/// Bytes of the widest register that is shown whole.
const WIDEST: usize = 8;

/// The page of one BAR.
#[derive(Debug)]
pub(super) struct Page {
    window: Window,
    /// Whether some guest reads it now.
    pub(super) used: bool,
}

impl Page {
    /// A page of zeros, and how a BAR offers it.
    pub(super) fn new() -> Result<(Self, Pages), MappingError> {
        let mapping = Arc::new(Mapping::anonymous("shadow-page", PAGE)?);
        let file = mapping.file().try_clone_to_owned().map_err(|error| {
            MappingError::Os(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE))
        })?;
        let window = Window::of_mapping(&mapping, 0, PAGE as usize)
            .ok_or(MappingError::Shape { offset: 0, len: PAGE })?;
        let pages = Pages { offset: 0, len: PAGE, touch: Touch::Shadow, file: Arc::new(file), at: 0 };
        Ok((Page { window, used: false }, pages))
    }

    /// Puts a register's value there: at once where it is aligned, so that no half of it is seen.
    pub(super) fn put(&self, offset: u64, bytes: &[u8]) {
        let Ok(at) = usize::try_from(offset) else { return };
        if at.checked_add(bytes.len()).is_none_or(|end| end > self.window.len()) {
            return;
        }
        match *bytes {
            [a, b] if at.is_multiple_of(2) => self.window.put_u16(at, u16::from_le_bytes([a, b])),
            [a, b, c, d] if at.is_multiple_of(4) => {
                self.window.put_u32(at, u32::from_le_bytes([a, b, c, d]));
            }
            _ => {
                for (n, byte) in bytes.iter().enumerate() {
                    self.window.put_u8(at + n, *byte);
                }
            }
        }
    }
}

impl<H: Hardware> Monitor<H> {
    /// Shows a register that was written in the shadow page.
    pub(super) fn show_written(&mut self, id: Option<RegisterId>) {
        let Some(id) = id.filter(|_| self.page.as_ref().is_some_and(|page| page.used)) else { return };
        self.show(id);
    }

    /// Shows a register's present value in the shadow page.
    pub(super) fn show(&mut self, id: RegisterId) {
        let register = self.machine.register(id);
        if matches!(register.reads, Reads::Never | Reads::Effect) || register.bank.is_some() {
            return;
        }
        let at = u64::from(register.offset);
        let width = usize::from(register.width).min(WIDEST);
        let mut bytes = [0; WIDEST];
        match self.plan.role(id) {
            Role::Plain if self.recalled & bit(id) != 0 => {
                bytes[..4].copy_from_slice(&self.machine.value(id).to_le_bytes());
            }
            Role::Plain => self.bus.read_at(self.model.bar, at, &mut bytes[..width]),
            Role::Port => return,
            role => {
                let value = match role {
                    Role::Status => self.status_kept(),
                    Role::Mask => self.interrupts.mask,
                    Role::Base { ring, high } => self.base_half(ring, high),
                    Role::Block { block, high } => self.block_half(block, high),
                    Role::Plain | Role::Port => 0,
                };
                bytes[..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        if let Some(page) = &self.page {
            page.put(at, &bytes[..width]);
        }
    }

    /// Shows what the device may have changed by itself.
    pub(super) fn show_alive(&mut self) {
        self.show_those(|reads| reads == Reads::Alive);
    }

    /// Shows everything.
    pub(super) fn show_all(&mut self) {
        self.show_those(|_| true);
    }

    fn show_those(&mut self, which: impl Fn(Reads) -> bool) {
        if !self.page.as_ref().is_some_and(|page| page.used) {
            return;
        }
        for at in 0..self.plan.all.len() {
            let id = self.plan.all[at];
            if which(self.machine.register(id).reads) {
                self.show(id);
            }
        }
    }
}
