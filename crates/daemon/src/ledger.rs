//! Where an export's claim is kept: on its image, so that it goes where the image goes (docs/decisions/0052-claims.md).
//!
//! What has no attributes (devices, other machines' exports, some file systems) has a file in the state directory. Memory is gone with the
//! daemon, and so is its claim.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use ioplane_api::spec::BackingSpec;
use ioplane_nbd::claim::{ClaimBook, ClaimRecord, ClaimStore};
use rustix::fs::XattrFlags;
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
            "is the limit on open files too low?",
        )
    };
    if let Some(image) = image {
        let image = image.try_clone_to_owned().map_err(os)?;
        match read_attribute(&image) {
            Ok(record) => {
                let undo = format!("setfattr -x {ATTRIBUTE} {}", spec.name());
                let record = record.map(|bytes| decode(&bytes, &spec.name(), &undo)).transpose()?;
                // A file system that reads no attribute may write none either: that is found out now.
                return Ok((record, Box::new(Image(image))));
            }
            Err(Errno::NOTSUP | Errno::PERM) => {}
            Err(error) => return Err(unreadable(&spec.name(), error.into())),
        }
    }
    let Some(key) = key(spec) else { return Ok((None, Box::new(Nowhere))) };
    let folder = state_dir.join("claims").join("exports");
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
fn key(spec: &BackingSpec) -> Option<String> {
    let place = match spec {
        BackingSpec::Memory { .. } => return None,
        BackingSpec::Remote { remote, .. } => remote.to_string(),
        BackingSpec::File { path, .. } => lasting_name(path).display().to_string(),
    };
    Some(Sha256::digest(place).iter().take(16).map(|byte| format!("{byte:02x}")).collect())
}

/// A name that an image keeps whatever it is published as, and a device when the host reboots: what `/dev/dm-3` is then is another one.
fn lasting_name(path: &Path) -> PathBuf {
    let whole = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let device = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        found.file_type().is_block_device().then(|| found.rdev())
    };
    let Some(number) = device(&whole) else { return whole };
    let links =
        std::fs::read_dir("/dev/disk/by-id").into_iter().flatten().flatten().map(|entry| entry.path());
    links.filter(|link| device(link) == Some(number)).min().unwrap_or(whole)
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
