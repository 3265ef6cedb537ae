//! Names that the kernel makes.

use std::path::Path;

use crate::refusal::Refusal;

/// One of `/proc/sys/kernel/random`: `uuid` is another one each time, `boot_id` after each boot.
pub fn random(file: &str) -> Result<String, Refusal> {
    let text = std::fs::read_to_string(Path::new("/proc/sys/kernel/random").join(file));
    text.map(|text| text.trim().to_owned()).map_err(|error| {
        Refusal::failed(format!("/proc/sys/kernel/random/{file}: {error}"), "is /proc mounted?")
    })
}
