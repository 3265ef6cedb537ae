//! Where the number of an image's failed flushes is kept, so that an exporter that was restarted is another instance than before one of them
//! (docs/decisions/0044-remote-requests-once.md).
//!
//! On the image, beside its claim; what has no attributes has a file in the state directory. If the image refuses it the file has it: both are
//! read, and the greater number counts. It need not survive a power cut, after which the instance is another one in any case.

use std::fs::OpenOptions;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use ioplane_api::spec::BackingSpec;
use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::ledger;
use crate::refusal::Refusal;
use crate::small_file::{read, replace};

/// The attribute of an image.
const ATTRIBUTE: &str = "user.ioplane.failed-flushes";
/// Bytes of a record: always as many, so that one that is there can be changed where no space is left.
const RECORD: usize = 21;

/// Where the number of one image is kept. What loses its content with the daemon, or has another exporter below, has no place: it is another
/// instance after each start.
pub struct FlushLedger {
    /// A description of its own: see [`ledger::beside`].
    image: Option<OwnedFd>,
    file: Option<InFile>,
}

struct InFile {
    folder: PathBuf,
    file: PathBuf,
}

/// The number so far, and where the next one is to be kept. `image` is what is open of it. Fails if there is no place for it. Blocks.
pub fn open(
    spec: &BackingSpec,
    image: Option<BorrowedFd<'_>>,
    state_dir: &Path,
) -> Result<(u64, FlushLedger), Refusal> {
    let BackingSpec::File { path, .. } = spec else {
        return Ok((0, FlushLedger { image: None, file: None }));
    };
    let os = |error: std::io::Error| {
        Refusal::failed(
            format!("the number of failed flushes of {}: {error}", spec.name()),
            "may this user read the image and its attributes, and is /proc mounted?",
        )
    };
    let folder = state_dir.join("claims").join("flushes");
    let file = ledger::key(spec).map(|key| InFile { file: folder.join(key), folder });
    let image = image.filter(|_| path.is_file()).map(ledger::beside).transpose().map_err(os)?;
    let mut ledger = FlushLedger { image, file };
    let noted = ledger.noted().map_err(os)?;
    let kept = |saved: Result<(), String>| {
        saved.map_err(|why| {
            Refusal::failed(
                format!("the number of failed flushes of {} cannot be kept: {why}", spec.name()),
                "is there space, and may this user write there?",
            )
        })
    };
    if noted.contains(&None) {
        let count = since_1970();
        tracing::warn!(
            image = spec.name(),
            count,
            "the number of failed flushes was damaged: as if one more had failed"
        );
        kept(ledger.mend(count))?;
        return Ok((count, ledger));
    }
    match noted.iter().flatten().max() {
        Some(count) => Ok((*count, ledger)),
        // Now, while it can be: when a flush has failed there may be no space for it.
        None => kept(ledger.save(0)).map(|()| (0, ledger)),
    }
}

/// More than any count that was written before: a damaged one was some other number.
fn since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn decode(bytes: &[u8]) -> Option<u64> {
    std::str::from_utf8(bytes).ok()?.strip_suffix('\n').filter(|text| text.len() == RECORD - 1)?.parse().ok()
}

fn encode(count: u64) -> [u8; RECORD] {
    let mut record = [b'\n'; RECORD];
    record[..RECORD - 1].copy_from_slice(format!("{count:020}").as_bytes());
    record
}

impl FlushLedger {
    /// What is written down in each place that has a record; `None` for one that is damaged.
    fn noted(&mut self) -> std::io::Result<Vec<Option<u64>>> {
        let mut noted = Vec::new();
        if let Some(image) = &self.image {
            let mut bytes = [0; 2 * RECORD];
            match rustix::fs::fgetxattr(image, ATTRIBUTE, &mut bytes[..]) {
                Ok(len) => noted.push(decode(&bytes[..len])),
                Err(Errno::NODATA) => {}
                Err(Errno::RANGE) => noted.push(None),
                Err(Errno::NOTSUP | Errno::PERM) => self.image = None,
                Err(error) => return Err(error.into()),
            }
        }
        if let Some(InFile { file, .. }) = &self.file {
            noted.extend(read(file)?.map(|bytes| decode(&bytes)));
        }
        Ok(noted)
    }

    /// The same in every place that has a record.
    fn mend(&self, count: u64) -> Result<(), String> {
        self.save(count)?;
        match &self.file {
            Some(in_file) if in_file.file.exists() => {
                in_file.save(&encode(count)).map_err(|error| error.to_string())
            }
            _ => Ok(()),
        }
    }

    /// Writes it down where the next process finds it. Blocks.
    ///
    /// The attribute is not synced. The next process of this boot finds what the kernel has taken, and after another boot the instance is another one whatever
    /// the count is. An fsync of the image would write out all of it to the disk that has just failed, while clients wait, and it would report the very failure that
    /// is recorded here: [`ledger::beside`]'s description has not been told of it.
    pub fn save(&self, count: u64) -> Result<(), String> {
        let record = encode(count);
        let on_image = self.image.as_ref().map(|image| {
            rustix::fs::fsetxattr(image, ATTRIBUTE, &record, XattrFlags::empty())
                .map_err(|error| format!("writing {ATTRIBUTE} to the image: {}", std::io::Error::from(error)))
        });
        let (why, in_file) = match (on_image, &self.file) {
            (Some(Ok(())), _) | (None, None) => return Ok(()),
            (Some(Err(why)), None) => return Err(why),
            (on_image, Some(in_file)) => (on_image.and_then(Result::err), in_file),
        };
        in_file.save(&record).map_err(|error| {
            let file = format!("writing {}: {error}", in_file.file.display());
            why.map_or_else(|| file.clone(), |why| format!("{why}; {file}"))
        })
    }
}

impl InFile {
    /// In place if it is there, which takes no space.
    fn save(&self, record: &[u8; RECORD]) -> std::io::Result<()> {
        match OpenOptions::new().write(true).open(&self.file) {
            Ok(file) => {
                file.write_all_at(record, 0)?;
                file.set_len(RECORD as u64)?;
                file.sync_data()
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                replace(&self.folder, &self.file, record)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn spec(path: &Path) -> BackingSpec {
        BackingSpec::File {
            path: path.to_owned(),
            format: None,
            direct: Default::default(),
            engine: Default::default(),
        }
    }

    /// With and without attributes: a path that is no file has none, as a device.
    #[test]
    fn the_number_is_found_again_and_a_damaged_one_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, "x").unwrap();
        let image = std::fs::File::open(&path).unwrap();
        for image in [Some(image.as_fd()), None] {
            let state = tempfile::tempdir().unwrap();
            let spec = spec(&path);
            let open = || open(&spec, image, state.path()).unwrap();
            let (count, ledger) = open();
            assert_eq!(count, 0);
            for count in [1, 2, u64::MAX] {
                ledger.save(count).unwrap();
                assert_eq!(open().0, count);
            }
            match image {
                Some(image) => {
                    rustix::fs::fsetxattr(image, ATTRIBUTE, b"7", XattrFlags::empty()).unwrap();
                    assert!(!state.path().join("claims").exists());
                }
                None => {
                    let file = std::fs::read_dir(state.path().join("claims/flushes")).unwrap().next();
                    std::fs::write(file.unwrap().unwrap().path(), "00000000000000000002").unwrap();
                }
            }
            let (count, _) = open();
            assert!(count > 1_000_000_000 && open().0 == count, "{count}");
        }
    }

    #[test]
    fn what_the_image_refuses_is_in_the_state_directory() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, "x").unwrap();
        let image = std::fs::File::open(&path).unwrap();
        let (_, mut ledger) = open(&spec(&path), Some(image.as_fd()), folder.path()).unwrap();
        // A pipe has no attributes.
        ledger.image = Some(rustix::pipe::pipe().unwrap().1);
        ledger.save(5).unwrap();
        assert_eq!(open(&spec(&path), Some(image.as_fd()), folder.path()).unwrap().0, 5);
        let file = &ledger.file.as_ref().unwrap().file;
        std::fs::remove_file(file).unwrap();
        std::fs::create_dir(file).unwrap();
        let why = ledger.save(6).unwrap_err();
        assert!(why.contains(ATTRIBUTE) && why.contains("flushes/"), "{why}");
    }
}
