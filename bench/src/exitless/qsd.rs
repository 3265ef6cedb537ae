//! qemu-storage-daemon, as fast as it can be set up on one processor.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::backend::{Backend, Backing};
use crate::served::{Place, Served};

/// How it does its I/O to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aio {
    /// Thread pool, through the page cache (which on tmpfs is the file).
    Threads,
    /// io_uring, through the page cache.
    Uring,
    /// io_uring with O_DIRECT.
    UringDirect,
    /// Linux AIO with O_DIRECT.
    NativeDirect,
    /// No I/O at all: QEMU's null driver, which neither reads nor copies. Not a memory disk; a ceiling.
    Null,
}

impl Aio {
    /// Every way that might be the best on tmpfs.
    pub const ON_TMPFS: [Aio; 4] = [Aio::Threads, Aio::Uring, Aio::UringDirect, Aio::NativeDirect];

    pub fn options(self) -> &'static str {
        match self {
            Aio::Threads => "aio=threads,cache.direct=off",
            Aio::Uring => "aio=io_uring,cache.direct=off",
            Aio::UringDirect => "aio=io_uring,cache.direct=on",
            Aio::NativeDirect => "aio=native,cache.direct=on",
            Aio::Null => "",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Qsd {
    /// How it serves memory: found out by measuring.
    pub memory: Aio,
    /// How it serves a file.
    pub file: Aio,
    /// For how long its iothread polls before it sleeps, ns; none: QEMU's default.
    pub poll_max_ns: Option<u32>,
}

impl Qsd {
    fn blockdev(&self, backing: &Backing) -> String {
        let (aio, file) = match backing {
            Backing::Memory { file, .. } => (self.memory, file),
            Backing::File { file, .. } => (self.file, file),
        };
        if aio == Aio::Null {
            return format!("driver=null-co,node-name=disk,size={},latency-ns=0", backing.len());
        }
        format!("driver=file,node-name=disk,filename={},{}", file.display(), aio.options())
    }
}

impl Backend for Qsd {
    fn name(&self) -> &'static str {
        "qsd"
    }

    fn start(&self, backing: &Backing, socket: &Path, folder: &Path, place: &Place) -> Result<Served> {
        let socket = socket.display();
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(self.blockdev(backing));
        let polling = self.poll_max_ns.map_or(String::new(), |ns| format!(",poll-max-ns={ns}"));
        command.arg("--object").arg(format!("iothread,id=io{polling}"));
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={socket},writable=on,\
             num-queues=1,iothread=io"
        ));
        place.spawn(&command, &folder.join("log"))
    }

    fn describe(&self, backing: &Backing) -> String {
        let what = match backing {
            Backing::Memory { .. } if self.memory == Aio::Null => "null-co".into(),
            Backing::Memory { .. } => format!("file on tmpfs, {}", self.memory.options()),
            Backing::File { .. } => format!("file on disk, {}", self.file.options()),
        };
        let polling = self.poll_max_ns.map_or("at its default".into(), |ns| ns.to_string());
        format!("{what}, one iothread (poll-max-ns {polling})")
    }
}

pub fn version() -> String {
    let output = Command::new("qemu-storage-daemon").arg("--version").output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or("not installed (package qemu-system-common)").to_string()
}
