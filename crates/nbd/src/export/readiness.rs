//! What a core that sleeps waits on for a connection: its socket, for what the poller would do with it, its backing, and the control side.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, EventData, EventFlags};

/// What the poller would do with the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interest {
    /// Nothing: also an error of the socket, which epoll tells unasked, would only keep the core awake.
    Nothing,
    /// Receive.
    Receive,
    /// Send.
    Send,
}

/// An epoll set with the socket and other descriptors in it, readable when one of them is as wanted.
#[derive(Debug)]
pub(super) struct Readiness {
    set: OwnedFd,
    interest: Interest,
}

impl Readiness {
    /// For nothing of a socket yet, and for `others` whenever they are readable.
    pub fn new<'a>(others: impl IntoIterator<Item = Option<BorrowedFd<'a>>>) -> std::io::Result<Readiness> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for other in others.into_iter().flatten() {
            epoll::add(&set, other, EventData::new_u64(1), EventFlags::IN)?;
        }
        Ok(Readiness { set, interest: Interest::Nothing })
    }

    /// What is wanted of `socket` from now on; a system call if that is something else than before.
    pub fn want(&mut self, socket: impl AsFd, interest: Interest) {
        if self.interest == interest {
            return;
        }
        let flags = match interest {
            Interest::Nothing => None,
            Interest::Receive => Some(EventFlags::IN | EventFlags::RDHUP),
            Interest::Send => Some(EventFlags::OUT),
        };
        let data = EventData::new_u64(0);
        let done = match (self.interest, flags) {
            (_, None) => epoll::delete(&self.set, socket),
            (Interest::Nothing, Some(flags)) => epoll::add(&self.set, socket, data, flags),
            (_, Some(flags)) => epoll::modify(&self.set, socket, data, flags),
        };
        // Without memory for an entry it is asked for again.
        if done.is_ok() {
            self.interest = interest;
        }
    }
}

impl AsFd for Readiness {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.set.as_fd()
    }
}
