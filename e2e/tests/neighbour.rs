//! A hostile neighbour on the same I/O core: what it does ends its own queues and connections, by name, and a guest beside it
//! goes on as before.

use anyhow::{Result, ensure};
use ioplane_e2e::Version;
use ioplane_e2e::stage::{expect_quiet, expect_right, filled, finish, play, reads};
use ioplane_testkit::driver::raw::RawDesc;
use ioplane_testkit::driver::spec::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use ioplane_testkit::driver::{Disk, DiskPlan, GuestMemory, Op, RawRing, RingMode, Shape};
use ioplane_testkit::front::{Ask, Front, Wants};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Pairs of a quiet and a hostile stretch.
const PAIRS: usize = 4;
const STRETCH: Duration = Duration::from_millis(1500);
/// Between two acts: the neighbour is to be hostile to its device, not to this machine's two processors.
const BREATH: Duration = Duration::from_millis(2);
/// Far above the goal of 2, which is reported: this machine's own noise is of that size.
const BOUND: f64 = 10.0;

/// One request in the available ring that is none.
type Spoil = fn(RawRing<'_>);

const SPOILS: [Spoil; 6] = [
    // A chain without an end.
    |ring| ring.set_desc(0, RawDesc { addr: 0, len: 16, flags: VIRTQ_DESC_F_NEXT, next: 0 }),
    // Outside memory.
    |ring| ring.set_desc(0, RawDesc { addr: 1 << 50, len: 16, flags: 0, next: 0 }),
    // A length that wraps around.
    |ring| {
        ring.set_desc(0, RawDesc { addr: u64::MAX - 8, len: u32::MAX, flags: VIRTQ_DESC_F_WRITE, next: 0 })
    },
    // A successor outside the table.
    |ring| ring.set_desc(0, RawDesc { addr: 0, len: 16, flags: VIRTQ_DESC_F_NEXT, next: 60_000 }),
    // A table of an odd length.
    |ring| ring.set_desc(0, RawDesc { addr: 0, len: 17, flags: VIRTQ_DESC_F_INDIRECT, next: 0 }),
    // More requests than the ring has room for.
    |ring| ring.set_avail_idx(ring.avail_idx().wrapping_add(30_000)),
];

fn spoil_a_ring(socket: &Path, spoil: Spoil) -> Result<()> {
    let mut front = Front::connect(socket, Wants::default())?;
    let mut memory = GuestMemory::new(4 * MIB)?;
    let plan = DiskPlan::new(4, 4096, Shape::Direct);
    let mut disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan)?;
    front.share(&memory)?;
    front.start(0, &memory, disk.place(), 0)?;
    let ring = disk.ring().raw();
    spoil(ring);
    if ring.avail_idx() == 0 {
        ring.offer(0);
    }
    front.kick(0);
    std::thread::sleep(BREATH);
    // Whatever became of the queue, the connection is there for who wants to reset it.
    front.stop(0)?;
    Ok(())
}

fn spoil_a_conversation(socket: &Path, round: u64) -> Result<()> {
    let front = Front::connect(socket, Wants::default())?;
    let garbage: Vec<u8> = (0..4096u64).map(|at| (at.wrapping_mul(round | 1) >> 3) as u8).collect();
    let _ = match round % 3 {
        0 => front.wire().send_raw(Ask::SET_MEM_TABLE as u32, 1, u32::MAX, &garbage[..64], &[]),
        1 => front.wire().send_raw(4711, 1, 64, &garbage[..64], &[]),
        _ => front.wire().send_bytes(&garbage, &[]),
    };
    ensure!(front.wire().closed_within(Duration::from_secs(10)), "garbage did not end the conversation");
    Ok(())
}

/// Honest requests as fast as they come, all at once: greedy, and within its rights.
fn be_greedy(socket: &Path) -> Result<()> {
    let mut front = Front::connect(socket, Wants::default())?;
    let mut memory = GuestMemory::new(16 * MIB)?;
    let plan = DiskPlan::new(32, 65536, Shape::Indirect);
    let mut disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan)?;
    front.share(&memory)?;
    front.start(0, &memory, disk.place(), 0)?;
    while disk.submit(Op::Write, 0, 65536).is_some() {}
    front.kick(0);
    let end = Instant::now() + Duration::from_secs(10);
    while disk.in_flight() > 0 && Instant::now() < end {
        if disk.reap()?.is_none() {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    ensure!(disk.in_flight() == 0, "honest requests of the neighbour are not answered");
    front.stop(0)?;
    Ok(())
}

/// Does one thing after the other while `on`, until `over`.
fn neighbour(socket: &Path, on: &AtomicBool, over: &AtomicBool, acts: &AtomicU64) -> Result<()> {
    while !over.load(Ordering::Acquire) {
        if on.load(Ordering::Acquire) {
            let act = acts.fetch_add(1, Ordering::Relaxed);
            match act % 8 {
                6 => spoil_a_conversation(socket, act / 8)?,
                7 => be_greedy(socket)?,
                which => spoil_a_ring(socket, SPOILS[which as usize])?,
            }
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
        filled(&load)?;
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
        .map_err(|error| vm.explain(error))?;
        let [quiet, hostile] = p99.clone().map(|mut stretch| {
            stretch.sort_unstable();
            (stretch[PAIRS / 2 - 1] + stretch[PAIRS / 2]) as f64 / 2.0
        });
        let (ratio, acts) = (hostile / quiet.max(1.0), acts.into_inner());
        stage.say(format!("p99 in microseconds, quiet {:?}, hostile {:?}", p99[0], p99[1]));
        stage.say(format!(
            "{acts} hostile acts: the guest's p99 goes from {quiet:.0} to {hostile:.0}: {ratio:.2} times"
        ));
        ensure!(ratio < BOUND, "the guest's p99 is {ratio:.1} times what it was");

        let status = stage.daemon.status()?;
        let (evil, good) = (status.disk("evil")?, status.disk("good")?);
        stage.say(format!(
            "counted: {} faults of rings, of connections {:?}",
            evil.totals.faults, evil.front_end_faults
        ));
        // Each act of the first six is one fault; the last may still have been under way.
        ensure!(acts >= 16 && evil.totals.faults + 8 >= acts / 8 * 6, "not all was counted: {evil:?}");
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
