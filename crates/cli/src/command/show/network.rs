//! Reports of switches and NICs for people.

use std::collections::BTreeMap;

use ioplane_api::report::{NicReport, PortReport, StatusReport, SwitchReport, SwitchTableReport};
use ioplane_api::size::Size;

use super::{device_faults, error_lines, or_dash, queue_row, state};
use crate::command::table::Table;

/// `nic list`.
pub fn nics(nics: &[NicReport]) -> String {
    if nics.is_empty() {
        return "no NICs: add one with `ioplane nic add`\n".to_owned();
    }
    let mut table = Table::new(&[
        "NAME", "STATE", "SWITCH", "MAC", "LINK", "VLAN", "PAIRS", "MTU", "CORE", "ORIGIN", "SOCKET",
    ]);
    for nic in nics {
        table.row(vec![
            nic.name.clone(),
            state(nic.state, nic.connected).to_owned(),
            nic.switch.clone(),
            nic.mac.clone(),
            nic.link.clone(),
            if nic.isolated { format!("{}, isolated", nic.vlan) } else { nic.vlan.clone() },
            nic.pairs.to_string(),
            nic.mtu.to_string(),
            or_dash(nic.core),
            nic.origin.clone(),
            nic.socket.display().to_string(),
        ]);
    }
    let mut text = table.to_string();
    for nic in nics {
        text.push_str(&error_lines(&nic.name, &nic.error, &nic.remedy, nic.retry));
    }
    text
}

/// `switch list`.
pub fn switches(switches: &[SwitchReport]) -> String {
    if switches.is_empty() {
        return "no switches: add one with `ioplane switch add`\n".to_owned();
    }
    let mut table = Table::new(&["NAME", "UPLINK", "CORE", "NICS", "LEARNED", "DROPPED", "ORIGIN"]);
    for switch in switches {
        table.row(vec![
            switch.name.clone(),
            or_dash(switch.uplink.clone()),
            or_dash(switch.uplink_core),
            switch.ports.iter().filter(|port| !port.uplink).count().to_string(),
            switch.learned.to_string(),
            switch.ports.iter().map(PortReport::dropped).sum::<u64>().to_string(),
            switch.origin.clone(),
        ]);
    }
    let mut text = table.to_string();
    for switch in switches {
        text.push_str(&error_lines(&switch.name, &switch.error, &switch.remedy, switch.retry));
    }
    text
}

fn causes(drops: &BTreeMap<String, u64>) -> String {
    let causes: Vec<String> = drops.iter().map(|(cause, count)| format!("{cause} {count}")).collect();
    if causes.is_empty() { "-".to_owned() } else { causes.join(", ") }
}

/// `switch show`.
pub fn switch(report: &SwitchTableReport) -> String {
    let mut text = switches(std::slice::from_ref(&report.switch));
    let mut table = Table::new(&[
        "PORT",
        "LINK",
        "SENT",
        "BYTES",
        "DROPPED SENDING",
        "RECEIVED",
        "BYTES",
        "DROPPED RECEIVING",
    ]);
    for port in &report.switch.ports {
        table.row(vec![
            if port.uplink { format!("{} (uplink)", port.name) } else { port.name.clone() },
            if port.up { "up" } else { "down" }.to_owned(),
            port.sent_frames.to_string(),
            Size(port.sent_bytes).to_string(),
            causes(&port.sent_drops),
            port.received_frames.to_string(),
            Size(port.received_bytes).to_string(),
            causes(&port.received_drops),
        ]);
    }
    if !report.switch.ports.is_empty() {
        text.push_str(&format!("\n{table}"));
    }
    let mut table = Table::new(&["PORT", "ADDRESS", "VLAN", "SEEN", ""]);
    for learned in &report.table {
        table.row(vec![
            learned.port.clone(),
            learned.mac.clone(),
            if learned.vlan == 0 { "-".to_owned() } else { learned.vlan.to_string() },
            format!("{} s ago", learned.age_s),
            if learned.held { "held: it moved too often" } else { "" }.to_owned(),
        ]);
    }
    if !report.table.is_empty() {
        text.push_str(&format!("\n{table}"));
    }
    text
}

/// The part of `status` about them; empty if there are none.
pub fn status(status: &StatusReport) -> String {
    let mut text = String::new();
    if !status.nics.is_empty() {
        text.push_str(&format!("\n{}", nics(&status.nics)));
    }
    let mut table = Table::new(&[
        "NIC",
        "QUEUE",
        "CORE",
        "FRAMES",
        "BYTES",
        "KICKS/FRAME",
        "INTR/FRAME",
        "WAIT P99",
        "P50 US",
        "P99 US",
        "NOW",
    ]);
    let mut faults = String::new();
    for nic in &status.nics {
        for queue in &nic.queues {
            table.row(queue_row(&nic.name, queue));
        }
        faults += &device_faults(&nic.name, &nic.queues, nic.last_front_end_fault.as_ref());
    }
    if !status.nics.is_empty() {
        text.push_str(&format!("\n{table}{faults}"));
    }
    if !status.switches.is_empty() {
        text.push_str(&format!("\n{}", switches(&status.switches)));
    }
    text
}
