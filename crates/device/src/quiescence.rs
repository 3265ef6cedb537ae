//! Quiescence as ownership: the life of a device, one type for each part of it.

use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use ioplane_memory::mutation::{Law, removed};

use crate::device::{
    Access, At, Device, DeviceError, DeviceInfo, Effect, QueueSet, Seating, Stillness, Then,
};
use crate::home::{Home, block, block_until};
use crate::parked::SeatId;
use crate::poller::{Change, Stop};
use crate::seat::{AcksLeft, CoreId, Gone, Order, Placement, Post, Seat, Tell};
use crate::state::State;

/// Proof that a device is at a quiescent point: all of its pollers are home, and its registers are still. Shown by
/// [`Quiescent`] alone; whatever is allowed only there asks to see it.
#[derive(Debug)]
pub struct Still {
    _minted_by_quiescent: (),
}

const STILL: Still = Still { _minted_by_quiescent: () };

/// A step that did not succeed, with the device as it was before.
pub struct Refused<T> {
    /// What the step was asked of, unharmed.
    pub kept: T,
    /// Why.
    pub error: DeviceError,
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

/// A poller of ours on some core.
#[derive(Debug)]
struct Posted {
    queue: u16,
    seat: SeatId,
    post: Arc<dyn Post>,
}

impl Posted {
    /// Says something to the seat. An ended core has no seats left to hear it.
    fn tell(&self, tell: Tell) {
        let _ = self.post.post(Order::Tell(self.seat, tell));
    }
}

/// The pollers of one device that are on duty. Dropped with some still on duty, it suspends them: they leave their cores
/// and end, rather than poll for nobody.
#[derive(Debug, Default)]
struct Roster {
    posted: Vec<Posted>,
    home: Arc<Home>,
}

impl Roster {
    fn tell(&self, queues: &QueueSet, tell: impl Fn() -> Tell) {
        self.posted.iter().filter(|p| queues.contains(&p.queue)).for_each(|p| p.tell(tell()));
    }

    /// Hands whoever has come home to the device.
    fn take_in<D: Device>(&mut self, device: &mut D) -> Option<Stop> {
        let mut stop = None;
        while let Some((seat, parked)) = self.home.take() {
            self.posted.retain(|p| p.seat != seat);
            if stop != Some(Stop::Suspended) {
                stop = Some(parked.stop());
            }
            device.deactivate(parked);
        }
        stop
    }

    fn queues(&self) -> QueueSet {
        self.posted.iter().map(|p| p.queue).collect()
    }

    /// Makes pollers for `queues` that have none and seats them. A poller that no core takes goes straight home, so that
    /// what it carries (requests recorded in flight) stays the device's.
    fn seat<D: Device>(
        &mut self,
        device: &mut D,
        queues: &QueueSet,
        placement: &dyn Placement,
    ) -> Result<(), DeviceError> {
        let on_duty = self.queues();
        let wanted: QueueSet = queues.difference(&on_duty).copied().collect();
        let mut seating = Seating { queues: &wanted, made: Vec::new() };
        device.activate(&mut seating)?;
        let mut gone = None;
        for (queue, poller) in seating.made {
            let post = placement.place(&device.info().name, queue);
            let seat = Seat::new(poller, queue, self.home.clone());
            let posted = Posted { queue, seat: seat.id(), post };
            match posted.post.post(Order::Sit(seat)) {
                Ok(()) => self.posted.push(posted),
                Err(Gone(order)) => {
                    gone = Some(DeviceError::CoreGone(posted.post.core().0));
                    if let Order::Sit(seat) = order {
                        seat.turn_back();
                    }
                }
            }
        }
        self.take_in(device);
        gone.map_or(Ok(()), Err)
    }
}

impl Drop for Roster {
    fn drop(&mut self) {
        self.posted.iter().for_each(|p| p.tell(Tell::Suspend));
    }
}

/// A device at a quiescent point, with every one of its pollers: the only one that offers what needs it.
pub struct Quiescent<D: Device> {
    device: D,
    stop: Stop,
}

impl<D: Device> Quiescent<D> {
    /// A device that has not run yet is quiescent.
    pub fn new(device: D) -> Self {
        Quiescent { device, stop: Stop::Drained }
    }

    /// Whether something in flight was fenced and recorded on the way here, or nothing was in flight.
    pub fn stop(&self) -> Stop {
        self.stop
    }

    /// The device.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// Does to the device what needs the proof: replacing a backing, shrinking memory.
    pub fn with<R>(&mut self, change: impl FnOnce(&mut D, &Still) -> R) -> R {
        change(&mut self.device, &STILL)
    }

    /// [`Device::save`].
    pub fn save(&self) -> Result<State, DeviceError> {
        self.device.save(&STILL)
    }

    /// [`Device::load`]: from here on only [`Loaded::start`] leads back to running.
    pub fn load(mut self, state: &State) -> Result<Loaded<D>, Refused<Self>> {
        match self.device.load(&STILL, state) {
            Ok(()) => Ok(Loaded { device: self.device }),
            Err(error) => Err(Refused { kept: self, error }),
        }
    }

    /// [`Device::reset`].
    pub fn reset(&mut self) {
        self.device.reset(&STILL);
        self.stop = Stop::Drained;
    }

    /// Goes on after a pause: the device knows its own state to be true. Every queue is looked at again and signalled once.
    pub fn resume(mut self, placement: &dyn Placement) -> Result<Running<D>, Refused<Self>> {
        let mut roster = Roster::default();
        let queues = self.device.active();
        match roster.seat(&mut self.device, &queues, placement) {
            Ok(()) => Ok(Running { device: self.device, roster }),
            Err(error) => {
                // What had been seated comes home before anybody else may touch the device.
                let stop = if roster.posted.is_empty() { self.stop } else { Stop::Suspended };
                let Running { device, .. } = recall(Running { device: self.device, roster });
                Err(Refused { kept: Quiescent { device, stop }, error })
            }
        }
    }

    /// Gives the device up.
    pub fn into_device(self) -> D {
        self.device
    }
}

/// Suspends whatever is on duty and waits for it: a poll away. Without a deadline, since a device whose poller is still on a core
/// is not quiescent, however long that core has not turned.
fn recall<D: Device>(mut running: Running<D>) -> Running<D> {
    let all = running.queues();
    running.suspend(&all);
    block(|context| running.poll_stopped(context, &all));
    running
}

impl<D: Device> fmt::Debug for Quiescent<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quiescent").field("device", self.device.info()).field("stop", &self.stop).finish()
    }
}

/// A device whose state came from outside and has been checked. It starts; it does not resume.
pub struct Loaded<D: Device> {
    device: D,
}

impl<D: Device> Loaded<D> {
    /// Starts from the loaded state: queues are built anew against the guest's memory, which is checked once more.
    pub fn start(self, placement: &dyn Placement) -> Result<Running<D>, Refused<Self>> {
        Quiescent::new(self.device)
            .resume(placement)
            .map_err(|refused| Refused { kept: Loaded { device: refused.kept.device }, error: refused.error })
    }

    /// Back to where it can be saved, loaded or reset.
    pub fn into_quiescent(self) -> Quiescent<D> {
        Quiescent::new(self.device)
    }
}

impl<D: Device> fmt::Debug for Loaded<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Loaded").field("device", self.device.info()).finish()
    }
}

/// A device at work: its control half here, its pollers on I/O cores.
pub struct Running<D: Device> {
    device: D,
    roster: Roster,
}

impl<D: Device> Running<D> {
    /// What is fixed about the device.
    pub fn info(&self) -> &DeviceInfo {
        self.device.info()
    }

    /// The control half, to look at.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The control half, for changes that need no quiescent point: those that do ask for a [`Still`].
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// [`Device::access`]. The effect is the caller's to carry out.
    pub fn access(&mut self, at: At, op: Access<'_>) -> Effect {
        self.device.access(at, op)
    }

    /// The queues that have a poller on duty, draining or not.
    pub fn queues(&self) -> QueueSet {
        self.roster.queues()
    }

    /// On which core the poller of `queue` is.
    pub fn core_of(&self, queue: u16) -> Option<CoreId> {
        self.roster.posted.iter().find(|p| p.queue == queue).map(|p| p.post.core())
    }

    /// Where the poller of `queue` sits, to put it there again: a [`Placement`] itself.
    pub fn post_of(&self, queue: u16) -> Option<Arc<dyn Post>> {
        self.roster.posted.iter().find(|p| p.queue == queue).map(|p| p.post.clone())
    }

    /// Puts pollers for `queues` on cores; those that have one keep it.
    pub fn start(&mut self, queues: &QueueSet, placement: &dyn Placement) -> Result<(), DeviceError> {
        self.roster.seat(&mut self.device, queues, placement)
    }

    /// Asks the pollers of `queues` to drain and come home; see [`Running::poll_stopped`].
    pub fn drain(&mut self, queues: &QueueSet) {
        self.roster.tell(queues, || Tell::Drain);
    }

    /// Takes back [`Running::drain`]: those that drain take work again, those that have parked get a seat again if the
    /// device still wants them active. Blocks until the cores have heard it: a poll away, but for as long as a core takes that is
    /// starved of processor time, since what comes home unexpectedly later would find nobody to start it again.
    pub fn undrain(&mut self, queues: &QueueSet, placement: &dyn Placement) -> Result<(), DeviceError> {
        let left = AcksLeft::new(self.roster.home.clone());
        self.roster.tell(queues, || Tell::Undrain(left.ack()));
        let applied = Applied { left, home: self.roster.home.clone() };
        block(|context| applied.poll_done(context));
        self.roster.take_in(&mut self.device);
        let again: QueueSet = self.device.active().intersection(queues).copied().collect();
        self.start(&again, placement)
    }

    /// Asks the pollers of `queues` to come home at once, with what is in flight fenced and recorded.
    pub fn suspend(&mut self, queues: &QueueSet) {
        self.roster.tell(queues, || Tell::Suspend);
    }

    /// Ready when none of `queues` has a poller on duty any more; the device has taken them in.
    pub fn poll_stopped(&mut self, context: &mut Context<'_>, queues: &QueueSet) -> Poll<()> {
        self.roster.home.register(context.waker());
        self.roster.take_in(&mut self.device);
        if self.roster.posted.iter().any(|p| queues.contains(&p.queue)) {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }

    /// The future of [`Running::poll_stopped`]. Dropping it loses nothing.
    pub async fn stopped(&mut self, queues: &QueueSet) {
        poll_fn(|context| self.poll_stopped(context, queues)).await
    }

    /// Blocks until `queues` are home or `deadline` has passed; says whether they are.
    pub fn wait_stopped(&mut self, queues: &QueueSet, deadline: Instant) -> bool {
        block_until(deadline, |context| self.poll_stopped(context, queues)).is_some()
    }

    /// Tells the device and the pollers of `queues` of a change and gives what waits for all of them to acknowledge it.
    pub fn apply(&mut self, queues: &QueueSet, change: &Change) -> Applied {
        self.device.apply(queues, change);
        let left = AcksLeft::new(self.roster.home.clone());
        for posted in self.roster.posted.iter().filter(|p| queues.contains(&p.queue)) {
            posted.tell(Tell::Apply(change.clone(), left.ack()));
        }
        Applied { left, home: self.roster.home.clone() }
    }

    /// Begins to bring the whole device to a quiescent point. The guest goes on meanwhile.
    pub fn begin_quiesce(mut self) -> Quiescing<D> {
        let all = self.queues();
        self.drain(&all);
        let mut quiescing = Quiescing { running: self, stop: Stop::Drained, held: false, owed: Vec::new() };
        quiescing.look();
        quiescing
    }

    /// Blocks until the device is quiescent or `deadline` has passed.
    pub fn quiesce(self, deadline: Instant) -> Result<Quiescent<D>, Missed<D>> {
        self.begin_quiesce().wait(deadline)
    }
}

impl<D: Device> fmt::Debug for Running<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("device", self.device.info()).field("queues", &self.queues()).finish()
    }
}

/// Waits for every poller to acknowledge a change.
#[derive(Debug)]
pub struct Applied {
    left: Arc<AcksLeft>,
    home: Arc<Home>,
}

impl Applied {
    fn poll_done(&self, context: &mut Context<'_>) -> Poll<()> {
        self.home.register(context.waker());
        if self.left.all_in() { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Ready when every poller has acknowledged, or has left its core.
    pub async fn done(self) {
        poll_fn(|context| self.poll_done(context)).await
    }

    /// Blocks until then or until `deadline`; says whether all have.
    pub fn wait(self, deadline: Instant) -> bool {
        block_until(deadline, |context| self.poll_done(context)).is_some()
    }
}

/// A device on its way to a quiescent point. Its guest goes on: registers are served, which is how hardware that the
/// guest drives comes to be still; the moment it is, it is held there.
pub struct Quiescing<D: Device> {
    running: Running<D>,
    stop: Stop,
    held: bool,
    owed: Vec<Effect>,
}

impl<D: Device> Quiescing<D> {
    /// What is fixed about the device.
    pub fn info(&self) -> &DeviceInfo {
        self.running.info()
    }

    /// One register access by the guest. `None`: the device is held at its quiescent point, the access has to wait.
    /// What the access asks for is kept and carried out at the quiescent point, or handed back by [`Missed::undrain`].
    pub fn access(&mut self, at: At, op: Access<'_>) -> Option<()> {
        self.look();
        if self.held {
            return None;
        }
        let effect = self.running.access(at, op);
        // Queues that were started meanwhile are the device's to name when it resumes; the rest is owed.
        if let Effect::Deactivate(..) = effect {
            self.owed.push(effect);
        }
        self.look();
        Some(())
    }

    /// An event of the device itself (its interrupt, the end of its DMA), which may make it still.
    pub fn event(&mut self, event: impl FnOnce(&mut D)) {
        if !self.held {
            event(&mut self.running.device);
        }
        self.look();
    }

    /// Changes the device, also where it is held: what needs no quiescent point, and what its guest does not wait for.
    pub fn with<R>(&mut self, change: impl FnOnce(&mut D) -> R) -> R {
        let done = change(&mut self.running.device);
        self.look();
        done
    }

    fn look(&mut self) {
        if self.running.roster.take_in(&mut self.running.device) == Some(Stop::Suspended) {
            self.stop = Stop::Suspended;
        }
        if !self.held && self.running.roster.posted.is_empty() {
            self.held = self.running.device.stillness() == Stillness::Still;
        }
    }

    /// Ready when the device is held at its quiescent point.
    pub fn poll_settled(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.running.roster.home.register(context.waker());
        self.look();
        if self.held { Poll::Ready(()) } else { Poll::Pending }
    }

    /// The future of [`Quiescing::poll_settled`]. Dropping it loses nothing: ask again, or [`Quiescing::finish`].
    pub async fn settled(&mut self) {
        poll_fn(|context| self.poll_settled(context)).await
    }

    /// [`Running::apply`], to every poller that is not home yet.
    pub fn apply(&mut self, change: &Change) -> Applied {
        let left = self.running.queues();
        self.running.apply(&left, change)
    }

    /// Whether the device is held at its quiescent point.
    pub fn is_settled(&mut self) -> bool {
        self.look();
        self.held
    }

    /// Who wakes when a poller comes home: for an owner that waits by other means.
    pub fn waker_home(&self) -> Arc<Home> {
        self.running.roster.home.clone()
    }

    /// The quiescent device; or, if it is not there yet, the miss with its reason.
    pub fn finish(mut self) -> Result<Quiescent<D>, Missed<D>> {
        self.look();
        if !self.held {
            let queues = self.running.queues();
            let reason = match self.running.device.stillness() {
                Stillness::Busy(what) => what.to_owned(),
                Stillness::Still => format!("queues {queues:?} still have requests in flight"),
            };
            return Err(Missed { reason, quiescing: self });
        }
        let mut quiescent = Quiescent { device: self.running.device, stop: self.stop };
        for effect in self.owed.drain(..) {
            if let Effect::Deactivate(_, Then::Reset) = effect {
                quiescent.reset();
            }
        }
        Ok(quiescent)
    }

    /// Blocks until the device is quiescent or `deadline` has passed. For owners whose guest does not need them to serve
    /// its registers meanwhile.
    pub fn wait(mut self, deadline: Instant) -> Result<Quiescent<D>, Missed<D>> {
        block_until(deadline, |context| self.poll_settled(context));
        self.finish()
    }
}

/// The deadline passed first. The device still runs, draining; say what is to become of it.
#[must_use = "a missed deadline leaves the device draining: undrain or suspend it"]
pub struct Missed<D: Device> {
    /// What it was waiting for.
    pub reason: String,
    quiescing: Quiescing<D>,
}

impl<D: Device> Missed<D> {
    /// Back to running, all of it: those that drain take work again, those that have parked get a seat again. What the
    /// guest asked for meanwhile (queues to stop, a reset) comes back for the owner to carry out.
    pub fn undrain(self, placement: &dyn Placement) -> Result<(Running<D>, Vec<Effect>), Refused<Self>> {
        let Missed { reason, quiescing: Quiescing { mut running, stop, held, owed } } = self;
        if removed(Law::GivesBack) {
            return Ok((running, owed));
        }
        let all = running.queues().union(&running.device.active()).copied().collect();
        match running.undrain(&all, placement) {
            Ok(()) => Ok((running, owed)),
            Err(error) => {
                let quiescing = Quiescing { running, stop, held, owed };
                Err(Refused { kept: Missed { reason, quiescing }, error })
            }
        }
    }

    /// Stops it by force: what is in flight is fenced and recorded. Wait for the result once more; it is a poll away.
    pub fn suspend(self) -> Result<Quiescing<D>, Refused<Self>> {
        let Missed { reason, mut quiescing } = self;
        let left = quiescing.running.queues();
        quiescing.running.suspend(&left);
        if let Err(error) = quiescing.running.device.suspend() {
            return Err(Refused { kept: Missed { reason, quiescing }, error });
        }
        quiescing.stop = Stop::Suspended;
        Ok(quiescing)
    }

    /// Goes on waiting.
    pub fn keep_waiting(self) -> Quiescing<D> {
        self.quiescing
    }
}

impl<D: Device> fmt::Debug for Missed<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Missed").field("device", self.quiescing.info()).field("reason", &self.reason).finish()
    }
}
