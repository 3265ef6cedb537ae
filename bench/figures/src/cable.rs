//! Two hosts on one machine: a network namespace and a cable to it, which can be pulled, made slower, and whose frames are counted.

use std::io;
use std::net::Ipv4Addr;
use std::process::Command;

/// The far host's address. Nothing else is in its network.
pub const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 2);
/// This host's.
const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 1);
/// What the far end is called there.
const FAR_END: &str = "far0";

/// Runs a program with these words; what it says is in the error.
fn run(program: &str, words: &str) -> io::Result<()> {
    let output = Command::new(program).args(words.split(' ')).output();
    let output = output.map_err(|error| io::Error::new(error.kind(), format!("{program}: {error}")))?;
    match output.status.success() {
        true => Ok(()),
        false => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(io::Error::other(format!("{program} {words}: {said}")))
        }
    }
}

/// Runs `ip` with these words.
pub fn ip(words: &str) -> io::Result<()> {
    run("ip", words)
}

/// A namespace that stands for another host, and the cable between it and this one. Both go with the value.
#[derive(Debug)]
pub struct Cable {
    space: String,
    near: String,
}

impl Cable {
    /// Lays one; `name` is at most 10 characters, and no other test's.
    pub fn lay(name: &str) -> io::Result<Cable> {
        let (space, near) = (format!("{name}-far"), format!("{name}0"));
        ip(&format!("netns add {space}"))?;
        let cable = Cable { space, near };
        let Cable { space, near } = &cable;
        ip(&format!("link add {near} type veth peer name {FAR_END} netns {space}"))?;
        ip(&format!("address add {NEAR}/30 dev {near}"))?;
        ip(&format!("-n {space} address add {FAR}/30 dev {FAR_END}"))?;
        ip(&format!("link set {near} up"))?;
        ip(&format!("-n {space} link set lo up"))?;
        cable.plug()?;
        Ok(cable)
    }

    /// The namespace's name.
    pub fn space(&self) -> &str {
        &self.space
    }

    /// Packets are lost from now on; no connection hears of it.
    pub fn pull(&self) -> io::Result<()> {
        ip(&format!("-n {} link set {FAR_END} down", self.space))
    }

    /// Packets arrive again.
    pub fn plug(&self) -> io::Result<()> {
        ip(&format!("-n {} link set {FAR_END} up", self.space))
    }

    /// Both ends send at most so many Mbit/s, and queue at most 5 ms of it.
    pub fn limit(&self, mbit: u32) -> io::Result<()> {
        let words = format!("root tbf rate {mbit}mbit burst 256k latency 5ms");
        run("tc", &format!("qdisc replace dev {} {words}", self.near))?;
        run("tc", &format!("-n {} qdisc replace dev {FAR_END} {words}", self.space))
    }

    /// Connections that begin from now on send frame by frame, as on a wire, and not segments of 64 KiB that no wire carries.
    pub fn frame_by_frame(&self) -> io::Result<()> {
        ip(&format!("link set {} gso_max_segs 1", self.near))?;
        ip(&format!("-n {} link set {FAR_END} gso_max_segs 1", self.space))
    }

    /// Bytes and frames that have gone over it both ways so far: each with its Ethernet header of 14 bytes, without preamble, checksum and gap.
    pub fn carried(&self) -> io::Result<[u64; 2]> {
        let count = |what: &str| -> io::Result<u64> {
            let path = format!("/sys/class/net/{}/statistics/{what}", self.near);
            std::fs::read_to_string(path)?.trim().parse().map_err(io::Error::other)
        };
        Ok([count("rx_bytes")? + count("tx_bytes")?, count("rx_packets")? + count("tx_packets")?])
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        // With the namespace its end goes, and with that the near one.
        let _ = ip(&format!("netns delete {}", self.space));
        let _ = Command::new("ip").args(["link", "delete", &self.near]).output();
    }
}
