//! The checks of invariants 1 to 3 that put single requests to a queue: on a core that polls, and on one that is notified.

use std::time::{Duration, Instant};

use super::guests::until;
use super::proof::{Proof, Tally};
use super::{DeviceHost, Kit, Plan, Probe, TestMachine};

/// A spin that outlasts the check: core 0 polls, and nobody kicks it.
const POLLS: Duration = Duration::from_secs(3600);

/// How often each thing is done.
const TIMES: usize = 3;

/// Boots a machine for each of its probes, and does `check` to that. The first sits on the core that polls.
fn each_probe(
    kit: &dyn Kit,
    plan: &Plan,
    what: &str,
    check: impl Fn(&dyn DeviceHost, &mut dyn Probe, bool, &mut Tally) -> Result<(), String>,
) -> Result<Proof, String> {
    let mut tally = Tally::default();
    for nth in 0.. {
        let TestMachine { host, mut probes, .. } = kit.boot(&Plan { spin: POLLS, ..*plan });
        let outcome = match probes.get_mut(nth) {
            Some(probe) => check(&*host, &mut **probe, nth == 0, &mut tally),
            None => break,
        };
        host.close();
        let at = if nth == 0 { "on a core that polls" } else { "on a core that is notified" };
        outcome.map_err(|what| format!("{what} ({at})"))?;
    }
    tally.proof(what)
}

fn answered(probe: &mut dyn Probe, plan: &Plan, what: &str) -> Result<(), String> {
    let mut wrong = None;
    until(plan.patience, what, &mut || {
        probe.answered().unwrap_or_else(|why| {
            wrong = Some(why);
            true
        })
    })?;
    wrong.map_or(Ok(()), Err)
}

/// Puts requests until all is quiet: on a core that polls, until no kick is asked for any more. How many kicks that took.
fn quiet(probe: &mut dyn Probe, plan: &Plan, polled: bool) -> Result<u64, String> {
    let mut kicks = 0;
    for _ in 0..64 {
        let wanted = probe.publish();
        if wanted {
            probe.kick();
            kicks += 1;
        }
        answered(probe, plan, "a request waits for ever")?;
        if !wanted || !polled {
            return Ok(kicks);
        }
    }
    Err("a polled queue goes on asking to be kicked".into())
}

/// 1: kicks that come while nobody looks are latched: the device takes every one of them, and the request is answered.
pub(super) fn latches_kicks(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    each_probe(kit, plan, "a kick while the device was held", |host, probe, polled, tally| {
        const KICKS: u64 = 3;
        // A kick that was answered before it was taken counts too, as soon as somebody sits down again.
        let mut sent = quiet(probe, plan, polled)?;
        host.quiesce(Instant::now() + plan.patience)?;
        for _ in 0..TIMES {
            probe.publish();
            (0..KICKS).for_each(|_| probe.kick());
            sent += KICKS;
            host.resume()?;
            answered(probe, plan, "what was kicked for while the device was held is not answered")?;
            host.quiesce(Instant::now() + plan.patience)?;
            let taken = probe.kicks_taken().ok_or("the device does not say how many kicks it took")?;
            tally.assert(taken == sent, || {
                format!("invariant 1: of {sent} kicks, {KICKS} while the device was held, it took {taken}")
            })?;
        }
        host.resume()
    })
}

/// 2: what the driver published while nobody looked, without a kick, is found by resuming.
pub(super) fn looks_again(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    each_probe(kit, plan, "a request without a kick", |host, probe, polled, tally| {
        for _ in 0..TIMES {
            quiet(probe, plan, polled)?;
            host.quiesce(Instant::now() + plan.patience)?;
            // A core that is notified had asked to be kicked; then the kick is what fell victim to the pause.
            if probe.publish() && polled {
                return Err("a held queue asks to be kicked, although it did not before".into());
            }
            host.resume()?;
            tally.met(answered(probe, plan, "invariant 2: resuming did not look at the ring again"))?;
        }
        Ok(())
    })
}

/// 3: resuming interrupts the driver once, although it asked for no interrupt; and not twice.
pub(super) fn signals_once(kit: &dyn Kit, plan: &Plan) -> Result<Proof, String> {
    each_probe(kit, plan, "a resume", |host, probe, polled, tally| {
        probe.want_interrupts(false);
        let signals = probe.signals();
        for _ in 0..TIMES {
            quiet(probe, plan, polled)?;
            host.quiesce(Instant::now() + plan.patience)?;
            let before = probe.interrupts();
            host.resume()?;
            until(plan.patience, "invariant 3: resuming sent no interrupt", &mut || {
                probe.interrupts() >= before + signals
            })?;
            quiet(probe, plan, polled)?;
            let sent = probe.interrupts() - before;
            tally.assert(sent == signals, || {
                format!("invariant 3: resuming sent {sent} interrupts instead of {signals}")
            })?;
        }
        Ok(())
    })
}
