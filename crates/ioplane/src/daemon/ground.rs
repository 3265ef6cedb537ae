//! What everything that is served stands on: cores, ledger, run directory, and the names and sockets that are taken.

use std::collections::BTreeMap;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::cores::{Cores, Seating};
use super::ledger::{Ledger, Record};
use crate::refusal::Refusal;
use crate::spec::{Access, ServedSpec, socket_flaw};

/// Who has a name, and the socket that goes with it.
struct Claim {
    kind: &'static str,
    socket: PathBuf,
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
        Ground { cores, ledger, run_dir, control, access, claims: Mutex::default() }
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

    /// Takes a name and its socket; says of what kind the holder of the name is if it is taken.
    pub fn claim(&self, kind: &'static str, spec: &impl ServedSpec) -> Result<(), Refusal> {
        let socket = self.socket(spec);
        if let Some(flaw) = socket_flaw(&socket) {
            return Err(Refusal::flaws(&[flaw]));
        }
        if socket == self.control {
            return Err(Refusal::conflict(
                format!("{} is the daemon's control socket", socket.display()),
                format!("give the {kind} another name, or a socket of its own"),
            ));
        }
        let mut claims = self.claims.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, claim) in claims.iter() {
            if name == spec.name() {
                return Err(Refusal::conflict(
                    format!("{} {name} is there already", claim.kind),
                    "give another name",
                ));
            }
            if claim.socket == socket {
                return Err(Refusal::conflict(
                    format!("{} is the socket of {} {name}", socket.display(), claim.kind),
                    format!("give the {kind} another socket"),
                ));
            }
        }
        claims.insert(spec.name().to_owned(), Claim { kind, socket });
        Ok(())
    }

    /// Gives a name and its socket back.
    pub fn release(&self, name: &str) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

impl Access {
    /// Lets others than the daemon's user connect to a socket that was made for that one alone.
    pub fn open(self, socket: &Path) -> Result<(), Refusal> {
        if self == Access::default() {
            return Ok(());
        }
        let open = || {
            // The group first: nobody is let in by mistake between the two.
            chown(socket, None, self.group)?;
            std::fs::set_permissions(socket, std::fs::Permissions::from_mode(self.mode))
        };
        open().map_err(|error| {
            let remedy =
                "may the daemon's user give files to socket_group, and is socket_mode what you want?";
            Refusal::failed(format!("who may connect to {}: {error}", socket.display()), remedy)
        })
    }
}
