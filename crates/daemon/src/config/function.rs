//! `[[pci]]`.

use ioplane_api::spec::{Flaw, FunctionForm, FunctionSpec};

use super::network::{checked, name};
use super::reader::{Place, TableReader};
use super::{Config, Problem};

/// One `[[pci]]`.
pub fn function(mut reader: TableReader<'_, '_>) -> Option<(FunctionSpec, Place)> {
    let name = name(&mut reader, "PCI function");
    let form = FunctionForm::read(&mut reader);
    let spec = name.and_then(|name| checked(&mut reader, form.spec(&name)));
    let place = reader.finish();
    spec.map(|spec| (spec, place))
}

/// What is wrong between these tables, beside what can be wrong between all: functions of the host, and TAP interfaces.
pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    for (index, (function, place)) in config.functions.iter().enumerate() {
        let mut problem = |field, reason: String, remedy: &str| {
            problems.push(place.problem(Flaw::new(field, reason, remedy)))
        };
        for (other, earlier) in &config.functions[..index] {
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
        }
        if let Some(tap) = function.tap()
            && let Some((switch, earlier)) =
                config.switches.iter().find(|(switch, _)| switch.uplink.as_deref() == Some(tap))
        {
            let reason =
                format!("{tap} is the uplink of switch {}, in line {}", switch.name, earlier.of("uplink"));
            problem("tap", reason, &format!("write switch = {:?} in place of tap", switch.name));
        }
    }
}
