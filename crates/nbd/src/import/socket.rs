//! A connected stream socket, in the calls that an I/O core makes of it: none of them blocks.

#![allow(unsafe_code)]
// UNSAFETY: hands addresses of guest memory, which a held map keeps mapped, to `sendmsg` and `recvmsg`; never touches the bytes
// behind them. Ends connections by a `connect` that rustix has no word for, and registers descriptors with tokio.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use ioplane_memory::IoVec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::net::{AddressFamily, Shutdown};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::locker::Locker;
use crate::protection::Protection;
use crate::records::{Gathering, Heard, Records, StreamError};

/// What follows in a call of [`Socket::send`] or [`Socket::receive`]: memory of ours or of the guest.
pub(super) struct IoTable {
    entries: Vec<libc::iovec>,
    bytes: usize,
}

// SAFETY: addresses and lengths; using them needs an unsafe block of its own.
unsafe impl Send for IoTable {}

impl IoTable {
    /// Room for `entries`, at most 1024 (IOV_MAX). Allocates.
    pub fn with_room(entries: usize) -> Self {
        IoTable { entries: Vec::with_capacity(entries.min(1024)), bytes: 0 }
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.bytes = 0;
    }

    /// Bytes of all entries.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// How many more entries there is room for.
    pub fn room(&self) -> usize {
        self.entries.capacity() - self.entries.len()
    }

    /// A place to [`IoTable::cut`] at.
    pub fn mark(&self) -> (usize, usize) {
        (self.entries.len(), self.bytes)
    }

    /// Takes off what was added since `mark`.
    pub fn cut(&mut self, mark: (usize, usize)) {
        self.entries.truncate(mark.0);
        self.bytes = mark.1;
    }

    /// Leaves only the first entry.
    pub fn keep_first(&mut self) {
        self.entries.truncate(1);
        self.bytes = self.entries.first().map_or(0, |entry| entry.iov_len);
    }

    /// Adds memory of ours. False, and nothing is added, if there is no room.
    pub fn push_own(&mut self, bytes: &[u8]) -> bool {
        self.push(bytes.as_ptr().cast_mut(), bytes.len())
    }

    /// Adds memory of ours that may be stored into.
    pub fn push_own_mut(&mut self, bytes: &mut [u8]) -> bool {
        self.push(bytes.as_mut_ptr(), bytes.len())
    }

    /// Adds `len` bytes of a span of guest memory, from `skip` on.
    pub fn push_guest(&mut self, span: &IoVec, skip: usize, len: usize) -> bool {
        debug_assert!(skip + len <= span.len());
        self.push(span.base().wrapping_add(skip), len)
    }

    fn push(&mut self, base: *mut u8, len: usize) -> bool {
        if len == 0 {
            return true;
        }
        if self.room() == 0 {
            return false;
        }
        self.entries.push(libc::iovec { iov_base: base.cast(), iov_len: len });
        self.bytes += len;
        true
    }
}

/// Tells when a descriptor is readable or writable.
pub(super) type Duplex = AsyncFd<Arc<OwnedFd>>;

/// One end of a connection, non-blocking. Shared by the channel, which sends and receives, and the control half, which ends it.
#[derive(Debug)]
pub(super) struct Socket {
    fd: Arc<OwnedFd>,
    tcp: bool,
    protection: Protection,
    /// With TLS or sums: what stands between the socket and both halves. The channel has it during its calls; the control half asks for it only while the channel has not been
    /// given the connection, has left it, or has nothing in flight.
    records: Option<Locker<Records>>,
}

impl Socket {
    /// Takes a connected socket, perhaps with TLS or sums. Small requests of a TCP connection go out at once, and data that nobody acknowledges for `dead_after`
    /// end it (`TCP_USER_TIMEOUT`).
    pub fn new(fd: OwnedFd, records: Option<Records>, dead_after: Duration) -> std::io::Result<Socket> {
        rustix::io::ioctl_fionbio(&fd, true)?;
        let tcp = prepare(&fd, dead_after)?;
        let protection = records.as_ref().map_or(Protection::None, Records::protection);
        let records = records.map(|records| Locker::new(Box::new(records)));
        Ok(Socket { fd: Arc::new(fd), tcp, protection, records })
    }

    /// Whether it receives into memory of ours only: there are records, of TLS or with sums.
    pub fn has_records(&self) -> bool {
        self.records.is_some()
    }

    /// By what its bytes are protected.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Does something with the state of the records; `EAGAIN` while the other half has it.
    fn with<T, E: From<i32>>(
        locker: &Locker<Records>,
        work: impl FnOnce(&mut Records) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut records = locker.take().ok_or(libc::EAGAIN)?;
        let done = work(&mut records);
        locker.put(records);
        done
    }

    /// Whether something that was sent has not gone to the kernel yet. Never without records.
    pub fn has_unsent(&self) -> bool {
        let unsent = |locker| Self::with(locker, |records| Ok::<_, i32>(records.has_unsent()));
        self.records.as_ref().is_some_and(|locker| unsent(locker).unwrap_or(true))
    }

    /// Passes it on. Whether all of it is.
    pub fn flush(&self) -> Result<bool, i32> {
        match &self.records {
            None => Ok(true),
            Some(locker) => Self::with(locker, |records| records.flush(self.as_fd())),
        }
    }

    /// Sends as much of `table` as the socket takes now; says how many bytes.
    ///
    /// With records all is copied first: `lost` says afterwards whether guest memory of it was gone, which is `EFAULT` as without.
    ///
    /// # Safety
    /// Every entry is memory of ours that is not written to meanwhile, or guest memory that is kept mapped.
    pub unsafe fn send(&self, table: &mut IoTable, lost: impl Fn() -> bool) -> Result<usize, i32> {
        if let Some(locker) = &self.records {
            // SAFETY: the caller's.
            let mut gathering = unsafe { Gathering::new(&table.entries) };
            let gather = |into: &mut [u8]| {
                gathering.copy(into);
                !lost()
            };
            let send = |records: &mut Records| records.send(self.as_fd(), table.bytes, gather);
            return Self::with(locker, send);
        }
        let mut message = header(table);
        // SAFETY: a message of valid entries, by the caller's promise; guest memory that is gone is EFAULT.
        let sent = unsafe {
            libc::sendmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        outcome(sent)
    }

    /// Receives what is there, as far as it fits into `table`; says how many bytes, 0 at the end of the stream.
    ///
    /// # Safety
    /// Every entry is memory of ours that nobody else looks at, or, without records, guest memory that is kept mapped and may be stored into.
    pub unsafe fn receive(&self, table: &mut IoTable) -> Result<usize, StreamError> {
        if let Some(locker) = &self.records {
            let Some(entry) = table.entries.first() else { return Err(libc::EINVAL.into()) };
            // SAFETY: the caller's.
            let into = unsafe { std::slice::from_raw_parts_mut(entry.iov_base.cast(), entry.iov_len) };
            return Self::with(locker, |records| records.receive(self.as_fd(), into));
        }
        let mut message = header(table);
        // SAFETY: as in `send`.
        let got = unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        Ok(outcome(got)?)
    }

    /// Sends bytes of ours, as many as the socket takes now; says how many.
    pub fn send_own(&self, bytes: &[u8]) -> Result<usize, i32> {
        let mut table = IoTable::with_room(1);
        table.push_own(bytes);
        // SAFETY: memory of ours.
        unsafe { self.send(&mut table, || false) }
    }

    /// Receives what is there, as far as it fits; says how many bytes, 0 at the end of the stream.
    pub fn receive_own(&self, bytes: &mut [u8]) -> Result<usize, StreamError> {
        let mut table = IoTable::with_room(1);
        table.push_own_mut(bytes);
        // SAFETY: memory of ours.
        unsafe { self.receive(&mut table) }
    }

    /// No more is sent than what the socket has taken; the peer is told.
    pub fn finish(&self) {
        if let Some(locker) = &self.records {
            let _ = Self::with(locker, |records| {
                records.finish(self.as_fd());
                records.flush(self.as_fd())
            });
        }
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Write);
    }

    /// Ends the connection at once. What the peer has not acknowledged is thrown away, so that a network that comes back
    /// delivers nothing of it. Descriptors of the socket stay valid and report an error.
    pub fn abort(&self) {
        if self.tcp {
            // SAFETY: an address of the family AF_UNSPEC, which ends the connection with a reset and empties its queues.
            unsafe {
                let nobody: libc::sockaddr = MaybeUninit::zeroed().assume_init();
                let len = size_of::<libc::sockaddr>() as libc::socklen_t;
                libc::connect(self.fd.as_raw_fd(), &raw const nobody, len);
            }
        }
        let _ = rustix::net::shutdown(&self.fd, Shutdown::Both);
    }

    /// What is there to be received; does not take it. Without records an end is not told from bytes. With them what is in the socket may be a part of one, or no more than a word between
    /// two sessions of TLS, which is taken: a channel that has something in flight by now has to be woken afterwards.
    pub fn listen(&self) -> Heard {
        match &self.records {
            None if ready(&self.fd) => Heard::Bytes,
            None => Heard::Nothing,
            Some(locker) => {
                let heard = Self::with(locker, |records| Ok::<_, i32>(records.listen(self.as_fd())));
                heard.unwrap_or(Heard::Nothing)
            }
        }
    }

    /// Bytes of records that were looked at since this was last asked; none without them.
    pub fn charge(&self) -> usize {
        let charge = |locker| Self::with(locker, |records| Ok::<_, i32>(records.charge()));
        self.records.as_ref().and_then(|locker| charge(locker).ok()).unwrap_or(0)
    }

    /// What the control half is told by when something can be received. Must be called in a runtime.
    pub fn incoming(&self) -> std::io::Result<AsyncFd<Arc<OwnedFd>>> {
        readable(self.fd.clone())
    }

    /// For the control half to ask by, while no channel has the connection. Must be called in a runtime.
    pub fn duplex(&self) -> std::io::Result<Duplex> {
        // SAFETY: an owned descriptor, which stays open and the same while what is returned holds it.
        Ok(unsafe {
            AsyncFd::register_with_interest(self.fd.clone(), Interest::READABLE | Interest::WRITABLE)
        }?)
    }

    /// What the control half is told by when the peer has ended its stream, and not before. Must be called in a runtime.
    pub fn ended(&self) -> std::io::Result<AsyncFd<Arc<OwnedFd>>> {
        let watch = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&watch, &self.fd, EventData::new_u64(0), EventFlags::RDHUP)?;
        readable(Arc::new(watch))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether something can be received from a socket.
fn ready(fd: &OwnedFd) -> bool {
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut ready = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut ready, Some(&now)).is_ok_and(|count| count > 0)
}

/// Says whether it is a TCP socket, and sets it up if so.
fn prepare(fd: &OwnedFd, dead_after: Duration) -> std::io::Result<bool> {
    let family = rustix::net::sockopt::socket_domain(fd)?;
    let tcp = family == AddressFamily::INET || family == AddressFamily::INET6;
    if tcp {
        rustix::net::sockopt::set_tcp_nodelay(fd, true)?;
        let ms = u32::try_from(dead_after.as_millis()).unwrap_or(u32::MAX);
        rustix::net::sockopt::set_tcp_user_timeout(fd, ms)?;
    }
    Ok(tcp)
}

/// Tells when `fd` is readable. Must be called in a runtime.
pub(super) fn readable(fd: Arc<OwnedFd>) -> std::io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: an owned descriptor, which stays open and the same while what is returned holds it.
    Ok(unsafe { AsyncFd::register_with_interest(fd, Interest::READABLE) }?)
}

fn header(table: &mut IoTable) -> libc::msghdr {
    // SAFETY: a structure of integers and pointers, all of which may be zero.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = table.entries.as_mut_ptr();
    message.msg_iovlen = table.entries.len();
    message
}

fn outcome(result: isize) -> Result<usize, i32> {
    match usize::try_from(result) {
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)),
    }
}

#[cfg(test)]
#[path = "socket_sums_tests.rs"]
mod sums_tests;
#[cfg(test)]
#[path = "socket_tls_tests.rs"]
mod tls_tests;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;

    fn pair() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        (Socket::new(ours.into(), None, Duration::from_secs(10)).unwrap(), theirs)
    }

    /// Sends three records of ones, and the memory of the second one goes meanwhile: one is sent.
    pub fn send_what_goes(socket: &Socket) {
        let bytes = vec![1; 40_000];
        let mut table = IoTable::with_room(1);
        table.push_own(&bytes);
        let copies = std::cell::Cell::new(0);
        let lost = || copies.replace(copies.get() + 1) == 1;
        // SAFETY: memory of ours.
        assert_eq!(unsafe { socket.send(&mut table, lost) }, Ok(16 << 10));
        // SAFETY: the same.
        assert_eq!(unsafe { socket.send(&mut table, || true) }, Err(libc::EFAULT));
    }

    /// Asks while the other half has the records.
    pub fn come_second(socket: &Socket) {
        let taken = socket.records.as_ref().unwrap().take().unwrap();
        let later = StreamError::System(libc::EAGAIN);
        assert_eq!((socket.send_own(b"x"), socket.receive_own(&mut [0])), (Err(libc::EAGAIN), Err(later)));
        assert!(socket.has_unsent() && socket.listen() == Heard::Nothing);
        assert_eq!(socket.flush(), Err(libc::EAGAIN));
        socket.records.as_ref().unwrap().put(taken);
        assert!(!socket.has_unsent());
    }

    /// Sends until the socket takes no more; says how much it took.
    fn fill(socket: &Socket) -> usize {
        let (bytes, mut sent) = (vec![7; 64 << 10], 0);
        loop {
            match socket.send_own(&bytes) {
                Ok(more) => sent += more,
                Err(errno) => {
                    assert_eq!(errno, libc::EAGAIN);
                    return sent;
                }
            }
        }
    }

    fn receive(socket: &Socket) -> Result<usize, StreamError> {
        socket.receive_own(&mut [0; 100])
    }

    #[test]
    fn what_an_aborted_connection_still_had_to_send_is_never_sent() {
        let (socket, mut peer) = pair();
        let sent = fill(&socket);
        socket.abort();
        let (mut bytes, mut came) = (vec![0; 1 << 20], 0);
        // What the peer has already, and then a reset, not an orderly end.
        let end = loop {
            match peer.read(&mut bytes) {
                Ok(0) => break Ok(()),
                Ok(more) => came += more,
                Err(error) => break Err(error.kind()),
            }
        };
        assert_eq!(end, Err(std::io::ErrorKind::ConnectionReset));
        assert!(came < sent, "all of {sent} bytes were sent in spite of it");
        let later = StreamError::System(libc::EAGAIN);
        assert!(receive(&socket).is_err_and(|error| error != later) || receive(&socket) == Ok(0));
        assert_eq!(socket.listen(), Heard::Bytes, "nobody is woken");
    }

    #[test]
    fn a_finished_one_sends_what_it_has_and_still_receives() {
        let (socket, mut peer) = pair();
        let sent = fill(&socket);
        socket.finish();
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            peer.read_to_end(&mut bytes).unwrap();
            std::io::Write::write_all(&mut peer, b"bye").unwrap();
            bytes.len()
        });
        assert_eq!(reader.join().unwrap(), sent);
        assert_eq!((receive(&socket), receive(&socket)), (Ok(3), Ok(0)));
    }

    #[test]
    fn a_table_has_no_more_than_its_room() {
        let mut table = IoTable::with_room(2);
        assert!(table.push_own(&[1; 10]) && table.push_own(&[]) && table.push_own(&[2; 5]));
        let before = table.mark();
        assert!(!table.push_own(&[3]) && table.bytes() == 15 && table.room() == 0);
        table.cut(before);
        table.keep_first();
        assert_eq!((table.bytes(), table.room()), (10, 1));
        table.clear();
        assert_eq!((table.bytes(), table.room()), (0, 2));
    }
}
