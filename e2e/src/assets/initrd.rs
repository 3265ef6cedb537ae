//! The guests' initial RAM disk: busybox, one driver and a script, as a cpio archive ("newc").

use super::tree;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;

pub(super) const SCRIPT: &str = include_str!("../../../guest/root/initrd.sh");

/// The archive for the kernel of the tree at `root`, not compressed: it is small, and a translated guest unpacks slowly.
pub(super) fn archive(root: &Path) -> Result<Vec<u8>> {
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    let busybox =
        busybox.context("no busybox; install the package busybox-static (script/bootstrap --demo)")?;
    let program = fs::read(busybox)?;
    if interpreted(&program) {
        bail!("{busybox} is not static; install the package busybox-static (script/bootstrap --demo)");
    }
    let packed = root.join(tree::module(&tree::kernel(root)?));
    let module = Command::new(busybox).args(["xz", "-dc"]).arg(&packed).output()?;
    if !module.status.success() {
        bail!("unpack {}: {}", packed.display(), String::from_utf8_lossy(&module.stderr));
    }
    let mut archive = Archive::default();
    for folder in ["bin", "dev", "root"] {
        archive.add(folder, 0o040_755, &[], (0, 0));
    }
    // The kernel opens it as standard output of the first program, before that mounts /dev.
    archive.add("dev/console", 0o020_600, &[], (5, 1));
    archive.add("bin/busybox", 0o100_755, &program, (0, 0));
    archive.add("virtio_blk.ko", 0o100_644, &module.stdout, (0, 0));
    archive.add("init", 0o100_755, SCRIPT.as_bytes(), (0, 0));
    archive.add("TRAILER!!!", 0, &[], (0, 0));
    Ok(archive.bytes)
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
struct Archive {
    bytes: Vec<u8>,
    files: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8], device: (u32, u32)) {
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
