//! Running a guest's vCPUs on threads while a control thread does things to the device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::proof::vacuous;
use super::{Kit, Plan, Ran, TestMachine, Vcpu};

/// What the control thread knows of one vCPU.
#[derive(Debug, Default)]
struct Pulse {
    steps: AtomicU64,
    /// How often in a row it had to wait.
    waits: AtomicU64,
    ended: AtomicBool,
}

/// The guest as the control thread sees it.
pub(super) struct Guests {
    pulses: Vec<Pulse>,
    /// How many steps they may have made together before they stand still: however slow the control thread is, they do
    /// not come to their end before it has done what it wants to do to them.
    leash: AtomicU64,
    abandoned: AtomicBool,
    patience: Duration,
}

impl Guests {
    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.patience
    }

    /// Waits until `come`; `Err(what)` when the guest's patience has run out.
    pub(super) fn until(&self, what: &str, mut come: impl FnMut() -> bool) -> Result<(), String> {
        until(self.patience, what, &mut come)
    }

    pub(super) fn steps(&self) -> u64 {
        self.pulses.iter().map(|p| p.steps.load(Ordering::Relaxed)).sum()
    }

    pub(super) fn ended(&self, vcpu: usize) -> bool {
        self.pulses[vcpu].ended.load(Ordering::Acquire)
    }

    pub(super) fn all_ended(&self) -> bool {
        (0..self.pulses.len()).all(|v| self.ended(v))
    }

    /// Lets them run to their end.
    pub(super) fn unleash(&self) {
        self.leash.store(u64::MAX, Ordering::Relaxed);
    }

    /// Waits until both together have made `steps` more, or have ended. They go on meanwhile, for as many again.
    pub(super) fn run_on(&self, steps: u64) -> Result<(), String> {
        let until = self.steps() + steps;
        self.leash.store(until + steps, Ordering::Relaxed);
        self.until("the guest does not get on", || self.steps() >= until || self.all_ended())
    }

    /// Waits until some vCPU waits for the device and gets on no more, or all have ended.
    pub(super) fn run_until_waiting(&self) -> Result<(), String> {
        self.unleash();
        let waits = |p: &Pulse| p.waits.load(Ordering::Relaxed) > 200;
        self.until("the guest does not come to wait", || self.pulses.iter().any(waits) || self.all_ended())
    }
}

/// Turns in vain before a thread that waits sleeps between two of them: what is not there by then takes a while, and the processor is
/// better used by who is to bring it.
const EAGER: u32 = 256;
/// How long it sleeps then.
const NAP: Duration = Duration::from_micros(50);

/// One turn in vain of a thread that waits, after `turns` others.
fn idle(turns: u32) {
    if turns < EAGER { std::thread::yield_now() } else { std::thread::sleep(NAP) }
}

/// Waits until `come`, at most `patience`.
pub(super) fn until(patience: Duration, what: &str, come: &mut dyn FnMut() -> bool) -> Result<(), String> {
    let deadline = Instant::now() + patience;
    let mut turns = 0;
    while !come() {
        if Instant::now() >= deadline {
            return Err(what.to_owned());
        }
        idle(turns);
        turns += 1;
    }
    Ok(())
}

/// Why a run came to nothing.
#[derive(Debug)]
pub(super) enum Broken {
    /// The control thread's own finding.
    Control(String),
    /// A vCPU did not get on any more.
    Stuck(String),
    /// A vCPU saw something wrong.
    Wrong(String),
}

impl From<Broken> for String {
    fn from(broken: Broken) -> String {
        match broken {
            Broken::Control(what) | Broken::Stuck(what) | Broken::Wrong(what) => what,
        }
    }
}

/// Runs the guest to its end while `control` does what it does; what each vCPU saw.
pub(super) fn run(
    machine: &mut TestMachine,
    plan: &Plan,
    control: impl FnOnce(&Guests) -> Result<(), String>,
) -> Result<Vec<Vec<u64>>, Broken> {
    let vcpus = std::mem::take(&mut machine.vcpus);
    let guests = Guests {
        pulses: vcpus.iter().map(|_| Pulse::default()).collect(),
        leash: AtomicU64::new(0),
        abandoned: AtomicBool::new(false),
        patience: plan.patience,
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = vcpus
            .into_iter()
            .zip(&guests.pulses)
            .map(|(vcpu, pulse)| scope.spawn(|| drive(vcpu, pulse, &guests)))
            .collect();
        let mut outcome = control(&guests).map_err(Broken::Control);
        guests.unleash();
        if outcome.is_ok() && guests.until("", || guests.all_ended()).is_err() {
            outcome = Err(Broken::Stuck("the guest does not come to its end".into()));
        }
        if outcome.is_err() {
            guests.abandoned.store(true, Ordering::Release);
            if let Some(gate) = &machine.gate {
                gate.open();
            }
            machine.host.close();
        }
        let seen: Vec<_> = threads.into_iter().map(|t| t.join().expect("a vCPU panicked")).collect();
        outcome?;
        seen.into_iter().collect()
    })
}

fn drive(mut vcpu: Box<dyn Vcpu>, pulse: &Pulse, guests: &Guests) -> Result<Vec<u64>, Broken> {
    let outcome = drive_on(&mut *vcpu, pulse, guests);
    pulse.ended.store(true, Ordering::Release);
    outcome.map(|()| vcpu.seen())
}

fn drive_on(vcpu: &mut dyn Vcpu, pulse: &Pulse, guests: &Guests) -> Result<(), Broken> {
    let (mut got_on, mut turns) = (Instant::now(), 0);
    while !guests.abandoned.load(Ordering::Relaxed) {
        if guests.steps() >= guests.leash.load(Ordering::Relaxed) && vcpu.may_pause() {
            got_on = Instant::now();
            idle(turns);
            turns += 1;
            continue;
        }
        match vcpu.step().map_err(Broken::Wrong)? {
            Ran::Going => {
                pulse.steps.fetch_add(1, Ordering::Relaxed);
                pulse.waits.store(0, Ordering::Relaxed);
                (got_on, turns) = (Instant::now(), 0);
            }
            Ran::Waiting => {
                pulse.waits.fetch_add(1, Ordering::Relaxed);
                if got_on.elapsed() > guests.patience {
                    return Err(Broken::Stuck("a vCPU waits for ever for the device".into()));
                }
                idle(turns);
                turns += 1;
            }
            Ran::Done => return Ok(()),
        }
    }
    Err(Broken::Stuck("abandoned".into()))
}

/// What the guest sees without interruptions.
pub(super) fn in_peace(kit: &dyn Kit, plan: &Plan) -> Result<Vec<Vec<u64>>, String> {
    Ok(run(&mut kit.boot(plan), plan, |_| Ok(()))?)
}

/// Compares with a run in peace.
pub(super) fn compare(peace: &[Vec<u64>], seen: &[Vec<u64>]) -> Result<(), String> {
    if peace.iter().all(Vec::is_empty) {
        return Err(vacuous("the guest sees nothing in peace"));
    }
    for (vcpu, (peace, seen)) in peace.iter().zip(seen).enumerate() {
        if let Some(at) = (0..peace.len().max(seen.len())).find(|at| peace.get(*at) != seen.get(*at)) {
            let (seen, peace) = (seen.get(at), peace.get(at));
            return Err(format!(
                "transcript: vCPU {vcpu} saw {seen:x?} as its {at}th, and {peace:x?} in peace"
            ));
        }
    }
    Ok(())
}
