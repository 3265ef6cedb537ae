//! A disk's migration socket: where the destination of a migration on this host connects.
//!
//! ```text
//!   source QEMU ----- NAME.sock ------> Blk --------.
//!                                        | lease     +--> one backing, opened and locked once
//!   destination QEMU - NAME.migration.sock -> Blk::second_instance -'
//! ```
//!
//! Both are served all the time; the lease says whose rings run.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use ioplane_api::refusal::Code;
use ioplane_api::report::{DiskReport, DiskSocket};
use ioplane_device::QuiescenceProof;
use ioplane_host::vhost_user::{Handle, Status};
use ioplane_storage::Backing;
use ioplane_virtio::blk::Blk;

use super::Disk;
use crate::context::DaemonContext;
use crate::refusal::Refusal;
use crate::registry::Registry;
use crate::served::{ServedKind, serve};
use crate::state_file::DiskRecord;

/// Puts `fresh` behind both instances, each at a quiescent point of its own, the one inside the other: at no moment can
/// one of them begin a request with the old backing when the other has the new one. `exchange` does it for the first, and
/// what it allows there is allowed here.
pub async fn exchange_both<R: Send + 'static>(
    main: &Handle<Blk>,
    second: &Handle<Blk>,
    fresh: Arc<dyn Backing>,
    exchange: impl FnOnce(&mut Blk, &QuiescenceProof) -> (Result<R, Refusal>, bool) + Send + 'static,
) -> Result<R, Refusal> {
    let main = main.clone();
    let runtime = tokio::runtime::Handle::current();
    let both = move |model: &mut Blk, proof: &QuiescenceProof| -> Result<(R, bool), Refusal> {
        let before = model.bytes();
        let done = runtime.block_on(main.at_quiescence(exchange))??;
        model.replace_backing(proof, fresh).map_err(|why| {
            let remedy = "take the migration socket away and add it again: `ioplane disk migration-socket NAME --remove`";
            Refusal::failed(format!("the migration socket still has the old backing: {why}"), remedy)
        })?;
        Ok((done, before != model.bytes()))
    };
    second
        .at_quiescence(move |model, proof| match tokio::task::block_in_place(|| both(model, proof)) {
            Ok((done, told)) => (Ok(done), told),
            Err(refused) => (Err(refused), false),
        })
        .await?
}

impl Disk {
    /// Opens the migration socket, and writes down that it is there; says whether it is new.
    pub async fn open_migration_socket(
        &self,
        socket: Option<PathBuf>,
        context: &DaemonContext,
    ) -> Result<bool, Refusal> {
        let served = &self.served;
        let _changing = served.changing.lock().await;
        let record = served.note.read();
        let name = &record.now.name;
        if socket.is_none() && record.now.migration_socket.is_some() {
            // Whichever it is: one of its own, or the usual one of a version that called it otherwise.
            return Ok(false);
        }
        let socket = socket.unwrap_or_else(|| context.migration_socket(name));
        if record.now.migration_socket.as_ref() == Some(&socket) {
            return Ok(false);
        }
        if let Some(other) = &record.now.migration_socket {
            return Err(Refusal::conflict(
                format!("disk {name} has a migration socket already: {}", other.display()),
                format!(
                    "use that one, or take it away first: `ioplane disk migration-socket {name} --remove`"
                ),
            )
            .coded(Code::Exists)
            .at("socket"));
        }
        context.claim_socket(Disk::NAME, name, &socket)?;
        let opened = self.serve_migration_socket(&socket, &record, context).await;
        if opened.is_err() {
            context.release_socket(name, &socket);
        }
        opened.map(|()| true)
    }

    async fn serve_migration_socket(
        &self,
        socket: &Path,
        record: &DiskRecord,
        context: &DaemonContext,
    ) -> Result<(), Refusal> {
        let served = &self.served;
        let model = served.handle.change(|model| (model.second_instance(), false)).await?;
        served.note.change(|record| record.now.migration_socket = Some(socket.to_owned()))?;
        match serve(model, socket.to_owned(), record, context, &served.lease) {
            Ok(handle) => {
                *served.second.lock().unwrap_or_else(PoisonError::into_inner) = Some(handle);
                Ok(())
            }
            Err(refused) => {
                served.note.change(|record| record.now.migration_socket = None)?;
                Err(refused)
            }
        }
    }

    /// Closes the migration socket: refuses while a front end is connected there, unless forced.
    pub async fn close_migration_socket(&self, force: bool, context: &DaemonContext) -> Result<(), Refusal> {
        let served = &self.served;
        let _changing = served.changing.lock().await;
        let name = served.note.read().now.name;
        let Some(second) = served.second() else {
            let remedy = format!("`ioplane disk migration-socket {name}` gives it one");
            return Err(Refusal::conflict(format!("disk {name} has no migration socket"), remedy));
        };
        second.stop(force).await?;
        *served.second.lock().unwrap_or_else(PoisonError::into_inner) = None;
        context.release_socket(&name, second.socket());
        served.note.change(|record| record.now.migration_socket = None)
    }
}

impl Registry<Disk> {
    /// Gives a disk a migration socket: at `socket`, or beside its first.
    pub async fn open_migration_socket(&self, name: &str, socket: Option<PathBuf>) -> Result<bool, Refusal> {
        self.served(name)?.open_migration_socket(socket, &self.context).await
    }

    /// Takes it away again.
    pub async fn close_migration_socket(&self, name: &str, force: bool) -> Result<(), Refusal> {
        self.served(name)?.close_migration_socket(force, &self.context).await
    }
}

/// Adds to a report what is to be said of the second instance; `status` becomes that of both.
pub fn add(report: &mut DiskReport, theirs: Status, status: &mut Status) {
    if theirs.owner {
        report.owner = Some(DiskSocket::MigrationSocket);
        // Requests are counted in one place, whichever socket they come by; where a queue is, its owner knows.
        for (queue, theirs) in status.queues.iter_mut().zip(theirs.queues) {
            (queue.size, queue.core, queue.fault) = (theirs.size, theirs.core, theirs.fault);
        }
        (status.features, status.peer) = (theirs.features, theirs.peer);
    }
    if theirs.waiting {
        report.waiting = Some(DiskSocket::MigrationSocket);
    }
    status.connected |= theirs.connected;
    status.connections += theirs.connections;
    for (name, count) in theirs.faults {
        *status.faults.entry(name).or_default() += count;
    }
    if theirs.last_fault.is_some() {
        status.last_fault = theirs.last_fault;
    }
}
