//! Which QEMU runs a guest, and what differs between them.

use crate::accelerator::Accelerator;
use crate::assets::{ENOUGH, News, host_version, newer_qemu};
use anyhow::Result;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The host's own.
    Host,
    /// At least 10.1: the host's own, or the one of Debian 13's backports in a tree.
    Newer,
}

impl Version {
    /// The chardev option that makes QEMU connect again when a daemon restarts: 11.1 has dropped `reconnect` (seconds), 7.2
    /// does not know `reconnect-ms` yet (it came with 9.2).
    pub fn reconnect(self) -> Result<&'static str> {
        let old = self == Version::Host && host_version()? < (9, 2);
        Ok(if old { "reconnect=1" } else { "reconnect-ms=100" })
    }

    /// Its number, as `ioplane qemu-args --qemu-version` takes it.
    pub fn number(self) -> Result<String> {
        let (major, minor) = host_version()?;
        let hosts = self == Version::Host || (major, minor) >= ENOUGH;
        let (major, minor) = if hosts { (major, minor) } else { ENOUGH };
        Ok(format!("{major}.{minor}"))
    }

    /// KiB of memory for a guest that is to have so many MiB, in a QEMU of any version of this machine's: guests go from one to the other.
    ///
    /// Two pages fewer where QEMU translates and is older than 9.0. Such a QEMU loses writes of a guest that it migrates: it collects which pages are dirty 64 at a time, and leaves
    /// the guest translated addresses by which it goes on to write to them unnoticed. Memory that is no multiple of 64 pages is collected page by page, and those addresses are
    /// made invalid. (Mended by "physmem: Fix migration dirty bitmap coherency with TCG memory access", March 2024; not in Debian 12's 7.2.22.)
    pub fn memory_kib(mib: u64) -> Result<u64> {
        let loses = Accelerator::detect() != Accelerator::Kvm && host_version()? < (9, 0);
        Ok(if loses { (mib << 10) - 8 } else { mib << 10 })
    }

    /// QEMU's arguments for the vhost-user-blk disk behind `socket`; the chardev is named `chardev-ID`.
    pub fn vhost_user(self, socket: &Path, id: &str, queues: u32) -> Result<String> {
        let (path, reconnect) = (socket.display(), self.reconnect()?);
        let chardev = format!("-chardev socket,id=chardev-{id},path={path},{reconnect}");
        Ok(format!("{chardev} -device vhost-user-blk-pci,chardev=chardev-{id},id={id},num-queues={queues}"))
    }
}

/// The newer QEMU, and where it finds this machine's root as it is: `beside` is a folder that is made for that, the tree's `/usr`
/// covers the other one in its mount namespace. Without a tree that is `/`.
pub fn newer_beside(beside: &Path, name: &str, news: News<'_>) -> Result<(PathBuf, String, Vec<OsString>)> {
    let Some(tree) = newer_qemu(news)? else { return Ok(("/".into(), name.into(), Vec::new())) };
    std::fs::create_dir(beside)?;
    let script = "mount --rbind / \"$1\" && mount --bind \"$0/usr\" /usr && shift && exec \"$@\"";
    let mut words: Vec<OsString> =
        ["--mount", "--propagation=private", "/bin/sh", "-c", script].map(OsString::from).into();
    words.extend([tree.into(), beside.into(), name.into()]);
    Ok((beside.to_owned(), "unshare".into(), words))
}

/// A program of the QEMU packages in the wanted version: the tree's `/usr` covers the host's in a mount namespace of
/// the program's own.
pub fn program(
    version: Version,
    name: &str,
    args: Vec<OsString>,
    news: News<'_>,
) -> Result<(String, Vec<OsString>)> {
    let tree = match version {
        Version::Host => None,
        Version::Newer => newer_qemu(news)?,
    };
    let Some(tree) = tree else { return Ok((name.into(), args)) };
    let script = "mount --bind \"$0/usr\" /usr && exec \"$@\"";
    let head: [OsString; 7] = [
        "--mount".into(),
        "--propagation=private".into(),
        "/bin/sh".into(),
        "-c".into(),
        script.into(),
        tree.into(),
        name.into(),
    ];
    Ok(("unshare".into(), head.into_iter().chain(args).collect()))
}
