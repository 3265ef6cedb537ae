//! One core, as its owner sees it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use ioplane_device::clock::{Clock, Monotonic};
use ioplane_device::{CoreId, CoreSender, Placement};

use crate::counts::CoreReading;
use crate::error::PoolError;
use crate::mailbox::{EndedCore, Mailbox};
use crate::poll_loop::PollLoop;
use crate::settings::{CoreSettings, Notify, YieldPolicy};
use crate::shared::{CoreShared, LEAVE, LEFT, STAY};
use crate::thread;
use crate::watch::Watch;

/// One I/O core: a thread called `ioplane-core-N`. Dropped, it ends once the last queue has left it.
#[derive(Debug)]
pub struct Core {
    panel: Arc<CoreShared>,
    /// Weak, so that what an ended core held (its eventfd) goes with it.
    mailbox: Weak<Mailbox>,
}

impl Core {
    /// Starts a core. `id` is to be unique in the process.
    pub fn start(id: CoreId, settings: CoreSettings) -> Result<Self, PoolError> {
        Core::start_with(id, settings, Arc::new(Monotonic))
    }

    /// As [`Core::start`], with a clock of the caller's. How long the core sleeps is counted from its clock and slept by the host's.
    pub fn start_with(id: CoreId, settings: CoreSettings, clock: Arc<dyn Clock>) -> Result<Self, PoolError> {
        let start = |source: std::io::Error| PoolError::Start { core: id.0, source };
        let mailbox = Arc::new(Mailbox::new(id).map_err(|e| start(e.into()))?);
        let watch = Watch::new(mailbox.bell()).map_err(|e| start(e.into()))?;
        let panel = Arc::new(CoreShared::new(id, settings.notify, settings.spin));
        let core = Core { panel: panel.clone(), mailbox: Arc::downgrade(&mailbox) };
        Builder::new()
            .name(format!("ioplane-core-{}", id.0))
            .spawn(move || serve(mailbox, panel, watch, clock, &settings))
            .map_err(start)?;
        Ok(core)
    }

    /// Its name.
    pub fn id(&self) -> CoreId {
        self.panel.id
    }

    /// Where to post orders for it. If it has ended, what gives every order back.
    pub fn post(&self) -> Arc<dyn CoreSender> {
        match self.mailbox.upgrade() {
            Some(mailbox) => mailbox,
            None => Arc::new(EndedCore(self.id())),
        }
    }

    /// Switches how its queues learn of requests. Returns at once; holds from the core's next turn on.
    pub fn notify(&self, notify: Notify) {
        self.panel.set_notify(notify);
        self.ring();
    }

    /// Changes [`CoreSettings::spin`].
    pub fn spin(&self, spin: Duration) {
        self.panel.set_spin(spin);
        self.ring();
    }

    /// Its meters.
    pub fn read(&self) -> CoreReading {
        self.panel.read(self.seats())
    }

    /// Queues that sit here or are on their way.
    pub fn seats(&self) -> u32 {
        self.mailbox.upgrade().map_or(0, |m| m.seats())
    }

    /// Whether it has ended.
    pub fn ended(&self) -> bool {
        self.panel.ended()
    }

    /// Whether it takes queues: it has neither ended nor been asked to.
    pub(crate) fn stays(&self) -> bool {
        self.panel.leave.load(Ordering::Acquire) == STAY
    }

    pub(crate) fn permille(&self) -> u32 {
        self.panel.permille()
    }

    /// Ends the core once its last queue has left. Blocks (control plane) until it has ended, or until `deadline`; then the
    /// core stays, and the error says how many queues still sit there.
    pub fn retire(&self, deadline: Instant) -> Result<(), PoolError> {
        let leave = &self.panel.leave;
        let _ = leave.compare_exchange(STAY, LEAVE, Ordering::AcqRel, Ordering::Acquire);
        loop {
            if self.ended() {
                return Ok(());
            }
            self.ring();
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        match leave.compare_exchange(LEAVE, STAY, Ordering::AcqRel, Ordering::Acquire) {
            Err(LEFT) => Ok(()),
            _ => Err(PoolError::Occupied { core: self.id().0, seats: self.seats() }),
        }
    }

    fn ring(&self) {
        if let Some(mailbox) = self.mailbox.upgrade() {
            mailbox.ring();
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        let _ = self.panel.leave.compare_exchange(STAY, LEAVE, Ordering::AcqRel, Ordering::Acquire);
        self.ring();
    }
}

impl Placement for Core {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        self.post()
    }
}

/// The thread of a core.
fn serve(
    mailbox: Arc<Mailbox>,
    panel: Arc<CoreShared>,
    watch: Watch,
    clock: Arc<dyn Clock>,
    settings: &CoreSettings,
) {
    if let Some(cpu) = settings.cpu
        && thread::pin(cpu)
    {
        panel.cpu.store(cpu as i64, Ordering::Relaxed);
    }
    if settings.yield_policy == YieldPolicy::Nice {
        thread::be_nice();
    }
    thread::sleep_precisely();
    panel.tid.store(thread::id(), Ordering::Release);
    let mut rounds = PollLoop::new(mailbox, panel.clone(), watch, clock, settings);
    if catch_unwind(AssertUnwindSafe(|| rounds.run())).is_err() {
        // The panic's own message is out already. See the crate's documentation for why nothing is saved from here.
        let queue = rounds.stepping.map_or("no queue".to_owned(), |q| format!("queue {q}"));
        eprintln!(
            "ioplane: I/O core {} panicked while serving {queue}: ending, for the replay to clean up",
            panel.id.0
        );
        std::process::abort();
    }
    panel.cpu_ns.store(thread::cpu_time(thread::id()).unwrap_or(0), Ordering::Relaxed);
    panel.tid.store(0, Ordering::Release);
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
    fn hole_08_a_bell_rung_after_its_flag_was_lowered_is_heard_once() {
        for notify in [Notify::Polled, Notify::Notified] {
            let settings = CoreSettings { notify, spin: Duration::ZERO, ..CoreSettings::default() };
            let core = Core::start(CoreId(0), settings).unwrap();
            until("never sleeps", || core.read().sleeps > 0);
            // What a poster does last, when the core has read its mail between the two steps.
            let mailbox = core.mailbox.upgrade().unwrap();
            let before = core.read().sleeps;
            rustix::io::write(mailbox.bell(), &1u64.to_ne_bytes()).unwrap();
            until("not heard", || core.read().sleeps > before);
            // Long enough to wake some ten thousand times.
            std::thread::sleep(Duration::from_millis(200));
            let woken = core.read().sleeps - before;
            assert!(woken < 10, "{notify:?}: woken {woken} times by one bell");
            drop(mailbox);
            core.retire(Instant::now() + Duration::from_secs(20)).unwrap();
        }
    }
}
