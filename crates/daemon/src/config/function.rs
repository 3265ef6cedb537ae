//! `[[pci]]`.

use ioplane_api::spec::{Flaw, FunctionForm, FunctionSpec};

use super::network::{checked, name};
use super::reader::{Place, TableReader, nearest};
use super::{Config, Problem};

/// One `[[pci]]`.
pub fn function(mut reader: TableReader<'_, '_>) -> Option<(FunctionSpec, Place)> {
    let name = name(&mut reader, "PCI function");
    let form = FunctionForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

/// What is wrong between tables.
pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    for (index, (function, place)) in config.functions.iter().enumerate() {
        let mut problem = |field, reason: String, remedy: &str| {
            problems.push(place.problem(Flaw::new(field, reason, remedy)))
        };
        let name = &function.name;
        let others = config.disks.iter().map(|(disk, place)| ("disk", &disk.name, &disk.socket, place));
        let others =
            others.chain(config.nics.iter().map(|(nic, place)| ("nic", &nic.name, &nic.socket, place)));
        for (kind, other, socket, earlier) in others {
            if other == name {
                let reason = format!("{name} is the name of a {kind}, in line {}", earlier.line);
                problem("name", reason, "give disks, NICs and PCI functions names of their own");
            }
            if function.socket.is_some() && *socket == function.socket {
                let reason = format!("the socket of {kind} {other}, in line {}", earlier.of("socket"));
                problem("socket", reason, "give every PCI function a socket of its own, or leave it out");
            }
        }
        for (other, earlier) in &config.functions[..index] {
            if other.name == *name {
                let reason = format!("PCI function {name} is there already, in line {}", earlier.line);
                problem("name", reason, "give every PCI function a name of its own");
            }
            if function.socket.is_some() && other.socket == function.socket {
                let line = earlier.of("socket");
                let reason = format!("the socket of PCI function {}, in line {line}", other.name);
                problem("socket", reason, "give every PCI function a socket of its own, or leave it out");
            }
            if let Some(address) = function.address()
                && other.address() == Some(address)
            {
                let reason = format!(
                    "{address} is that of PCI function {}, in line {}",
                    other.name,
                    earlier.of("host")
                );
                problem("host", reason, "a function of the host can be handed to one guest at a time");
            }
            if let Some(tap) = function.tap()
                && other.tap() == Some(tap)
            {
                let reason =
                    format!("{tap} is that of PCI function {}, in line {}", other.name, earlier.of("tap"));
                problem(
                    "tap",
                    reason,
                    "give it another TAP interface, or plug both into a switch with an uplink",
                );
            }
            if let (Some(switch), Some(mac)) = (function.switch(), function.mac())
                && other.name != *name
                && (other.switch(), other.mac()) == (Some(switch), Some(mac))
            {
                let reason = format!(
                    "{mac} is the address of PCI function {} already, in line {}",
                    other.name,
                    earlier.of("mac")
                );
                problem("mac", reason, "give every NIC of a switch its own address, or leave it out");
            }
        }
        if let Some(tap) = function.tap()
            && let Some((switch, earlier)) =
                config.switches.iter().find(|(switch, _)| switch.uplink.as_deref() == Some(tap))
        {
            let reason =
                format!("{tap} is the uplink of switch {}, in line {}", switch.name, earlier.of("uplink"));
            problem("tap", reason, &format!("write switch = {:?} in place of tap", switch.name));
        }
        if let Some(switch) = function.switch() {
            if !config.switches.iter().any(|(known, _)| known.name == switch) {
                let names: Vec<&str> = config.switches.iter().map(|(known, _)| known.name.as_str()).collect();
                let remedy = match nearest(switch, &names) {
                    Some(near) => format!("write {near}, or add a [[switch]] with name = {switch:?}"),
                    None => format!("add a [[switch]] with name = {switch:?}"),
                };
                problem("switch", format!("there is no switch {switch}"), &remedy);
            }
            let same =
                |nic: &ioplane_api::spec::NicSpec| nic.switch == switch && Some(nic.mac) == function.mac();
            if let Some((nic, earlier)) = config.nics.iter().find(|(nic, _)| same(nic)) {
                let reason = format!(
                    "{} is the address of nic {} already, in line {}",
                    nic.mac,
                    nic.name,
                    earlier.of("mac")
                );
                problem("mac", reason, "give every NIC of a switch its own address, or leave it out");
            }
        }
    }
}
