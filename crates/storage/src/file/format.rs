//! Image formats that are not raw, known by their first or last bytes.
//!
//! An image of one of these formats is no disk as it stands: served as raw, its guest reads the format's own tables, and writes over
//! them. The content proves nothing about the format, though: whoever may write to a raw disk, its guest above all, may write these
//! bytes. So they are a reason to ask, never a reason to open an image as something else.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A format that is not raw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    /// QEMU's first copy-on-write format.
    Qcow,
    /// QEMU's own format.
    Qcow2,
    /// QEMU's enhanced disk.
    Qed,
    /// VMware's, a sparse extent or a description of other files.
    Vmdk,
    /// Virtual PC's and Hyper-V's first; a fixed one is a raw image with a footer.
    Vhd,
    /// Hyper-V's second.
    Vhdx,
    /// VirtualBox's.
    Vdi,
    /// Parallels', with its own or with Virtuozzo's header.
    Parallels,
    /// An encrypted volume, as cryptsetup makes it: of QEMU on the host, or of the guest.
    Luks,
    /// Apple's disk image.
    Dmg,
    /// A compressed loop image.
    Cloop,
    /// The Bochs emulator's.
    Bochs,
}

impl ImageFormat {
    /// What `qemu-img -f` calls it.
    pub fn name(self) -> &'static str {
        match self {
            ImageFormat::Qcow => "qcow",
            ImageFormat::Qcow2 => "qcow2",
            ImageFormat::Qed => "qed",
            ImageFormat::Vmdk => "vmdk",
            ImageFormat::Vhd => "vpc",
            ImageFormat::Vhdx => "vhdx",
            ImageFormat::Vdi => "vdi",
            ImageFormat::Parallels => "parallels",
            ImageFormat::Luks => "luks",
            ImageFormat::Dmg => "dmg",
            ImageFormat::Cloop => "cloop",
            ImageFormat::Bochs => "bochs",
        }
    }

    /// The format of an image that begins and ends with these bytes; `None` if it may be raw. `tail` ends where the image does.
    pub fn of(head: &[u8], tail: &[u8]) -> Option<ImageFormat> {
        use ImageFormat as Format;
        let word = |at: usize| head.get(at..at + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
        let footer = tail.len().checked_sub(FOOTER).map_or(&[][..], |at| &tail[at..]);
        if head.starts_with(b"QFI\xfb") {
            return match word(4) {
                Some(1) => Some(Format::Qcow),
                // A version to come is still no raw image.
                _ => Some(Format::Qcow2),
            };
        }
        if head.get(64..68) == Some(&VDI.to_le_bytes()) {
            return Some(Format::Vdi);
        }
        let heads: [(&[u8], Format); 10] = [
            (b"QED\0", Format::Qed),
            (b"KDMV", Format::Vmdk),
            (b"COWD", Format::Vmdk),
            (b"vhdxfile", Format::Vhdx),
            (b"conectix", Format::Vhd),
            (b"WithoutFreeSpace", Format::Parallels),
            (b"WithouFreSpacExt", Format::Parallels),
            (b"LUKS\xba\xbe", Format::Luks),
            (b"#!/bin/sh\n#V2.0 Format\n", Format::Cloop),
            (b"Bochs Virtual HD Image\0", Format::Bochs),
        ];
        if let Some((_, format)) = heads.iter().find(|(magic, _)| head.starts_with(magic)) {
            return Some(*format);
        }
        if is_descriptor(head) {
            return Some(Format::Vmdk);
        }
        if footer.starts_with(b"conectix") {
            return Some(Format::Vhd);
        }
        footer.starts_with(b"koly").then_some(Format::Dmg)
    }

    /// The format of an open image of that many bytes. Reads whole blocks of [`BLOCK`] bytes, so that `O_DIRECT` may be set.
    pub(super) fn read(file: &File, bytes: u64) -> io::Result<Option<ImageFormat>> {
        let mut block = Box::new(Block([0; BLOCK]));
        let head = at(file, 0, &mut block)?.to_vec();
        // The block that the image ends in, and with the one before it for a footer that lies in both.
        let last = bytes.saturating_sub(1) / BLOCK as u64 * BLOCK as u64;
        let mut tail = match last.checked_sub(BLOCK as u64) {
            Some(before) => at(file, before, &mut block)?.to_vec(),
            None => Vec::new(),
        };
        tail.extend_from_slice(at(file, last, &mut block)?);
        Ok(ImageFormat::of(&head, &tail))
    }
}

impl fmt::Display for ImageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ImageFormat::Vhd => "VHD (qemu-img: vpc)",
            ImageFormat::Luks => "LUKS",
            other => other.name(),
        })
    }
}

/// A multiple of what any `O_DIRECT` asks for.
const BLOCK: usize = 4096;
/// Bytes of VHD's footer, and of dmg's.
const FOOTER: usize = 512;
/// At offset 64 of a VDI, little-endian.
const VDI: u32 = 0xbeda_107f;

#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// What the image has in this block: less than a block at its end.
fn at<'b>(file: &File, offset: u64, block: &'b mut Block) -> io::Result<&'b [u8]> {
    let mut length = 0;
    while length < BLOCK {
        match file.read_at(&mut block.0[length..], offset + length as u64) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A rest that is not aligned, after the end was reached.
            Err(error) if length > 0 && error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(&block.0[..length])
}

/// VMDK's text: `# Disk DescriptorFile`, after empty lines and comments at most, as QEMU takes it too.
fn is_descriptor(head: &[u8]) -> bool {
    let wanted = b"# disk descriptorfile";
    let lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let mut before = lines.take_while(|line| line.is_empty() || line.starts_with(b"#"));
    before.any(|line| line.to_ascii_lowercase().starts_with(wanted))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An image of 64 KiB with these bytes there.
    fn image(at: usize, bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut content = vec![0; 1 << 16];
        content[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(file.path(), content).unwrap();
        file
    }

    fn read(file: &tempfile::NamedTempFile) -> Option<ImageFormat> {
        let file = file.as_file();
        ImageFormat::read(file, file.metadata().unwrap().len()).unwrap()
    }

    #[test]
    fn hole_16_every_format_is_known_by_its_bytes() {
        use ImageFormat as Format;
        let vdi = [b"<<< Oracle VM VirtualBox Disk Image >>>\n".as_slice(), &[0; 24], &VDI.to_le_bytes()];
        let cases: [(usize, &[u8], Format); 17] = [
            (0, b"QFI\xfb\0\0\0\x01", Format::Qcow),
            (0, b"QFI\xfb\0\0\0\x02", Format::Qcow2),
            (0, b"QFI\xfb\0\0\0\x03", Format::Qcow2),
            (0, b"QED\0", Format::Qed),
            (0, b"KDMV\x01\0\0\0", Format::Vmdk),
            (0, b"COWD\x01\0\0\0", Format::Vmdk),
            (0, b"# Disk DescriptorFile\nversion=1\n", Format::Vmdk),
            (0, b"\r\n# A comment\n# Disk DescriptorFile\r\n", Format::Vmdk),
            (0, b"vhdxfile", Format::Vhdx),
            (0, b"conectix", Format::Vhd),
            ((1 << 16) - 512, b"conectix", Format::Vhd),
            (0, &vdi.concat(), Format::Vdi),
            (0, b"WithoutFreeSpace", Format::Parallels),
            (0, b"WithouFreSpacExt", Format::Parallels),
            (0, b"LUKS\xba\xbe\0\x02", Format::Luks),
            ((1 << 16) - 512, b"koly", Format::Dmg),
            (0, b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop", Format::Cloop),
        ];
        for (at, bytes, format) in cases {
            assert_eq!(read(&image(at, bytes)), Some(format), "{bytes:x?} at {at}");
            assert!(!format.name().is_empty());
        }
    }

    #[test]
    fn what_is_raw_is_not_asked_about() {
        // Nothing; a boot sector; the magic anywhere else; a text that only mentions it.
        let boot = [0xeb, 0x63, 0x90];
        let cases: [(usize, &[u8]); 5] = [
            (0, b""),
            (0, &boot),
            (512, b"QFI\xfb\0\0\0\x03"),
            ((1 << 16) - 511, b"conectix"),
            (0, b"hello\n# Disk DescriptorFile\n"),
        ];
        for (at, bytes) in cases {
            assert_eq!(read(&image(at, bytes)), None, "{bytes:x?} at {at}");
        }
    }

    #[test]
    fn short_images_and_footers_across_blocks() {
        for bytes in [1u64, 511, 512, 4096, 4097, 8191] {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(bytes).unwrap();
            assert_eq!(read(&file), None, "{bytes}");
            if bytes >= 512 {
                file.as_file().write_at(b"conectix", bytes - 512).unwrap();
                assert_eq!(read(&file), Some(ImageFormat::Vhd), "{bytes}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(head in proptest::collection::vec(any::<u8>(), 0..600), tail in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = ImageFormat::of(&head, &tail);
        }
    }
}
