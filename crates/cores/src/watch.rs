//! What a sleeping core waits on: one epoll set, with descriptors of our own making.

use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use ioplane_device::Wakers;
use rustix::event::{Timespec, epoll};

/// Events taken from the kernel at once. What does not fit comes with the next wait: everything is level-triggered.
const BATCH: usize = 64;

/// Token of the mailbox.
pub(crate) const BELL: usize = usize::MAX;

/// The epoll set of one core.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
    fired: Vec<usize>,
}

/// The descriptors of one seat in the set. They are duplicates: a set holds on to what is *behind* a descriptor, so the
/// seat's own, once closed while the guest's side still has it open, could never be taken out again.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    held: [Option<OwnedFd>; 2],
    /// One of them could not be watched (out of descriptors, or not a thing to wait on): nothing will wake for it.
    pub(crate) blind: bool,
}

impl Watch {
    pub(crate) fn new(bell: BorrowedFd<'_>) -> Result<Self, rustix::io::Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, bell, epoll::EventData::new_u64(BELL as u64), epoll::EventFlags::IN)?;
        Ok(Watch { epoll, fired: Vec::with_capacity(BATCH) })
    }

    /// Watches `wakers` under `token`.
    pub(crate) fn add(&self, wakers: Wakers<'_>, token: usize) -> Watched {
        let mut watched = Watched::default();
        for (held, fd) in watched.held.iter_mut().zip([wakers.kick, wakers.completion]) {
            let Some(fd) = fd else { continue };
            let data = epoll::EventData::new_u64(token as u64);
            match rustix::io::fcntl_dupfd_cloexec(fd, 0) {
                Ok(ours) if epoll::add(&self.epoll, &ours, data, epoll::EventFlags::IN).is_ok() => {
                    *held = Some(ours)
                }
                _ => watched.blind = true,
            }
        }
        watched
    }

    /// Watches them no longer.
    pub(crate) fn remove(&self, watched: Watched) {
        for fd in watched.held.into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, &fd);
        }
    }

    /// Waits for one of them, at most `timeout` (`None`: for ever). [`Watch::fired`] has whoever it was: nobody if the time
    /// is up, or a signal interrupted.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) {
        let timeout =
            timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; BATCH];
        self.fired.clear();
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            self.fired.extend(events.iter().map(|e| e.data.u64() as usize));
        }
    }

    /// The tokens of whoever was readable when [`Watch::wait`] returned.
    pub(crate) fn fired(&self) -> &[usize] {
        &self.fired
    }
}
