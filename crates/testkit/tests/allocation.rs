//! Pollers allocate nothing inside `poll`, and the allocator that sees to it is not blind.

use ioplane_testkit::allocator::Strict;
use ioplane_testkit::conformance::adder::Adding;
use ioplane_testkit::conformance::blk::Disks;
use ioplane_testkit::conformance::declared::CHECKS;
use ioplane_testkit::conformance::mmio::Mmio;
use ioplane_testkit::conformance::net::Nics;
use ioplane_testkit::conformance::ring::RingKit;
use ioplane_testkit::conformance::virtio::PackedRings;
use ioplane_testkit::conformance::{Kit, PLAN};

#[global_allocator]
static ALLOCATOR: Strict = Strict;

/// What brings every part of a poller's life about: pauses, moves, stalls with replays, a dirty log.
const LIFE: [&str; 4] =
    ["pause_is_not_seen", "move_is_not_seen", "suspension_is_not_seen", "invariant_6_marks_stores"];

/// The same for what cannot be stalled: its requests end where they are taken.
const CALM: [&str; 3] = ["pause_is_not_seen", "move_is_not_seen", "invariant_6_marks_stores"];

fn lives_without_allocating(kit: &dyn Kit) {
    lives(kit, &LIFE);
}

fn lives(kit: &dyn Kit, life: &[&str]) {
    for &name in life {
        let check = CHECKS.iter().find(|check| check.name == name).unwrap();
        if let Err(finding) = check.run(kit, &PLAN) {
            panic!("{name}: {}", finding.what);
        }
    }
}

#[test]
fn toy_ring() {
    lives_without_allocating(&RingKit);
}

#[test]
fn toy_virtio() {
    lives_without_allocating(&Mmio(Adding));
}

#[test]
fn virtio_blk_on_memory() {
    lives_without_allocating(&Mmio(Disks::Memory));
}

/// Requests end in a later poll than they began in, and the longest have as many buffers as a driver may send.
#[test]
fn virtio_blk_on_a_file() {
    lives_without_allocating(&Mmio(Disks::IoUring));
}

#[test]
fn virtio_blk_on_memory_with_packed_rings() {
    lives_without_allocating(&Mmio(PackedRings(Disks::Memory)));
}

#[test]
fn virtio_blk_on_a_file_with_packed_rings() {
    lives_without_allocating(&Mmio(PackedRings(Disks::IoUring)));
}

#[test]
fn virtio_net() {
    lives(&Mmio(Nics), &CALM);
}

mod blind {
    use std::time::{Duration, Instant};

    use ioplane_cores::{Core, CoreSettings};
    use ioplane_device::*;

    struct Waster(Vec<u64>);

    impl Poller for Waster {
        fn poll(&mut self, _context: &mut CoreContext, _budget: Budget) -> PollOutcome {
            self.0 = vec![self.0.len() as u64 + 1; 64];
            PollOutcome::busy(std::hint::black_box(&self.0).len() as u32, 0)
        }
        fn drain(&mut self) {}
        fn undrain(&mut self) {}
        fn suspend(&mut self) {}
        fn resume(&mut self) {}
        fn arm(&mut self) -> Armed {
            Armed::WorkLeft
        }
        fn disarm(&mut self, _context: &CoreContext, _polling: bool) {}
        fn apply(&mut self, _change: Change) {}
        fn wakers(&self) -> Wakers<'_> {
            Wakers::default()
        }
        fn tidy(&mut self) {}
    }

    struct Wasteful(DeviceInfo);

    impl Device for Wasteful {
        fn info(&self) -> &DeviceInfo {
            &self.0
        }
        fn access(&mut self, _at: RegisterAddress, _op: Access<'_>) -> Effect {
            Effect::None
        }
        fn active(&self) -> QueueSet {
            [0].into()
        }
        fn activate(&mut self, activation: &mut Activation<'_>) -> Result<(), DeviceError> {
            activation.add(0, Box::new(Waster(Vec::new())));
            Ok(())
        }
        fn deactivate(&mut self, _home: Parked) {}
        fn save(&self, _proof: &QuiescenceProof) -> Result<SavedState, DeviceError> {
            Ok(SavedState { kind: "wasteful".into(), version: 1, body: Vec::new() })
        }
        fn load(&mut self, _proof: &QuiescenceProof, _state: &SavedState) -> Result<(), DeviceError> {
            Ok(())
        }
        fn reset(&mut self, _proof: &QuiescenceProof) {}
    }

    #[test]
    fn a_poller_that_allocates_is_caught() {
        const ASKED: &str = "IOPLANE_TEST_WASTE";
        if std::env::var_os(ASKED).is_some() {
            let core = Core::start(CoreId(0), CoreSettings::default()).unwrap();
            let info = DeviceInfo { name: "waster".into(), kind: "wasteful", queues: 1 };
            let _running = Quiescent::new(Wasteful(info)).resume(&core).unwrap();
            let over = Instant::now() + Duration::from_secs(60);
            while Instant::now() < over {
                std::thread::sleep(Duration::from_millis(10));
            }
            return;
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "blind::a_poller_that_allocates_is_caught", "--nocapture"])
            .env(ASKED, "1")
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("a poller allocates memory inside poll"), "{told}");
        assert!(!output.status.success());
    }
}
