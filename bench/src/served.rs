//! A process that serves over vhost-user: started, frozen while another one is measured, and ended.

use std::fmt::Display;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use ioplane_figures::machine::{self, CpuRoom, Cpus};

/// The binary of ioplane: the one beside this, unless IOPLANE_BIN names another.
pub fn ioplane() -> Result<PathBuf> {
    let path = match std::env::var_os("IOPLANE_BIN") {
        Some(path) => path.into(),
        None => std::env::current_exe()?.with_file_name("ioplane"),
    };
    if !path.exists() {
        bail!("no {}: build it (script/bench does) or set IOPLANE_BIN", path.display());
    }
    Ok(path)
}

/// A folder for sockets, logs and images, gone with the value: in `on`, by default beside this binary.
pub fn scratch(on: Option<&Path>) -> Result<TempDir> {
    let beside = std::env::current_exe()?.parent().map(Path::to_path_buf).unwrap_or_default();
    let on = on.unwrap_or(&beside);
    let made = tempfile::Builder::new().prefix("ioplane-bench-").tempdir_in(on);
    made.with_context(|| format!("making a folder in {}", on.display()))
}

/// Where backends run.
pub struct Place {
    /// The two processors.
    pub cpus: Cpus,
    /// Binds what an affinity does not.
    pub room: CpuRoom,
}

impl Place {
    /// Starts `command` on the backend's processor. Its output goes to `log`. It dies with us, frozen or not.
    pub fn spawn(&self, command: &Command, log: &Path) -> Result<Served> {
        self.spawn_on(self.cpus.back, command, log)
    }

    /// The same on processor `cpu`. What pins itself elsewhere does.
    pub fn spawn_on(&self, cpu: usize, command: &Command, log: &Path) -> Result<Served> {
        let program = command.get_program().to_string_lossy().into_owned();
        // setpriv executes the program in its own place, so the process is the program's.
        let mut with_leash = Command::new("setpriv");
        with_leash.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
        let command = &mut with_leash;
        let output = std::fs::File::create(log)?;
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        // Ctrl-C is for this process, which ends the others when a round is done.
        command.process_group(0);
        // A child inherits the affinity of the thread that starts it.
        machine::pin(cpu)?;
        let child = command.spawn();
        machine::pin(self.cpus.front)?;
        let child = child
            .with_context(|| format!("starting {program}: are it and setpriv (util-linux) installed?"))?;
        if cpu == self.cpus.back {
            self.room.take(child.id());
        }
        Ok(Served { child, log: log.to_path_buf(), server: None })
    }
}

/// A backend that runs. Killed when dropped.
pub struct Served {
    child: Child,
    log: PathBuf,
    /// The one whose disk it serves, if that is not its own.
    server: Option<Box<Served>>,
}

impl Served {
    /// With `server`, whose disk it serves: charged, frozen and ended with it.
    pub fn of(mut self, server: Served) -> Self {
        self.server = Some(Box::new(server));
        self
    }

    /// The processes whose processor time is the backend's.
    pub fn pids(&self) -> Vec<u32> {
        let mut pids = vec![self.child.id()];
        pids.extend(self.server.iter().flat_map(|server| server.pids()));
        pids
    }

    /// Waits until the socket is there.
    pub fn await_socket(&mut self, socket: &Path) -> Result<()> {
        self.await_listener(&socket.display(), || ioplane_testkit::front::listens(socket))
    }

    /// Waits until somebody accepts connections at `address`.
    pub fn await_tcp(&mut self, address: SocketAddr) -> Result<()> {
        self.await_listener(&address, || TcpStream::connect(address).is_ok())
    }

    /// Waits until `listens`, which is what it does at `at`.
    pub fn await_listener(&mut self, at: &dyn Display, listens: impl Fn() -> bool) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(10);
        while !listens() {
            if let Some(status) = self.child.try_wait()? {
                bail!("the backend ended with {status} before it listened:\n{}", self.log_tail());
            }
            if Instant::now() > until {
                bail!("the backend does not listen at {at} after 10 s:\n{}", self.log_tail());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// What it last said.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let mut tail = lines[lines.len().saturating_sub(20)..].join("\n");
        if let Some(server) = &self.server {
            tail = format!("{tail}\nits server:\n{}", server.log_tail());
        }
        tail
    }

    /// Stops its threads where they are. Only with nothing in flight.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        self.server.iter().for_each(|server| server.freeze());
    }

    /// Lets them go on.
    pub fn thaw(&self) {
        self.server.iter().for_each(|server| server.thaw());
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            let _ = kill_process(pid, signal);
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
