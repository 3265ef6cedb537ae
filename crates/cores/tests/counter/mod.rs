//! The smallest device with queues: a request is a count, and serving it adds one.

#![allow(dead_code)]
#![allow(unsafe_code)]
// UNSAFETY: one read into memory that lives until it has ended.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ioplane_device::clock::ManualClock;
use ioplane_device::*;
use rustix::event::{EventfdFlags, eventfd};

/// What a request is said to cost, if nothing else is asked for.
pub const BYTES: u64 = 512;

/// What the driver and the poller of one queue share.
#[derive(Debug)]
pub struct Line {
    pub published: AtomicU64,
    /// Seen by the poller: served, or held.
    pub taken: AtomicU64,
    pub served: AtomicU64,
    pub polls: AtomicU64,
    pub kicks: AtomicU64,
    /// Polls that a limit left without work.
    pub limited: AtomicU64,
    pub tidied: AtomicU64,
    pub armed: AtomicU64,
    pub disarmed: AtomicU64,
    /// How long before it was last disarmed its core said that a kick had come, ns.
    pub kicked_ns: AtomicU64,
    wanted: AtomicBool,
    kick: Arc<OwnedFd>,
    /// What is below tells by `completion` that something has ended. To be chosen before the queue runs.
    pub tells: AtomicBool,
    completion: OwnedFd,
    /// Nothing is completed while this is shut.
    pub open: AtomicBool,
    /// It is being told that it opens: whoever has seen that waits until it is open.
    telling: AtomicBool,
    pub panics: AtomicBool,
    /// Nobody says when something is published.
    pub kickless: AtomicBool,
    /// So many requests may be served at most: what a disk that answers one by one has answered.
    pub may_serve: AtomicU64,
    /// While it is set every poll has work.
    pub busy: AtomicBool,
    /// What each of these polls is said to cost.
    pub costs: AtomicU64,
    /// What each request has in flight at a backing until it is served, bytes.
    pub in_flight: AtomicU64,
    /// While it is set the poller does not return from its poll: a core that gets no processor time.
    pub stalls: AtomicBool,
    pub stalled: AtomicBool,
    /// If it is not 0, a poll without work asks for another so much later.
    pub wakes_in_us: AtomicU64,
    /// So many pieces come from below, each the next time that the poller has been armed; and so many while it rests, found by its next poll. One poll takes
    /// half of a piece, the next one the other half, of which no descriptor tells.
    pub come_when_armed: AtomicU64,
    pub come_at_rest: AtomicU64,
    pub pieces: AtomicU64,
    /// From which the poller reads once, on the core's ring. To be chosen before the queue runs.
    pub reads: OnceLock<OwnedFd>,
    /// How often that has ended, and how often its memory was given up.
    pub read: AtomicU64,
    pub given_up: AtomicU64,
    /// Changes that were told.
    pub applied: AtomicU64,
    /// Pollers that were made for it.
    pub made: AtomicU64,
    /// A line whose changes are counted between two polls of this one: the most are in `most_applied`.
    pub neighbour: OnceLock<Arc<Line>>,
    pub most_applied: AtomicU64,
    /// Counts the polls of several lines together, and what it was at the last poll of this one.
    pub together: OnceLock<Arc<AtomicU64>>,
    pub at: AtomicU64,
    /// Its poller was asked to have it kick, and not to go on since.
    asks: AtomicBool,
    rests: AtomicBool,
}

impl Line {
    pub fn new() -> Arc<Self> {
        Arc::new(Line {
            published: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            served: AtomicU64::new(0),
            polls: AtomicU64::new(0),
            kicks: AtomicU64::new(0),
            limited: AtomicU64::new(0),
            tidied: AtomicU64::new(0),
            armed: AtomicU64::new(0),
            disarmed: AtomicU64::new(0),
            kicked_ns: AtomicU64::new(0),
            wanted: AtomicBool::new(true),
            kick: Arc::new(event()),
            tells: AtomicBool::new(false),
            completion: event(),
            open: AtomicBool::new(true),
            telling: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            kickless: AtomicBool::new(false),
            may_serve: AtomicU64::new(u64::MAX),
            busy: AtomicBool::new(false),
            costs: AtomicU64::new(BYTES),
            in_flight: AtomicU64::new(0),
            stalls: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            wakes_in_us: AtomicU64::new(0),
            come_when_armed: AtomicU64::new(0),
            come_at_rest: AtomicU64::new(0),
            pieces: AtomicU64::new(0),
            reads: OnceLock::new(),
            read: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
            applied: AtomicU64::new(0),
            made: AtomicU64::new(0),
            neighbour: OnceLock::new(),
            most_applied: AtomicU64::new(0),
            together: OnceLock::new(),
            at: AtomicU64::new(0),
            asks: AtomicBool::new(false),
            rests: AtomicBool::new(false),
        })
    }

    /// As a driver: publish, fence, kick if asked to.
    pub fn publish(&self) {
        self.published.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.wanted.load(Ordering::Relaxed) {
            self.kick();
        }
    }

    pub fn kick(&self) {
        rustix::io::write(&*self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// What is below keeps everything from now on.
    pub fn hold(&self) {
        self.open.store(false, Ordering::Release);
    }

    /// What is below has ended everything that it has kept, and tells. Told first, so that whoever sees the end can take it back.
    pub fn complete(&self) {
        self.telling.store(true, Ordering::Release);
        rustix::io::write(&self.completion, &1u64.to_ne_bytes()).unwrap();
        self.open.store(true, Ordering::Release);
        self.telling.store(false, Ordering::Release);
    }

    /// Whether its poller has asked to be kicked.
    pub fn wants_kick(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    /// Whether its poller has asked to be kicked and has found nothing after that: what is published from now on comes by a kick.
    pub fn rests(&self) -> bool {
        self.rests.load(Ordering::Acquire)
    }

    /// Until everything published is served.
    pub fn wait(&self) {
        let published = self.published.load(Ordering::Acquire);
        eventually("a request waits in vain", || self.served.load(Ordering::Acquire) >= published);
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

/// Panics when `what` has not come true in a minute.
pub fn eventually(what: &str, mut come: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !come() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

/// A moment by which any test is over.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Takes one of so many; false if there is none.
fn take_one(of: &AtomicU64) -> bool {
    of.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).is_ok()
}

struct Server {
    line: Arc<Line>,
    /// Taken and not yet served.
    held: u64,
    drain: bool,
    suspend: bool,
    /// Changes of the neighbour that were seen.
    seen: u64,
    /// A piece has come, and its first half is done.
    came: bool,
    half: bool,
    /// What it reads into, once it does.
    reading: Option<(IoHandle, Buffer)>,
}

/// Memory that the kernel writes to.
struct Buffer(Box<[u8; 8]>, Arc<Line>);

impl Drop for Buffer {
    fn drop(&mut self) {
        self.1.given_up.fetch_add(1, Ordering::SeqCst);
    }
}

impl Server {
    /// Reads once from what it is to read from. Whether that has yet to end.
    fn read(&mut self, context: &mut CoreContext) -> bool {
        let Some(file) = self.line.reads.get() else { return false };
        if self.line.read.load(Ordering::Relaxed) > 0 {
            return false;
        }
        let Some((handle, _)) = self.reading else {
            let Some(handle) = context.attach(VecDeque::with_capacity(1)) else { return false };
            let mut buffer = Buffer(Box::default(), self.line.clone());
            let op = FileOp::Read { file: file.as_raw_fd(), into: buffer.0.as_mut_ptr(), len: 8, offset: 0 };
            // SAFETY: the buffer lives until the end was told, or goes with the orphan.
            assert!(unsafe { context.io().unwrap().submit(handle, 7, op) });
            self.reading = Some((handle, buffer));
            return true;
        };
        let Some(completion) = context.io().unwrap().next(handle) else { return true };
        assert_eq!((completion.tag, completion.result), (7, 8));
        context.io().unwrap().detach(handle);
        self.reading = None;
        self.line.read.fetch_add(1, Ordering::Relaxed);
        false
    }

    fn empty_kick(&self) {
        let mut count = [0; 8];
        if rustix::io::read(&*self.line.kick, &mut count).is_ok() {
            self.line.kicks.fetch_add(u64::from_ne_bytes(count), Ordering::Relaxed);
        }
    }
}

impl Poller for Server {
    fn poll(&mut self, context: &mut CoreContext, budget: Budget) -> PollOutcome {
        let line = &self.line;
        if let Some(together) = line.together.get() {
            line.at.store(together.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
        }
        line.polls.fetch_add(1, Ordering::Relaxed);
        assert!(!line.panics.load(Ordering::Relaxed), "asked to");
        while line.stalls.load(Ordering::Relaxed) {
            line.stalled.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(neighbour) = line.neighbour.get() {
            let applied = neighbour.applied.load(Ordering::Relaxed);
            line.most_applied.fetch_max(applied - self.seen, Ordering::Relaxed);
            self.seen = applied;
        }
        if self.suspend {
            if let Some((handle, buffer)) = self.reading.take() {
                context.io().unwrap().orphan(handle, Box::new(buffer));
            }
            return PollOutcome::PARKED;
        }
        let reads = self.read(context);
        let line = &self.line;
        let served = line.served.load(Ordering::Relaxed);
        if !self.drain {
            let new = line.published.load(Ordering::Acquire) - served - self.held;
            let passes = |_: &u64| context.admit(BYTES).is_ok();
            let bytes = line.in_flight.load(Ordering::Relaxed);
            let fit = if budget.room == Budget::UNBOUNDED {
                u64::MAX
            } else {
                u64::from(budget.room) / bytes.max(1)
            };
            let may = new.min(budget.requests.into()).min(if bytes == 0 { u64::MAX } else { fit });
            let taken = (0..may).take_while(passes).count() as u64;
            context.submitted(taken * bytes);
            if bytes > 0 && fit < new {
                context.lacked_room();
            }
            self.held += taken;
            line.taken.store(served + self.held, Ordering::Release);
        }
        while line.telling.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let may_serve = line.may_serve.load(Ordering::Acquire).saturating_sub(served);
        let done = self.held.min(may_serve);
        if done > 0 && line.open.load(Ordering::Acquire) {
            self.held -= done;
            context.completed(done * line.in_flight.load(Ordering::Relaxed));
            let _ = rustix::io::read(&line.completion, &mut [0; 8]);
            line.rests.store(false, Ordering::Relaxed);
            line.served.store(served + done, Ordering::Release);
            return PollOutcome::busy(done as u32, done * BYTES);
        }
        if self.drain && self.held == 0 && !reads {
            return PollOutcome::PARKED;
        }
        if std::mem::take(&mut self.half) {
            line.pieces.fetch_add(1, Ordering::Release);
            return PollOutcome::busy(1, BYTES);
        }
        let found = line.rests.load(Ordering::Relaxed) && take_one(&line.come_at_rest);
        if std::mem::take(&mut self.came) || found {
            self.half = true;
            line.rests.store(false, Ordering::Relaxed);
            return PollOutcome::IDLE.with_more(true);
        }
        if line.busy.load(Ordering::Relaxed) {
            return PollOutcome::busy(1, line.costs.load(Ordering::Relaxed));
        }
        if let Some(at) = context.limited() {
            line.limited.fetch_add(1, Ordering::Relaxed);
            return PollOutcome::limited(at, context);
        }
        let outcome = if self.held > 0 || reads { PollOutcome::WAITING } else { PollOutcome::IDLE };
        line.rests.store(line.asks.load(Ordering::Relaxed), Ordering::Release);
        match line.wakes_in_us.load(Ordering::Relaxed) {
            0 => outcome,
            us => outcome.wake_at(context.now() + Duration::from_micros(us), context),
        }
    }

    fn drain(&mut self) {
        self.drain = true;
    }

    fn undrain(&mut self) {
        self.drain = false;
    }

    fn suspend(&mut self) {
        self.suspend = true;
    }

    fn goes_on(&self) -> bool {
        self.held == 0 && self.reading.is_none()
    }

    fn resume(&mut self) {}

    fn arm(&mut self) -> Armed {
        self.line.armed.fetch_add(1, Ordering::Relaxed);
        self.line.rests.store(false, Ordering::Relaxed);
        self.line.asks.store(true, Ordering::Relaxed);
        self.line.wanted.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let waits = self.line.published.load(Ordering::Acquire)
            > self.line.served.load(Ordering::Relaxed) + self.held;
        let untold = self.held > 0 && !self.line.tells.load(Ordering::Relaxed);
        let kickless = self.line.kickless.load(Ordering::Relaxed);
        if (waits && !self.drain) || untold || kickless || self.half {
            return Armed::WorkLeft;
        }
        self.came |= take_one(&self.line.come_when_armed);
        Armed::Armed
    }

    fn disarm(&mut self, context: &CoreContext, polling: bool) {
        let kicked_ns = context.now().saturating_duration_since(context.kicked()).as_nanos() as u64;
        self.line.kicked_ns.store(kicked_ns, Ordering::Release);
        self.line.disarmed.fetch_add(1, Ordering::Relaxed);
        self.line.asks.store(false, Ordering::Relaxed);
        self.line.rests.store(false, Ordering::Relaxed);
        self.line.wanted.store(!polling, Ordering::Relaxed);
        self.empty_kick();
    }

    fn apply(&mut self, _change: Change) {
        self.line.applied.fetch_add(1, Ordering::Relaxed);
    }

    fn wakers(&self) -> Wakers<'_> {
        let tells = self.line.tells.load(Ordering::Relaxed);
        Wakers { kick: Some(self.line.kick.as_fd()), completion: tells.then(|| self.line.completion.as_fd()) }
    }

    fn tidy(&mut self) {
        self.line.tidied.fetch_add(1, Ordering::Relaxed);
        if !self.line.wants_kick() {
            self.empty_kick();
        }
    }
}

/// A device whose queues are lines.
pub struct Counter {
    info: DeviceInfo,
    share: Share,
    block_device: Option<BlockDevice>,
    pub lines: Vec<Arc<Line>>,
}

impl Counter {
    pub fn new(queues: u16) -> Self {
        Counter {
            info: DeviceInfo { name: "counter".into(), kind: "counter", queues },
            share: Share::default(),
            block_device: None,
            lines: (0..queues).map(|_| Line::new()).collect(),
        }
    }

    pub fn run(queues: u16, placement: &dyn Placement) -> (Running<Self>, Vec<Arc<Line>>) {
        Counter::new(queues).on(placement)
    }

    /// As [`Counter::run`], in a group.
    pub fn run_in(share: Share, queues: u16, placement: &dyn Placement) -> (Running<Self>, Vec<Arc<Line>>) {
        Counter { share, ..Counter::new(queues) }.on(placement)
    }

    /// As [`Counter::run_in`], with a backing that lies on this device.
    pub fn run_on(
        device: BlockDevice,
        share: Share,
        queues: u16,
        placement: &dyn Placement,
    ) -> (Running<Self>, Vec<Arc<Line>>) {
        Counter { share, block_device: Some(device), ..Counter::new(queues) }.on(placement)
    }

    /// As [`Counter::run`], with lines that tell when what they hold has ended.
    pub fn run_telling(queues: u16, placement: &dyn Placement) -> (Running<Self>, Vec<Arc<Line>>) {
        let counter = Counter::new(queues);
        counter.lines.iter().for_each(|line| line.tells.store(true, Ordering::Relaxed));
        counter.on(placement)
    }

    /// As [`Counter::run`], with one line that reads from what `file` is.
    pub fn run_reading(file: OwnedFd, placement: &dyn Placement) -> (Running<Self>, Arc<Line>) {
        let counter = Counter::new(1);
        counter.lines[0].reads.set(file).unwrap();
        let (running, lines) = counter.on(placement);
        (running, lines[0].clone())
    }

    fn on(self, placement: &dyn Placement) -> (Running<Self>, Vec<Arc<Line>>) {
        let lines = self.lines.clone();
        (Quiescent::new(self).resume(placement).unwrap(), lines)
    }
}

impl Device for Counter {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn access(&mut self, _at: RegisterAddress, _op: Access<'_>) -> Effect {
        Effect::None
    }

    fn active(&self) -> QueueSet {
        (0..self.info.queues).collect()
    }

    fn share(&self) -> Share {
        self.share
    }

    fn block_device(&self) -> Option<BlockDevice> {
        self.block_device
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        for queue in activation.queues().clone() {
            let line = self.lines[usize::from(queue)].clone();
            line.made.fetch_add(1, Ordering::Relaxed);
            let server = Server {
                line,
                held: 0,
                drain: false,
                suspend: false,
                seen: 0,
                came: false,
                half: false,
                reading: None,
            };
            activation.add(queue, Box::new(server));
        }
        Ok(())
    }

    fn deactivate(&mut self, parked: Parked) {
        parked.into_poller::<Server>().unwrap();
    }

    fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        Ok(SavedState { kind: "counter".into(), version: 1, body: Vec::new() })
    }

    fn load(&mut self, _proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        state.expect("counter", 1)?;
        Ok(())
    }

    fn reset(&mut self, _proof: &QuiescenceProof) {}
}

/// Until the core has looked at the line and at its clock some times, or the line rests.
pub fn looked(line: &Line) {
    let polls = line.polls.load(Ordering::Relaxed);
    eventually("is not looked at", || line.polls.load(Ordering::Relaxed) > polls + 64 || line.rests());
}

/// Lets so much time go by without a request, and waits until the core has seen it.
pub fn gap(line: &Line, clock: &ManualClock, time: Duration) {
    looked(line);
    clock.advance(time);
    looked(line);
}

/// Requests with such gaps before them; how many of them were kicked.
pub fn requests(line: &Line, clock: &ManualClock, count: u32, time: Duration) -> u64 {
    let kicks = line.kicks.load(Ordering::Relaxed);
    for _ in 0..count {
        gap(line, clock, time);
        line.publish();
        line.wait();
    }
    line.kicks.load(Ordering::Relaxed) - kicks
}
