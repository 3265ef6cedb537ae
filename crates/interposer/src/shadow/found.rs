//! The register file behind a marker page.
#![allow(unsafe_code)]
// UNSAFETY: reads and writes what is mapped.

use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_pci::register_file::{BYTES, CONTROL_AT, GRANTED, MAGIC, MARKER_AT, NAME, REGISTERS_AT, WANTED};

use super::follower::{PAGE, Registers};
use crate::marker::{Mapped, Refused, file_of, sealed};

/// A register file: page 0 for reading only, and the control page.
#[derive(Debug)]
pub(super) struct FoundRegisters {
    registers: Mapped,
    control: Mapped,
}

impl FoundRegisters {
    /// Where the registers are mapped, for KVM.
    pub(super) fn address(&self) -> usize {
        self.registers.at(0).expose_provenance()
    }

    fn number(&self, at: usize) -> &AtomicU64 {
        number(&self.control, at)
    }
}

fn number(control: &Mapped, at: usize) -> &AtomicU64 {
    debug_assert!(at.is_multiple_of(8) && at < PAGE as usize);
    // SAFETY: inside the page, aligned, and mapped as long as this is; the file cannot shrink.
    unsafe { &*control.at(at).cast() }
}

impl Registers for FoundRegisters {
    fn want(&self, request: u64) {
        self.number(WANTED).store(request, Ordering::Release);
    }

    fn granted(&self) -> u64 {
        self.number(GRANTED).load(Ordering::Acquire)
    }
}

/// The register file whose marker page is mapped at that address.
pub(super) fn find(address: usize) -> Result<FoundRegisters, Refused> {
    let (file, at) = file_of(address, NAME)?;
    if at != MARKER_AT {
        return Err(Refused::OtherPage);
    }
    sealed(file, BYTES)?;
    let control = Mapped::new(file, CONTROL_AT, PAGE, libc::PROT_READ | libc::PROT_WRITE)?;
    if u64::from_le(number(&control, 0).load(Ordering::Acquire)) != MAGIC {
        return Err(Refused::Layout);
    }
    Ok(FoundRegisters { registers: Mapped::new(file, REGISTERS_AT, PAGE, libc::PROT_READ)?, control })
}

#[cfg(test)]
#[path = "found_tests.rs"]
mod tests;
