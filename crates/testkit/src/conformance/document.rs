//! `docs/guide/conformance.md`, written from the declaration.

use std::fmt::Write;

use ioplane_device::mutation::Invariant;

use super::declared::{CHECKS, Expected, KITS, Offer};

/// Where it is, from the root of the repository.
pub const PATH: &str = "docs/guide/conformance.md";

/// The environment variable that has `tests/conformance.rs` write it.
pub const WRITE: &str = "IOPLANE_WRITE_DOCS";

const HEAD: &str = "\
<!-- Written by `IOPLANE_WRITE_DOCS=1 cargo test -p ioplane-testkit --test conformance documentation`
     from crates/testkit/src/conformance/declared.rs: change it there. -->
# Conformance

The conformance suite runs a device in front of its guest, on one host, and stops, saves, moves and restarts it in every way while the
guest runs. What the guest sees must equal what it sees without interruptions.

```
cargo test -p ioplane-testkit --test conformance                          # all checks that apply
cargo test -p ioplane-testkit --test conformance -- virtio_blk            # one device
cargo test -p ioplane-testkit --features mutations --test mutations       # each invariant taken out
```

A device on a host is a *kit*. A kit declares what its device offers there, and gets the checks that need no more than that. A test
boots every kit and compares it with its declaration. A check that runs and asserts nothing fails with `vacuous:`.

";

fn invariant(invariant: Option<Invariant>) -> String {
    invariant.map_or(String::new(), |invariant| (invariant as u8).to_string())
}

fn offers() -> String {
    let mut out = String::from("## Offers\n\n| offer | meaning |\n|---|---|\n");
    for offer in Offer::ALL {
        let _ = writeln!(out, "| {} | {} |", offer.name(), offer.what());
    }
    out
}

fn checks() -> String {
    let mut out =
        String::from("\n## Checks\n\n| | check | invariant | needs | asserts |\n|---:|---|---|---|---|\n");
    for (number, check) in (1..).zip(CHECKS) {
        let needs = check.needs.map_or("", Offer::name);
        let _ = writeln!(
            out,
            "| {number} | `{}` | {} | {needs} | {} |",
            check.name,
            invariant(check.invariant),
            check.asserts
        );
    }
    out
}

fn columns(first: &str) -> String {
    let numbers: Vec<_> = (1..=CHECKS.len()).map(|number| number.to_string()).collect();
    format!("| {first} | {} |\n|---|{}\n", numbers.join(" | "), ":-:|".repeat(CHECKS.len()))
}

fn kits() -> String {
    let mut out = String::from(
        "\n## Devices and hosts\n\nChecks by number; `+` is run, an empty field does not apply.\n\n",
    );
    out += &columns("device, host");
    let mut tests = 0;
    for entry in KITS {
        let cells: Vec<_> = CHECKS.iter().map(|check| if entry.takes(check) { "+" } else { "" }).collect();
        tests += entry.checks().count();
        let _ = writeln!(out, "| {}, {} | {} |", entry.device, entry.on.name(), cells.join(" | "));
    }
    let _ = writeln!(out, "\n{tests} checks on {} kits.", KITS.len());
    out
}

fn lacking() -> String {
    let mut out =
        String::from("\n## What does not apply\n\n| missing | reason | device, host |\n|---|---|---|\n");
    let mut reasons: Vec<(Offer, &str)> = Vec::new();
    for lacking in KITS.iter().flat_map(|entry| entry.lacks) {
        if !reasons.contains(lacking) {
            reasons.push(*lacking);
        }
    }
    for (offer, why) in reasons {
        let kits = KITS.iter().filter(|entry| entry.lacks.contains(&(offer, why)));
        let kits: Vec<_> = kits.map(|entry| format!("{}, {}", entry.device, entry.on.name())).collect();
        let _ = writeln!(out, "| {} | {why} | {} |", offer.name(), kits.join("; "));
    }
    out
}

fn mutations() -> String {
    let mut out = String::from(
        "\n## Invariants taken out\n\nThe feature `mutations` takes one of [invariants](../architecture.md) 1 to 6 out of the whole process. On every \
         kit that gets the check: `invariant` fails and names the invariant, `fails` fails, `may` may fail but names no other invariant, an empty field \
         passes. By default the checks of invariants are run; `IOPLANE_MUTATIONS=all` (nightly) runs all of them.\n\n",
    );
    out += &columns("without invariant");
    for invariant in Invariant::OF_DEVICES {
        let cells: Vec<_> = CHECKS
            .iter()
            .map(|check| match check.expects(invariant) {
                Expected::Blames => "invariant",
                Expected::Fails => "fails",
                Expected::MayFail => "may",
                Expected::Passes => "",
            })
            .collect();
        let _ = writeln!(out, "| {} | {} |", invariant as u8, cells.join(" | "));
    }
    out
}

pub fn page() -> String {
    [HEAD.to_owned(), offers(), checks(), kits(), lacking(), mutations()].concat()
}
