//! Debian's generic kernel, that of hosts in a VM, for the guests that run beside them.

use super::{Host, News, asset, initrd, text};
use anyhow::{Context, Result};
use std::fs;
use std::path::PathBuf;

/// Drivers of the generic kernel that are not in a cloud kernel; without the first its ext4 does not load.
const GENERIC_DRIVERS: [&str; 2] = ["crc32c_generic", "8139cp"];

/// `vmlinux` and `initrd.img` of [`super::Kernel::Generic`].
pub(super) fn generic(news: News<'_>) -> Result<[PathBuf; 2]> {
    let host = Host::prepare(news)?;
    // With the folder's name, which changes with the kernel. Raise the number when the code below changes what it makes.
    let recipe = format!("{} 1\n{}", text(&host.modules)?, initrd::SCRIPT);
    let folder = asset("generic", &recipe, news, |to| {
        let versions = fs::read_dir(host.modules.join("lib/modules"))?;
        let modules = versions.flatten().map(|entry| entry.path()).next().context("a kernel's modules")?;
        fs::write(to.join("initrd.img"), initrd::archive_of(&modules, &GENERIC_DRIVERS)?)?;
        Ok(vec!["initrd.img".into()])
    })?;
    Ok([host.kernel, folder.join("initrd.img")])
}
