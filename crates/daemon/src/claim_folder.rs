//! What is remembered of claims to exports of others: which holder a disk is, and its generation (docs/decisions/0052-claims.md).
//!
//! A holder is a random name that is made for a disk of this daemon and an export, and is durable before anything is claimed by it. A directory of
//! them is locked by one daemon, so that a second one with the same paths, in another container say, is never the same holder.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ioplane_nbd::claim::ClaimRecord;
use ioplane_nbd::import::{ClaimKeeper, RememberedClaim};
use rustix::fs::FlockOperation;

use crate::refusal::Refusal;
use crate::small_file::{hash, make_folder, read, replace};

/// How long a daemon that has the directory may take to go.
const PATIENCE: Duration = Duration::from_secs(5);

/// Where the claim of the disk at `socket` to the export at `uri` is remembered.
fn file_name(socket: &Path, uri: &str) -> String {
    hash(&[socket.as_os_str().as_encoded_bytes(), uri.as_bytes()], 16)
}

/// The claims of one daemon.
#[derive(Debug)]
pub struct ClaimFolder {
    folder: PathBuf,
    /// Held until the process ends.
    lock: Mutex<Option<Arc<File>>>,
}

impl ClaimFolder {
    /// Of the daemon with this run directory. Nothing is made before something is claimed.
    pub fn new(state_dir: &Path, run_dir: &Path) -> ClaimFolder {
        let folder = state_dir.join("claims").join(hash(&[run_dir.as_os_str().as_encoded_bytes()], 8));
        ClaimFolder { folder, lock: Mutex::default() }
    }

    /// What is remembered for the disk at `socket` and the export at `uri`. `inherits`: the predecessor still has the directory. Blocks.
    pub fn keeper(
        self: &Arc<Self>,
        (disk, socket): (&str, &Path),
        uri: &str,
        inherits: bool,
    ) -> Result<Arc<dyn ClaimKeeper>, Refusal> {
        let refused = |error: String| {
            Refusal::failed(
                format!("the claim to {uri}: {error}"),
                "is the state directory there, and this user's?",
            )
        };
        if self.folder.exists() {
            self.take(inherits).map_err(refused)?;
        }
        let file = self.folder.join(file_name(socket, uri));
        let found = read(&file).map_err(|error| refused(format!("{}: {error}", file.display())))?;
        let remembered = found.map(|bytes| ClaimRecord::decode(&bytes)).transpose().map_err(|why| {
            Refusal::failed(
                format!("what {} remembers of the claim to {uri} is damaged: {why}", file.display()),
                format!("rm {}, then add the disk again; if the export is still held by it: ioplane publish release, there", file.display()),
            )
        })?;
        let (noted, record) = match remembered {
            Some(record) => (true, record),
            None => {
                let holder = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
                let holder = holder.map_err(|error| refused(format!("/proc: {error}")))?.trim().to_owned();
                let name = format!("disk {disk} to {uri}");
                (false, ClaimRecord { generation: 0, holder, name, since: 0, held: false })
            }
        };
        Ok(Arc::new(ClaimFile { folder: self.clone(), file, kept: Mutex::new(Kept { record, noted }) }))
    }

    /// Whether `holder` is the disk at `socket` itself, as it is known to an exporter. Damaged files are nobody's. Blocks.
    pub fn is_holder(&self, (disk, socket): (&str, &Path), holder: &str) -> bool {
        let files = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut records = files.filter_map(|file| {
            let record = ClaimRecord::decode(&read(&file.path()).ok()??).ok()?;
            Some((file.file_name(), record))
        });
        records.any(|(file, record)| {
            let uri = record
                .name
                .strip_prefix("disk ")
                .and_then(|name| name.strip_prefix(disk)?.strip_prefix(" to "));
            record.holder == holder && uri.is_some_and(|uri| file == file_name(socket, uri).as_str())
        })
    }

    /// Takes the directory for this process.
    fn take(&self, inherits: bool) -> Result<(), String> {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if lock.is_some() {
            return Ok(());
        }
        let os = |error: std::io::Error| format!("{}: {error}", self.folder.display());
        let file = Arc::new(File::open(&self.folder).map_err(os)?);
        let end = Instant::now() + PATIENCE;
        let attempt = || rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive);
        let mut outcome = attempt();
        // A daemon that has just been replaced is on its way out.
        while outcome == Err(rustix::io::Errno::WOULDBLOCK) && !inherits && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
            outcome = attempt();
        }
        match outcome {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) if inherits => {
                // It is the predecessor's until that has gone.
                let waits = file.clone();
                let thread = std::thread::Builder::new().name("claims".to_owned()).spawn(move || {
                    if let Err(error) = rustix::fs::flock(&waits, FlockOperation::LockExclusive) {
                        tracing::warn!(%error, "the directory of claims could not be locked");
                    }
                });
                thread.map_err(os)?;
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(format!(
                    "another daemon has {}: give each daemon a state_dir of its own",
                    self.folder.display()
                ));
            }
            Err(error) => return Err(os(error.into())),
        }
        *lock = Some(file);
        Ok(())
    }
}

/// What is remembered for one disk and one export.
#[derive(Debug)]
struct ClaimFile {
    folder: Arc<ClaimFolder>,
    file: PathBuf,
    kept: Mutex<Kept>,
}

#[derive(Debug)]
struct Kept {
    record: ClaimRecord,
    /// It is in the file.
    noted: bool,
}

impl ClaimFile {
    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, record: &ClaimRecord) -> Result<(), String> {
        let os = |error: std::io::Error| format!("{}: {error}", self.file.display());
        make_folder(&self.folder.folder).map_err(os)?;
        self.folder.take(false)?;
        replace(&self.folder.folder, &self.file, record.encode().as_bytes()).map_err(os)
    }
}

impl ClaimKeeper for ClaimFile {
    fn holder(&self) -> Result<String, String> {
        let mut kept = self.kept();
        if !kept.noted {
            self.write(&kept.record)?;
            kept.noted = true;
        }
        Ok(kept.record.holder.clone())
    }

    fn remembered(&self) -> RememberedClaim {
        match self.kept().record {
            ClaimRecord { generation: 0, .. } => RememberedClaim::None,
            ClaimRecord { generation, held: true, .. } => RememberedClaim::Held(generation),
            ClaimRecord { generation, held: false, .. } => RememberedClaim::SetDown(generation),
        }
    }

    fn read_again(&self) -> Result<(), String> {
        let mut kept = self.kept();
        let wrong = |why: String| format!("{}: {why}", self.file.display());
        if let Some(bytes) = read(&self.file).map_err(|error| wrong(error.to_string()))? {
            let record = ClaimRecord::decode(&bytes).map_err(|why| wrong(why.to_string()))?;
            *kept = Kept { record, noted: true };
        }
        Ok(())
    }

    fn remember(&self, generation: u64) -> Result<(), String> {
        let mut kept = self.kept();
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let record = ClaimRecord { generation, since, held: true, ..kept.record.clone() };
        self.write(&record)?;
        *kept = Kept { record, noted: true };
        Ok(())
    }

    fn set_down(&self) -> Result<(), String> {
        let mut kept = self.kept();
        let record = ClaimRecord { held: false, ..kept.record.clone() };
        self.write(&record)?;
        kept.record = record;
        Ok(())
    }

    fn released(&self) {
        let mut kept = self.kept();
        let record = ClaimRecord { generation: 0, held: false, ..kept.record.clone() };
        if let Err(error) = self.write(&record) {
            // The next daemon asks the exporter once more.
            tracing::warn!(error, "a claim that is given back is still noted");
        }
        kept.record = record;
    }

    fn forget(&self) {
        let mut kept = self.kept();
        let record = ClaimRecord { generation: 0, held: false, ..kept.record.clone() };
        match std::fs::remove_file(&self.file) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(file = %self.file.display(), %error, "a claim that is given back is still noted")
            }
        }
        *kept = Kept { record, noted: false };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const URI: &str = "nbd://host-a/data";

    fn keeper(folder: &Arc<ClaimFolder>, socket: &str, uri: &str) -> Arc<dyn ClaimKeeper> {
        folder.keeper(("data", Path::new(socket)), uri, false).unwrap()
    }

    #[test]
    fn a_disk_comes_back_as_the_same_holder_and_no_other_is_that() {
        let state = tempfile::tempdir().unwrap();
        let folder = |run: &str| Arc::new(ClaimFolder::new(state.path(), Path::new(run)));
        let one = folder("/run/one");
        let first = keeper(&one, "/run/one/a.sock", URI);
        assert_eq!(first.remembered(), RememberedClaim::None);
        let holder = first.holder().unwrap();
        first.remember(7).unwrap();
        // The process ends, and with it its lock.
        drop((first, one));
        let one = folder("/run/one");
        let again = keeper(&one, "/run/one/a.sock", URI);
        assert_eq!((again.holder().unwrap(), again.remembered()), (holder.clone(), RememberedClaim::Held(7)));
        let other = keeper(&one, "/run/one/b.sock", URI).holder().unwrap();
        let elsewhere = keeper(&one, "/run/one/a.sock", "nbd://host-a/other").holder().unwrap();
        let daemon = keeper(&folder("/run/two"), "/run/one/a.sock", URI).holder().unwrap();
        let all = std::collections::BTreeSet::from([&holder, &other, &elsewhere, &daemon]);
        assert_eq!(all.len(), 4, "{all:?}");
        let is_holder = |disk, socket, holder: &str| one.is_holder((disk, Path::new(socket)), holder);
        assert!(is_holder("data", "/run/one/a.sock", &holder));
        assert!(
            !is_holder("data", "/run/one/b.sock", &holder) && !is_holder("dat", "/run/one/a.sock", &holder)
        );
        assert!(!is_holder("data", "/run/one/a.sock", "host-b/3f"));
        again.forget();
        assert_eq!(keeper(&one, "/run/one/a.sock", URI).remembered(), RememberedClaim::None);
    }

    #[test]
    fn a_second_daemon_with_the_same_paths_is_refused_and_a_successor_waits() {
        let state = tempfile::tempdir().unwrap();
        let folder = || Arc::new(ClaimFolder::new(state.path(), Path::new("/run/one")));
        let (one, two, next) = (folder(), folder(), folder());
        let first = keeper(&one, "/run/one/a.sock", URI);
        first.remember(3).unwrap();
        let refused = two.keeper(("data", Path::new("/run/one/a.sock")), URI, false).unwrap_err();
        assert!(refused.error.contains("another daemon has"), "{refused}");
        let heir = next.keeper(("data", Path::new("/run/one/a.sock")), URI, true).unwrap();
        assert_eq!((heir.holder(), heir.remembered()), (first.holder(), RememberedClaim::Held(3)));
        drop((first, one));
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let locked = || {
            let file = File::open(&two.folder).unwrap();
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err()
        };
        // It has it as soon as the predecessor has gone.
        while !locked() {
            assert!(std::time::Instant::now() < end);
            std::thread::yield_now();
        }
    }

    #[test]
    fn what_is_damaged_is_not_guessed() {
        let state = tempfile::tempdir().unwrap();
        let folder = Arc::new(ClaimFolder::new(state.path(), Path::new("/run/one")));
        keeper(&folder, "/run/one/a.sock", URI).remember(3).unwrap();
        let file = std::fs::read_dir(&folder.folder).unwrap().next().unwrap().unwrap().path();
        let whole = std::fs::read(&file).unwrap();
        std::fs::write(&file, &whole[..whole.len() / 2]).unwrap();
        let refused = folder.keeper(("data", Path::new("/run/one/a.sock")), URI, false).unwrap_err();
        assert!(refused.error.contains("damaged") && refused.remedy.starts_with("rm "), "{refused}");
    }
}
