//! The guests' root disk, without loop devices or mounts, so that it can be made in a container too.
//!
//! ```text
//!   LBA 0        GRUB's boot.img around a protective MBR, GPT
//!   1 MiB        BIOS boot partition: GRUB's core image
//!   2 MiB        EFI system partition: /EFI/BOOT/BOOTX64.EFI
//!   32 MiB       ext4, labelled ioplane-root: Debian
//! ```

use super::{News, initrd, kernel, text, tree};
use crate::process::run;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;
const CORE: u64 = MIB;
const ESP: u64 = 2 * MIB;
const ROOT: u64 = 32 * MIB;
const SIZE: u64 = 1024 * MIB;

const INIT: &str = include_str!("../../../guest/root/init.sh");
const GRUB_EARLY: &str = include_str!("../../../guest/root/grub-early.cfg");
const GRUB: &str = include_str!("../../../guest/root/grub.cfg");

/// What the disk depends on; raise the number when the code below changes what it makes.
pub(super) fn recipe() -> String {
    [INIT, GRUB_EARLY, GRUB, initrd::SCRIPT, "disk 3"].join("\n")
}

/// Makes `disk.img`, `vmlinux` and `initrd.img` in `to` from a Debian tree.
pub(super) fn build(tree: &Path, to: &Path, news: News<'_>) -> Result<Vec<PathBuf>> {
    news("guest: root disk for SeaBIOS, OVMF and direct boot");
    fs::copy(tree::kernel(tree)?.1, to.join("vmlinuz"))?;
    kernel::unpack(&to.join("vmlinuz"), &to.join("vmlinux"))?;
    fs::write(to.join("initrd.img"), initrd::archive(tree)?)?;
    let root = to.join("root");
    furnish(tree, &root, to)?;
    let disk = to.join("disk.img");
    File::create(&disk)?.set_len(SIZE)?;
    partition(&disk)?;
    bios(&disk, to)?;
    efi(&disk, to)?;
    let blocks = format!("{}k", (SIZE - ROOT - MIB) / 1024);
    let extended = format!("offset={ROOT},lazy_itable_init=0,lazy_journal_init=0");
    // GRUB does not read the two newest features.
    let features = "^orphan_file,^metadata_csum_seed";
    let args =
        ["-q", "-F", "-t", "ext4", "-L", "ioplane-root", "-m", "0", "-N", "32768", "-O", features, "-E"];
    let rest = [&extended, "-d", text(&root)?, text(&disk)?, &blocks];
    run("mke2fs", &[&args[..], &rest[..]].concat())?;
    fs::remove_dir_all(&root)?;
    fs::remove_file(to.join("vmlinuz"))?;
    Ok(["disk.img", "vmlinux", "initrd.img"].map(PathBuf::from).into())
}

/// Puts the load program into a guest's own disk.
pub(super) fn put_program(disk: &str, program: &str) -> Result<()> {
    let inside = "/usr/sbin/ioplane-load";
    let script = format!("write {program} {inside}\nsif {inside} mode 0100755\nstat {inside}\n");
    let mut child = Command::new("debugfs")
        .args(["-w", "-f", "-", &format!("{disk}?offset={ROOT}")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("run debugfs of e2fsprogs")?;
    child.stdin.take().context("debugfs reads its commands")?.write_all(script.as_bytes())?;
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    // debugfs ends well whatever happened; ask for the result.
    let size = format!("Size: {}", fs::metadata(program)?.len());
    if !said.contains("Mode:  0755") || !said.contains(&size) {
        bail!(
            "debugfs did not put {program} into {disk}:\n{said}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

/// Hard-links the tree, drops what a test guest does not read, adds init and the boot files.
fn furnish(tree: &Path, root: &Path, built: &Path) -> Result<()> {
    run("cp", &["-al", text(tree)?, text(root)?])?;
    for waste in ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "var/cache", "boot"]
    {
        let path = root.join(waste);
        if path.exists() {
            fs::remove_dir_all(&path)?;
        }
        fs::create_dir_all(&path)?;
    }
    fs::create_dir_all(root.join("boot/grub"))?;
    for name in ["vmlinuz", "initrd.img"] {
        fs::copy(built.join(name), root.join("boot").join(name))?;
    }
    fs::write(root.join("boot/grub/grub.cfg"), GRUB)?;
    // Files of the tree are links: take them away before writing.
    for (path, content) in [
        ("etc/hostname", "ioplane-guest\n"),
        ("etc/fstab", "LABEL=ioplane-root / ext4 rw 0 1\n"),
        ("etc/resolv.conf", ""),
        ("usr/sbin/ioplane-init", INIT),
    ] {
        let path = root.join(path);
        let _ = fs::remove_file(&path);
        fs::write(&path, content)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
    }
    let link = root.join("sbin");
    if !link.exists() {
        symlink("usr/sbin", link)?;
    }
    Ok(())
}

fn partition(disk: &Path) -> Result<()> {
    let at = |offset: u64| offset / SECTOR;
    let table = format!(
        "label: gpt\nstart={}, size={}, type=21686148-6449-6E6F-744E-656564454649\n\
         start={}, size={}, type=C12A7328-F81F-11D2-BA4B-00A0C93EC93B\n\
         start={}, type=0FC63DAF-8483-4772-8E79-3D69D8477DE4\n",
        at(CORE),
        at(ESP - CORE),
        at(ESP),
        at(ROOT - ESP),
        at(ROOT)
    );
    let mut child = Command::new("sfdisk")
        .args(["--quiet", "--no-reread", "--no-tell-kernel"])
        .arg(disk)
        .stdin(Stdio::piped())
        .spawn()
        .context("run sfdisk of the package fdisk")?;
    child.stdin.take().context("sfdisk reads its table")?.write_all(table.as_bytes())?;
    if !child.wait()?.success() {
        bail!("sfdisk could not write the partition table");
    }
    Ok(())
}

/// What grub-bios-setup does, on a file: boot.img knows the sector of the core image, whose first sector knows the rest.
fn bios(disk: &Path, to: &Path) -> Result<()> {
    let core = image(to, "i386-pc", "core.img", &["biosdisk"])?;
    let mut boot = fs::read("/usr/lib/grub/i386-pc/boot.img").context("read boot.img of grub-pc-bin")?;
    if boot.len() != SECTOR as usize || core.len() as u64 > ESP - CORE {
        bail!("GRUB's images have unexpected sizes: boot {}, core {}", boot.len(), core.len());
    }
    let first = CORE / SECTOR;
    boot[0x5c..0x64].copy_from_slice(&first.to_le_bytes());
    let sectors = (core.len() as u64).div_ceil(SECTOR);
    let mut padded = core;
    padded.resize((sectors * SECTOR) as usize, 0);
    padded[0x1f4..0x1fc].copy_from_slice(&(first + 1).to_le_bytes());
    padded[0x1fc..0x1fe].copy_from_slice(&u16::try_from(sectors - 1)?.to_le_bytes());
    let file = File::options().write(true).open(disk)?;
    // The partition table begins at 440.
    file.write_all_at(&boot[..440], 0)?;
    file.write_all_at(&padded, CORE)?;
    Ok(())
}

fn efi(disk: &Path, to: &Path) -> Result<()> {
    image(to, "x86_64-efi", "BOOTX64.EFI", &[])?;
    let esp = to.join("esp.img");
    File::create(&esp)?.set_len(ROOT - ESP)?;
    let esp_text = text(&esp)?;
    run("mkfs.vfat", &["-n", "ESP", esp_text])?;
    run("mmd", &["-i", esp_text, "::/EFI", "::/EFI/BOOT"])?;
    let program = to.join("BOOTX64.EFI");
    run("mcopy", &["-i", esp_text, text(&program)?, "::/EFI/BOOT/BOOTX64.EFI"])?;
    // Only what is not zero, so that the disk stays sparse.
    let file = File::options().write(true).open(disk)?;
    for (at, part) in (ESP..).step_by(4096).zip(fs::read(&esp)?.chunks(4096)) {
        if part.iter().any(|byte| *byte != 0) {
            file.write_all_at(part, at)?;
        }
    }
    fs::remove_file(esp)?;
    fs::remove_file(program)?;
    Ok(())
}

fn image(to: &Path, format: &str, name: &str, modules: &[&str]) -> Result<Vec<u8>> {
    let (early, out) = (to.join("early.cfg"), to.join(name));
    fs::write(&early, GRUB_EARLY)?;
    let all =
        ["part_gpt", "ext2", "search_label", "search", "normal", "configfile", "linux", "echo", "serial"];
    let args = ["-O", format, "-p", "/boot/grub", "-c", text(&early)?, "-o", text(&out)?];
    run("grub-mkimage", &[&args[..], &all[..], &["terminal", "boot"], modules].concat())?;
    fs::remove_file(early)?;
    let bytes = fs::read(&out)?;
    if format == "i386-pc" {
        fs::remove_file(out)?;
    }
    Ok(bytes)
}
