//! An I/O core without a thread: seats are stepped by whoever holds the stage.

use std::sync::{Arc, Mutex, PoisonError};

use ioplane_device::{
    Budget, CoreContext, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, PollState, PollerId,
    PollerSlot,
};

/// Turns after which a poller that was told to stop, and has nothing that could keep it, is stuck.
pub const PATIENCE: u32 = 20_000;

/// Idle turns in a row after which nothing will come by itself: what is in flight in a late lane ends, as a rule, in the
/// turn after next.
const STILL: u32 = 48;

/// The seats.
#[derive(Debug, Default)]
pub struct Stage {
    seats: Mutex<Seats>,
    /// Every order is followed by turns until nothing happens any more.
    eager: bool,
}

/// The seats, and what a core lends them.
#[derive(Debug, Default)]
struct Seats {
    seats: Vec<PollerSlot>,
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

    /// Works on the seats, which are out of everybody's hands meanwhile.
    fn with<R>(&self, work: impl FnOnce(&mut Seats) -> R) -> R {
        work(&mut self.seats.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// One turn of every seat; says how much was done.
    pub fn turn(&self, budget: u32) -> u32 {
        self.with(|seats| turn(seats, budget))
    }

    /// As a core that goes to sleep and wakes up again.
    pub fn nap(&self, polling: bool) {
        self.with(|seats| {
            let Seats { seats, context } = seats;
            for seat in seats {
                seat.tidy();
                seat.arm();
                seat.disarm(context, polling);
            }
        });
    }

    /// Turns until nothing happens.
    pub fn run(&self) {
        self.with(run);
    }

    /// Whether anybody sits.
    pub fn is_empty(&self) -> bool {
        self.with(|seats| seats.seats.is_empty())
    }
}

fn turn(Seats { seats, context }: &mut Seats, budget: u32) -> u32 {
    let mut done = 0;
    context.look();
    seats.retain_mut(|seat| {
        let outcome = seat.step(context, Budget(budget));
        let parked = outcome.state() == PollState::Parked;
        done += outcome.units() + u32::from(parked);
        !parked
    });
    done
}

fn run(seats: &mut Seats) {
    let mut idle = 0;
    for _ in 0..PATIENCE {
        idle = if turn(seats, 32) == 0 { idle + 1 } else { 0 };
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

    fn send(&self, order: CoreMessage) -> Result<(), CoreEnded> {
        self.with(|seats| {
            match order {
                CoreMessage::Attach(seat) => seats.seats.push(seat),
                CoreMessage::Poller(id, tell) => {
                    if let Some(seat) = seat(&mut seats.seats, id) {
                        seat.tell(&mut seats.context, tell);
                    }
                }
            }
            if self.eager {
                run(seats);
            }
        });
        Ok(())
    }
}

fn seat(seats: &mut [PollerSlot], id: PollerId) -> Option<&mut PollerSlot> {
    seats.iter_mut().find(|seat| seat.id() == id)
}

/// The same stage for every queue.
struct Everywhere(Arc<Stage>);

impl Placement for Everywhere {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        self.0.clone()
    }
}
