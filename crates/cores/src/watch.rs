//! What a sleeping core waits on: one epoll set, with descriptors of our own making.

#![allow(unsafe_code)]
// UNSAFETY: one system call, epoll_pwait2, which rustix makes only in a build that demands Linux 5.11.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ioplane_device::Wakers;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

/// Events taken from the kernel at once. What does not fit comes with the next wait: everything is level-triggered.
const BATCH: usize = 64;

/// What the kernel keeps for the mailbox. A slot's is twice its token, and one more for its completions.
const MAILBOX: u64 = u64::MAX;

/// A descriptor that was readable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Readable {
    /// The mailbox's.
    Mailbox,
    /// The kick of the slot with that token.
    Kick(usize),
    /// What tells the slot with that token that something below has ended.
    Completion(usize),
}

impl Readable {
    fn to_data(self) -> u64 {
        match self {
            Readable::Mailbox => MAILBOX,
            Readable::Kick(token) => (token as u64) << 1,
            Readable::Completion(token) => ((token as u64) << 1) | 1,
        }
    }

    fn of_data(data: u64) -> Self {
        match (data, data & 1) {
            (MAILBOX, _) => Readable::Mailbox,
            (_, 0) => Readable::Kick((data >> 1) as usize),
            _ => Readable::Completion((data >> 1) as usize),
        }
    }
}

/// The epoll set of one core.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
    fired: Vec<Readable>,
    /// The kernel has epoll_pwait2 and lets us call it, for all that is known.
    pwait2: bool,
}

/// The descriptors of one seat in the set. They are duplicates: a set holds on to what is *behind* a descriptor, so the
/// seat's own, once closed while the guest's side still has it open, could never be taken out again.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    kick: Option<OwnedFd>,
    completion: Option<OwnedFd>,
    /// One of them could not be watched (out of descriptors, or not a thing to wait on): nothing will wake for it.
    pub(crate) blind: bool,
}

impl Watched {
    /// Whether the core is woken when something below the slot has ended.
    pub(crate) fn tells_completions(&self) -> bool {
        self.completion.is_some()
    }
}

impl Watch {
    pub(crate) fn new(bell: BorrowedFd<'_>) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(Readable::Mailbox.to_data());
        epoll::add(&epoll, bell, data, epoll::EventFlags::IN)?;
        Ok(Watch { epoll, fired: Vec::with_capacity(BATCH), pwait2: true })
    }

    /// Watches `wakers` under `token`.
    pub(crate) fn add(&self, wakers: Wakers<'_>, token: usize) -> Watched {
        let mut blind = false;
        let mut hold = |fd: Option<BorrowedFd<'_>>, readable| {
            let ours = self.hold(fd?, readable);
            blind |= ours.is_none();
            ours
        };
        let kick = hold(wakers.kick, Readable::Kick(token));
        let completion = hold(wakers.completion, Readable::Completion(token));
        Watched { kick, completion, blind }
    }

    fn hold(&self, fd: BorrowedFd<'_>, readable: Readable) -> Option<OwnedFd> {
        let ours = rustix::io::fcntl_dupfd_cloexec(fd, 0).ok()?;
        let data = epoll::EventData::new_u64(readable.to_data());
        epoll::add(&self.epoll, &ours, data, epoll::EventFlags::IN).ok()?;
        Some(ours)
    }

    /// Watches them no longer.
    pub(crate) fn remove(&self, watched: Watched) {
        for fd in [watched.kick, watched.completion].into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, &fd);
        }
    }

    /// Waits for one of them, at most `timeout` (`None`: for ever). [`Watch::fired`] has whoever it was: nobody if the time
    /// is up, or a signal interrupted, or a completion for which the kernel only had this thread enter it.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) {
        self.fired.clear();
        let Some(time) = timeout.filter(|time| !time.is_zero()) else {
            return self.collect(timeout);
        };
        if self.pwait2 {
            match self.wait_by_pwait2(time) {
                // Linux before 5.11, or a filter of system calls that does not know it.
                Err(Errno::NOSYS | Errno::PERM) => self.pwait2 = false,
                _ => return,
            }
        }
        self.wait_by_poll(time);
    }

    /// epoll_wait, which counts in milliseconds and rounds up.
    fn collect(&mut self, timeout: Option<Duration>) {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; BATCH];
        if let Ok((events, _)) = epoll::wait(&self.epoll, &mut events, timeout.map(timespec).as_ref()) {
            self.fired.extend(events.iter().map(|event| Readable::of_data(event.data.u64())));
        }
    }

    /// Counts in nanoseconds.
    fn wait_by_pwait2(&mut self, time: Duration) -> Result<(), Errno> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; BATCH];
        // The kernel's struct __kernel_timespec.
        let time = [time.as_secs() as i64, i64::from(time.subsec_nanos())];
        // SAFETY: there is room for as many events as are asked for, the time is ours, and no signal mask is given.
        let count = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.epoll.as_raw_fd(),
                events.as_mut_ptr(),
                BATCH,
                time.as_ptr(),
                std::ptr::null::<libc::sigset_t>(),
                0usize,
            )
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
        };
        self.fired.extend(events.iter().take(count).map(|event| Readable::of_data(event.u64)));
        Ok(())
    }

    /// As [`Watch::wait_by_pwait2`], on every kernel, for one system call more.
    fn wait_by_poll(&mut self, time: Duration) {
        let ready = poll(&mut [PollFd::new(&self.epoll, PollFlags::IN)], Some(&timespec(time)));
        if ready.is_ok_and(|ready| ready > 0) {
            self.collect(Some(Duration::ZERO));
        }
    }

    /// Whoever was readable when [`Watch::wait`] returned.
    pub(crate) fn fired(&self) -> &[Readable] {
        &self.fired
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::time::Instant;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    fn event() -> OwnedFd {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
    }

    fn raise(event: &OwnedFd) {
        rustix::io::write(event, &1u64.to_ne_bytes()).unwrap();
    }

    fn lower(event: &OwnedFd) {
        rustix::io::read(event, &mut [0; 8]).unwrap();
    }

    /// One that waits as on a recent kernel, and one that waits as on an old one.
    fn each(bell: &OwnedFd) -> [Watch; 2] {
        [true, false].map(|pwait2| Watch { pwait2, ..Watch::new(bell.as_fd()).unwrap() })
    }

    #[test]
    fn a_wait_tells_kicks_from_completions_and_of_which_slot() {
        let (bell, kick, completion) = (event(), event(), event());
        for mut watch in each(&bell) {
            let wakers = Wakers { kick: Some(kick.as_fd()), completion: Some(completion.as_fd()) };
            let watched = watch.add(wakers, 7);
            let kicked = watch.add(Wakers { kick: Some(kick.as_fd()), completion: None }, 8);
            assert!(watched.tells_completions() && !kicked.tells_completions() && !kicked.blind);
            for timeout in [Duration::ZERO, Duration::from_micros(10), Duration::from_secs(20)] {
                let mut told = |raised: &OwnedFd, wanted: &[Readable]| {
                    raise(raised);
                    watch.wait(Some(timeout));
                    let mut fired = watch.fired().to_vec();
                    fired.sort_by_key(|readable| readable.to_data());
                    assert_eq!(fired, wanted, "{watch:?}, {timeout:?}");
                    lower(raised);
                };
                told(&bell, &[Readable::Mailbox]);
                told(&kick, &[Readable::Kick(7), Readable::Kick(8)]);
                told(&completion, &[Readable::Completion(7)]);
            }
            watch.remove(watched);
            watch.remove(kicked);
            raise(&completion);
            watch.wait(Some(Duration::from_micros(10)));
            assert!(watch.fired().is_empty(), "{watch:?}");
            lower(&completion);
        }
    }

    #[test]
    fn a_wait_of_microseconds_takes_no_millisecond() {
        const TIME: Duration = Duration::from_micros(50);
        for mut watch in each(&event()) {
            // A busy machine may be slow now and then.
            let quick = (0..1000).any(|_| {
                let began = Instant::now();
                watch.wait(Some(TIME));
                let took = began.elapsed();
                assert!(took >= TIME, "{watch:?}: {took:?}");
                took < Duration::from_micros(900)
            });
            assert!(quick, "{watch:?}");
        }
    }
}
