//! A 32-bit guest of L1: a kernel of Debian 12, the last with one for i386, and its busybox. It has no disk of its own.

use super::kernel::Packages;
use super::{News, asset, initrd, l1};
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

const SUITE: &str = "bookworm";
/// What brings the shared folder, and the drivers of old devices.
const MODULES: [&str; 6] = ["virtio_pci", "9pnet_virtio", "9p", "ata_piix", "sd_mod", "ne2k_pci"];

/// How the kernel's page tables are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging32 {
    /// Two levels of 4-byte entries.
    Plain,
    /// Two levels of 8-byte entries below four PDPTEs.
    Pae,
}

/// A kernel and an initial RAM disk with `guest/l1/guest.sh`.
#[derive(Clone, Debug)]
pub struct Linux32 {
    pub kernel: PathBuf,
    pub initrd: PathBuf,
}

impl Linux32 {
    /// Makes what is missing.
    pub fn prepare(paging: Paging32, news: News<'_>) -> Result<Linux32> {
        let (name, package) = match paging {
            Paging32::Plain => ("linux32-plain", "linux-image-686"),
            Paging32::Pae => ("linux32-pae", "linux-image-686-pae"),
        };
        // Raise the number when the code below changes what it makes.
        let recipe = [SUITE, package, &MODULES.join(" "), "1", l1::GUEST].join("\n");
        let folder = asset(name, &recipe, news, |to| build(package, to, news))?;
        Ok(Linux32 { kernel: folder.join("vmlinuz"), initrd: folder.join("initrd.img") })
    }
}

fn build(package: &str, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news(&format!("{package}: the 32-bit kernel of Debian's {SUITE} (65 MB)"));
    let (packages, root) = (to.join("packages"), to.join("root"));
    fs::create_dir(&packages)?;
    fs::create_dir(&root)?;
    let wanted = Packages { suite: SUITE, architecture: "i386", kernel: package, more: &["busybox-static"] };
    let (version, image) = wanted.unpack(&packages, &root)?;
    let busybox = fs::read(root.join("bin/busybox")).context("busybox of the package busybox-static")?;
    let mut archive = initrd::Archive::with_this_busybox(&busybox, l1::GUEST);
    archive.add_modules(&root.join("usr/lib/modules").join(version), &MODULES)?;
    fs::write(to.join("initrd.img"), archive.finish())?;
    fs::copy(image, to.join("vmlinuz"))?;
    fs::remove_dir_all(&root)?;
    fs::remove_dir_all(&packages)?;
    Ok(["vmlinuz", "initrd.img"].map(PathBuf::from).into())
}
