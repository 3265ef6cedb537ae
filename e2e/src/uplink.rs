//! The host's network behind a switch: a TAP interface in a namespace of its own.

use crate::place::HostPlace;
use anyhow::{Context, Result};
use ioplane_figures::cable::ip;
use std::os::fd::AsFd;
use std::process::Command;

/// Interface of an L1 that sends frames to functions in place of a physical one.
pub const UPLINK: &str = "up0";
/// The address of the host's end.
pub const HOST_MAC: &str = "02:00:00:00:aa:01";

/// A TAP interface in a namespace of its own, as a host's network behind the switch; the namespace goes with the value.
#[derive(Debug)]
pub struct Host {
    space: String,
    index: u32,
}

impl Host {
    /// Takes the interface `tap` there.
    pub fn new(tap: &str) -> Result<Host> {
        let space = format!("{tap}-ns");
        ip(&format!("netns add {space}"))?;
        let mut host = Host { space, index: 0 };
        let space = &host.space;
        ip(&format!("link set {tap} netns {space}"))?;
        ip(&format!("-n {space} link set {tap} address {HOST_MAC} up"))?;
        host.index = index(space, tap)?;
        Ok(host)
    }

    /// The same with several interfaces, of switches of several hosts, as ports of a bridge that learns addresses; the host's end is its own port.
    pub fn behind_a_bridge(taps: &[&str]) -> Result<Host> {
        let space = format!("{}-ns", taps.first().context("an interface")?);
        ip(&format!("netns add {space}"))?;
        let mut host = Host { space, index: 0 };
        let space = &host.space;
        ip(&format!("-n {space} link add name bridge type bridge forward_delay 0 mcast_snooping 0"))?;
        ip(&format!("-n {space} link set dev bridge address {HOST_MAC} up"))?;
        for tap in taps {
            ip(&format!("link set {tap} netns {space}"))?;
            ip(&format!("-n {space} link set dev {tap} master bridge up"))?;
        }
        host.index = index(space, "bridge")?;
        Ok(host)
    }

    /// For programs that run there.
    pub fn place(&self) -> HostPlace {
        HostPlace::network(&self.space)
    }

    /// Runs `ip` there.
    pub fn ip(&self, words: &str) -> Result<()> {
        Ok(ip(&format!("-n {} {words}", self.space))?)
    }

    /// The port behind which the bridge has seen this address last, if it has.
    pub fn port_of(&self, mac: &str) -> Result<Option<String>> {
        let output =
            self.command("bridge").args(["-j", "fdb", "show", "br", "bridge", "dynamic"]).output()?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let table: Vec<serde_json::Value> = serde_json::from_str(&said).with_context(|| said.clone())?;
        let entry = table.iter().find(|entry| entry["mac"] == mac);
        Ok(entry.and_then(|entry| entry["ifname"].as_str()).map(Into::into))
    }

    /// A command of the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.space, program]);
        command
    }

    /// Does `work` on a thread of the namespace; it hears the number of the interface.
    pub fn within<R: Send>(&self, work: impl FnOnce(u32) -> Result<R> + Send) -> Result<R> {
        let space = std::fs::File::open(format!("/run/netns/{}", self.space))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                let network = Some(rustix::thread::LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(space.as_fd(), network)?;
                work(self.index)
            });
            inside.join().map_err(|_| anyhow::anyhow!("the host's end panicked"))?
        })
    }
}

fn index(space: &str, interface: &str) -> Result<u32> {
    let show = Command::new("ip").args(["-n", space, "-o", "link", "show", interface]).output()?;
    let text = String::from_utf8_lossy(&show.stdout).into_owned();
    text.split(':').next().and_then(|index| index.trim().parse().ok()).context(text)
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = ip(&format!("netns delete {}", self.space));
    }
}
