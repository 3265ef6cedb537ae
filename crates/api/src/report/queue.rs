//! What is the same of the queues of all kinds of devices, for those who show or count them without knowing the kind.

use super::{ChoiceReport, FaultReport, NicQueueReport, QueueReport, Role};

/// What a queue did. A unit is a request of a disk or a frame of a NIC.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct QueueWork {
    /// Requests answered, or frames.
    pub units: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Kicks: each is an exit of the guest.
    pub kicks: u64,
    /// That many for each unit.
    pub kicks_per_unit: f64,
    /// Batches that were found without one.
    pub kicks_avoided: u64,
    /// Interrupts sent.
    pub interrupts: u64,
    /// That many for each unit.
    pub interrupts_per_unit: f64,
    /// Batches without one.
    pub interrupts_avoided: u64,
    /// Device time, half of the units, microseconds.
    pub p50_us: f64,
    /// 99 of 100.
    pub p99_us: f64,
    /// Waiting for the core, half of the units, microseconds.
    pub wait_p50_us: f64,
    /// 99 of 100.
    pub wait_p99_us: f64,
    /// From having results to having sent the interrupt for them, half of the interrupts, microseconds.
    pub interrupt_p50_us: f64,
    /// 99 of 100.
    pub interrupt_p99_us: f64,
}

/// A queue of a disk or of a NIC.
pub trait DeviceQueue {
    /// What its units are called.
    const UNITS: &'static str;

    /// Its number.
    fn index(&self) -> u16;
    /// What it is for, where a device has queues for several things.
    fn role(&self) -> Option<Role>;
    /// Entries of its ring; 0 until the driver has set it up.
    fn size(&self) -> u16;
    /// The I/O core it is on, if it runs.
    fn core(&self) -> Option<u32>;
    /// Why it has stopped for good.
    fn fault(&self) -> Option<&FaultReport>;
    /// How its core learns of its requests, and why.
    fn choice(&self) -> Option<&ChoiceReport>;
    /// What it did.
    fn work(&self) -> QueueWork;
}

macro_rules! device_queue {
    ($kind:ty, $units:ident, $kicks_per_unit:ident, $interrupts_per_unit:ident, $role:expr) => {
        impl DeviceQueue for $kind {
            const UNITS: &'static str = stringify!($units);

            fn index(&self) -> u16 {
                self.index
            }

            fn role(&self) -> Option<Role> {
                let role: fn(&$kind) -> Option<Role> = $role;
                role(self)
            }

            fn size(&self) -> u16 {
                self.size
            }

            fn core(&self) -> Option<u32> {
                self.core
            }

            fn fault(&self) -> Option<&FaultReport> {
                self.fault.as_ref()
            }

            fn choice(&self) -> Option<&ChoiceReport> {
                self.choice.as_ref()
            }

            fn work(&self) -> QueueWork {
                let counts = &self.counts;
                QueueWork {
                    units: counts.$units,
                    bytes: counts.bytes,
                    kicks: counts.kicks,
                    kicks_per_unit: counts.$kicks_per_unit,
                    kicks_avoided: counts.kicks_avoided,
                    interrupts: counts.interrupts,
                    interrupts_per_unit: counts.$interrupts_per_unit,
                    interrupts_avoided: counts.interrupts_avoided,
                    p50_us: counts.p50_us,
                    p99_us: counts.p99_us,
                    wait_p50_us: counts.wait_p50_us,
                    wait_p99_us: counts.wait_p99_us,
                    interrupt_p50_us: counts.interrupt_p50_us,
                    interrupt_p99_us: counts.interrupt_p99_us,
                }
            }
        }
    };
}

device_queue!(QueueReport, requests, kicks_per_request, interrupts_per_request, |_| None);
device_queue!(NicQueueReport, frames, kicks_per_frame, interrupts_per_frame, |queue| Some(queue.role));
