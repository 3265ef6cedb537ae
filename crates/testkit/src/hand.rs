//! A core that a test turns by hand: every poll happens when the test says so, on the test's own thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use ioplane_cores::{RingChoice, context_with_ring};
use ioplane_device::clock::Clock;
use ioplane_device::{
    Armed, Budget, CoreContext, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, PollState, PollerSlot,
};

/// A core without a thread. Messages wait until the next [`HandCore::turn`].
#[derive(Debug, Clone, Default)]
pub struct HandCore {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    messages: VecDeque<CoreMessage>,
    slots: Vec<PollerSlot>,
    context: CoreContext,
    polling: bool,
    /// [`tend`] is at work.
    tended: bool,
    /// What the polls so far have cost, bytes.
    cost: u64,
}

impl Default for Inner {
    fn default() -> Self {
        // Where there can be no ring, images are served by threads.
        let context = context_with_ring(RingChoice::Plain).unwrap_or_default();
        Inner {
            messages: VecDeque::new(),
            slots: Vec::new(),
            context,
            polling: false,
            tended: false,
            cost: 0,
        }
    }
}

/// What a poller leaves in flight ends while its owner waits for that, and turns nothing: as on a core, another thread enters the
/// ring.
fn tend(inner: Weak<Mutex<Inner>>) {
    std::thread::spawn(move || {
        while let Some(inner) = inner.upgrade() {
            if let Some(io) = inner.lock().unwrap_or_else(PoisonError::into_inner).context.io() {
                io.enter();
            }
            drop(inner);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}

impl HandCore {
    /// A core that polls: slots are told so when they are attached.
    pub fn polling() -> Self {
        let core = HandCore::default();
        core.with(|inner| inner.polling = true);
        core
    }

    /// A core that polls, by a clock of the caller's. It has no ring.
    pub fn by(clock: Arc<dyn Clock>) -> Self {
        let core = HandCore::polling();
        core.with(|inner| inner.context = CoreContext::new(clock));
        core
    }

    /// What all polls so far have said that they cost, in bytes that could have been copied meanwhile.
    pub fn cost(&self) -> u64 {
        self.with(|inner| inner.cost)
    }

    fn with<R>(&self, work: impl FnOnce(&mut Inner) -> R) -> R {
        work(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Handles the messages and steps every slot once; says how many units of work were done.
    pub fn turn(&self) -> u32 {
        self.turn_with(Budget::of(64))
    }

    /// As [`HandCore::turn`], with that much budget for each slot.
    pub fn turn_with(&self, budget: Budget) -> u32 {
        self.with(|inner| {
            let Inner { messages, slots, context, polling, tended, cost } = inner;
            context.look();
            while let Some(message) = messages.pop_front() {
                match message {
                    CoreMessage::Attach(mut slot) => {
                        slot.disarm(context, *polling);
                        slots.push(slot);
                    }
                    CoreMessage::Poller(id, command) => {
                        if let Some(slot) = slots.iter_mut().find(|slot| slot.id() == id) {
                            slot.handle(context, command);
                        }
                    }
                    // It takes no turns by weight.
                    CoreMessage::Group(_) | CoreMessage::Device(_) => {}
                }
            }
            let (mut done, before) = (0, slots.len());
            slots.retain_mut(|slot| {
                context.look();
                let outcome = slot.step(context, budget);
                done += outcome.units();
                *cost += u64::from(outcome.cost().bytes);
                outcome.state() != PollState::Parked
            });
            slots.iter_mut().for_each(PollerSlot::tidy);
            if let Some(io) = context.io() {
                io.enter();
            }
            if slots.len() < before && !std::mem::replace(tended, true) {
                tend(Arc::downgrade(&self.inner));
            }
            done
        })
    }

    /// Turns until nothing more is done, at most `turns` times.
    pub fn turn_until_idle(&self, turns: u32) {
        for _ in 0..turns {
            if self.turn() == 0 {
                return;
            }
        }
    }

    /// Arms every slot; whether none has work left.
    pub fn arm(&self) -> bool {
        self.with(|inner| inner.slots.iter_mut().all(|slot| slot.arm() == Armed::Armed))
    }

    /// Wakes every slot.
    pub fn disarm(&self) {
        self.disarm_after(Duration::ZERO);
    }

    /// Wakes every slot. `wake_up`: what the core believes a wake-up takes.
    pub fn disarm_after(&self, wake_up: Duration) {
        self.with(|inner| {
            let Inner { slots, context, polling, .. } = inner;
            let now = context.look();
            context.set_kicked(now - wake_up);
            slots.iter_mut().for_each(|slot| slot.disarm(context, *polling));
        });
    }

    /// How many slots it has.
    pub fn slots(&self) -> usize {
        self.with(|inner| inner.slots.len())
    }
}

impl CoreSender for HandCore {
    fn core(&self) -> CoreId {
        CoreId(0)
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        self.with(|inner| inner.messages.push_back(message));
        Ok(())
    }
}

impl Placement for HandCore {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        Arc::new(self.clone())
    }
}
