//! The sockets that hosts listen on.

use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

/// Binds a socket of mode 0600 that never blocks. One that nobody listens on is left over from a daemon that died, and replaced.
pub fn bind(path: &Path) -> Result<UnixListener> {
    if UnixStream::connect(path).is_ok() {
        let text = format!("{} is in use: another daemon listens on it", path.display());
        return Err(Error::new(ErrorKind::AddrInUse, text));
    }
    // Bound beside and renamed, so that it is never there with the wrong mode.
    let fresh = path.with_extension("new");
    let _ = std::fs::remove_file(&fresh);
    let listener = UnixListener::bind(&fresh)?;
    std::fs::set_permissions(&fresh, PermissionsExt::from_mode(0o600))?;
    std::fs::rename(&fresh, path)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// File systems whose pages may come late or never: whoever touches such a page waits with all that it serves.
const SLOW: [(i64, &str); 4] =
    [(0x6573_5546, "FUSE"), (0x6969, "NFS"), (0x0102_1997, "9p"), (0xff53_4d42, "CIFS")];

/// The file system of a file that a peer shares as memory, if its pages may not come at once: such a file must be refused.
pub fn slow_memory(file: &std::os::fd::OwnedFd) -> Result<Option<&'static str>> {
    let kind = rustix::fs::fstatfs(file)?.f_type as i64;
    Ok(SLOW.iter().find(|(slow, _)| *slow == kind).map(|(_, name)| *name))
}
