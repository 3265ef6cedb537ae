//! The meters of the slots that a core has: entered by whoever sends a slot, read by the control plane.

#![expect(
    clippy::disallowed_types,
    reason = "senders and readers lock it, on the control plane; the core never does"
)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_device::SlotMeter;

// CONTROL: senders of slots and readers of meters.
/// One for each core. The core tells nobody when a slot goes: its meter is then held by this table only.
#[derive(Debug, Default)]
pub(crate) struct MeterTable(Mutex<Vec<Arc<SlotMeter>>>);

impl MeterTable {
    /// The table, without the meters of slots that are gone.
    fn lock(&self) -> MutexGuard<'_, Vec<Arc<SlotMeter>>> {
        let mut meters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        meters.retain(|meter| Arc::strong_count(meter) > 1);
        meters
    }

    /// Enters the meter of a slot that is about to be sent.
    pub(crate) fn enter(&self, meter: &Arc<SlotMeter>) {
        self.lock().push(meter.clone());
    }

    /// Those of the slots that the core has, or is about to have. One whose poller has parked a moment ago may be among them.
    pub(crate) fn all(&self) -> Vec<Arc<SlotMeter>> {
        self.lock().clone()
    }
}
