//! Images that are not raw, as qemu-img makes them.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use ioplane_storage::{Direct, FileBacking, FileOptions, ImageFormat, Raw, StorageError};

const BYTES: u64 = 4 << 20;

/// Runs qemu-img, which script/bootstrap installs.
fn qemu_img(args: &[&str], image: &Path) {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q"]).args(args).arg(image).arg(BYTES.to_string());
    let mut said = command.output().expect("qemu-img (package qemu-utils)");
    // For LUKS it measures how fast this processor hashes, and now and then cannot.
    for _ in 0..20 {
        if !String::from_utf8_lossy(&said.stderr).contains("Unable to get accurate CPU usage") {
            break;
        }
        said = command.output().expect("qemu-img (package qemu-utils)");
    }
    assert!(said.status.success(), "{args:?}: {}", String::from_utf8_lossy(&said.stderr));
}

fn looks_like(path: &Path, direct: Direct) -> Option<ImageFormat> {
    match FileBacking::open(FileOptions { direct, ..FileOptions::new(path) }) {
        Ok(_) => None,
        Err(StorageError::NotRaw { format, image }) => {
            assert_eq!(image, path.display().to_string());
            Some(format)
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn hole_16_images_of_qemu_img_are_not_served_as_raw() {
    use ImageFormat as Format;
    // Where files have O_DIRECT.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let luks = ["--object", "secret,id=s,data=x", "-f", "luks", "-o", "key-secret=s,iter-time=10"];
    let cases: [(&[&str], Format); 13] = [
        (&["-f", "qcow2"], Format::Qcow2),
        (&["-f", "qcow2", "-o", "compat=0.10"], Format::Qcow2),
        (&["-f", "qcow"], Format::Qcow),
        (&["-f", "qed"], Format::Qed),
        (&["-f", "vmdk"], Format::Vmdk),
        (&["-f", "vmdk", "-o", "subformat=monolithicFlat"], Format::Vmdk),
        (&["-f", "vmdk", "-o", "subformat=streamOptimized"], Format::Vmdk),
        (&["-f", "vdi"], Format::Vdi),
        (&["-f", "vhdx"], Format::Vhdx),
        (&["-f", "vpc"], Format::Vhd),
        (&["-f", "vpc", "-o", "subformat=fixed,force_size"], Format::Vhd),
        (&["-f", "parallels"], Format::Parallels),
        (&luks, Format::Luks),
    ];
    for (number, (args, format)) in cases.into_iter().enumerate() {
        let image = folder.path().join(format!("{number}.img"));
        qemu_img(args, &image);
        let before = std::fs::read(&image).unwrap();
        for direct in [Direct::Auto, Direct::Off] {
            assert_eq!(looks_like(&image, direct), Some(format), "{args:?} {direct:?}");
        }
        assert_eq!(std::fs::read(&image).unwrap(), before, "{args:?}: touched");
        // Whoever says that it is raw gets it as it stands.
        FileBacking::open(FileOptions { raw: Raw::Stated, ..FileOptions::new(&image) }).unwrap();
    }
    let raw = folder.path().join("raw.img");
    qemu_img(&["-f", "raw"], &raw);
    assert_eq!(looks_like(&raw, Direct::Auto), None);
}

/// A guest may write anything to its raw disk. Whoever has served that image as raw serves it again, and no other in its place.
#[test]
fn hole_16_an_image_is_remembered_and_not_its_name() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("a.img");
    std::fs::File::create(&path).unwrap().set_len(BYTES).unwrap();
    let id = FileBacking::open(FileOptions::new(&path)).unwrap().id().unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(b"QFI\xfb\0\0\0\x03", 0).unwrap();
    assert_eq!(looks_like(&path, Direct::Auto), Some(ImageFormat::Qcow2));
    let remembered =
        || FileBacking::open(FileOptions { raw: Raw::Remembered(id), ..FileOptions::new(&path) });
    remembered().unwrap();
    // Another one in its place, perhaps with its number.
    drop(file);
    std::fs::remove_file(&path).unwrap();
    qemu_img(&["-f", "qcow2"], &path);
    assert!(matches!(remembered(), Err(StorageError::NotRaw { format: ImageFormat::Qcow2, .. })));
}
