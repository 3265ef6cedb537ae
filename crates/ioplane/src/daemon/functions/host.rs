//! Functions of this host: taken from its drivers, opened by VFIO, watched or handed on as they are.

use std::path::Path;
use std::sync::Arc;

use ioplane_passthrough::direct::Direct;
use ioplane_passthrough::{Address, HardwareError, Lease, LeaseError, Vfio};
use ioplane_pci::AnyFunction;

use super::{After, Insight, Opened, SYSFS};
use crate::refusal::Refusal;
use crate::spec::{FaultSpec, ModeWord};

/// Nothing can be seen of a function that is handed on as it is.
struct Blind;

impl Insight for Blind {}

impl From<LeaseError> for Refusal {
    fn from(error: LeaseError) -> Self {
        let text = error.to_string();
        match error {
            LeaseError::NoSuchFunction(_) => Refusal::missing(text, "see `ioplane pci list`"),
            LeaseError::Refused { obstacles, .. } => {
                let force = obstacles.iter().all(|obstacle| obstacle.forcible);
                let remedy: Vec<String> = obstacles.into_iter().map(|obstacle| obstacle.advice).collect();
                let force = if force { "; or take it nevertheless: --force" } else { "" };
                Refusal::conflict(text, remedy.join("; ") + force)
            }
            LeaseError::Leased(_) => Refusal::conflict(text, "see `ioplane pci list`"),
            _ => Refusal::failed(text, "see `ioplane doctor` and `dmesg`"),
        }
    }
}

fn refuse(error: &HardwareError) -> Refusal {
    let remedy = "see `ioplane doctor`, `ioplane pci list` and `dmesg`";
    match error {
        HardwareError::Gone { .. } => Refusal::conflict(error.to_string(), remedy),
        _ => Refusal::failed(error.to_string(), remedy),
    }
}

/// Takes a function of the host. Blocks: drivers let go of it, and it is reset.
pub fn open(
    name: &str,
    address: Address,
    mode: ModeWord,
    _on_fault: FaultSpec,
    forced: bool,
    leases: &Path,
) -> Result<Opened, Refusal> {
    let lease = Lease::take(Path::new(SYSFS), address, leases, forced)?;
    let opened = Vfio::open(Path::new(SYSFS), address).and_then(|vfio| match mode {
        ModeWord::Passthrough => Direct::new(name, vfio, None).map(|direct| Box::new(direct) as AnyFunction),
        ModeWord::Virtual => Err(HardwareError::Gone { function: name.to_owned() }),
    });
    match opened {
        Ok(function) => {
            let give_back: After = Box::new(move || Ok(lease.give_back()?));
            Ok(Opened { function, insight: Arc::new(Blind), after: vec![give_back] })
        }
        Err(error) => {
            let refused = refuse(&error);
            match lease.give_back() {
                Ok(()) => Err(refused),
                Err(more) => Err(Refusal { error: format!("{}; and {more}", refused.error), ..refused }),
            }
        }
    }
}
