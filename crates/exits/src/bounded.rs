//! Files that others wrote: never more than a stated number of bytes of them.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::error::{ExitsError, Result};

/// The bytes of a file that may have `limit` of them at most.
pub(crate) fn bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let mut found = Vec::new();
    let file = File::open(path).map_err(ExitsError::file(path))?;
    file.take(limit + 1).read_to_end(&mut found).map_err(ExitsError::file(path))?;
    if found.len() as u64 > limit {
        let what = format!("has more than {limit} bytes; that is no such file");
        return Err(ExitsError::Malformed { path: path.into(), what });
    }
    Ok(found)
}

/// The same as text; bytes that are not UTF-8 are replaced.
pub(crate) fn text(path: &Path, limit: u64) -> Result<String> {
    bytes(path, limit).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}
