//! Sockets of other processes, and lines over them. Whoever listens there need not be what it says: all that is done here ends at a stated
//! time.

use std::fmt;
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat2};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How often a socket is tried again whose queue is full: nobody tells when there is room.
const AGAIN: Duration = Duration::from_millis(20);

/// A socket, by a path of this process's or of another's. What another process calls so is looked for as that one sees it: in its
/// root, its mounts and its directory, whatever stands at the same path here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    path: PathBuf,
    of: Option<u32>,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ioplane_plain::shown(&self.path))
    }
}

impl Endpoint {
    /// As this process sees it.
    pub fn here(path: impl Into<PathBuf>) -> Endpoint {
        Endpoint { path: path.into(), of: None }
    }

    /// As that process sees it.
    pub fn of(pid: u32, path: impl Into<PathBuf>) -> Endpoint {
        Endpoint { path: path.into(), of: Some(pid) }
    }

    /// Its path, as its process has it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A hold on what is there. By it long paths can be connected to as well.
    fn open(&self) -> Result<OwnedFd> {
        let place = OFlags::PATH | OFlags::CLOEXEC;
        let Some(pid) = self.of.filter(|pid| *pid != std::process::id()) else {
            return Ok(openat2(CWD, &self.path, place, Mode::empty(), ResolveFlags::empty())?);
        };
        let of = |what: &str| -> Result<OwnedFd> {
            let path = format!("/proc/{pid}/{what}");
            Ok(rustix::fs::open(path, place | OFlags::DIRECTORY, Mode::empty())?)
        };
        // A link that leads out of its root, or to a descriptor of ours, was laid for us.
        let (folder, how) = if self.path.is_absolute() {
            (of("root")?, ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS)
        } else if same_files(pid)? {
            (of("cwd")?, ResolveFlags::NO_MAGICLINKS)
        } else {
            (of("cwd")?, ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS)
        };
        Ok(openat2(&folder, &self.path, place, Mode::empty(), how)?)
    }
}

/// Whether a process has the root and the mounts of this one.
fn same_files(pid: u32) -> Result<bool> {
    let identity = |path: String| rustix::fs::stat(path).map(|file| (file.st_dev, file.st_ino));
    let same = |what: &str| {
        Ok::<_, Error>(identity(format!("/proc/{pid}/{what}"))? == identity(format!("/proc/self/{what}"))?)
    };
    Ok(same("ns/mnt")? && same("root")?)
}

/// A connection on which lines come and go. What is not done at its end fails with [`ErrorKind::TimedOut`], whatever the other
/// side does: not listen, not read, or send a byte now and then.
#[derive(Debug)]
pub struct Lines {
    stream: UnixStream,
    end: Instant,
    limit: usize,
    buffer: Vec<u8>,
    /// So many of these have no end of a line.
    looked: usize,
}

impl Lines {
    /// Connects to a socket, until then at the latest. Lines may have `limit` bytes.
    pub fn connect(to: &Endpoint, limit: usize, end: Instant) -> Result<Lines> {
        let place = to.open()?;
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
        loop {
            // Where others wait already this would wait for as long as the first of them likes; without waiting it fails.
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            match connect(&socket, &address) {
                Ok(()) => {
                    let stream = UnixStream::from(socket);
                    stream.set_nonblocking(false)?;
                    return Ok(Lines { stream, end, limit, buffer: Vec::new(), looked: 0 });
                }
                Err(Errno::AGAIN | Errno::INTR) => std::thread::sleep(AGAIN.min(left(end)?)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Which process listens there: the one that did when the socket was made.
    pub fn process(&self) -> Result<u32> {
        let credentials = rustix::net::sockopt::socket_peercred(&self.stream)?;
        u32::try_from(credentials.pid.as_raw_nonzero().get()).map_err(Error::other)
    }

    /// From now on it ends then.
    pub fn until(&mut self, end: Instant) {
        self.end = end;
    }

    /// Sends all of it.
    pub fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(self.end)?))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(closed()),
                Ok(length) => bytes = &bytes[length..],
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The next line.
    pub fn line(&mut self) -> Result<Vec<u8>> {
        loop {
            if let Some(at) = self.buffer[self.looked..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.looked + at + 1);
                self.looked = 0;
                return Ok(std::mem::replace(&mut self.buffer, rest));
            }
            self.looked = self.buffer.len();
            if self.buffer.len() >= self.limit {
                return Err(Error::other(format!("it sends a line of more than {} bytes", self.limit)));
            }
            self.stream.set_read_timeout(Some(left(self.end)?))?;
            let mut part = [0; 4096];
            match self.stream.read(&mut part) {
                Ok(0) => return Err(closed()),
                Ok(length) => self.buffer.extend_from_slice(&part[..length]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Never zero, which would mean for ever.
fn left(end: Instant) -> Result<Duration> {
    let left = end.saturating_duration_since(Instant::now());
    let late = || Error::new(ErrorKind::TimedOut, "it does not answer; somebody else may be using it");
    if left.is_zero() { Err(late()) } else { Ok(left) }
}

fn closed() -> Error {
    Error::new(ErrorKind::UnexpectedEof, "it has closed the connection; somebody else may be using it")
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    const SOON: Duration = Duration::from_millis(150);
    /// It would be for ever.
    const LATE: Duration = Duration::from_secs(5);

    fn listener() -> (tempfile::TempDir, PathBuf, UnixListener) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        (folder, path, listener)
    }

    /// QEMU queues one, and one more; the kernel would make the next wait until the first is served.
    #[test]
    fn a_full_queue_is_not_waited_for() {
        let (_folder, path, listener) = listener();
        rustix::net::listen(&listener, 1).unwrap();
        let begun = Instant::now();
        let mut held = Vec::new();
        let error = loop {
            match Lines::connect(&Endpoint::here(&path), 9, Instant::now() + SOON) {
                Ok(lines) => held.push(lines),
                Err(error) => break error,
            }
        };
        assert!(error.kind() == ErrorKind::TimedOut && begun.elapsed() < LATE, "{error} {}", held.len());
        // There is room again before the end.
        let late = std::thread::spawn(move || {
            std::thread::sleep(SOON);
            (listener.accept().unwrap(), listener)
        });
        Lines::connect(&Endpoint::here(&path), 9, Instant::now() + LATE).unwrap();
        late.join().unwrap();
    }

    #[test]
    fn a_byte_now_and_then_is_no_answer() {
        let (_folder, path, listener) = listener();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(b"x").is_ok() {
                std::thread::sleep(SOON / 10);
            }
        });
        let begun = Instant::now();
        let mut lines = Lines::connect(&Endpoint::here(&path), 1 << 20, begun + SOON).unwrap();
        assert_eq!(lines.line().unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(begun.elapsed() < LATE);
        drop(lines);
        server.join().unwrap();
    }

    #[test]
    fn one_that_does_not_read_is_not_waited_for() {
        let (_folder, path, listener) = listener();
        let begun = Instant::now();
        let mut lines = Lines::connect(&Endpoint::here(&path), 9, begun + SOON).unwrap();
        assert_eq!(lines.send(&vec![0; 1 << 24]).unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(begun.elapsed() < LATE);
        drop(listener);
    }

    #[test]
    fn lines_come_whole_and_not_without_end() {
        let (_folder, path, listener) = listener();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            for part in [b"on".as_slice(), b"e\ntwo\nthr", b"ee\n"] {
                stream.write_all(part).unwrap();
                std::thread::sleep(SOON / 10);
            }
            let _ = stream.write_all(&[b'x'; 99]);
        });
        let mut lines = Lines::connect(&Endpoint::here(&path), 50, Instant::now() + LATE).unwrap();
        for line in [b"one\n".as_slice(), b"two\n", b"three\n"] {
            assert_eq!(lines.line().unwrap(), line);
        }
        assert!(lines.line().unwrap_err().to_string().contains("more than 50 bytes"));
        server.join().unwrap();
    }

    /// A process of another root, mounts and directory, as a VM in a container is. Ended with the value.
    struct Other(std::process::Child);

    impl Other {
        /// Runs a line of shell in namespaces of its own, which ends by writing a line and waiting.
        fn new(script: &str, folder: &Path) -> Other {
            let script = format!("{script}; echo ready; exec sleep 60");
            let mut child = std::process::Command::new("unshare")
                .args(["--mount", "sh", "-ec", &script])
                .current_dir(folder)
                .stdout(std::process::Stdio::piped())
                .spawn()
                .unwrap();
            let mut said = [0; 6];
            child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
            assert_eq!(&said, b"ready\n");
            Other(child)
        }

        fn endpoint(&self, path: impl Into<PathBuf>) -> Endpoint {
            Endpoint::of(self.0.id(), path)
        }
    }

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// Who answers there, by one line.
    fn said(to: &Endpoint) -> Result<Vec<u8>> {
        Lines::connect(to, 99, Instant::now() + LATE)?.line()
    }

    /// Serves a line for ever, on a thread that ends with the program.
    fn speaker(path: &Path, line: &'static [u8]) {
        let listener = UnixListener::bind(path).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = stream.and_then(|mut stream| stream.write_all(line));
            }
        });
    }

    #[test]
    fn hole_21_a_socket_of_another_process_is_what_that_one_calls_so() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, theirs) = (folder.path().join("ours"), folder.path().join("theirs"));
        [&ours, &theirs].into_iter().for_each(|folder| std::fs::create_dir(folder).unwrap());
        speaker(&ours.join("qmp"), b"ours\n");
        speaker(&theirs.join("qmp"), b"theirs\n");
        std::os::unix::fs::symlink("qmp", theirs.join("link")).unwrap();
        std::os::unix::fs::symlink("../ours/qmp", theirs.join("out")).unwrap();
        // A directory alone is another already: a relative path begins there.
        let beside = {
            let mut command = std::process::Command::new("sleep");
            Other(command.arg("60").current_dir(&theirs).spawn().unwrap())
        };
        assert_eq!(said(&beside.endpoint("qmp")).unwrap(), b"theirs\n");
        assert_eq!(said(&beside.endpoint("../ours/qmp")).unwrap(), b"ours\n");
        assert_eq!(said(&beside.endpoint(theirs.join("qmp"))).unwrap(), b"theirs\n");
        assert_eq!(said(&Endpoint::here(ours.join("qmp"))).unwrap(), b"ours\n");
        assert!(said(&Endpoint::here("qmp")).is_err(), "not in this directory");
        if !rustix::process::geteuid().is_root() {
            let _ = writeln!(
                std::io::stderr(),
                "SKIPPED: sockets in other mounts and roots were NOT tested: it takes root"
            );
            return;
        }
        // Other mounts: the same path, another socket.
        let (from, over) = (theirs.display(), ours.display());
        let other = Other::new(&format!("mount --bind {from} {over}; cd {over}"), folder.path());
        assert_eq!(said(&other.endpoint(ours.join("qmp"))).unwrap(), b"theirs\n");
        assert_eq!(said(&other.endpoint("qmp")).unwrap(), b"theirs\n");
        assert_eq!(said(&other.endpoint("link")).unwrap(), b"theirs\n");
        // A path that leads out of where the process is, by which it would name a socket of ours to us.
        assert!(said(&other.endpoint("out")).is_err() && said(&other.endpoint("../ours/qmp")).is_err());
        // Another root: whatever its links say, they stay in there.
        let root = folder.path().join("root");
        std::fs::create_dir(&root).unwrap();
        let mounts = format!(
            "mount --rbind / {0}; mount -t tmpfs none {0}{1}; ln -s {2}/qmp {0}{1}/lead; \
             exec chroot {0} sh -c 'echo ready; exec sleep 60' #",
            root.display(),
            folder.path().display(),
            ours.display()
        );
        let caged = Other::new(&mounts, folder.path());
        let lead = folder.path().join("lead");
        assert!(said(&caged.endpoint(lead)).is_err(), "a link to a socket of ours");
        // Paths are not bounded by what an address of a socket may have.
        let deep = theirs.join("d".repeat(90)).join("e".repeat(90));
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::rename(theirs.join("qmp"), deep.join("qmp")).unwrap();
        assert_eq!(said(&beside.endpoint(deep.join("qmp"))).unwrap(), b"theirs\n");
    }
}
