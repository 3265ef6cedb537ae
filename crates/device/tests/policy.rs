//! The policy of quiescence over every course that a device can take: in time or late, forced or not, refusing one step or several.
//! Whatever happens, the device is in its owner's hands, and every request of its guest is answered, once and in order.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use ioplane_device::*;
use ioplane_memory::GuestMap;
use ioplane_testkit::hand::HandCore;
use ioplane_testkit::toy::ring::{Wires, registers};
use ioplane_testkit::toy::{RingDriver, ToyRing, mix};

const RINGS_AT: u64 = 0x4000;
const DEADLINE: Duration = Duration::from_millis(10);
const FORCED: Duration = Duration::from_millis(20);
/// Longer than any phase.
const LONG: Duration = Duration::from_secs(60);

/// What a device is told to refuse.
#[derive(Debug, Default)]
struct Refusals {
    /// So many times, a queue is not made.
    activate: AtomicU32,
    /// A forced stop fails.
    suspend: AtomicBool,
    /// Its registers say that it is busy.
    busy: AtomicBool,
    /// A forced stop does not end that.
    busy_for_good: AtomicBool,
    suspends: AtomicU32,
}

/// Two rings, and hardware that may be busy beside them.
struct Balky {
    ring: ToyRing,
    refusals: Arc<Refusals>,
}

fn no(what: &str) -> DeviceError {
    DeviceError::Below(what.into())
}

impl Device for Balky {
    fn info(&self) -> &DeviceInfo {
        self.ring.info()
    }

    fn access(&mut self, at: RegisterAddress, op: Access<'_>) -> Effect {
        self.ring.access(at, op)
    }

    fn active(&self) -> QueueSet {
        self.ring.active()
    }

    fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
        if self.refusals.activate.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok() {
            return Err(no("no queue"));
        }
        self.ring.activate(activation)
    }

    fn deactivate(&mut self, parked: Parked) {
        self.ring.deactivate(parked);
    }

    fn quiescence(&mut self) -> Quiescence {
        if self.refusals.busy.load(SeqCst) {
            Quiescence::Busy("the hardware works")
        } else {
            Quiescence::Quiescent
        }
    }

    fn suspend(&mut self) -> Result<(), DeviceError> {
        self.refusals.suspends.fetch_add(1, SeqCst);
        if self.refusals.suspend.load(SeqCst) {
            return Err(no("no stop"));
        }
        if !self.refusals.busy_for_good.load(SeqCst) {
            self.refusals.busy.store(false, SeqCst);
        }
        Ok(())
    }

    fn save(&self, proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
        self.ring.save(proof)
    }

    fn load(&mut self, proof: &QuiescenceProof, state: &SavedState) -> Result<(), DeviceError> {
        self.ring.load(proof, state)
    }

    fn reset(&mut self, proof: &QuiescenceProof) {
        self.ring.reset(proof);
    }

    fn apply(&mut self, queues: &QueueSet, change: &Change) {
        self.ring.apply(queues, change);
    }
}

/// A core that makes a turn whenever it gets a message, on the sender's thread.
#[derive(Debug, Clone, Default)]
struct PromptCore(HandCore);

impl CoreSender for PromptCore {
    fn core(&self) -> CoreId {
        CoreId(0)
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        self.0.send(message)?;
        self.0.turn();
        Ok(())
    }
}

impl Placement for PromptCore {
    fn place(&self, _device: &str, _queue: u16) -> Arc<dyn CoreSender> {
        Arc::new(self.clone())
    }
}

/// A device with its guest and its owner.
struct Rig {
    device: Lifecycle<Balky>,
    core: PromptCore,
    wires: Arc<Wires>,
    refusals: Arc<Refusals>,
    drivers: [RingDriver; 2],
    sums: [u64; 2],
    missed: Vec<String>,
    /// So many refused resumes are mended.
    mends: usize,
    held: bool,
}

impl DeviceOwner for Rig {
    type Device = Balky;

    fn parts(&mut self) -> (&mut Lifecycle<Balky>, &dyn Placement) {
        (&mut self.device, &self.core)
    }

    fn is_held(&self) -> bool {
        self.held
    }

    fn missed(&mut self, reason: &str) {
        self.missed.push(reason.to_owned());
    }

    fn resume_refused(&mut self, _error: &DeviceError, round: usize) -> bool {
        round < self.mends
    }
}

impl Rig {
    /// It runs with both queues, and one request of each has been taken and not answered.
    fn at_work() -> Self {
        let memory = Arc::new(GuestMap::anonymous(0x20000).expect("memory"));
        let (wires, refusals, core) = (Wires::new(), Arc::new(Refusals::default()), PromptCore::default());
        let balky = Balky { ring: ToyRing::new(memory.clone(), wires.clone()), refusals: refusals.clone() };
        let running = Quiescent::new(balky).resume(&core).expect("it starts");
        let drivers = [0, 1].map(|queue| RingDriver::new(&memory, &wires, RINGS_AT, queue));
        let device = Lifecycle::from(running);
        let mut rig = Rig {
            device,
            core,
            wires,
            refusals,
            drivers,
            sums: [0; 2],
            missed: Vec::new(),
            mends: 0,
            held: false,
        };
        rig.write(registers::RINGS, RINGS_AT);
        rig.write(registers::ENABLE, 0b11);
        rig.wires.gate.shut();
        for driver in &mut rig.drivers {
            driver.publish(7);
            driver.kick();
        }
        rig.core.0.turn();
        rig
    }

    fn write(&mut self, register: u64, value: u64) {
        let (at, bytes) = (RegisterAddress::Bar(0, register), value.to_le_bytes());
        let done = self.device.access(at, Access::Write(&bytes), &self.core, LONG);
        done.expect("it is served").expect("it is done");
    }

    /// What was taken ends.
    fn answer(&self) {
        self.wires.gate.open();
        self.core.0.turn_until_idle(100);
    }

    /// Every request is answered as it is where nobody stops anything.
    #[track_caller]
    fn whole(&mut self) {
        assert_eq!(self.device.presence(), Presence::Running);
        assert_eq!(self.device.running().expect("it runs").queues(), QueueSet::from([0, 1]));
        self.answer();
        for (driver, sum) in self.drivers.iter_mut().zip(&mut self.sums) {
            driver.publish(9);
            driver.kick();
            self.core.0.turn_until_idle(100);
            for request in [7, 9] {
                *sum = mix(*sum, request);
                assert_eq!(driver.answer(), Some(*sum));
            }
        }
    }
}

fn rig_policy(from: Instant, on_miss: OnMiss) -> QuiescePolicy {
    QuiescePolicy { deadline: from + DEADLINE, on_miss }
}

fn poll(attempt: &mut QuiesceAttempt, rig: &mut Rig, now: Instant) -> Poll<Result<Quiesced, QuiesceError>> {
    attempt.poll(rig, now, &mut Context::from_waker(Waker::noop()))
}

#[test]
fn done_in_time() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    let mut attempt = QuiesceAttempt::begin(&mut rig, rig_policy(now, OnMiss::Undrain)).expect("it runs");
    assert!(poll(&mut attempt, &mut rig, now).is_pending());
    assert_eq!(attempt.wake_at(), Some(now + DEADLINE));
    rig.answer();
    let Poll::Ready(Ok(quiesced)) = poll(&mut attempt, &mut rig, now) else { panic!("it is quiescent") };
    assert_eq!(quiesced, Quiesced { stop: Stop::Drained, missed: None });
    assert_eq!(work_and_resume(&mut rig, |quiescent| quiescent.stop()).expect("resumed"), Stop::Drained);
    rig.whole();
}

#[test]
fn missed_then_undrained() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    let policy = rig_policy(now, OnMiss::Undrain);
    let mut attempt = QuiesceAttempt::begin(&mut rig, policy).expect("it runs");
    assert!(poll(&mut attempt, &mut rig, now).is_pending());
    let Poll::Ready(Err(QuiesceError::Missed { reason })) = poll(&mut attempt, &mut rig, now + DEADLINE)
    else {
        panic!("it is late")
    };
    assert_eq!(reason, "queues {0, 1} still have requests in flight");
    assert_eq!((rig.missed.len(), rig.refusals.suspends.load(SeqCst)), (1, 0));
    rig.whole();
}

#[test]
fn missed_then_suspended() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    let policy = rig_policy(now, OnMiss::Suspend { timeout: FORCED });
    let mut attempt = QuiesceAttempt::begin(&mut rig, policy).expect("it runs");
    assert!(poll(&mut attempt, &mut rig, now).is_pending());
    let Poll::Ready(Ok(quiesced)) = poll(&mut attempt, &mut rig, now + DEADLINE) else {
        panic!("it is forced")
    };
    assert_eq!(quiesced.stop, Stop::Suspended);
    assert_eq!(quiesced.missed.as_deref(), Some("queues {0, 1} still have requests in flight"));
    resume(&mut rig).expect("resumed");
    rig.whole();
}

#[test]
fn forced_in_vain() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    rig.refusals.busy.store(true, SeqCst);
    rig.refusals.busy_for_good.store(true, SeqCst);
    let policy = rig_policy(now, OnMiss::Suspend { timeout: FORCED });
    let mut attempt = QuiesceAttempt::begin(&mut rig, policy).expect("it runs");
    let late = now + DEADLINE;
    assert!(poll(&mut attempt, &mut rig, late).is_pending());
    assert_eq!(attempt.wake_at(), Some(late + FORCED));
    let Poll::Ready(Err(QuiesceError::Missed { reason })) = poll(&mut attempt, &mut rig, late + FORCED)
    else {
        panic!("it is late")
    };
    assert_eq!(reason, "the hardware works; by force: the hardware works");
    rig.whole();
    // Where it has to be, it is waited for.
    let mut attempt = QuiesceAttempt::begin(&mut rig, rig_policy(now, OnMiss::Insist)).expect("it runs");
    assert!(poll(&mut attempt, &mut rig, late + LONG).is_pending());
    assert_eq!(attempt.wake_at(), None);
    rig.refusals.busy.store(false, SeqCst);
    assert!(matches!(poll(&mut attempt, &mut rig, late + LONG), Poll::Ready(Ok(_))));
    resume(&mut rig).expect("resumed");
    assert_eq!(rig.device.presence(), Presence::Running);
}

#[test]
fn undrain_refused() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    rig.refusals.activate.store(1, SeqCst);
    let policy = rig_policy(now, OnMiss::Undrain);
    let mut attempt = QuiesceAttempt::begin(&mut rig, policy).expect("it runs");
    // Suspended instead, and resumed: it runs, and the work has not been done.
    let outcome = poll(&mut attempt, &mut rig, now + DEADLINE);
    assert!(matches!(outcome, Poll::Ready(Err(QuiesceError::Missed { .. }))), "{outcome:?}");
    rig.whole();
}

#[test]
fn undrain_refused_and_resume_too() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    rig.refusals.activate.store(2, SeqCst);
    let mut attempt = QuiesceAttempt::begin(&mut rig, rig_policy(now, OnMiss::Undrain)).expect("it runs");
    let outcome = poll(&mut attempt, &mut rig, now + DEADLINE);
    assert!(matches!(outcome, Poll::Ready(Err(QuiesceError::NotUndrained { .. }))), "{outcome:?}");
    assert_eq!(rig.device.presence(), Presence::Held, "in its owner's hands");
    resume(&mut rig).expect("now it does");
    rig.whole();
}

#[test]
fn work_fails() {
    let mut rig = Rig::at_work();
    rig.answer();
    let policy = rig_policy(Instant::now(), OnMiss::Undrain);
    let outcome = at_quiescence_blocking(&mut rig, policy, |_| Err::<(), _>("no space"));
    assert_eq!(outcome.expect("it resumes all the same"), Err("no space"));
    rig.whole();
}

#[test]
fn resume_refused() {
    let mut rig = Rig::at_work();
    rig.answer();
    let policy = rig_policy(Instant::now(), OnMiss::Undrain);
    rig.refusals.activate.store(1, SeqCst);
    let outcome = at_quiescence_blocking(&mut rig, policy, |_| ());
    assert!(matches!(outcome, Err(QuiesceError::NotResumed(_))), "{outcome:?}");
    assert_eq!(rig.device.presence(), Presence::Held, "in its owner's hands");
    // Its owner changes what is in the way, as often as it takes.
    (rig.mends, rig.held) = (2, false);
    rig.refusals.activate.store(2, SeqCst);
    let policy = rig_policy(Instant::now(), OnMiss::Undrain);
    at_quiescence_blocking(&mut rig, policy, |_| ()).expect("mended");
    rig.whole();
}

#[test]
fn held_stays_held() {
    let mut rig = Rig::at_work();
    rig.answer();
    let policy = rig_policy(Instant::now(), OnMiss::Undrain);
    quiesce_blocking(&mut rig, policy).expect("it is quiescent");
    rig.held = true;
    at_quiescence_blocking(&mut rig, policy, |_| ()).expect("done where it is");
    assert_eq!(rig.device.presence(), Presence::Held);
    rig.held = false;
    resume(&mut rig).expect("resumed");
    rig.whole();
    rig.device = Lifecycle::Absent;
    let away = at_quiescence_blocking(&mut rig, policy, |_| ());
    assert!(matches!(away, Err(QuiesceError::NotHere("away"))), "{away:?}");
}

#[test]
fn caller_dropped_midway() {
    let never = |_| pending::<()>();
    for polls in 0..3 {
        for refused in 0..3 {
            let mut rig = Rig::at_work();
            let policy = QuiescePolicy { deadline: Instant::now() + LONG, on_miss: OnMiss::Insist };
            {
                let mut waits = Box::pin(at_quiescence(&mut rig, policy, never, |_| {
                    assert!(polls == 9, "not there yet")
                }));
                for _ in 0..polls {
                    assert!(waits.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                }
            }
            if polls > 0 {
                assert_eq!(rig.refusals.suspends.load(SeqCst), 0);
            }
            rig.whole();
            // Also where going on is refused at first: the device is where it can be asked again.
            let mut rig = Rig::at_work();
            {
                let mut waits = Box::pin(quiesce(&mut rig, policy, never));
                assert!(waits.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
                // The future has the rig; what it shares with the device says no from now on.
            }
            rig.refusals.activate.store(refused, SeqCst);
            let mut attempt = QuiesceAttempt::begin(&mut rig, policy).expect("it runs");
            assert!(poll(&mut attempt, &mut rig, Instant::now()).is_pending());
            let cancelled = attempt.cancel(&mut rig);
            assert_eq!(cancelled.is_ok(), refused < 2, "{cancelled:?}");
            match rig.device.presence() {
                Presence::Running => {}
                Presence::Held => resume(&mut rig).expect("now it does"),
                other => panic!("{other:?}"),
            }
            rig.whole();
        }
    }
}

/// An attempt that is forgotten without a word leaves the device on its way; the next one begins there.
#[test]
fn an_attempt_given_up_is_taken_over_by_the_next() {
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    let first = QuiesceAttempt::begin(&mut rig, rig_policy(now, OnMiss::Undrain)).expect("it runs");
    drop(first);
    assert_eq!(rig.device.presence(), Presence::Quiescing);
    let mut next = QuiesceAttempt::begin(&mut rig, rig_policy(now, OnMiss::Undrain)).expect("on its way");
    assert!(matches!(
        poll(&mut next, &mut rig, now + DEADLINE),
        Poll::Ready(Err(QuiesceError::Missed { .. }))
    ));
    rig.whole();
}

/// Every combination of what can go wrong, at every point at which the disk may answer after all.
#[test]
fn every_course_leaves_the_device_whole() {
    let mut courses = 0;
    for on_miss in [OnMiss::Undrain, OnMiss::Suspend { timeout: FORCED }, OnMiss::Insist] {
        for bits in 0..16 {
            let [busy, for_good, no_stop, fails] = [0, 1, 2, 3].map(|bit| bits >> bit & 1 == 1);
            for refused in 0..4 {
                for answers_at in 0..5 {
                    for mends in [0, 4] {
                        courses += 1;
                        course(on_miss, [busy, for_good, no_stop, fails], refused, answers_at, mends);
                    }
                }
            }
        }
    }
    assert_eq!(courses, 3 * 16 * 4 * 5 * 2);
}

fn course(
    on_miss: OnMiss,
    [busy, for_good, no_stop, fails]: [bool; 4],
    refused: u32,
    answers_at: usize,
    mends: usize,
) {
    let what = format!(
        "{on_miss:?}, busy {busy} {for_good}, no stop {no_stop}, fails {fails}, refused {refused}, answers at {answers_at}, mends {mends}"
    );
    let (mut rig, now) = (Rig::at_work(), Instant::now());
    rig.mends = mends;
    let refusals = rig.refusals.clone();
    refusals.busy.store(busy, SeqCst);
    refusals.busy_for_good.store(for_good, SeqCst);
    refusals.suspend.store(no_stop, SeqCst);
    refusals.activate.store(refused, SeqCst);
    let mut attempt = QuiesceAttempt::begin(&mut rig, rig_policy(now, on_miss)).expect("it runs");
    let mut outcome = None;
    let times = [Duration::ZERO, DEADLINE, DEADLINE + FORCED, LONG, 2 * LONG];
    for (step, time) in times.into_iter().enumerate() {
        if step == answers_at {
            rig.answer();
            refusals.busy.store(false, SeqCst);
        }
        if let Poll::Ready(done) = poll(&mut attempt, &mut rig, now + time) {
            outcome = Some(done);
            break;
        }
        assert_eq!(rig.device.presence(), Presence::Quiescing, "{what}");
    }
    let ran = match outcome.unwrap_or_else(|| panic!("{what}: it never ends")) {
        Ok(quiesced) => {
            assert_eq!(rig.device.presence(), Presence::Held, "{what}");
            assert!(on_miss != OnMiss::Undrain || quiesced.missed.is_none(), "{what}");
            let done = work_and_resume(&mut rig, |_| if fails { Err(()) } else { Ok(()) });
            assert!(done.as_ref().map_or(true, |done| done.is_err() == fails), "{what}");
            done.is_ok()
        }
        Err(QuiesceError::Missed { .. }) => {
            assert_ne!(on_miss, OnMiss::Insist, "{what}");
            true
        }
        Err(QuiesceError::NotUndrained { .. }) => {
            assert!(refused > 0 && on_miss != OnMiss::Insist, "{what}");
            false
        }
        Err(other) => panic!("{what}: {other:?}"),
    };
    assert_eq!(rig.device.presence() == Presence::Running, ran, "{what}");
    // Nothing refuses any more: another attempt begins where this one has left the device.
    refusals.activate.store(0, SeqCst);
    refusals.suspend.store(false, SeqCst);
    refusals.busy_for_good.store(false, SeqCst);
    if !ran {
        let policy = QuiescePolicy { deadline: Instant::now(), on_miss: OnMiss::Insist };
        at_quiescence_blocking(&mut rig, policy, |_| ()).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    refusals.busy.store(false, SeqCst);
    rig.whole();
}
