//! Kernels: what boots a guest by direct kernel boot, beside the one that is on its disk.

use super::{News, asset, initrd, text, tree};
use crate::process::run;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};

/// A kernel of Debian's: a cloud kernel, but for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Debian 13's, which is on the guests' disk.
    Stable,
    /// Debian 12's: Linux 6.1.
    Old,
    /// The newest that Debian 13 has, from its backports.
    Newest,
    /// Debian 13's generic one, that of hosts in a VM: with drivers of old cards.
    Generic,
}

/// `vmlinux` and `initrd.img` of a kernel that is not on the guests' disk.
pub(super) fn other(suite: &str, news: News<'_>) -> Result<[PathBuf; 2]> {
    // Raise the number when the code below changes what it makes.
    let recipe = format!("{suite} linux-image-cloud-amd64 1\n{}", initrd::SCRIPT);
    let folder = asset(&format!("kernel-{suite}"), &recipe, news, |to| build(suite, to, news))?;
    Ok(["vmlinux", "initrd.img"].map(|name| folder.join(name)))
}

fn build(suite: &str, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news(&format!("kernel: the cloud kernel of Debian's {suite} (25 MB)"));
    let (packages, root) = (to.join("packages"), to.join("root"));
    fs::create_dir(&packages)?;
    fs::create_dir(&root)?;
    let wanted = Packages { suite, architecture: "amd64", kernel: "linux-image-cloud-amd64", more: &[] };
    let (_, image) = wanted.unpack(&packages, &root)?;
    fs::write(to.join("initrd.img"), initrd::archive(&root)?)?;
    unpack(&image, &to.join("vmlinux"))?;
    fs::remove_dir_all(&root)?;
    fs::remove_dir_all(&packages)?;
    Ok(["vmlinux", "initrd.img"].map(PathBuf::from).into())
}

/// A kernel of Debian's, and what is wanted with it.
pub(super) struct Packages<'a> {
    pub(super) suite: &'a str,
    pub(super) architecture: &'a str,
    /// The package that depends on the newest of its kind.
    pub(super) kernel: &'a str,
    pub(super) more: &'a [&'a str],
}

impl Packages<'_> {
    /// Downloads them into a folder and unpacks them to `root`: the kernel's version, and its bzImage.
    pub(super) fn unpack(&self, folder: &Path, root: &Path) -> Result<(String, PathBuf)> {
        self.download(folder)?;
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "deb") {
                run("dpkg-deb", &["-x", text(&path)?, text(root)?])?;
            }
        }
        // Where newer ones have them, so that one rule finds both.
        if !root.join("usr/lib/modules").exists() {
            fs::create_dir_all(root.join("usr/lib"))?;
            fs::rename(root.join("lib/modules"), root.join("usr/lib/modules"))?;
        }
        let (version, image) = tree::kernel(root)?;
        run("depmod", &["--basedir", text(&root.join("usr"))?, &version])
            .context("depmod of the package kmod")?;
        Ok((version, image))
    }

    /// Downloads them with apt, which checks their signatures, in folders of its own: what
    /// the host has installed and where it gets it from do not matter.
    fn download(&self, to: &Path) -> Result<()> {
        let Packages { suite, architecture, kernel, more } = self;
        let at = |name: &str| to.join(name).display().to_string();
        for folder in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(to.join(folder))?;
        }
        fs::write(to.join("status"), "")?;
        let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
        let source = format!("deb [signed-by={keys}] {} {suite} main\n", tree::mirror());
        fs::write(to.join("sources"), source)?;
        let settings = [
            format!("Dir::Etc::SourceList={}", at("sources")),
            "Dir::Etc::SourceParts=/dev/null".into(),
            "Dir::Etc::Preferences=/dev/null".into(),
            "Dir::Etc::PreferencesParts=/dev/null".into(),
            format!("Dir::State::Lists={}", at("lists")),
            format!("Dir::State::Status={}", at("status")),
            format!("Dir::Cache={}", at("cache")),
            format!("APT::Architecture={architecture}"),
            format!("APT::Architectures={architecture}"),
            "APT::Sandbox::User=root".into(),
        ];
        let options: Vec<&str> = settings.iter().flat_map(|setting| ["-o", setting]).collect();
        let apt = |program: &str, words: &[&str]| run(program, &[&options[..], words].concat());
        apt("apt-get", &["-qq", "update"]).context("apt-get; is the network there?")?;
        let said = apt("apt-cache", &["depends", "--recurse", "--important", kernel])?;
        // The kernel, its modules and the lists of both, in one package or several; not the rest of a system.
        let kinds = ["linux-image-", "linux-modules-", "linux-binary-", "linux-base-"];
        let numbered = |name: &str, kind| {
            name.strip_prefix(kind).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        };
        let mut names: Vec<&str> =
            said.lines().filter(|name| kinds.iter().any(|kind| numbered(name, kind))).collect();
        names.dedup();
        if names.is_empty() {
            bail!("Debian's {suite} has no kernel behind {kernel}: {said}");
        }
        names.extend(*more);
        let script = "cd \"$0\" && exec apt-get \"$@\"";
        let line = [&["-c", script, text(to)?][..], &options[..], &["-qq", "download"], &names[..]].concat();
        run("sh", &line).map(|_| ())
    }
}

/// Takes the ELF kernel out of the bzImage: QEMU starts it by its PVH entry, which spares a translated guest a second of
/// unpacking. The offsets are of the x86 boot protocol's setup header.
pub(super) fn unpack(image: &Path, to: &Path) -> Result<()> {
    let bytes = fs::read(image)?;
    let number = |at: usize| {
        bytes.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize)
    };
    let sectors = usize::from(*bytes.get(0x1f1).context("a bzImage has a setup header")?);
    let start = (sectors + 1) * 512 + number(0x248);
    // The last four bytes are the size when unpacked.
    let payload =
        bytes.get(start..start + number(0x24c).saturating_sub(4)).context("a bzImage has a payload")?;
    let packed = to.with_extension("packed");
    fs::write(&packed, payload)?;
    // lz4's old format; zstd knows its own and xz.
    let program = if payload.starts_with(&[0x02, 0x21, 0x4c, 0x18]) { "lz4" } else { "zstd" };
    let script = format!("{program} -q -d -c <\"$0\" >\"$1\"");
    run("sh", &["-c", &script, text(&packed)?, text(to)?]).context("unpack the kernel")?;
    fs::remove_file(packed)?;
    if !fs::read(to)?.starts_with(b"\x7fELF") {
        bail!("the kernel's payload is not ELF");
    }
    Ok(())
}
