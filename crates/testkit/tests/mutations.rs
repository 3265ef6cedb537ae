//! A build without any one of the six laws fails the suite, because of that law.
//!
//! Where each law can be taken out (`removed(Law::..)`):
//!
//! | law | hook |
//! |---|---|
//! | 1 keeps what arrives | `ioplane_host::in_process::Front::access`: answers at once while the device is held; `ioplane_virtio::Queue::new`: forgets the kicks that have come meanwhile |
//! | 2 looks again | `ioplane_device::Seat::must_look`: a fresh seat lies down without a look |
//! | 3 signals once | `ioplane_device::Seat::step`: the poller's `resume` is left out |
//! | 4 distrusts loaded | `Device::load` of each device: its checks are left out; `ioplane_virtio::journal`, `open` of both kinds: takes a region of any version for its own |
//! | 5 gives back | `ioplane_device::Missed::undrain`: nobody is told to take work again |
//! | 6 marks stores | `ioplane_memory::GuestView::wrote`: no mark |
//!
//! One test, since what is taken out is taken out of the whole process. The kits run beside each other: most of the time goes
//! by in waiting for what will never come.

use std::time::Duration;

use ioplane_device::mutation::{self, Law};
use ioplane_testkit::conformance::adder::Adding;
use ioplane_testkit::conformance::blk::Disks;
use ioplane_testkit::conformance::dma::DmaKit;
use ioplane_testkit::conformance::mmio::Mmio;
use ioplane_testkit::conformance::net::Nics;
use ioplane_testkit::conformance::nic::{EmulatedNe2000, EmulatedRtl8139, Ne2000s, Rtl8139s};
use ioplane_testkit::conformance::ring::RingKit;
use ioplane_testkit::conformance::vhost_user::OverSocket;
use ioplane_testkit::conformance::virtio::PackedRings;
use ioplane_testkit::conformance::watched::{WatchedNe2000, WatchedRtl8139};
use ioplane_testkit::conformance::{self, CHECKS, Finding, Kit, PLAN, Plan};

/// Short: what a law's absence leaves hanging is to be found soon.
const SHORT: Plan = Plan { rounds: 100, patience: Duration::from_secs(3), ..PLAN };

/// What has no rings has no queues to look at, to signal or to give back.
const WITHOUT_RINGS: &[Law] = &[Law::KeepsWhatArrives, Law::DistrustsLoaded, Law::MarksStores];

/// Nor has what never stores to guest memory anything to mark.
const WITHOUT_DMA: &[Law] = &[Law::KeepsWhatArrives, Law::DistrustsLoaded];

/// A NIC has nothing in flight between two polls: it never misses a deadline, and need not be given back.
const WITHOUT_FLIGHT: &[Law] =
    &[Law::KeepsWhatArrives, Law::LooksAgain, Law::SignalsOnce, Law::DistrustsLoaded, Law::MarksStores];

/// The kits, and the laws that their paths carry.
const KITS: &[(&str, &dyn Kit, &[Law])] = &[
    ("toy DMA in process", &DmaKit, WITHOUT_RINGS),
    ("toy ring in process", &RingKit, &Law::ALL),
    ("toy virtio in process", &Mmio(Adding), &Law::ALL),
    ("toy virtio over vhost-user", &OverSocket(Adding), &Law::ALL),
    ("virtio-blk in process", &Mmio(Disks::Memory), &Law::ALL),
    ("virtio-blk over vhost-user", &OverSocket(Disks::Memory), &Law::ALL),
    ("virtio-net in process", &Mmio(Nics), WITHOUT_FLIGHT),
    ("virtio-net over vhost-user", &OverSocket(Nics), WITHOUT_FLIGHT),
    ("virtio-blk, packed, in process", &Mmio(PackedRings(Disks::Memory)), &Law::ALL),
    ("RTL8139 in process", &Rtl8139s(EmulatedRtl8139), WITHOUT_RINGS),
    ("NE2000 in process", &Ne2000s(EmulatedNe2000), WITHOUT_DMA),
    ("RTL8139 under watch", &Rtl8139s(WatchedRtl8139), WITHOUT_RINGS),
    ("NE2000 under watch", &Ne2000s(WatchedNe2000), WITHOUT_DMA),
    ("toy virtio, packed, over vhost-user", &OverSocket(PackedRings(Adding)), &Law::ALL),
];

fn law_checks(kit: &dyn Kit) -> Vec<Finding> {
    let laws = CHECKS.iter().filter(|(name, _)| name.starts_with("law_"));
    laws.filter_map(|(name, _)| conformance::run(kit, name, &SHORT).err()).collect()
}

/// Laws that cannot hold without `law`: a queue that nobody looks at is not signalled, nor given back.
fn follow(law: Law) -> &'static [Law] {
    match law {
        Law::LooksAgain => &[Law::SignalsOnce, Law::GivesBack],
        _ => &[],
    }
}

fn said(law: Law) -> String {
    format!("law {}:", law as u8)
}

fn judge(name: &str, law: Law, findings: &[Finding]) {
    let check = format!("law_{}_", law as u8);
    let found = findings.iter().any(|f| f.check.starts_with(&check) && f.what.starts_with(&said(law)));
    assert!(found, "{name} without {law:?}: its check does not say so: {findings:#?}");
    for other in Law::ALL.into_iter().filter(|o| *o != law && !follow(law).contains(o)) {
        let blamed = findings.iter().find(|f| f.what.starts_with(&said(other)));
        assert!(blamed.is_none(), "{name} without {law:?}: {other:?} is blamed: {blamed:?}");
    }
    println!("{name} without {law:?}: {findings:#?}");
}

/// The findings of every kit that carries `law`, with that law taken out.
fn without(law: Option<Law>) -> Vec<(&'static str, Vec<Finding>)> {
    mutation::remove(law);
    let kits = KITS.iter().filter(|(_, _, laws)| law.is_none_or(|law| laws.contains(&law)));
    let findings = std::thread::scope(|scope| {
        let runs: Vec<_> = kits.map(|(name, kit, _)| (*name, scope.spawn(|| law_checks(*kit)))).collect();
        runs.into_iter().map(|(name, run)| (name, run.join().expect("a check panicked"))).collect()
    });
    mutation::remove(None);
    findings
}

#[test]
fn each_law_is_missed() {
    for (name, findings) in without(None) {
        assert_eq!(findings, [], "{name} with all laws");
    }
    for law in Law::ALL {
        for (name, findings) in without(Some(law)) {
            judge(name, law, &findings);
        }
    }
}
