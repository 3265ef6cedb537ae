//! QEMU's machine protocol for tests: hot-plug in the syntax of QEMU's command line, on top of the one client (`ioplane-qemu`).

use anyhow::{Context, Result, bail};
use ioplane_qemu::Endpoint;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

/// How long QEMU may take to answer a command. It answers none while it waits for a vhost-user daemon.
const ANSWER: Duration = Duration::from_secs(60);

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp(ioplane_qemu::Qmp);

impl Qmp {
    /// Connects and leaves negotiation mode.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let client = ioplane_qemu::Qmp::connect(&Endpoint::here(socket), ANSWER);
        Ok(Qmp(client.with_context(|| format!("connect to QEMU's {}", socket.display()))?))
    }

    /// Runs a command and returns its answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        self.0.execute(command, &arguments).with_context(|| format!("ask QEMU to {command} {arguments}"))
    }

    /// Runs a line of the human monitor, whose syntax is the command line's; what it prints is an error if
    /// `silent` is expected of it.
    pub fn human(&mut self, line: &str, silent: bool) -> Result<String> {
        let said = self.execute("human-monitor-command", json!({ "command-line": line }))?;
        let said = said.as_str().unwrap_or_default().trim().to_string();
        if silent && !said.is_empty() {
            bail!("QEMU refused `{line}`: {said}");
        }
        Ok(said)
    }

    /// Waits for an event called `name` whose `data` pleases `wanted`; events that came earlier and were not asked for
    /// count too.
    pub fn wait_event(
        &mut self,
        name: &str,
        limit: Duration,
        wanted: impl Fn(&Value) -> bool,
    ) -> Result<Value> {
        self.0.event(name, limit, wanted).with_context(|| format!("wait for QEMU's event {name}"))
    }

    /// Plugs what `args` describe in command-line form: `-chardev ...` and `-device ...` pairs, as `ioplane qemu-args`
    /// prints them. Each device goes to `bus` unless it names one.
    pub fn plug(&mut self, args: &str, bus: &str) -> Result<()> {
        let mut words = args.split_whitespace();
        while let Some(option) = words.next() {
            let value = words.next().with_context(|| format!("{option} needs a value in {args:?}"))?;
            match option {
                "-chardev" => self.human(&format!("chardev-add {value}"), true)?,
                "-device" if value.contains(",bus=") => self.human(&format!("device_add {value}"), true)?,
                "-device" => self.human(&format!("device_add {value},bus={bus}"), true)?,
                _ => bail!("{option} cannot be plugged; only -chardev and -device can"),
            };
        }
        Ok(())
    }

    /// Asks the guest to release the device and waits until it is gone.
    pub fn unplug(&mut self, device: &str, limit: Duration) -> Result<()> {
        self.execute("device_del", json!({ "id": device }))?;
        let gone = self.wait_event("DEVICE_DELETED", limit, |data| data["device"] == device);
        gone.map(drop).with_context(|| format!("the guest did not release {device}"))
    }
}
