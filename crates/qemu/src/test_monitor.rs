//! A monitor for tests, of this crate and of `ioplane-exits`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

/// A monitor that gives these answers, in turn; the first is to `qmp_capabilities`.
pub(crate) fn serve(name: &str, answers: Vec<Vec<u8>>) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"{\"QMP\": {}}\n").unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        for answer in answers {
            lines.next();
            let _ = stream.write_all(&answer);
        }
        lines.next();
    });
    (folder, path)
}
