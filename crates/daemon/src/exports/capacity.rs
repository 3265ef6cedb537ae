//! What all clients of an export may do together: its declared capacity, held by the same buckets as the limits of disks.

use ioplane_api::spec::LimitsSpec;
use ioplane_scheduler::LimitSet;
use ioplane_virtio::DeviceLimits;

use crate::lower::limit;

/// The capacity of one export.
#[derive(Debug, Default)]
pub struct ExportCapacity {
    /// Of all clients together.
    whole: DeviceLimits,
}

impl ExportCapacity {
    /// As it was declared.
    pub fn new(declared: &LimitsSpec) -> Self {
        let mut capacity = ExportCapacity::default();
        capacity.change(declared);
        capacity
    }

    /// Another one from now on.
    pub fn change(&mut self, declared: &LimitsSpec) {
        limit(&mut self.whole, declared);
    }

    /// The limits of a connection.
    pub fn limits(&self) -> LimitSet {
        self.whole.set()
    }
}
