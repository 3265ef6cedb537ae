//! Where an export's claim is kept: on its image, so that it goes where the image goes (docs/decisions/0052-claims.md).
//!
//! What has no attributes (devices, other machines' exports, some file systems) has a file in the state directory. Memory is gone with the
//! daemon, and so is its claim.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ioplane_api::spec::BackingSpec;
use ioplane_nbd::claim::{ClaimBook, ClaimRecord, ClaimStore};
use rustix::fs::{Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use sha2::{Digest, Sha256};

use crate::refusal::Refusal;
use crate::small_file::{MOST, read, replace};

/// The attribute of an image.
const ATTRIBUTE: &str = "user.ioplane.claim";

/// The book of an export that can be written; `image` is what is open of it. Blocks.
pub fn open(
    spec: &BackingSpec,
    image: Option<BorrowedFd<'_>>,
    state_dir: &Path,
) -> Result<ClaimBook, Refusal> {
    let (record, store) = find(spec, image, state_dir)?;
    Ok(ClaimBook::new(record, store))
}

/// The claim that was granted last, whatever it was published as then. Blocks.
pub fn last(
    spec: &BackingSpec,
    image: Option<BorrowedFd<'_>>,
    state_dir: &Path,
) -> Result<Option<ClaimRecord>, Refusal> {
    find(spec, image, state_dir).map(|(record, _)| record)
}

/// How a person takes the claim away that an image carries itself.
pub fn undo(spec: &BackingSpec) -> Option<String> {
    match spec {
        BackingSpec::File { path, .. } if path.is_file() => Some(remove_attribute(&spec.name())),
        _ => None,
    }
}

fn remove_attribute(image: &str) -> String {
    format!("setfattr -x {ATTRIBUTE} {image}")
}

/// Nobody holds it any more: its holder is the one who says so. Blocks.
pub fn release(spec: &BackingSpec, image: Option<BorrowedFd<'_>>, state_dir: &Path) -> Result<(), Refusal> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    open(spec, image, state_dir)?.release(now).map_err(|refusal| {
        Refusal::failed(
            format!("the claim of {} cannot be released: {}", spec.name(), refusal.name),
            "is there space, and may this user write there?",
        )
    })
}

/// An image has just been made there: what is noted of an earlier one by that path is of something else. Blocks.
pub fn forget(spec: &BackingSpec, state_dir: &Path) -> Result<(), Refusal> {
    let Some(key) = key(spec) else { return Ok(()) };
    let file = folder(state_dir).join(key);
    match std::fs::remove_file(&file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let remedy = format!("rm {}", file.display());
            Err(Refusal::failed(format!("the claim of an image that is gone: {error}"), remedy))
        }
        _ => Ok(()),
    }
}

/// The image by a description of its own. A sync that fails is told once to each description: told to that of the disk's writes, its next flush
/// would succeed without them.
pub fn beside(image: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", image.as_raw_fd());
    Ok(rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

fn folder(state_dir: &Path) -> PathBuf {
    state_dir.join("claims").join("exports")
}

/// What is written down, and where.
fn find(
    spec: &BackingSpec,
    image: Option<BorrowedFd<'_>>,
    state_dir: &Path,
) -> Result<(Option<ClaimRecord>, Box<dyn ClaimStore>), Refusal> {
    let image = match spec {
        BackingSpec::File { path, .. } if path.is_file() => image,
        _ => None,
    };
    let os = |error: std::io::Error| {
        Refusal::failed(
            format!("the image of {}: {error}", spec.name()),
            "is the limit on open files too low, and is /proc mounted?",
        )
    };
    if let Some(image) = image {
        let image = beside(image).map_err(os)?;
        match read_attribute(&image) {
            Ok(record) => {
                let undo = remove_attribute(&spec.name());
                let record = record.map(|bytes| decode(&bytes, &spec.name(), &undo)).transpose()?;
                // A file system that reads no attribute may write none either: that is found out now.
                return Ok((record, Box::new(Image(image))));
            }
            Err(Errno::NOTSUP | Errno::PERM) => {}
            Err(error) => return Err(unreadable(&spec.name(), error.into())),
        }
    }
    let Some(key) = key(spec) else { return Ok((None, Box::new(Nowhere))) };
    let folder = folder(state_dir);
    let file = folder.join(key);
    let bytes = read(&file).map_err(|error| unreadable(&file.display().to_string(), error))?;
    let undo = format!("rm {}", file.display());
    let record = bytes.map(|bytes| decode(&bytes, &file.display().to_string(), &undo)).transpose()?;
    Ok((record, Box::new(InFile { folder, file })))
}

fn unreadable(what: &str, error: std::io::Error) -> Refusal {
    let remedy = "may this user read it, and does its file system work?";
    Refusal::failed(format!("the claim of {what} cannot be read: {error}"), remedy)
}

/// Nobody is let in on a guess.
fn decode(bytes: &[u8], what: &str, undo: &str) -> Result<ClaimRecord, Refusal> {
    ClaimRecord::decode(bytes).map_err(|why| {
        Refusal::failed(
            format!("the claim of {what} is damaged: {why}, so that nobody knows who may write"),
            format!("see to it that no other host uses this disk, then: {undo}"),
        )
    })
}

fn read_attribute(image: &OwnedFd) -> Result<Option<Vec<u8>>, Errno> {
    let mut bytes = [0u8; MOST];
    match rustix::fs::fgetxattr(image, ATTRIBUTE, &mut bytes[..]) {
        Ok(len) => Ok(Some(bytes[..len].to_vec())),
        Err(Errno::NODATA) => Ok(None),
        // Longer than any of ours: it is read as damaged.
        Err(Errno::RANGE) => Ok(Some(bytes.to_vec())),
        Err(error) => Err(error),
    }
}

/// The file of what cannot be marked itself; none for memory.
pub fn key(spec: &BackingSpec) -> Option<String> {
    let place = match spec {
        BackingSpec::Memory { .. } => return None,
        BackingSpec::Remote(spec) => spec.remote.to_string(),
        BackingSpec::File { path, .. } => lasting_name(path),
    };
    Some(Sha256::digest(place).iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

/// A name that an image keeps whatever it is published as, and a device when the host reboots: what `/dev/dm-3` is then is another one.
fn lasting_name(path: &Path) -> String {
    let whole = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let Some(number) = device(&whole) else { return whole.display().to_string() };
    let found = ["/dev/disk/by-id", "/dev/disk/by-path"].into_iter().find_map(|folder| {
        let links = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
        most_lasting(links.filter(|link| device(link) == Some(number)))
    });
    // A loop device, as a rule: the next run of the host puts something else there.
    let by_number = || {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        format!("device {number:#x} of boot {}", boot.trim())
    };
    found.map_or_else(by_number, |link| link.display().to_string())
}

/// The number of a block device.
fn device(path: &Path) -> Option<u64> {
    let found = std::fs::metadata(path).ok()?;
    found.file_type().is_block_device().then(|| found.rdev())
}

/// Of links to one device. Names that a person gives, and may give to another one, come last.
fn most_lasting(links: impl Iterator<Item = PathBuf>) -> Option<PathBuf> {
    let given = |link: &Path| {
        let name = link.file_name().unwrap_or_default().as_encoded_bytes();
        name.starts_with(b"dm-name-") || name.starts_with(b"md-name-")
    };
    links.min_by_key(|link| (given(link), link.clone()))
}

/// On the image.
struct Image(OwnedFd);

impl ClaimStore for Image {
    fn save(&mut self, record: &ClaimRecord) -> Result<(), String> {
        let text = record.encode();
        rustix::fs::fsetxattr(&self.0, ATTRIBUTE, text.as_bytes(), XattrFlags::empty())
            .and_then(|()| rustix::fs::fsync(&self.0))
            .map_err(|error| format!("writing {ATTRIBUTE} to its image: {}", std::io::Error::from(error)))
    }
}

/// In the state directory.
struct InFile {
    folder: PathBuf,
    file: PathBuf,
}

impl ClaimStore for InFile {
    fn save(&mut self, record: &ClaimRecord) -> Result<(), String> {
        let saved = replace(&self.folder, &self.file, record.encode().as_bytes());
        saved.map_err(|error| format!("writing {}: {error}", self.file.display()))
    }
}

/// It goes with the daemon, as what it is about.
struct Nowhere;

impl ClaimStore for Nowhere {
    fn save(&mut self, _record: &ClaimRecord) -> Result<(), String> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_can_be_given_to_another_device_is_the_last_choice() {
        let best = |names: &[&str]| most_lasting(names.iter().map(PathBuf::from));
        assert_eq!(best(&["dm-name-vg-data", "dm-uuid-LVM-x"]), Some("dm-uuid-LVM-x".into()));
        assert_eq!(best(&["md-uuid-1", "md-name-host:0"]), Some("md-uuid-1".into()));
        assert_eq!(best(&["wwn-0x5", "ata-disk-7"]), Some("ata-disk-7".into()), "as ever: all of them last");
        assert_eq!(best(&["dm-name-vg-data"]), Some("dm-name-vg-data".into()));
        assert_eq!(best(&[]), None);
    }

    /// On a file system without attributes a claim is found by the path, and outlives the image.
    #[test]
    fn an_image_that_is_made_has_no_claim_of_an_earlier_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let spec = BackingSpec::File {
            path: path.clone(),
            format: None,
            direct: Default::default(),
            engine: Default::default(),
        };
        let last = || last(&spec, None, folder.path()).unwrap();
        forget(&spec, folder.path()).unwrap();
        let record =
            ClaimRecord { generation: 3, holder: "one".into(), name: "one".into(), since: 1, held: true };
        let (_, mut store) = find(&spec, None, folder.path()).unwrap();
        store.save(&record).unwrap();
        assert_eq!(last(), Some(record));
        release(&spec, None, folder.path()).unwrap();
        let released = last().unwrap();
        assert!(!released.held && released.since > 1 && released.generation == 3, "{released:?}");
        forget(&spec, folder.path()).unwrap();
        assert_eq!(last(), None);
    }

    #[test]
    fn a_device_without_a_link_is_another_one_after_a_reboot() {
        let nodes = std::fs::read_dir("/dev").unwrap().flatten().map(|entry| entry.path());
        let unlinked = nodes.filter(|path| device(path).is_some()).map(|path| lasting_name(&path));
        let mut names = unlinked.filter(|name| !name.starts_with("/dev/disk/")).peekable();
        if names.peek().is_none() {
            println!("SKIPPED: this host has no block device without a link in /dev/disk");
        }
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
        assert!(names.all(|name| name.starts_with("device ") && name.contains(boot.trim())));
        // An image is found by its path, whichever way that is written.
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("image"), "").unwrap();
        let long = folder.path().join("../").join(folder.path().file_name().unwrap()).join("image");
        assert_eq!(lasting_name(&long), lasting_name(&folder.path().join("image")));
    }
}
