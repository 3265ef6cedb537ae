//! Eventfds as interrupts and kicks.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ioplane_device::Interrupt;
use rustix::event::{EventfdFlags, eventfd};

/// An interrupt that writes an eventfd: KVM's irqfd, or a VMM's own.
#[derive(Debug)]
pub struct Call(OwnedFd);

impl Call {
    /// Takes an eventfd over.
    pub fn new(file: OwnedFd) -> Self {
        Call(file)
    }
}

impl Interrupt for Call {
    fn signal(&self) {
        // A full counter means that the other side has not looked for ages; one interrupt is as good as two then.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn file(&self) -> Option<BorrowedFd<'_>> {
        Some(self.0.as_fd())
    }
}

/// A new eventfd that never blocks.
pub fn fresh() -> rustix::io::Result<Arc<OwnedFd>> {
    Ok(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
}

/// Makes sure that `file`, which a peer sent, is an eventfd and does not block: an I/O core will read or write it.
pub fn check(file: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    link.is_ok_and(|path| path.as_os_str() == "anon_inode:[eventfd]")
        && rustix::fs::fcntl_getfl(file.as_fd())
            .and_then(|flags| rustix::fs::fcntl_setfl(file.as_fd(), flags | rustix::fs::OFlags::NONBLOCK))
            .is_ok()
}
