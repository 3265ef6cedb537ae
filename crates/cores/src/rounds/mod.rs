//! The loop of one core.
//!
//! A seat is *awake* (stepped every turn) or *resting* (armed: its descriptors are what makes it awake again). A polled core
//! lets all of its seats rest together, when none has had work for a while; a notified core lets each rest by itself as
//! soon as it has nothing to do.
//!
//! **Why no wake-up is lost.** The driver publishes a request and then looks whether a kick is wanted; the core says that a
//! kick is wanted and then looks for requests. With a full fence between the two steps on both sides at least one of them
//! sees the other: either the core finds the request and stays awake, or the driver kicks, and the kick is a descriptor
//! that stays readable until the core has read it. The mailbox works the same way, with its flag for the request. The
//! protocol is searched exhaustively in `tests/no_lost_wake.rs`, with the store buffers of a real processor, and with each
//! fence and look taken out.

mod account;
mod rest;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_device::mutation::{Law, bound};
use ioplane_device::{Budget, Change, Order, Seat, SeatId, Step, Tell};

use crate::mailbox::Mailbox;
use crate::panel::{LEAVE, LEFT, Panel};
use crate::settings::{CoreSettings, Manners, Notify};
use crate::watch::{Watch, Watched};
use account::Account;

/// How often every awake poller is tidied.
const TIDY: Duration = Duration::from_millis(10);

/// Busy turns between two looks at the clock; idle turns always look.
const CLOCK_TURNS: u32 = 64;

/// Idle turns between two yields.
const YIELD_TURNS: u32 = 4;

/// Orders carried out between two turns. An order costs some system calls and comes when a guest's front end wants it, so what
/// one says leaves the others their turns.
const ORDERS_PER_TURN: u64 = 8;

/// One seat and what the core knows of it.
struct Chair {
    seat: Seat,
    watched: Watched,
    /// In `Rounds::awake`.
    awake: bool,
    /// Has been told whether it is polled: a fresh one is told after its first step, which begins with `resume`.
    told: bool,
    /// Has been asked to ask for kicks, and not been told otherwise since.
    armed: bool,
    /// Its last step had work.
    busy: bool,
    /// It and the kernel promised, when it was armed last, that its descriptors wake it.
    promised: bool,
    /// Rests without that promise: it is looked at every millisecond.
    restless: bool,
    /// Rests, and has not been tidied since.
    untidy: bool,
}

/// One core at work. Lives on its own thread.
pub(crate) struct Rounds {
    mailbox: Arc<Mailbox>,
    panel: Arc<Panel>,
    watch: Watch,
    budget: Budget,
    manners: Manners,
    notify: Notify,
    spin: Duration,
    chairs: Vec<Option<Chair>>,
    free: Vec<usize>,
    /// Who is stepped each turn: indexes of `chairs`.
    awake: Vec<usize>,
    /// How many rest without a promise to be woken.
    restless: usize,
    /// How many rest and have not been tidied since.
    untidy: usize,
    account: Account,
    /// When there was work last, or a reason to expect some.
    last_work: Instant,
    last_tidy: Instant,
    /// When those that rest without a promise were looked at last, on a notified core that does not sleep.
    last_nap: Instant,
    busy_run: u32,
    idle_run: u32,
    /// Queue being stepped, for the message if its poller panics.
    pub(crate) stepping: Option<u16>,
}

impl Rounds {
    pub(crate) fn new(
        mailbox: Arc<Mailbox>,
        panel: Arc<Panel>,
        watch: Watch,
        settings: &CoreSettings,
    ) -> Self {
        let now = Instant::now();
        Rounds {
            mailbox,
            panel,
            watch,
            budget: settings.budget,
            manners: settings.manners,
            notify: settings.notify,
            spin: settings.spin,
            chairs: Vec::new(),
            free: Vec::new(),
            awake: Vec::new(),
            restless: 0,
            untidy: 0,
            account: Account::new(now),
            last_work: now,
            last_tidy: now,
            last_nap: now,
            busy_run: 0,
            idle_run: 0,
            stepping: None,
        }
    }

    /// Turns until the core is told to leave and nobody sits here any more.
    pub(crate) fn run(&mut self) {
        loop {
            if self.mailbox.raised() && self.read_mail() {
                break;
            }
            if self.awake.is_empty() {
                if !self.mailbox.raised() {
                    self.sleep();
                }
                continue;
            }
            let worked = self.step_awake();
            self.account.turn(worked);
            match self.notify {
                Notify::Polled => self.after_polled(worked),
                Notify::Notified => self.after_notified(worked),
            }
        }
        self.account.look(Instant::now());
        self.panel.publish(&self.account.counts(0), Instant::now());
    }

    /// Carries out what has been posted, some of it if it is much, and looks at the panel. True if the core is to end.
    fn read_mail(&mut self) -> bool {
        self.mailbox.lower();
        if !self.read_orders(bound(Law::BoundsPolls, ORDERS_PER_TURN)) {
            // The rest after the next turn.
            self.mailbox.expect();
        }
        self.spin = self.panel.spin();
        let notify = self.panel.notify();
        if notify != self.notify {
            self.notify = notify;
            // To be polled, all must be awake; to be notified, those at rest have asked to be kicked already.
            if notify == Notify::Polled {
                self.wake_all();
            }
            for at in 0..self.awake.len() {
                self.tell_awake(self.awake[at]);
            }
        }
        self.last_work = Instant::now();
        self.panel.leave.load(Ordering::Acquire) == LEAVE && self.may_end()
    }

    /// Carries out at most so many orders; says whether those were all.
    fn read_orders(&mut self, most: u64) -> bool {
        for _ in 0..most {
            let Some(order) = self.mailbox.next() else { return true };
            self.account.orders += 1;
            match order {
                Order::Sit(seat) => self.sit(seat),
                Order::Tell(id, tell) => self.tell(id, tell),
            }
        }
        false
    }

    /// Ends only if nobody sits here or is on the way, and the owner has not changed its mind.
    fn may_end(&mut self) -> bool {
        if self.occupied() {
            return false;
        }
        self.mailbox.close();
        // Nobody sits here: whoever is told something has left.
        while !self.read_orders(ORDERS_PER_TURN) {}
        let left = !self.occupied()
            && self.panel.leave.compare_exchange(LEAVE, LEFT, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if !left {
            self.mailbox.reopen();
        }
        left
    }

    fn occupied(&self) -> bool {
        self.chairs.len() > self.free.len()
    }

    fn sit(&mut self, seat: Seat) {
        let look = seat.must_look();
        let at = self.free.pop().unwrap_or_else(|| {
            self.chairs.push(None);
            self.chairs.len() - 1
        });
        let watched = self.watch.add(seat.wakers(), at);
        self.chairs[at] = Some(Chair {
            seat,
            watched,
            awake: false,
            told: false,
            armed: false,
            busy: false,
            promised: false,
            restless: false,
            untidy: false,
        });
        if look {
            self.wake(at);
        }
    }

    fn tell(&mut self, id: SeatId, tell: Tell) {
        let Some(at) = self.chairs.iter().position(|c| c.as_ref().is_some_and(|c| c.seat.id() == id)) else {
            return;
        };
        let Some(chair) = &mut self.chairs[at] else { return };
        if matches!(tell, Tell::Apply(Change::Kick(_) | Change::Own(_), _)) {
            // The old descriptors go before the poller can close them.
            self.watch.remove(std::mem::take(&mut chair.watched));
            chair.seat.tell(tell);
            chair.watched = self.watch.add(chair.seat.wakers(), at);
        } else {
            chair.seat.tell(tell);
        }
        // Whatever it was, the poller has to poll to act on it.
        self.wake_told(at);
    }

    /// One turn of every awake seat. Says whether any had work.
    fn step_awake(&mut self) -> bool {
        let mut units = 0;
        let mut at = 0;
        while let Some(&index) = self.awake.get(at) {
            match self.step(index) {
                Step::Idle => {}
                Step::Busy(n) => units += u64::from(n.max(1)),
                Step::Vacated => {
                    // Counts as work: its owner is likely to ask for more. The last one has moved here.
                    units += 1;
                    self.vacate(at, index);
                    continue;
                }
            }
            at += 1;
        }
        self.account.units += units;
        units > 0
    }

    #[inline]
    fn step(&mut self, index: usize) -> Step {
        let Some(chair) = &mut self.chairs[index] else { return Step::Idle };
        self.stepping = Some(chair.seat.queue());
        let step = chair.seat.step(self.budget);
        self.stepping = None;
        chair.busy = matches!(step, Step::Busy(_));
        if !chair.told && step != Step::Vacated {
            chair.told = true;
            chair.seat.disarm(self.notify == Notify::Polled);
        }
        step
    }

    /// Takes away the seat `index`, which `awake[at]` names.
    fn vacate(&mut self, at: usize, index: usize) {
        self.awake.swap_remove(at);
        if let Some(chair) = self.chairs[index].take() {
            self.watch.remove(chair.watched);
            self.free.push(index);
            self.mailbox.vacated();
        }
    }

    /// Makes a resting seat awake.
    fn wake(&mut self, index: usize) {
        let Some(chair) = &mut self.chairs[index] else { return };
        if chair.awake {
            return;
        }
        chair.awake = true;
        if std::mem::take(&mut chair.restless) {
            self.restless -= 1;
        }
        if std::mem::take(&mut chair.untidy) {
            self.untidy -= 1;
        }
        self.awake.push(index);
    }

    fn wake_all(&mut self) {
        for index in 0..self.chairs.len() {
            self.wake(index);
        }
    }

    /// Tells a seat how it is looked at from now on.
    fn tell_awake(&mut self, index: usize) {
        if let Some(chair) = &mut self.chairs[index] {
            chair.told = true;
            chair.armed = false;
            chair.seat.disarm(self.notify == Notify::Polled);
        }
    }

    /// Tidies whoever has been stepped since, and publishes the meters.
    fn tidy(&mut self, now: Instant) {
        for chair in self.chairs.iter_mut().flatten() {
            if std::mem::take(&mut chair.untidy) || chair.awake {
                chair.seat.tidy();
            }
        }
        self.untidy = 0;
        self.last_tidy = now;
        self.account.share(now);
        self.panel.publish(&self.account.counts(self.awake.len()), now);
    }

    /// Looks at the clock when it is due, and does what is due by it.
    fn clock(&mut self, worked: bool) -> Option<Instant> {
        if worked {
            self.idle_run = 0;
            self.busy_run += 1;
            if self.busy_run < CLOCK_TURNS {
                return None;
            }
        } else {
            self.idle_run += 1;
        }
        // Work that ended since the last look counts as if it had ended now.
        let had_work = self.busy_run > 0;
        self.busy_run = 0;
        let now = Instant::now();
        self.account.look(now);
        if had_work {
            self.last_work = now;
        }
        if now - self.last_tidy >= TIDY {
            self.tidy(now);
        }
        Some(now)
    }

    fn after_polled(&mut self, worked: bool) {
        let Some(now) = self.clock(worked) else { return };
        if worked {
            return;
        }
        if now - self.last_work >= self.spin {
            self.rest_all();
        } else if self.manners != Manners::Dedicated && self.idle_run.is_multiple_of(YIELD_TURNS) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}
