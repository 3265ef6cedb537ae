//! The guests' initial RAM disk: busybox, drivers and a script, as a cpio archive ("newc").

use super::tree;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;

pub(super) const SCRIPT: &str = include_str!("../../../guest/root/initrd.sh");

/// The archive for the kernel of the tree at `root`, not compressed: it is small, and a translated guest unpacks slowly.
pub(super) fn archive(root: &Path) -> Result<Vec<u8>> {
    archive_of(&root.join("usr/lib/modules").join(tree::kernel(root)?.0), &[])
}

/// The archive for the kernel with these modules, and more drivers.
pub(super) fn archive_of(modules: &Path, more: &[&str]) -> Result<Vec<u8>> {
    let mut archive = Archive::with_busybox(SCRIPT)?;
    archive.add("root", 0o040_755, &[], (0, 0));
    archive.add_modules(modules, &[more, &DRIVERS].concat())?;
    Ok(archive.finish())
}

fn busybox() -> Result<&'static str> {
    let found = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    found.context("no busybox; install the package busybox-static (script/bootstrap --demo)")
}

/// What a guest needs before its root is there, or has to have without its kernel's modules on the disk.
const DRIVERS: [&str; 5] = ["virtio_pci", "virtio_blk", "ext4", "virtio_console", "virtio_net"];

/// Those of `drivers` that the kernel whose modules are in `folder` does not have built in, unpacked, each after what it
/// needs.
pub(super) fn modules(folder: &Path, drivers: &[&str]) -> Result<Vec<Vec<u8>>> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))
    };
    let (needs, builtin) = (read("modules.dep")?, read("modules.builtin")?);
    let is = |path: &str, driver: &str| {
        let file = path.rsplit('/').next().unwrap_or_default();
        file.split('.').next().is_some_and(|name| name.replace('-', "_") == driver)
    };
    let mut order: Vec<&str> = Vec::new();
    for driver in drivers {
        if builtin.lines().any(|path| is(path, driver)) {
            continue;
        }
        let line = needs.lines().filter_map(|line| line.split_once(':')).find(|(path, _)| is(path, driver));
        let (path, before) = line.with_context(|| format!("{} has no {driver}", folder.display()))?;
        // What is needed first is named last.
        for path in before.split_whitespace().rev().chain([path]) {
            if !order.contains(&path) {
                order.push(path);
            }
        }
    }
    order.iter().map(|path| unpacked(&folder.join(path))).collect()
}

/// A module as its package has it: packed by zstd or by xz, or not at all.
fn unpacked(module: &Path) -> Result<Vec<u8>> {
    let output =
        Command::new("zstd").args(["-q", "-d", "-c", "-f"]).arg(module).output().context("run zstd")?;
    if !output.status.success() || !output.stdout.starts_with(b"\x7fELF") {
        bail!("unpack {}: {}", module.display(), String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}

/// Whether an ELF program wants a dynamic linker (has a program header of type PT_INTERP).
fn interpreted(program: &[u8]) -> bool {
    let number = |at: usize, bytes: usize| {
        program
            .get(at..at + bytes)
            .map_or(0, |part| part.iter().rev().fold(0, |n, b| (n << 8) | usize::from(*b)))
    };
    let (table, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    (0..count).any(|header| number(table + header * size, 4) == 3)
}

#[derive(Default)]
pub(super) struct Archive {
    bytes: Vec<u8>,
    files: u32,
}

impl Archive {
    /// One with busybox, a console, and `script` as the first program.
    pub(super) fn with_busybox(script: &str) -> Result<Archive> {
        let busybox = busybox()?;
        let program = fs::read(busybox)?;
        if interpreted(&program) {
            bail!("{busybox} is not static; install the package busybox-static (script/bootstrap --demo)");
        }
        Ok(Archive::with_this_busybox(&program, script))
    }

    /// The same with a static busybox of another architecture.
    pub(super) fn with_this_busybox(program: &[u8], script: &str) -> Archive {
        let mut archive = Archive::default();
        for folder in ["bin", "dev"] {
            archive.add(folder, 0o040_755, &[], (0, 0));
        }
        // The kernel opens it as standard output of the first program, before that mounts /dev.
        archive.add("dev/console", 0o020_600, &[], (5, 1));
        archive.add("bin/busybox", 0o100_755, program, (0, 0));
        archive.add("init", 0o100_755, script.as_bytes(), (0, 0));
        archive
    }

    /// Nothing but the first program.
    pub(super) fn with_init(script: &str) -> Archive {
        let mut archive = Archive::default();
        archive.add("init", 0o100_755, script.as_bytes(), (0, 0));
        archive
    }

    /// Adds those of `drivers` that are not built in as `modules/00.ko` and so on, in the order to load them in.
    pub(super) fn add_modules(&mut self, folder: &Path, drivers: &[&str]) -> Result<()> {
        self.add("modules", 0o040_755, &[], (0, 0));
        for (index, module) in modules(folder, drivers)?.iter().enumerate() {
            self.add(&format!("modules/{index:02}.ko"), 0o100_644, module, (0, 0));
        }
        Ok(())
    }

    /// The bytes for the boot loader.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, &[], (0, 0));
        self.bytes
    }

    pub(super) fn add(&mut self, name: &str, mode: u32, content: &[u8], device: (u32, u32)) {
        self.files += 1;
        let fields = [
            self.files,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            device.0,
            device.1,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
