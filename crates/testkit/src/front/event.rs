//! Eventfds that count: kicks that the front end writes, calls that the back end writes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;

/// A non-blocking eventfd and the sum of what went through our end of it. Written or read by one thread.
#[derive(Debug)]
pub struct EventFd {
    fd: OwnedFd,
    sum: u64,
}

impl EventFd {
    /// A fresh one, at zero.
    pub fn new() -> Result<Self, Errno> {
        Ok(EventFd { fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?, sum: 0 })
    }

    /// Adds one to the counter: one system call, one kick.
    #[inline]
    pub fn signal(&mut self) {
        // Full (2^64 - 1 unread) cannot happen; a dead reader is no error to an eventfd.
        if rustix::io::write(&self.fd, &1u64.to_ne_bytes()).is_ok() {
            self.sum += 1;
        }
    }

    /// Takes what the other side wrote, without waiting; returns the count taken.
    #[inline]
    pub fn take(&mut self) -> u64 {
        let mut count = [0u8; 8];
        match rustix::io::read(&self.fd, &mut count) {
            Ok(8) => {
                let count = u64::from_ne_bytes(count);
                self.sum += count;
                count
            }
            _ => 0,
        }
    }

    /// Sleeps until the other side writes or `time` is over; returns the count taken.
    pub fn wait(&mut self, time: Duration) -> u64 {
        let timeout = time.try_into().ok();
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(1..) => self.take(),
            _ => 0,
        }
    }

    /// The sum of all that went through our end: of the kicks written, or of the counter values read.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// What the counter holds now, unread, as the kernel tells it; does not take it.
    pub fn unread(&self) -> Option<u64> {
        use std::os::fd::AsRawFd;
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd())).ok()?;
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:"))?;
        u64::from_str_radix(count.trim(), 16).ok()
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
