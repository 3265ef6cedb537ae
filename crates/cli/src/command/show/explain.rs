//! Where the time goes, in words.

use ioplane_api::report::{ChoiceText, DeviceTimes, ExplainReport};

use crate::command::table::Table;

const DEVICES: [&str; 10] =
    ["DEVICE", "KIND", "UNITS/S", "MB/S", "WAIT50", "WAIT99", "P50", "P99", "KICKS", "INTERRUPTS"];

fn row(device: &DeviceTimes) -> Vec<String> {
    let us = |time: f64| format!("{time:.1}");
    vec![
        device.name.clone(),
        device.kind.clone(),
        format!("{:.0}", device.units_per_s),
        format!("{:.1}", device.mb_per_s),
        us(device.wait_p50_us),
        us(device.wait_p99_us),
        us(device.device_p50_us),
        us(device.device_p99_us),
        format!("{:.3}", device.kicks_per_unit),
        format!("{:.3}", device.interrupts_per_unit),
    ]
}

/// The times of each device, and what slows them down.
pub fn explain(report: &ExplainReport) -> String {
    let mut table = Table::new(&DEVICES);
    report.devices.iter().for_each(|device| table.row(row(device)));
    let mut text = format!("{table}\n");
    let said = report.devices.iter().filter(|device| !device.text.is_empty());
    let said: String = said.map(|device| format!("{}\n", device.text)).collect();
    if !said.is_empty() {
        text += &format!("{said}\n");
    }
    let several = report.devices.len() > 1;
    for ChoiceText { device, queue, text: how } in &report.choices {
        let whose = if several { format!("{device} ") } else { String::new() };
        text += &format!("{whose}queue {queue}: {how}\n");
    }
    if !report.choices.is_empty() {
        text += "\n";
    }
    for finding in &report.findings {
        let whose = if several { format!("{}: ", finding.device) } else { String::new() };
        text += &format!("{whose}{}\n  hint: {}\n", finding.text, finding.remedy);
    }
    if report.devices.is_empty() {
        text += "it has no devices\n";
    } else if report.findings.is_empty() && report.devices.iter().any(|device| device.units_per_s > 0.0) {
        text += "nothing stands out\n";
    }
    text
}
