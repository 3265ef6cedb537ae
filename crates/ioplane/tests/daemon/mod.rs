//! A daemon with a folder of its own, and both ways to talk to it: the command line and plain HTTP.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod guest;
pub mod identities;
pub mod load;
pub mod moving;
pub mod nic;
pub mod qmp;
pub mod reader;
pub mod relay;
pub mod terminal;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use ioplane_testkit::crash::Victim;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const BINARY: &str = env!("CARGO_BIN_EXE_ioplane");
/// Longer than anything here takes on a loaded machine.
pub const LIMIT: Duration = Duration::from_secs(120);

pub struct TestDaemon {
    pub folder: tempfile::TempDir,
    process: Option<Child>,
    /// More for the environment of its daemon.
    environment: Vec<(&'static str, &'static str)>,
}

/// What `cli` came to.
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

/// By the system call: a fresh Debian has no program `kill`. Returns from STOP when no thread runs any more: the thread that it is delivered
/// to stops the others once it is scheduled, and until then they answer whoever asks.
fn send(pid: u64, signal: &str) -> rustix::io::Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).unwrap();
    let signal = match signal {
        "TERM" => Signal::TERM,
        "HUP" => Signal::HUP,
        "INT" => Signal::INT,
        "STOP" => Signal::STOP,
        "CONT" => Signal::CONT,
        "KILL" => Signal::KILL,
        other => panic!("no signal {other}"),
    };
    kill_process(pid, signal)?;
    let end = Instant::now() + LIMIT;
    while signal == Signal::STOP && !stopped(pid) {
        assert!(Instant::now() < end, "process {pid:?} does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Whether no thread of a process runs any more, but for io_uring's workers, which answer nobody: the state behind the name in `stat`
/// (proc_pid_stat(5)).
fn stopped(pid: Pid) -> bool {
    std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())).unwrap().all(|thread| {
        let stat = std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap_or_default();
        stat.contains("(iou-") || stat.rsplit_once(") ").is_some_and(|(_, fields)| fields.starts_with('T'))
    })
}

impl TestDaemon {
    /// A folder with this configuration and nothing running.
    pub fn new(config: &str) -> TestDaemon {
        let folder = tempfile::Builder::new().prefix("ioplane-").tempdir().unwrap();
        let daemon = TestDaemon { folder, process: None, environment: Vec::new() };
        daemon.configure(config);
        daemon
    }

    /// The same, where files have O_DIRECT: tmpfs may be what the system's own place for them is.
    pub fn new_beside_the_build(config: &str) -> TestDaemon {
        let folder = tempfile::Builder::new().prefix("h").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let daemon = TestDaemon { folder, process: None, environment: Vec::new() };
        daemon.configure(config);
        daemon
    }

    /// The same host with images that somebody else has taken for its own use as well: what keeps a second writer out must not be the one kernel that the
    /// hosts of a test share. Has to be said before the start; where the daemon was built without kill points it is said aloud that locks are on.
    pub fn without_locks(mut self) -> TestDaemon {
        match cfg!(feature = "kill-points") {
            true => self.environment.push(("IOPLANE_WITHOUT_LOCKS", "1")),
            false => {
                let why = "image locks are ON: without the feature kill-points they cannot be taken out";
                eprintln!("\n*** SKIPPED: {why} ***");
                assert!(std::env::var_os("IOPLANE_NO_SKIP").is_none(), "skipped: {why}");
            }
        }
        self
    }

    /// The same host without one of the rules of `ioplane_nbd::mutation` or of a swap (crates/daemon/src/disk/swap_rule.rs).
    #[cfg(feature = "kill-points")]
    pub fn without_rule(mut self, rule: Option<&'static str>) -> TestDaemon {
        self.environment.extend(rule.map(|rule| ("IOPLANE_WITHOUT_RULE", rule)));
        self
    }

    /// The same with a daemon that answers.
    pub fn open(config: &str) -> TestDaemon {
        let mut daemon = TestDaemon::new(config);
        daemon.start();
        daemon
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn configure(&self, config: &str) {
        std::fs::write(self.path("ioplane.toml"), config).unwrap();
    }

    /// A sparse image.
    pub fn image(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.path(name);
        std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
        path
    }

    fn serve(&self) -> Command {
        let mut command = Command::new(BINARY);
        command.arg("--socket").arg(self.path("control.sock"));
        command.args(["serve", "--config"]).arg(self.path("ioplane.toml")).stdin(Stdio::null());
        command.env("IOPLANE_UPGRADE_KILL", self.path("kill"));
        command.envs(self.environment.iter().copied());
        command
    }

    /// Starts the daemon and waits until it answers.
    pub fn start(&mut self) {
        let serve = self.serve();
        self.start_with(serve);
    }

    /// The same by a command that becomes the daemon, its words behind.
    pub fn start_by(mut self, words: &[&str]) -> TestDaemon {
        let serve = self.serve();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(serve.get_program()).args(serve.get_args()).stdin(Stdio::null());
        command.envs(serve.get_envs().filter_map(|(name, value)| Some((name, value?))));
        self.start_with(command);
        self
    }

    fn start_with(&mut self, mut command: Command) {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        self.process = Some(command.stderr(log).spawn().unwrap());
        let process = self.process.as_mut().unwrap();
        let end = Instant::now() + LIMIT;
        let socket = self.folder.path().join("control.sock");
        while UnixStream::connect(&socket).is_err() {
            if let Some(status) = process.try_wait().unwrap() {
                panic!("the daemon ended with {status}: {}", self.log());
            }
            assert!(Instant::now() < end, "no answer: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Starts one that somebody will kill, with more in its environment; it serves `disk`.
    pub fn victim(&self, disk: &str, environment: &[(&str, String)]) -> Victim {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log")).unwrap();
        let mut command = self.serve();
        command.envs(environment.iter().map(|(name, value)| (*name, value.as_str()))).stderr(log);
        Victim::start(command, &self.path(&format!("{disk}.sock"))).unwrap()
    }

    /// Every process that serves from this folder: an upgrade that was cut short may leave one that is not our child.
    pub fn daemons(&self) -> Vec<u32> {
        let config = self.path("ioplane.toml").display().to_string();
        let processes = std::fs::read_dir("/proc").unwrap().flatten();
        let numbers = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
        numbers
            .filter(|pid| {
                std::fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| line.split(|byte| *byte == 0).any(|word| word == config.as_bytes()))
            })
            .collect()
    }

    /// Runs a daemon that is to end by itself.
    pub fn refuses(&self) -> Said {
        said(self.serve().output().unwrap())
    }

    /// Runs a second daemon in the same folder, with another control socket; it is to end by itself.
    pub fn refuses_beside(&self, socket: &str) -> Said {
        let mut command = Command::new(BINARY);
        command.arg("--socket").arg(self.path(socket));
        command.args(["serve", "--config"]).arg(self.path("ioplane.toml")).stdin(Stdio::null());
        said(command.output().unwrap())
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    pub fn signal(&self, name: &str) {
        send(self.pid().into(), name).unwrap();
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill9(&mut self) {
        let mut process = self.process.take().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
    }

    /// SIGTERM, and waits for a clean end.
    pub fn terminate(&mut self) {
        self.signal("TERM");
        let status = self.process.take().unwrap().wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
    }

    pub fn cli(&self, args: &[&str]) -> Said {
        let mut command = Command::new(BINARY);
        command.arg("--socket").arg(self.path("control.sock")).args(args).stdin(Stdio::null());
        said(command.output().unwrap())
    }

    /// The same, that a test may kill.
    pub fn begin(&self, args: &[&str], env: Option<(&str, &str)>) -> Child {
        let mut command = Command::new(BINARY);
        command.arg("--socket").arg(self.path("control.sock")).args(args).envs(env);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// The same, to be run on another thread.
    pub fn later(&self, args: &[&str]) -> impl FnOnce() -> Said + Send + 'static {
        let mut command = Command::new(BINARY);
        command.arg("--socket").arg(self.path("control.sock")).args(args).stdin(Stdio::null());
        move || said(command.output().unwrap())
    }

    pub fn signal_to(&self, pid: u64, name: &str) {
        send(pid, name).unwrap();
    }

    /// After an upgrade the daemon is not our child any more.
    pub fn kill_whoever_answers(&self) {
        let said = self.cli(&["status", "--json"]);
        let status: Value = serde_json::from_str(&said.out).unwrap_or_default();
        if let Some(pid) = status["pid"].as_u64() {
            let _ = send(pid, "KILL");
        }
    }

    /// What a command prints as JSON; it must succeed.
    pub fn json(&self, args: &[&str]) -> Value {
        let said = self.cli(&[args, &["--json"]].concat());
        assert_eq!(said.code, 0, "{args:?}: {}", said.err);
        serde_json::from_str(&said.out).unwrap_or_else(|e| panic!("{args:?}: {e}: {}", said.out))
    }

    /// What a command that must fail says.
    pub fn refused(&self, args: &[&str]) -> String {
        let said = self.cli(args);
        assert_eq!(said.code, 1, "{args:?}: {}{}", said.out, said.err);
        said.err
    }

    /// One disk of `status --json`.
    pub fn disk(&self, name: &str) -> Value {
        let status = self.json(&["status"]);
        let mut disks = status["disks"].as_array().unwrap().iter();
        disks.find(|disk| disk["name"] == name).cloned().unwrap_or(Value::Null)
    }

    /// A front end that says nothing.
    pub fn connect(&self, name: &str) -> UnixStream {
        let stream = UnixStream::connect(self.path(&format!("{name}.sock"))).unwrap();
        self.until(|| self.disk(name)["connected"] == true);
        stream
    }

    pub fn until(&self, mut met: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !met() {
            assert!(
                Instant::now() < end,
                "it does not come: {}{}",
                self.log(),
                self.cli(&["status", "--json"]).out
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Plain HTTP on the control socket: status and JSON body.
    pub fn http(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let (status, body) =
            http(UnixStream::connect(self.path("control.sock")).unwrap(), method, path, body);
        let value = serde_json::from_str(&body).unwrap_or_else(|e| panic!("{method} {path}: {e}: {body:?}"));
        (status, value)
    }
}

fn said(output: Output) -> Said {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Said { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
}

/// One request on a connection of its own: status and body.
pub fn http(stream: impl Read + Write, method: &str, path: &str, body: &str) -> (u16, String) {
    let (status, _, body) = exchange(stream, method, path, body);
    (status, body)
}

/// As [`http`]: status, head, body.
pub fn exchange(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: &str,
) -> (u16, String, String) {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // An answer may come before the body has been read, and then the rest is not wanted.
    let _ = stream.write_all(body.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{method} {path}: {answer:?}"));
    (head.split(' ').nth(1).unwrap().parse().unwrap(), head.to_owned(), body.to_owned())
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
