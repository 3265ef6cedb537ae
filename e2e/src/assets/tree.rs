//! A Debian 13 tree with the cloud kernel, made by debootstrap.

use super::{News, asset, text};
use crate::process::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

const RECIPE: &str = "trixie minbase linux-image-cloud-amd64 iperf3 2";

/// Where Debian's packages come from; `IOPLANE_DEBIAN_MIRROR` names another.
pub(super) fn mirror() -> String {
    let named = std::env::var("IOPLANE_DEBIAN_MIRROR").ok().filter(|mirror| !mirror.is_empty());
    named.unwrap_or_else(|| "http://deb.debian.org/debian".into())
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
    let include = "--include=linux-image-cloud-amd64,iperf3";
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
    let (kernel, _) = kernel(&root)?;
    let mut files = vec![PathBuf::from("root/usr/bin/dpkg"), PathBuf::from("root/usr/bin/apt-get")];
    files.push(Path::new("root/boot").join(format!("vmlinuz-{kernel}")));
    files.push(Path::new("root/usr/lib/modules").join(kernel).join("modules.dep"));
    Ok(files)
}

/// The version of a tree's kernel, and its bzImage.
pub(super) fn kernel(root: &Path) -> Result<(String, PathBuf)> {
    let modules = root.join("usr/lib/modules");
    for entry in fs::read_dir(&modules).with_context(|| format!("list {}", modules.display()))? {
        let folder = entry?.path();
        let version = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        // Beside its modules since Linux 7.
        for image in [root.join("boot").join(format!("vmlinuz-{version}")), folder.join("vmlinuz")] {
            if image.exists() {
                return Ok((version, image));
            }
        }
    }
    bail!("{} has no kernel", root.display())
}
