//! A hostile neighbour on the same I/O core: what it does ends its own queues and connections, by name, and a guest beside it
//! goes on as before: each of its reads is right, none is lost. How much slower they are is a figure: `script/bench neighbour`.

use anyhow::{Result, ensure};
use ioplane_e2e::Version;
use ioplane_e2e::stage::{expect_quiet, expect_right, filled, finish, play, reads};
use ioplane_testkit::hostile::{self, ROUND, SPOILS};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Pairs of a quiet and a hostile stretch.
const PAIRS: usize = 4;
const STRETCH: Duration = Duration::from_millis(1500);
/// Between two acts: the neighbour is to be hostile to its device, not to this machine's two processors.
const BREATH: Duration = Duration::from_millis(2);

/// Does one thing after the other while `on`, until `over`.
fn neighbour(socket: &Path, on: &AtomicBool, over: &AtomicBool, acts: &AtomicU64) -> Result<()> {
    while !over.load(Ordering::Acquire) {
        if on.load(Ordering::Acquire) {
            hostile::act(socket, acts.fetch_add(1, Ordering::Relaxed), BREATH).map_err(anyhow::Error::msg)?;
        }
        std::thread::sleep(BREATH);
    }
    Ok(())
}

#[test]
fn a_hostile_neighbour_harms_itself_alone() -> Result<()> {
    play("[[core]]\nspin_us = 200\n", |stage| {
        stage.add_root("root")?;
        stage.add_blank("good", 32 * MIB, &[])?;
        stage.add_blank("evil", 32 * MIB, &[])?;
        let vm = stage.boot(stage.qemu("guest", Version::Host, &["root", "good"])?)?;
        let load = vm.agent().load(reads("good", 8 * MIB))?;
        filled(&load).map_err(|error| stage.explain(vm.explain(error)))?;
        let socket = stage.daemon.disk("evil")?.socket;
        let (on, over, acts) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
        let mut p99 = [Vec::new(), Vec::new()];
        std::thread::scope(|scope| -> Result<()> {
            let neighbour = scope.spawn(|| neighbour(&socket, &on, &over, &acts));
            let measured = (0..2 * PAIRS).try_for_each(|turn| {
                on.store(turn % 2 == 1, Ordering::Release);
                load.mark()?;
                std::thread::sleep(STRETCH);
                let report = load.mark()?;
                expect_right(&report)?;
                ensure!(report.requests > 0, "the guest stands still beside its neighbour");
                p99[turn % 2].push(report.p99_us);
                Ok(())
            });
            over.store(true, Ordering::Release);
            let neighbour = neighbour.join().map_err(|_| anyhow::anyhow!("the neighbour panicked"))?;
            measured.and(neighbour)
        })
        .map_err(|error| stage.explain(vm.explain(error)))?;
        let [quiet, hostile] = p99.clone().map(|mut stretch| {
            stretch.sort_unstable();
            (stretch[PAIRS / 2 - 1] + stretch[PAIRS / 2]) as f64 / 2.0
        });
        let (ratio, acts) = (hostile / quiet.max(1.0), acts.into_inner());
        stage.say(format!("p99 in microseconds, quiet {:?}, hostile {:?}", p99[0], p99[1]));
        stage.say(format!(
            "{acts} hostile acts: the guest's p99 goes from {quiet:.0} to {hostile:.0}: {ratio:.2} times"
        ));

        let status = stage.daemon.status()?;
        let (evil, good) = (status.disk("evil")?, status.disk("good")?);
        stage.say(format!(
            "counted: {} faults of rings, of connections {:?}",
            evil.totals.faults, evil.front_end_faults
        ));
        // Each act of the first six is one fault, unless the ring is stopped before the core has looked at it: on a busy machine
        // its breath is short.
        ensure!(
            acts >= 2 * ROUND && 2 * evil.totals.faults >= acts / ROUND * SPOILS.len() as u64,
            "not even half was counted of {acts} acts: {evil:?}"
        );
        ensure!(evil.front_end_faults.len() >= 2, "connections ended without a name: {evil:?}");
        ensure!(
            good.totals.faults == 0 && good.front_end_faults.is_empty(),
            "the good one is blamed: {good:?}"
        );
        finish(vm.agent(), load)?;
        expect_quiet(vm.agent())?;
        vm.poweroff()
    })
}
