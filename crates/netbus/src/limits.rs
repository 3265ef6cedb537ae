//! How much there may be of anything, and for how long.

use std::time::Duration;

/// Most devices of one host.
pub const MOST_DEVICES: usize = 1024;
/// Most hosts that have devices in a directory.
pub const MOST_HOSTS: usize = 1024;
/// Most devices of a directory.
pub const MOST_NAMES: usize = 65_536;
/// Longest message, bytes: all devices of a host with their texts.
pub const LONGEST_MESSAGE: usize = 2 << 20;
/// How long a host counts as being there after its last report.
pub const LEASE: Duration = Duration::from_secs(10);
