//! Surroundings in which nothing happens, for several tests of this crate.

use ioplane_vcpu::{OperandSize, Platform};

/// Surroundings in which nothing happens: all devices are the VMM's, time stands still, and nobody wants the vCPU.
#[derive(Default)]
pub struct Quiet {
    /// The guest's time stamp counter and IA32_TSC_AUX, if they are known.
    pub time_stamp: Option<fn() -> (u64, u32)>,
}

impl Platform for Quiet {
    fn cycles(&mut self) -> u64 {
        0
    }
    fn kicked(&mut self) -> bool {
        false
    }
    fn output_elements(&mut self) -> u64 {
        1
    }
    fn port_leaves_kernel(&mut self, _: u16, _: OperandSize, _: bool) -> bool {
        true
    }
    fn address_leaves_kernel(&mut self, _: u64, _: OperandSize, _: bool) -> bool {
        true
    }
    fn guest_cycles(&mut self) -> Option<u64> {
        self.time_stamp.map(|read| read().0)
    }
    fn guest_time_stamp_auxiliary(&mut self) -> Option<u32> {
        self.time_stamp.map(|read| read().1)
    }
}
