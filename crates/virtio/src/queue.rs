//! The part of a poller that every virtio queue has: ring, kick, call, meters, and the way to a stop.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{Armed, Change, CoreContext, Interrupt, Meter, Tally};

use crate::device::{QueueStart, RingState};
use crate::kill::{self, KillPoint};
use crate::ring::{Ring, RingFault};

/// What a queue is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Takes and completes.
    Serving,
    /// Completes only, parks when nothing is in flight.
    Draining,
    /// Parks at the next poll.
    Suspending,
}

/// One queue on an I/O core. The poller of a virtio device owns one and adds what the requests mean.
#[derive(Debug)]
pub struct Queue {
    /// Which queue of the device.
    pub index: u16,
    /// The ring.
    pub ring: Ring,
    /// Counts; published by [`Queue::tidy`].
    pub tally: Tally,
    /// What it is doing.
    pub phase: Phase,
    kick: Option<Arc<OwnedFd>>,
    call: Option<Arc<dyn Interrupt>>,
    error: Option<Arc<dyn Interrupt>>,
    meter: Arc<Meter>,
    fault: Option<RingFault>,
    polling: bool,
    awake: bool,
    /// Whatever is in the ring now came after this moment: the last look that found the ring empty or, if a kick was asked for then, about the
    /// earliest at which it can have come.
    dry: Instant,
    /// The next requests were announced by a kick.
    kicked: bool,
    /// A limit holds back what is in the ring.
    limited: bool,
}

impl Queue {
    /// A queue at work. Kicks are wanted until [`Queue::disarm`] says otherwise.
    pub fn new(start: QueueStart) -> Self {
        let QueueStart { index, ring, kick, call, error, meter } = start;
        let tally = meter.tally();
        let mut queue = Queue {
            index,
            ring,
            tally,
            phase: Phase::Serving,
            kick,
            call,
            error,
            meter,
            fault: None,
            polling: false,
            awake: true,
            dry: Instant::now(),
            kicked: true,
            limited: false,
        };
        if removed(Invariant::KeepsWhatArrives) {
            // Invariant 1: kicks that came while nobody sat here count like any others; this forgets them.
            queue.empty_kick();
            queue.tally.kicks = tally.kicks;
        }
        queue
    }

    /// Whether new requests may be taken now.
    #[inline]
    pub fn takes(&self) -> bool {
        self.phase == Phase::Serving && self.fault.is_none()
    }

    /// Whether its core looks at it all the time.
    #[inline]
    pub fn polls(&self) -> bool {
        self.polling
    }

    /// [`ioplane_device::Poller::drain`].
    pub fn drain(&mut self) {
        if self.phase == Phase::Serving {
            self.phase = Phase::Draining;
        }
    }

    /// [`ioplane_device::Poller::undrain`].
    pub fn undrain(&mut self) {
        self.phase = Phase::Serving;
    }

    /// [`ioplane_device::Poller::goes_on`]: it has not stopped by a fault, and left nothing in flight.
    pub fn goes_on(&self) -> bool {
        self.fault.is_none() && self.ring.in_flight() == 0 && self.ring.unpublished() == 0
    }

    /// [`ioplane_device::Poller::suspend`].
    pub fn suspend(&mut self) {
        self.phase = Phase::Suspending;
    }

    /// Where its counts and times go.
    #[inline]
    pub fn meter(&self) -> &Meter {
        &self.meter
    }

    /// The poller has looked and found nothing. Costs a load and a store.
    #[inline]
    pub fn found_dry(&mut self, context: &CoreContext) {
        // The core's last look at the clock was before this look at the ring, so this is early rather than late.
        self.dry = context.now();
    }

    /// The poller has taken `count` requests in this poll, the first at `now`: counts how long they may have waited (see
    /// [`Meter::wait`]). `left` says that there may be more in the ring, because the budget is used up.
    #[inline]
    pub fn took(&mut self, count: u32, now: Instant, left: bool) {
        let waited = now.saturating_duration_since(self.dry);
        self.meter.wait.record(waited.as_nanos() as u64, u64::from(count));
        if !std::mem::take(&mut self.kicked) && self.polling {
            self.tally.kicks_avoided += 1;
        }
        if !left {
            self.dry = now;
        }
    }

    /// Whether a limit holds back what is in the ring: while one does, time goes by for what is there, whatever the core does.
    #[inline]
    pub fn set_limited(&mut self, limited: bool) {
        self.limited = limited;
        if limited {
            self.tally.limited += 1;
        }
    }

    /// The guest did something that no driver does: the queue takes nothing more until it is reset, and says so.
    #[cold]
    pub fn stop_with(&mut self, fault: RingFault) {
        if self.fault.is_none() {
            // Nonsense read from memory that went away is not the driver's doing.
            self.fault = Some(self.ring.check_memory().err().unwrap_or(fault));
            self.tally.faults += 1;
            if let Some(error) = &self.error {
                error.signal();
            }
        }
    }

    /// The fault that stopped it.
    pub fn fault(&self) -> Option<RingFault> {
        self.fault
    }

    /// Shows the driver what was completed, and interrupts it if it asked for that. `had` is when the last of the results was there, and
    /// `None` that it is now. Returns that time if the driver was interrupted: the last look at the clock is then behind the interrupt
    /// ([`Meter::interrupt`]). Otherwise the clock is not looked at.
    #[inline]
    pub fn publish(&mut self, context: &mut CoreContext, had: Option<Instant>) -> Option<Instant> {
        let count = self.ring.unpublished();
        if count == 0 {
            return None;
        }
        self.tally.requests += u64::from(count);
        self.ring.publish();
        if !self.polling && self.awake && self.takes() {
            // A notified queue asks for a kick with every batch, as event-driven backends do.
            self.ring.ask_for_kick();
        }
        self.interrupt(context, had)
    }

    /// As [`Queue::publish`], for a queue whose driver makes room available and not work: `frames` are in what is
    /// published, and no kick is asked for.
    #[inline]
    pub fn publish_frames(&mut self, context: &mut CoreContext, frames: u64) -> Option<Instant> {
        self.tally.requests += frames;
        if self.ring.unpublished() == 0 {
            return None;
        }
        self.ring.publish();
        self.interrupt(context, None)
    }

    /// Interrupts the driver if it asked for that. An interrupt is a system call as a rule: the one or two looks at the clock are little beside it.
    #[inline]
    fn interrupt(&mut self, context: &mut CoreContext, had: Option<Instant>) -> Option<Instant> {
        let wanted = self.ring.wants_interrupt();
        let had = if !wanted {
            self.tally.interrupts_avoided += 1;
            None
        } else if self.call.is_some() {
            let had = had.unwrap_or_else(|| context.look());
            self.signal();
            let took = context.look().saturating_duration_since(had);
            self.meter.interrupt.record(took.as_nanos() as u64, 1);
            Some(had)
        } else {
            None
        };
        kill::here(KillPoint::Signalled);
        had
    }

    /// Interrupts the driver, whatever it asked for.
    #[inline]
    pub fn signal(&mut self) {
        if let Some(call) = &self.call {
            self.tally.interrupts += 1;
            call.signal();
        }
    }

    /// [`ioplane_device::Poller::resume`] of every queue: one interrupt (invariant 3). Looking again (invariant 2) is the poll that
    /// follows. A ring is a new one after all that a driver may have reset it by, so its flags are said anew.
    pub fn resume(&mut self) {
        self.awake = true;
        self.signal();
    }

    /// [`ioplane_device::Poller::arm`].
    #[inline]
    pub fn arm(&mut self) -> Armed {
        let armed = self.arm_unkicked();
        let waits = self.takes() && (self.ring.ask_for_kick() || self.unannounced());
        if waits { Armed::WorkLeft } else { armed }
    }

    /// The driver has no kick (VHOST_USER_VRING_NOFD_MASK): nobody says when it makes something available, so the core must not
    /// sleep for long.
    #[inline]
    pub fn unannounced(&self) -> bool {
        self.kick.is_none()
    }

    /// As [`Queue::arm`], for a queue that is to sleep on whatever the driver makes available.
    #[inline]
    pub fn arm_unkicked(&mut self) -> Armed {
        self.awake = false;
        // One that stops: completions wake the core by their own descriptor; nothing else is waited for.
        let parks = self.phase == Phase::Suspending || self.ring.in_flight() == 0;
        if self.fault.is_none() && self.phase != Phase::Serving && parks {
            return Armed::WorkLeft;
        }
        Armed::Armed
    }

    /// [`ioplane_device::Poller::disarm`].
    #[inline]
    pub fn disarm(&mut self, context: &CoreContext, polling: bool) {
        // What is found now was kicked for, perhaps long after the last look.
        if !self.awake && !self.limited {
            self.dry = self.dry.max(context.kicked());
        }
        self.awake = true;
        self.polling = polling;
        self.ring.set_polled(polling);
        self.empty_kick();
    }

    /// Counts the kicks that have come and lowers the eventfd.
    fn empty_kick(&mut self) {
        if let Some(kick) = &self.kick {
            let mut count = [0u8; 8];
            // Without waiting, whatever the front end made of the descriptor's flags; -1 means no offset.
            let buffer = &mut [std::io::IoSliceMut::new(&mut count)];
            let flags = rustix::io::ReadWriteFlags::NOWAIT;
            if let Ok(8) = rustix::io::preadv2(kick, buffer, u64::MAX, flags) {
                self.tally.kicks += u64::from_ne_bytes(count);
                self.kicked = true;
            }
        }
    }

    /// [`ioplane_device::Poller::tidy`]. While the core sleeps on the kick, the kick stays up for it to see.
    pub fn tidy(&mut self) {
        if self.awake && self.polling {
            self.empty_kick();
        }
        // A batch finds out by itself; this is for a ring whose memory went away while it was idle.
        if self.fault.is_none()
            && let Err(fault) = self.ring.check_memory()
        {
            self.stop_with(fault);
        }
        self.meter.publish(&self.tally);
    }

    /// The changes that mean the same for every queue; gives back what is the device's own.
    pub fn apply(&mut self, change: Change) -> Option<Change> {
        match change {
            // What was signalled until now may have gone where nobody listens any more: a front end that is about to take
            // over the driver's vector (QEMU, at every start) does not look there again. One interrupt too many harms nobody.
            Change::Call(call) => {
                self.call = call;
                self.signal();
            }
            Change::Kick(kick) => self.kick = kick,
            Change::Log(log) => self.ring.view_mut().set_log(log),
            Change::Memory(map) => self.ring.view_mut().set_map(map),
            Change::Share(_) | Change::Limits(_) | Change::BlockDevice(_) => {}
            own @ Change::Own(_) => return Some(own),
        }
        None
    }

    /// The driver's kick, to wait on.
    pub fn kick(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().map(|kick| kick.as_fd())
    }

    /// What is left when the poller is taken apart.
    pub fn into_state(mut self) -> RingState {
        self.meter.publish(&self.tally);
        self.ring.publish();
        self.ring.let_go();
        RingState { base: Some(self.ring.base()), in_flight: self.ring.flights(), fault: self.fault }
    }
}
