//! Where the kernel describes its tracepoints.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ioplane_plain::FileError;

use crate::error::{ExitsError, Result};
use crate::format::Format;

/// The tracing file system.
#[derive(Clone, Debug)]
pub struct Tracefs {
    root: PathBuf,
}

impl Tracefs {
    /// Looks where it is mounted.
    pub fn find() -> Result<Tracefs> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mounted = mounts.lines().filter_map(|line| {
            let mut words = line.split(' ');
            let (_, place, kind) = (words.next()?, words.next()?, words.next()?);
            match kind {
                "tracefs" => Some(PathBuf::from(place)),
                "debugfs" => Some(Path::new(place).join("tracing")),
                _ => None,
            }
        });
        let usual = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"].map(PathBuf::from);
        let mut forbidden = None;
        for root in mounted.chain(usual) {
            match fs::metadata(root.join("events")) {
                Ok(_) => return Ok(Tracefs { root }),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => forbidden = Some(root),
                Err(_) => {}
            }
        }
        Err(match forbidden {
            Some(root) => ExitsError::Forbidden { what: format!("reading {}", root.display()) },
            None => ExitsError::NoTracefs,
        })
    }

    /// Where it is mounted.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The layout of one of KVM's tracepoints.
    pub fn kvm(&self, event: &str) -> Result<Format> {
        self.format("kvm", event)
    }

    /// That of one of the scheduler's.
    pub fn scheduler(&self, event: &str) -> Result<Format> {
        self.format("sched", event)
    }

    fn format(&self, system: &str, event: &str) -> Result<Format> {
        let path = self.root.join("events").join(system).join(event).join("format");
        Format::read(&path).map_err(|error| match error {
            ExitsError::File(FileError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound =>
            {
                ExitsError::NoTracepoint(event.into())
            }
            other => other,
        })
    }
}
