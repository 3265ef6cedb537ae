//! Files of a few lines that have to be there, whole, after a power failure.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use sha2::{Digest, Sha256};

/// More than any of them has.
pub const MOST: usize = 4096;

/// The content of a small file, if it is there.
pub fn read(file: &Path) -> std::io::Result<Option<Vec<u8>>> {
    read_up_to(file, MOST)
}

/// The first bytes of a file, at most `most`.
pub fn read_up_to(file: &Path, most: usize) -> std::io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    match File::open(file) {
        Ok(file) => file.take(most as u64).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(Some(bytes))
}

/// A file's name for what is told apart by `parts`: so many bytes of their hash, in hexadecimal.
pub fn hash(parts: &[&[u8]], bytes: usize) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
        hash.update([0]);
    }
    hash.finalize().iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

/// Makes a directory that only its owner may read, and those above it, and makes that durable.
pub fn make_folder(folder: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    for above in folder.ancestors().skip(1).take(2) {
        File::open(above)?.sync_all()?;
    }
    Ok(())
}

/// Replaces a small file as a whole; durable when it returns.
pub fn replace(folder: &Path, file: &Path, bytes: &[u8]) -> std::io::Result<()> {
    make_folder(folder)?;
    let mut new = file.as_os_str().to_owned();
    new.push(".new");
    let mut written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    written.write_all(bytes)?;
    written.sync_all()?;
    std::fs::rename(&new, file)?;
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_read_in_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let (folder, file) = (folder.path().join("a/b"), folder.path().join("a/b/x"));
        assert_eq!(read(&file).unwrap(), None);
        for text in ["one", "another, longer", "x"] {
            replace(&folder, &file, text.as_bytes()).unwrap();
            assert_eq!(read(&file).unwrap().unwrap(), text.as_bytes());
        }
        std::fs::write(&file, vec![b'x'; 1 << 20]).unwrap();
        assert_eq!(read(&file).unwrap().unwrap().len(), MOST);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "nothing is left over");
    }
}
