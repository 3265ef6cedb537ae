//! Pauses VMs whose disks have lost their servers, and continues them when these are back (docs/decisions/0068-pausing-the-vm.md).
//!
//! ```text
//!   disks: how their connections stand --> plan: what is next --> monitor: stop, cont, query-status, on a thread
//!                                             ^                        |
//!                                             `-- state file: pauses <-'
//! ```
//!
//! One task for all VMs. It asks imports, which answer without a lock, and nothing here runs on an I/O core. While an upgrade is under way it does nothing: the
//! successor finds in the state file what was begun.

mod monitor;
mod plan;
mod probe;
mod vm;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ioplane_api::spec::OnTimeout;

use super::Daemon;
use super::state_file::{Entries, PauseRecord, StateFileError};
use vm::PausableVm;

/// How often disks are looked at whose VM may have to be paused.
const TICK: Duration = Duration::from_millis(200);
/// How often it is asked whether there are any.
const IDLE: Duration = Duration::from_secs(1);

/// What the state file says of pauses.
#[derive(Default)]
struct Wanted {
    /// By the monitor: disks whose policy is to pause, and after which time.
    disks: BTreeMap<PathBuf, BTreeMap<String, Duration>>,
    /// VMs that are paused, or left alone.
    records: BTreeMap<PathBuf, PauseRecord>,
}

impl Wanted {
    fn of(entries: Entries) -> Self {
        let mut disks: BTreeMap<PathBuf, BTreeMap<String, Duration>> = BTreeMap::new();
        for (name, record) in entries.disks {
            if let OnTimeout::Pause(time, qmp) = record.now.backing.on_timeout() {
                disks.entry(qmp.to_owned()).or_default().insert(name, time);
            }
        }
        Wanted { disks, records: entries.pauses }
    }
}

impl Daemon {
    /// Pauses and continues VMs, for as long as the daemon lives.
    pub(super) async fn pause_vms(self: Arc<Self>) {
        let mut vms: BTreeMap<PathBuf, PausableVm> = BTreeMap::new();
        let (mut read, mut wanted) = (None, Wanted::default());
        let none = BTreeMap::new();
        loop {
            // Before it is read, so that what changes in between is read again.
            let version = self.state_file.version();
            if read != Some(version) {
                wanted = Wanted::of(self.state_file.entries());
                read = Some(version);
            }
            for socket in wanted.disks.keys().chain(wanted.records.keys()) {
                vms.entry(socket.clone()).or_insert_with(|| PausableVm::new(socket));
            }
            vms.retain(|socket, vm| {
                let stays = wanted.disks.contains_key(socket) || wanted.records.contains_key(socket);
                stays || vm.is_talking()
            });
            for (socket, vm) in &mut vms {
                let disks = wanted.disks.get(socket).unwrap_or(&none);
                vm.tick(&self, wanted.records.get(socket), disks);
            }
            tokio::time::sleep(if vms.is_empty() { IDLE } else { TICK }).await;
        }
    }

    /// Notes how a VM is, or that nothing is to be known of it. Refused while everything is being handed over.
    fn note_pause(&self, socket: &Path, record: Option<PauseRecord>) -> Result<(), String> {
        let _leave = self.may_change().map_err(|refused| refused.error)?;
        let noted = self.state_file.change(|entries| match record {
            Some(record) => {
                entries.pauses.insert(socket.to_owned(), record);
            }
            None => {
                entries.pauses.remove(socket);
            }
        });
        noted.map_err(|error: StateFileError| error.to_string())
    }
}
