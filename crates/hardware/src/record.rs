//! Files that remember what something was before it was changed.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use serde::Serialize;

/// Writes it so that after a crash it is there whole or not at all; returns it locked.
pub(crate) fn write(record: &impl Serialize, path: &Path) -> io::Result<File> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let half = path.with_extension("half");
    let mut file = File::create(&half)?;
    io::Write::write_all(&mut file, serde_json::to_string(record)?.as_bytes())?;
    file.sync_all()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    fs::rename(&half, path)?;
    File::open(folder)?.sync_all()?;
    Ok(file)
}

/// Takes it away, if it is there.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
