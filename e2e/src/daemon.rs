//! The `ioplane` binary as a user meets it: a daemon with a control socket, and a command line.

use crate::place::HostPlace;
use crate::process::{Process, built};
use crate::status::{Disk, Status};
use crate::version::Version;
use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long the daemon may take until its control socket answers.
const START: Duration = Duration::from_secs(20);

/// A running `ioplane serve` with a folder of its own. Dropping it kills it.
#[derive(Debug)]
pub struct Daemon {
    process: Option<Process>,
    /// The process that has taken over from that one: not a child of ours.
    successor: Option<Successor>,
    environment: Vec<(String, String)>,
    /// Where it runs, and commands to it.
    place: HostPlace,
    folder: TempDir,
}

/// The `ioplane` binary: `IOPLANE_BIN`, else the one next to the running test in the target folder.
pub fn binary() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("IOPLANE_BIN") {
        return Ok(path.into());
    }
    built("ioplane")
}

/// A daemon that is nobody's child any more. Killed when dropped.
#[derive(Debug)]
struct Successor {
    pid: u32,
    handle: OwnedFd,
}

impl Successor {
    fn of(pid: u32) -> Result<Successor> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).context("no such process")?;
        Ok(Successor { pid, handle: pidfd_open(number, PidfdFlags::empty())? })
    }

    fn ended(&self, limit: Duration) -> Result<bool> {
        let limit = limit.try_into().ok();
        Ok(poll(&mut [PollFd::new(&self.handle, PollFlags::IN)], limit.as_ref())? > 0)
    }

    fn terminate(self, limit: Duration) -> Result<()> {
        pidfd_send_signal(&self.handle, Signal::TERM).context("send SIGTERM")?;
        if !self.ended(limit)? {
            bail!("ioplane serve (pid {}) has not ended within {limit:?}", self.pid);
        }
        Ok(())
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = pidfd_send_signal(&self.handle, Signal::KILL);
        let _ = self.ended(START);
    }
}

impl Daemon {
    /// Writes `config` (TOML) to the daemon's folder, starts it and waits until its socket answers. `{folder}` in the
    /// text stands for that folder.
    pub fn start(config: &str) -> Result<Daemon> {
        Daemon::start_with(config, &[])
    }

    /// The same with more environment variables, which restarts keep.
    pub fn start_with(config: &str, environment: &[(&str, &str)]) -> Result<Daemon> {
        let mut daemon = Daemon::of(&HostPlace::default(), "daemon", config, environment)?;
        daemon.launch()?;
        Ok(daemon)
    }

    /// The same in the network namespace `space`, as on another host; `prepare` puts into its folder what the configuration names.
    pub fn start_in(space: &str, config: &str, prepare: impl FnOnce(&Path) -> Result<()>) -> Result<Daemon> {
        let config = format!("[daemon]\nrun_dir = \"{{folder}}/run\"\n{config}");
        let mut daemon = Daemon::of(&HostPlace::network(space), "far-daemon", &config, &[])?;
        prepare(daemon.folder())?;
        daemon.launch()?;
        Ok(daemon)
    }

    /// The same where another host is; commands to it are given there.
    pub fn start_at(place: &HostPlace, config: &str) -> Result<Daemon> {
        let mut daemon = Daemon::of(place, "daemon", config, &[])?;
        daemon.launch()?;
        Ok(daemon)
    }

    /// One that does not run yet.
    fn of(place: &HostPlace, folder: &str, config: &str, environment: &[(&str, &str)]) -> Result<Daemon> {
        let folder = place.scratch(folder)?;
        let text = config.replace("{folder}", &folder.path().display().to_string());
        std::fs::write(folder.path().join("ioplane.toml"), text)?;
        let environment = environment.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        Ok(Daemon { process: None, successor: None, environment, place: place.clone(), folder })
    }

    /// Its folder: `ioplane.toml`, `control.sock`, `daemon.log`, and whatever the configuration puts there.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("control.sock")
    }

    /// Its process number; none while it is killed.
    pub fn id(&self) -> Option<u32> {
        self.successor.as_ref().map(|successor| successor.pid).or(self.process.as_ref().map(Process::id))
    }

    /// Has another process take over while guests run, and returns what `ioplane upgrade` says.
    pub fn upgrade(&mut self) -> Result<Value> {
        let binary = binary()?;
        let said = self.cli(&["upgrade", "--binary", binary.to_str().context("the binary's path")?])?;
        let pid = said["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).context("no pid")?;
        // The one before has left by itself, or is about to.
        self.successor = Some(Successor::of(pid)?);
        Ok(said)
    }

    /// Runs `ioplane --socket S ARGS --json` and returns what it prints.
    pub fn cli(&self, args: &[&str]) -> Result<Value> {
        let out = self.run(args, true)?;
        serde_json::from_str(&out)
            .with_context(|| format!("ioplane {} does not print JSON: {out}", args.join(" ")))
    }

    /// What it says of itself.
    pub fn status(&self) -> Result<Status> {
        Ok(serde_json::from_value(self.cli(&["status"])?)?)
    }

    pub fn disk(&self, name: &str) -> Result<Disk> {
        self.status()?.disk(name)
    }

    /// What QEMU of this version needs for a guest of `memory_mib` with these disks and NICs; firmware boots the first.
    pub fn qemu_args(&self, version: Version, memory_mib: u64, disks: &[&str]) -> Result<String> {
        self.qemu_args_with(version, memory_mib, disks, &[])
    }

    /// The same with more words for each `ioplane qemu-args`.
    pub fn qemu_args_with(
        &self,
        version: Version,
        memory_mib: u64,
        disks: &[&str],
        words: &[&str],
    ) -> Result<String> {
        let (number, memory) = (version.number()?, format!("{}K", Version::memory_kib(memory_mib)?));
        let mut line = Vec::new();
        for (index, disk) in disks.iter().enumerate() {
            let mut args = vec!["qemu-args", disk, "--qemu-version", &number];
            match index {
                0 => args.extend(["--memory", &memory]),
                _ => args.push("--device-only"),
            }
            args.extend(words);
            line.push(self.text(&args)?);
        }
        Ok(line.join(" "))
    }

    /// Runs `ioplane --socket S ARGS` and returns its text, such as what `qemu-args` prints.
    pub fn text(&self, args: &[&str]) -> Result<String> {
        Ok(self.run(args, false)?.trim().into())
    }

    /// Kills the daemon with signal 9 and waits until the process is gone. Its I/O may still be landing.
    pub fn kill9(&mut self) {
        self.successor = None;
        self.process = None;
    }

    /// Starts it again with the same folder and configuration, after [`Daemon::kill9`] or instead of it.
    pub fn restart(&mut self) -> Result<()> {
        self.kill9();
        self.launch()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        self.process.as_ref().context("the daemon does not run")?.signal(signal)
    }

    /// Asks it to end (SIGTERM), waits, and returns whether it ended well.
    pub fn terminate(&mut self, limit: Duration) -> Result<()> {
        if let Some(successor) = self.successor.take() {
            self.process = None;
            return successor.terminate(limit);
        }
        let mut process = self.process.take().context("the daemon does not run")?;
        process.terminate()?;
        let status = process.wait(limit)?;
        if !status.success() {
            bail!("ioplane serve ended with {status}; it said:\n{}", process.said());
        }
        Ok(())
    }

    /// The last lines of the daemon's log.
    pub fn log(&self) -> String {
        crate::process::tail(&self.folder.path().join("daemon.log"), 60)
    }

    fn launch(&mut self) -> Result<()> {
        let mut args: Vec<OsString> = Vec::new();
        args.extend(self.environment.iter().map(|(key, value)| OsString::from(format!("{key}={value}"))));
        args.push(binary()?.into());
        args.extend(["--socket".into(), self.socket().into(), "serve".into(), "--config".into()]);
        args.push(self.folder.path().join("ioplane.toml").into());
        // A dead daemon leaves its socket behind; it must not look alive.
        let _ = std::fs::remove_file(self.socket());
        let mut process = self.place.start("env", &args, &self.folder.path().join("daemon.log"))?;
        let end = Instant::now() + START;
        while UnixStream::connect(self.socket()).is_err() || self.cli(&["status"]).is_err() {
            process.still_runs().context("start ioplane serve")?;
            if Instant::now() >= end {
                bail!("ioplane serve does not answer within {START:?}; it said:\n{}", process.said());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.process = Some(process);
        Ok(())
    }

    fn run(&self, args: &[&str], json: bool) -> Result<String> {
        let mut command = self.command(args)?;
        if json {
            command.arg("--json");
        }
        let said = Said::of(command)?;
        if said.code != Some(0) {
            bail!("ioplane {} ended with {said}", args.join(" "));
        }
        Ok(said.out)
    }

    /// A command of `ioplane` to this daemon, given where it runs.
    pub fn command(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.place.command(binary()?);
        command.arg("--socket").arg(self.socket()).args(args);
        Ok(command)
    }

    /// Runs a command whose end is the caller's to judge.
    pub fn said(&self, args: &[&str]) -> Result<Said> {
        Said::of(self.command(args)?)
    }

    /// Runs a command that must be refused, and returns what it says.
    pub fn refused(&self, args: &[&str]) -> Result<String> {
        let said = self.said(args)?;
        ensure!(said.code == Some(1), "ioplane {} should have been refused: {said}", args.join(" "));
        Ok(said.err)
    }
}

/// What a command came to.
#[derive(Clone, Debug)]
pub struct Said {
    /// None if it was ended by a signal.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Said {
    /// Runs it to its end.
    pub fn of(mut command: Command) -> Result<Said> {
        Ok(Said::from(command.output().with_context(|| format!("run {command:?}"))?))
    }
}

impl From<Output> for Said {
    fn from(output: Output) -> Said {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said { code: output.status.code(), out: text(&output.stdout), err: text(&output.stderr) }
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code) => write!(f, "exit status: {code}: {}{}", self.out, self.err),
            None => write!(f, "a signal: {}{}", self.out, self.err),
        }
    }
}
