//! A build without any one of invariants 1 to 6 fails the suite, because of that invariant. (Invariants 7 and 8: `bounds.rs`.)
//!
//! Where each invariant can be taken out (`removed(Invariant::..)`):
//!
//! | invariant | hook |
//! |---|---|
//! | 1 keeps what arrives | `ioplane_embed::SharedDevice::access`: answers at once while the device is held; `ioplane_host::vfio_user::Session::access`: the same for a client; `ioplane_virtio::Queue::new` and the toy ring's poller: forget the kicks that have come meanwhile |
//! | 2 looks again | `ioplane_device::PollerSlot::must_look`: a fresh slot rests without a look at its ring |
//! | 3 signals once | `ioplane_device::PollerSlot::step`: the poller's `resume` is left out |
//! | 4 distrusts loaded | `Device::load` of each device: its checks are left out; `ioplane_virtio::journal`, `open` of both kinds: takes a region of any version for its own |
//! | 5 gives back | `ioplane_device::Missed::undrain`: pollers are not told to take work again; `ioplane_device::Lifecycle::undrain`: a device without pollers goes on becoming quiescent |
//! | 6 marks stores | `ioplane_memory::GuestView::wrote`: no mark |
//!
//! What fails is what the declaration says (`ConformanceCheck::expects`), on every kit, and nothing else. By default the checks of invariants are run;
//! with `IOPLANE_MUTATIONS=all` all checks are, which takes some minutes (nightly).
//!
//! One test, and a process for each invariant, since what is taken out is taken out of the whole process. The kits run beside each other: most of the time goes
//! by in waiting for what will never come.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ioplane_device::mutation::{self, Invariant};
use ioplane_testkit::conformance::declared::{ConformanceCheck, Entry, Expected, KITS};
use ioplane_testkit::conformance::proof::VACUOUS;
use ioplane_testkit::conformance::{FailedCheck, PLAN, Plan};

/// Short: what an invariant's absence leaves hanging is to be found soon.
const SHORT: Plan = Plan { rounds: 100, patience: Duration::from_secs(3), ..PLAN };

/// For what was not as declared: on a machine that is busy, kits beside each other starve.
const PATIENT: Plan = Plan { patience: Duration::from_secs(15), ..SHORT };

/// What is not as declared of a check whose invariant was taken out.
fn judge(entry: &Entry, check: &ConformanceCheck, invariant: Invariant, plan: &Plan) -> Option<String> {
    let outcome = check.run(entry.kit, plan).map(drop);
    let blames = |finding: &FailedCheck, invariant: Invariant| {
        finding.what.starts_with(&format!("invariant {}:", invariant as u8))
    };
    let wrong = match (check.expects(invariant), &outcome) {
        (_, Err(finding)) if finding.what.starts_with(VACUOUS) => "asserts nothing",
        (Expected::Blames, Err(finding)) if blames(finding, invariant) => return None,
        (Expected::Blames, _) => "does not say so",
        (Expected::Fails, Ok(())) => "does not notice",
        (Expected::Passes, Err(_)) => "fails without need",
        (Expected::Fails | Expected::MayFail, Err(finding)) => {
            // An invariant that needs this one as well is rightly missed.
            let own = |other: Invariant| other == invariant || check.invariant == Some(other);
            if !Invariant::OF_DEVICES.into_iter().any(|other| !own(other) && blames(finding, other)) {
                return None;
            }
            "another invariant is blamed"
        }
        (Expected::MayFail | Expected::Passes, Ok(())) => return None,
    };
    Some(format!(
        "{}::{} without invariant {}: {wrong}: {outcome:?}",
        entry.name, check.name, invariant as u8
    ))
}

/// Every kit with `invariant` taken out: a few beside each other, and what was not as declared once more by itself.
fn without(invariant: Invariant, all: bool) -> Vec<String> {
    const BESIDE: usize = 8;
    mutation::remove(Some(invariant));
    let next = AtomicUsize::new(0);
    let run = || {
        let mut wrong = Vec::new();
        while let Some(entry) = KITS.get(next.fetch_add(1, Ordering::Relaxed)) {
            for check in entry.checks().filter(|check| all || check.invariant.is_some()) {
                wrong.extend(judge(entry, check, invariant, &SHORT).map(|why| (entry, check, why)));
            }
        }
        wrong
    };
    let suspects: Vec<_> = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..BESIDE).map(|_| scope.spawn(run)).collect();
        runs.into_iter().flat_map(|run| run.join().expect("a check panicked")).collect()
    });
    let confirmed = suspects.into_iter().filter_map(|(entry, check, why)| {
        println!("once more: {why}");
        judge(entry, check, invariant, &PATIENT)
    });
    let wrong = confirmed.collect();
    mutation::remove(None);
    wrong
}

/// What a process that begins without it ([`mutation::VARIABLE`]) came to: what it said, if anything was not as declared. One that is ended by a signal (without its invariant an I/O
/// core may meet what it never should, and abort) gets a second run, since it has looked at nothing else.
fn process_without(test: &str, invariant: Invariant) -> Option<String> {
    let run = || {
        let mut process = Command::new(std::env::current_exe().expect("this program"));
        process.args([test, "--exact", "--nocapture"]).env(mutation::VARIABLE, (invariant as u8).to_string());
        let output = process.output().expect("a process of this program");
        let said =
            [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        (output.status, said)
    };
    let (mut status, mut said) = run();
    if let Some(signal) = status.signal() {
        println!(
            "once more: without invariant {} a process ended by signal {signal}:\n{said}",
            invariant as u8
        );
        (status, said) = run();
    }
    (!status.success()).then(|| format!("without invariant {}: {status}\n{said}", invariant as u8))
}

#[test]
fn each_invariant_is_missed_where_it_is_declared_and_nowhere_else() {
    if let Ok(number) = std::env::var(mutation::VARIABLE) {
        let all = std::env::var("IOPLANE_MUTATIONS").is_ok_and(|which| which == "all");
        let mut invariants = Invariant::OF_DEVICES.into_iter();
        let invariant = invariants.find(|one| (*one as u8).to_string() == number).expect("an invariant");
        let wrong = without(invariant, all);
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        return;
    }
    let test = "each_invariant_is_missed_where_it_is_declared_and_nowhere_else";
    let wrong: Vec<_> =
        Invariant::OF_DEVICES.into_iter().filter_map(|invariant| process_without(test, invariant)).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
