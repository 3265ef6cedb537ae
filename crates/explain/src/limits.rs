//! Limits, and what passed of what they count: each device's own, and those that the devices of its group have together.

use std::ops::Add;

use ioplane_api::report::{GroupReport, NicReport, StatusReport};
use ioplane_api::spec::LimitsSpec;

use crate::interval::DeviceActivity;

/// The part of its limit from which a guest that was held back is at its limit.
const AT_LIMIT: f64 = 0.9;

/// The part that passes under a limit that bites all the time (docs/guide/limits.md promises 0.98). It tells which of two limits
/// on the same thing is the one that bites.
const BITES: f64 = 0.97;

/// What a limit is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Requests of a disk.
    Disk,
    /// Frames that the guest of a NIC sends.
    Sends,
    /// Frames for it.
    Receives,
}

impl Side {
    const ALL: [Side; 3] = [Side::Disk, Side::Sends, Side::Receives];

    /// Its limits of units and of bytes: their options, and what they count in words.
    fn options(self) -> [(&'static str, &'static str); 2] {
        match self {
            Side::Disk => [("iops-limit", "requests"), ("bandwidth-limit", "bytes")],
            Side::Sends => [("tx-frame-limit", "frames"), ("tx-bandwidth-limit", "bytes")],
            Side::Receives => [("rx-frame-limit", "frames"), ("rx-bandwidth-limit", "bytes")],
        }
    }
}

/// What passed on one side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passed {
    pub units: u64,
    pub bytes: u64,
}

impl Add for Passed {
    type Output = Passed;

    fn add(self, other: Passed) -> Passed {
        Passed { units: self.units + other.units, bytes: self.bytes + other.bytes }
    }
}

/// A limit, under the name of its option, and what passed of what it counts.
#[derive(Debug, Clone)]
pub struct LimitActivity {
    /// The group whose limit it is; nothing: the device's own.
    pub group: Option<String>,
    pub side: Side,
    pub option: &'static str,
    pub what: &'static str,
    pub limit: u64,
    /// Of all that it limits.
    pub passed: u64,
    /// Of this device alone.
    pub own: u64,
}

impl LimitActivity {
    /// Of what it lets pass in `seconds`, the part that has passed.
    fn used(&self, seconds: f64) -> f64 {
        self.passed as f64 / (self.limit as f64 * seconds)
    }

    /// Whether both limit the same.
    fn is_beside(&self, other: &LimitActivity) -> bool {
        self.option == other.option && self.group != other.group
    }
}

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
