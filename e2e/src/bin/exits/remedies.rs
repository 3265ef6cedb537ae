//! What remedies are worth: the same work at the same pace, before and after, counted by `ioplane exits`.

use super::{MINUTE, exits, rate};
use anyhow::{Context, Result};
use ioplane_e2e::{L1, L2, Version};
use serde::Serialize;
use std::fs;
use std::path::Path;

/// Where the paper's tables come from: see [`super::tables`].
pub const NETS: [(&str, &str); 3] =
    [("e1000", "192.168.71"), ("rtl8139", "192.168.72"), ("virtio", "192.168.73")];
/// Guest functions that the scripts below share.
pub const FUNCTIONS: &str = "
    nic() { for n in /sys/class/net/*; do
        case \"$(readlink $n/device/driver)\" in */$1) basename $n ;; esac; done; }
    uptime() { cut -d' ' -f1 /proc/uptime; }
    quiet() { setsid \"$@\" >/dev/null 2>&1 </dev/null & }
";
/// Reads at random at most 160 times a second, 4 KiB each, past the cache.
const READS: &str = "i=0; while :; do dd if=$0 of=/dev/null bs=4k count=16 skip=$((i % 3000 * 16)) iflag=direct status=none; \
                     i=$((i + 7)); sleep 0.1; done";
/// Two writers, so that there is something to schedule.
const WRITES: &str = "i=$1; while :; do dd if=/dev/zero of=$0 bs=4k count=16 seek=$((i % 3000 * 16)) oflag=direct conv=notrunc status=none; \
                      i=$((i + 7)); sleep 0.1; done";

#[derive(Clone, Debug, Serialize)]
pub struct Remedy {
    pub remedy: &'static str,
    pub exits_per_s_before: f64,
    pub exits_per_s_after: f64,
    /// What the guest did meanwhile, a second: it should be the same.
    pub work: &'static str,
    pub work_per_s_before: f64,
    pub work_per_s_after: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct Side {
    exits: f64,
    work: f64,
}

impl Remedy {
    pub fn new(remedy: &'static str, work: &'static str, before: Side, after: Side) -> Remedy {
        Remedy {
            remedy,
            exits_per_s_before: before.exits,
            exits_per_s_after: after.exits,
            work,
            work_per_s_before: before.work,
            work_per_s_after: after.work,
        }
    }
}

pub fn table(rows: &[Remedy]) -> String {
    let mut text = String::from(
        "\n| remedy | exits/s before | after | meanwhile | before | after |\n|---|---|---|---|---|---|\n",
    );
    for row in rows {
        text += &format!(
            "| {} | {:.0} | {:.0} | {} a second | {:.1} | {:.1} |\n",
            row.remedy,
            row.exits_per_s_before,
            row.exits_per_s_after,
            row.work,
            row.work_per_s_before,
            row.work_per_s_after
        );
    }
    text
}

/// The other ends: TAPs with addresses, iperf3 from the guests' own disk, and a data disk of 192 MiB in memory.
pub fn serve(l1: &L1) -> Result<()> {
    let modules = l1.host.modules.display();
    let mut script = format!("set -e; for m in tun loop ext4; do modprobe -d {modules} $m; done\n");
    for (name, net) in NETS {
        script += &format!(
            "ip tuntap add dev t{name} mode tap; ip address add {net}.1/24 dev t{name}; ip link set t{name} up\n"
        );
    }
    script += &format!(
        "mkdir /tmp/debian; mount -o ro,loop {} /tmp/debian; mount -t tmpfs l1 /tmp/debian/tmp
         truncate -s 192M /tmp/data.img; mke2fs -q -F /tmp/data.img
         setsid chroot /tmp/debian iperf3 -s >/dev/null 2>&1 </dev/null &",
        l1.host.debian.display()
    );
    l1.run(&script, MINUTE).map(drop)
}

/// A guest's disk and NICs; its loads.
pub struct Kind {
    pub name: &'static str,
    pub args: String,
    pub setup: &'static str,
    pub disk: &'static str,
}

fn net(device: &str, name: &str) -> String {
    format!("-netdev tap,id={name},ifname=t{name},script=no,downscript=no -device {device},netdev={name} ")
}

const MACHINE: &str = "-machine pc -m 384 -drive if=none,id=data,file=/tmp/data.img,format=raw ";

/// As the paper's guests: PIIX3 IDE, and both NICs that Linux has always had drivers for.
pub fn old() -> Kind {
    Kind {
        name: "old",
        args: format!(
            "{MACHINE} -device ide-hd,drive=data,bus=ide.0 {}{}",
            net("e1000", "e1000"),
            net("rtl8139", "rtl8139")
        ),
        setup: "modprobe -a ata_piix sd_mod e1000 8139cp; while [ ! -b /dev/sda ]; do sleep 0.1; done",
        disk: "sda",
    }
}

/// All virtio.
pub fn new() -> Kind {
    Kind {
        name: "new",
        args: format!("{MACHINE} -device virtio-blk-pci,drive=data {}", net("virtio-net-pci", "virtio")),
        setup: "modprobe virtio_net; while [ ! -b /dev/vdb ]; do sleep 0.1; done",
        disk: "vdb",
    }
}

/// IDE, and all NICs of these.
pub fn every() -> Kind {
    Kind {
        name: "every",
        args: format!("{} {}", old().args, net("virtio-net-pci", "virtio")),
        setup: "modprobe -a ata_piix sd_mod e1000 8139cp virtio_net; while [ ! -b /dev/sda ]; do sleep 0.1; done",
        disk: "sda",
    }
}

pub fn boot<'a>(l1: &'a L1, kind: &Kind, append: &str) -> Result<L2<'a>> {
    boot_after(l1, "", kind, append)
}

/// The same with words before QEMU's command.
pub fn boot_after<'a>(l1: &'a L1, before: &str, kind: &Kind, append: &str) -> Result<L2<'a>> {
    let guest = l1.debian_after(before, Version::Host, kind.name, &kind.args, append)?;
    guest.run(&format!("set -e; {FUNCTIONS} {}", kind.setup)).context("drivers")?;
    let tune = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/tune/tune.sh");
    fs::copy(tune, guest.folder().join("tune.sh"))?;
    Ok(guest)
}

/// Starts a load in a session of its own; what ends it.
pub fn start(guest: &L2<'_>, words: &str) -> Result<String> {
    let said = guest.run(&format!("{FUNCTIONS} quiet {words}\necho $!"))?;
    Ok(format!("kill -- -{0} 2>/dev/null || kill {0}", said.trim()))
}

/// Counts for some seconds; `work` is a script that says a number that grows with the work.
pub fn measure(l1: &L1, guest: &L2<'_>, name: &str, seconds: f64, work: &str) -> Result<Side> {
    let count = || -> Result<(f64, f64)> {
        let said = guest.run(&format!("{FUNCTIONS} {work}; uptime"))?;
        let numbers: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [count, at] = numbers[..] else { anyhow::bail!("two numbers: {said}") };
        Ok((count, at))
    };
    let (before, begun) = count()?;
    let report = exits(l1, &format!("--vm {name} --for {seconds}"))?;
    let (after, end) = count()?;
    Ok(Side { exits: rate(&report), work: (after - before) / (end - begun).max(1e-9) })
}

/// Reads of a disk at a pace.
pub fn disk(l1: &L1, guest: &L2<'_>, kind: &Kind, seconds: f64) -> Result<Side> {
    let stop = start(guest, &format!("bash -c '{READS}' /dev/{}", kind.disk))?;
    let side =
        measure(l1, guest, kind.name, seconds, &format!("awk '{{print $1}}' /sys/block/{}/stat", kind.disk))?;
    guest.run(&stop)?;
    Ok(side)
}

/// Gives the NIC of a driver its address; its name.
pub fn raise(guest: &L2<'_>, driver: &str, net: &str) -> Result<String> {
    let said = guest.run(&format!(
        "set -e; {FUNCTIONS} n=$(nic {driver}); ip link set $n up; ip address replace {net}.2/24 dev $n; echo $n"
    ))?;
    Ok(said.trim().to_owned())
}

/// A TCP stream out of the guest at a pace of 2 Mbit/s.
pub fn network(l1: &L1, guest: &L2<'_>, kind: &Kind, driver: &str, net: &str, seconds: f64) -> Result<Side> {
    let sent = format!("expr $(cat /sys/class/net/$(nic {driver})/statistics/tx_bytes) / 1024");
    raise(guest, driver, net)?;
    let stop = start(
        guest,
        &format!("bash -c 'while :; do iperf3 -c {net}.1 -b 2M -l 16k -t 600; sleep 0.2; done'"),
    )?;
    guest.run(&format!("{FUNCTIONS} i=0; while [ $({sent}) -lt 64 ]; do i=$((i + 1)); [ $i -lt 300 ] || exit 1; sleep 0.1; done"))?;
    let side = measure(l1, guest, kind.name, seconds, &sent)?;
    guest.run(&stop)?;
    Ok(side)
}

/// Two writers under a scheduler, then without.
pub fn scheduler(l1: &L1, guest: &L2<'_>, kind: &Kind, seconds: f64) -> Result<[Side; 2]> {
    let disk = kind.disk;
    guest.run(&format!("echo mq-deadline >/sys/block/{disk}/queue/scheduler"))?;
    let stops = [0, 1500].map(|from| start(guest, &format!("bash -c '{WRITES}' /dev/{disk} {from}")));
    let work = format!("awk '{{print $5}}' /sys/block/{disk}/stat");
    let before = measure(l1, guest, kind.name, seconds, &work)?;
    guest.run("sh /folder/tune.sh apply scheduler")?;
    let after = measure(l1, guest, kind.name, seconds, &work)?;
    guest.run("sh /folder/tune.sh undo scheduler")?;
    stops.into_iter().try_for_each(|stop| guest.run(&stop?).map(drop))?;
    Ok([before, after])
}

/// A program that asks for the time 200 times a second, by the PM timer, then by what the remedy chooses.
pub fn clock(l1: &L1, guest: &L2<'_>, kind: &Kind, seconds: f64) -> Result<[Side; 2]> {
    guest.run(
        "echo acpi_pm >/sys/devices/system/clocksource/clocksource0/current_clocksource; echo 0 >/tmp/times",
    )?;
    let load = "bash -c 'n=0; while :; do i=0; while [ $i -lt 40 ]; do x=$EPOCHREALTIME; i=$((i + 1)); done; \
                n=$((n + i)); echo $n >/tmp/times; sleep 0.2; done'";
    let stop = start(guest, load)?;
    let before = measure(l1, guest, kind.name, seconds, "cat /tmp/times")?;
    guest.run("sh /folder/tune.sh apply clocksource")?;
    let after = measure(l1, guest, kind.name, seconds, "cat /tmp/times")?;
    guest.run(&stop)?;
    Ok([before, after])
}

/// Nothing but the tick.
pub fn idle(l1: &L1, guest: &L2<'_>, name: &str, seconds: f64) -> Result<Side> {
    measure(l1, guest, name, seconds, "echo 0")
}
