//! `pci list`: this host's functions, and those that a daemon serves.

use std::path::Path;

use anyhow::Result;
use ioplane_api::report::FunctionReport;
use ioplane_cli::client::Client;
use ioplane_cli::command::show;
use ioplane_cli::command::table::Table;
use ioplane_cli::output::print;
use ioplane_daemon::model_of;
use ioplane_hardware::inventory::{self, Found, Obstacle};
use serde::Serialize;

/// Where the kernel shows them.
const SYSFS: &str = "/sys";

/// One function of this host.
#[derive(Debug, Serialize)]
struct HardwareReport {
    /// What was found.
    #[serde(flatten)]
    found: Found,
    /// Whether it can be handed to a guest as it is now.
    passable: bool,
    /// The function of the daemon that has it.
    taken: Option<String>,
}

/// What is listed.
#[derive(Debug, Serialize)]
struct ListReport {
    /// This host's functions, by address.
    hardware: Vec<HardwareReport>,
    /// What the daemon serves; nothing if none answers.
    functions: Option<Vec<FunctionReport>>,
}

/// Looks at this host, and asks the daemon if there is one.
pub fn run(client: &Client, json: bool) -> Result<()> {
    let functions: Option<Vec<FunctionReport>> = client.get("/v1/pci").ok();
    let found = inventory::list(Path::new(SYSFS), model_of);
    let hardware = match found {
        Ok(found) => found,
        // A machine without PCI has none: what is emulated is listed.
        Err(error) if functions.is_some() => {
            eprintln!("ioplane: {error}");
            Vec::new()
        }
        Err(error) => return Err(error.into()),
    };
    let taken = |found: &Found| {
        let address = found.address.to_string();
        let mut all = functions.iter().flatten();
        all.find(|function| function.host.as_ref() == Some(&address)).map(|function| function.name.clone())
    };
    let hardware = hardware.into_iter().map(|found| HardwareReport {
        passable: found.passable(),
        taken: taken(&found),
        found,
    });
    let report = ListReport { hardware: hardware.collect(), functions };
    print(json, &report, text)
}

/// For a person: a table, then what stands in the way of those that a guest could want.
fn text(report: &ListReport) -> String {
    let mut table = Table::new(&["ADDRESS", "ID", "CLASS", "DRIVER", "GROUP", "MODEL", "CAN BE PASSED"]);
    // The same reason often holds of many.
    let mut reasons: Vec<(&Obstacle, Vec<String>)> = Vec::new();
    for HardwareReport { found, passable, taken } in &report.hardware {
        let dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
        let verdict = match (taken, passable) {
            (Some(name), _) => format!("it is {name}'s"),
            (None, true) => "yes".to_owned(),
            (None, false) if found.obstacles.iter().all(|o| o.forcible || o.unsafe_interrupts) => {
                let forced = found.obstacles.iter().any(|o| o.forcible).then_some(" --force");
                let unsafely = found.obstacles.iter().any(|o| o.unsafe_interrupts);
                let unsafely = unsafely.then_some(" --unsafe-interrupts");
                format!("with{}{}", forced.unwrap_or_default(), unsafely.unwrap_or_default())
            }
            (None, false) => "no".to_owned(),
        };
        table.row(vec![
            found.address.to_string(),
            format!("{:04x}:{:04x}", found.identity.vendor, found.identity.device),
            found.class.to_owned(),
            dash(found.driver.clone()),
            dash(found.group.map(|group| group.to_string())),
            dash(found.model.clone()),
            verdict,
        ]);
        // That a bridge is one needs no words.
        if taken.is_none() && found.identity.class >> 16 != BRIDGE {
            for obstacle in &found.obstacles {
                match reasons.iter_mut().find(|(known, _)| *known == obstacle) {
                    Some((_, all)) => all.push(found.address.to_string()),
                    None => reasons.push((obstacle, vec![found.address.to_string()])),
                }
            }
        }
    }
    let reason = |(obstacle, addresses): (&Obstacle, Vec<String>)| {
        format!("{}: {}\n  hint: {}\n", addresses.join(", "), obstacle.why, obstacle.advice)
    };
    let reasons: String = reasons.into_iter().map(reason).collect();
    let served = match &report.functions {
        Some(functions) => show::functions(functions),
        None => "no daemon answers: nothing is served\n".to_owned(),
    };
    let hardware = if report.hardware.is_empty() { String::new() } else { format!("{table}{reasons}\n") };
    hardware + &served
}

/// Base class of bridges.
const BRIDGE: u32 = 0x06;

#[cfg(test)]
mod tests {
    use super::*;
    use ioplane_pci::Identity;

    fn found(address: &str, class: u32, obstacles: &[(&str, bool)]) -> HardwareReport {
        let obstacle = |(why, forcible): &(&str, bool)| Obstacle {
            why: (*why).to_owned(),
            advice: format!("end it: {why}"),
            forcible: *forcible,
            unsafe_interrupts: false,
        };
        let found = Found {
            address: address.parse().unwrap(),
            identity: Identity { vendor: 0x10ec, device: 0x8139, revision: 0x20, class, subsystem: (0, 0) },
            class: "Ethernet controller",
            driver: Some("8139cp".to_owned()),
            group: Some(3),
            neighbours: Vec::new(),
            bars: Vec::new(),
            interfaces: Vec::new(),
            disks: Vec::new(),
            obstacles: obstacles.iter().map(obstacle).collect(),
            model: Some("rtl8139".to_owned()),
        };
        HardwareReport { passable: found.passable(), taken: None, found }
    }

    #[test]
    fn it_is_said_what_can_be_passed_and_why_not() {
        let mut taken = found("00:07.0", 0x020000, &[("it is bound to vfio-pci", false)]);
        taken.taken = Some("nic1".to_owned());
        let hardware = vec![
            found("00:00.0", 0x060000, &[("it is a bridge", false)]),
            found("00:05.0", 0x020000, &[]),
            found("00:06.0", 0x020000, &[("its interface eth1 is up", true)]),
            found("00:08.0", 0x020000, &[("no IOMMU", false)]),
            found("00:09.0", 0x020000, &[("no IOMMU", false)]),
            taken,
        ];
        let report = ListReport { hardware, functions: None };
        let expected = "\
ADDRESS       ID         CLASS                DRIVER  GROUP  MODEL    CAN BE PASSED
0000:00:00.0  10ec:8139  Ethernet controller  8139cp      3  rtl8139  no
0000:00:05.0  10ec:8139  Ethernet controller  8139cp      3  rtl8139  yes
0000:00:06.0  10ec:8139  Ethernet controller  8139cp      3  rtl8139  with --force
0000:00:08.0  10ec:8139  Ethernet controller  8139cp      3  rtl8139  no
0000:00:09.0  10ec:8139  Ethernet controller  8139cp      3  rtl8139  no
0000:00:07.0  10ec:8139  Ethernet controller  8139cp      3  rtl8139  it is nic1's
0000:00:06.0: its interface eth1 is up
  hint: end it: its interface eth1 is up
0000:00:08.0, 0000:00:09.0: no IOMMU
  hint: end it: no IOMMU

no daemon answers: nothing is served
";
        assert_eq!(text(&report), expected);
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["hardware"][1]["passable"], &json["functions"]),
            (&true.into(), &serde_json::Value::Null)
        );
        assert_eq!(json["hardware"][2]["address"], "0000:00:06.0");
    }
}
