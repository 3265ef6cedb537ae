//! `[[group]]`.

use ioplane_api::spec::{Flaw, GroupForm, GroupSpec};

use super::network::{checked, name};
use super::reader::{Place, TableReader};
use super::{Config, Problem};

pub fn group(mut reader: TableReader<'_, '_>) -> Option<(GroupSpec, Place)> {
    let name = name(&mut reader, "group");
    let form = GroupForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

/// What is wrong between the tables of groups.
pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    for (index, (group, place)) in config.groups.iter().enumerate() {
        if let Some((_, earlier)) = config.groups[..index].iter().find(|(other, _)| other.name == group.name)
        {
            let reason = format!("group {} is there already, in line {}", group.name, earlier.line);
            problems.push(place.problem(Flaw::new("name", reason, "give every group a name of its own")));
        }
    }
}
