//! qemu-storage-daemon as a vhost-user-blk back end: the peer that ioplane is compared with.

use crate::process::{Process, scratch};
use crate::version::{Version, program};
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A running qemu-storage-daemon with one export. Dropping it kills it.
#[derive(Debug)]
pub struct StorageDaemon {
    process: Process,
    socket: PathBuf,
    _folder: TempDir,
}

impl StorageDaemon {
    /// Serves the raw file at `path`.
    pub fn start(version: Version, path: &Path, queues: u32) -> Result<StorageDaemon> {
        let folder = scratch("peer")?;
        let socket = folder.path().join("blk");
        let file =
            format!("driver=file,node-name=f0,filename={},cache.direct=on,discard=unmap", path.display());
        let export = format!(
            "type=vhost-user-blk,id=e0,node-name=f0,addr.type=unix,addr.path={},writable=on,num-queues={queues},iothread=io0",
            socket.display()
        );
        // Written when everything on the command line is done, the listening socket among it.
        let ready = folder.path().join("pid");
        let pidfile = ready.display().to_string();
        let words =
            ["--blockdev", &file, "--object", "iothread,id=io0", "--export", &export, "--pidfile", &pidfile];
        let args: Vec<OsString> = words.iter().map(OsString::from).collect();
        let (name, args) = program(version, "qemu-storage-daemon", args, &|_| {})?;
        let mut process = Process::start(&name, &args, &folder.path().join("log"))?;
        let end = Instant::now() + Duration::from_secs(20);
        while !ready.exists() {
            process.still_runs().context("start qemu-storage-daemon")?;
            if Instant::now() >= end {
                bail!("qemu-storage-daemon has no socket yet; it said:\n{}", process.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(StorageDaemon { process, socket, _folder: folder })
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process number.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}
