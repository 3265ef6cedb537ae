//! Limits, and what passed of what they count: each device's own, and those that the devices of its group have together.

use std::ops::Add;

use ioplane_api::report::{GroupReport, NicReport, StatusReport};
use ioplane_api::spec::LimitsSpec;

use crate::interval::DeviceActivity;
use crate::side::{LimitActivity, Passed, Side};

/// The part of its limit from which a guest that was held back is at its limit.
const AT_LIMIT: f64 = 0.9;

/// The part that passes under a limit that bites all the time (docs/guide/limits.md promises 0.98). It tells which of two limits
/// on the same thing is the one that bites.
const BITES: f64 = 0.97;

/// The limits of one side, of a device or of its group.
fn limits(
    group: Option<&str>,
    side: Side,
    spec: LimitsSpec,
    passed: Passed,
    own: Passed,
) -> impl Iterator<Item = LimitActivity> {
    let limits = [spec.rate, spec.bandwidth.map(|size| size.0)];
    let counts = [(passed.units, own.units), (passed.bytes, own.bytes)];
    let group = group.map(str::to_owned);
    let all = side.options().into_iter().zip(limits).zip(counts);
    all.filter_map(move |(((option, what), limit), (passed, own))| {
        Some(LimitActivity { group: group.clone(), side, option, what, limit: limit?, passed, own })
    })
}

/// Enters the limits of each device, and those of its group.
pub fn enter(devices: &mut [DeviceActivity], status: &StatusReport) {
    for device in devices.iter_mut() {
        device.limits = own_limits(device, status);
    }
    for group in &status.groups {
        enter_group(devices, group);
    }
}

fn own_limits(device: &DeviceActivity, status: &StatusReport) -> Vec<LimitActivity> {
    let of = |side, spec| {
        let own = device.passed(side);
        limits(None, side, spec, own, own)
    };
    if device.kind == "disk" {
        let disk = status.disks.iter().find(|disk| disk.name == device.name);
        disk.into_iter().flat_map(|disk| of(Side::Disk, disk.limits())).collect()
    } else {
        let nic = status.nics.iter().find(|nic| nic.name == device.name);
        let both =
            |nic: &NicReport| of(Side::Sends, nic.tx_limits()).chain(of(Side::Receives, nic.rx_limits()));
        nic.into_iter().flat_map(both).collect()
    }
}

fn enter_group(devices: &mut [DeviceActivity], group: &GroupReport) {
    let inside = |device: &DeviceActivity| device.group.as_deref() == Some(group.name.as_str());
    for (side, spec) in Side::ALL.into_iter().zip(group.limits()) {
        let members = devices.iter().filter(|device| inside(device));
        let whole = members.map(|device| device.passed(side)).fold(Passed::default(), Passed::add);
        for device in devices.iter_mut().filter(|device| inside(device) && device.has(side)) {
            let own = device.passed(side);
            device.limits.extend(limits(Some(&group.name), side, spec, whole, own));
        }
    }
}

/// Those that hold requests of the device back, each with how often it did.
pub fn biting(device: &DeviceActivity, seconds: f64) -> Vec<(&LimitActivity, u64)> {
    let at_limit: Vec<_> = device
        .limits
        .iter()
        .map(|limit| (limit, device.held(limit.side)))
        .filter(|(limit, held)| *held > 0 && limit.used(seconds) >= AT_LIMIT)
        .collect();
    // Where a device and its group have nearly the same limit, the one that is not used up holds nothing back.
    let other_bites = |limit: &LimitActivity| {
        at_limit.iter().any(|(other, _)| other.is_beside(limit) && other.used(seconds) >= BITES)
    };
    let bites = |limit: &LimitActivity| limit.used(seconds) >= BITES || !other_bites(limit);
    at_limit.iter().filter(|(limit, _)| bites(limit)).copied().collect()
}
