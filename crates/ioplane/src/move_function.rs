//! `ioplane pci move`: the guest is stopped by its QEMU's monitor, another function takes the place of the one that it has, it goes on. A
//! guest whose driver cooperates is not stopped.

use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::{FunctionReport, MovedFunctionReport, ServedState};
use ioplane_cli::args::PciMove;
use ioplane_cli::client::Client;
use ioplane_cli::command::pci;
use ioplane_cli::output::{hint, print_done};
use ioplane_cli::progress::ignore_signals;
use serde_json::json;

use crate::move_vm::{Monitor, refused};

/// How long a function that has no time to say how it is is asked again.
const BUSY: Duration = Duration::from_secs(10);

/// How it is, once it has the time to say so.
fn look(client: &Client, name: &str) -> Result<FunctionReport> {
    let end = Instant::now() + BUSY;
    loop {
        let function = pci::function(client, name)?;
        if function.state != ServedState::Busy {
            return Ok(function);
        }
        if Instant::now() > end {
            return Err(refused(format!("{name} is busy"), "see `ioplane pci show`, and try again"));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Moves it, or says why not. The guest goes on either way, if it ran before.
pub fn run(client: &Client, args: &PciMove, json: bool) -> Result<()> {
    let name = &args.name;
    let function = look(client, name)?;
    let vm = function.vm.filter(|_| function.connected).ok_or_else(|| {
        refused(format!("no VM uses {name}"), format!("remove {name}, and add the function at {}", args.to))
    })?;
    pci::check_exchange(client, args)?;
    let Some(qmp) = &args.qmp else {
        // Where it has to stand still the daemon says so.
        ignore_signals()?;
        return said(&pci::exchange(client, args, false)?, json);
    };
    let mut monitor = Monitor::connect(qmp)?;
    monitor.is_surely_of(&vm.name)?;
    let status = monitor.execute("query-status", &json!({}))?;
    let runs = status["running"].as_bool().unwrap_or(false);
    ignore_signals()?;
    let moved = if runs { monitor.execute("stop", &json!({})).map(drop) } else { Ok(()) }
        .and_then(|()| pci::exchange(client, args, true));
    // Also where the stop failed: it may have been carried out since.
    let goes_on = if runs { monitor.execute("cont", &json!({})).map(drop) } else { Ok(()) };
    let report = match (moved, goes_on) {
        (Ok(report), Ok(())) => report,
        (Err(error), Ok(())) => return Err(error),
        (Ok(_), Err(error)) => return Err(error.context(format!("{name} was moved, and {STANDS}"))),
        (Err(error), Err(more)) => {
            hint(format!("{STANDS}: {more:#}"));
            return Err(error);
        }
    };
    said(&report, json)
}

fn said(report: &MovedFunctionReport, json: bool) -> Result<()> {
    if let (Some(complaint), false) = (&report.complaint, json) {
        hint(complaint);
    }
    print_done(json, report, shown)
}

/// What a user has to know before all else.
const STANDS: &str = "the VM may stand still: say `cont` by its monitor";

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
