//! What clusters of device accesses cost a VM full of old devices, with and without the interposer: stock QEMU in L1, exits counted by
//! L1's kernel, times by the guest's own clock.

use crate::assets::{News, digest};
use crate::daemon::binary;
use crate::l1::L1;
use crate::l2::{L2, Parts};
use crate::nics::{Pings, find};
use crate::preload::{UserExits, library, trace_args};
use crate::version::Version;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// On a translated processor everything takes longer, KVM's exits included: hardware's limit, and as much longer.
const TRANSLATED_TIME_LIMIT: &str = "--time-limit 10ms";
const PATIENT_TIME_LIMIT: &str = "--time-limit 50ms";
const DISK: usize = 1 << 20;
const BLOCK: usize = 4096;
const MAC: &str = "52:54:00:00:00:29";
/// QEMU's own end of a `user` network.
const GATEWAY: &str = "10.0.2.2";
const PING_BYTES: u32 = 1000;
const READS: u32 = 100;
const PINGS: u32 = 20;

/// A machine with an IDE disk, an NE2000 and a VGA, and how it is started.
#[derive(Clone, Copy, Debug)]
pub struct OldMachine<'a> {
    pub name: &'a str,
    pub version: Version,
    /// Words before QEMU's command, such as [`L1::interposed`].
    pub before: &'a str,
    /// More arguments for QEMU.
    pub args: &'a str,
    /// More words for the guest's kernel.
    pub append: &'a str,
}

/// What some work of a guest took.
#[derive(Clone, Debug)]
pub struct GuestWork {
    /// What the work consisted of: reads, pings.
    pub units: u32,
    pub exits: UserExits,
    /// For each, by the guest's clock.
    pub ms_each: f64,
}

/// What one boot of a machine full of old devices took, and the work that it did then.
#[derive(Clone, Debug)]
pub struct OldWork {
    pub boot: UserExits,
    /// From the start of the guest's kernel to that of its first program, by the guest's clock.
    pub boot_seconds: f64,
    /// Reads of a block of 4 KiB each.
    pub ide: GuestWork,
    /// Pings of 1,000 bytes.
    pub pings: GuestWork,
}

impl GuestWork {
    /// Exits to QEMU for a device access.
    pub fn exits_each(&self) -> f64 {
        self.exits.accesses() as f64 / f64::from(self.units)
    }
}

impl L1 {
    /// Words that start a VMM with the interposer.
    pub fn interposed(&self) -> Result<String> {
        self.interposed_with("")
    }

    /// The same with more options.
    pub fn interposed_with(&self, options: &str) -> Result<String> {
        self.run_words(TRANSLATED_TIME_LIMIT, options)
    }

    /// Words that start a VMM with longer clusters where the processor is translated. A cluster's time includes what other processes take of
    /// that processor, so this is for counts that must hold beside them.
    pub fn interposed_patiently(&self) -> Result<String> {
        self.run_words(PATIENT_TIME_LIMIT, "")
    }

    fn run_words(&self, translated: &str, options: &str) -> Result<String> {
        let limit = if self.is_translated() { translated } else { "" };
        Ok(format!("{} run --library {} {limit} {options} --", binary()?.display(), library()?.display()))
    }

    /// An image of 1 MiB for [`L1::old_machine`].
    pub fn old_disk(&self) -> Result<PathBuf> {
        let disk = self.folder().join("ide");
        let content: Vec<u8> = (0..DISK).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        fs::write(&disk, content)?;
        Ok(disk)
    }

    /// Boots a machine full of old devices; the exits to QEMU until it was up.
    pub fn old_machine(
        &self,
        machine: &OldMachine<'_>,
        disk: &Path,
        news: News<'_>,
    ) -> Result<(L2<'_>, UserExits)> {
        self.old_machine_of(&self.debian_parts(), machine, disk, news)
    }

    /// The same with another guest on it.
    pub fn old_machine_of(
        &self,
        parts: &Parts<'_>,
        machine: &OldMachine<'_>,
        disk: &Path,
        news: News<'_>,
    ) -> Result<(L2<'_>, UserExits)> {
        let OldMachine { name, version, before, args, append } = *machine;
        let exits = self.count_user_exits()?;
        let begun = Instant::now();
        let args = old_args(name, disk, args);
        let guest = self.guest_of(parts, before, version, name, &args, append)?;
        let boot = exits.read()?;
        news(&format!(
            "{name}: up after {:.1} s, {} exits to QEMU for a device access",
            begun.elapsed().as_secs_f64(),
            boot.accesses()
        ));
        Ok((guest, boot))
    }

    /// Starts one that waits for another to migrate to `/tmp/NAME.in` in L1.
    pub fn old_machine_incoming(&self, machine: &OldMachine<'_>, disk: &Path) -> Result<L2<'_>> {
        let OldMachine { name, version, before, args, append } = *machine;
        let args = old_args(name, disk, &format!("-incoming unix:/tmp/{name}.in {args}"));
        let guest = self.start_debian(before, version, name, &args, append)?;
        guest.takes_guests()?;
        Ok(guest)
    }

    /// Boots one, and has it read its disk and ping QEMU.
    pub fn old_work(
        &self,
        name: &str,
        before: &str,
        disk: &Path,
        news: News<'_>,
    ) -> Result<(OldWork, L2<'_>)> {
        let machine = OldMachine { name, version: Version::Host, before, args: "", append: "" };
        let (guest, boot) = self.old_machine(&machine, disk, news)?;
        let boot_seconds = guest.boot_seconds()?;
        let told = |unit: &str, work: &GuestWork| {
            news(&format!("{name}: {:.1} exits and {:.1} ms per {unit}", work.exits_each(), work.ms_each));
        };
        guest.find_ide()?;
        let ide = guest.read_ide(self, disk, READS)?;
        told("IDE read", &ide);
        guest.raise_ne2000()?;
        let pings = guest.ping_by_ne2000(self, PINGS)?;
        told("NE2000 ping", &pings);
        Ok((OldWork { boot, boot_seconds, ide, pings }, guest))
    }

    /// What `ioplane exits cluster WORDS` says.
    pub fn clustering(&self, words: &str) -> Result<Value> {
        let said = self.run(&format!("{} exits cluster {words} --json", binary()?.display()), MINUTE)?;
        serde_json::from_str(&said).with_context(|| said)
    }

    /// What `ioplane exits` reports of a VM while `work` is done.
    pub fn exits_during(&self, name: &str, work: impl FnOnce() -> Result<()>) -> Result<Value> {
        let watch = self.start(&format!(
            "echo $$ >/tmp/{name}.watch; exec {} exits --vm {name} --for 1h --json >/tmp/{name}.report",
            binary()?.display()
        ))?;
        watch.expect("watching", MINUTE)?;
        work()?;
        self.run(&format!("kill -INT $(cat /tmp/{name}.watch)"), MINUTE)?;
        let ended = watch.wait(MINUTE)?;
        ensure!(ended.status == 0, "ioplane exits ended with {}:\n{}", ended.status, ended.output);
        let said = self.run(&format!("cat /tmp/{name}.report"), MINUTE)?;
        serde_json::from_str(&said).with_context(|| said)
    }
}

/// The disk is a raw image unless its name ends in `.qcow2`.
fn old_args(name: &str, disk: &Path, more: &str) -> String {
    let format = if disk.extension().is_some_and(|ending| ending == "qcow2") { "qcow2" } else { "raw" };
    format!(
        "-machine pc -m 256M -vga std -sandbox on -drive if=ide,format={format},file={} \
         -netdev user,id=ne -device ne2k_pci,netdev=ne,romfile=,mac={MAC} {} {more}",
        disk.display(),
        trace_args(name),
    )
}

/// What clustering saved: counts of exits to QEMU for a device access, and times by the guest's clock.
#[derive(Clone, Debug, Serialize)]
pub struct ClusteringFigures {
    pub boot_user_exits_plain: u64,
    pub boot_user_exits_clustered: u64,
    pub boot_user_exits_ratio: f64,
    pub boot_seconds_plain: f64,
    pub boot_seconds_clustered: f64,
    pub ide_exits_plain: f64,
    pub ide_exits_clustered: f64,
    pub ide_ms_plain: f64,
    pub ide_ms_clustered: f64,
    pub ne2000_exits_per_ping_plain: f64,
    pub ne2000_exits_per_ping: f64,
    pub ne2000_ms_plain: f64,
    pub ne2000_ms_clustered: f64,
}

impl ClusteringFigures {
    pub fn of(plain: &OldWork, clustered: &OldWork) -> ClusteringFigures {
        let boots = [plain, clustered].map(|work| work.boot.accesses());
        ClusteringFigures {
            boot_user_exits_plain: boots[0],
            boot_user_exits_clustered: boots[1],
            boot_user_exits_ratio: boots[1] as f64 / boots[0].max(1) as f64,
            boot_seconds_plain: plain.boot_seconds,
            boot_seconds_clustered: clustered.boot_seconds,
            ide_exits_plain: plain.ide.exits_each(),
            ide_exits_clustered: clustered.ide.exits_each(),
            ide_ms_plain: plain.ide.ms_each,
            ide_ms_clustered: clustered.ide.ms_each,
            ne2000_exits_per_ping_plain: plain.pings.exits_each(),
            ne2000_exits_per_ping: clustered.pings.exits_each(),
            ne2000_ms_plain: plain.pings.ms_each,
            ne2000_ms_clustered: clustered.pings.ms_each,
        }
    }
}

/// The part of a boot's exits that clustering may leave, in percent. With Debian 13's QEMU 10.0 a boot takes 33,000 port accesses fewer than with Debian 12's 7.2. Clustering saves
/// nearly all of those, so about as many exits are left with either.
/// How often a driver polls depends on time: of 47,902 accesses of a boot 4,695 were left once, and 4,795 on a machine that had other work.
pub fn boot_percent(plain: &UserExits) -> u64 {
    if plain.accesses() > 40_000 { 13 } else { 35 }
}

/// The vCPUs of a status of clustering.
pub fn vcpus(status: &Value) -> &[Value] {
    status["vcpus"].as_array().map_or(&[], Vec::as_slice)
}

/// What is counted under these names in a list such as `not_begun`.
pub fn counted(list: &Value, whys: &[&str]) -> u64 {
    let counts = list.as_array().map_or(&[][..], Vec::as_slice);
    let named = counts.iter().filter(|count| count["why"].as_str().is_some_and(|why| whys.contains(&why)));
    named.filter_map(|count| count["count"].as_u64()).sum()
}

/// How many clusters these have ended. The status has to have [all places](ALL_SITES).
pub fn ended_by(status: &Value, whys: &[&str]) -> u64 {
    let sites = vcpus(status).iter().filter_map(|vcpu| vcpu["sites"].as_array()).flatten();
    sites.map(|site| counted(&site["ends"], whys)).sum()
}

/// The device accesses that took no exit.
pub fn saved(status: &Value) -> u64 {
    vcpus(status).iter().filter_map(|vcpu| vcpu["saved"].as_u64()).sum()
}

/// Words of `exits cluster` for a status with all places.
pub const ALL_SITES: &str = "--sites 256";

/// The instructions that were interpreted, those of a cluster that has not ended left out. The status has to have [all places](ALL_SITES).
pub fn interpreted(status: &Value) -> u64 {
    let sites = vcpus(status).iter().filter_map(|vcpu| vcpu["sites"].as_array()).flatten();
    sites.filter_map(|site| site["instructions"].as_u64()).sum()
}

/// Why accesses took exits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Reasons {
    /// Why no cluster began after an access.
    pub not_begun: BTreeMap<String, u64>,
    /// What ended clusters.
    pub ended: BTreeMap<String, u64>,
    /// Instructions that ended clusters, since they are not interpreted.
    pub instructions: BTreeMap<String, u64>,
}

impl Reasons {
    /// Of a status with [all places](ALL_SITES), since the VM was started.
    pub fn of(status: &Value) -> Reasons {
        let sum = |lists: Vec<&Value>| {
            let mut sums = BTreeMap::new();
            for count in lists.iter().filter_map(|list| list.as_array()).flatten() {
                if let (Some(why), Some(count)) = (count["why"].as_str(), count["count"].as_u64()) {
                    *sums.entry(why.to_owned()).or_default() += count;
                }
            }
            sums
        };
        let sites = vcpus(status).iter().filter_map(|vcpu| vcpu["sites"].as_array()).flatten();
        Reasons {
            not_begun: sum(vcpus(status).iter().map(|vcpu| &vcpu["not_begun"]).collect()),
            ended: sum(sites.map(|site| &site["ends"]).collect()),
            instructions: sum(vcpus(status).iter().map(|vcpu| &vcpu["instructions"]).collect()),
        }
    }

    /// Those since `before`.
    pub fn since(&self, before: &Reasons) -> Reasons {
        Reasons {
            not_begun: grown(&self.not_begun, &before.not_begun),
            ended: grown(&self.ended, &before.ended),
            instructions: grown(&self.instructions, &before.instructions),
        }
    }

    /// Most first.
    pub fn words(&self) -> String {
        let list = |title: &str, counts: &BTreeMap<String, u64>| {
            let mut counts: Vec<(&String, &u64)> = counts.iter().filter(|(_, count)| **count != 0).collect();
            counts.sort_by_key(|(_, count)| std::cmp::Reverse(**count));
            let words: Vec<String> = counts.iter().map(|(why, count)| format!("{why} {count}")).collect();
            if words.is_empty() { String::new() } else { format!("{title}: {}; ", words.join(", ")) }
        };
        let all = list("not begun", &self.not_begun)
            + &list("ended by", &self.ended)
            + &list("instructions that ended them", &self.instructions);
        all.trim_end_matches("; ").to_owned()
    }
}

/// The time of a line of the kernel's log: `[    1.234567] Run /init as init process`.
fn started_init(log: &str) -> Option<f64> {
    log.lines().next()?.strip_prefix('[')?.split(']').next()?.trim().parse().ok()
}

impl L2<'_> {
    /// Seconds from the start of its kernel to that of its first program, by the kernel's own clock.
    pub fn boot_seconds(&self) -> Result<f64> {
        let said = self.run("dmesg | grep ' as init process'")?;
        started_init(&said).with_context(|| format!("the kernel does not say when it started init: {said}"))
    }

    /// Loads the driver of its IDE disk.
    pub fn find_ide(&self) -> Result<()> {
        self.run("set -e; modprobe -a ata_piix sd_mod; while [ ! -b /dev/sda ]; do sleep 0.1; done").map(drop)
    }

    /// Reads so many blocks of its IDE disk, one command for each; they must be those of `disk`.
    pub fn read_ide(&self, l1: &L1, disk: &Path, blocks: u32) -> Result<GuestWork> {
        let exits = l1.count_user_exits()?;
        // Its shell is busybox's, whose own `date` has no nanoseconds.
        let said = self.run(&format!(
            "set -e; now() {{ /usr/bin/date +%s%N; }}; begun=$(now)
             dd if=/dev/sda of=/tmp/copy bs={BLOCK} count={blocks} iflag=direct status=none
             echo $(($(now) - begun)); sha256sum </tmp/copy"
        ))?;
        let exits = exits.read()?;
        let words: Vec<&str> = said.split_whitespace().collect();
        let [ns, sum, ..] = words[..] else { anyhow::bail!("a time and a sum: {said}") };
        let content = fs::read(disk)?;
        let wanted = content.get(..BLOCK * blocks as usize).context("the disk is smaller")?;
        ensure!(sum == digest(wanted), "other data was read from the IDE disk: {said}");
        Ok(GuestWork { units: blocks, exits, ms_each: ns.parse::<f64>()? / 1e6 / f64::from(blocks) })
    }

    /// Loads the driver of its NE2000 and gives it an address; QEMU's hardware address is known when this returns.
    pub fn raise_ne2000(&self) -> Result<()> {
        self.run(&format!(
            "set -e; modprobe ne2k-pci; {}
             /folder/busybox ip address add 10.0.2.15/24 dev $name; /folder/busybox ip link set $name up",
            find(MAC)
        ))?;
        self.ping(GATEWAY, 2, PING_BYTES).map(drop)
    }

    /// Pings QEMU with 1,000 bytes by the NE2000; every reply must come.
    pub fn ping_by_ne2000(&self, l1: &L1, count: u32) -> Result<GuestWork> {
        let exits = l1.count_user_exits()?;
        let ms_each = self.ping_gateway(count)?;
        Ok(GuestWork { units: count, exits: exits.read()?, ms_each })
    }

    /// The same, uncounted; ms of a round trip.
    pub fn ping_gateway(&self, count: u32) -> Result<f64> {
        let (got, ms_each) = self.ping_timed(GATEWAY, count, PING_BYTES)?;
        ensure!(got == Pings { sent: count, received: count }, "{got:?}");
        ms_each.context("ping tells no times")
    }
}

/// How each of these has grown.
pub fn grown(now: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let grown = |name: &str, count: u64| count.saturating_sub(before.get(name).copied().unwrap_or_default());
    now.iter().map(|(name, count)| (name.clone(), grown(name, *count))).collect()
}

#[cfg(test)]
mod tests {
    use super::{Reasons, started_init};
    use serde_json::json;

    #[test]
    fn reasons_are_summed_and_compared() {
        let vcpu = |count: u64| {
            json!({ "not_begun": [{"why": "mode", "count": count}], "instructions": [],
                    "sites": [{"ends": [{"why": "exception", "count": 2 * count}]}] })
        };
        let [before, after] = [1, 3].map(|count| Reasons::of(&json!({ "vcpus": [vcpu(count), vcpu(1)] })));
        assert_eq!(before.words(), "not begun: mode 2; ended by: exception 4");
        assert_eq!(after.since(&before).words(), "not begun: mode 2; ended by: exception 4");
        assert_eq!(before.since(&before).words(), "");
    }

    #[test]
    fn the_time_of_a_line_is_read() {
        assert_eq!(started_init("[    1.234567] Run /init as init process\n"), Some(1.234567));
        assert_eq!(started_init("Run /init as init process"), None);
    }
}
