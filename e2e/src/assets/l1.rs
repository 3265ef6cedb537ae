//! What a KVM host inside a VM is made of: Debian's generic kernel, which has KVM, VFIO, old NICs and USB as modules.

use super::{News, asset, initrd, kernel, text, tree};
use crate::process::run;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};

const INIT: &str = include_str!("../../../guest/l1/init.sh");
pub(super) const GUEST: &str = include_str!("../../../guest/l1/guest.sh");
/// What the root needs; all else is loaded from it.
const MODULES: [&str; 2] = ["9pnet_virtio", "9p"];
/// What guests of L1 need before they have theirs.
const GUEST_MODULES: [&str; 6] = ["virtio_pci", "9pnet_virtio", "9p", "virtio_blk", "crc32c_generic", "ext4"];
/// What guests of L1 are loaded and reached with, beside what the tree has.
const PACKAGES: &str = "bonnie++ openssh-server openssh-client qemu-guest-agent";
/// What nobody reads in such a guest.
const WASTE: [&str; 9] = [
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "usr/lib/modules",
    "var/cache",
    "var/lib/apt/lists",
    "boot",
    "package",
];

#[derive(Clone, Debug)]
pub struct Host {
    /// The kernel, unpacked (ELF).
    pub kernel: PathBuf,
    /// Its initial RAM disk, which is all of user space that it has of its own.
    pub initrd: PathBuf,
    /// The same kernel packed, which moves itself when it boots (KASLR).
    pub packed: PathBuf,
    /// An initial RAM disk for guests of L1: a shared folder and jobs, as in L1, in a Debian if they have that disk.
    pub guest: PathBuf,
    /// That disk, ext4, to be mounted read-only: Debian with all modules of the kernel, bonnie++, iperf3, sshd and QEMU's agent.
    pub debian: PathBuf,
    /// A folder with `lib/modules`, as `modprobe -d` wants it.
    pub modules: PathBuf,
}

impl Host {
    /// Makes what is missing.
    pub fn prepare(news: News<'_>) -> Result<Host> {
        let recipe = [INIT, GUEST, PACKAGES, "trixie linux-image-amd64 5"].join("\n");
        let folder = asset("l1", &recipe, news, |to| build(&tree::tree(news)?, to, news))?;
        let at = |name: &str| folder.join(name);
        Ok(Host {
            kernel: at("vmlinux"),
            initrd: at("initrd.img"),
            packed: at("vmlinuz"),
            guest: at("guest.img"),
            debian: at("debian.img"),
            modules: folder,
        })
    }
}

impl Host {
    /// The kernel's version, as `uname -r` says it.
    pub(super) fn version(&self) -> Result<String> {
        let version =
            fs::read_dir(self.modules.join("lib/modules"))?.next().context("a kernel's modules")??;
        Ok(version.file_name().to_string_lossy().into_owned())
    }

    /// A module of the kernel, unpacked.
    pub fn module(&self, name: &str) -> Result<Vec<u8>> {
        let folder = self.modules.join("lib/modules").join(self.version()?);
        initrd::modules(&folder, &[name])?.pop().with_context(|| format!("{name} is built in"))
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
    fs::write(to.join("initrd.img"), archive(&modules, INIT, &MODULES)?)?;
    fs::write(to.join("guest.img"), archive(&modules, GUEST, &GUEST_MODULES)?)?;
    debian(to, &root)?;
    fs::remove_dir_all(&root)?;
    let dep = Path::new("lib/modules").join(&version).join("modules.dep");
    let own = ["vmlinux", "vmlinuz", "initrd.img", "guest.img", "debian.img"].map(PathBuf::from);
    Ok(own.into_iter().chain([dep]).collect())
}

/// Turns the root folder into the guests' disk.
fn debian(to: &Path, root: &Path) -> Result<()> {
    // Nothing is started in a chroot.
    let script = format!(
        "set -e; export DEBIAN_FRONTEND=noninteractive; printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d; \
         chmod 755 /usr/sbin/policy-rc.d; apt-get -qq install -y --no-install-recommends {PACKAGES} >/dev/null; \
         ls /usr/sbin/sshd /usr/sbin/qemu-ga /usr/sbin/bonnie++ /usr/bin/iperf3 /etc/ssh/ssh_host_ed25519_key"
    );
    run("chroot", &[text(root)?, "/bin/sh", "-c", &script]).context("install what guests need")?;
    for waste in WASTE {
        let path = root.join(waste);
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)?;
    }
    for folder in ["folder", "data", "run/sshd"] {
        fs::create_dir_all(root.join(folder))?;
    }
    run("cp", &["-a", text(&to.join("lib/modules"))?, text(&root.join("usr/lib"))?])?;
    let image = to.join("debian.img");
    let args = ["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-L", "debian", "-d", text(root)?];
    run("mke2fs", &[&args[..], &[text(&image)?, "900M"]].concat())?;
    Ok(())
}

/// An initial RAM disk that runs `script`, with the modules that it needs to mount its folders.
fn archive(modules: &Path, script: &str, names: &[&str]) -> Result<Vec<u8>> {
    let mut archive = initrd::Archive::with_busybox(script)?;
    archive.add_modules(modules, names)?;
    Ok(archive.finish())
}
