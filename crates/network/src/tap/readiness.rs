//! What a core that sleeps waits on for a TAP device: a descriptor that can be silenced.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll;

/// An epoll set with the device in it, readable when the device is. A device that has been deleted is readable for ever,
/// with nothing but an error to read; the set is not, once it is closed.
#[derive(Debug)]
pub(super) struct TapReadiness(OwnedFd);

impl TapReadiness {
    /// Open for `file`.
    pub fn open(file: &OwnedFd) -> std::io::Result<TapReadiness> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&set, file, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(TapReadiness(set))
    }

    /// Never readable again. May be said more than once.
    pub fn close(&self, file: &OwnedFd) {
        let _ = epoll::delete(&self.0, file);
    }
}

impl AsFd for TapReadiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
