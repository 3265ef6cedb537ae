//! A client of QEMU's machine protocol: commands, events, and QEMU's command-line syntax for hot-plug.

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How long QEMU may take to answer a command. It answers none while it waits for a vhost-user daemon.
const ANSWER: Duration = Duration::from_secs(60);
/// Events kept until somebody asks for them.
const KEPT: usize = 1000;

/// A connection to one QEMU.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    lines: Receiver<Value>,
    events: Vec<Value>,
}

impl Qmp {
    /// Connects and leaves negotiation mode.
    pub fn connect(socket: &Path) -> Result<Qmp> {
        let stream =
            UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        let reader = BufReader::new(stream.try_clone()?);
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                let Ok(value) = serde_json::from_str(&line) else { break };
                if send.send(value).is_err() {
                    break;
                }
            }
        });
        let mut qmp = Qmp { stream, lines, events: Vec::new() };
        let greeting = qmp.line(Instant::now() + ANSWER)?;
        if greeting.get("QMP").is_none() {
            bail!("{} does not greet like QMP: {greeting}", socket.display());
        }
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Runs a command and returns its answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.stream, "{request}").with_context(|| format!("send {command} to QEMU"))?;
        let end = Instant::now() + ANSWER;
        loop {
            let mut line = self.line(end).with_context(|| format!("wait for QEMU's answer to {command}"))?;
            if let Some(error) = line.get("error") {
                bail!("QEMU refused {request}: {}", error["desc"].as_str().unwrap_or("no reason given"));
            }
            if line.get("return").is_some() {
                return Ok(line["return"].take());
            }
            self.keep(line);
        }
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
        let end = Instant::now() + limit;
        loop {
            let hit = |event: &Value| event["event"] == name && wanted(&event["data"]);
            if let Some(at) = self.events.iter().position(hit) {
                return Ok(self.events.remove(at)["data"].take());
            }
            let line = self.line(end).with_context(|| format!("wait for QEMU's event {name}"))?;
            self.keep(line);
        }
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

    fn keep(&mut self, line: Value) {
        if line.get("event").is_some() && self.events.len() < KEPT {
            self.events.push(line);
        }
    }

    fn line(&mut self, end: Instant) -> Result<Value> {
        let left = end.saturating_duration_since(Instant::now());
        self.lines.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow!("QEMU says nothing"),
            RecvTimeoutError::Disconnected => anyhow!("QEMU has closed the connection"),
        })
    }
}
