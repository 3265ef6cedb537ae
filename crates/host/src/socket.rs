//! Sockets that are listened on: how a path becomes one, and how it goes away.
//!
//! What stands at the path is replaced only if it is a socket that nobody listens on: left over from a daemon that died. Anything
//! else (a file, a symbolic link, a directory, a live socket) is refused and stays as it is. The new socket is made beside, under a
//! name of its own, with its mode from the first moment and listening, and takes the path by one step (`renameat2`): into an empty
//! place, or in exchange with exactly the dead socket that was looked at. Of two daemons that want the same path at once one is
//! refused.

use std::ffi::{OsStr, OsString};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// How often another name is tried for what is made beside.
const TRIES: u32 = 100;

/// Binds a socket of mode 0600 that never blocks; see above for what it replaces.
pub fn bind(path: &Path) -> Result<UnixListener> {
    let Some(name) = path.file_name() else {
        return Err(Error::new(ErrorKind::InvalidInput, format!("{} names no file", path.display())));
    };
    let folder = Folder::of(path)?;
    let dead = folder.dead_socket(path, name)?;
    let (listener, fresh) = folder.listen_beside(name)?;
    let placed = match &dead {
        None => folder.rename(&fresh, name, RenameFlags::NOREPLACE).map_err(|errno| taken(path, errno)),
        Some(dead) => folder.exchange(&fresh, name, dead, path),
    };
    if placed.is_err() || dead.is_some() {
        // What failed, or what was dead.
        let _ = rustix::fs::unlinkat(&folder.0, &fresh, AtFlags::empty());
    }
    placed.map(|()| listener)
}

/// Takes the socket at `path` away, if it is `listener`'s: nobody else's, and no file.
pub fn unbind(path: &Path, listener: impl AsFd) {
    let ours = rustix::net::getsockname(&listener).ok().and_then(|name| SocketAddrUnix::try_from(name).ok());
    let (Some(ours), Ok(stat)) = (ours, rustix::fs::lstat(path)) else { return };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return;
    }
    let _ = ours;
    let _ = std::fs::remove_file(path);
}

/// Which file something is.
fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

fn taken(path: &Path, errno: Errno) -> Error {
    match errno {
        Errno::EXIST => in_use(path),
        Errno::INVAL | Errno::NOSYS => Error::new(
            ErrorKind::Unsupported,
            format!("the file system of {} cannot take a socket in one step: use one in /run", path.display()),
        ),
        errno => errno.into(),
    }
}

fn in_use(path: &Path) -> Error {
    let text = format!("{} is in use: another process listens on it, or has just taken it", path.display());
    Error::new(ErrorKind::AddrInUse, text)
}

/// The directory of a path, held open: what is done is done there, whatever becomes of the path meanwhile.
struct Folder(OwnedFd);

impl Folder {
    fn of(path: &Path) -> Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Folder(rustix::fs::openat(CWD, folder, flags, Mode::empty())?))
    }

    fn look(&self, name: &OsStr) -> Result<Option<Stat>> {
        match rustix::fs::statat(&self.0, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// A path to `name` here that is short, whatever the length of the directory's own.
    fn address(&self, name: &OsStr) -> Result<SocketAddrUnix> {
        let mut path = OsString::from(format!("/proc/self/fd/{}/", self.0.as_raw_fd()));
        path.push(name);
        Ok(SocketAddrUnix::new(path)?)
    }

    /// The socket at `name` that nobody listens on, if there is one. An error if something else is there.
    fn dead_socket(&self, path: &Path, name: &OsStr) -> Result<Option<Stat>> {
        let Some(stat) = self.look(name)? else { return Ok(None) };
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
        let probe = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )?;
        match rustix::net::connect(&probe, &self.address(name)?) {
            Err(Errno::CONNREFUSED) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            // Listened on with a full backlog, or of another type.
            Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(in_use(path)),
            Err(errno) => Err(errno.into()),
        }
    }

    /// A socket that listens, and its name: nobody else's, hidden, and gone after [`bind`].
    fn listen_beside(&self, name: &OsStr) -> Result<(UnixListener, OsString)> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        for _ in 0..TRIES {
            let mut fresh = OsString::from(".");
            fresh.push(name);
            fresh.push(format!(".{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            // The name gets the mode that the socket has before it is bound, less the umask: never a wider one.
            rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
            match rustix::net::bind(&socket, &self.address(&fresh)?) {
                // Left over from a process of the same number that died right here.
                Err(Errno::ADDRINUSE) => continue,
                done => done?,
            }
            let listening = rustix::fs::chmodat(&self.0, &fresh, Mode::RUSR | Mode::WUSR, AtFlags::empty())
                .and_then(|()| rustix::net::listen(&socket, BACKLOG));
            if let Err(errno) = listening {
                let _ = rustix::fs::unlinkat(&self.0, &fresh, AtFlags::empty());
                return Err(errno.into());
            }
            return Ok((UnixListener::from(socket), fresh));
        }
        Err(ErrorKind::AddrInUse.into())
    }

    fn rename(&self, from: &OsStr, to: &OsStr, flags: RenameFlags) -> rustix::io::Result<()> {
        rustix::fs::renameat_with(&self.0, from, &self.0, to, flags)
    }

    /// Puts `fresh` in the place of the socket that was found dead, which is called `fresh` then. If another has come there
    /// meanwhile, that one is put back.
    fn exchange(&self, fresh: &OsStr, name: &OsStr, dead: &Stat, path: &Path) -> Result<()> {
        match self.rename(fresh, name, RenameFlags::EXCHANGE) {
            // Gone meanwhile.
            Err(Errno::NOENT) => {
                return self.rename(fresh, name, RenameFlags::NOREPLACE).map_err(|errno| taken(path, errno));
            }
            done => done.map_err(|errno| taken(path, errno))?,
        }
        if self.look(fresh)?.is_some_and(|stat| identity(&stat) == identity(dead)) {
            return Ok(());
        }
        self.rename(fresh, name, RenameFlags::EXCHANGE)?;
        Err(in_use(path))
    }
}
