//! The image that keeps QEMU from migrating a guest with one of our functions: see docs/decisions/0014-mediated-hardware.md.
//!
//! Any VDI image does: QEMU's driver for the format blocks migration as long as one is open, used or not. This is an empty one,
//! with the few fields that QEMU and VirtualBox look at (VirtualBox SDK, `VDICore.h`; all numbers little-endian).

use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::access::SocketAccess;
use crate::refusal::Refusal;

/// Its name in the run directory.
const NAME: &str = "unmovable.vdi";
/// Bytes of a block, and of the one that the disk has.
const BLOCK: u32 = 1 << 20;
/// Where the map of blocks begins, and where the blocks would.
const MAP: u32 = 512;
const DATA: u32 = 1024;
/// An entry of the map for a block that was never written.
const ABSENT: u32 = u32::MAX;

/// Where it is in a run directory.
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join(NAME)
}

/// Writes it, for `access` to read.
pub fn write(run_dir: &Path, access: SocketAccess) -> Result<(), Refusal> {
    let path = path(run_dir);
    // Beside and renamed: a QEMU that opens it sees all of it.
    let fresh = path.with_extension("new");
    let make = || -> std::io::Result<()> {
        let _ = std::fs::remove_file(&fresh);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        std::io::Write::write_all(&mut file, &image())
    };
    let failed = |error: std::io::Error| {
        let remedy = "is the run directory there and writable, and is there space?";
        Refusal::failed(format!("{}: {error}", path.display()), remedy)
    };
    make().map_err(failed)?;
    access.open(&fresh)?;
    std::fs::rename(&fresh, &path).map_err(failed)
}

/// Its bytes: a header, and a map of one block that is not there.
fn image() -> Vec<u8> {
    let mut image = vec![0; DATA as usize];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x00, b"<<< an empty disk, so that QEMU does not migrate >>>\n");
    for (at, value) in [
        (0x40, 0xbeda_107f), // signature
        (0x44, 0x0001_0001), // version 1.1
        (0x48, 0x180),       // bytes of the header
        (0x4c, 1),           // it grows when it is written
        (0x154, MAP),
        (0x158, DATA),
        (0x168, 512),   // bytes of a sector
        (0x170, BLOCK), // size of the disk, 64 bits
        (0x178, BLOCK), // size of a block
        (0x180, 1),     // blocks
        (0x184, 0),     // of which are there
        (MAP as usize, ABSENT),
    ] {
        put(at, &value.to_le_bytes());
    }
    // An image has an identity (0x188), and one of its content (0x198); none of a parent.
    put(0x188, b"ioplane-no-move1");
    put(0x198, b"ioplane-no-move2");
    image
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn qemu_takes_it_for_an_image() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), SocketAccess::default()).unwrap();
        write(folder.path(), SocketAccess::default()).unwrap();
        let run = |args: &[&str]| {
            let output = Command::new("qemu-img").args(args).arg(path(folder.path())).output();
            let output = output.expect("qemu-img: script/bootstrap installs it");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{args:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
            text
        };
        let info: serde_json::Value = serde_json::from_str(&run(&["info", "--output=json"])).unwrap();
        assert_eq!((&info["format"], &info["virtual-size"]), (&"vdi".into(), &BLOCK.into()), "{info}");
        assert!(run(&["check", "-f", "vdi"]).contains("No errors"));
        assert_eq!(run(&["map", "-f", "vdi", "--output=json"]).matches("\"data\": true").count(), 0);
    }
}
