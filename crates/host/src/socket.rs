//! Sockets that are listened on: how a path becomes one, and how it goes away.
//!
//! What stands at the path is replaced only if it is a socket that nobody listens on: left over from a daemon that died. Anything
//! else (a file, a symbolic link, a directory, a live socket) is refused and stays as it is. The new socket is made beside, with its
//! mode from the first moment and listening, and is renamed. Into an empty place that is one step which fails if somebody was
//! faster (`RENAME_NOREPLACE`). What is made to replace a dead socket is called after that one, so that there is only one at a time
//! who may: who has the name looks once more whether the dead one is still there. Of daemons that want one path at once, one gets it.

use std::ffi::{OsStr, OsString};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// Longer than anybody needs from binding beside to renaming.
const MOMENTS: Duration = Duration::from_secs(60);

/// Binds a socket of mode 0600 that never blocks; see above for what it replaces.
pub fn bind(path: &Path) -> Result<UnixListener> {
    let Some(name) = path.file_name() else {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{} names no file", path.display())));
    };
    let folder = Directory::of(path)?;
    let dead = folder.dead_socket(path, name)?;
    let fresh = match &dead {
        None => {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            OsString::from(format!(".ioplane-{}-{number}", std::process::id()))
        }
        Some(Identity(device, inode, seconds, nanos)) => {
            OsString::from(format!(".ioplane-{device:x}-{inode:x}-{seconds:x}-{nanos:x}"))
        }
    };
    let listener = match folder.listen(&fresh) {
        Err(Errno::ADDRINUSE) if folder.is_abandoned(&fresh) => {
            folder.remove(&fresh);
            folder.listen(&fresh)
        }
        done => done,
    };
    let listener =
        listener.map_err(|errno| if errno == Errno::ADDRINUSE { in_use(path) } else { errno.into() })?;
    let placed = match dead {
        None => folder.rename(&fresh, name, RenameFlags::NOREPLACE).map_err(|errno| taken(path, errno)),
        Some(_) if folder.socket_at(name) != dead => Err(in_use(path)),
        Some(_) => folder.rename(&fresh, name, RenameFlags::empty()).map_err(Error::from),
    };
    if placed.is_err() {
        folder.remove(&fresh);
    }
    placed.map(|()| listener)
}

/// A path where a socket of ours is, to take it away again and nothing else.
#[derive(Debug)]
pub struct SocketPath {
    path: PathBuf,
    socket: Option<Identity>,
}

impl SocketPath {
    /// What is at `path` now is ours: it has just been bound, or has come from the process that had bound it.
    pub fn of(path: &Path) -> Self {
        SocketPath { path: path.to_owned(), socket: socket_at(path) }
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the socket away, unless something else has come to its place.
    pub fn clear(&self) {
        if self.socket.is_some() && socket_at(&self.path) == self.socket {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The socket at `path`, if there is one.
fn socket_at(path: &Path) -> Option<Identity> {
    rustix::fs::lstat(path).ok().and_then(|stat| Identity::of_socket(&stat))
}

/// Which file something is: device, inode, and when it was made, since numbers are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity(u64, u64, i64, u64);

impl Identity {
    /// `None` if it is no socket.
    fn of_socket(stat: &Stat) -> Option<Self> {
        let socket = FileType::from_raw_mode(stat.st_mode) == FileType::Socket;
        socket.then_some(Identity(stat.st_dev, stat.st_ino, stat.st_mtime, stat.st_mtime_nsec))
    }
}

fn taken(path: &Path, errno: Errno) -> Error {
    match errno {
        Errno::EXIST => in_use(path),
        Errno::INVAL | Errno::NOSYS => Error::new(
            ErrorKind::Unsupported,
            format!(
                "the file system of {} cannot take a socket in one step: use one in /run",
                path.display()
            ),
        ),
        errno => errno.into(),
    }
}

fn in_use(path: &Path) -> Error {
    let text = format!("{} is in use: another process listens on it, or has just taken it", path.display());
    Error::new(ErrorKind::AddrInUse, text)
}

/// The directory of a path, held open: what is done is done there, whatever becomes of the path meanwhile.
struct Directory(OwnedFd);

impl Directory {
    fn of(path: &Path) -> Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Directory(rustix::fs::openat(CWD, folder, flags, Mode::empty())?))
    }

    fn look(&self, name: &OsStr) -> rustix::io::Result<Stat> {
        rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW)
    }

    fn socket_at(&self, name: &OsStr) -> Option<Identity> {
        self.look(name).ok().and_then(|stat| Identity::of_socket(&stat))
    }

    /// The socket at `name` that nobody listens on, if there is one. An error if something else is there.
    fn dead_socket(&self, path: &Path, name: &OsStr) -> Result<Option<Identity>> {
        let stat = match self.look(name) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let what = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Socket => None,
            FileType::Directory => Some("a directory"),
            FileType::Symlink => Some("a symbolic link"),
            FileType::RegularFile => Some("a file"),
            _ => Some("no socket"),
        };
        if let Some(what) = what {
            let text = format!(
                "{} is {what}, and only a socket that nobody listens on is replaced: give another path, or move it away",
                path.display()
            );
            return Err(Error::new(ErrorKind::AlreadyExists, text));
        }
        match rustix::net::connect(&socket()?, &SocketAddrUnix::new(path)?) {
            Err(Errno::CONNREFUSED) => Ok(Identity::of_socket(&stat)),
            Err(Errno::NOENT) => Ok(None),
            // Listened on with a full backlog, or of another type.
            Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(in_use(path)),
            Err(errno) => Err(errno.into()),
        }
    }

    /// A socket that listens at `name`.
    fn listen(&self, name: &OsStr) -> rustix::io::Result<UnixListener> {
        let socket = socket()?;
        // The name gets the mode that the socket has before it is bound, less the umask: never a wider one.
        rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
        // A path that fits into an address, whatever the length of the directory's own.
        let mut path = OsString::from(format!("/proc/self/fd/{}/", self.0.as_raw_fd()));
        path.push(name);
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        match rustix::net::listen(&socket, BACKLOG) {
            Ok(()) => Ok(UnixListener::from(socket)),
            Err(errno) => {
                self.remove(name);
                Err(errno)
            }
        }
    }

    /// Whether what was made beside was left there by a process that died over it: that takes no longer than moments.
    fn is_abandoned(&self, name: &OsStr) -> bool {
        let Ok(stat) = self.look(name) else { return true };
        let made = UNIX_EPOCH + Duration::from_secs(u64::try_from(stat.st_mtime).unwrap_or(0));
        SystemTime::now().duration_since(made).is_ok_and(|age| age > MOMENTS)
    }

    fn remove(&self, name: &OsStr) {
        let _ = rustix::fs::unlinkat(&self.0, name, AtFlags::empty());
    }

    fn rename(&self, from: &OsStr, to: &OsStr, flags: RenameFlags) -> rustix::io::Result<()> {
        rustix::fs::renameat_with(&self.0, from, &self.0, to, flags)
    }
}

/// A stream socket that never blocks.
fn socket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}
