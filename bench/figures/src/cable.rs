//! Two hosts on one machine: a network namespace and a cable to it, which can be pulled, made slower, and whose frames are counted.

use std::io;
use std::net::Ipv4Addr;
use std::process::Command;

pub use ioplane_testkit::space::ip;
use ioplane_testkit::space::{NetworkSpace, run};

/// The far host's address. Nothing else is in its network.
pub const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 2);
/// This host's.
const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 7, 1);
/// What the far end is called there.
const FAR_END: &str = "far0";

/// A namespace that stands for another host, and the cable between it and this one. Both go with the value.
#[derive(Debug)]
pub struct Cable {
    space: NetworkSpace,
    near: String,
}

impl Cable {
    /// Lays one; `name` is at most 10 characters, and no other test's.
    pub fn lay(name: &str) -> io::Result<Cable> {
        let cable = Cable { space: NetworkSpace::named(&format!("{name}-far"))?, near: format!("{name}0") };
        let Cable { space, near } = &cable;
        ip(&format!("link add {near} type veth peer name {FAR_END} netns {}", space.name()))?;
        ip(&format!("address add {NEAR}/30 dev {near}"))?;
        space.ip(&format!("address add {FAR}/30 dev {FAR_END}"))?;
        ip(&format!("link set {near} up"))?;
        cable.plug()?;
        Ok(cable)
    }

    /// The namespace's name.
    pub fn space(&self) -> &str {
        self.space.name()
    }

    /// Packets are lost from now on; no connection hears of it.
    pub fn pull(&self) -> io::Result<()> {
        self.space.ip(&format!("link set {FAR_END} down"))
    }

    /// Packets arrive again.
    pub fn plug(&self) -> io::Result<()> {
        self.space.ip(&format!("link set {FAR_END} up"))
    }

    /// Both ends send at most so many Mbit/s, and queue at most 5 ms of it.
    pub fn limit(&self, mbit: u32) -> io::Result<()> {
        let words = format!("root tbf rate {mbit}mbit burst 256k latency 5ms");
        run("tc", &format!("qdisc replace dev {} {words}", self.near))?;
        run("tc", &format!("-n {} qdisc replace dev {FAR_END} {words}", self.space()))
    }

    /// Connections that begin from now on send frame by frame, as on a wire, and not segments of 64 KiB that no wire carries.
    pub fn frame_by_frame(&self) -> io::Result<()> {
        ip(&format!("link set {} gso_max_segs 1", self.near))?;
        self.space.ip(&format!("link set {FAR_END} gso_max_segs 1"))
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
        // With the namespace its end goes as well, but later.
        let _ = Command::new("ip").args(["link", "delete", &self.near]).output();
    }
}
