//! An I/O core without a thread: slots are stepped by whoever holds the stage.

use std::sync::{Arc, Mutex, PoisonError};

use ioplane_device::{
    Budget, CoreContext, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, PollState, PollerId,
    PollerSlot,
};

/// Turns after which a poller that was told to stop, and has nothing that could keep it, is stuck.
pub const PATIENCE: u32 = 20_000;

/// Idle turns in a row after which nothing will come by itself: what is in flight in a late channel ends, as a rule, in the
/// turn after next.
const STILL: u32 = 48;

/// The slots.
#[derive(Debug, Default)]
pub struct Stage {
    slots: Mutex<Slots>,
    /// Every order is followed by turns until nothing happens any more.
    eager: bool,
}

/// The slots, and what a core lends them.
#[derive(Debug, Default)]
struct Slots {
    slots: Vec<PollerSlot>,
    context: CoreContext,
}

impl Stage {
    /// A core that turns only when told.
    pub fn patient() -> Arc<Self> {
        Arc::new(Stage::default())
    }

    /// A core that turns by itself after every order.
    pub fn eager() -> Arc<Self> {
        Arc::new(Stage { eager: true, ..Stage::default() })
    }

    /// It as a placement of every queue.
    pub fn placement(self: &Arc<Self>) -> Arc<dyn Placement> {
        Arc::new(Everywhere(self.clone()))
    }

    /// Works on the slots, which are out of everybody's hands meanwhile.
    fn with<R>(&self, work: impl FnOnce(&mut Slots) -> R) -> R {
        work(&mut self.slots.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One turn of every slot; says how much was done.
    pub fn turn(&self, budget: u32) -> u32 {
        self.with(|slots| turn(slots, budget))
    }

    /// As a core that goes to sleep and wakes up again.
    pub fn nap(&self, polling: bool) {
        self.with(|slots| {
            let Slots { slots, context } = slots;
            for slot in slots {
                slot.tidy();
                slot.arm();
                slot.disarm(context, polling);
            }
        });
    }

    /// Turns until nothing happens.
    pub fn run(&self) {
        self.with(run);
    }

    /// Whether no poller is attached.
    pub fn is_empty(&self) -> bool {
        self.with(|slots| slots.slots.is_empty())
    }
}

fn turn(Slots { slots, context }: &mut Slots, budget: u32) -> u32 {
    let mut done = 0;
    context.look();
    slots.retain_mut(|slot| {
        let outcome = slot.step(context, Budget::of(budget));
        let parked = outcome.state() == PollState::Parked;
        done += outcome.units() + u32::from(parked);
        !parked
    });
    done
}

fn run(slots: &mut Slots) {
    let mut idle = 0;
    for _ in 0..PATIENCE {
        idle = if turn(slots, 32) == 0 { idle + 1 } else { 0 };
        if idle == STILL {
            return;
        }
    }
    panic!("a poller was busy for {PATIENCE} turns in a row");
}

impl CoreSender for Stage {
    fn core(&self) -> CoreId {
        CoreId(0)
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        self.with(|slots| {
            match message {
                CoreMessage::Attach(slot) => slots.slots.push(slot),
                CoreMessage::Poller(id, command) => {
                    if let Some(slot) = slot(&mut slots.slots, id) {
                        slot.handle(&mut slots.context, command);
                    }
                }
                // All queues stand on this one core: nothing of a group stands elsewhere.
                CoreMessage::Group(_) | CoreMessage::Device(_) => {}
            }
            if self.eager {
                run(slots);
            }
        });
        Ok(())
    }
}

fn slot(slots: &mut [PollerSlot], id: PollerId) -> Option<&mut PollerSlot> {
    slots.iter_mut().find(|slot| slot.id() == id)
}

/// The same stage for every queue.
struct Everywhere(Arc<Stage>);

impl Placement for Everywhere {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        self.0.clone()
    }
}
