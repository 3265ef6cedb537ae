//! `ioplane pci move`: the guest is stopped by its QEMU's monitor, another function takes the place of the one that it has, it goes on.

use anyhow::{Context, Result};
use ioplane_api::report::MovedFunctionReport;
use ioplane_cli::args::PciMove;
use ioplane_cli::client::Client;
use ioplane_cli::command::pci;
use ioplane_cli::output::{hint, print_done};
use serde_json::json;

use crate::move_vm::{Monitor, refused};

/// Moves it, or says why not. The guest goes on either way.
pub fn run(client: &Client, args: &PciMove, json: bool) -> Result<()> {
    let name = &args.name;
    let function = pci::function(client, name)?;
    let vm = function.vm.filter(|_| function.connected).ok_or_else(|| {
        refused(format!("no VM uses {name}"), format!("remove {name}, and add the function at {}", args.to))
    })?;
    let mut monitor = Monitor::connect(&args.qmp)?;
    monitor.is_of(&vm.name)?;
    let status = monitor.execute("query-status", &json!({}))?;
    let runs = status["running"].as_bool().unwrap_or(false);
    if runs {
        monitor.execute("stop", &json!({}))?;
    }
    let moved = pci::exchange(client, args);
    if runs {
        let goes_on = monitor.execute("cont", &json!({})).context("let the guest go on");
        // What was refused says more.
        if moved.is_ok() {
            goes_on?;
        }
    }
    let report = moved?;
    if let (Some(complaint), false) = (&report.complaint, json) {
        hint(complaint);
    }
    print_done(json, &report, shown)
}

fn shown(report: &MovedFunctionReport) -> String {
    let MovedFunctionReport { name, from, to, state_bytes, stop_accesses, replay_accesses, took_us, .. } =
        report;
    format!(
        "{name} is {to} and was {from}: {state_bytes} bytes of state, {stop_accesses} register accesses to stop and {replay_accesses} to \
         replay, {:.1} ms\n",
        *took_us as f64 / 1000.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_moved_is_shown() {
        let report = MovedFunctionReport {
            name: "nic0".into(),
            from: "0000:01:10.0".into(),
            to: "0000:01:10.2".into(),
            state_bytes: 198,
            stop_accesses: 99,
            replay_accesses: 263,
            took_us: 12_340,
            complaint: None,
        };
        assert_eq!(
            shown(&report),
            "nic0 is 0000:01:10.2 and was 0000:01:10.0: 198 bytes of state, 99 register accesses to stop and 263 to replay, 12.3 ms\n"
        );
    }
}
