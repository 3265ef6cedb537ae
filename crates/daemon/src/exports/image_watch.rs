//! Whether the image of an export is where it was published, and as long: a person may cut, move or remove the file of a disk in use, and its
//! clients would hear of no more than I/O errors, or of nothing at all.

use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use ioplane_api::spec::BackingSpec;
use ioplane_storage::ImageId;
use tokio::task::JoinHandle;

use super::content::written_at;

/// Looks at one image in the background: its file system may take its time, and whoever asks does not wait for it.
pub struct ImageWatch {
    image: Option<Watched>,
    looking: Option<JoinHandle<()>>,
    /// How many bytes were published when it was looked at, and what was found.
    found: Arc<Mutex<(u64, Option<String>)>>,
}

impl ImageWatch {
    /// `image`: which one was opened; `written`: when, if clients were told of that. What has no image, such as memory, is never found wrong.
    pub fn new(backing: &BackingSpec, image: Option<ImageId>, written: Option<i64>) -> ImageWatch {
        let path = match backing {
            BackingSpec::File { path, .. } => Some(path.clone()),
            _ => None,
        };
        let image = path.zip(image).map(|(path, id)| Watched { path, id, written });
        ImageWatch { image, looking: None, found: Arc::default() }
    }

    /// What was wrong with it at the last look that has ended, and begins the next one. `bytes`: how many are published. Must be called in the runtime.
    pub fn look(&mut self, bytes: u64) -> Option<String> {
        let image = self.image.clone()?;
        if self.looking.as_ref().is_none_or(JoinHandle::is_finished) {
            let found = self.found.clone();
            self.looking = Some(tokio::task::spawn_blocking(move || {
                let flaw = image.flaw(bytes);
                *found.lock().unwrap_or_else(PoisonError::into_inner) = (bytes, flaw);
            }));
        }
        let (of, flaw) = self.found.lock().unwrap_or_else(PoisonError::into_inner).clone();
        // It was resized since.
        flaw.filter(|_| of == bytes)
    }
}

/// The image that was published.
#[derive(Debug, Clone)]
struct Watched {
    path: PathBuf,
    id: ImageId,
    /// Of one that nobody may write: when it was last written, as its clients were told, in ns since 1970.
    written: Option<i64>,
}

impl Watched {
    /// What is wrong with it, of which `bytes` are published, by what its path names now. Others are told its first 150 characters.
    fn flaw(&self, bytes: u64) -> Option<String> {
        let path = &self.path;
        let wrong = match ImageId::at(path) {
            Ok((other, _)) if other != self.id => {
                "another file is where its image was; the old one is used until it is published again"
                    .to_owned()
            }
            Ok((_, Some(length))) if length.next_multiple_of(512) < bytes => {
                format!("its image was cut to {length} bytes of {bytes}: what was behind that is gone")
            }
            Ok(_) => return self.touched(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                "its image was moved or removed; what is written goes to a file without that name".to_owned()
            }
            Err(error) => format!("its image cannot be looked at ({error})"),
        };
        Some(format!("{wrong}: {}", path.display()))
    }

    /// Whether its readers will stop when it is published again, since it was written or made longer meanwhile.
    fn touched(&self) -> Option<String> {
        let told = self.written?;
        let now = written_at(&rustix::fs::stat(&self.path).ok()?);
        (now != told).then(|| {
            let (seconds, rest) = (told.div_euclid(1_000_000_000), told.rem_euclid(1_000_000_000));
            format!(
                "its image was written, or grown, although it is read-only: readers stop when it is published again. Only grown? touch -m -d @{seconds}.{rest:09} '{}'",
                self.path.display().to_string().replace('\'', r"'\''")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn what_was_done_to_an_image_has_a_name() {
        let folder = tempfile::tempdir().unwrap();
        let [path, other] = ["data.img", "other.img"].map(|name| folder.path().join(name));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(4000).unwrap();
        let (id, length) = ImageId::at(&path).unwrap();
        let image = Watched { path: path.clone(), id, written: None };
        let flaw = |bytes| image.flaw(bytes);
        assert_eq!(length, Some(4000));
        // The disk has whole sectors.
        assert_eq!(flaw(4096), None);
        file.set_len(8192).unwrap();
        assert_eq!(flaw(4096), None);
        file.set_len(1024).unwrap();
        assert!(flaw(4096).unwrap().contains("cut to 1024 bytes of 4096"));
        std::fs::rename(&path, &other).unwrap();
        assert!(flaw(1024).unwrap().contains("moved or removed"));
        std::fs::File::create(&path).unwrap().set_len(1024).unwrap();
        assert!(flaw(1024).unwrap().contains("another file"));
        std::fs::rename(&other, &path).unwrap();
        assert_eq!(flaw(1024), None);
        let beyond = Watched { path: path.join("x"), id, written: None };
        assert!(beyond.flaw(1024).unwrap().contains("cannot be looked at"));
    }

    /// A reader would find another content after a restart. What the flaw says to do brings the old one back.
    #[test]
    fn an_image_that_was_grown_although_nobody_may_write_it_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.img");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(4096).unwrap();
        // Long ago, and with a part that begins with zeros.
        let told = std::time::Duration::new(1_700_000_000, 12_345);
        file.set_modified(std::time::UNIX_EPOCH + told).unwrap();
        let (id, _) = ImageId::at(&path).unwrap();
        let written = crate::exports::content::of(file.as_fd()).unwrap().written;
        let image = Watched { path: path.clone(), id, written };
        assert_eq!(image.flaw(4096), None);
        file.set_len(8192).unwrap();
        let flaw = image.flaw(4096).unwrap();
        let remedy = format!("touch -m -d @1700000000.000012345 '{}'", path.display());
        assert!(flaw.ends_with(&remedy) && flaw.contains("readers stop"), "{flaw}");
        assert!(flaw.find("touch").unwrap() < 150, "who is told a part of it knows what to do: {flaw}");
        assert!(std::process::Command::new("sh").args(["-c", &remedy]).status().unwrap().success());
        assert_eq!(image.flaw(4096), None);
        // Who may write it does so.
        file.set_len(16384).unwrap();
        assert_eq!(Watched { written: None, ..image }.flaw(4096), None);
    }

    #[tokio::test]
    async fn it_is_looked_at_beside_whoever_asks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.img");
        std::fs::File::create(&path).unwrap().set_len(512).unwrap();
        let (id, _) = ImageId::at(&path).unwrap();
        let found = Arc::default();
        let mut watch = ImageWatch { image: Some(Watched { path, id, written: None }), looking: None, found };
        assert_eq!(watch.look(1024), None);
        watch.looking.take().unwrap().await.unwrap();
        assert!(watch.look(1024).unwrap().contains("cut to 512"));
        // It has another size by now: what was found is of the one before.
        assert_eq!(watch.look(512), None);
    }
}
