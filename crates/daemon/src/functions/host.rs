//! Functions of this host: taken from its drivers, opened by VFIO, mediated or handed on as they are.

use std::path::Path;
use std::sync::Arc;

use ioplane_api::refusal::Code;
use ioplane_api::spec::{FaultSpec, ModeWord};
use ioplane_hardware::lease::Accepted;
use ioplane_hardware::{HardwareError, Keeper, Lease, LeaseError, PhysicalFunction, Vfio, inventory};
use ioplane_model::{DirectModel, StateModel};
use ioplane_passthrough::catalog;
use ioplane_passthrough::monitor::{Monitor, MonitorError, MonitorOptions};
use ioplane_passthrough::{Cooperating, Migratable, MigratableError, Passthrough};
use ioplane_pci::Identity;

use super::around::FramesFrom;
use super::body::Body;
use super::physical::put_back;
use super::service::After;
use super::{Functions, Opened, SYSFS};
use crate::lower::Lower;
use crate::refusal::Refusal;

impl From<LeaseError> for Refusal {
    fn from(error: LeaseError) -> Self {
        let text = error.to_string();
        match error {
            LeaseError::NoSuchFunction(_) => Refusal::missing(text, "see `ioplane pci list`").at("host"),
            LeaseError::Refused { obstacles, .. } => {
                let force = obstacles.iter().all(|obstacle| obstacle.forcible);
                let remedy: Vec<String> = obstacles.into_iter().map(|obstacle| obstacle.advice).collect();
                let force = if force { "; or take it nevertheless: --force" } else { "" };
                Refusal::conflict(text, remedy.join("; ") + force).at("host")
            }
            LeaseError::Leased(_) => {
                Refusal::conflict(text, "see `ioplane pci list`").coded(Code::Taken).at("host")
            }
            _ => Refusal::failed(text, "see `ioplane doctor` and `dmesg`"),
        }
    }
}

pub(super) fn refuse(error: &HardwareError) -> Refusal {
    let remedy = "see `ioplane doctor`, `ioplane pci list` and `dmesg`";
    match error {
        HardwareError::Gone { .. } | HardwareError::Kept { .. } => {
            Refusal::conflict(error.to_string(), remedy)
        }
        _ => Refusal::failed(error.to_string(), remedy),
    }
}

/// Name of the state model that a function can be mediated by; `None` if it can only be passed through.
pub fn model_of(identity: &Identity) -> Option<String> {
    Some(model(identity)?.name.to_owned())
}

fn model(identity: &Identity) -> Option<&'static StateModel> {
    catalog::find(identity.vendor, identity.device, identity.revision)
}

fn mediate(name: &str, vfio: Vfio, model: &'static StateModel, on_fault: FaultSpec) -> Result<Body, Refusal> {
    let options = MonitorOptions { policies: on_fault.lower(), ..MonitorOptions::new(name) };
    let monitor = Monitor::new(vfio, model, options).map_err(|error| match &error {
        MonitorError::Hardware(below) => refuse(below),
        _ => Refusal::conflict(
            error.to_string(),
            "see `ioplane pci list` and `dmesg`, or add it with --mode passthrough",
        ),
    })?;
    Ok(Body::Mediated(Box::new(monitor)))
}

fn direct_model(identity: &Identity) -> Option<&'static DirectModel> {
    ioplane_moving::catalog::find(identity.vendor, identity.device, identity.revision)
}

/// Before anything is taken from anybody: whether there is what knows it, and somebody to send it frames.
fn may_migrate(
    frames: &FramesFrom,
    identity: &Identity,
    model: Option<&'static DirectModel>,
) -> Result<(), Refusal> {
    let address = frames.address;
    if model.is_none() {
        let Identity { vendor, device, revision, .. } = identity;
        return Err(Refusal::conflict(
            format!(
                "{address} ({vendor:04x}:{device:04x} revision {revision:02x}) has no model by which it could be moved"
            ),
            "add it with --mode passthrough; docs/guide/migratable.md says what can be moved",
        ));
    }
    PhysicalFunction::of(Path::new(SYSFS), address, frames.uplink.as_deref()).map(drop).map_err(|error| {
        let refused = Refusal::conflict(
            error.to_string(),
            "its physical function has to be driven by this host, with its interface up; a host without it, as a VM that has virtual functions, \
             names an interface on the function's network: --uplink INTERFACE",
        );
        if frames.uplink.is_some() { refused.at("uplink") } else { refused }
    })
}

fn migratable(
    name: &str,
    vfio: Vfio,
    model: &'static DirectModel,
    pages: Option<&Path>,
    keeper: Arc<Keeper>,
) -> Result<Body, Refusal> {
    let hardware = match pages {
        Some(socket) => Migratable::lending(vfio, model, socket),
        None => Migratable::new(vfio, model).map_err(MigratableError::Moving),
    };
    let hardware = hardware.map_err(|error| {
        let remedy = match error {
            MigratableError::Moving(_) => "add it with --mode passthrough",
            MigratableError::Pages(_) => "add it without --mapped",
        };
        Refusal::failed(error.to_string(), remedy)
    })?;
    let direct = Passthrough::new(name, hardware, None).map_err(|error| refuse(&error))?;
    Ok(Body::Migratable(Box::new(direct), keeper))
}

fn cooperating(name: &str, vfio: Vfio, mapped: bool, keeper: Arc<Keeper>) -> Result<Body, Refusal> {
    let hardware = Cooperating::new(vfio, mapped).map_err(|error| refuse(&error))?;
    let direct = Passthrough::new(name, hardware, None).map_err(|error| refuse(&error))?;
    Ok(Body::Cooperating(Box::new(direct), keeper))
}

/// Takes a function of the host. `mapped`: pages of its registers may be, by who connects there. Blocks: drivers let go of it, and it is reset.
pub fn open(
    name: &str,
    frames: FramesFrom,
    mode: ModeWord,
    on_fault: FaultSpec,
    mapped: Option<&Path>,
    accepted: Accepted,
    below: &Functions,
) -> Result<Opened, Refusal> {
    let (root, address) = (Path::new(SYSFS), frames.address);
    // Before anything is taken from anybody.
    let found = inventory::find(root, address, model_of)?;
    let model = model(&found.identity);
    let direct_model = direct_model(&found.identity);
    if mode == ModeWord::Virtual && model.is_none() {
        let Identity { vendor, device, revision, .. } = found.identity;
        return Err(Refusal::conflict(
            format!(
                "{address} ({vendor:04x}:{device:04x} revision {revision:02x}) has no state model that could mediate it"
            ),
            "add it with --mode passthrough, or write a model: docs/guide/models.md",
        ));
    }
    if mode == ModeWord::Migratable {
        may_migrate(&frames, &found.identity, direct_model)?;
    }
    // From here on drivers let go of it: whoever could not be served so is not tried again every minute.
    let once = |refused: Refusal| Refusal { retry: false, ..refused };
    let lease = Lease::take(root, address, &below.leases(), accepted).map_err(|error| once(error.into()))?;
    let keeper = Arc::new(Keeper::new(root, &below.physical(), address));
    let opened = Vfio::open(root, address).map_err(|error| refuse(&error)).and_then(|vfio| {
        match (mode, model, direct_model) {
            (ModeWord::Virtual, Some(model), _) => mediate(name, vfio, model, on_fault),
            (ModeWord::Migratable, _, Some(model)) => migratable(name, vfio, model, mapped, keeper),
            (ModeWord::Cooperating, ..) => cooperating(name, vfio, mapped.is_some(), keeper),
            _ => {
                let direct = Passthrough::new(name, vfio, model).map_err(|error| refuse(&error))?;
                Ok(Body::Passthrough(Box::new(direct)))
            }
        }
    });
    match opened {
        Ok(body) => {
            let give_back: After = Box::new(move || Ok(lease.give_back()?));
            let after = put_back(body.keeper()).into_iter().chain([give_back]).collect();
            Ok(Opened { body, after })
        }
        Err(refused) => match lease.give_back() {
            Ok(()) => Err(once(refused)),
            Err(more) => Err(Refusal { error: format!("{}; and {more}", refused.error), ..once(refused) }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_hardware::inventory::Obstacle;

    #[test]
    fn a_hint_is_said_once() {
        let obstacle = |why: &str, advice: &str| Obstacle {
            why: why.into(),
            advice: advice.into(),
            forcible: false,
            unsafe_interrupts: false,
        };
        let address: ioplane_api::spec::PciAddress = "0000:00:05.0".parse().unwrap();
        let obstacles = vec![obstacle("no IOMMU", "switch it on"), obstacle("a bridge", "choose another")];
        let refusal = Refusal::from(LeaseError::Refused { address, obstacles });
        assert_eq!(refusal.error, "0000:00:05.0 cannot be taken: no IOMMU; a bridge");
        assert_eq!(refusal.remedy, "switch it on; choose another");
    }
}
