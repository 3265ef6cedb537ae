//! A build without any one of the six laws fails the suite, because of that law.
//!
//! Where each law can be taken out (`removed(Law::..)`):
//!
//! | law | hook |
//! |---|---|
//! | 1 keeps what arrives | `ioplane_host::in_process::Front::access`: answers at once while the device is held; `ioplane_host::vfio_user::Session::access`: the same for a client; `ioplane_virtio::Queue::new` and the toy ring's poller: forget the kicks that have come meanwhile |
//! | 2 looks again | `ioplane_device::Seat::must_look`: a fresh seat lies down without a look |
//! | 3 signals once | `ioplane_device::Seat::step`: the poller's `resume` is left out |
//! | 4 distrusts loaded | `Device::load` of each device: its checks are left out; `ioplane_virtio::journal`, `open` of both kinds: takes a region of any version for its own |
//! | 5 gives back | `ioplane_device::Missed::undrain`: pollers are not told to take work again, a device without any is stopped by force instead |
//! | 6 marks stores | `ioplane_memory::GuestView::wrote`: no mark |
//!
//! What fails is what the declaration says (`Check::expects`), on every kit, and nothing else. By default the checks of laws are run;
//! with `IOPLANE_MUTATIONS=all` all checks are, which takes some minutes.
//!
//! One test, since what is taken out is taken out of the whole process. The kits run beside each other: most of the time goes
//! by in waiting for what will never come.

use std::time::Duration;

use ioplane_device::mutation::{self, Law};
use ioplane_testkit::conformance::declared::{Check, Entry, Expected, KITS};
use ioplane_testkit::conformance::proof::VACUOUS;
use ioplane_testkit::conformance::{Finding, PLAN, Plan};

/// Short: what a law's absence leaves hanging is to be found soon.
const SHORT: Plan = Plan { rounds: 100, patience: Duration::from_secs(3), ..PLAN };

/// What came of each check.
type Outcomes = Vec<(&'static Check, Result<(), Finding>)>;

fn outcomes(entry: &Entry, all: bool) -> Outcomes {
    let checks = entry.checks().filter(|check| all || check.law.is_some());
    checks.map(|check| (check, check.run(entry.kit, &SHORT).map(drop))).collect()
}

/// What is not as declared.
fn judge(entry: &Entry, law: Law, outcomes: &Outcomes) -> Vec<String> {
    let blames = |finding: &Finding, law: Law| finding.what.starts_with(&format!("law {}:", law as u8));
    let mut wrong = Vec::new();
    for (check, outcome) in outcomes {
        let name = format!("{}::{} without law {}", entry.name, check.name, law as u8);
        let mut complain = |what: &str| wrong.push(format!("{name}: {what}: {outcome:?}"));
        match (check.expects(law), outcome) {
            (_, Err(finding)) if finding.what.starts_with(VACUOUS) => complain("asserts nothing"),
            (Expected::Blames, Err(finding)) if blames(finding, law) => {}
            (Expected::Blames, _) => complain("does not say so"),
            (Expected::Fails, Ok(())) => complain("does not notice"),
            (Expected::Passes, Err(_)) => complain("fails without need"),
            (Expected::Fails | Expected::MayFail, Err(finding)) => {
                // A law that needs this one as well is rightly missed.
                let own = |other: Law| other == law || check.law == Some(other);
                if Law::ALL.into_iter().any(|other| !own(other) && blames(finding, other)) {
                    complain("another law is blamed");
                }
            }
            (Expected::MayFail | Expected::Passes, Ok(())) => {}
        }
    }
    wrong
}

/// Every kit with `law` taken out.
fn without(law: Law, all: bool) -> Vec<String> {
    mutation::remove(Some(law));
    let wrong = std::thread::scope(|scope| {
        let runs: Vec<_> =
            KITS.iter().map(|entry| scope.spawn(move || judge(entry, law, &outcomes(entry, all)))).collect();
        runs.into_iter().flat_map(|run| run.join().expect("a check panicked")).collect()
    });
    mutation::remove(None);
    wrong
}

#[test]
fn each_law_is_missed_where_it_is_declared_and_nowhere_else() {
    let all = std::env::var("IOPLANE_MUTATIONS").is_ok_and(|which| which == "all");
    let wrong: Vec<_> = Law::ALL.into_iter().flat_map(|law| without(law, all)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
