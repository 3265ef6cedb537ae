//! Two hosts, each with a function of a card of its own, and traffic with a guest that goes from one to the other. Both are in one L1; those of
//! [`crate::lan`] have one each, and know each other by certificates.
//!
//! ```text
//!   L1:  peer14 -- hub -- card A: virtual function <- daemon "here"  <- QEMU "first"
//!                    `--- card B: virtual function <- daemon "there" <- QEMU "second"
//! ```

use crate::hosts::NAMES;
use crate::igb::{GUEST_IP, PEER_IP, PHYSICAL, VirtualFunctions};
use crate::inner::Inner;
use crate::l1::L1;
use crate::l2::L2;
use crate::memories::{self, Named};
use crate::process::built;
use crate::streams::Driven;
use crate::traffic::Traffic;
use crate::travel::VM;
use crate::uplink::UPLINK;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 256;
/// Port of `-incoming`, as `ioplane move vm --to HOST` has it.
pub(crate) const INCOMING: u16 = 4444;
/// For a move on real hardware, memory included.
const MOVE: Duration = Duration::from_secs(150);
/// Datagrams a second, as far as the stage is fast enough, and bytes of TCP a second each way.
pub const RATE: u32 = 300;
pub const STREAM: u32 = 65536;
/// What a guest brings along although its administrator there has set less.
const ADOPT: &str = "mac,spoofchk,trust";
/// How the guest's machine has a virtual function: behind a port. Interrupts go to two processors.
const PORT: &str = "-device pcie-root-port,id=behind,chassis=1";

/// A host: its daemon, and the functions that it serves.
#[derive(Debug)]
pub struct Side<'a> {
    /// As it runs now.
    pub daemon: Inner<'a>,
    /// Of the daemon.
    pub name: &'static str,
    /// Addresses of the functions: `nic0`, `nic1` and so on.
    pub functions: Vec<String>,
    /// How it is added: `--mode`, and what follows that.
    pub mode: &'static str,
    /// Interface of the card.
    pub physical: &'static str,
    /// Where guests arrive and by which name, if the other side knows this one by its certificate. Else both use each other's sockets.
    pub(crate) wire: Option<Wire>,
}

/// How a host is reached over the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wire {
    /// As in its certificate.
    pub host: &'static str,
    /// Port of `-incoming`.
    pub port: u16,
}

impl<'a> Side<'a> {
    /// Both, on the two cards of an L1, or on two sets of them.
    pub fn both(l1: &'a L1, cards: Vec<VirtualFunctions>, mode: &'static str) -> Result<[Side<'a>; 2]> {
        Side::pair(l1, cards, mode, [None, None])
    }

    /// The same, which also know each other by certificates of one authority, as [`NAMES`].
    pub fn both_known(l1: &'a L1, cards: Vec<VirtualFunctions>, mode: &'static str) -> Result<[Side<'a>; 2]> {
        let sides = Side::pair(l1, cards, mode, NAMES.map(|host| Some(Wire { host, port: INCOMING })))?;
        let ioplane = crate::daemon::binary()?.display().to_string();
        let [one, other] =
            ["here", "there"].map(|name| format!("{ioplane} identity --dir {}", identity(name)));
        let [here, there] = NAMES;
        let file = format!("{}.pem", identity("here"));
        let script = format!(
            "set -e; {one} create {here}; {one} issue {there} --out {file}; {other} import {file}; rm {file}"
        );
        l1.run(&script, MINUTE)?;
        Ok(sides)
    }

    fn pair(
        l1: &'a L1,
        cards: Vec<VirtualFunctions>,
        mode: &'static str,
        [here, there]: [Option<Wire>; 2],
    ) -> Result<[Side<'a>; 2]> {
        let mut cards = cards.into_iter();
        let mut side = |name, physical, wire| {
            let functions = cards.next().context("functions of each card")?;
            Side::of(l1, [name, physical], functions, mode, wire)
        };
        Ok([side("here", PHYSICAL[0], here)?, side("there", PHYSICAL[1], there)?])
    }

    /// One of that name, whose card has that interface.
    pub(crate) fn of(
        l1: &'a L1,
        [name, physical]: [&'static str; 2],
        functions: VirtualFunctions,
        mode: &'static str,
        wire: Option<Wire>,
    ) -> Result<Side<'a>> {
        let config = wire.map_or(String::new(), |_| format!("[daemon]\nidentity = \"{}\"\n", identity(name)));
        let daemon = l1.serve(name, &config)?;
        let side = Side { daemon, name, functions, mode, physical, wire };
        side.add()?;
        Ok(side)
    }

    /// What the QEMU of this name here has as `-incoming`.
    pub fn incoming(&self, qemu: &str) -> String {
        match self.wire {
            Some(Wire { port, .. }) => format!("tcp:0.0.0.0:{port}"),
            None => format!("unix:/tmp/{qemu}.in"),
        }
    }

    /// What leads there from the other side.
    pub fn uri(&self, qemu: &str) -> String {
        match self.wire {
            Some(Wire { host, port }) => format!("tcp:{host}:{port}"),
            None => self.incoming(qemu),
        }
    }

    /// Starts a QEMU of this name here, which waits for the guest. `l1` is where this host is.
    pub fn waits<'l>(&self, l1: &'l L1, qemu: &str) -> Result<L2<'l>> {
        l1.awaits_traveller_at(qemu, &self.args()?, &self.incoming(qemu))
    }

    /// Has this host let the other one move the VM to this QEMU, if it is asked over the network.
    pub fn expects(&self, from: &Side<'_>, qemu: &str) -> Result<()> {
        let Some(Wire { host, .. }) = from.wire.filter(|_| self.wire.is_some()) else { return Ok(()) };
        self.daemon.text(&format!("move expect {VM} --from {host} --qmp /tmp/{qemu}.qmp")).map(drop)
    }

    /// The VMs that are expected here.
    pub fn expected(&self) -> Result<Value> {
        self.daemon.json("move expected")
    }

    pub fn control(&self) -> String {
        format!("/tmp/{}/control.sock", self.name)
    }

    /// QEMU's arguments for the guest.
    pub fn args(&self) -> Result<String> {
        // Conventional cards are on the first bus, with a wire for each interrupt.
        if self.mode == "virtual" {
            let names: Vec<String> = (0..self.functions.len()).map(|number| format!("nic{number}")).collect();
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            return Ok(format!("-smp 2 {}", self.daemon.guest_args(&names, MEMORY)?));
        }
        let args = self.daemon.args_on_bus("nic0", MEMORY, "behind")?;
        Ok(format!("-smp 2 {PORT} {args}"))
    }

    /// Takes the functions from L1.
    pub fn add(&self) -> Result<()> {
        let Side { functions, mode, physical, .. } = self;
        // Of a card that is mediated the physical function knows nothing, and none is there where an interface stands in. For a driver that
        // cooperates nothing is sent.
        let adopt = match (*physical, *mode) {
            (_, "virtual") | (UPLINK, "cooperating") => String::new(),
            (UPLINK, _) => format!(" --uplink {UPLINK}"),
            _ => format!(" --adopt {ADOPT}"),
        };
        // A driver that cooperates needs nobody to see what it does.
        let mapped = if *mode == "cooperating" { " --mapped" } else { "" };
        for (number, function) in functions.iter().enumerate() {
            self.daemon
                .text(&format!("pci add nic{number} --host {function} --mode {mode}{mapped}{adopt}"))?;
        }
        Ok(())
    }

    /// Sets its function at the physical one, as its administrator does.
    pub fn administer(&self, l1: &L1, settings: &[&str]) -> Result<()> {
        let command = |setting: &&str| format!("ip link set {} vf 0 {setting}\n", self.physical);
        let script: String = settings.iter().map(command).collect();
        l1.run(&format!("set -e\n{script}"), MINUTE).map(drop)
    }

    /// What the kernel of L1 says of that: address, source addresses checked, trusted, most Mbit/s, VLAN and its priority.
    pub fn administered(&self, l1: &L1) -> Result<Value> {
        let said = l1.run(&format!("ip -j link show dev {}", self.physical), MINUTE)?;
        let link: Value = serde_json::from_str(said.trim()).with_context(|| said.clone())?;
        let vf = &link[0]["vfinfo_list"][0];
        ensure!(vf["vf"] == 0, "{link:#}");
        let vlan = &vf["vlan_list"][0];
        Ok(json!([
            vf["address"],
            vf["spoofchk"],
            vf["trust"],
            vf["rate"]["max_tx"],
            vlan["vlan"],
            vlan["qos"]
        ]))
    }

    /// Takes the card's port down, or up until it has its link.
    pub fn port(&self, l1: &L1, up: bool) -> Result<()> {
        let port = self.physical;
        let script = match up {
            false => format!("ip link set {port} down"),
            true => format!("ip link set {port} up; {}", crate::igb::linked(port)),
        };
        l1.run(&script, MINUTE).map(drop)
    }

    /// Sends the daemon this signal.
    pub fn signal(&self, l1: &L1, signal: &str) -> Result<()> {
        l1.run(&format!("kill -{signal} $(cat /tmp/{}/pid)", self.name), MINUTE).map(drop)
    }

    /// The command that moves the VM from `first` here to `second` at the other side, which expects it.
    pub fn command(&self, there: &Side<'_>, first: &str, second: &str) -> String {
        let way = match there.wire {
            Some(Wire { host, .. }) => format!("--to {host}"),
            None => format!(
                "--to {} --there {} --qmp-there /tmp/{second}.qmp",
                there.uri(second),
                there.control()
            ),
        };
        format!("move vm {VM} {way} --qmp /tmp/{first}.qmp")
    }
}

/// Where the identity of the host of this name is, in L1.
pub(crate) fn identity(name: &str) -> String {
    format!("/tmp/{name}/identity")
}

/// Traffic of the peer with the guest.
pub fn start_traffic(l1: &L1) -> Result<Traffic<'_>> {
    Traffic::start(l1, GUEST_IP, RATE, STREAM)
}

/// Register accesses per echo that reach the daemon.
pub fn trapped_per_echo(daemon: &Inner<'_>, traffic: &Traffic<'_>, echoes: u64) -> Result<f64> {
    let before = daemon.accesses("nic0")?;
    traffic.goes_on(echoes)?;
    Ok((daemon.accesses("nic0")? - before) as f64 / echoes as f64)
}

/// What the guest's kernel and interface say that would differ if the driver had noticed: changes of the link, resets, complaints.
pub fn noticed(l1: &L1, qemu: &str) -> Result<String> {
    l1.ask(
        qemu,
        "cd /sys/bus/pci/drivers/igbvf/*/net/*; cat carrier_changes statistics/tx_errors statistics/tx_dropped statistics/rx_errors; \
         dmesg | grep -ciE 'igbvf.*(reset|hang|link is)|NETDEV WATCHDOG|transmit queue|DMAR|AER:|irq .*nobody|do_IRQ'; true",
    )
}

/// Frames that the function has counted (VFGPRC, past its reset in moves) less those that the driver has had: what was accepted and not seen.
/// Nothing is under way.
pub fn unseen(l1: &L1, guest: &L2<'_>, qemu: &str) -> Result<i64> {
    let said = l1.ask(
        qemu,
        "cd /sys/bus/pci/drivers/igbvf/*/net/*; cat statistics/rx_packets; head -n 1 device/resource",
    )?;
    let mut words = said.split_whitespace();
    let seen: i64 = words.next().and_then(|word| word.parse().ok()).with_context(|| said.clone())?;
    let bar = words.next().and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    // 82576 data sheet, 8.30.20.
    let counter = bar.with_context(|| said.clone())? + 0xf10;
    let counted = guest.physical(counter, 1)?;
    Ok(i64::from(counted[0]) - seen)
}

/// One move under traffic. The QEMU that is left ends. `l1` is where the guest goes.
pub fn moves<'a>(
    l1: &'a L1,
    from: &Side<'_>,
    source: L2<'a>,
    names: [&str; 2],
    to: &Side<'_>,
) -> Result<(L2<'a>, Value)> {
    let destination = to.waits(l1, names[1])?;
    arrives(from, source, names, to, destination)
}

/// The same, where the QEMU there waits.
pub fn arrives<'a>(
    from: &Side<'_>,
    source: L2<'a>,
    names: [&str; 2],
    to: &Side<'_>,
    destination: L2<'a>,
) -> Result<(L2<'a>, Value)> {
    let begun = Instant::now();
    let status =
        |guest: &L2<'_>| Ok::<_, anyhow::Error>(guest.qmp("query-status", &json!({}))?["status"].clone());
    let before = status(&source)?;
    let moved = to
        .expects(from, names[1])
        .and_then(|()| from.daemon.json_within(&from.command(to, names[0], names[1]), MOVE));
    let context = || format!("{}\nthere QEMU said {}", to.daemon.said(), destination.said());
    let report = moved.with_context(context)?;
    eprintln!("moved in {:.1} s: {report}", begun.elapsed().as_secs_f64());
    let after = status(&destination)?;
    ensure!(before == after, "it was {before}, and is {after}: {report}");
    let left = from.daemon.json("pci show nic0")?;
    source.kill()?;
    ensure!(left["connected"] == true, "{left:#}");
    let function = &report["functions"][0];
    ensure!(function["state_bytes"].as_u64().is_some_and(|bytes| bytes <= 1024), "{report}");
    Ok((destination, report))
}

/// The figures of this kind of function, on a line of their own.
pub fn told(kind: &str, driven: &Driven, moves: &[&Value]) {
    let most = |field: &str| moves.iter().filter_map(|report| report["functions"][0][field].as_u64()).max();
    let line = json!({
        kind: {
            "stop_accesses": most("stop_accesses"),
            "replay_accesses": most("replay_accesses"),
            "replay_frames": most("replay_frames"),
            "replay_messages": most("replay_messages"),
            "messages_ahead": most("messages_ahead"),
            "state_bytes": most("state_bytes"),
            "pages_sent": most("pages_sent"),
            "missed_frames": driven.back.lost,
            "duplicated_frames": driven.there.duplicated + driven.back.duplicated,
            "lost_while_away": driven.there.lost,
        },
        "device_time": moves.iter().map(|report| &report["device_time"]).collect::<Vec<_>>(),
        "longest_gap_ms": driven.gaps.first().map(|gap| gap.ms),
        "tcp_gap_ms": driven.tcp_gap.ms,
    });
    eprintln!("figures: {line}");
}

/// Compares the guest's memory with a copy in the QEMU `copy` at the other side, on `l1`: no page lacks what the function has written.
pub fn compares<'t>(
    l1: &L1,
    guest: Named<'_>,
    here: &Side<'_>,
    copy: &str,
    there: &Side<'_>,
    traffic: impl FnOnce() -> Result<Traffic<'t>>,
) -> Result<()> {
    let waits = there.waits(l1, copy)?;
    let traffic = traffic()?;
    let stop = memories::stop(guest, &here.control(), (waits, copy, &there.uri(copy)), true, &traffic)?;
    traffic.end()?;
    eprintln!("{stop:?}");
    ensure!(stop.missed == 0 && stop.sent > Some(0), "{stop:?}");
    Ok(())
}

/// Nothing of the guest's came twice, out of order or not at all; what is sent to a guest that stands still may be lost.
pub fn nothing_of_the_guest_is_lost(driven: &Driven) -> Result<()> {
    let (to_guest, back) = (&driven.there, &driven.back);
    ensure!(
        to_guest.duplicated + to_guest.reordered + back.duplicated + back.reordered + back.lost == 0,
        "{driven:#?}"
    );
    ensure!(driven.bytes_there > 0 && driven.bytes_back > 0, "{driven:#?}");
    Ok(())
}

/// Nothing twice, nothing changed, nothing lost but what was sent while the guest had no device: one stretch of datagrams for each move, none of
/// the guest's own.
pub fn right(driven: &Driven, moves: usize) -> Result<()> {
    nothing_of_the_guest_is_lost(driven)?;
    ensure!(driven.there.missing.len() <= moves, "{driven:#?}");
    Ok(())
}

/// Registers of the function that tell why nothing comes or goes: EIMS, EIAC, EIAM, IVAR0, RDH, RDT, RXDCTL, TDH, TDT, TXDCTL of queue 0.
const REGISTERS: [u64; 10] = [0x1524, 0x152c, 0x1530, 0x1700, 0x2810, 0x2818, 0x2828, 0x3810, 0x3818, 0x3828];

/// What the guest in this QEMU, its peer and the daemons tell when something has gone wrong.
pub fn last_words(l1: &L1, qemu: &str, sides: [&Side<'_>; 2]) -> String {
    let or_why = |said: Result<String>| said.unwrap_or_else(|error| format!("{error:#}"));
    let ask = |line: &str| or_why(l1.ask(qemu, line));
    let registers = || {
        let resource = ask("head -n 1 /sys/bus/pci/drivers/igbvf/*/resource");
        let bar = resource.split_whitespace().next().and_then(|word| word.strip_prefix("0x"));
        let bar = bar.and_then(|word| u64::from_str_radix(word, 16).ok()).unwrap_or_default();
        let reads = REGISTERS.map(|offset| format!(r#"{{"command-line":"xp /1xw {:#x}"}}"#, bar + offset));
        let read = reads.map(|read| {
            let program = built("ioplane-qmp").unwrap_or_default();
            let line = format!("{} /tmp/{qemu}.watch human-monitor-command '{read}'", program.display());
            or_why(l1.run(&line, MINUTE))
        });
        format!("{}{}", read.concat(), ask("grep PCI-MSIX /proc/interrupts"))
    };
    let mut said = [
        registers(),
        ask(&format!("for size in 56 1400; do /tmp/busybox ping -s $size -c 3 -W 2 {PEER_IP}; done; grep -e ^Tcp -e ^Udp /proc/net/snmp /proc/net/netstat; cat /proc/net/stat/arp_cache; dmesg | tail -n 12; cat /tmp/answer /proc/net/arp /proc/net/tcp")),
        registers(),
        ask("cd /sys/bus/pci/drivers/igbvf/*/net/*; grep . statistics/[rt]x_packets queues/tx-0/byte_queue_limits/inflight; cat /proc/net/softnet_stat"),
        or_why(l1.run("grep -e ^Tcp -e ^Udp /proc/net/snmp /proc/net/netstat; ss -tnoi; ip neigh; dmesg | tail -n 5; ip -s link", MINUTE)),
    ]
    .join("\n--\n");
    for side in sides {
        said += &format!("\n{}: {:#}", side.name, side.daemon.json("pci show nic0").unwrap_or_default());
    }
    said
}
