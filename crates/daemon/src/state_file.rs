//! The state file: what was decided at run time, so that a daemon that is killed comes back as it was.
//!
//! The configuration says what the administrator wants; the state file says what is being served now, each with the
//! configuration it started from. [`three_way`] brings the two together. It lives in the run directory, which goes with a
//! reboot, as the guests do; whoever wants a change for longer writes it into the configuration.
//!
//! It is input: another version, a half-written file, or somebody else may have left it. It is refused whole with a clear
//! error, and kept.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ioplane_api::report::MoveStep;
use ioplane_api::request::MoveNoteForm;
use ioplane_api::spec::{
    BackingSpec, CoreSpec, DiskSpec, ExportSpec, Flaw, FunctionSpec, GroupSpec, NicSpec, ServedSpec,
    SwitchSpec,
};
use ioplane_nbd::import::ClaimWish;
use ioplane_storage::ImageId;
use serde::{Deserialize, Serialize};

/// A disk, a NIC, a PCI function or an export, as it is being served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record<S> {
    /// What the configuration said when it was read last; `None` for what was added at run time.
    pub configured: Option<S>,
    pub now: S,
    /// Queues that were moved, and where to.
    pub moved: BTreeMap<u16, u32>,
    /// A disk's size, set at run time, that the backing does not remember by itself (part of a block device).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// A disk's image, opened as raw. Its guest may have written anything since, the first bytes of another format too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// Where a PCI function is on its way from one host to another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<MoveStepRecord>,
    /// How it comes by the claim to an export of others. One that is read from the file has a guest that may know an older one.
    #[serde(skip)]
    pub claim: ClaimWish,
}

/// Where a PCI function is on its way from one host to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MoveStepRecord {
    pub step: MoveStep,
    /// VMMs that had come to it by then: another one knows nothing of that.
    pub connections: u64,
}

/// A disk, as it is being served.
pub type DiskRecord = Record<DiskSpec>;
/// An export, as it is being served.
pub type ExportRecord = Record<ExportSpec>;
/// A NIC, as it is being served.
pub type NicRecord = Record<NicSpec>;
/// A PCI function, as it is being served.
pub type FunctionRecord = Record<FunctionSpec>;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchRecord {
    /// What the configuration said; `None` for a switch added at run time.
    pub configured: Option<SwitchSpec>,
    pub now: SwitchSpec,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupRecord {
    /// What the configuration said; `None` for a group added at run time.
    pub configured: Option<GroupSpec>,
    pub now: GroupSpec,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoreRecord {
    /// What the configuration said; `None` for a core added at run time.
    pub configured: Option<CoreSpec>,
    /// What it is now; `None` for a configured core that was retired.
    pub now: Option<CoreSpec>,
}

/// A swap of a disk: whoever finds it after a crash rolls it back, or finishes it once it is `switched`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwapRecord {
    pub from: BackingSpec,
    pub to: BackingSpec,
    /// The disk is on the new backing: written together with the disk's record that says so.
    pub switched: bool,
}

/// How far the pause of a VM has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PauseStage {
    /// `stop` is about to be sent, or was: written before it, so that no VM stays paused since nobody knows why.
    Pausing,
    /// It has been stopped by us.
    Paused,
    /// Somebody else has decided: nothing is done until the disks are back.
    Left,
}

/// A VM that was paused since disks had lost their servers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PauseRecord {
    pub stage: PauseStage,
    /// The disks that hold it.
    pub disks: BTreeSet<String>,
    /// Which socket its monitor had (device, inode, time): another one is another VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<String>,
    /// Since when, in ms since 1970.
    pub since_ms: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entries {
    pub disks: BTreeMap<String, DiskRecord>,
    /// Configured disks that were removed at run time, as they were configured.
    pub removed: BTreeMap<String, DiskSpec>,
    pub cores: BTreeMap<u32, CoreRecord>,
    #[serde(default)]
    pub switches: BTreeMap<String, SwitchRecord>,
    #[serde(default)]
    pub nics: BTreeMap<String, NicRecord>,
    /// Configured NICs that were removed at run time, as they were configured.
    #[serde(default)]
    pub removed_nics: BTreeMap<String, NicSpec>,
    /// Configured switches that were removed at run time, as they were configured.
    #[serde(default)]
    pub removed_switches: BTreeMap<String, SwitchSpec>,
    /// Groups by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub groups: BTreeMap<String, GroupRecord>,
    /// PCI functions by name.
    #[serde(default)]
    pub functions: BTreeMap<String, FunctionRecord>,
    /// Configured PCI functions that were removed at run time, as they were configured.
    #[serde(default)]
    pub removed_functions: BTreeMap<String, FunctionSpec>,
    /// Exports by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exports: BTreeMap<String, ExportRecord>,
    /// Configured exports that were removed at run time, as they were configured.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub removed_exports: BTreeMap<String, ExportSpec>,
    /// Swaps of disks, by name, from their beginning until nothing is left to do for them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub swaps: BTreeMap<String, SwapRecord>,
    /// What is to be said of backings that cannot be marked themselves, by mark and place.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub marks: BTreeMap<String, String>,
    /// TAP devices that the daemon has made, by name, with the numbers that they got then.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub taps: BTreeMap<String, u32>,
    /// Moves of VMs with PCI functions, by the names of the VMs, until they have come to their end.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub moves: BTreeMap<String, MoveNoteForm>,
    /// VMs that were paused, by the sockets of their monitors.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pauses: BTreeMap<PathBuf, PauseRecord>,
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
pub enum StateFileError {
    /// It is not what we wrote.
    #[error(
        "the state file {} is damaged: {why}\n  hint: it says which disks were added or changed at run time, and nothing was \
         lost. Repair it, or go on with the configuration alone: mv {0} {0}.damaged", file.display()
    )]
    Damaged { file: PathBuf, why: String },
    /// The system said no.
    #[error("the state file {}: {source}\n  hint: is its directory there, writable, and is there space?", file.display())]
    Os {
        file: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// The state file and what is in it. Every change is on disk when it returns; callers may be at a quiescent point.
#[derive(Debug)]
pub struct StateFile {
    file: PathBuf,
    entries: Mutex<Entries>,
    version: AtomicU64,
}

impl StateFile {
    /// Reads what an earlier daemon left; nothing if there is none.
    pub fn open(file: &Path) -> Result<StateFile, StateFileError> {
        let os = |source| StateFileError::Os { file: file.to_owned(), source };
        let damaged = |why: String| StateFileError::Damaged { file: file.to_owned(), why };
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
        Ok(StateFile { file: file.to_owned(), entries: Mutex::new(entries), version: AtomicU64::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn entries(&self) -> Entries {
        self.lock().clone()
    }

    /// Looks at them.
    pub fn look<R>(&self, look: impl FnOnce(&Entries) -> R) -> R {
        look(&self.lock())
    }

    /// How often the entries have changed since they were read.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Changes it, on disk first: if that fails nothing has changed.
    pub fn change(&self, change: impl FnOnce(&mut Entries)) -> Result<(), StateFileError> {
        let mut entries = self.lock();
        let mut next = entries.clone();
        change(&mut next);
        if next != *entries {
            self.write(&next).map_err(|source| StateFileError::Os { file: self.file.clone(), source })?;
            *entries = next;
            self.version.fetch_add(1, Ordering::Release);
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
        std::fs::rename(&fresh, &self.file)?;
        let folder = self.file.parent().filter(|folder| !folder.as_os_str().is_empty());
        std::fs::File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
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
    let Entries { disks, removed, cores, switches, nics, removed_nics, removed_switches, .. } = &file.entries;
    check_served("disk", disks, removed)?;
    check_served("nic", nics, removed_nics)?;
    check_served("PCI function", &file.entries.functions, &file.entries.removed_functions)?;
    check_served("export", &file.entries.exports, &file.entries.removed_exports)?;
    let specs = switches
        .iter()
        .flat_map(|(name, it)| [Some((name, &it.now)), it.configured.as_ref().map(|c| (name, c))]);
    for (name, spec) in specs.flatten().chain(removed_switches) {
        check("switch", name, &spec.name, &spec.flaws())?;
    }
    for (name, group) in &file.entries.groups {
        for spec in [Some(&group.now), group.configured.as_ref()].into_iter().flatten() {
            check("group", name, &spec.name, &spec.flaws())?;
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

/// Everything that is wrong with the records of one kind.
fn check_served<S: ServedSpec>(
    kind: &str,
    records: &BTreeMap<String, Record<S>>,
    removed: &BTreeMap<String, S>,
) -> Result<(), String> {
    let specs = records
        .iter()
        .flat_map(|(name, it)| [Some((name, &it.now)), it.configured.as_ref().map(|c| (name, c))]);
    for (name, spec) in specs.flatten().chain(removed) {
        check(kind, name, spec.name(), &spec.flaws())?;
    }
    Ok(())
}

fn check(kind: &str, name: &str, inside: &str, flaws: &[Flaw]) -> Result<(), String> {
    if name != inside {
        return Err(format!("{kind} {inside} under the name {name:?}"));
    }
    flaws.first().map_or(Ok(()), |flaw| Err(format!("{kind} {name}: {}", flaw.reason)))
}

impl<S: ServedSpec> Record<S> {
    /// One that somebody has asked for just now.
    pub fn added(now: S) -> Self {
        let claim = ClaimWish::New;
        Record { configured: None, now, moved: BTreeMap::new(), bytes: None, image: None, step: None, claim }
    }

    /// Where it comes from, in a word.
    pub fn origin(&self) -> &'static str {
        if self.configured.is_some() { "config" } else { "added" }
    }

    /// The record of what the configuration names, given what is known of it.
    pub fn configured(configured: &S, known: Option<&Record<S>>) -> Self {
        match known {
            // Added at run time, and written into the configuration since: as the configuration has it.
            None | Some(Record { configured: None, .. }) => {
                let added = Record::added(configured.clone());
                let claim = known.map_or(added.claim, |known| known.claim);
                Record { configured: Some(configured.clone()), claim, ..added }
            }
            Some(Record { configured: Some(base), now, moved, bytes, image, step, claim }) => {
                let merged = S::three_way(base, configured, now);
                let same = S::same_content(&merged, now);
                Record {
                    configured: Some(configured.clone()),
                    moved: if configured.core() == base.core() { moved.clone() } else { BTreeMap::new() },
                    bytes: bytes.filter(|_| same),
                    image: image.filter(|_| same),
                    now: merged,
                    step: step.filter(|_| same),
                    claim: *claim,
                }
            }
        }
    }
}
