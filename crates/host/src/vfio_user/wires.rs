//! What of the client's is on the function's interrupts.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_pci::Irq;

/// What of the client's is on the function.
#[derive(Debug, Default)]
pub(super) struct Wires {
    /// Vectors that have a wire: to be taken off.
    pub wired: BTreeSet<(Irq, u16)>,
    /// Readable when the guest has acknowledged INTA#: KVM's resample descriptor.
    pub resume: Option<Arc<OwnedFd>>,
    /// It was, while the device was away.
    pub owed_unmask: bool,
}
