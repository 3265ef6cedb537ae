//! Child processes that leave nothing behind.
//!
//! A child gets the parent-death signal, so that it dies when the test process is killed. Linux sends that signal when the
//! *thread* that started the child ends; therefore all children are started by one thread that never ends.

use anyhow::{Context, Result, anyhow, bail};
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

type Job = (Command, Sender<std::io::Result<Child>>);

/// A running child; killed with signal 9 and waited for when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Process {
    /// Starts `program` with its standard output and error appended to `log`.
    pub fn start(program: &str, args: &[OsString], log: &Path) -> Result<Process> {
        let out = File::options().create(true).append(true).open(log)?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).arg(program).args(args);
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let name = Path::new(program).file_name().unwrap_or(program.as_ref()).to_string_lossy().into_owned();
        let child = spawn(command).with_context(|| format!("start {program} (by setpriv of util-linux)"))?;
        Ok(Process { child, name, log: log.into() })
    }

    /// The process's number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// An error with what the process said, if it has ended.
    pub fn still_runs(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}; it said:\n{}", self.name, self.said()),
        }
    }

    /// The last part of what the process wrote to its output and error.
    pub fn said(&self) -> String {
        tail(&self.log, 30)
    }

    /// Waits for the process to end by itself.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!("{} has not ended within {limit:?}; it said:\n{}", self.name, self.said());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) -> Result<()> {
        let id = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).context("send SIGTERM")
    }

    /// Signal 9, and waits until the process is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last `lines` lines of a file; empty if it cannot be read.
pub fn tail(path: &Path, lines: usize) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Runs a program to its end; its output is the error when it fails.
pub fn run(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("run {program}; script/bootstrap --demo installs what is needed"))?;
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        bail!("{program} {} ended with {}:\n{out}{err}", args.join(" "), output.status);
    }
    Ok(out.into_owned())
}

/// Where guests' disks and sockets go: `$TMPDIR`, else `/var/tmp`, since `/tmp` may be memory.
pub fn scratch(name: &str) -> Result<tempfile::TempDir> {
    let base = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
    let made = tempfile::Builder::new().prefix(&format!("ioplane-{name}-")).tempdir_in(&base);
    made.with_context(|| format!("make a folder in {}; set TMPDIR to a writable one", base.display()))
}

fn spawn(command: Command) -> Result<Child> {
    static STARTER: OnceLock<Mutex<Sender<Job>>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (jobs, todo) = channel::<Job>();
        std::thread::spawn(move || {
            for (mut command, done) in todo {
                let _ = done.send(command.spawn());
            }
        });
        Mutex::new(jobs)
    });
    let (done, result) = channel();
    let jobs = starter.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    jobs.send((command, done)).map_err(|_| anyhow!("the starting thread is gone"))?;
    drop(jobs);
    Ok(result.recv().context("the starting thread is gone")??)
}
