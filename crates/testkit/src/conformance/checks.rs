//! What is done to a device must not be seen by its guest.

use std::time::{Duration, Instant};

use super::guests::{Guests, compare, in_peace, run};
use super::proof::{Proof, Tally, vacuous};
use super::{DeviceHost, Dice, Kit, Plan, TestMachine};

/// How often each thing is done in one run.
const TIMES: usize = 12;

/// Seeds for each check.
const SEEDS: u64 = 3;

/// Does `act` again and again at random steps of the guest's program; compares with a run in peace. `act` says whether it did what
/// the check is about, which is `what`: that never was, and nothing has been compared.
fn unseen(
    kit: &dyn Kit,
    plan: &Plan,
    what: &str,
    act: impl Fn(&TestMachine, &Guests, &mut Dice) -> Result<bool, String>,
) -> Result<Proof, String> {
    let mut tally = Tally::default();
    for seed in plan.seed..plan.seed + SEEDS {
        let plan = Plan { seed, ..*plan };
        let peace = in_peace(kit, &plan)?;
        let mut machine = kit.boot(&plan);
        let shared = shared(&machine);
        let mut times = 0;
        let seen = run(&mut machine, &plan, |guests| {
            let mut dice = Dice::new(seed ^ 0x5eed);
            for _ in 0..TIMES {
                guests.run_on(1 + dice.below(u64::from(plan.rounds) / TIMES as u64))?;
                // What is done to a guest that has ended is seen by nobody.
                let watched = !guests.all_ended();
                times += u64::from(act(&shared, guests, &mut dice)? && watched);
            }
            Ok(())
        })?;
        compare(&peace, &seen)?;
        tally.held_for(times);
    }
    tally.proof(what)
}

/// The parts of a machine that the control thread needs while the vCPUs have theirs.
fn shared(machine: &TestMachine) -> TestMachine {
    TestMachine {
        host: machine.host.clone(),
        vcpus: Vec::new(),
        buses: machine.buses.clone(),
        probes: Vec::new(),
        gate: machine.gate.clone(),
        memory: machine.memory.clone(),
        device_pages: machine.device_pages.clone(),
    }
}

pub(super) fn pause(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a pause", |machine, guests, _| {
        machine.host.quiesce(guests.deadline())?;
        machine.host.resume()?;
        Ok(true)
    })
}

fn replant(host: &dyn DeviceHost) -> Result<(), String> {
    let state = host.save()?;
    host.transplant(&state)
}

pub(super) fn transplant(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a transplant", |machine, guests, _| {
        machine.host.quiesce(guests.deadline())?;
        replant(&*machine.host)?;
        Ok(true)
    })
}

pub(super) fn moves(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a move of a queue", |machine, guests, dice| {
        let queues = machine.host.queues();
        if queues.is_empty() {
            return Err(vacuous("the device has no queues"));
        }
        for queue in &queues {
            machine.host.move_queue(*queue, dice.below(2) as usize, guests.deadline())?;
        }
        Ok(true)
    })
}

/// Stalls what the device stands on, tries to stop it in no time, and does `then` if that was missed; says whether it was.
fn stalled(
    machine: &TestMachine,
    guests: &Guests,
    dice: &mut Dice,
    then: impl Fn(&dyn DeviceHost) -> Result<(), String>,
) -> Result<bool, String> {
    let gate = machine.gate.as_ref().ok_or_else(|| vacuous("nothing here can be stalled"))?;
    gate.shut();
    guests.run_until_waiting()?;
    let done = match machine.host.quiesce(Instant::now() + Duration::from_micros(dice.below(500))) {
        // Nothing was under way.
        Ok(()) => {
            gate.open();
            machine.host.resume().map(|()| false)
        }
        Err(_) => then(&*machine.host).map(|()| true),
    };
    gate.open();
    done
}

pub(super) fn miss(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a missed deadline", |machine, guests, dice| {
        stalled(machine, guests, dice, |host| host.undrain())
    })
}

pub(super) fn suspension(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a suspension", |machine, guests, dice| {
        let again = dice.below(2) == 0;
        stalled(machine, guests, dice, |host| {
            host.suspend(guests.deadline())?;
            // What was fenced off may have to end before it is done again (decision 5).
            if let Some(gate) = &machine.gate {
                gate.open();
            }
            if again { host.resume() } else { replant(host) }
        })
    })
}

pub(super) fn undrain(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a quiesce that was taken back", |machine, _, _| {
        machine.host.begin_and_drop()?;
        machine.host.undrain()?;
        Ok(true)
    })
}

pub(super) fn dropped_future(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    unseen(kit, plan, "a future that was dropped while it waited", |machine, guests, _| {
        let gate = machine.gate.as_ref().ok_or_else(|| vacuous("nothing here can be stalled"))?;
        gate.shut();
        guests.run_until_waiting()?;
        let waited = machine.host.begin_and_drop();
        let undrained = machine.host.undrain();
        gate.open();
        undrained?;
        waited
    })
}
