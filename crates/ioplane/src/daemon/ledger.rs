//! The state file: what was decided at run time, so that a daemon that is killed comes back as it was.
//!
//! The configuration says what the administrator wants; the ledger says what is being served now, each with the
//! configuration it started from. [`three_way`] brings the two together. It lives in the run directory, which goes with a
//! reboot, as the guests do; whoever wants a change for longer writes it into the configuration.
//!
//! It is input: another version, a half-written file, or somebody else may have left it. It is refused whole with a clear
//! error, and kept.

use std::collections::BTreeMap;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use crate::spec::{CoreSpec, DiskSpec};

/// A disk, as it is being served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskRecord {
    /// What the configuration said when it was read last; `None` for a disk added at run time.
    pub configured: Option<DiskSpec>,
    /// What it is now.
    pub now: DiskSpec,
    /// Queues that were moved, and where to.
    pub moved: BTreeMap<u16, u32>,
    /// A size set at run time that the backing does not remember by itself (part of a block device).
    pub bytes: Option<u64>,
}

/// A core, as it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoreRecord {
    /// What the configuration said; `None` for a core added at run time.
    pub configured: Option<CoreSpec>,
    /// What it is now; `None` for a configured core that was retired.
    pub now: Option<CoreSpec>,
}

/// Everything in the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entries {
    /// Disks by name.
    pub disks: BTreeMap<String, DiskRecord>,
    /// Configured disks that were removed at run time, as they were configured.
    pub removed: BTreeMap<String, DiskSpec>,
    /// Cores by number.
    pub cores: BTreeMap<u32, CoreRecord>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileV1 {
    format: String,
    version: u32,
    entries: Entries,
}

const FORMAT: &str = "ioplane-state";
const VERSION: u32 = 1;
/// Larger than any that we write: 256 cores and some thousand disks.
const MAX_BYTES: u64 = 8 << 20;

/// Why the state file cannot be used or written. It is as it was.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// It is not what we wrote.
    #[error(
        "the state file {} is damaged: {why}\n  to do: it says which disks were added or changed at run time, and nothing was \
         lost. Repair it, or go on with the configuration alone: mv {0} {0}.damaged", file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The system said no.
    #[error("the state file {}: {source}\n  to do: is its folder there, writable, and is there space?", file.display())]
    Os {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// The state file and what is in it. Every change is on disk when it returns; callers may be at a quiescent point.
#[derive(Debug)]
pub struct Ledger {
    file: PathBuf,
    entries: Mutex<Entries>,
}

impl Ledger {
    /// Reads what an earlier daemon left; nothing if there is none.
    pub fn open(file: &Path) -> Result<Ledger, LedgerError> {
        let os = |source| LedgerError::Os { file: file.to_owned(), source };
        let damaged = |why: String| LedgerError::Damaged { file: file.to_owned(), why };
        let entries = match std::fs::symlink_metadata(file) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Entries::default(),
            Err(e) => return Err(os(e)),
            Ok(meta) => {
                let me = rustix::process::geteuid().as_raw();
                if !meta.is_file() || meta.uid() != me || meta.mode() & 0o022 != 0 {
                    return Err(damaged("not a file that only this user can write".to_owned()));
                }
                if meta.len() > MAX_BYTES {
                    return Err(damaged(format!("{} bytes", meta.len())));
                }
                parse(&std::fs::read(file).map_err(os)?).map_err(damaged)?
            }
        };
        Ok(Ledger { file: file.to_owned(), entries: Mutex::new(entries) })
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is in it now.
    pub fn entries(&self) -> Entries {
        self.lock().clone()
    }

    /// Changes it, on disk first: if that fails nothing has changed.
    pub fn change(&self, change: impl FnOnce(&mut Entries)) -> Result<(), LedgerError> {
        let mut entries = self.lock();
        let mut next = entries.clone();
        change(&mut next);
        if next != *entries {
            self.write(&next).map_err(|source| LedgerError::Os { file: self.file.clone(), source })?;
            *entries = next;
        }
        Ok(())
    }

    fn write(&self, entries: &Entries) -> std::io::Result<()> {
        let whole = FileV1 { format: FORMAT.to_owned(), version: VERSION, entries: entries.clone() };
        let fresh = self.file.with_extension("new");
        let _ = std::fs::remove_file(&fresh);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        serde_json::to_writer_pretty(&mut file, &whole)?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        std::fs::rename(&fresh, &self.file)
    }
}

/// The entries of a file; hostile input.
fn parse(bytes: &[u8]) -> Result<Entries, String> {
    let file: FileV1 = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if file.format != FORMAT || file.version != VERSION {
        return Err(format!(
            "it is {} version {}, this is {FORMAT} version {VERSION}",
            file.format, file.version
        ));
    }
    let Entries { disks, removed, cores } = &file.entries;
    let specs = disks
        .iter()
        .flat_map(|(name, disk)| [Some((name, &disk.now)), disk.configured.as_ref().map(|c| (name, c))]);
    for (name, spec) in specs.flatten().chain(removed) {
        if *name != spec.name {
            return Err(format!("disk {} under the name {name:?}", spec.name));
        }
        if let Some(flaw) = spec.flaws().first() {
            return Err(format!("disk {name}: {}", flaw.reason));
        }
    }
    for (id, core) in cores {
        for spec in [&core.now, &core.configured].into_iter().flatten() {
            // The processor may be gone since: the core then runs unpinned.
            let flaws = CoreSpec { cpu: None, ..spec.clone() }.flaws();
            if spec.id != *id || !flaws.is_empty() {
                return Err(format!(
                    "core {id}: {}",
                    flaws.first().map_or("another number inside", |flaw| &flaw.reason)
                ));
            }
        }
    }
    Ok(file.entries)
}

/// What holds of one field: the configuration if that was changed since `base`, else what it is `now`.
fn pick<T: PartialEq + Clone>(base: &T, configured: &T, now: &T) -> T {
    if base == configured { now.clone() } else { configured.clone() }
}

/// A type whose fields can be brought together.
pub trait ThreeWay: Clone {
    /// The fields of `configured` where they differ from `base`, what the configuration was; the fields of `now` elsewhere.
    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self;
}

impl ThreeWay for DiskSpec {
    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
        DiskSpec {
            name: configured.name.clone(),
            backing: pick(&base.backing, &configured.backing, &now.backing),
            read_only: pick(&base.read_only, &configured.read_only, &now.read_only),
            serial: pick(&base.serial, &configured.serial, &now.serial),
            queues: pick(&base.queues, &configured.queues, &now.queues),
            queue_size: pick(&base.queue_size, &configured.queue_size, &now.queue_size),
            block_size: pick(&base.block_size, &configured.block_size, &now.block_size),
            socket: pick(&base.socket, &configured.socket, &now.socket),
            core: pick(&base.core, &configured.core, &now.core),
        }
    }
}

impl ThreeWay for CoreSpec {
    fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
        CoreSpec {
            id: configured.id,
            cpu: pick(&base.cpu, &configured.cpu, &now.cpu),
            notify: pick(&base.notify, &configured.notify, &now.notify),
            spin_us: pick(&base.spin_us, &configured.spin_us, &now.spin_us),
            budget: pick(&base.budget, &configured.budget, &now.budget),
            manners: pick(&base.manners, &configured.manners, &now.manners),
        }
    }
}

/// The record of a disk that the configuration names, given what is known of it.
pub fn disk_record(configured: &DiskSpec, known: Option<&DiskRecord>) -> DiskRecord {
    let fresh = DiskRecord {
        configured: Some(configured.clone()),
        now: configured.clone(),
        moved: BTreeMap::new(),
        bytes: None,
    };
    match known {
        // Added at run time, and written into the configuration since: as the configuration has it.
        None | Some(DiskRecord { configured: None, .. }) => fresh,
        Some(DiskRecord { configured: Some(base), now, moved, bytes }) => {
            let merged = DiskSpec::three_way(base, configured, now);
            let same = merged.backing == now.backing;
            DiskRecord {
                configured: Some(configured.clone()),
                moved: if configured.core == base.core { moved.clone() } else { BTreeMap::new() },
                bytes: bytes.filter(|_| same),
                now: merged,
            }
        }
    }
}
