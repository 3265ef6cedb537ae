//! The life that every queue of a NIC has on an I/O core; what is particular to its kind is a [`Work`].
//!
//! Between two polls nothing is in flight, with one exception: whatever is taken is completed, or put back, in the same poll. So a queue is
//! drained the moment it stops taking. The exceptions are a flood to more receivers than one poll has time for, and frames that are lent to their
//! receivers: those are taken back before the queue parks, and never wait for more than one copy.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use ioplane_device::{Armed, Budget, Change, CoreContext, PollCost, PollOutcome, Poller, Wakers};

use crate::cost;
use crate::device::QueueStart;
use crate::queue::{Phase, Queue};
use crate::ring::RingFault;

/// Frames between two publications.
const BATCH: u32 = 32;
/// What a buffer costs beside its bytes.
pub(super) const COST_OF_BUFFER: usize = cost::COST_OF_BUFFER as usize;

/// What a kind of queue does.
pub(super) trait Work: Send + 'static {
    /// Whether what the driver makes available is work, that waits for us; room is not.
    const IS_WORK: bool = true;
    /// Whether there is anything to do: cheap.
    fn ready(&mut self, queue: &mut Queue) -> bool;
    /// Takes at most `budget` on and is done with them, as long as what the poll may cost is not used up; says how many.
    /// Stops before what a limit holds back: [`CoreContext::limited`] then says until when. `LIMITED`: whether the queue has limits.
    fn batch<const LIMITED: bool>(
        &mut self,
        context: &mut CoreContext,
        queue: &mut Queue,
        budget: u32,
        cost: &mut PollCost,
    ) -> Result<u32, RingFault>;
    /// Whether something that was taken is not done with.
    fn has_begun(&self) -> bool {
        false
    }
    /// Ends what a receiver of ours has still to do, since the queue parks now. False if it is in the middle of it: then the next poll asks
    /// again.
    fn withdraw(&mut self, _queue: &mut Queue) -> bool {
        true
    }
    /// Shows the driver what is done: [`Queue::publish`].
    fn publish(&mut self, context: &mut CoreContext, queue: &mut Queue) -> Option<Instant> {
        queue.publish(context, None)
    }
    /// The last batch of this poll is done.
    fn finish(&mut self) {}
    /// [`Poller::arm`].
    fn arm(&mut self, queue: &mut Queue) -> Armed {
        queue.arm()
    }
    /// [`Poller::disarm`].
    fn disarm(&mut self, context: &CoreContext, queue: &mut Queue, polling: bool) {
        queue.disarm(context, polling);
    }
    /// [`Poller::tidy`].
    fn tidy(&mut self) {}
    /// What wakes it beside the kick.
    fn waker(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The poller of one queue.
pub(super) struct NetPoller<W> {
    queue: Queue,
    work: W,
}

impl<W: Work> NetPoller<W> {
    pub(super) fn new(start: QueueStart, work: W) -> Self {
        NetPoller { queue: Queue::new(start), work }
    }

    /// Takes it apart.
    pub(super) fn into_parts(self) -> (Queue, W) {
        (self.queue, self.work)
    }

    /// The poll of a queue with limits. Not inlined, so that the poll of one without them stays short.
    #[inline(never)]
    fn poll_limited(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        self.poll_as::<true>(context, budget)
    }

    /// `LIMITED`: whether the queue has limits. If it has none, the compiled poll does not ask about them.
    #[inline(always)]
    fn poll_as<const LIMITED: bool>(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        let NetPoller { queue, work } = self;
        if queue.phase == Phase::Suspending {
            return if work.withdraw(queue) { PollOutcome::PARKED } else { PollOutcome::IDLE };
        }
        let (mut done, mut spent, mut more, mut limited) = (0, 0, false, None);
        let serves = queue.takes() || (work.has_begun() && queue.fault().is_none());
        if !serves || !work.ready(queue) {
            queue.set_limited(false);
            queue.found_dry(context);
        } else {
            let (began, mut cost) = (context.work_begins(), PollCost::of(cost::of_a_poll(budget)));
            let mut interrupted = None;
            while done < budget.requests
                && !cost.is_used_up()
                && !(LIMITED && context.limited().is_some())
                && work.ready(queue)
            {
                // Published in batches: the driver can go on with the first while we do the next.
                let outcome =
                    work.batch::<LIMITED>(context, queue, BATCH.min(budget.requests - done), &mut cost);
                interrupted = work.publish(context, queue);
                match outcome {
                    Ok(0) => break,
                    Ok(taken) => done += taken,
                    Err(fault) => {
                        queue.stop_with(fault);
                        done += 1;
                        break;
                    }
                }
            }
            spent = cost.spent();
            more = done >= budget.requests || cost.is_used_up();
            if LIMITED {
                limited = context.limited();
            }
            queue.set_limited(limited.is_some());
            if done > 0 {
                work.finish();
                if W::IS_WORK {
                    let left = work.ready(queue);
                    queue.took(done, began, left);
                }
                // An interrupt that ends the poll is none of the frames' time, and the look behind it ends the work as well.
                let ended = match interrupted {
                    Some(had) => {
                        context.work_ended();
                        had
                    }
                    None => context.work_ends(),
                };
                let took = ended.saturating_duration_since(began);
                queue.meter().latency.record(took.as_nanos() as u64, done.into());
                if let Err(fault) = queue.ring.check_memory() {
                    queue.stop_with(fault);
                }
            }
        }
        match (done, queue.phase) {
            // What is left is with a receiver that copies it at this moment.
            (0, Phase::Draining) if work.has_begun() && queue.fault().is_none() => PollOutcome::IDLE,
            (0, Phase::Draining) if work.withdraw(queue) => PollOutcome::PARKED,
            (0, Phase::Draining) => PollOutcome::IDLE,
            (0, _) => limited.map_or(PollOutcome::IDLE, |at| PollOutcome::limited(at, context)),
            _ => PollOutcome::busy(done, spent).with_more(more),
        }
    }
}

impl<W: Work> Poller for NetPoller<W> {
    #[inline]
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        if context.has_limits() {
            self.poll_limited(context, budget)
        } else {
            self.poll_as::<false>(context, budget)
        }
    }

    fn drain(&mut self) {
        self.queue.drain();
    }

    fn undrain(&mut self) {
        self.queue.undrain();
    }

    fn suspend(&mut self) {
        self.queue.suspend();
    }

    fn goes_on(&self) -> bool {
        self.queue.goes_on()
    }

    fn resume(&mut self) {
        self.queue.resume();
    }

    fn arm(&mut self) -> Armed {
        self.work.arm(&mut self.queue)
    }

    fn disarm(&mut self, context: &CoreContext, polling: bool) {
        self.work.disarm(context, &mut self.queue, polling);
    }

    fn apply(&mut self, change: Change) {
        let _ = self.queue.apply(change);
    }

    fn wakers(&self) -> Wakers<'_> {
        Wakers { kick: self.queue.kick(), completion: self.work.waker() }
    }

    fn tidy(&mut self) {
        self.work.tidy();
        self.queue.tidy();
    }
}
