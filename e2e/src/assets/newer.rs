//! A QEMU new enough for every feature under test, where the host's own is older than 10.1, the first with `vfio-user-pci`
//! (Debian 12 has 7.2, Debian 13 10.0; its backports are newer).

use super::{News, asset, text, tree};
use crate::process::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

const RECIPE: &str = "tree trixie-backports qemu-system-x86 qemu-utils qemu-block-extra ovmf 2";
/// qemu-block-extra has the driver of libblkio for qemu-img.
const PACKAGES: &str = "qemu-system-x86 qemu-utils qemu-block-extra ovmf";
const LIBVIRT_RECIPE: &str = "qemu 2 libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients 1";
const LIBVIRT: &str = "libvirt-daemon libvirt-daemon-driver-qemu libvirt-clients";
/// The first with everything under test.
pub const ENOUGH: (u32, u32) = (10, 1);

/// The host's own QEMU: major and minor version.
pub fn host_version() -> Result<(u32, u32)> {
    let said = run("qemu-system-x86_64", &["--version"])?;
    let number = said.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()));
    let mut parts = number.unwrap_or_default().split('.').map_while(|part| part.parse().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) => Ok((major, minor)),
        _ => bail!("qemu-system-x86_64 --version says {said:?}, which names no version"),
    }
}

/// A Debian tree with a newer QEMU, or nothing where the host's is new enough. The tree's `/usr` is meant to be
/// bind-mounted over `/usr` in a private mount namespace.
pub fn newer_qemu(news: News<'_>) -> Result<Option<PathBuf>> {
    if host_version()? >= ENOUGH {
        return Ok(None);
    }
    let folder = asset("qemu", RECIPE, news, |to| build(&tree::tree(news)?, to, news))
        .context("this host's QEMU is older than 10.1, and a tree with a newer one cannot be made")?;
    Ok(Some(folder.join("root")))
}

/// The tree of [`newer_qemu`] with a libvirt of the same time: libvirt before 11 gives `migrate` a word that QEMU 11.1 does not take any more (`detach`).
/// Nothing where the host's QEMU is new enough: its libvirt is, too.
pub fn newer_libvirt(news: News<'_>) -> Result<Option<PathBuf>> {
    let Some(tree) = newer_qemu(news)? else { return Ok(None) };
    let folder = asset("libvirt", LIBVIRT_RECIPE, news, |to| {
        news("libvirt: Debian 13's backports have a newer libvirt than this host (30 MB)");
        let root = to.join("root");
        run("cp", &["-a", text(&tree)?, text(&root)?])?;
        install(&root, LIBVIRT)?;
        let files = ["usr/sbin/libvirtd", "usr/bin/virsh"];
        Ok(files.map(|file| Path::new("root").join(file)).into())
    });
    Ok(Some(folder.context("a tree with a newer libvirt cannot be made")?.join("root")))
}

/// Installs packages of the backports in a tree that has their list.
fn install(root: &Path, packages: &str) -> Result<()> {
    let script = format!(
        "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && \
         apt-get -qq -y --no-install-recommends -t trixie-backports install {packages} && apt-get clean"
    );
    run("chroot", &[text(root)?, "/bin/sh", "-c", &script]).map(drop)
}

fn build(tree: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news("qemu: Debian 13's backports have a newer QEMU than this host (338 MB)");
    let root = to.join("root");
    run("cp", &["-a", text(tree)?, text(&root)?])?;
    let mirror = tree::mirror();
    let sources = format!("deb {mirror} trixie main\ndeb {mirror} trixie-backports main\n");
    fs::write(root.join("etc/apt/sources.list"), sources)?;
    let _ = fs::remove_file(root.join("etc/resolv.conf"));
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("copy /etc/resolv.conf")?;
    install(&root, PACKAGES)?;
    let files = [
        "usr/bin/qemu-system-x86_64",
        "usr/bin/qemu-storage-daemon",
        "usr/bin/qemu-img",
        "usr/share/OVMF/OVMF_CODE_4M.fd",
        "usr/share/OVMF/OVMF_VARS_4M.fd",
    ];
    Ok(files.map(|file| Path::new("root").join(file)).into())
}
