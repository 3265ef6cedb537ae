//! What the VM took without and with the interposer: a table for people, an object for programs.

use ioplane_e2e::clustering::boot_percent;
use ioplane_e2e::{Accelerator, ClusteringFigures, GuestWork, OldWork};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;

/// Reads and pings that are watched, and pings after a switch.
pub const FEW: u32 = 10;
/// Names in the table.
const LINES: usize = 12;
/// By how much more than the tests of the interposer allow may be left of a boot's exits: on a busy host more clusters end by their time limit, and the demo is to hold there too.
const BUSY: u64 = 2;
/// What is left of a ping's exits at most, in per cent.
const PING_PERCENT: f64 = 10.0;
/// Fewer accesses at a boot would prove nothing.
const BOOT_LEAST: u64 = 2000;

/// Pings after clustering was switched while the VM ran.
#[derive(Debug)]
pub struct Switched {
    pub off: GuestWork,
    pub on: GuestWork,
}

/// Exits to QEMU that concern one register, as `ioplane exits` names it, during the same work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Named {
    pub name: String,
    pub plain: u64,
    pub clustered: u64,
}

impl Named {
    /// Of two reports of `ioplane exits`, those first that were most without the interposer.
    pub fn both(plain: &Value, clustered: &Value) -> Vec<Named> {
        let rows = |report: &Value| -> Vec<(String, u64)> {
            let rows = report["registers"].as_array().into_iter().flatten();
            let row = |row: &Value| Some((row["name"].as_str()?.to_owned(), row["user"].as_u64()?));
            rows.filter_map(row).filter(|(_, user)| *user > 0).collect()
        };
        let of = |rows: &[(String, u64)], name: &str| -> u64 {
            rows.iter().filter(|(other, _)| other == name).map(|(_, user)| user).sum()
        };
        let (plain, clustered) = (rows(plain), rows(clustered));
        let mut names: Vec<&String> = plain.iter().chain(&clustered).map(|(name, _)| name).collect();
        names.sort();
        names.dedup();
        let named = names.into_iter().map(|name| Named {
            name: name.clone(),
            plain: of(&plain, name),
            clustered: of(&clustered, name),
        });
        let mut named: Vec<Named> = named.collect();
        named.sort_by_key(|row| std::cmp::Reverse((row.plain, row.clustered)));
        named
    }
}

/// Both sides, and whether the counts show what they should.
#[derive(Debug)]
pub struct ExitsOutcome {
    accelerator: Accelerator,
    plain: OldWork,
    clustered: OldWork,
    names: Vec<Named>,
    switched: Switched,
    saved: u64,
    pub problems: Vec<String>,
}

impl ExitsOutcome {
    /// Only counts are judged: times of a translated processor prove nothing.
    pub fn judge(
        accelerator: Accelerator,
        [plain, clustered]: [OldWork; 2],
        names: Vec<Named>,
        switched: Switched,
        saved: u64,
    ) -> ExitsOutcome {
        let mut problems = Vec::new();
        let mut must = |holds: bool, problem: String| {
            if !holds {
                problems.push(problem);
            }
        };
        let boots = [&plain, &clustered].map(|side| side.boot.accesses());
        must(boots[0] >= BOOT_LEAST, format!("a boot with {} accesses proves nothing", boots[0]));
        must(
            boots[1] <= boots[0] * BUSY * boot_percent(&plain.boot) / 100,
            format!("the boot took {} exits, {} without the interposer", boots[1], boots[0]),
        );
        let (ide, before) = (clustered.ide.exits_each(), plain.ide.exits_each());
        must(ide < before, format!("an IDE read took {ide:.1} exits, {before:.1} without the interposer"));
        let ping = plain.pings.exits_each();
        let few = ping * PING_PERCENT / 100.0;
        for (what, work) in [("with the interposer", &clustered.pings), ("switched on again", &switched.on)] {
            let each = work.exits_each();
            must(each <= few, format!("a ping took {each:.1} exits {what}, {ping:.1} without it"));
        }
        let off = switched.off.exits_each();
        must(off >= ping * 0.8, format!("switched off, a ping took {off:.1} exits, {ping:.1} without it"));
        must(!names.is_empty(), "ioplane exits has named no exit".into());
        must(saved > 0, "the interposer says that it has saved no exit".into());
        ExitsOutcome { accelerator, plain, clustered, names, switched, saved, problems }
    }

    pub fn json(&self) -> String {
        let ExitsOutcome { accelerator, plain, clustered, names, switched, saved, problems } = self;
        let object = json!({
            "verified": problems.is_empty(),
            "accelerator": accelerator.name(),
            "figures": ClusteringFigures::of(plain, clustered),
            "ne2000_exits_per_ping_off": switched.off.exits_each(),
            "ne2000_exits_per_ping_on_again": switched.on.exits_each(),
            "exits_saved": saved,
            "registers": names,
        });
        format!("{object:#}")
    }

    pub fn table(&self) -> String {
        let ExitsOutcome { accelerator, plain, clustered, names, switched, saved, problems } = self;
        let whole = |count: u64| count.to_string();
        let tenths = |value: f64| format!("{value:.1}");
        let kinds = [
            ("4 KiB read from the IDE disk", &plain.ide, &clustered.ide),
            ("ping of 1,000 bytes by the NE2000", &plain.pings, &clustered.pings),
        ];
        let mut text = line("", "stock QEMU", "ioplane run");
        text += "Exits to QEMU for a device access\n";
        text += &line("  boot", &whole(plain.boot.accesses()), &whole(clustered.boot.accesses()));
        for (name, a, b) in kinds {
            text += &line(&format!("  {name}"), &tenths(a.exits_each()), &tenths(b.exits_each()));
        }
        text += &line("  ping after `ioplane exits cluster off`", "", &tenths(switched.off.exits_each()));
        text += &line("  ping after `ioplane exits cluster on`", "", &tenths(switched.on.exits_each()));
        text += "Time by the guest's clock\n";
        text +=
            &line("  boot of its kernel, s", &tenths(plain.boot_seconds), &tenths(clustered.boot_seconds));
        for (name, a, b) in kinds {
            text += &line(&format!("  {name}, ms"), &tenths(a.ms_each), &tenths(b.ms_each));
        }
        text += &format!("Exits by name, {FEW} reads and {FEW} pings\n");
        for row in names.iter().take(LINES) {
            text += &line(&format!("  {}", row.name), &whole(row.plain), &whole(row.clustered));
        }
        let _ = write!(
            text,
            "The interposer reports {saved} exits saved. The KVM host is a VM on {accelerator}.\n{}",
            match problems.as_slice() {
                [] =>
                    "Counts are those of the KVM host's kernel. All data and all replies were right.".into(),
                problems => format!("NOT VERIFIED: {}", problems.join("; ")),
            }
        );
        text
    }
}

/// A line of the table: what is counted, without and with the interposer.
fn line(name: &str, plain: &str, clustered: &str) -> String {
    format!("{name:66}{plain:>12}{clustered:>13}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_is_named_too() {
        let report = |rows: &[(&str, u64)]| {
            let rows: Vec<Value> =
                rows.iter().map(|(name, user)| json!({"name": name, "user": user})).collect();
            json!({"registers": rows})
        };
        let named = Named::both(&report(&[("a", 1), ("b", 9), ("msr", 0)]), &report(&[("b", 2), ("c", 3)]));
        let rows: Vec<_> = named.iter().map(|row| (row.name.as_str(), row.plain, row.clustered)).collect();
        assert_eq!(rows, [("b", 9, 2), ("a", 1, 0), ("c", 0, 3)]);
    }
}
