//! `[[switch]]` and `[[nic]]`.

use ioplane_api::spec::{FieldSource, Flaw, NicForm, NicSpec, SwitchForm, SwitchSpec};

use super::reader::{Place, TableReader};
use super::{Config, Problem};

/// The name of a table's thing; that it has none is noted.
pub(super) fn name(reader: &mut TableReader<'_, '_>, what: &str) -> Option<String> {
    let name = reader.text("name");
    if name.is_none() && !reader.has("name") {
        reader.note("name", format!("a {what} without a name"), "write name = \"NAME\"".to_owned());
    }
    name
}

/// Notes what is wrong with a form.
pub(super) fn checked<T>(reader: &mut TableReader<'_, '_>, spec: Result<T, Vec<Flaw>>) -> Option<T> {
    spec.map_err(|flaws| {
        flaws.into_iter().for_each(|flaw| reader.note(flaw.field, flaw.reason, flaw.remedy));
    })
    .ok()
}

/// One `[[switch]]`.
pub fn switch(mut reader: TableReader<'_, '_>) -> Option<(SwitchSpec, Place)> {
    let name = name(&mut reader, "switch");
    let form = SwitchForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

/// One `[[nic]]`.
pub fn nic(mut reader: TableReader<'_, '_>) -> Option<(NicSpec, Place)> {
    let name = name(&mut reader, "nic");
    let form = NicForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

/// What is wrong between tables.
pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    let known = |core: u32| config.cores.iter().any(|(spec, _)| spec.id == core);
    let core_flaw = |core: Option<u32>| {
        let core = core.filter(|core| !known(*core))?;
        let ids: Vec<String> = config.cores.iter().map(|(core, _)| core.id.to_string()).collect();
        let remedy = format!("add a [[core]] with id = {core}, or name one of {}", ids.join(", "));
        Some(Flaw::new("core", format!("there is no core {core}"), remedy))
    };
    for (index, (switch, place)) in config.switches.iter().enumerate() {
        for (other, earlier) in &config.switches[..index] {
            if other.name == switch.name {
                let reason = format!("switch {} is there already, in line {}", switch.name, earlier.line);
                problems.push(place.problem(Flaw::new(
                    "name",
                    reason,
                    "give every switch a name of its own",
                )));
            }
            if switch.uplink.is_some() && other.uplink == switch.uplink {
                let line = earlier.of("uplink");
                let reason = format!("the uplink of switch {} already, in line {line}", other.name);
                problems.push(place.problem(Flaw::new(
                    "uplink",
                    reason,
                    "give every switch its own TAP interface",
                )));
            }
        }
        problems.extend(core_flaw(switch.core).map(|flaw| place.problem(flaw)));
    }
    for (index, (nic, place)) in config.nics.iter().enumerate() {
        let mut problem = |flaw| problems.push(place.problem(flaw));
        if let Some((_, disk)) = config.disks.iter().find(|(disk, _)| disk.name == nic.name) {
            let reason = format!("{} is the name of a disk, in line {}", nic.name, disk.line);
            problem(Flaw::new("name", reason, "give disks and NICs names of their own"));
        }
        for (other, earlier) in &config.nics[..index] {
            if other.name == nic.name {
                let reason = format!("nic {} is there already, in line {}", nic.name, earlier.line);
                problem(Flaw::new("name", reason, "give every NIC a name of its own"));
            }
            if other.mac == nic.mac && other.switch == nic.switch && other.name != nic.name {
                let line = earlier.of("mac");
                let reason =
                    format!("{} is the address of nic {} already, in line {line}", nic.mac, other.name);
                problem(Flaw::new(
                    "mac",
                    reason,
                    "give every NIC of a switch its own address, or leave it out",
                ));
            }
            if nic.socket.is_some() && other.socket == nic.socket {
                let reason = format!("the socket of nic {}, in line {}", other.name, earlier.of("socket"));
                problem(Flaw::new("socket", reason, "give every NIC a socket of its own, or leave it out"));
            }
        }
        if let Some((disk, earlier)) =
            config.disks.iter().find(|(disk, _)| nic.socket.is_some() && disk.socket == nic.socket)
        {
            let reason = format!("the socket of disk {}, in line {}", disk.name, earlier.of("socket"));
            problem(Flaw::new("socket", reason, "give every NIC a socket of its own, or leave it out"));
        }
        if !config.switches.iter().any(|(switch, _)| switch.name == nic.switch) {
            let names: Vec<&str> = config.switches.iter().map(|(switch, _)| switch.name.as_str()).collect();
            let remedy = match super::nearest(&nic.switch, &names) {
                Some(near) => format!("write {near}, or add a [[switch]] with name = {:?}", nic.switch),
                None => format!("add a [[switch]] with name = {:?}", nic.switch),
            };
            problem(Flaw::new("switch", format!("there is no switch {}", nic.switch), remedy));
        }
        if let Some(flaw) = core_flaw(nic.core) {
            problem(flaw);
        }
    }
}
