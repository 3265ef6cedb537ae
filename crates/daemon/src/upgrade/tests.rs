//! What a daemon and its successor say to each other, byte by byte: the other one is of another version.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use ioplane_network::{DropReason, Port, PortOptions, SideReading, Switch, SwitchSettings};
use ioplane_testkit::golden;
use ioplane_testkit::golden::Part;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::nic::{carry_out, final_counts};
use super::wire::HandoverSocket;
use super::words::{AnswerV1, DaemonV1, DeviceV1, NameV1, OrderV1};

/// More than go beside one byte.
const MANY: usize = 251;

fn wire(socket: UnixStream) -> HandoverSocket {
    let mut wire = HandoverSocket::on(socket).unwrap();
    wire.within(Duration::from_secs(20));
    wire
}

/// A message as it lies in the socket, with so many descriptors beside it.
fn sent(what: &str, message: &impl Serialize, files: usize) -> Part {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let nothing = std::fs::File::open("/dev/null").unwrap();
    wire(ours).send(message, &vec![nothing.as_fd(); files]).unwrap();
    let mut bytes = Vec::new();
    theirs.read_to_end(&mut bytes).unwrap();
    (format!("{what}, {files} descriptors"), bytes)
}

/// What is received of a message that is stored; it is sent as it was read.
fn received<T: Serialize + DeserializeOwned>((title, bytes): &Part) {
    let files: usize = title.rsplit(' ').nth(1).unwrap().parse().unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    let nothing = std::fs::File::open("/dev/null").unwrap();
    ours.write_all(&bytes[..8]).unwrap();
    let batches = files.div_ceil(250);
    for (batch, byte) in bytes[8..8 + batches].chunks(1).enumerate() {
        let beside = vec![nothing.as_fd(); (files - 250 * batch).min(250)];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&beside)));
        sendmsg(&ours, &[IoSlice::new(byte)], &mut ancillary, SendFlags::empty()).unwrap();
    }
    ours.write_all(&bytes[8 + batches..]).unwrap();
    let (message, came) = wire(theirs).receive::<T>().unwrap();
    assert_eq!(came.len(), files, "{title}");
    assert_eq!(postcard::to_stdvec(&message).unwrap(), bytes[8 + batches..], "{title}");
}

fn name(kind: &str, name: &str) -> NameV1 {
    NameV1 { kind: kind.to_owned(), name: name.to_owned() }
}

fn daemon(metrics: Option<&str>) -> OrderV1 {
    OrderV1::Daemon(DaemonV1 {
        version: "1.2.3".to_owned(),
        pid: 4321,
        control: "/run/ioplane/control.sock".into(),
        run_dir: "/run/ioplane".into(),
        metrics: metrics.map(str::to_owned),
    })
}

fn device(kind: &str, suspended: bool, beside: &[u8]) -> OrderV1 {
    let bytes = (0..200).collect();
    OrderV1::Device(DeviceV1 { name: name(kind, "web"), suspended, beside: beside.to_vec(), bytes })
}

#[test]
fn what_a_daemon_says() {
    let golden = golden!("orders.bytes");
    let failed = OrderV1::Failed(name("disk", "data"), "no such image".to_owned(), "make it".to_owned());
    golden.check_parts(&[
        sent("Daemon with metrics", &daemon(Some("127.0.0.1:9750")), 3),
        sent("Daemon", &daemon(None), 2),
        sent("Prepare a switch", &OrderV1::Prepare(name("switch", "lan")), 0),
        sent("Prepare a disk", &OrderV1::Prepare(name("disk", "root")), 1),
        sent("Failed", &failed, 0),
        sent("PreparedAll", &OrderV1::PreparedAll, 0),
        sent("Device", &device("nic", false, b"{}"), 9),
        sent("Device with many descriptors", &device("disk", true, &[1]), MANY),
        sent("Commit", &OrderV1::Commit, 0),
    ]);
    golden.parts().iter().for_each(received::<OrderV1>);
}

#[test]
fn what_its_successor_answers() {
    let golden = golden!("answers.bytes");
    golden.check_parts(&[
        sent("Ready", &AnswerV1::Ready("1.2.3".to_owned()), 0),
        sent("Prepared", &AnswerV1::Prepared, 0),
        sent("Loaded", &AnswerV1::Loaded, 0),
        sent("Mine", &AnswerV1::Mine, 0),
        sent("Report", &AnswerV1::Report(vec![Some(1_234_567), None, Some(0)]), 0),
        sent("Refused", &AnswerV1::Refused("the disk is gone".to_owned(), "put it back".to_owned()), 0),
    ]);
    golden.parts().iter().for_each(received::<AnswerV1>);
}

#[test]
fn the_greeting() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let other = std::thread::spawn(move || wire(theirs).greet());
    let mut said = vec![0; 16];
    (&ours).read_exact(&mut said).unwrap();
    let golden = golden!("greeting.bytes");
    golden.check_parts(&[("greeting".to_owned(), said)]);
    (&ours).write_all(&golden.part("greeting")).unwrap();
    other.join().unwrap().unwrap();
}

/// What is said of a port beside its device: every cause of a drop by its name.
#[test]
fn a_port() {
    let switch = Switch::new("lan", SwitchSettings::default());
    let plug = |name: &str| switch.plug(PortOptions::new(name)).unwrap().into();
    let counts = |port: &Arc<Port>| {
        let counts: Value = serde_json::from_slice(&final_counts(port.clone())()).unwrap();
        serde_json::to_string_pretty(&counts).unwrap() + "\n"
    };
    let port: Arc<Port> = plug("one");
    let side = |from: u64| {
        let drops = DropReason::ALL.iter().zip(from..).map(|(cause, count)| (*cause, count)).collect();
        SideReading { frames: from, bytes: from * 100, drops }
    };
    port.restore((&side(10), &side(50)));
    port.set_mtu(1400);
    port.restore_link(Some(7));
    let golden = golden!("port.json");
    golden.check(&counts(&port));
    let other: Arc<Port> = plug("other");
    carry_out(&other, golden.text().as_bytes()).unwrap();
    assert_eq!(counts(&other), golden.text());
    // A cause that this version does not know, and one that an older version did not.
    carry_out(
        &plug("third"),
        br#"{"link":null,"mtu":1500,"sent":{"frames":1,"bytes":2,"drops":{"new":3}},
        "received":{"frames":1,"bytes":2,"drops":{}}}"#,
    )
    .unwrap();
}
