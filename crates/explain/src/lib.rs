//! Where the time of requests went: from two readings of the daemon to words.
//!
//! ```text
//!   status, then status again --interval--> what each device and core did in between --parts--> where its time went
//!                                                                                            --findings--> causes and remedies
//! ```
//!
//! Pure: no clock, no I/O. Each finding needs what a reader could check in `ioplane status` or `ioplane top`, and its thresholds
//! are constants with their reasons, so that a device without trouble has none. Who calls it keeps the readings of one process: the buckets
//! of [`ioplane_device::Histogram`] in them are not part of JSON.
//!
//! Must not know: the daemon, devices, sockets, time.

mod findings;
mod interval;
mod limits;
mod parts;
mod side;

use ioplane_api::report::{DeviceTimes, ExplainReport, StatusReport};

use interval::{DeviceActivity, Interval};

/// The longest that somebody may look, and how long if nobody says, in seconds.
pub const SECONDS: std::ops::RangeInclusive<u64> = 1..=600;
/// How long if nobody says, in seconds.
pub const USUAL_SECONDS: u64 = 5;

/// What slowed `name` down, a disk, a NIC, a VM or a group, between two readings that are `seconds` apart. `None`: there is none of that name.
pub fn explain(
    before: &StatusReport,
    after: &StatusReport,
    seconds: f64,
    name: &str,
) -> Option<ExplainReport> {
    let mut interval = Interval::between(before, after, seconds);
    limits::enter(&mut interval.devices, after);
    let devices: Vec<_> = interval.devices.iter().filter(|device| device.is(name)).collect();
    if devices.is_empty() && !after.groups.iter().any(|group| group.name == name) {
        return None;
    }
    let mut findings: Vec<_> = devices.iter().flat_map(|device| findings::of(device, &interval)).collect();
    findings.sort_by_key(|finding| finding.cause);
    let choices = devices.iter().flat_map(|device| device.choices()).collect();
    let times = |device: &&DeviceActivity| {
        let text = parts::sentences(device, seconds);
        DeviceTimes { text, ..device.times(seconds) }
    };
    let devices = devices.iter().map(times).collect();
    Some(ExplainReport { name: name.to_owned(), seconds, devices, choices, findings })
}
