//! What becomes of the vCPUs of a function's QEMU, by the library in its process, which the daemon of that function tells.

use anyhow::Result;
use ioplane_api::report::DoneReport;
use ioplane_api::request::{HoldVcpusForm, KeepVcpusForm, StopWord};
use ioplane_cli::client::{Client, Method};

/// Has no vCPU of a function's QEMU enter its guest, or lets them.
pub(in crate::move_vm) fn hold(host: &Client, name: &str, held: bool) -> Result<()> {
    let form = HoldVcpusForm { held };
    host.ask::<DoneReport>(Method::PUT, &format!("/v1/pci/{name}/vcpus"), Some(&form)).map(drop)
}

/// Says what becomes of vCPUs that a function's QEMU wants back.
pub(super) fn say(host: &Client, name: &str, stop: StopWord) -> Result<()> {
    let form = KeepVcpusForm { stop };
    host.ask::<DoneReport>(Method::PUT, &format!("/v1/pci/{name}/stop"), Some(&form)).map(drop)
}
