//! Two hosts, each an L1 with a kernel and an 82576 of its own, on two networks of this machine: that of their guests, whose switch learns addresses
//! and at which the peer is; and their own, by which one moves its guest to the other.
//!
//! ```text
//!   host-a, an L1:  pf14 --TAP--.                                        .--TAP-- pf15  host-b, an L1
//!                               `-- a bridge that learns: 10.0.20.1/24 --'
//!                   own  --TAP----- another bridge -------------------------TAP-- own
//!                   10.0.21.1                                              10.0.21.2
//! ```

use crate::assets::{Host as Parts, News};
use crate::hosts::NAMES;
use crate::igb::{GUEST_IP, PEER_IP, PHYSICAL, VirtualFunctions, card_args};
use crate::l1::L1;
use crate::process::{Process, scratch};
use crate::sides::{INCOMING, RATE, STREAM, Side, Wire, identity};
use crate::traffic::Traffic;
use crate::uplink::Host;
use anyhow::{Context, Result, anyhow, ensure};
use std::ffi::OsString;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Port of `ioplane identity serve`.
const JOINS: u16 = 10807;

/// Address of a host in their own network.
fn own_ip(number: usize) -> String {
    format!("10.0.21.{}", number + 1)
}

fn own_mac(number: usize) -> String {
    format!("52:54:00:00:15:{:02x}", number + 1)
}

/// Both hosts and both networks.
#[derive(Debug)]
pub struct Lan {
    /// The first is called host-a, the other one host-b.
    pub hosts: [L1; 2],
    functions: [VirtualFunctions; 2],
    guests: Host,
    own: Host,
    taps: [[String; 2]; 2],
}

/// One host, and a virtual function of its card. Its TAPs are of QEMU's making.
fn boot(number: usize, memory_mib: u64, [guests, own]: &[String; 2]) -> Result<(L1, VirtualFunctions)> {
    let card = number as u8;
    let tap = |name: &str, more: &str| format!("tap,ifname={name},script=no,downscript=no{more}");
    // The card has frames as a wire has them.
    let cable = card_args(card, &tap(guests, ",vnet_hdr=off"));
    let (cable_of_own, mac) = (tap(own, ""), own_mac(number));
    let devices =
        format!("{cable} -netdev {cable_of_own},id=own -device virtio-net-pci,netdev=own,mac={mac},romfile=");
    let name = NAMES[number];
    let l1 = L1::boot_for_igbs(memory_mib, &devices, &|line| eprintln!("{name}: {line}"))?;
    l1.raise_own(&mac, "own", &own_ip(number))?;
    let [a, b] = [0, 1].map(|other| format!("{} {}", own_ip(other), NAMES[other]));
    l1.run(
        &format!(
            "set -e; hostname {name}; printf '127.0.0.1 localhost\\n{a}\\n{b}\\n' >/tmp/hosts
             mount --bind /tmp/hosts /etc/hosts"
        ),
        MINUTE,
    )?;
    let functions = l1.virtual_functions(card, 1)?;
    Ok((l1, functions))
}

impl Lan {
    /// Boots both hosts beside each other and connects them.
    pub fn boot(memory_mib: u64, news: News<'_>) -> Result<Lan> {
        // What both need is made once.
        Parts::prepare(news)?;
        let own = std::process::id() % 100_000;
        let taps = ["a", "b"].map(|host| ["g", "o"].map(|network| format!("i{network}{host}{own}")));
        let booted = std::thread::scope(|scope| {
            let both = [0, 1].map(|number| {
                let taps = &taps[number];
                scope.spawn(move || boot(number, memory_mib, taps).context(NAMES[number]))
            });
            both.map(|one| one.join().unwrap_or_else(|_| Err(anyhow!("booting panicked"))))
        });
        let [(a, a_functions), (b, b_functions)] = {
            let [a, b] = booted;
            [a?, b?]
        };
        let [[a_guests, a_own], [b_guests, b_own]] = &taps;
        let guests = Host::behind_a_bridge(&[a_guests, b_guests])?;
        guests.ip(&format!("addr add {PEER_IP}/24 dev bridge"))?;
        let own = Host::behind_a_bridge(&[a_own, b_own])?;
        let lan = Lan { hosts: [a, b], functions: [a_functions, b_functions], guests, own, taps };
        news("both hosts are up");
        Ok(lan)
    }

    /// Starts the daemons of both, adds their functions, and has the second one join the authority of the first by a token.
    pub fn sides(&self, mode: &'static str) -> Result<[Side<'_>; 2]> {
        let side = |number: usize, name| {
            let wire = Wire { host: NAMES[number], port: INCOMING };
            let functions = self.functions[number].clone();
            Side::of(&self.hosts[number], [name, PHYSICAL[number]], functions, mode, Some(wire))
        };
        let sides = [side(0, "here")?, side(1, "there")?];
        let ioplane = crate::daemon::binary()?;
        let command = |name: &str, words: &str| {
            format!("{} identity --dir {} {words}", ioplane.display(), identity(name))
        };
        let [a, b] = &self.hosts;
        let [here, there] = NAMES;
        a.run(&command("here", &format!("create {here}")), MINUTE)?;
        let serves =
            a.start(&format!("exec {}", command("here", &format!("serve --listen {}:{JOINS}", own_ip(0)))))?;
        serves.expect("answering hosts", MINUTE)?;
        let token =
            a.run(&format!("{} 2>/dev/null", command("here", &format!("token --name {there}"))), MINUTE)?;
        b.run(&command("there", &format!("join {}", token.trim())), MINUTE)
            .with_context(|| format!("the authority said {}", serves.output()))?;
        serves.kill()?;
        Ok(sides)
    }

    /// Traffic of the peer, which is this machine, with the guest.
    pub fn traffic(&self) -> Result<Traffic<'static>> {
        Traffic::start_at(&self.guests.place(), GUEST_IP, RATE, STREAM)
    }

    /// Watches what this host's card sends from an address, for [`FirstFrame::seen`].
    pub fn first_frame(&self, host: usize, mac: &str) -> Result<FirstFrame> {
        let folder = scratch("frames")?;
        let words = ["-i", &self.taps[host][0], "-Q", "in", "-nn", "-e", "-c", "1", "ether", "src", mac];
        let words = words.map(OsString::from);
        let process = self.guests.place().start("tcpdump", &words, &folder.path().join("log"))?;
        let frame = FirstFrame { process, _folder: folder };
        let end = Instant::now() + MINUTE;
        while !frame.process.said().contains("listening on") {
            ensure!(Instant::now() < end, "tcpdump does not listen: {}", frame.process.said());
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(frame)
    }

    /// Behind which host's card the switch of the guests' network has seen this address last.
    pub fn behind(&self, mac: &str) -> Result<Option<&'static str>> {
        let port = self.guests.port_of(mac)?;
        let host = self.taps.iter().position(|[guests, _]| port.as_ref() == Some(guests));
        Ok(host.map(|host| NAMES[host]))
    }

    /// Pulls the cable of a host's own network, or plugs it in.
    pub fn cable(&self, host: usize, plugged: bool) -> Result<()> {
        let word = if plugged { "up" } else { "down" };
        self.own.ip(&format!("link set {} {word}", self.taps[host][1]))
    }
}

/// The first frame that a host's card has sent from an address. Needs tcpdump.
pub struct FirstFrame {
    process: Process,
    _folder: tempfile::TempDir,
}

impl FirstFrame {
    /// As tcpdump says it; an error if none has come.
    pub fn seen(mut self) -> Result<String> {
        self.process.wait(MINUTE).context("no frame of the guest's came from there")?;
        let said = self.process.said();
        let frame = said.lines().find(|line| line.contains(" > ")).map(Into::into);
        frame.with_context(|| said)
    }
}
