//! `[[switch]]` and `[[nic]]`.

use ioplane_api::spec::{FieldSource, Flaw, NicForm, NicSpec, SwitchForm, SwitchSpec};

use super::reader::{Place, TableReader};
use super::shared::no_core;
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

pub fn switch(mut reader: TableReader<'_, '_>) -> Option<(SwitchSpec, Place)> {
    let name = name(&mut reader, "switch");
    let form = SwitchForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

pub fn nic(mut reader: TableReader<'_, '_>) -> Option<(NicSpec, Place)> {
    let name = name(&mut reader, "nic");
    let form = NicForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

/// What is wrong between the tables of switches.
pub fn check(config: &Config, problems: &mut Vec<Problem>) {
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
        problems.extend(no_core(config, switch.core).map(|flaw| place.problem(flaw)));
    }
}
