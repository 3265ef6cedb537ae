//! The processors of this host.

use std::path::Path;

/// Whether there is such a processor.
pub(super) fn is_there(cpu: u32) -> bool {
    Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
}

/// Those that are online, as the kernel writes them.
pub(super) fn list() -> String {
    std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default().trim().to_owned()
}
