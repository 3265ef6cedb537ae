//! Files with private keys: read only if nobody else can, written so that they are there whole or not at all.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, RenameFlags};
use rustix::io::Errno;

use crate::error::IdentityError;

/// Longest file that is read: a few certificates and a key.
pub const LONGEST: u64 = 64 << 10;

fn unreadable(path: &Path, what: &'static str) -> impl Fn(std::io::Error) -> IdentityError {
    let path = path.to_owned();
    move |source| match source.kind() {
        ErrorKind::NotFound => IdentityError::Missing { path: path.clone(), what },
        _ => IdentityError::Unreadable { path: path.clone(), source },
    }
}

/// Reads `path`, which says `what` this host has: a file of a directory that is private as well.
pub fn read(path: &Path, what: &'static str) -> Result<String, IdentityError> {
    read_long(path, what, LONGEST)
}

/// The same of a file of `longest` bytes at most.
pub fn read_long(path: &Path, what: &'static str, longest: u64) -> Result<String, IdentityError> {
    if let Some(directory) = path.parent() {
        private(directory, &std::fs::metadata(directory).map_err(unreadable(path, what))?)?;
    }
    read_file(path, what, longest)
}

/// Reads `path`, wherever that is.
pub fn read_file(path: &Path, what: &'static str, longest: u64) -> Result<String, IdentityError> {
    let unreadable = unreadable(path, what);
    let file = File::open(path).map_err(&unreadable)?;
    private(path, &file.metadata().map_err(&unreadable)?)?;
    let mut text = String::new();
    let length = file.take(longest + 1).read_to_string(&mut text).map_err(unreadable)?;
    if length as u64 > longest {
        let why = format!("it is longer than {longest} bytes");
        return Err(IdentityError::Malformed { path: path.to_owned(), why });
    }
    Ok(text)
}

/// Whether only the owner, who is this user or root, has access.
pub fn private(path: &Path, metadata: &std::fs::Metadata) -> Result<(), IdentityError> {
    let wrong = |why| Err(IdentityError::Permissions { path: path.to_owned(), why });
    let own = rustix::process::geteuid().as_raw();
    match metadata {
        metadata if metadata.mode() & 0o077 != 0 => wrong(format!("mode {:03o}", metadata.mode() & 0o777)),
        metadata if metadata.uid() != own && metadata.uid() != 0 => {
            wrong(format!("it is user {}'s", metadata.uid()))
        }
        _ => Ok(()),
    }
}

/// What tells one state of a file from the next: another file, content, owner or mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileVersion {
    file: (u64, u64),
    length: u64,
    /// Seconds and nanoseconds.
    written: (i64, i64),
    changed: (i64, i64),
}

impl FileVersion {
    /// That of the file that is there. `None`: there is none, or it cannot be seen.
    pub(crate) fn of(path: &Path) -> Option<FileVersion> {
        let metadata = std::fs::metadata(path).ok()?;
        Some(FileVersion {
            file: (metadata.dev(), metadata.ino()),
            length: metadata.len(),
            written: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

/// Makes the directory, if it is not there, and looks at its permissions.
pub fn prepare(directory: &Path) -> Result<(), IdentityError> {
    let unwritable = |source| IdentityError::Unwritable { path: directory.to_owned(), source };
    if let Some(above) = directory.parent() {
        std::fs::create_dir_all(above).map_err(unwritable)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        made => made.map_err(unwritable)?,
    }
    private(directory, &std::fs::metadata(directory).map_err(unwritable)?)
}

/// What happens to a file that is there already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IfThere {
    /// It is replaced.
    Replace,
    /// It stays, and the new one is refused.
    Refuse(&'static str),
}

/// Writes `text` to `path`, mode 0600: after a crash there is the old file or the new one.
pub fn write(path: &Path, text: &str, if_there: IfThere) -> Result<(), IdentityError> {
    let unwritable = |source| IdentityError::Unwritable { path: path.to_owned(), source };
    let directory =
        path.parent().filter(|directory| !directory.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let temporary = temporary(path);
    // What a process of the same number has left.
    let _ = std::fs::remove_file(&temporary);
    let written = write_new(&temporary, text).and_then(|()| {
        let flags = match if_there {
            IfThere::Replace => RenameFlags::empty(),
            IfThere::Refuse(_) => RenameFlags::NOREPLACE,
        };
        let here = rustix::fs::CWD;
        rustix::fs::renameat_with(here, &temporary, here, path, flags)?;
        File::open(directory)?.sync_all()
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written.map_err(|source| match (if_there, source.kind()) {
        (IfThere::Refuse(what), ErrorKind::AlreadyExists) => {
            IdentityError::Exists { path: path.to_owned(), what }
        }
        _ => unwritable(source),
    })
}

/// Removes `path`, durably. It may be gone already.
pub fn remove(path: &Path) -> Result<(), IdentityError> {
    let removed = std::fs::remove_file(path).and_then(|()| match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    });
    match removed {
        Err(source) if source.kind() != ErrorKind::NotFound => {
            Err(IdentityError::Unwritable { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// A lock among processes: until it is dropped, or the process has ended.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

/// Takes the lock `path`, in a directory that is there. Waits for others at most `patience`.
pub fn lock(path: &Path, patience: Duration) -> Result<Lock, IdentityError> {
    let unwritable = |source| IdentityError::Unwritable { path: path.to_owned(), source };
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(unwritable)?;
    let end = Instant::now() + patience;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Lock { _file: file }),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(Errno::WOULDBLOCK | Errno::INTR) => {
                return Err(IdentityError::Busy { path: path.to_owned() });
            }
            Err(errno) => return Err(unwritable(errno.into())),
        }
    }
}

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.new", std::process::id()));
    path.with_file_name(name)
}

fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
}
