//! The conformance suite: on every kit the checks that it declares, and whether the declaration is true.
//!
//! The tests are made from [`KITS`] when this runs: one for each check of each kit, called `KIT::CHECK`.

use std::path::Path;

use ioplane_testkit::conformance::declared::{CHECKS, ConformanceCheck, Entry, KITS, Offer};
use ioplane_testkit::conformance::proof::VACUOUS;
use ioplane_testkit::conformance::{PLAN, Plan, document};
use libtest_mimic::{Arguments, Failed, Trial};

fn conforms(entry: &Entry, check: &ConformanceCheck) -> Result<(), Failed> {
    let proof = check.run(entry.kit, &PLAN).map_err(|finding| finding.what)?;
    println!("{}::{}: asserted {} times", entry.name, check.name, proof.assertions());
    Ok(())
}

fn declares_what_it_offers(entry: &Entry) -> Result<(), Failed> {
    let machine = entry.kit.boot(&PLAN);
    let agrees = entry.agrees(&machine);
    machine.host.close();
    Ok(agrees?)
}

/// 49 of 234 tests passed like this: the check found nothing to do, and said that all was well.
fn hole_5_a_check_that_asserts_nothing_fails() -> Result<(), Failed> {
    let mut passed = Vec::new();
    // Long enough for the check to begin.
    let short = Plan { rounds: 24, ..PLAN };
    for entry in KITS {
        for check in CHECKS.iter().filter(|check| !entry.takes(check)) {
            match check.run(entry.kit, &short) {
                Err(finding) if finding.what.starts_with(VACUOUS) => {}
                other => passed.push(format!("{}::{}: {other:?}", entry.name, check.name)),
            }
        }
    }
    if passed.is_empty() { Ok(()) } else { Err(passed.join("\n").into()) }
}

fn every_offer_and_every_check_is_used() -> Result<(), Failed> {
    for check in CHECKS {
        if !KITS.iter().any(|entry| entry.takes(check)) {
            return Err(format!("no kit takes {}", check.name).into());
        }
        if CHECKS.iter().filter(|other| other.name == check.name).count() > 1 {
            return Err(format!("two checks are called {}", check.name).into());
        }
    }
    for entry in KITS {
        if KITS.iter().filter(|other| other.name == entry.name).count() > 1 {
            return Err(format!("two kits are called {}", entry.name).into());
        }
    }
    match Offer::ALL.iter().find(|offer| !CHECKS.iter().any(|check| check.needs == Some(**offer))) {
        Some(offer) => Err(format!("no check needs {}", offer.name()).into()),
        None => Ok(()),
    }
}

fn documentation_says_what_is_declared() -> Result<(), Failed> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(document::PATH);
    let page = document::page();
    if std::env::var_os(document::WRITE).is_some() {
        std::fs::write(&path, &page)?;
    }
    if std::fs::read_to_string(&path)? != page {
        let (file, variable) = (document::PATH, document::WRITE);
        return Err(format!(
            "{file} is not what is declared: {variable}=1 cargo test -p ioplane-testkit --test conformance documentation"
        )
        .into());
    }
    Ok(())
}

fn main() {
    let mut trials = vec![
        Trial::test("hole_5_a_check_that_asserts_nothing_fails", hole_5_a_check_that_asserts_nothing_fails),
        Trial::test("every_offer_and_every_check_is_used", every_offer_and_every_check_is_used),
        Trial::test("documentation_says_what_is_declared", documentation_says_what_is_declared),
    ];
    for entry in KITS {
        let name = format!("{}::declares_what_it_offers", entry.name);
        trials.push(Trial::test(name, || declares_what_it_offers(entry)));
        for check in entry.checks() {
            trials.push(Trial::test(format!("{}::{}", entry.name, check.name), || conforms(entry, check)));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}
