//! A daemon with something of everything, and a record of what it is asked and answers.

use std::fmt::Display;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use super::contract::Contract;
use super::daemon::{TestDaemon, exchange};
use super::normalize::{Normalizer, pretty};

pub const MIB: u64 = 1 << 20;

/// Two cores; disks on a file, in memory, read-only, and one that cannot be served; two switches without an uplink, two NICs, and two
/// emulated PCI functions. What the defaults make of a host's file system and kernel is said, not left to them.
pub fn config(metrics: u16) -> String {
    format!(
        r#"[daemon]
metrics = "127.0.0.1:{metrics}"
[[core]]
notify = "notified"
[[core]]
id = 3
notify = "notified"
spin_us = 100
budget = 32
yield_policy = "nice"
[[disk]]
name = "file"
path = "file.img"
format = "raw"
direct = "off"
engine = "threads"
serial = "F1"
queues = 2
queue_size = 256
block_size = 4096
core = 3
migration_socket = "file.migration.sock"
[[disk]]
name = "memory"
memory = "8M"
[[disk]]
name = "fixed"
path = "fixed.img"
direct = "off"
engine = "threads"
read_only = true
[[disk]]
name = "broken"
path = "broken.img"
[[switch]]
name = "lan"
[[switch]]
name = "back"
[[nic]]
name = "web"
switch = "lan"
mac = "02:00:00:00:00:01"
vlan = 10
pairs = 2
queue_size = 512
mtu = 9000
isolated = true
core = 3
[[nic]]
name = "db"
switch = "lan"
mac = "02:00:00:00:00:02"
vlan = "trunk:10,20"
link = "down"
[[pci]]
name = "soft"
emulate = "rtl8139"
switch = "back"
mac = "02:00:00:00:00:0a"
[[pci]]
name = "old"
emulate = "ne2000"
switch = "back"
mac = "02:00:00:00:00:0b"
guest_memory = "any"
"#
    )
}

/// A port of this host that nobody uses.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The images that the configuration names.
pub fn images(daemon: &TestDaemon) {
    daemon.image("file.img", 4 * MIB);
    daemon.image("fixed.img", MIB);
    // Looks like another format, and is not served as raw unless that is said.
    daemon.image("broken.img", MIB);
    let broken = std::fs::File::options().write(true).open(daemon.path("broken.img")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&broken, b"QFI\xfb\0\0\0\x03", 0).unwrap();
}

/// A daemon and what was asked of it so far.
pub struct Recorder {
    pub daemon: TestDaemon,
    pub port: u16,
    pub normalizer: Normalizer,
    pub contract: Contract,
    log: Vec<Value>,
}

impl Recorder {
    pub fn new() -> Recorder {
        let port = free_port();
        let mut daemon = TestDaemon::new(&config(port));
        images(&daemon);
        daemon.start();
        daemon.until(|| daemon.disk("broken")["state"] == "failed");
        let normalizer = Normalizer::default()
            .with(daemon.folder.path().display().to_string(), "DIR")
            .with(format!("127.0.0.1:{port}"), "127.0.0.1:PORT")
            .with(format!("(pid {})", daemon.pid()), "(pid PID)")
            // Said only if it was seen to end in time.
            .with(" (exit status: 0)", "");
        let contract = Contract::of(&daemon);
        Recorder { daemon, port, normalizer, contract, log: Vec::new() }
    }

    /// A path in the daemon's directory.
    pub fn path(&self, name: &str) -> String {
        self.daemon.path(name).display().to_string()
    }

    /// Asks, and records the answer, which must be one that the OpenAPI document has.
    pub fn ask(&mut self, method: &str, path: &str, body: impl Display) {
        let body = body.to_string();
        let stream = UnixStream::connect(self.daemon.path("control.sock")).unwrap();
        let (status, head, answer) = exchange(stream, method, path, &body);
        let kind = content_type(&head);
        let answer = serde_json::from_str(&answer).unwrap_or(Value::String(answer));
        self.contract.check(method, path, status, &kind, &answer);
        let mut entry = json!({ "request": format!("{method} {path}"), "status": status, "type": kind });
        entry["answer"] = self.normalizer.value(answer);
        if !body.is_empty() {
            // As it was sent, if it is short.
            entry["body"] = match serde_json::from_str(&body) {
                Ok(body) => self.normalizer.value(body),
                Err(_) => self.normalizer.text(&body).into(),
            };
            if body.len() > 2000 {
                entry["body"] = format!("{} bytes", body.len()).into();
            }
        }
        self.log.push(entry);
    }

    pub fn get(&mut self, path: &str) {
        self.ask("GET", path, "");
    }

    /// Runs a command, and records what it prints: JSON, and for people if `text` is set.
    pub fn run(&mut self, args: &[&str], text: bool) {
        self.run_as(args, text, |value| value);
    }

    /// The same of a value that is made more regular first.
    pub fn run_as(&mut self, args: &[&str], text: bool, regular: impl Fn(Value) -> Value) {
        let said = self.daemon.cli(&[args, &["--json"]].concat());
        let shown: Vec<String> = args.iter().map(|arg| self.normalizer.text(arg)).collect();
        let mut entry = json!({ "command": shown.join(" "), "code": said.code });
        let values: Vec<Value> = serde_json::Deserializer::from_str(&said.out)
            .into_iter::<Value>()
            .map(|value| value.unwrap_or_else(|error| panic!("{args:?}: {error}: {}", said.out)))
            .map(|value| self.normalizer.value(regular(value)))
            .collect();
        entry["json"] = match <[Value; 1]>::try_from(values) {
            Ok([one]) => one,
            Err(several) => several.into(),
        };
        if !said.err.is_empty() {
            entry["error"] = self.lines(&said.err);
        }
        if text {
            let said = self.daemon.cli(args);
            entry["text"] = self.lines(&narrow(&said.out));
        }
        self.log.push(entry);
    }

    fn lines(&self, text: &str) -> Value {
        self.normalizer.text(text).lines().collect::<Vec<_>>().into()
    }

    /// What was recorded since this was asked last.
    pub fn recorded(&mut self) -> String {
        pretty(&std::mem::take(&mut self.log).into())
    }
}

/// Two spaces for more of them: how wide a column is depends on the directory's name.
fn narrow(text: &str) -> String {
    let mut text = text.to_owned();
    while text.contains("   ") {
        text = text.replace("   ", "  ");
    }
    text
}

/// The content type in the head of an answer.
pub fn content_type(head: &str) -> String {
    let field = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-type").then_some(value)
    });
    field.unwrap_or("none").to_owned()
}
