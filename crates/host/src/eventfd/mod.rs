//! Eventfds as interrupts and kicks.
//!
//! An eventfd that a peer sent shares its flags with the peer: whoever holds it can clear `O_NONBLOCK` at any moment, and then a
//! `write` to a full counter and a `read` of an empty one wait. So peers' eventfds are never written, and read only with
//! `RWF_NOWAIT`. They are raised by the kernel, which never waits and leaves a full counter full: on the completion of an AIO
//! request, or of a request on an io_uring that the eventfd is registered with (docs/decisions/0015-interrupts-that-never-wait.md).

mod aio;
mod ring;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::Interrupt;
use rustix::event::{EventfdFlags, eventfd};

/// An interrupt that raises a peer's eventfd: KVM's irqfd, or a VMM's own. Never waits for the peer, whatever it does to the
/// descriptor.
#[derive(Debug)]
pub struct PeerEventfd {
    file: OwnedFd,
    raised_by: RaisedBy,
}

/// What makes the kernel raise the eventfd.
#[derive(Debug)]
enum RaisedBy {
    Aio(&'static aio::Context),
    Ring(Box<ring::Ring>),
}

impl PeerEventfd {
    /// Takes an eventfd over. An error says that this kernel offers no way to raise it without the risk of waiting.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let raised_by = match aio::shared() {
            Some(context) => RaisedBy::Aio(context),
            None => RaisedBy::Ring(Box::new(ring::Ring::new(file.as_fd())?)),
        };
        Ok(PeerEventfd { file, raised_by })
    }

    /// Raises the eventfd with an io_uring made for this one interrupt: the kernel refused the AIO request, because it is out of memory. A lost
    /// interrupt can stop a guest's queue for good.
    #[cold]
    fn raise_otherwise(&self) {
        match ring::Ring::new(self.file.as_fd()) {
            Ok(ring) => ring.raise(),
            Err(error) => {
                tracing::error!(%error, "an interrupt is lost: the kernel takes neither AIO nor an io_uring")
            }
        }
    }

    /// As [`Call::new`] on a kernel without AIO.
    #[cfg(test)]
    fn without_aio(file: OwnedFd) -> io::Result<Self> {
        let ring = ring::Ring::new(file.as_fd())?;
        Ok(PeerEventfd { file, raised_by: RaisedBy::Ring(Box::new(ring)) })
    }
}

impl Interrupt for PeerEventfd {
    fn signal(&self) {
        match &self.raised_by {
            RaisedBy::Aio(context) => {
                if !context.raise(self.file.as_fd()) {
                    self.raise_otherwise();
                }
            }
            RaisedBy::Ring(ring) => ring.raise(),
        }
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }
}

/// A new eventfd of our own. It does not block, as long as nobody else gets it.
pub fn fresh() -> rustix::io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Whether `file`, which a peer sent, is an eventfd. Anything else (a FIFO, a file on a server that does not answer) could make
/// whoever reads or polls it wait.
pub fn check(file: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.is_ok_and(|path| path.as_os_str() == "anon_inode:[eventfd]")
}

/// Empties a peer's eventfd; says what it held. Does not wait, whatever the descriptor's flags.
pub fn empty(file: BorrowedFd<'_>) -> u64 {
    let mut count = [0u8; 8];
    let buffer = &mut [io::IoSliceMut::new(&mut count)];
    // -1 means no offset.
    match rustix::io::preadv2(file, buffer, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT) {
        Ok(8) => u64::from_ne_bytes(count),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    /// An eventfd and the same one as a hostile peer has it.
    fn shared() -> (OwnedFd, OwnedFd) {
        let ours = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let theirs = ours.try_clone().unwrap();
        (ours, theirs)
    }

    fn both(file: &OwnedFd) -> [PeerEventfd; 2] {
        [
            PeerEventfd::new(file.try_clone().unwrap()).unwrap(),
            PeerEventfd::without_aio(file.try_clone().unwrap()).unwrap(),
        ]
    }

    /// Panics if `act` has not returned in ten seconds. (Its thread stays behind then.)
    fn returns(what: &str, act: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(act);
        let deadline = Instant::now() + Duration::from_secs(10);
        while !thread.is_finished() {
            assert!(Instant::now() < deadline, "{what} waits for the peer");
            std::thread::sleep(Duration::from_millis(1));
        }
        thread.join().unwrap();
    }

    #[test]
    fn hole_01_a_signal_does_not_wait_for_a_full_counter() {
        let (ours, theirs) = shared();
        let calls = both(&ours);
        rustix::io::write(&theirs, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::empty()).unwrap();
        returns("signalling", move || {
            for call in &calls {
                (0..5000).for_each(|_| call.signal());
            }
        });
        assert_eq!(empty(theirs.as_fd()), u64::MAX, "full, and told so");
    }

    #[test]
    fn hole_01_emptying_does_not_wait_for_a_kick() {
        let (ours, theirs) = shared();
        rustix::fs::fcntl_setfl(&theirs, rustix::fs::OFlags::empty()).unwrap();
        returns("emptying", move || assert_eq!(empty(ours.as_fd()), 0));
        rustix::io::write(&theirs, &7u64.to_ne_bytes()).unwrap();
        assert_eq!(empty(theirs.as_fd()), 7);
    }

    #[test]
    fn every_signal_arrives_from_whichever_thread() {
        const EACH: u64 = 20_000;
        let (ours, theirs) = shared();
        let [by_aio, by_ring] = both(&ours);
        assert!(matches!(by_aio.raised_by, RaisedBy::Aio(_)), "this kernel has AIO");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..EACH).for_each(|_| by_aio.signal()));
            }
        });
        assert_eq!(empty(theirs.as_fd()), 4 * EACH);
        (0..EACH).for_each(|_| by_ring.signal());
        assert_eq!(empty(theirs.as_fd()), EACH);
        // Threads at once may share a signal, as interrupts at once do: however many, while the one that has the ring is off
        // its processor. None goes unseen after the last.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..EACH).for_each(|_| by_ring.signal()));
            }
        });
        let came = empty(theirs.as_fd());
        assert!((1..=4 * EACH).contains(&came), "{came}");
        by_ring.signal();
        assert_eq!(empty(theirs.as_fd()), 1);
    }

    #[test]
    fn hole_01_a_signal_that_aio_refuses_is_given_all_the_same() {
        let (ours, theirs) = shared();
        let call = PeerEventfd::new(ours).unwrap();
        call.raise_otherwise();
        call.signal();
        assert_eq!(empty(theirs.as_fd()), 2);
    }

    #[test]
    fn only_an_eventfd_passes() {
        let (ours, _) = shared();
        assert!(check(&ours));
        let flags = rustix::fs::fcntl_getfl(&ours).unwrap();
        let (from, to) = rustix::pipe::pipe().unwrap();
        let memfd =
            rustix::fs::memfd_create("anon_inode:[eventfd]", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let fifo = folder.path().join("anon_inode:[eventfd]");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let fifo = std::fs::OpenOptions::new().read(true).write(true).open(fifo).unwrap();
        let timer = rustix::time::timerfd_create(
            rustix::time::TimerfdClockId::Monotonic,
            rustix::time::TimerfdFlags::empty(),
        );
        let others = [from, to, memfd, OwnedFd::from(socket), OwnedFd::from(fifo), timer.unwrap()];
        for other in others {
            assert!(!check(&other), "{other:?}");
            assert!(
                PeerEventfd::without_aio(other.try_clone().unwrap()).is_err(),
                "io_uring takes eventfds only"
            );
        }
        assert_eq!(rustix::fs::fcntl_getfl(&ours).unwrap(), flags, "the peer's flags are the peer's");
    }
}
