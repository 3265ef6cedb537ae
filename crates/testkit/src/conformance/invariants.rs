//! One check for each invariant. A finding about the invariant begins with `invariant N:`.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_memory::{GuestView, PAGE};

use super::guests::{Broken, compare, in_peace, run};
use super::proof::{Proof, Tally, vacuous};
use super::{Kit, Plan, SavedState};

/// 1: accesses wait while the device is held, and are answered afterwards as if nothing had been.
pub(super) fn keeps_what_arrives(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    let mut machine = kit.boot(plan);
    if machine.buses.is_empty() {
        return Err(vacuous("the guest reaches no registers through this host"));
    }
    let (peace, mut tally) = (in_peace(kit, plan)?, Tally::default());
    let (host, buses) = (machine.host.clone(), machine.buses.clone());
    let seen = run(&mut machine, plan, |guests| {
        guests.run_on(20)?;
        host.quiesce(guests.deadline())?;
        guests.unleash();
        let before: Vec<u64> = buses.iter().map(|b| b.left.load(Ordering::SeqCst)).collect();
        // One access may have been served before the device was held, and be on its way back to its vCPU.
        // A vCPU that ends while the device is held has been answered too, and not what it hoped for.
        let ended: Vec<bool> = (0..buses.len()).map(|v| guests.ended(v)).collect();
        let answered = |vcpu: usize| {
            buses[vcpu].left.load(Ordering::SeqCst) > before[vcpu] + 1 || guests.ended(vcpu) != ended[vcpu]
        };
        let waits = |vcpu: usize| {
            let left = buses[vcpu].left.load(Ordering::SeqCst);
            buses[vcpu].entered.load(Ordering::SeqCst) > left
        };
        let all = 0..buses.len();
        let mut looks = 0;
        guests.until("no vCPU comes to wait in an access", || {
            // Still waiting after a while, and not merely passing through.
            looks = if all.clone().all(|v| waits(v) || guests.ended(v)) { looks + 1 } else { 0 };
            looks > 1000 || all.clone().any(answered)
        })?;
        if all.clone().any(answered) {
            return Err("invariant 1: an access was answered while the device was held".into());
        }
        // Those that have ended by now wait for nothing.
        tally.held_for(all.clone().filter(|v| waits(*v)).count() as u64);
        host.resume()
    })?;
    compare(&peace, &seen)?;
    tally.proof("an access that waits")
}

/// 4: no state that a device cannot be in is loaded, and the device that was held is unharmed.
pub(super) fn distrusts_loaded(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    let (peace, mut tally) = (in_peace(kit, plan)?, Tally::default());
    let mut machine = kit.boot(plan);
    let host = machine.host.clone();
    let seen = run(&mut machine, plan, |guests| {
        guests.run_on(30)?;
        host.quiesce(guests.deadline())?;
        let good = host.save()?;
        let mut bad = kit.hostile(&good);
        if bad.is_empty() {
            return Err(vacuous("the kit has no states that its device cannot be in"));
        }
        bad.extend([
            ("another kind".to_owned(), SavedState { kind: "teapot".into(), ..good.clone() }),
            ("a version of the future".to_owned(), SavedState { version: u32::MAX, ..good.clone() }),
            ("too much".to_owned(), SavedState { body: vec![0; SavedState::MAX_BODY + 1], ..good.clone() }),
            (
                "cut short".to_owned(),
                SavedState { body: good.body[..good.body.len() - 1].to_vec(), ..good.clone() },
            ),
            ("nothing".to_owned(), SavedState { body: Vec::new(), ..good.clone() }),
        ]);
        for (what, state) in bad {
            let refused = host.transplant(&state).is_err();
            tally.assert(refused, || format!("invariant 4: a state with {what} was loaded"))?;
        }
        host.transplant(&good)
    })?;
    compare(&peace, &seen)?;
    tally.proof("a state that the device cannot be in")
}

/// 5: after a missed deadline and an undrain the device resumes with all queues.
pub(super) fn gives_back(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    let mut machine = kit.boot(plan);
    let gate = machine.gate.clone().ok_or_else(|| vacuous("nothing here can be stalled"))?;
    let (peace, mut tally) = (in_peace(kit, plan)?, Tally::default());
    let host = machine.host.clone();
    let outcome = run(&mut machine, plan, |guests| {
        guests.run_on(20)?;
        gate.shut();
        let mut missed = false;
        while !missed && !guests.all_ended() {
            guests.run_until_waiting()?;
            match host.quiesce(Instant::now() + Duration::from_millis(5)) {
                // What was fenced off on the way may have to end before it is done again.
                Ok(()) => {
                    gate.open();
                    host.resume()?;
                    gate.shut();
                }
                Err(_) => missed = true,
            }
        }
        if !missed {
            return Err("the device never misses a deadline while it is stalled".into());
        }
        tally.met(host.undrain())?;
        gate.open();
        Ok(())
    });
    match outcome {
        Ok(seen) => {
            compare(&peace, &seen)?;
            tally.proof("a missed deadline")
        }
        Err(Broken::Stuck(what)) => Err(format!("invariant 5: after a missed deadline {what}")),
        Err(other) => Err(other.into()),
    }
}

/// 6: with the log on, every page that the device stores to is marked.
pub(super) fn marks_stores(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    let mut machine = kit.boot(plan);
    if machine.device_pages.is_empty() {
        return Err(vacuous("the device does not store to guest memory"));
    }
    let (peace, mut tally) = (in_peace(kit, plan)?, Tally::default());
    let view = GuestView::new(machine.memory.clone());
    let pages: Vec<u64> = machine
        .device_pages
        .iter()
        .flat_map(|r| (r.start / PAGE * PAGE..r.end).step_by(PAGE as usize))
        .collect();
    let read = |gpa: u64| {
        let mut bytes = vec![0; PAGE as usize];
        view.read(gpa, &mut bytes).map(|()| bytes).map_err(|e| e.to_string())
    };
    let (memory, mut log) = (machine.memory.clone(), None);
    let mut before = Vec::new();
    let host = machine.host.clone();
    let seen = run(&mut machine, plan, |guests| {
        guests.run_on(10)?;
        log = Some(host.log(&memory, guests.deadline())?);
        // Acknowledged: whatever is stored from here on is marked. The pollers go on meanwhile.
        before = pages.iter().map(|gpa| read(*gpa)).collect::<Result<Vec<_>, _>>()?;
        // It holds for pollers made later, too.
        guests.run_on(10)?;
        host.quiesce(guests.deadline())?;
        host.resume()
    })?;
    for (gpa, before) in pages.iter().zip(&before) {
        if read(*gpa)? != *before {
            let marked = log.as_ref().is_some_and(|log| log.is_marked(*gpa));
            tally.assert(marked, || {
                format!("invariant 6: the page at {gpa:#x} was stored to and is not marked")
            })?;
        }
    }
    compare(&peace, &seen)?;
    tally.proof("a store after the log was on")
}
