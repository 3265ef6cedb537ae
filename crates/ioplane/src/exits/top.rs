//! `ioplane exits top`: all VMs of this host, by KVM's own counters, as rates or for Prometheus.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use ioplane_cli::args::ExitsTopArgs;
use ioplane_cli::output::{CommandError, out, print, print_next};
use ioplane_kvmstat::{HostRates, KvmCounters};

use super::{Code, screen, size, usage};

/// The shortest interval: less would mostly show what looking costs.
const LEAST: Duration = Duration::from_millis(100);

/// Looks once, or until Ctrl-C; what Prometheus asks for needs one look and no time.
pub(super) fn run(args: &ExitsTopArgs, json: bool) -> Result<()> {
    let interval = args.interval.max(LEAST);
    let counters = KvmCounters::find();
    let mut before = counters.look()?;
    if args.openmetrics {
        ensure!(!json, usage("--openmetrics is a format of its own: leave out --json"));
        return out(before.open_metrics().context("write the metrics")?.as_bytes());
    }
    let live = !args.once && !json;
    if live && !std::io::stdout().is_terminal() {
        let remedy = "ioplane exits top --once, or with --json for programs";
        return Err(CommandError::new(Code::Usage, "the live view needs a terminal", remedy).into());
    }
    if live {
        out(b"\x1b[2J")?;
    }
    loop {
        std::thread::sleep(interval);
        let now = counters.look()?;
        let rates = now.since(&before);
        if args.once {
            return print(json, &rates, HostRates::to_string);
        }
        let drawn = |rates: &HostRates| {
            let (rows, columns) = size();
            screen(&rates.to_string(), rows, columns)
        };
        if !print_next(json, &rates, drawn)? {
            return Ok(());
        }
        before = now;
    }
}
