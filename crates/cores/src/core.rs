//! One core, as its owner sees it.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use ioplane_device::clock::{Clock, Monotonic};
use ioplane_device::{CoreId, CoreSender, GroupId, Placement, SlotMeter};
use ioplane_scheduler::CoreObjective;

use crate::counts::CoreReading;
use crate::error::PoolError;
use crate::mailbox::{EndedCore, Mailbox};
use crate::meters::{GroupTime, MeterTable};
use crate::poll_loop::PollLoop;
use crate::ring::CoreRing;
use crate::settings::{CoreSettings, Notify, YieldPolicy};
use crate::shared::{ACTIVE, CoreShared, ENDED, ENDING};
use crate::thread;
use crate::watch::Watch;

/// One I/O core: a thread called `ioplane-core-N`. Dropped, it ends once the last queue has left it.
#[derive(Debug)]
pub struct Core {
    shared: Arc<CoreShared>,
    /// Weak, so that what an ended core held (its eventfd) goes with it.
    mailbox: Weak<Mailbox>,
    /// The mailbox's.
    meters: Arc<MeterTable>,
}

impl Core {
    /// Starts a core. `id` is to be unique in the process.
    pub fn start(id: CoreId, settings: CoreSettings) -> Result<Self, PoolError> {
        Core::start_with(id, settings, Arc::new(Monotonic))
    }

    /// As [`Core::start`], with a clock of the caller's. How long the core sleeps is counted from its clock and slept by the host's.
    pub fn start_with(id: CoreId, settings: CoreSettings, clock: Arc<dyn Clock>) -> Result<Self, PoolError> {
        let start = |source: std::io::Error| PoolError::Start { core: id.0, source };
        let mailbox = Arc::new(Mailbox::new(id, clock.clone()).map_err(|e| start(e.into()))?);
        let ring = CoreRing::new(settings.ring).map_err(start)?;
        let watch = Watch::new(mailbox.event(), ring.as_ref()).map_err(|e| start(e.into()))?;
        let shared = Arc::new(CoreShared::new(id, &settings, clock.clone()));
        let meters = mailbox.meters.clone();
        let core = Core { shared: shared.clone(), mailbox: Arc::downgrade(&mailbox), meters };
        Builder::new()
            .name(format!("ioplane-core-{}", id.0))
            .spawn(move || serve(mailbox, shared, watch, ring, clock, &settings))
            .map_err(start)?;
        Ok(core)
    }

    /// Its name.
    pub fn id(&self) -> CoreId {
        self.shared.id
    }

    /// The sending half of its mailbox. If it has ended, one that returns every message.
    pub fn sender(&self) -> Arc<dyn CoreSender> {
        match self.mailbox.upgrade() {
            Some(mailbox) => mailbox,
            None => Arc::new(EndedCore(self.id())),
        }
    }

    /// Switches how its queues learn of requests. Returns at once; holds from the core's next turn on.
    pub fn notify(&self, notify: Notify) {
        self.shared.set_notify(notify);
        self.wake();
    }

    /// Changes [`CoreSettings::spin`].
    pub fn spin(&self, spin: Duration) {
        self.shared.set_spin(spin);
        self.wake();
    }

    /// What is asked of it from now on, while it is adaptive: that 99 % of requests are taken up within a time, as it could be if their queues were
    /// polled, and the most of a processor that it may take, as it could be if they were notified. The second wins. See [`CoreReading::objective`] for
    /// what comes of it.
    pub fn objective(&self, objective: &CoreObjective) {
        self.shared.set_objective(objective);
        self.wake();
    }

    /// Its meters.
    pub fn read(&self) -> CoreReading {
        self.shared.read(self.queues())
    }

    /// Time in which its thread could have run and had no processor so far, ns; 0 of one that has ended, and where the kernel does not say
    /// (CONFIG_SCHED_INFO). Reads a file of /proc: for reports, not for what looks at a core all the time.
    pub fn run_delay_ns(&self) -> u64 {
        thread::run_delay(self.shared.tid.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// Queues that are attached or about to be.
    pub fn queues(&self) -> u32 {
        self.mailbox.upgrade().map_or(0, |m| m.queues())
    }

    /// How old it is, ns: the present, as the times that it notes have it.
    pub fn age_ns(&self) -> u64 {
        self.shared.age().as_nanos() as u64
    }

    /// The meters of its queues.
    pub fn meters(&self) -> Vec<Arc<SlotMeter>> {
        self.meters.all()
    }

    /// What the queues of each group have used of the core since it was started, also those that have left.
    pub fn group_times(&self) -> BTreeMap<GroupId, GroupTime> {
        self.meters.group_times(self.read().empty_ns)
    }

    /// Forgets what a group has used that there is no more.
    pub(crate) fn forget_group(&self, group: GroupId) {
        self.meters.forget_group(group);
    }

    /// Whether [`crate::Pool`] places queues here by itself: true at first. Whoever names the core gets it in any case, and where no core is open any is taken.
    pub fn open(&self, open: bool) {
        self.shared.open.store(open, Ordering::Relaxed);
    }

    /// Whether it has ended.
    pub fn ended(&self) -> bool {
        self.shared.ended()
    }

    /// Whether [`Core::open`] was said last.
    pub(crate) fn is_open(&self) -> bool {
        self.shared.open.load(Ordering::Relaxed)
    }

    /// Whether it takes queues: it has neither ended nor been asked to.
    pub(crate) fn accepts_queues(&self) -> bool {
        self.shared.life.load(Ordering::Acquire) == ACTIVE
    }

    pub(crate) fn permille(&self) -> u32 {
        self.shared.permille()
    }

    /// Ends the core once its last queue has left. Blocks (control plane) until it has ended, or until `deadline`; then the
    /// core stays, and the error says how many queues it still has.
    pub fn retire(&self, deadline: Instant) -> Result<(), PoolError> {
        let life = &self.shared.life;
        let _ = life.compare_exchange(ACTIVE, ENDING, Ordering::AcqRel, Ordering::Acquire);
        loop {
            if self.ended() {
                return Ok(());
            }
            self.wake();
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        match life.compare_exchange(ENDING, ACTIVE, Ordering::AcqRel, Ordering::Acquire) {
            Err(ENDED) => Ok(()),
            _ => Err(PoolError::Occupied { core: self.id().0, queues: self.queues() }),
        }
    }

    fn wake(&self) {
        if let Some(mailbox) = self.mailbox.upgrade() {
            mailbox.wake();
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let _ = self.shared.life.compare_exchange(ACTIVE, ENDING, Ordering::AcqRel, Ordering::Acquire);
        self.wake();
    }
}

impl Placement for Core {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        self.sender()
    }
}

/// The thread of a core.
fn serve(
    mailbox: Arc<Mailbox>,
    shared: Arc<CoreShared>,
    watch: Watch,
    mut ring: Option<CoreRing>,
    clock: Arc<dyn Clock>,
    settings: &CoreSettings,
) {
    if let Some(cpu) = settings.cpu
        && thread::pin(cpu)
    {
        shared.cpu.store(cpu as i64, Ordering::Relaxed);
    }
    if settings.yield_policy == YieldPolicy::Nice {
        thread::be_nice();
    }
    thread::sleep_precisely();
    shared.tid.store(thread::id(), Ordering::Release);
    if let Some(Err(e)) = ring.as_mut().map(CoreRing::enable) {
        // The kernel has made the ring, so it enables it for the first thread that asks.
        eprintln!("ioplane: I/O core {}: enabling its io_uring: {e}", shared.id.0);
        std::process::abort();
    }
    let mut poll_loop = PollLoop::new(mailbox, shared.clone(), watch, ring, clock, settings);
    if catch_unwind(AssertUnwindSafe(|| poll_loop.run())).is_err() {
        // The panic's own message is out already. See the crate's documentation for why nothing is saved from here.
        let queue = poll_loop.stepping.map_or("no queue".to_owned(), |q| format!("queue {q}"));
        eprintln!(
            "ioplane: I/O core {} panicked while serving {queue}: ending, for the replay to clean up",
            shared.id.0
        );
        std::process::abort();
    }
    shared.cpu_ns.store(thread::cpu_time(thread::id()).unwrap_or(0), Ordering::Relaxed);
    shared.tid.store(0, Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until(what: &str, mut come: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !come() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn hole_08_an_event_raised_after_its_flag_was_cleared_wakes_once() {
        for notify in [Notify::Polled, Notify::Adaptive, Notify::Notified] {
            let settings = CoreSettings { notify, spin: Duration::ZERO, ..CoreSettings::default() };
            let core = Core::start(CoreId(0), settings).unwrap();
            until("never sleeps", || core.read().sleeps > 0);
            // A sender's last step, when the core has read its mailbox between the sender's two steps.
            let mailbox = core.mailbox.upgrade().unwrap();
            let before = core.read().sleeps;
            rustix::io::write(mailbox.event(), &1u64.to_ne_bytes()).unwrap();
            until("not woken", || core.read().sleeps > before);
            // Long enough to wake some ten thousand times.
            std::thread::sleep(Duration::from_millis(200));
            let woken = core.read().sleeps - before;
            assert!(woken < 10, "{notify:?}: woken {woken} times by one event");
            drop(mailbox);
            core.retire(Instant::now() + Duration::from_secs(20)).unwrap();
        }
    }
}
