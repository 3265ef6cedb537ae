//! Child processes that leave nothing behind.
//!
//! A child gets the parent-death signal, so that it dies when the test process is killed. Linux sends that signal when the
//! *thread* that started the child ends; therefore all children are started by one thread that never ends. A child is in a process
//! group of its own: Ctrl-C reaches us alone, and [`end_all`] makes what waits for children return, so that everything is
//! dropped in order.

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Seconds since this machine was booted.
pub fn uptime() -> Result<f64> {
    let said = fs::read_to_string("/proc/uptime")?;
    said.split_whitespace().next().and_then(|word| word.parse().ok()).context(said)
}

/// A program that was built with this one: next to the running test or binary in the target folder.
pub fn built(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    // target/PROFILE/deps/test-hash, or target/PROFILE/binary.
    let found = own.ancestors().skip(1).take(2).map(|folder| folder.join(name)).find(|path| path.is_file());
    found.with_context(|| {
        format!("no {name} in the target folder; build it: cargo build -p ioplane -p ioplane-e2e")
    })
}

type Job = (Command, Sender<std::io::Result<Child>>);

/// Every child that may still run; none are started any more once it is gone.
static ALL: Mutex<Option<Vec<Weak<OwnedFd>>>> = Mutex::new(Some(Vec::new()));

/// A running child; killed with signal 9 and waited for when dropped.
#[derive(Debug)]
pub struct Process {
    child: Child,
    /// Names the process even after its number is somebody else's.
    handle: Arc<OwnedFd>,
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
        command.process_group(0);
        let mut all = all();
        let Some(running) = &mut *all else { bail!("interrupted before {name} was started") };
        let child = spawn(command).with_context(|| format!("start {program} (by setpriv of util-linux)"))?;
        let handle = Arc::new(pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?);
        running.retain(|process| process.strong_count() > 0);
        running.push(Arc::downgrade(&handle));
        Ok(Process { child, handle, name, log: log.into() })
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

    /// All that the process wrote to its output and error.
    pub fn wrote(&self) -> String {
        tail(&self.log, usize::MAX)
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
        pidfd_send_signal(&self.handle, Signal::TERM).context("send SIGTERM")
    }

    /// Sends SIGINT, as Ctrl-C does.
    pub fn interrupt(&self) -> Result<()> {
        pidfd_send_signal(&self.handle, Signal::INT).context("send SIGINT")
    }

    /// Sends another signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        pidfd_send_signal(&self.handle, signal).with_context(|| format!("send {signal:?}"))
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

/// Kills every child and starts no more: for a program that is interrupted. Whoever waits for a child gets an error.
pub fn end_all() {
    for process in all().take().into_iter().flatten().filter_map(|process| process.upgrade()) {
        // It may have ended by itself.
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

/// Whether [`end_all`] was called.
pub fn ended() -> bool {
    all().is_none()
}

fn all() -> MutexGuard<'static, Option<Vec<Weak<OwnedFd>>>> {
    ALL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
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
    scratch_in(&std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from), name)
}

/// The same in another folder.
pub fn scratch_in(base: &Path, name: &str) -> Result<tempfile::TempDir> {
    let made = tempfile::Builder::new().prefix(&format!("ioplane-{name}-")).tempdir_in(base);
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
