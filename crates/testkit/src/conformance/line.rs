//! INTA# as the driver of a NIC under test has it, whichever host is in between.

/// INTA# at the guest's end.
pub(super) trait Line: Send {
    /// Interrupts so far.
    fn count(&self) -> u64;
    /// The guest has acknowledged the last one. False: the device cannot be told now.
    fn unmask(&self) -> bool;
}
