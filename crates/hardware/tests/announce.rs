//! An address that is announced is found by a switch that learns: a bridge of Linux, with a cable to the card of each of two hosts and to a
//! peer, in a network namespace of its own.
#![allow(unsafe_code)]
// UNSAFETY: a thread goes to a network namespace of its own, which rustix cannot do for one thread safely either.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use ioplane_api::spec::{TagWord, VfVlan};
use ioplane_hardware::{PciAddress, PhysicalFunction};
use serde_json::Value;

const GUEST: [u8; 6] = [2, 0, 0, 0, 0, 0x77];
const GUEST_TEXT: &str = "02:00:00:00:00:77";

fn ip(words: &str) -> Value {
    let mut words = words.split(' ');
    let said = Command::new(words.next().expect("a program")).args(words).output().expect("iproute2");
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    serde_json::from_slice(&said.stdout).unwrap_or_default()
}

/// What a host's sysfs says of a card's interface, which is in this namespace.
fn physical(root: &Path, slot: u8, interface: &str) -> PhysicalFunction {
    let link = ip(&format!("ip -json link show {interface}"));
    let of: PciAddress = format!("0000:01:{slot:02x}.0").parse().expect("an address");
    let net = root.join(format!("bus/pci/devices/{of}/physfn/net/{interface}"));
    std::fs::create_dir_all(&net).expect("a folder");
    let write = |what: &str, value: String| std::fs::write(net.join(what), value).expect("a file");
    write("ifindex", link[0]["ifindex"].to_string());
    write("address", link[0]["address"].as_str().expect("an address").to_owned());
    write("flags", "0x1003".to_owned());
    write("carrier", "1".to_owned());
    PhysicalFunction::of(root, of, None).expect("it is up")
}

/// Behind which ports of the switch the guest is.
fn learned() -> Vec<String> {
    let all = ip("bridge -json fdb show br sw");
    let of_guest = all.as_array().into_iter().flatten().filter(|entry| entry["mac"] == GUEST_TEXT);
    of_guest.map(|entry| entry["ifname"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Frames that the switch has sent by these ports.
fn sent() -> [u64; 2] {
    ["port-a", "port-b"].map(|port| {
        let link = ip(&format!("ip -s -json link show {port}"));
        link[0]["stats64"]["tx"]["packets"].as_u64().expect("a count")
    })
}

/// Sends a frame to the guest, which leaves by that many of these ports.
fn leaves_by(peer: &PhysicalFunction, expected: [u64; 2]) {
    let before = sent();
    let grown = || {
        let now = sent();
        [now[0] - before[0], now[1] - before[1]]
    };
    peer.send(GUEST, 0, 1).expect("it is up");
    let end = Instant::now() + Duration::from_secs(10);
    while grown() != expected && Instant::now() < end {}
    // Also where the second port was seen before the frame had come to it.
    assert_eq!(grown(), expected);
}

#[test]
fn a_switch_that_learns_sends_frames_to_where_the_address_was_announced() {
    if !rustix::process::geteuid().is_root() {
        let why = "SKIPPED: announcing an address was NOT tested: it takes root";
        let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
        return;
    }
    let tested = std::thread::spawn(|| {
        // SAFETY: changes the namespace of this thread only.
        let left = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        assert_eq!(left, 0, "unshare: {}", std::io::Error::last_os_error());
        ip("ip link add sw address 02:00:00:00:00:01 type bridge forward_delay 0 mcast_snooping 0");
        ip("ip link set sw addrgenmode none");
        for (end, port) in [("pf-a", "port-a"), ("pf-b", "port-b"), ("peer", "port-p")] {
            ip(&format!("ip link add {end} type veth peer name {port}"));
            ip(&format!("ip link set {port} master sw"));
            for one in [end, port] {
                ip(&format!("ip link set {one} addrgenmode none up"));
            }
        }
        ip("ip link set sw up");
        let root = tempfile::tempdir().expect("a folder");
        let [here, there, peer] =
            [(1, "pf-a"), (2, "pf-b"), (3, "peer")].map(|(slot, name)| physical(root.path(), slot, name));
        // Nobody knows it yet.
        leaves_by(&peer, [1, 1]);
        assert!(learned().is_empty());
        for (function, port, moved) in [(&here, "port-a", [1, 0]), (&there, "port-b", [0, 1])] {
            // With a tag and without one: this switch does not tell VLANs apart.
            for vlan in [None, Some(VfVlan { id: 10, qos: 0, proto: TagWord::Dot1q })] {
                ip("ip link set sw type bridge fdb_flush");
                function.announce(GUEST, vlan).expect("it is up");
                let end = Instant::now() + Duration::from_secs(10);
                while learned() != [port] {
                    assert!(Instant::now() < end, "{:?}", learned());
                }
                leaves_by(&peer, moved);
            }
        }
        // The last one counts: it has moved back without a word of its own.
        here.announce(GUEST, None).expect("it is up");
        leaves_by(&peer, [1, 0]);
    });
    tested.join().expect("the thread in its namespace");
}
