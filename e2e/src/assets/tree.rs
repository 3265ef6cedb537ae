//! A Debian 13 tree with the cloud kernel, made by debootstrap.

use super::{News, asset, text};
use crate::process::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

const RECIPE: &str = "trixie minbase linux-image-cloud-amd64 1";

/// Where Debian's packages come from; `IOPLANE_DEBIAN_MIRROR` names another.
pub(super) fn mirror() -> String {
    std::env::var("IOPLANE_DEBIAN_MIRROR").unwrap_or_else(|_| "http://deb.debian.org/debian".into())
}

/// The tree's root folder, made if it is missing.
pub(super) fn tree(news: News<'_>) -> Result<PathBuf> {
    Ok(asset("tree", RECIPE, news, |to| build(to, news))?.join("root"))
}

fn build(to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    if !rustix::process::geteuid().is_root() {
        bail!("debootstrap must run as root; run this once as root, later runs find the result in the cache");
    }
    news("tree: Debian 13 with its cloud kernel, by debootstrap (about a minute)");
    let root = to.join("root");
    let root_text = text(&root)?;
    let include = "--include=linux-image-cloud-amd64";
    // INITRD=No: the kernel's package would build an initial RAM disk that nobody uses.
    let args = ["INITRD=No", "debootstrap", "--variant=minbase", include, "trixie", root_text, &mirror()];
    run("env", &args).context("debootstrap; is the network there? its log is debootstrap.log in the tree")?;
    for waste in ["var/cache/apt/archives", "var/lib/apt/lists", "debootstrap"] {
        let path = root.join(waste);
        if path.exists() {
            fs::remove_dir_all(&path)?;
            fs::create_dir_all(&path)?;
        }
    }
    let kernel = kernel(&root)?;
    let mut files = vec![PathBuf::from("root/usr/bin/dpkg"), PathBuf::from("root/usr/bin/apt-get")];
    files.push(Path::new("root/boot").join(format!("vmlinuz-{kernel}")));
    files.push(Path::new("root").join(module(&kernel)));
    Ok(files)
}

/// The version of the tree's kernel.
pub(super) fn kernel(root: &Path) -> Result<String> {
    for entry in fs::read_dir(root.join("boot"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if let Some(version) = name.strip_prefix("vmlinuz-") {
            return Ok(version.into());
        }
    }
    bail!("{} has no kernel", root.join("boot").display())
}

/// Where the one driver lies that the kernel does not have built in.
pub(super) fn module(kernel: &str) -> PathBuf {
    PathBuf::from(format!("usr/lib/modules/{kernel}/kernel/drivers/block/virtio_blk.ko.xz"))
}
