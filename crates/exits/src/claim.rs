//! Instances of tracefs that are ours: made, and locked as long as whoever made them lives. One without a lock is left over from a process
//! that was killed, and goes on recording: it is swept away. A lock holds across containers, a process number says nothing there.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{FlockOperation, Mode, OFlags};

use crate::error::{ExitsError, Result};

/// Names of our instances, before the number of their process.
const NAME: &str = "ioplane-exits-";
/// Another container's process may have our number.
const TRIES: u32 = 100;

/// Those of this process.
static OURS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Folders of tracefs that this process has made and not removed yet. For a program that ends at once: they cannot be removed while
/// their files are open, and `rmdir` removes them afterwards.
pub fn instances() -> Vec<PathBuf> {
    OURS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// A folder of ours. It goes with this value, if nothing in it is open then.
#[derive(Debug)]
pub(crate) struct Claim {
    folder: PathBuf,
    _lock: OwnedFd,
}

impl Claim {
    /// Makes one below the root of tracefs.
    pub(crate) fn new(root: &Path) -> Result<Claim> {
        let instances = root.join("instances");
        let name = |number| instances.join(format!("{NAME}{}-{number}", std::process::id()));
        for folder in (0..TRIES).map(name) {
            match fs::create_dir(&folder) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                made => made.map_err(ExitsError::file(&folder))?,
            }
            OURS.lock().unwrap_or_else(PoisonError::into_inner).push(folder.clone());
            match lock(&folder) {
                Ok(Some(lock)) => return Ok(Claim { folder, _lock: lock }),
                // Somebody has swept it away before it was locked.
                Ok(None) => remove(&folder),
                Err(error) => {
                    remove(&folder);
                    return Err(ExitsError::file(folder)(error));
                }
            }
        }
        let what = format!("has {TRIES} instances called {NAME}{} already", std::process::id());
        Err(ExitsError::malformed(instances, what))
    }

    /// Where it is.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

fn remove(folder: &Path) {
    let _ = fs::remove_dir(folder);
    OURS.lock().unwrap_or_else(PoisonError::into_inner).retain(|ours| ours != folder);
}

/// Removes what killed processes have left below the root of tracefs. Every watch begins with it, whatever its source is.
pub(crate) fn sweep(root: &Path) {
    for entry in fs::read_dir(root.join("instances")).into_iter().flatten().flatten() {
        if !entry.file_name().to_str().is_some_and(|name| name.starts_with(NAME)) {
            continue;
        }
        let folder = entry.path();
        if let Ok(Some(_lock)) = lock(&folder) {
            let _ = fs::write(folder.join("events/kvm/enable"), "0");
            let _ = fs::remove_dir(folder);
        }
    }
}

/// The lock of a folder that is there; nothing if somebody else has it.
fn lock(folder: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = match rustix::fs::open(folder, flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        opened => opened?,
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        locked => locked?,
    }
    // It may have been removed, and made again, in between.
    let there = rustix::fs::stat(folder).is_ok_and(|now| {
        rustix::fs::fstat(&file).is_ok_and(|ours| (ours.st_dev, ours.st_ino) == (now.st_dev, now.st_ino))
    });
    Ok(there.then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In containers every process may be number 1: the number says nothing, the lock does.
    #[test]
    fn the_living_are_left_alone_and_the_dead_are_swept() {
        let root = tempfile::tempdir().unwrap();
        let instances = root.path().join("instances");
        fs::create_dir(&instances).unwrap();
        // Of a living process's number and of none; neither is locked. One is not ours at all.
        let (dead, none) = (instances.join(format!("{NAME}1")), instances.join(format!("{NAME}4194305-0")));
        let other = instances.join("perf");
        for folder in [&dead, &none, &other] {
            fs::create_dir(folder).unwrap();
        }
        // Of a process of another container, whose number nobody has here.
        let living = instances.join(format!("{NAME}4194306"));
        fs::create_dir(&living).unwrap();
        let held = lock(&living).unwrap().unwrap();
        let ours = Claim::new(root.path()).unwrap();
        sweep(root.path());
        let there = |folder: &Path| folder.is_dir();
        assert!(!there(&dead) && !there(&none), "left over");
        assert!(there(&living) && there(&other) && there(ours.folder()), "somebody else's");
        drop(held);
        sweep(root.path());
        assert!(!there(&living));
    }

    #[test]
    fn a_taken_name_is_passed_over_and_all_go() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("instances")).unwrap();
        let (first, second) = (Claim::new(root.path()).unwrap(), Claim::new(root.path()).unwrap());
        assert_ne!(first.folder(), second.folder());
        let folders = [first.folder().to_owned(), second.folder().to_owned()];
        assert!(folders.iter().all(|folder| instances().contains(folder)));
        drop((first, second));
        assert!(!folders.iter().any(|folder| folder.exists() || instances().contains(folder)));
        let error = Claim::new(Path::new("/nowhere")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/instances"), "{error}");
    }
}
