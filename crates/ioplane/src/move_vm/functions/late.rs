//! A QEMU of the other host that is started only within the migration, as by libvirt.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::ExpectedReport;
use ioplane_cli::client::Client;
use ioplane_cli::output::CommandError;

use super::super::monitor::Monitor;

/// How long that QEMU may take to be found, and between two tries.
pub(super) const FOUND: Duration = Duration::from_secs(4);
const AGAIN: Duration = Duration::from_millis(50);

/// The other host, whose QEMU is not there yet.
pub(in crate::move_vm) struct Late {
    /// Looks at it once that is there: its monitor. `None`: it is being looked at, by another thread.
    pub look: Option<Look>,
    /// What says whether the VM is expected there still, if somebody does.
    pub still: Option<Client>,
}

/// How it is looked at.
pub(in crate::move_vm) type Look = Box<dyn FnMut() -> Result<Monitor> + Send>;

/// Looks until the QEMU there is found, or the time is over, on a thread that nobody has to wait for.
pub(super) fn finds(mut look: Look) -> mpsc::Receiver<Result<Monitor>> {
    let (tell, found) = mpsc::channel();
    let end = Instant::now() + FOUND;
    std::thread::spawn(move || {
        loop {
            match look() {
                Err(_) if Instant::now() < end => std::thread::sleep(AGAIN),
                // Whoever has waited may be gone.
                looked => return drop(tell.send(looked)),
            }
        }
    });
    found
}

/// Whether the other host expects the VM still. An error comes with whether that host has said so: one that is not reached may be again.
pub(super) fn is_expected(there: &Client) -> std::result::Result<(), (bool, anyhow::Error)> {
    let said = there.get::<Vec<ExpectedReport>>("/v1/expected");
    said.map(drop).map_err(|error| {
        let body = error.downcast_ref::<CommandError>();
        (body.is_some_and(|CommandError(body)| body.code == Code::Conflict.word()), error)
    })
}
