//! `group list` and `group show`.

use ioplane_api::report::{GroupReport, GroupUseReport, InFlightReport};
use ioplane_api::size::Size;

use super::fact;
use crate::command::table::Table;

/// `group list`.
pub fn groups(groups: &[GroupReport]) -> String {
    if groups.is_empty() {
        return "no groups: add one with `ioplane group add`; until then all devices take turns\n".to_owned();
    }
    let mut table = Table::new(&["NAME", "WEIGHT", "DISKS", "NICS", "LIMITED", "ORIGIN"]);
    for group in groups {
        table.row(vec![
            group.name.clone(),
            group.weight.to_string(),
            names(&group.disks),
            names(&group.nics),
            if limits(group).is_empty() { "no" } else { "yes" }.to_owned(),
            group.origin.clone(),
        ]);
    }
    table.to_string()
}

/// `group show`.
pub fn group(group: &GroupReport) -> String {
    let mut text = groups(std::slice::from_ref(group));
    let limits = limits(group);
    if limits.is_empty() {
        text += &fact("limits", "none");
    }
    limits.into_iter().for_each(|(of, words)| text += &fact(of, words));
    text += &fact("used", used(&group.used));
    for one in &group.used_per_core {
        text += &fact(&format!("  of core {}", one.core), used(&one.used));
    }
    group.in_flight.iter().for_each(|lane| text += &fact("in flight", in_flight(lane)));
    text
}

/// The time of I/O cores that it has used.
fn used(used: &GroupUseReport) -> String {
    let [busy, empty] = [used.busy_us, used.empty_us].map(|us| us as f64 / 1e6);
    format!("{busy:.2} s with work; {empty:.2} s of polling that found nothing, {} polls", used.empty_polls)
}

/// What it has in flight from one core, and what it may have.
fn in_flight(lane: &InFlightReport) -> String {
    let core = lane.core;
    if lane.host_disks.is_empty() {
        return format!(
            "not divided over cores: the host does not tell on which disk the backings of core {core} lie"
        );
    }
    let (disks, bytes) = (lane.host_disks.join(", "), Size(lane.bytes));
    match lane.bound_bytes {
        Some(bound) => format!("{bytes} of at most {} on {disks} from core {core}", Size(bound)),
        None => format!("{bytes} on {disks} from core {core}, no other group uses it"),
    }
}

fn names(names: &[String]) -> String {
    if names.is_empty() { "-".to_owned() } else { names.join(", ") }
}

/// The limits that there are, each with what it is of.
fn limits(group: &GroupReport) -> Vec<(&'static str, String)> {
    let of =
        [("limits of disks", "requests"), ("limits of sending", "frames"), ("limits of receiving", "frames")];
    let all = group.limits().into_iter().zip(of);
    all.filter_map(|(limits, (of, unit))| Some((of, limits.words(unit)?))).collect()
}
