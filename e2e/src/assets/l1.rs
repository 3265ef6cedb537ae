//! What a KVM host inside a VM is made of: Debian's generic kernel, which has KVM, VFIO, old NICs and USB as modules.

use super::{News, asset, initrd, kernel, text, tree};
use crate::process::run;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

const INIT: &str = include_str!("../../../guest/l1/init.sh");
const GUEST: &str = include_str!("../../../guest/l1/guest.sh");
/// What the root needs; all else is loaded from it.
const MODULES: [&str; 2] = ["9pnet_virtio", "9p"];

/// The parts of an L1.
#[derive(Clone, Debug)]
pub struct Host {
    /// The kernel, unpacked (ELF).
    pub kernel: PathBuf,
    /// Its initial RAM disk, which is all of user space that it has of its own.
    pub initrd: PathBuf,
    /// The same kernel packed, which moves itself when it boots (KASLR).
    pub packed: PathBuf,
    /// An initial RAM disk for guests of L1: a shared folder and jobs, as in L1, and nothing else.
    pub guest: PathBuf,
    /// A folder with `lib/modules`, as `modprobe -d` wants it.
    pub modules: PathBuf,
}

impl Host {
    /// Makes what is missing.
    pub fn prepare(news: News<'_>) -> Result<Host> {
        let recipe = [INIT, GUEST, "trixie linux-image-amd64 3"].join("\n");
        let folder = asset("l1", &recipe, news, |to| build(&tree::tree(news)?, to, news))?;
        let at = |name: &str| folder.join(name);
        Ok(Host {
            kernel: at("vmlinux"),
            initrd: at("initrd.img"),
            packed: at("vmlinuz"),
            guest: at("guest.img"),
            modules: folder,
        })
    }
}

fn build(tree: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news("l1: Debian's generic kernel with its modules (108 MB)");
    let root = to.join("root");
    run("cp", &["-a", text(tree)?, text(&root)?])?;
    let _ = fs::remove_file(root.join("etc/resolv.conf"));
    fs::copy("/etc/resolv.conf", root.join("etc/resolv.conf")).context("copy /etc/resolv.conf")?;
    // The package is unpacked, not installed: its scripts would make an initial RAM disk and a boot menu.
    let script = "set -e; export DEBIAN_FRONTEND=noninteractive; apt-get -qq update; cd /tmp; \
        name=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: //p'); \
        apt-get -qq download \"$name\"; mkdir /package; dpkg-deb -x \"$name\"*.deb /package; \
        ln -s usr/lib /package/lib; depmod -b /package \"${name#linux-image-}\"; echo \"${name#linux-image-}\"";
    let said = run("chroot", &[text(&root)?, "/bin/sh", "-c", script])?;
    let version = said.lines().last().unwrap_or_default().trim().to_owned();
    ensure!(!version.is_empty(), "no kernel came:\n{said}");
    let package = root.join("package");
    fs::create_dir(to.join("lib"))?;
    fs::rename(package.join("usr/lib/modules"), to.join("lib/modules"))?;
    fs::copy(package.join("boot").join(format!("vmlinuz-{version}")), to.join("vmlinuz"))?;
    kernel::unpack(&to.join("vmlinuz"), &to.join("vmlinux"))?;
    let modules = to.join("lib/modules").join(&version);
    fs::write(to.join("initrd.img"), archive(&modules, INIT)?)?;
    fs::write(to.join("guest.img"), archive(&modules, GUEST)?)?;
    fs::remove_dir_all(&root)?;
    let dep = Path::new("lib/modules").join(&version).join("modules.dep");
    let own = ["vmlinux", "vmlinuz", "initrd.img", "guest.img"].map(PathBuf::from);
    Ok(own.into_iter().chain([dep]).collect())
}

/// An initial RAM disk that runs `script`, with the modules that it needs to mount its folder.
fn archive(modules: &Path, script: &str) -> Result<Vec<u8>> {
    let mut archive = initrd::Archive::with_busybox(script)?;
    archive.add_modules(modules, &MODULES)?;
    Ok(archive.finish())
}
