//! What is written on a backing itself, so that nobody uses it by mistake: that it is an unfinished copy, or that a disk has gone on with
//! another one. Blocks, as it goes to the disk.
//!
//! An image carries its marks in extended attributes, which go where it goes and survive this host. What has none (a device, an export, some
//! file systems) is noted in the state file, until the host reboots. Memory needs no marks: it goes with the daemon.

use std::fs::File;
use std::path::Path;

use ioplane_api::spec::BackingSpec;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use super::swap_rule::{DaemonSwapRule, removed};
use crate::refusal::Refusal;
use crate::state_file::StateFile;

/// Longest text that is read; ours are shorter.
const TEXT: usize = 4096;

/// What is wrong with a backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// A swap has not ended: some of it was never copied, or has missed writes.
    Unfinished,
    /// A swap has ended: the disk's later writes are elsewhere.
    Superseded,
}

impl Mark {
    const ALL: [Mark; 2] = [Mark::Unfinished, Mark::Superseded];

    /// The name of its extended attribute.
    pub fn attribute(self) -> &'static str {
        match self {
            Mark::Unfinished => "user.ioplane.unfinished",
            Mark::Superseded => "user.ioplane.superseded",
        }
    }

    fn refusal(self, what: &str, text: &str, has_attribute: bool) -> Refusal {
        let attribute = self.attribute();
        let undo = match has_attribute {
            true => format!("setfattr -x {attribute} {what}"),
            false => "copy it, and use the copy".to_owned(),
        };
        let (error, remedy) = match self {
            Mark::Unfinished => (
                format!("{what} is an unfinished copy: {text}"),
                format!("swap to it again; or, if you know that it has everything you need: {undo}"),
            ),
            Mark::Superseded => (
                format!("{what} is superseded: {text}"),
                format!("use that one; or, to go back to what this one had then: {undo}"),
            ),
        };
        Refusal::conflict(error, remedy)
    }
}

/// What a target says while a disk is copied to it.
pub fn unfinished_text(disk: &str, from: &BackingSpec) -> String {
    format!("disk {disk} was being copied here from {}", from.name())
}

/// What stands in the state file for what has no attributes.
fn key(backing: &BackingSpec, mark: Mark) -> Option<String> {
    let place = match backing {
        BackingSpec::File { path, .. } => {
            std::fs::canonicalize(path).unwrap_or_else(|_| path.clone()).display().to_string()
        }
        BackingSpec::Remote(spec) => spec.remote.to_string(),
        BackingSpec::Memory { .. } => return None,
    };
    Some(format!("{} {place}", mark.attribute()))
}

/// The attributes of devices are those of their nodes, which go with a reboot, and they may have none.
fn image(backing: &BackingSpec) -> Option<&Path> {
    match backing {
        BackingSpec::File { path, .. } if path.is_file() => Some(path),
        _ => None,
    }
}

fn failed(path: &Path, error: impl std::fmt::Display) -> Refusal {
    let error = format!("marking {}: {error}", path.display());
    Refusal::failed(error, "may this user change it, and does its file system work?")
}

fn durable(path: &Path) -> Result<(), Refusal> {
    File::open(path).and_then(|file| file.sync_all()).map_err(|error| failed(path, error))
}

/// Marks a backing; it is durable when this returns.
pub fn set(backing: &BackingSpec, mark: Mark, text: &str, state_file: &StateFile) -> Result<(), Refusal> {
    if let Some(path) = image(backing) {
        match rustix::fs::setxattr(path, mark.attribute(), text.as_bytes(), XattrFlags::empty()) {
            Ok(()) => return durable(path),
            Err(Errno::NOTSUP | Errno::PERM) => {}
            Err(error) => return Err(failed(path, error)),
        }
    }
    if let Some(key) = key(backing, mark) {
        state_file.change(|entries| {
            entries.marks.insert(key, text.to_owned());
        })?;
    }
    Ok(())
}

/// Marks an unfinished copy that may not answer any more: if that fails it is noted in the state file, until the host reboots, and an error all the
/// same.
pub fn set_or_note(backing: &BackingSpec, text: &str, state_file: &StateFile) -> Result<(), Refusal> {
    let marked = set(backing, Mark::Unfinished, text, state_file);
    if marked.is_err()
        && let Some(key) = key(backing, Mark::Unfinished)
    {
        state_file.change(|entries| {
            entries.marks.insert(key, text.to_owned());
        })?;
    }
    marked
}

/// Takes a mark away, if it is there; durable when this returns.
pub fn clear(backing: &BackingSpec, mark: Mark, state_file: &StateFile) -> Result<(), Refusal> {
    if let Some(path) = image(backing) {
        match rustix::fs::removexattr(path, mark.attribute()) {
            Ok(()) => durable(path)?,
            Err(Errno::NODATA | Errno::NOTSUP | Errno::PERM) => {}
            Err(error) => return Err(failed(path, error)),
        }
    }
    if let Some(key) = key(backing, mark)
        && state_file.entries().marks.contains_key(&key)
    {
        state_file.change(|entries| {
            entries.marks.remove(&key);
        })?;
    }
    Ok(())
}

/// The same, and durable as well if an earlier attempt had taken it away and failed then.
pub fn clear_durably(backing: &BackingSpec, mark: Mark, state_file: &StateFile) -> Result<(), Refusal> {
    clear(backing, mark, state_file)?;
    image(backing).map_or(Ok(()), durable)
}

/// What an image says of itself.
fn attribute(path: &Path, mark: Mark) -> Option<String> {
    let mut text = [0u8; TEXT];
    let len = rustix::fs::getxattr(path, mark.attribute(), &mut text[..]).ok()?;
    Some(String::from_utf8_lossy(&text[..len]).chars().filter(|c| !c.is_control()).collect())
}

/// Whether it has this mark.
pub fn is_set(backing: &BackingSpec, mark: Mark, state_file: &StateFile) -> bool {
    let noted = || key(backing, mark).is_some_and(|key| state_file.entries().marks.contains_key(&key));
    image(backing).is_some_and(|path| attribute(path, mark).is_some()) || noted()
}

/// Refuses a backing that is not to be used: it says so itself, or it is noted.
pub fn check(backing: &BackingSpec, state_file: &StateFile) -> Result<(), Refusal> {
    let marks = state_file.entries().marks;
    for mark in Mark::ALL {
        if mark == Mark::Superseded && removed(DaemonSwapRule::OldRefused) {
            continue;
        }
        let refusal = |text: &str, has_attribute| {
            Err(mark.refusal(&backing.name(), text, has_attribute).at(backing.field()))
        };
        if let Some(text) = image(backing).and_then(|path| attribute(path, mark)) {
            return refusal(&text, true);
        }
        if let Some(text) = key(backing, mark).and_then(|key| marks.get(&key)) {
            return refusal(text, false);
        }
    }
    Ok(())
}
