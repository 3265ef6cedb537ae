//! A build without any one of the six laws fails the suite, because of that law.
//!
//! Where each law can be taken out (`removed(Law::..)`):
//!
//! | law | hook |
//! |---|---|
//! | 1 keeps what arrives | `ioplane_host::in_process::Front::access`: answers at once while the device is held |
//! | 2 looks again | `ioplane_device::Seat::must_look`: a fresh seat lies down without a look |
//! | 3 signals once | `ioplane_device::Seat::step`: the poller's `resume` is left out |
//! | 4 distrusts loaded | `Device::load` of each device: its checks are left out |
//! | 5 gives back | `ioplane_device::Missed::undrain`: nobody is told to take work again |
//! | 6 marks stores | `ioplane_memory::GuestView::wrote`: no mark |
//!
//! One test, since what is taken out is taken out of the whole process.

use std::time::Duration;

use ioplane_device::mutation::{self, Law};
use ioplane_testkit::conformance::dma::DmaKit;
use ioplane_testkit::conformance::ring::RingKit;
use ioplane_testkit::conformance::{self, CHECKS, Finding, Kit, PLAN, Plan};

/// Short: what a law's absence leaves hanging is to be found soon.
const SHORT: Plan = Plan { rounds: 100, patience: Duration::from_secs(3), ..PLAN };

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

fn judge(name: &str, kit: &dyn Kit, law: Law) {
    mutation::remove(Some(law));
    let findings = law_checks(kit);
    mutation::remove(None);
    let check = format!("law_{}_", law as u8);
    let found = findings.iter().any(|f| f.check.starts_with(&check) && f.what.starts_with(&said(law)));
    assert!(found, "{name} without {law:?}: its check does not say so: {findings:#?}");
    for other in Law::ALL.into_iter().filter(|o| *o != law && !follow(law).contains(o)) {
        let blamed = findings.iter().find(|f| f.what.starts_with(&said(other)));
        assert!(blamed.is_none(), "{name} without {law:?}: {other:?} is blamed: {blamed:?}");
    }
    println!("{name} without {law:?}: {findings:#?}");
}

#[test]
fn each_law_is_missed() {
    mutation::remove(None);
    assert_eq!(law_checks(&DmaKit), []);
    assert_eq!(law_checks(&RingKit), []);
    for law in Law::ALL {
        judge("ring", &RingKit, law);
    }
    // What has no rings has no queues to look at, to signal or to give back.
    for law in [Law::KeepsWhatArrives, Law::DistrustsLoaded, Law::MarksStores] {
        judge("dma", &DmaKit, law);
    }
}
