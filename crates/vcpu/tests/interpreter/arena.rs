//! A small linear memory: a page of code and three of data, at addresses that also exist in this process.

use std::cell::Cell;
use std::rc::Rc;

use ioplane_vcpu::{Denied, INSTRUCTION_BYTES, LinearMemory, OperandSize, Platform, StopReason};

pub const BASE: u64 = 0x1000_0000;
pub const CODE: u64 = BASE;
pub const DATA: u64 = BASE + 0x1000;
pub const END: u64 = BASE + 0x4000;
pub const SIZE: usize = 0x4000;
/// Reads and writes of this page go to a device, at the guest-physical address [`DEVICE_ADDRESS`].
pub const DEVICE: u64 = 0x2000_0000;
pub const DEVICE_ADDRESS: u64 = 0xfee0_0000;

#[derive(Clone)]
pub struct Arena {
    pub bytes: Vec<u8>,
    /// Denies the access with this number, counted from 0.
    pub deny: Option<usize>,
    /// Panics at the access with this number.
    pub panic: Option<usize>,
    pub accesses: usize,
    pub denied: bool,
    /// How often code was fetched: once for each step.
    pub fetches: Rc<Cell<u64>>,
}

impl Arena {
    pub fn new(bytes: Vec<u8>) -> Self {
        assert_eq!(bytes.len(), SIZE);
        Self { bytes, deny: None, panic: None, accesses: 0, denied: false, fetches: Rc::default() }
    }

    pub fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = usize::try_from(address - BASE).unwrap();
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn at(&mut self, linear: u64, bytes: u64) -> Result<usize, Denied> {
        let number = self.accesses;
        self.accesses += 1;
        if self.panic == Some(number) {
            // As a panic, without its message.
            std::panic::resume_unwind(Box::new("a fault that the test has made"));
        }
        if self.deny == Some(number) {
            self.denied = true;
            return Err(Denied::Stop(StopReason::Slot));
        }
        if (DEVICE..DEVICE + 0x1000).contains(&linear) {
            return Err(Denied::Device(DEVICE_ADDRESS + (linear - DEVICE)));
        }
        if linear < BASE || linear > END - bytes {
            return Err(Denied::Stop(StopReason::Slot));
        }
        Ok(usize::try_from(linear - BASE).unwrap())
    }

    fn at_line(&mut self, linear: u64, bytes: u64) -> Result<usize, Denied> {
        if linear % 64 + bytes > 64 {
            return Err(Denied::Stop(StopReason::Atomic));
        }
        self.at(linear, bytes)
    }
}

impl LinearMemory for Arena {
    fn fetch(&mut self, linear: u64, bytes: &mut [u8; INSTRUCTION_BYTES]) -> Result<usize, Denied> {
        self.fetches.set(self.fetches.get() + 1);
        let at = self.at(linear, 1)?;
        let there = &self.bytes[at..self.bytes.len().min(at + INSTRUCTION_BYTES)];
        bytes[..there.len()].copy_from_slice(there);
        Ok(there.len())
    }

    fn load(&mut self, linear: u64, size: OperandSize) -> Result<u64, Denied> {
        let at = self.at(linear, size.bytes())?;
        let mut value = [0; 8];
        let bytes = usize::try_from(size.bytes()).unwrap();
        value[..bytes].copy_from_slice(&self.bytes[at..at + bytes]);
        Ok(u64::from_le_bytes(value))
    }

    fn store(&mut self, linear: u64, size: OperandSize, value: u64) -> Result<(), Denied> {
        let at = self.at(linear, size.bytes())?;
        let bytes = usize::try_from(size.bytes()).unwrap();
        self.bytes[at..at + bytes].copy_from_slice(&value.to_le_bytes()[..bytes]);
        Ok(())
    }

    fn compare_exchange(
        &mut self,
        linear: u64,
        size: OperandSize,
        current: u64,
        new: u64,
    ) -> Result<u64, Denied> {
        let at = self.at_line(linear, size.bytes())?;
        let bytes = usize::try_from(size.bytes()).unwrap();
        let mut found = [0; 8];
        found[..bytes].copy_from_slice(&self.bytes[at..at + bytes]);
        let found = u64::from_le_bytes(found);
        if found == current {
            self.bytes[at..at + bytes].copy_from_slice(&new.to_le_bytes()[..bytes]);
        }
        Ok(found)
    }

    fn compare_exchange_wide(&mut self, linear: u64, current: u128, new: u128) -> Result<u128, Denied> {
        if !linear.is_multiple_of(16) {
            return Err(Denied::Stop(StopReason::Exception));
        }
        let at = self.at_line(linear, 16)?;
        let found = u128::from_le_bytes(self.bytes[at..at + 16].try_into().unwrap());
        if found == current {
            self.bytes[at..at + 16].copy_from_slice(&new.to_le_bytes());
        }
        Ok(found)
    }

    fn check_store(&mut self, linear: u64, bytes: u64) -> Result<(), Denied> {
        self.at(linear, bytes).map(|_| ())
    }
}

/// A platform whose clock moves by one each time that it is read.
#[derive(Default)]
pub struct Surroundings {
    pub now: u64,
    pub kick_at: Option<u64>,
    /// Kicks while the step with this number is carried out, counted from 1.
    pub kick_in_step: Option<(Rc<Cell<u64>>, u64)>,
    pub in_kernel: Vec<u64>,
    pub may_enable_interrupts: bool,
    pub interrupt_at: Option<u64>,
}

impl Platform for Surroundings {
    fn cycles(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    fn kicked(&mut self) -> bool {
        self.kick_at.is_some_and(|at| self.now >= at)
            || self.kick_in_step.as_ref().is_some_and(|(fetches, step)| fetches.get() >= *step)
    }

    fn may_enable_interrupts(&mut self) -> bool {
        self.may_enable_interrupts
    }

    fn interrupt_waits(&mut self) -> bool {
        self.interrupt_at.is_some_and(|at| self.now >= at)
    }

    fn output_elements(&mut self) -> u64 {
        4096
    }

    fn port_leaves_kernel(&mut self, port: u16, _size: OperandSize, _write: bool) -> bool {
        !self.in_kernel.contains(&u64::from(port))
    }

    fn address_leaves_kernel(&mut self, address: u64, _size: OperandSize, _write: bool) -> bool {
        !self.in_kernel.contains(&address)
    }
}
