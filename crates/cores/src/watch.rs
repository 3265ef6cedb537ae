//! What a sleeping core waits on: its ring, and one epoll set, of duplicated descriptors.
//!
//! A core with a deferred ring sleeps in the ring, which polls the kicks and the set; the set has all other descriptors. Any other core
//! sleeps in the set, which has the kicks and a plain ring as well. The set is level-triggered, and the ring reports an event once. So
//! a set that had news is asked again before the next sleep, until it has none. One event per kick is enough: a slot that rests
//! has been looked at after it asked for it.

#![allow(unsafe_code)]
// UNSAFETY: one system call, epoll_pwait2, which rustix makes only in a build that demands Linux 5.11.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use ioplane_device::{CoreIo, Wakers};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::io::Errno;

use crate::readable::Readable;
use crate::ring::CoreRing;

/// Events taken from the kernel at once. What does not fit comes with the next wait: everything is level-triggered.
const BATCH: usize = 64;

/// The epoll set of one core.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: OwnedFd,
    fired: Vec<Readable>,
    /// The kernel has epoll_pwait2 and lets us call it, for all that is known.
    pwait2: bool,
    /// The set may have news of which the ring tells no more.
    unread: bool,
    /// Kicks that the ring was to poll and cannot: in the set, by token.
    strays: Vec<(usize, OwnedFd)>,
}

/// The descriptors of one slot in the set. They are duplicates: a set refers to the open file *behind* a descriptor, so the
/// slot's own, once closed while the guest's side still has it open, could never be taken out again.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    kick: Option<OwnedFd>,
    /// The token under which the ring polls the kick instead.
    polled: Option<usize>,
    completion: Option<OwnedFd>,
    /// One of them could not be watched (out of descriptors, or not a thing to wait on): nothing will wake for it.
    pub(crate) incomplete: bool,
}

impl Watched {
    /// Whether the core is woken when something below the slot has ended.
    pub(crate) fn has_completion(&self) -> bool {
        self.completion.is_some()
    }
}

impl Watch {
    pub(crate) fn new(event: BorrowedFd<'_>, ring: Option<&CoreRing>) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let fired = Vec::with_capacity(BATCH);
        let watch = Watch { epoll, fired, pwait2: true, unread: true, strays: Vec::new() };
        watch.insert(event, Readable::Mailbox)?;
        if let Some(ring) = ring.filter(|ring| !ring.sleeps()) {
            watch.insert(ring.descriptor(), Readable::Ring)?;
        }
        Ok(watch)
    }

    fn insert(&self, fd: BorrowedFd<'_>, readable: Readable) -> Result<(), Errno> {
        let data = epoll::EventData::new_u64(readable.to_data());
        epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN)
    }

    /// Makes room for what is told of so many slots at once, so that no turn allocates.
    pub(crate) fn reserve(&mut self, slots: usize) {
        // Each has a kick and a completion.
        let room = BATCH + 2 * slots;
        self.fired.reserve(room.saturating_sub(self.fired.len()));
    }

    /// Watches `wakers` under `token`.
    pub(crate) fn add(&self, ring: Option<&mut CoreRing>, wakers: Wakers<'_>, token: usize) -> Watched {
        let mut watched = self.add_to_set(wakers, token);
        if let Some(ring) = ring.filter(|ring| ring.sleeps()) {
            if let Some(kick) = watched.kick.take() {
                // The set has taken it, so it can be polled.
                let _ = epoll::delete(&self.epoll, &kick);
                ring.poll_kick(kick, token);
                watched.polled = Some(token);
            }
            // A core that never sleeps hears of it too.
            ring.poll_set(self.epoll.as_fd());
        }
        watched
    }

    fn add_to_set(&self, wakers: Wakers<'_>, token: usize) -> Watched {
        let mut incomplete = false;
        let mut hold = |fd: Option<BorrowedFd<'_>>, readable| {
            let ours = self.hold(fd?, readable);
            incomplete |= ours.is_none();
            ours
        };
        let kick = hold(wakers.kick, Readable::Kick(token));
        let completion = hold(wakers.completion, Readable::Completion(token));
        Watched { kick, polled: None, completion, incomplete }
    }

    fn hold(&self, fd: BorrowedFd<'_>, readable: Readable) -> Option<OwnedFd> {
        let ours = rustix::io::fcntl_dupfd_cloexec(fd, 0).ok()?;
        self.insert(ours.as_fd(), readable).ok()?;
        Some(ours)
    }

    /// Watches them no longer.
    pub(crate) fn remove(&mut self, ring: Option<&mut CoreRing>, watched: Watched) {
        let mut kick = watched.kick;
        if let Some((token, ring)) = watched.polled.zip(ring) {
            ring.forget_kick(token);
            let stray = self.strays.iter().position(|(other, _)| *other == token);
            kick = kick.or(stray.map(|at| self.strays.swap_remove(at).1));
        }
        for fd in [kick, watched.completion].into_iter().flatten() {
            let _ = epoll::delete(&self.epoll, &fd);
        }
    }

    /// Waits for one of them, or for so many completions on the ring, at most `timeout` (`None`: for ever). [`Watch::fired`] has the
    /// readable ones: none if the time is up, or a signal interrupted, or the kernel only had this thread enter it for a completion.
    pub(crate) fn wait(
        &mut self,
        ring: Option<&mut CoreRing>,
        completions: usize,
        timeout: Option<Duration>,
    ) {
        self.fired.clear();
        match ring {
            Some(ring) if ring.sleeps() => {
                if self.unread {
                    self.collect(Some(Duration::ZERO));
                    self.unread = !self.fired.is_empty();
                }
                if self.fired.is_empty() {
                    ring.poll_set(self.epoll.as_fd());
                    ring.sleep(completions, timeout);
                }
                self.take_from_ring(ring, true);
            }
            Some(ring) => {
                // What was submitted since the last turn goes down before anybody sleeps on it.
                ring.enter();
                self.wait_in_set(if ring.has_fired() { Some(Duration::ZERO) } else { timeout });
                self.fired.retain(|readable| *readable != Readable::Ring);
                ring.enter();
                self.take_from_ring(ring, true);
            }
            None => self.wait_in_set(timeout),
        }
    }

    /// As [`Watch::wait`] for no time at all, for a core that sleeps in the ring and has just entered it: a system call only if the set
    /// has news and `set_due`. Otherwise its news stays in the ring. Says whether the set was asked.
    pub(crate) fn check_ring(&mut self, ring: &mut CoreRing, set_due: bool) -> bool {
        self.fired.clear();
        self.take_from_ring(ring, set_due)
    }

    /// Says whether the set was asked.
    fn take_from_ring(&mut self, ring: &mut CoreRing, set_due: bool) -> bool {
        let asks = ring.take_fired(&mut self.fired, set_due);
        if asks {
            self.unread = true;
            // It may have ended by itself.
            ring.poll_set(self.epoll.as_fd());
            self.collect(Some(Duration::ZERO));
        }
        while let Some((token, kick)) = ring.lost_kick() {
            self.fired.push(Readable::Kick(token));
            if self.insert(kick.as_fd(), Readable::Kick(token)).is_ok() {
                self.strays.push((token, kick));
            }
        }
        asks
    }

    fn wait_in_set(&mut self, timeout: Option<Duration>) {
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

    /// What was readable when [`Watch::wait`] returned.
    pub(crate) fn fired(&self) -> &[Readable] {
        &self.fired
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: i64::from(time.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ioplane_device::CoreIo;
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::ring::RingChoice;

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
    fn each(event: &OwnedFd) -> [Watch; 2] {
        [true, false].map(|pwait2| Watch { pwait2, ..Watch::new(event.as_fd(), None).unwrap() })
    }

    /// A core that is always busy never waits: it enters its ring after each turn.
    #[test]
    fn a_completion_is_heard_of_by_a_core_that_never_waits() {
        let (event, completion) = (event(), event());
        let mut ring = CoreRing::new(RingChoice::Best).unwrap().expect("this process may have a ring");
        ring.enable().unwrap();
        if !ring.sleeps() {
            return eprintln!("SKIPPED (cannot be had here): a ring with DEFER_TASKRUN");
        }
        let mut watch = Watch::new(event.as_fd(), Some(&ring)).unwrap();
        let wakers = Wakers { kick: None, completion: Some(completion.as_fd()) };
        let _watched = watch.add(Some(&mut ring), wakers, 7);
        ring.enter();
        assert!(!ring.has_fired());
        for _ in 0..3 {
            raise(&completion);
            let begun = Instant::now();
            while !ring.has_fired() {
                assert!(begun.elapsed() < Duration::from_secs(20), "nothing is heard");
                ring.enter();
            }
            assert!(watch.check_ring(&mut ring, true), "the set has news");
            assert_eq!(watch.fired(), [Readable::Completion(7)]);
            lower(&completion);
            assert!(!watch.check_ring(&mut ring, true), "asked, although the set has no news");
        }
    }

    #[test]
    fn a_wait_tells_kicks_from_completions_and_of_which_slot() {
        let (event, kick, completion) = (event(), event(), event());
        for mut watch in each(&event) {
            let wakers = Wakers { kick: Some(kick.as_fd()), completion: Some(completion.as_fd()) };
            let watched = watch.add(None, wakers, 7);
            let kicked = watch.add(None, Wakers { kick: Some(kick.as_fd()), completion: None }, 8);
            assert!(watched.has_completion() && !kicked.has_completion() && !kicked.incomplete);
            for timeout in [Duration::ZERO, Duration::from_micros(10), Duration::from_secs(20)] {
                let mut check = |raised: &OwnedFd, wanted: &[Readable]| {
                    raise(raised);
                    watch.wait(None, 1, Some(timeout));
                    let mut fired = watch.fired().to_vec();
                    fired.sort_by_key(|readable| readable.to_data());
                    assert_eq!(fired, wanted, "{watch:?}, {timeout:?}");
                    lower(raised);
                };
                check(&event, &[Readable::Mailbox]);
                check(&kick, &[Readable::Kick(7), Readable::Kick(8)]);
                check(&completion, &[Readable::Completion(7)]);
            }
            watch.remove(None, watched);
            watch.remove(None, kicked);
            raise(&completion);
            watch.wait(None, 1, Some(Duration::from_micros(10)));
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
                watch.wait(None, 1, Some(TIME));
                let took = began.elapsed();
                assert!(took >= TIME, "{watch:?}: {took:?}");
                took < Duration::from_micros(900)
            });
            assert!(quick, "{watch:?}");
        }
    }
}
