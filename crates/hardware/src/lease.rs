//! Taking a function from its driver for a while, and giving it back whatever happens.
//!
//! ```text
//!   take: look -> write FOLDER/0000:00:05.0.json -> driver_override, unbind, probe -> vfio-pci
//!   give_back (or drop), recover after a crash: unbind -> driver_override off -> its own driver -> remove the file
//! ```
//! Who holds a lease holds an exclusive lock on its file, so that [`recover`] tells a lease of the dead from one of the living.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use ioplane_api::spec::PciAddress;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::error::Obstacle;
use crate::inventory;
use crate::record;
use crate::sysfs::{GROUPS, Sysfs, text};

pub use crate::error::LeaseError;
pub use crate::sysfs::VFIO;

/// How long whoever still has the function open gets to close it.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for what the dead have left, all together: they have closed theirs, or somebody else has it.
const RECOVERY: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// What whoever takes a function takes upon himself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accepted {
    /// The host uses it.
    pub in_use: bool,
    /// Interrupts are not remapped, and VFIO has been told not to mind.
    pub unsafe_interrupts: bool,
}

impl Accepted {
    fn covers(self, obstacle: &Obstacle) -> bool {
        obstacle.forcible && self.in_use || obstacle.unsafe_interrupts && self.unsafe_interrupts
    }
}

/// What has to be known to give a function back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    address: PciAddress,
    /// Who drove it.
    driver: Option<String>,
    /// What `driver_override` was.
    wanted: Option<String>,
}

/// A function that is ours: bound to vfio-pci. Dropped, it goes back to the driver that it had.
#[derive(Debug)]
pub struct Lease {
    root: PathBuf,
    record: Record,
    path: PathBuf,
    /// Holds the lock.
    file: Option<File>,
}

impl Lease {
    /// Takes a function of the host whose sysfs is mounted at `root`. What it was is remembered in `folder`, before anything
    /// is touched. `accepted` is no reason to refuse. One that a dead process had leased is taken over, and goes back to the driver that it
    /// had before that.
    pub fn take(
        root: &Path,
        address: PciAddress,
        folder: &Path,
        accepted: Accepted,
    ) -> Result<Lease, LeaseError> {
        take(&Sysfs::new(root), root, address, folder, accepted)
    }

    /// Whether [`Lease::take`] would refuse it now. Touches nothing.
    pub fn may_take(
        root: &Path,
        address: PciAddress,
        folder: &Path,
        accepted: Accepted,
    ) -> Result<(), LeaseError> {
        let sysfs = Sysfs::new(root);
        open(address, &folder.join(format!("{address}.json")))?;
        may_take(&sysfs, address, accepted).map(drop)
    }

    /// Which function.
    pub fn address(&self) -> PciAddress {
        self.record.address
    }

    /// The driver that it goes back to.
    pub fn driver(&self) -> Option<&str> {
        self.record.driver.as_deref()
    }

    /// Gives it back. Nobody may have it open any more: waits some seconds for that. After an error it is remembered still, for
    /// [`recover`].
    pub fn give_back(mut self) -> Result<(), LeaseError> {
        let sysfs = Sysfs::new(&self.root);
        let _file = self.file.take();
        give_back(&sysfs, &self.record, &self.path, Instant::now() + PATIENCE)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.file.is_some() {
            // What fails stays on the record, and `recover` says so.
            let sysfs = Sysfs::new(&self.root);
            let _ = give_back(&sysfs, &self.record, &self.path, Instant::now() + PATIENCE);
        }
    }
}

/// A function that a dead process had leased.
#[derive(Debug)]
pub struct RecoveredLease {
    /// Which.
    pub address: PciAddress,
    /// Whether it has its own driver again.
    pub outcome: Result<(), LeaseError>,
}

/// Gives back what processes had leased that are dead now. What somebody else has bound to another driver meanwhile is left alone.
pub fn recover(root: &Path, folder: &Path) -> Vec<RecoveredLease> {
    recover_in(&Sysfs::new(root), folder)
}

fn recover_in(sysfs: &Sysfs<'_>, folder: &Path) -> Vec<RecoveredLease> {
    let end = Instant::now() + RECOVERY;
    let mut all = records(folder);
    all.sort_by_key(|(address, _)| *address);
    let one = |(address, path): (PciAddress, PathBuf)| {
        let (_lock, record) = match open(address, &path) {
            Ok(Some(opened)) => opened,
            Ok(None) | Err(LeaseError::Leased(_)) => return None,
            Err(error) => return Some(RecoveredLease { address, outcome: Err(error) }),
        };
        Some(RecoveredLease { address, outcome: give_back(sysfs, &record, &path, end) })
    };
    all.into_iter().filter_map(one).collect()
}

/// Files of records in a folder, by what they are about.
pub(crate) fn records(folder: &Path) -> Vec<(PciAddress, PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let named = |path: PathBuf| {
        let address = path.file_name()?.to_str()?.strip_suffix(".json")?.parse().ok()?;
        Some((address, path))
    };
    entries.filter_map(|entry| named(entry.path())).collect()
}

/// The record of a dead process, locked; `None` if there is none.
fn open(address: PciAddress, path: &Path) -> Result<Option<(File, Record)>, LeaseError> {
    let failed = |source| LeaseError::Record { address, path: path.into(), source };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|_| LeaseError::Leased(address))?;
    // It may have been given back, or replaced, before it was locked.
    let same = |there: fs::Metadata| {
        use std::os::unix::fs::MetadataExt;
        file.metadata().is_ok_and(|ours| (ours.dev(), ours.ino()) == (there.dev(), there.ino()))
    };
    if !fs::metadata(path).is_ok_and(same) {
        return Ok(None);
    }
    let bytes = text(path).unwrap_or_default();
    let record: Record = serde_json::from_str(&bytes).map_err(|error| failed(error.into()))?;
    if record.address != address {
        return Err(failed(io::Error::other(format!("it is about {}: remove it", record.address))));
    }
    Ok(Some((file, record)))
}

fn remember(record: &Record, path: &Path) -> Result<File, LeaseError> {
    record::write(record, path).map_err(|source| LeaseError::Record {
        address: record.address,
        path: path.into(),
        source,
    })
}

fn take(
    sysfs: &Sysfs<'_>,
    root: &Path,
    address: PciAddress,
    folder: &Path,
    accepted: Accepted,
) -> Result<Lease, LeaseError> {
    let path = folder.join(format!("{address}.json"));
    let left = open(address, &path)?;
    let found = may_take(sysfs, address, accepted)?;
    load(sysfs, VFIO)?;
    let (file, record) = match left {
        Some(left) => left,
        None => {
            let wanted = text(&sysfs.function(address).join("driver_override"));
            let wanted = wanted.filter(|wanted| !wanted.is_empty() && wanted != "(null)");
            let record = Record { address, driver: found.driver, wanted };
            (remember(&record, &path)?, record)
        }
    };
    let lease = Lease { root: root.into(), record, path, file: Some(file) };
    match bind(sysfs, address, VFIO, VFIO) {
        Ok(()) => Ok(lease),
        Err(error) => {
            // Back at once, in this tree. If that fails too the record stays, and the first error says what is wrong.
            let Lease { record, path, .. } = &lease;
            let _ = give_back(sysfs, record, path, Instant::now() + RECOVERY);
            let mut lease = lease;
            lease.file = None;
            Err(error)
        }
    }
}

/// The function, if nothing is in the way of taking it but what is accepted.
fn may_take(
    sysfs: &Sysfs<'_>,
    address: PciAddress,
    accepted: Accepted,
) -> Result<inventory::Found, LeaseError> {
    let mut found = inventory::look(sysfs, address, &|_| None).ok_or(LeaseError::NoSuchFunction(address))?;
    let obstacles: Vec<Obstacle> =
        std::mem::take(&mut found.obstacles).into_iter().filter(|o| !accepted.covers(o)).collect();
    match obstacles.is_empty() {
        true => Ok(found),
        false => Err(LeaseError::Refused { address, obstacles }),
    }
}

/// Unbinds the function from whoever has it and binds it to `driver`; `wanted` is left as its `driver_override`.
fn bind(sysfs: &Sysfs<'_>, address: PciAddress, driver: &str, wanted: &str) -> Result<(), LeaseError> {
    let write = |path: PathBuf, text: &str| {
        sysfs.write(&path, text).map_err(|source| LeaseError::Write {
            address,
            path,
            text: text.into(),
            source,
        })
    };
    let override_file = sysfs.function(address).join("driver_override");
    // Not another driver in between.
    write(override_file.clone(), driver)?;
    let before = sysfs.bound_to(address);
    if before.as_deref() != Some(driver) {
        if let Some(before) = before {
            write(sysfs.driver(&before).join("unbind"), &address.to_string())?;
        }
        write(sysfs.probe(), &address.to_string())?;
    }
    if wanted != driver {
        // An empty line takes it off.
        write(override_file, &format!("{wanted}\n"))?;
    }
    let found = sysfs.bound_to(address);
    if found.as_deref() == Some(driver) {
        return Ok(());
    }
    Err(LeaseError::OtherDriver { address, wanted: driver.into(), found })
}

fn give_back(sysfs: &Sysfs<'_>, record: &Record, path: &Path, patience: Instant) -> Result<(), LeaseError> {
    let address = record.address;
    let wanted = record.wanted.as_deref().unwrap_or("");
    // Unplugged: nothing is left to be given back.
    if sysfs.function(address).exists() {
        let now = sysfs.bound_to(address);
        match &record.driver {
            // Another driver has it: somebody gave it away. Only our wish is taken back.
            _ if now.as_deref().is_some_and(|now| now != VFIO) => override_with(sysfs, address, wanted)?,
            Some(driver) if driver == VFIO => bind(sysfs, address, VFIO, wanted)?,
            Some(driver) => {
                wait_until_closed(sysfs, address, patience)?;
                load(sysfs, driver)?;
                bind(sysfs, address, driver, wanted)?;
            }
            None => {
                wait_until_closed(sysfs, address, patience)?;
                if now.is_some() {
                    let path = sysfs.driver(VFIO).join("unbind");
                    let text = address.to_string();
                    sysfs.write(&path, &text).map_err(|source| LeaseError::Write {
                        address,
                        path,
                        text,
                        source,
                    })?;
                }
                override_with(sysfs, address, wanted)?;
            }
        }
    }
    record::remove(path).map_err(|source| LeaseError::Record { address, path: path.into(), source })
}

fn override_with(sysfs: &Sysfs<'_>, address: PciAddress, wanted: &str) -> Result<(), LeaseError> {
    let path = sysfs.function(address).join("driver_override");
    let text = format!("{wanted}\n");
    sysfs.write(&path, &text).map_err(|source| LeaseError::Write { address, path, text, source })
}

/// vfio-pci does not let a function go that is open, and whoever asks waits in the kernel. A group can be opened once, by whoever
/// has its functions or their memory.
fn wait_until_closed(sysfs: &Sysfs<'_>, address: PciAddress, end: Instant) -> Result<(), LeaseError> {
    let Some(group) = sysfs.iommu_group(address) else { return Ok(()) };
    let path = Path::new(GROUPS).join(group.to_string());
    loop {
        match fs::OpenOptions::new().read(true).write(true).open(&path) {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            _ => return Ok(()),
        }
        if Instant::now() >= end {
            return Err(LeaseError::StillOpen { address, group });
        }
        std::thread::sleep(LOOK);
    }
}

/// Makes sure that a driver is there.
fn load(sysfs: &Sysfs<'_>, driver: &str) -> Result<(), LeaseError> {
    if sysfs.driver(driver).exists() {
        return Ok(());
    }
    let failed = |said: String| LeaseError::NoDriver { driver: driver.into(), said };
    let mut names = vec![driver];
    if driver == VFIO {
        names.push("vfio_iommu_type1");
    }
    let programs = ["modprobe", "/usr/sbin/modprobe", "/sbin/modprobe"];
    let run = |program: &&str| Command::new(program).arg("-a").args(&names).output().ok();
    let output = programs.iter().find_map(run).ok_or_else(|| failed("modprobe is not installed".into()))?;
    if sysfs.driver(driver).exists() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(failed(said.trim().chars().take(300).collect()))
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
