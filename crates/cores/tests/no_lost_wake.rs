//! No wake-up is lost: the arm, fence, look, rest protocol of a slot against a driver, searched exhaustively; with a core that sleeps
//! once the slot rests, with one that stays awake for a neighbour and asks the kernel now and then, and with one that sleeps for a bounded
//! time, without having asked for a kick, while what it has taken is with a disk (before a longer sleep it arms and looks, as a slot that rests
//! does); and with a limit, which holds requests back that nobody
//! kicks for.
//!
//! The model has what makes the protocol hard: each side has a store buffer, as processors do, so that a store may become
//! visible long after the loads that follow it. Every interleaving of instructions and of buffers draining is visited. A
//! wake-up is lost in a state where the core sleeps, nobody will wake it, and a request or a completion waits.
//!
//! The same search finds the loss at once when a fence or the last look is taken out, so it is not blind.
//!
//! The mailbox is also searched for a core that never comes to rest: a state from which no way leads to sleep although all has
//! been done, because an eventfd that is never emptied wakes the core again and again.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::Hash;

trait Model: Clone + Eq + Hash {
    /// Every state that one step of anybody leads to.
    fn steps(&self) -> Vec<Self>;
    /// Asleep with work waiting; only asked where no step is left.
    fn lost(&self) -> bool;
}

/// Visits every state; says how many there are and whether any is lost.
fn search<M: Model>(start: M) -> (usize, bool) {
    let mut seen = HashSet::from([start.clone()]);
    let mut left = vec![start];
    let mut lost = false;
    while let Some(state) = left.pop() {
        let next = state.steps();
        lost |= next.is_empty() && state.lost();
        left.extend(next.into_iter().filter(|n| seen.insert(n.clone())));
        assert!(seen.len() < 2_000_000, "the model does not end");
    }
    (seen.len(), lost)
}

/// Visits every state; says whether there is one from which no way leads to an end.
fn spins<M: Model>(start: M) -> bool {
    let mut before: HashMap<M, Vec<M>> = HashMap::from([(start.clone(), Vec::new())]);
    let (mut left, mut ends) = (vec![start], Vec::new());
    while let Some(state) = left.pop() {
        let next = state.steps();
        if next.is_empty() {
            ends.push(state.clone());
        }
        for next in next {
            let known = before.contains_key(&next);
            before.entry(next.clone()).or_default().push(state.clone());
            if !known {
                left.push(next);
            }
        }
    }
    let mut ending: HashSet<M> = ends.iter().cloned().collect();
    while let Some(state) = ends.pop() {
        ends.extend(before[&state].iter().filter(|b| ending.insert((*b).clone())).cloned());
    }
    ending.len() < before.len()
}

/// Variables of shared memory.
const AVAIL: usize = 0;
/// NO_NOTIFY inverted (1: kick me), or the index of avail_event.
const WANT: usize = 1;

/// Shared memory seen through two store buffers.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
struct Memory {
    cells: [u8; 2],
    buffers: [VecDeque<(usize, u8)>; 2],
}

impl Memory {
    fn store(&mut self, who: usize, cell: usize, value: u8) {
        self.buffers[who].push_back((cell, value));
    }

    fn load(&self, who: usize, cell: usize) -> u8 {
        self.buffers[who].iter().rev().find(|(c, _)| *c == cell).map_or(self.cells[cell], |(_, v)| *v)
    }

    /// A fence is passed when the buffer is empty.
    fn drained(&self, who: usize) -> bool {
        self.buffers[who].is_empty()
    }

    fn drain_one(&mut self, who: usize) -> bool {
        let Some((cell, value)) = self.buffers[who].pop_front() else { return false };
        self.cells[cell] = value;
        true
    }
}

/// How the driver is told whether kicks are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Suppression {
    /// A flag (NO_NOTIFY).
    Flag,
    /// An index to pass (EVENT_IDX): while it polls the core does not touch it.
    Event,
    /// The same, and a core that polls again moves it to one that the driver has passed.
    WithdrawnEvent,
}

/// What is taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Without {
    Nothing,
    CoreFence,
    DriverFence,
    LastLook,
    /// The question, while a neighbour keeps the core awake, whether a resting slot was woken.
    Glance,
    /// The timer of slots that nothing is sure to wake.
    Timer,
    /// The end of the time for which the core sleeps while a slot waits for completions.
    Timeout,
    /// The descriptor that tells of completions.
    Completion,
    /// The timer of a slot whose requests a limit holds back.
    LimitTimer,
    /// The state of such a slot: it is armed as an idle one is, for a kick that was sent before, or for nobody.
    Held,
}

/// What the core has beside this slot, and the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Scene {
    /// Nothing: it sleeps once the slot rests.
    Alone,
    /// A neighbour that always has work.
    Busy,
    /// A neighbour that always has work, and a driver that has no kick.
    Kickless,
    /// A disk, which has every request that was taken until it ends it, whenever it likes.
    Disk,
    /// A disk that never ends anything.
    SilentDisk,
    /// A limit: each request needs a token, and there is one from time to time.
    Limit,
    /// A limit, and a disk.
    LimitedDisk,
}

const REQUESTS: u8 = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Driver {
    Publish,
    Fence,
    Check,
    Done,
}

/// The slot, as the core's thread sees it. (Parked is never stepped: it needs no wake-up.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Slot {
    /// Stepped for the first time, and told whether it is polled.
    Fresh,
    /// Stepped while there is work, and without work until its time is up.
    Polled,
    /// Was stepped and has nothing to do before a completion. The core is in epoll_wait, for a bounded time.
    Waiting,
    /// `Poller::arm`.
    Arm,
    Fence,
    /// Stepped once more.
    Look,
    /// At rest. The core is in epoll_wait, or asks epoll now and then.
    Armed,
    /// A limit holds requests back: at rest, and stepped by a timer when there is a token, or when the disk has ended something.
    Held,
    /// At rest, and stepped by a timer.
    Unwakeable,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Ring {
    how: Suppression,
    without: Without,
    scene: Scene,
    memory: Memory,
    driver: Driver,
    published: u8,
    slot: Slot,
    taken: u8,
    /// Of the requests taken: how many the disk has ended, and how many of those the core has seen. The descriptor of
    /// completions is readable while these differ.
    ended: u8,
    reaped: u8,
    /// The eventfd: level-triggered, stays until it is read.
    kick: bool,
    /// How often a timer of its own (`wake_at`) may still have it stepped while it rests.
    timers: u8,
    /// Requests that the limit lets pass now, one at most.
    tokens: u8,
}

const CORE: usize = 0;
const DRIVER: usize = 1;

impl Ring {
    fn new(how: Suppression, without: Without, scene: Scene) -> Self {
        let mut memory = Memory::default();
        // As a driver finds it: kicks are wanted, from the first request on.
        memory.cells[WANT] = if how == Suppression::Flag { 1 } else { 0 };
        Ring {
            how,
            without,
            scene,
            memory,
            driver: Driver::Publish,
            published: 0,
            slot: Slot::Fresh,
            taken: 0,
            ended: 0,
            reaped: 0,
            kick: false,
            timers: 1,
            tokens: 0,
        }
    }

    fn wanted(&self) -> bool {
        let want = self.memory.load(DRIVER, WANT);
        match self.how {
            Suppression::Flag => want == 1,
            // vring_need_event(event, new, old) of the specification, one request at a time.
            Suppression::Event | Suppression::WithdrawnEvent => {
                let (new, old) = (self.published, self.published - 1);
                new.wrapping_sub(want).wrapping_sub(1) < new.wrapping_sub(old)
            }
        }
    }

    fn disarm(&mut self) {
        self.kick = false;
        match self.how {
            Suppression::Flag => self.memory.store(CORE, WANT, 0),
            Suppression::Event => {}
            Suppression::WithdrawnEvent => self.memory.store(CORE, WANT, self.taken.wrapping_sub(1)),
        }
    }

    fn step_driver(&self) -> Option<Self> {
        let mut next = self.clone();
        match self.driver {
            Driver::Publish => {
                next.published += 1;
                next.memory.store(DRIVER, AVAIL, next.published);
                next.driver =
                    if self.without == Without::DriverFence { Driver::Check } else { Driver::Fence };
            }
            Driver::Fence if self.memory.drained(DRIVER) => next.driver = Driver::Check,
            Driver::Fence => return None,
            Driver::Check => {
                next.kick |= self.wanted() && self.scene != Scene::Kickless;
                next.driver = if self.published < REQUESTS { Driver::Publish } else { Driver::Done };
            }
            Driver::Done => return None,
        }
        Some(next)
    }

    /// One poll: takes what is there, and sees what the disk has ended. Whether there was anything.
    fn poll(&mut self) -> bool {
        let before = (self.taken, self.reaped);
        let there = self.memory.load(CORE, AVAIL);
        if self.has_limit() {
            let passes = (there - self.taken).min(self.tokens);
            self.tokens -= passes;
            (self.taken, self.reaped) = (self.taken + passes, self.ended);
        } else {
            (self.taken, self.reaped) = (there, self.ended);
        }
        before != (self.taken, self.reaped)
    }

    fn has_limit(&self) -> bool {
        matches!(self.scene, Scene::Limit | Scene::LimitedDisk)
    }

    /// The poll before has left something that a limit holds back.
    fn limited(&self) -> bool {
        self.has_limit() && self.memory.load(CORE, AVAIL) != self.taken
    }

    /// Such a slot rests without being armed.
    fn hold(&mut self) {
        self.disarm();
        self.slot = Slot::Held;
    }

    fn step_core(&self) -> Option<Self> {
        let mut next = self.clone();
        match self.slot {
            Slot::Fresh => {
                next.poll();
                next.disarm();
                next.slot = Slot::Polled;
            }
            Slot::Polled if next.poll() => {}
            Slot::Polled if next.limited() && self.without != Without::Held => next.hold(),
            Slot::Polled => next.slot = Slot::Arm,
            Slot::Waiting if self.wakes() => {
                // A kick that was not asked for is lowered: the ring is looked at anyway.
                next.kick = false;
                next.slot = Slot::Polled;
            }
            Slot::Waiting if self.without != Without::Timeout => next.slot = Slot::Polled,
            Slot::Waiting => return None,
            Slot::Arm => {
                let want = if self.how == Suppression::Flag { 1 } else { self.taken };
                next.memory.store(CORE, WANT, want);
                next.slot = match self.without {
                    Without::CoreFence => Slot::Look,
                    Without::LastLook => self.rests(),
                    _ => Slot::Fence,
                };
            }
            Slot::Fence if self.memory.drained(CORE) => next.slot = Slot::Look,
            Slot::Fence => return None,
            Slot::Look if next.poll() => next.wake(),
            Slot::Look if next.limited() && self.without != Without::Held => next.hold(),
            Slot::Look => next.slot = self.rests(),
            Slot::Armed if self.scene == Scene::Busy && self.without == Without::Glance => return None,
            // Its descriptors are read first, its ring in the next turn.
            Slot::Armed if self.wakes() => next.wake(),
            Slot::Armed => return None,
            // A completion, not a kick.
            Slot::Held if self.ended != self.reaped && self.without != Without::Completion => next.wake(),
            // The timer. With a token there is work, and without what it was held back for it is polled as others are.
            Slot::Held if self.tokens > 0 && self.without != Without::LimitTimer => {
                next.poll();
                next.wake();
            }
            Slot::Held => return None,
            Slot::Unwakeable if self.without != Without::Timer && next.poll() => next.wake(),
            Slot::Unwakeable => return None,
        }
        Some(next)
    }

    fn rests(&self) -> Slot {
        if self.scene == Scene::Kickless { Slot::Unwakeable } else { Slot::Armed }
    }

    /// Whether a descriptor is readable that the core waits on.
    fn wakes(&self) -> bool {
        self.kick || (self.ended != self.reaped && self.without != Without::Completion)
    }

    /// It is polled again.
    fn wake(&mut self) {
        self.disarm();
        self.slot = Slot::Polled;
    }

    fn has_disk(&self) -> bool {
        matches!(self.scene, Scene::Disk | Scene::SilentDisk | Scene::LimitedDisk)
    }

    /// A poll has found nothing, and something is with the disk: the core sleeps, without another look.
    fn step_waiting(&self) -> Option<Self> {
        let mut next = self.clone();
        let idle = self.slot == Slot::Polled && !next.poll() && !next.limited();
        if !idle || !self.has_disk() || self.taken == self.reaped {
            return None;
        }
        next.slot = Slot::Waiting;
        Some(next)
    }

    /// The disk ends a request.
    fn step_disk(&self) -> Option<Self> {
        let ends = matches!(self.scene, Scene::Disk | Scene::LimitedDisk) && self.ended < self.taken;
        ends.then(|| Ring { ended: self.ended + 1, ..self.clone() })
    }

    /// Time goes by, and the limit lets one request more pass.
    fn step_clock(&self) -> Option<Self> {
        let refills = self.has_limit() && self.tokens == 0 && self.taken < REQUESTS;
        refills.then(|| Ring { tokens: 1, ..self.clone() })
    }

    /// A timer of its own has it stepped while it rests. Without work it rests on, as armed as it was.
    fn step_timer(&self) -> Option<Self> {
        let mut next = self.clone();
        next.timers = self.timers.checked_sub(1)?;
        match self.slot {
            Slot::Armed | Slot::Unwakeable if next.poll() => next.wake(),
            Slot::Armed | Slot::Unwakeable if next.limited() && self.without != Without::Held => next.hold(),
            Slot::Armed | Slot::Unwakeable => {}
            _ => return None,
        }
        Some(next)
    }
}

impl Model for Ring {
    fn steps(&self) -> Vec<Self> {
        let steps = [
            self.step_driver(),
            self.step_core(),
            self.step_waiting(),
            self.step_disk(),
            self.step_clock(),
            self.step_timer(),
        ];
        let mut next: Vec<Self> = steps.into_iter().flatten().collect();
        for who in [CORE, DRIVER] {
            let mut drained = self.clone();
            if drained.memory.drain_one(who) {
                next.push(drained);
            }
        }
        next
    }

    fn lost(&self) -> bool {
        self.taken != REQUESTS || self.ended != self.reaped
    }
}

const SUPPRESSIONS: [Suppression; 3] = [Suppression::Flag, Suppression::Event, Suppression::WithdrawnEvent];

#[test]
fn no_kick_and_no_completion_is_lost() {
    for how in SUPPRESSIONS {
        for scene in [
            Scene::Alone,
            Scene::Busy,
            Scene::Kickless,
            Scene::Disk,
            Scene::SilentDisk,
            Scene::Limit,
            Scene::LimitedDisk,
        ] {
            let (states, lost) = search(Ring::new(how, Without::Nothing, scene));
            assert!(!lost, "{how:?}, {scene:?}: the slot rests while a request or a completion waits");
            assert!(states > 100, "{how:?}, {scene:?}: only {states} states");
        }
    }
}

#[test]
fn a_core_that_waits_for_a_disk_comes_to_rest() {
    for how in SUPPRESSIONS {
        for scene in [Scene::Disk, Scene::SilentDisk, Scene::Limit, Scene::LimitedDisk] {
            assert!(!spins(Ring::new(how, Without::Nothing, scene)), "{how:?}, {scene:?}: wakes for ever");
        }
    }
}

#[test]
fn the_search_sees_what_is_missing() {
    use Scene::*;
    let missing = [
        (Without::CoreFence, vec![Alone, Busy, Disk, SilentDisk, Limit]),
        (Without::DriverFence, vec![Alone, Busy, Disk, SilentDisk, Limit]),
        (Without::LastLook, vec![Alone, Busy, Disk, SilentDisk, Limit]),
        (Without::Glance, vec![Busy]),
        (Without::Timer, vec![Kickless]),
        (Without::Timeout, vec![SilentDisk]),
        (Without::Completion, vec![Disk, LimitedDisk]),
        (Without::LimitTimer, vec![Limit, LimitedDisk]),
        (Without::Held, vec![Limit, LimitedDisk]),
    ];
    for how in SUPPRESSIONS {
        for (without, scenes) in &missing {
            for scene in scenes {
                let lost = search(Ring::new(how, *without, *scene)).1;
                assert!(lost, "{how:?}, {scene:?} without {without:?} went unnoticed");
            }
        }
    }
}

/// The mailbox against one sender. The queue and the eventfd are read-modify-write and system calls, visible at once; the
/// flag is a plain store, which may come late.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Mailbox {
    wrong: Wrong,
    memory: Memory,
    pushed: u8,
    event: bool,
    sender: u8,
    popped: u8,
    core: u8,
}

const FLAG: usize = 0;

/// What the core does wrongly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Wrong {
    Nothing,
    /// Pops before it clears the flag and empties the eventfd.
    PopsFirst,
    /// Woken by the eventfd, looks at the flag only: an eventfd written after the flag was cleared stays readable.
    FlagOnly,
    /// Woken by the eventfd, empties it, and then looks at the flag only.
    EmptiesOnly,
}

impl Mailbox {
    fn new(wrong: Wrong) -> Self {
        Mailbox { wrong, memory: Memory::default(), pushed: 0, event: false, sender: 0, popped: 0, core: 0 }
    }

    fn step_sender(&self) -> Option<Self> {
        let mut next = self.clone();
        match self.sender % 3 {
            _ if self.sender >= 3 * REQUESTS => return None,
            0 => next.pushed += 1,
            1 => next.memory.store(DRIVER, FLAG, 1),
            _ => next.event = true,
        }
        next.sender += 1;
        Some(next)
    }

    fn step_core(&self) -> Option<Self> {
        let mut next = self.clone();
        match self.core {
            // Mailbox::pending, the last look before sleeping.
            0 => next.core = if self.memory.load(CORE, FLAG) == 1 { 1 } else { 4 },
            1 if self.wrong == Wrong::PopsFirst => (next.popped, next.core) = (self.pushed, 2),
            1 => next.core = 2,
            // Mailbox::clear: an exchange, then a read of the eventfd.
            2 => (next.memory.cells[FLAG], next.event, next.core) = (0, false, 3),
            3 if self.wrong == Wrong::PopsFirst => next.core = 0,
            3 => (next.popped, next.core) = (self.pushed, 0),
            // In epoll_wait. The eventfd means a message, whether or not the flag can be seen yet.
            4 if self.event => match self.wrong {
                Wrong::Nothing | Wrong::PopsFirst => next.core = 1,
                Wrong::FlagOnly => next.core = 5,
                Wrong::EmptiesOnly => (next.event, next.core) = (false, 5),
            },
            4 => return None,
            _ if self.memory.load(CORE, FLAG) == 1 => next.core = 1,
            // Awake without a message: makes a turn, then sleeps again.
            _ => next.core = 0,
        }
        Some(next)
    }
}

impl Model for Mailbox {
    fn steps(&self) -> Vec<Self> {
        let mut next: Vec<Self> = [self.step_sender(), self.step_core()].into_iter().flatten().collect();
        let mut drained = self.clone();
        if drained.memory.drain_one(DRIVER) {
            next.push(drained);
        }
        next
    }

    fn lost(&self) -> bool {
        self.popped != REQUESTS
    }
}

#[test]
fn no_message_is_lost() {
    assert!(!search(Mailbox::new(Wrong::Nothing)).1, "the core sleeps on a message");
    assert!(search(Mailbox::new(Wrong::PopsFirst)).1, "popping too early went unnoticed");
    assert!(search(Mailbox::new(Wrong::EmptiesOnly)).1, "a flag that comes late went unnoticed");
}

#[test]
fn hole_08_a_core_without_messages_comes_to_rest() {
    assert!(!spins(Mailbox::new(Wrong::Nothing)), "the eventfd keeps the core awake for ever");
    assert!(spins(Mailbox::new(Wrong::FlagOnly)), "an eventfd that is never emptied went unnoticed");
}
