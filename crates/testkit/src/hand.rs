//! A core that a test turns by hand: every poll happens when the test says so, on the test's own thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use ioplane_device::{
    Armed, Budget, CoreContext, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, PollState, PollerSlot,
};

/// A core without a thread. Orders wait until the next [`HandCore::turn`].
#[derive(Debug, Clone, Default)]
pub struct HandCore {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug, Default)]
struct Inner {
    orders: VecDeque<CoreMessage>,
    slots: Vec<PollerSlot>,
    context: CoreContext,
    polling: bool,
}

impl HandCore {
    /// A core that polls: slots are told so when they are attached.
    pub fn polling() -> Self {
        let core = HandCore::default();
        core.with(|inner| inner.polling = true);
        core
    }

    fn with<R>(&self, work: impl FnOnce(&mut Inner) -> R) -> R {
        work(&mut self.inner.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Reads the mail and steps every slot once; says how many units of work were done.
    pub fn turn(&self) -> u32 {
        self.turn_with(Budget(64))
    }

    /// As [`HandCore::turn`], with that much budget for each slot.
    pub fn turn_with(&self, budget: Budget) -> u32 {
        self.with(|inner| {
            let Inner { orders, slots, context, polling } = inner;
            context.look();
            while let Some(order) = orders.pop_front() {
                match order {
                    CoreMessage::Attach(mut slot) => {
                        slot.disarm(context, *polling);
                        slots.push(slot);
                    }
                    CoreMessage::Poller(id, tell) => {
                        if let Some(slot) = slots.iter_mut().find(|slot| slot.id() == id) {
                            slot.tell(context, tell);
                        }
                    }
                }
            }
            let mut done = 0;
            slots.retain_mut(|slot| {
                context.look();
                let outcome = slot.step(context, budget);
                done += outcome.units();
                outcome.state() != PollState::Parked
            });
            slots.iter_mut().for_each(PollerSlot::tidy);
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
        self.with(|inner| {
            let Inner { slots, context, polling, .. } = inner;
            context.look();
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

    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded> {
        self.with(|inner| inner.orders.push_back(order));
        Ok(())
    }
}

impl Placement for HandCore {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        Arc::new(self.clone())
    }
}
