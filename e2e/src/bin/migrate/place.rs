//! The two sides that a guest goes to and fro between, in one L1, and what a guest has of them.
//!
//! ```text
//!   the other end, on this machine: 10.0.20.1/24 --TAP-- hub -- card A, card B: four virtual functions of each
//!                                                         `-- peer14 -- far (a bridge that learns) -- up0, up1: the switches of the daemons
//!                                                                                                     `here` and `there`, with the NIC `vnic`
//! ```

use crate::MINUTE;
use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{CoopDriver, News};
use ioplane_e2e::coop::LOAD_IGBVF;
use ioplane_e2e::igb::{GUEST_IP, PEER, PEER_IP};
use ioplane_e2e::uplink::Host;
use ioplane_e2e::{Inner, L1, L2, VirtualFunctions};
use serde_json::{Value, json};

/// MiB of a guest.
pub const MEMORY: u64 = 256;
/// Of a guest's machine: ports that things are plugged into.
const MACHINE: &str =
    "-smp 2 -device pcie-root-port,id=behind,chassis=1 -device pcie-root-port,id=beside,chassis=2";
/// The port that is free, whatever the guest has.
const FREE: &str = "beside";
/// Virtual functions of each card.
pub const FUNCTIONS: u32 = 4;
/// The bridge.
const FAR: &str = "far";
/// Network of the function that is handed over as it is: the other end, and a guest.
pub const OTHER: [&str; 2] = ["10.0.22.1", "10.0.22.2"];
/// Of the NIC, and of what is a pair with it.
const MAC: &str = "52:54:00:00:30:01";
/// In `pci add` of the functions that are handed over as they are.
pub const ORIGINAL: &str = "orig";
/// The interfaces of both cards; neither has an address of its own.
const PHYSICAL: [&str; 2] = ["pf14", "pf15"];

/// A host: its daemon, and the functions of its card.
pub struct Side<'a> {
    pub daemon: Inner<'a>,
    pub name: &'static str,
    functions: VirtualFunctions,
}

/// What a guest has as its NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A virtual function with its stock driver.
    Vf,
    /// virtio-net on ioplane.
    Virtio,
    /// A virtual function with the changed driver, which cooperates; its registers are mapped.
    Cooperating,
    /// That one as the standby of a pair, whose first NIC is unplugged: a virtual function over vfio-user, as it is.
    FailoverVf,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Vf => "vf",
            Kind::Cooperating => "coop",
            Kind::Virtio => "virtio",
            Kind::FailoverVf => "pair",
        }
    }

    /// Whether it is a virtual function that ioplane moves.
    pub fn is_function(self) -> bool {
        matches!(self, Kind::Vf | Kind::Cooperating)
    }

    /// Loads drivers in the guest, gives its interface the address and raises it; the other end answers when this returns.
    pub fn raise(self, guest: &L2<'_>) -> Result<()> {
        let (modules, found) = match self {
            Kind::Vf => return guest.raise_igbvf(),
            Kind::Cooperating => return guest.raise_vf("igbvf", LOAD_IGBVF),
            Kind::Virtio => ("virtio_net", "ls /sys/bus/virtio/drivers/virtio_net/*/net"),
            // The first one of a pair comes when the driver of the other has said that it knows of pairs.
            Kind::FailoverVf => ("igbvf net_failover virtio_net", PAIR),
        };
        let script = format!(
            "modprobe -a {modules}; bb=/folder/busybox
             for try in $(seq 100); do name=$({found}); [ -n \"$name\" ] && break; sleep 0.3; done
             $bb ip addr replace {GUEST_IP}/24 dev $name && $bb ip link set $name up
             for try in 1 2 3 4 5 6 7 8 9 10; do $bb ping -q -c 1 -W 2 {PEER_IP} >/dev/null && exit 0; done
             echo {PEER_IP} does not answer; $bb ip addr; dmesg | tail -n 20; exit 1"
        );
        guest.run(&script).map(drop).with_context(|| format!("raise the interface of {self:?}"))
    }
}

/// Puts the changed igbvf into the guest's folder.
pub fn bring_module(l1: &L1, guest: &L2<'_>) -> Result<()> {
    let module = l1.host.cooperating(CoopDriver::Igbvf, &|line| eprintln!("{line}"))?;
    std::fs::copy(module, guest.folder().join("igbvf.ko")).map(drop).context("the changed igbvf")
}

/// The interface that both of a pair are below.
const PAIR: &str =
    "for d in /sys/class/net/*; do [ $(ls -d $d/lower_* 2>/dev/null | wc -l) = 2 ] && basename $d; done";

impl Side<'_> {
    pub fn control(&self) -> String {
        format!("/tmp/{}/control.sock", self.name)
    }

    /// QEMU's arguments of a guest here.
    pub fn args(&self, kind: Kind) -> Result<String> {
        let replaced = |args: String, from: &str, to: &str| {
            ensure!(args.matches(from).count() == 1, "{from} is not there once: {args}");
            Ok(args.replace(from, to))
        };
        let standby = |args| replaced(args, "-device virtio-net-pci,", "-device virtio-net-pci,failover=on,");
        let args = match kind {
            Kind::Vf | Kind::Cooperating => self.daemon.args_on_bus("nic0", MEMORY, "behind")?,
            Kind::Virtio => self.daemon.guest_args(&["vnic"], MEMORY)?,
            Kind::FailoverVf => {
                let args = standby(self.daemon.guest_args(&["vnic", ORIGINAL], MEMORY)?)?;
                let driver = r#""driver":"vfio-user-pci","#;
                let first = format!(r#"{driver}"bus":"behind","failover_pair_id":"ioplane-vnic","#);
                replaced(args, driver, &first)?
            }
        };
        Ok(format!("{MACHINE} {args}"))
    }

    /// Adds its first virtual function as `nic0` for guests that move, and the other one as it is.
    pub fn add_functions(&self) -> Result<()> {
        self.add("nic0", self.function(0)?, "migratable")?;
        self.add(ORIGINAL, self.function(1)?, "passthrough")
    }

    /// The address of one of its virtual functions. The first two are in use from the beginning.
    pub fn function(&self, number: usize) -> Result<&str> {
        self.functions.get(number).map(String::as_str).with_context(|| format!("function {number}"))
    }

    /// Adds a function by that name; `mode` is that, and what follows it.
    pub fn add(&self, name: &str, function: &str, mode: &str) -> Result<()> {
        self.daemon.text(&format!("pci add {name} --host {function} --mode {mode}")).map(drop)
    }

    /// Adds its first function as `nic0` anew, in that mode. No guest has it.
    pub fn becomes(&self, mode: &str) -> Result<()> {
        // Its last guest may be about to leave.
        self.daemon.text("pci remove nic0 --force")?;
        self.add("nic0", self.function(0)?, mode)
    }

    /// Has another of its functions take the place of `nic0`, which moves by a table, under the guest of the QEMU of that name.
    pub fn moves_on(&self, qemu: &str) -> Result<()> {
        let to = self.function(2)?;
        let report =
            self.daemon.json(&format!("pci move nic0 --to {to} --qmp /tmp/{qemu}.qmp --deadline 30s"))?;
        ensure!(report.get("complaint").is_none_or(Value::is_null), "{report}");
        Ok(())
    }

    /// Plugs the function that is handed over as it is into a guest here, which has the machine of [`Side::args`].
    pub fn plug_original(&self, guest: &L2<'_>) -> Result<()> {
        let said = self.daemon.text(&format!("qemu-args {ORIGINAL} --device-only --qemu-version 11.1"))?;
        let json = said.split_once("-device").map(|(_, device)| device.trim());
        let mut device: Value = serde_json::from_str(json.with_context(|| said.clone())?)
            .with_context(|| format!("a device: {said}"))?;
        device["bus"] = json!(FREE);
        guest.qmp("device_add", &device).map(drop)
    }
}

/// Gives the functions that are handed over as they are the NIC's address: both of a pair have one.
pub fn pair_addresses(l1: &L1) -> Result<()> {
    let [a, b] = PHYSICAL;
    let script = format!("set -e; for card in {a} {b}; do ip link set $card vf 1 mac {MAC}; done");
    l1.run(&script, MINUTE).map(drop)
}

/// Boots the host with both cards, and takes the other end of their cables: a bridge of this machine, whose clock is right and which is in nobody's way.
pub fn boot(news: News<'_>) -> Result<(L1, Vec<VirtualFunctions>, Host)> {
    let tap = format!("ifar{}", std::process::id() % 100_000);
    let (l1, cards) = L1::boot_with_igbs_at(&tap, 2560, 2, FUNCTIONS, news)?;
    let far = Host::behind_a_bridge(&[&tap])?;
    for address in [PEER_IP, OTHER[0]] {
        far.ip(&format!("addr add {address}/24 dev bridge"))?;
    }
    Ok((l1, cards, far))
}

/// Starts both daemons, and connects everything.
pub fn sides<'a>(l1: &'a L1, cards: Vec<VirtualFunctions>) -> Result<[Side<'a>; 2]> {
    let modules = l1.host.modules.display();
    let [a, b] = PHYSICAL;
    l1.run(
        &format!(
            "set -e; modprobe -d {modules} -a bridge tun
             ip link add name {FAR} type bridge forward_delay 0 mcast_snooping 0
             echo 1 >/proc/sys/net/ipv6/conf/{FAR}/disable_ipv6
             ip addr flush dev {PEER}; ip link set {PEER} master {FAR}; ip link set {FAR} up
             for card in {a} {b}; do echo 1 >/proc/sys/net/ipv4/conf/$card/arp_ignore; done"
        ),
        MINUTE,
    )?;
    let mut sides = Vec::new();
    for (number, (name, functions)) in ["here", "there"].into_iter().zip(cards).enumerate() {
        let daemon = l1.serve(name, "")?;
        daemon.text(&format!("switch add lan --uplink up{number}"))?;
        daemon.text(&format!("nic add vnic --switch lan --mac {MAC}"))?;
        l1.run(
            &format!(
                "set -e; echo 1 >/proc/sys/net/ipv6/conf/up{number}/disable_ipv6
                 ip link set up{number} master {FAR} up"
            ),
            MINUTE,
        )?;
        let side = Side { daemon, name, functions };
        side.add_functions()?;
        sides.push(side);
    }
    sides.try_into().map_err(|_| anyhow::anyhow!("two sides"))
}
