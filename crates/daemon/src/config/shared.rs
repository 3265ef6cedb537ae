//! What disks, NICs and PCI functions have of one kind, and what is wrong between them: names, sockets, addresses; cores, groups and switches
//! that are not there.

use std::path::Path;

use ioplane_api::spec::{Flaw, PortSpec, ServedSpec};

use super::reader::{Place, nearest};
use super::{Config, Problem};

/// One disk, NIC or PCI function.
struct Row<'c> {
    /// What it is, and what one of several is called in a sentence.
    kind: &'static str,
    every: &'static str,
    name: &'c str,
    sockets: [(&'static str, Option<&'c Path>); 2],
    port: Option<PortSpec>,
    core: Option<u32>,
    group: Option<&'c str>,
    place: &'c Place,
}

impl<'c> Row<'c> {
    fn of<S: ServedSpec>(kind: &'static str, every: &'static str, table: &'c (S, Place)) -> Self {
        let (spec, place) = table;
        Row {
            kind,
            every,
            name: spec.name(),
            sockets: [("socket", spec.socket()), ("migration_socket", spec.migration_socket())],
            port: spec.port(),
            core: spec.core(),
            group: spec.group(),
            place,
        }
    }

    /// What this one has and `earlier` has already.
    fn taken_by(&self, earlier: &Row<'_>) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        let (kind, name) = (earlier.kind, earlier.name);
        if name == self.name {
            let line = earlier.place.line;
            flaws.push(if kind == self.kind {
                let remedy = format!("give every {} a name of its own", self.every);
                Flaw::new("name", format!("{kind} {name} is there already, in line {line}"), remedy)
            } else {
                let remedy = "give disks, NICs and PCI functions names of their own";
                Flaw::new("name", format!("{name} is the name of a {kind}, in line {line}"), remedy)
            });
        }
        for (field, socket) in self.sockets {
            let same = |(_, theirs): &(&str, Option<&Path>)| socket.is_some() && *theirs == socket;
            if let Some((taken, _)) = earlier.sockets.into_iter().find(same) {
                let reason = format!("the {taken} of {kind} {name}, in line {}", earlier.place.of(taken));
                let remedy = format!("give every {} a socket of its own, or leave it out", self.every);
                flaws.push(Flaw::new(field, reason, remedy));
            }
        }
        // One of the same name is told so already.
        if let (Some(ours), Some(theirs)) = (&self.port, &earlier.port)
            && (&ours.switch, ours.mac) == (&theirs.switch, theirs.mac)
            && name != self.name
        {
            let line = earlier.place.of("mac");
            let reason = format!("{} is the address of {kind} {name} already, in line {line}", ours.mac);
            let remedy = "give every NIC of a switch its own address, or leave it out";
            flaws.push(Flaw::new("mac", reason, remedy));
        }
        flaws
    }
}

/// What is wrong between the tables of disks, NICs, PCI functions and exports.
pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    let mut rows: Vec<Row<'_>> = config.disks.iter().map(|table| Row::of("disk", "disk", table)).collect();
    rows.extend(config.nics.iter().map(|table| Row::of("nic", "NIC", table)));
    rows.extend(config.functions.iter().map(|table| Row::of("PCI function", "PCI function", table)));
    rows.extend(config.exports.iter().map(|table| Row::of("export", "export", table)));
    for (index, row) in rows.iter().enumerate() {
        let mut flaws: Vec<Flaw> = rows[..index].iter().flat_map(|earlier| row.taken_by(earlier)).collect();
        flaws.extend(no_core(config, row.core));
        flaws.extend(row.group.and_then(|group| no_group(config, group)));
        flaws.extend(row.port.as_ref().and_then(|port| no_switch(config, &port.switch)));
        problems.extend(flaws.into_iter().map(|flaw| row.place.problem(flaw)));
    }
    for (core, place) in &config.cores {
        let flaw = core.reserve.as_deref().and_then(|group| no_group(config, group));
        problems.extend(flaw.map(|flaw| place.problem(Flaw { field: "reserve", ..flaw })));
    }
    if !config.cores.is_empty() && config.cores.iter().all(|(core, _)| core.reserve.is_some()) {
        let (_, place) = &config.cores[0];
        let remedy = "leave reserve out of one of them, or add a [[core]]";
        problems.push(place.problem(Flaw::new("reserve", "every core is reserved for a group", remedy)));
    }
}

/// A core that is not there.
pub fn no_core(config: &Config, core: Option<u32>) -> Option<Flaw> {
    let core = core.filter(|core| !config.cores.iter().any(|(known, _)| known.id == *core))?;
    let known: Vec<String> = config.cores.iter().map(|(core, _)| core.id.to_string()).collect();
    let others =
        if known.is_empty() { String::new() } else { format!(", or name one of {}", known.join(", ")) };
    let remedy = format!("add a [[core]] with id = {core}{others}");
    Some(Flaw::new("core", format!("there is no core {core}"), remedy))
}

fn no_group(config: &Config, group: &str) -> Option<Flaw> {
    missing("group", group, config.groups.iter().map(|(known, _)| known.name.as_str()))
}

fn no_switch(config: &Config, switch: &str) -> Option<Flaw> {
    missing("switch", switch, config.switches.iter().map(|(known, _)| known.name.as_str()))
}

/// The flaw of a field `kind` that names something of that kind which the configuration has not.
fn missing<'a>(kind: &'static str, name: &str, known: impl Iterator<Item = &'a str>) -> Option<Flaw> {
    let names: Vec<&str> = known.collect();
    if names.contains(&name) {
        return None;
    }
    let add = format!("add a [[{kind}]] with name = {name:?}");
    let remedy = nearest(name, &names).map_or(add.clone(), |near| format!("write {near}, or {add}"));
    Some(Flaw::new(kind, format!("there is no {kind} {name}"), remedy))
}
