//! What limits are for, and what passed of what they count.

use std::ops::Add;

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
    pub const ALL: [Side; 3] = [Side::Disk, Side::Sends, Side::Receives];

    /// Its limits of units and of bytes: their options, and what they count in words.
    pub fn options(self) -> [(&'static str, &'static str); 2] {
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
    pub fn used(&self, seconds: f64) -> f64 {
        self.passed as f64 / (self.limit as f64 * seconds)
    }

    /// Whether both limit the same.
    pub fn is_beside(&self, other: &LimitActivity) -> bool {
        self.option == other.option && self.group != other.group
    }
}
