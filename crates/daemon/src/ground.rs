//! What everything that is served stands on: cores, ledger, run directory, and the names and sockets that are taken.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ioplane_api::spec::{ServedSpec, socket_flaw};

use super::access::Access;
use super::cores::{Cores, Seating};
use super::ledger::{Ledger, Record};
use crate::refusal::Refusal;

/// Who has a name, and the sockets that go with it.
struct Claim {
    kind: &'static str,
    sockets: Vec<PathBuf>,
}

/// One in a daemon.
pub struct Ground {
    /// The I/O cores.
    pub cores: Arc<Cores>,
    /// The state file.
    pub ledger: Arc<Ledger>,
    run_dir: PathBuf,
    control: PathBuf,
    access: Access,
    claims: Mutex<BTreeMap<String, Claim>>,
    /// Something could not be served, and is to be tried again.
    pub failed: tokio::sync::Notify,
}

impl Ground {
    /// Sockets are made in `run_dir`, for `access`; `control` is the daemon's own.
    pub fn new(
        cores: Arc<Cores>,
        ledger: Arc<Ledger>,
        run_dir: PathBuf,
        control: PathBuf,
        access: Access,
    ) -> Self {
        Ground {
            cores,
            ledger,
            run_dir,
            control,
            access,
            claims: Mutex::default(),
            failed: tokio::sync::Notify::new(),
        }
    }

    /// Who may connect to the sockets.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Where front ends connect.
    pub fn socket(&self, spec: &impl ServedSpec) -> PathBuf {
        spec.socket_in(&self.run_dir)
    }

    /// Where queues go.
    pub fn seating<S: ServedSpec>(&self, record: &Record<S>) -> Seating {
        Seating { pool: self.cores.pool().clone(), core: record.now.core(), moved: record.moved.clone() }
    }

    /// Where a second front end connects, if nobody says otherwise.
    pub fn twin_socket(&self, name: &str) -> PathBuf {
        self.run_dir.join(format!("{name}.twin.sock"))
    }

    /// Takes a name and its sockets; says of what kind the holder of the name is if it is taken.
    pub fn claim(&self, kind: &'static str, spec: &impl ServedSpec) -> Result<(), Refusal> {
        let mut claims = self.claims();
        if let Some(claim) = claims.get(spec.name()) {
            return Err(Refusal::conflict(
                format!("{} {} is there already", claim.kind, spec.name()),
                "give another name",
            ));
        }
        let sockets: Vec<PathBuf> =
            [self.socket(spec)].into_iter().chain(spec.twin().map(Path::to_owned)).collect();
        for (at, socket) in sockets.iter().enumerate() {
            self.check_socket(&claims, kind, socket)?;
            if sockets[..at].contains(socket) {
                let reason = format!("{} is the {kind}'s socket, and to be its second one", socket.display());
                return Err(Refusal::conflict(reason, "give the second one a path of its own"));
            }
        }
        claims.insert(spec.name().to_owned(), Claim { kind, sockets });
        Ok(())
    }

    /// Takes one socket more for a name.
    pub fn claim_socket(&self, kind: &'static str, name: &str, socket: &Path) -> Result<(), Refusal> {
        let mut claims = self.claims();
        self.check_socket(&claims, kind, socket)?;
        if let Some(claim) = claims.get_mut(name) {
            claim.sockets.push(socket.to_owned());
        }
        Ok(())
    }

    /// Gives one socket of a name back.
    pub fn release_socket(&self, name: &str, socket: &Path) {
        if let Some(claim) = self.claims().get_mut(name) {
            claim.sockets.retain(|theirs| theirs != socket);
        }
    }

    fn claims(&self) -> MutexGuard<'_, BTreeMap<String, Claim>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a socket may be there, and is nobody's.
    fn check_socket(
        &self,
        claims: &BTreeMap<String, Claim>,
        kind: &'static str,
        socket: &Path,
    ) -> Result<(), Refusal> {
        if let Some(flaw) = socket_flaw(socket) {
            return Err(Refusal::flaws(&[flaw]));
        }
        if socket == self.control {
            return Err(Refusal::conflict(
                format!("{} is the daemon's control socket", socket.display()),
                format!("give the {kind} another name, or a socket of its own"),
            ));
        }
        let taken = |(_, claim): &(&String, &Claim)| claim.sockets.iter().any(|theirs| theirs == socket);
        match claims.iter().find(taken) {
            Some((name, claim)) => Err(Refusal::conflict(
                format!("{} is the socket of {} {name}", socket.display(), claim.kind),
                format!("give the {kind} another socket"),
            )),
            None => Ok(()),
        }
    }

    /// Gives a name and its sockets back.
    pub fn release(&self, name: &str) {
        self.claims().remove(name);
    }
}
