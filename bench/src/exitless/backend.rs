//! Who can serve a disk over vhost-user, and what the disk's bytes lie on.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::served::{Place, Served};

/// What the disk's bytes lie on. Each contender gets one of its own, of the same size, on the same file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Backing {
    /// Memory of the host: nothing to wait for. `file` lies on a tmpfs, for backends that know only files; it has all
    /// its bytes.
    Memory {
        file: PathBuf,
        /// Bytes.
        len: u64,
    },
    /// A raw file on a disk, all its bytes written before, to be opened with O_DIRECT.
    File {
        file: PathBuf,
        /// Bytes.
        len: u64,
    },
}

impl Backing {
    /// Takes the file's name away once its backend has it open: an interrupted run leaves no disks behind.
    pub fn unlink(&self) {
        let (Backing::Memory { file, .. } | Backing::File { file, .. }) = self;
        let _ = std::fs::remove_file(file);
    }

    /// Size in bytes.
    pub fn len(&self) -> u64 {
        match self {
            Backing::Memory { len, .. } | Backing::File { len, .. } => *len,
        }
    }
}

/// Somebody who can serve a disk.
pub trait Backend {
    /// Prefix of its figures, and its name in tables.
    fn name(&self) -> &'static str;

    /// Starts it on `backing`, listening at `socket`, with everything it has on the processor `place.cpus.back`. It
    /// need not listen yet when this returns. `folder` is its own, for configuration files and logs.
    fn start(&self, backing: &Backing, socket: &Path, folder: &Path, place: &Place) -> Result<Served>;

    /// How it serves `backing`, for the reader of the figures.
    fn describe(&self, backing: &Backing) -> String;
}
