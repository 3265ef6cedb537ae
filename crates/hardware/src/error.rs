//! What stands in the way of a function of the host: before it is taken, while it is taken, and when it is given back.

use std::io;
use std::path::PathBuf;

use ioplane_api::spec::PciAddress;
use serde::Serialize;

/// A reason why a function cannot be handed to a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Obstacle {
    /// The reason.
    pub why: String,
    /// What to do about it.
    pub advice: String,
    /// Whether a user who insists may have it nevertheless.
    pub forcible: bool,
    /// Whether a user who accepts interrupts that are not remapped may have it nevertheless.
    pub unsafe_interrupts: bool,
}

/// What could not be found out about the host's functions, taken or given back.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// The kernel shows no PCI functions.
    #[error("{folder}: {source}: is /sys mounted, and has this machine PCI?", folder = .folder.display())]
    NoPci {
        /// Where they should be.
        folder: PathBuf,
        /// What happened.
        source: io::Error,
    },
    /// There is none at that address.
    #[error("{0}: no such PCI function; `ioplane pci list` shows what there is")]
    NoSuchFunction(PciAddress),
    /// Something stands in the way.
    #[error("{address} cannot be taken: {}", reasons(.obstacles))]
    Refused {
        /// Which.
        address: PciAddress,
        /// What does.
        obstacles: Vec<Obstacle>,
    },
    /// A living process has leased it.
    #[error("{0} is leased by another process: remove it there first")]
    Leased(PciAddress),
    /// The driver is not there and cannot be loaded.
    #[error(
        "the driver {driver} cannot be loaded: {said}; install the kernel's modules, or `modprobe {driver}` by hand"
    )]
    NoDriver {
        /// Which.
        driver: String,
        /// What modprobe said.
        said: String,
    },
    /// The kernel did not take what was written.
    #[error("{address}: writing {text:?} to {path}: {source}; this needs root", path = .path.display())]
    Write {
        /// Which.
        address: PciAddress,
        /// Where.
        path: PathBuf,
        /// What.
        text: String,
        /// What happened.
        source: io::Error,
    },
    /// Everything was written, and yet another driver has it, or none.
    #[error(
        "{address} should be driven by {wanted}, but {}: see `dmesg`, then `echo {address} > /sys/bus/pci/drivers_probe`",
        found.as_ref().map_or("has no driver".to_owned(), |found| format!("{found} has it"))
    )]
    OtherDriver {
        /// Which.
        address: PciAddress,
        /// Who should have it.
        wanted: String,
        /// Who has.
        found: Option<String>,
    },
    /// Some process has it open, so that its driver would wait for ever.
    #[error(
        "{address} is still open in some process, probably a VMM whose guest has it mapped: end that (`fuser -v \
         /dev/vfio/{group}`); it is given back when ioplane starts the next time"
    )]
    StillOpen {
        /// Which.
        address: PciAddress,
        /// Its IOMMU group.
        group: u32,
    },
    /// The file that remembers its driver.
    #[error("{path}: {source}: what {address} has to be given back to cannot be remembered there", path = .path.display())]
    Record {
        /// Which.
        address: PciAddress,
        /// The file.
        path: PathBuf,
        /// What happened.
        source: io::Error,
    },
}

/// What stands in the way; what to do about it is [`Obstacle::advice`], which the reader of the error prints.
fn reasons(obstacles: &[Obstacle]) -> String {
    obstacles.iter().map(|obstacle| obstacle.why.as_str()).collect::<Vec<_>>().join("; ")
}
