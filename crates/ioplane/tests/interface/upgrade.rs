//! An upgrade: what it answers, and what the daemon says to its successor. Bytes of the messages are beside their code, in
//! `src/daemon/upgrade`; here an older version that reads them by definitions of its own finds what it looks for.

use std::io::{IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_testkit::golden;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, recvmsg};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::normalize::pretty;
use super::recorder::Recorder;

#[test]
fn what_it_answers() {
    let mut recorder = Recorder::new();
    recorder.normalizer = recorder.normalizer.with(env!("CARGO_BIN_EXE_ioplane"), "BINARY");
    let _disk = FrontEnd::connect(&recorder.daemon.path("memory.sock"), Wants::default()).unwrap();
    let _nic = FrontEnd::connect(&recorder.daemon.path("web.sock"), Wants::default()).unwrap();
    recorder.ask(
        "POST",
        "/v1/upgrade",
        json!({ "binary": env!("CARGO_BIN_EXE_ioplane"), "patience_s": 100 }),
    );
    let before = u64::from(recorder.daemon.pid());
    recorder.daemon.until(|| {
        let status: Value =
            serde_json::from_str(&recorder.daemon.cli(&["status", "--json"]).out).unwrap_or_default();
        status["pid"].as_u64().is_some_and(|pid| pid != before)
    });
    let mut after = recorder.daemon.json(&["status"]);
    let after = recorder.normalizer.value(after["upgrade"].take());
    recorder.daemon.kill_whoever_answers();
    golden!("upgrade.json").check(&recorder.recorded());
    golden!("upgrade-status.json").check(&pretty(&after));
}

/// What a daemon says, as an older version has it.
#[derive(Debug, Serialize, Deserialize)]
enum PredecessorMessage {
    Daemon { version: String, pid: u32, control: PathBuf, run_dir: PathBuf, metrics: Option<String> },
    Prepare(Name),
    Failed(Name, String, String),
    PreparedAll,
    Device { name: Name, suspended: bool, beside: Vec<u8>, bytes: Vec<u8> },
    Commit,
}

#[derive(Debug, Serialize, Deserialize)]
struct Name {
    kind: String,
    name: String,
}

/// What its successor answers.
#[derive(Debug, Serialize)]
#[expect(dead_code, reason = "their numbers count")]
enum SuccessorMessage {
    Ready(&'static str),
    Prepared,
    Loaded,
    Mine,
    Report(Vec<Option<u64>>),
    Refused(&'static str, &'static str),
}

/// Sockets of the disks and NICs that the daemon of [`Recorder`] serves, the second one of a disk included.
const DOORS: usize = 6;
const PLACE: &str = "IOPLANE_TEST_SUCCESSOR";

/// A successor's end of the socket.
struct Successor(UnixStream);

impl Successor {
    fn read(&self, len: usize) -> Vec<u8> {
        use std::io::Read as _;
        let mut bytes = vec![0; len];
        (&self.0).read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Descriptors that have come beside one byte.
    fn files(&self) -> usize {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut byte = [9];
        let slices = &mut [IoSliceMut::new(&mut byte)];
        recvmsg(&self.0, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
        let rights = ancillary.drain().filter_map(|message| match message {
            rustix::net::RecvAncillaryMessage::ScmRights(rights) => Some(rights.count()),
            _ => None,
        });
        let count = rights.sum();
        assert_eq!(byte, [0]);
        count
    }

    fn receive(&self) -> (PredecessorMessage, usize) {
        let head = self.read(8);
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap()) as usize;
        let (len, wanted) = (word(0), word(4));
        let mut files = 0;
        while files < wanted {
            files += self.files();
        }
        let bytes = self.read(len);
        let (order, rest) = postcard::take_from_bytes(&bytes).unwrap();
        assert!(rest.is_empty());
        (order, files)
    }

    fn answer(&self, answer: &SuccessorMessage) {
        let bytes = postcard::to_stdvec(answer).unwrap();
        let frame = [&(bytes.len() as u32).to_le_bytes()[..], &[0; 4], &bytes].concat();
        (&self.0).write_all(&frame).unwrap();
    }
}

/// An order as it is recorded: a device itself is not readable, and has golden files in `ioplane-host`.
fn shown((order, files): (PredecessorMessage, usize)) -> Value {
    let mut shown = match order {
        PredecessorMessage::Device { name, suspended, beside, bytes } => {
            assert!(bytes.len() > 50, "a device says something");
            let beside = serde_json::from_slice(&beside).unwrap_or_else(|_| json!(beside));
            json!({ "Device": { "name": name, "suspended": suspended, "beside": beside } })
        }
        other => json!(other),
    };
    if files > 0 {
        shown = json!({ "order": shown, "descriptors": files });
    }
    shown
}

/// The successor that the test below has its daemon start: hears everything, and refuses at the last moment.
/// By itself it does nothing.
#[test]
fn as_a_successor() {
    let Some(place) = std::env::var_os(PLACE) else { return };
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let wire = Successor(socket.into());
    let mut said = vec![json!({ "greeting": format!("{:02x?}", wire.read(16)) })];
    (&wire.0).write_all(b"ioplane>\x01\0\0\0\x01\0\0\0").unwrap();
    said.push(shown(wire.receive()));
    wire.answer(&SuccessorMessage::Ready("0.0.1"));
    while !matches!(said.last(), Some(Value::String(order)) if order == "PreparedAll") {
        said.push(shown(wire.receive()));
    }
    wire.answer(&SuccessorMessage::Prepared);
    said.extend((0..DOORS).map(|_| shown(wire.receive())));
    wire.answer(&SuccessorMessage::Loaded);
    said.push(shown(wire.receive()));
    std::fs::write(Path::new(&place), serde_json::to_vec(&said).unwrap()).unwrap();
    wire.answer(&SuccessorMessage::Refused("a test has heard enough", "nothing"));
}

#[test]
fn the_conversation() {
    let mut recorder = Recorder::new();
    let (script, place) = (recorder.daemon.path("successor"), recorder.daemon.path("said.json"));
    let this = std::env::current_exe().unwrap();
    let text = format!(
        "#!/bin/sh\n{PLACE}='{}' exec '{}' --exact upgrade::as_a_successor --nocapture\n",
        place.display(),
        this.display()
    );
    std::fs::write(&script, text).unwrap();
    std::fs::set_permissions(&script, PermissionsExt::from_mode(0o755)).unwrap();
    let _disk = FrontEnd::connect(&recorder.daemon.path("memory.sock"), Wants::default()).unwrap();
    let _nic = FrontEnd::connect(&recorder.daemon.path("web.sock"), Wants::default()).unwrap();
    recorder.ask("POST", "/v1/upgrade", json!({ "binary": script }));
    golden!("upgrade-refused.json").check(&recorder.recorded());
    let said = std::fs::read(&place).unwrap();
    let said = recorder.normalizer.value(serde_json::from_slice(&said).unwrap());
    golden!("upgrade-conversation.json").check(&pretty(&said));
    // It goes on as before.
    assert_eq!(recorder.daemon.json(&["status"])["pid"], recorder.daemon.pid());
    assert_eq!(recorder.daemon.disk("memory")["connected"], true);
}
