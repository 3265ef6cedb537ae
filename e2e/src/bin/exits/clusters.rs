//! A stock VM full of old devices, plain, with batches, with clusters and with both: what the same work takes, side by side.
//!
//! ```text
//!   stock QEMU                  boot, work                                             --> plain
//!   ioplane run --batch         boot, work                                             --> clusters
//!     the same VM, batch-only   the work that libata does, by guest/batch's modules    --> batches
//!     the same VM, on           the same                                               --> both
//! ```
//!
//! Exits are counted by L1's kernel, accesses are what QEMU was asked for, times are by L1's and the guest's own clocks.

use super::MINUTE;
use anyhow::{Context, Result, ensure};
use ioplane_e2e::batching::{COMMANDS, DOORBELL, IdeWork, RINGS, batches};
use ioplane_e2e::clustering::{ALL_SITES, Reasons, interpreted, saved};
use ioplane_e2e::preload::PortExits;
use ioplane_e2e::{L1, L2, OldMachine, Version};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const PINGS: u32 = 20;

/// What one unit of some work takes.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub work: String,
    pub mode: &'static str,
    pub unit: &'static str,
    pub units: u32,
    /// All exits of the guest, those that KVM answers and those while it waits included.
    pub vm_exits: f64,
    /// Those for ports.
    pub port_exits: f64,
    /// Of those: for IN of one byte, and for OUT of one byte.
    pub inb_exits: f64,
    pub outb_exits: f64,
    /// Returns of KVM_RUN.
    pub kvm_run_returns: f64,
    /// Device accesses that QEMU has answered; a page of REP OUTS that the library hands on at once is one.
    pub accesses: f64,
    /// System calls of the vCPU's thread: KVM_RUN, the library's and QEMU's own.
    pub system_calls: f64,
    /// Instructions of the guest that the library has interpreted.
    pub interpreted: f64,
    /// Why accesses took exits though clustering was on, of all units; empty without the library.
    pub reasons: Reasons,
    /// Processor time of QEMU, the guest's included: of a translated processor.
    pub host_cpu_ms: f64,
    /// By the guest's clock.
    pub guest_ms: f64,
}

/// Exits for what the issue names.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Figures {
    /// Of the eleven register writes of a command of libata.
    pub ide_exits_plain: f64,
    /// The select before them included, since a cluster may begin with it.
    pub ide_exits_clustered: f64,
    pub ide_exits_batch: f64,
    pub boot_user_exits_ratio: f64,
    pub ne2000_exits_per_ping: f64,
}

pub struct Outcome {
    pub rows: Vec<Row>,
    pub figures: Figures,
}

/// Some work of the guest, by scripts; the middle one is counted.
struct Work {
    name: &'static str,
    unit: &'static str,
    units: u32,
    before: &'static str,
    script: &'static str,
    after: &'static str,
}

const fn work(name: &'static str, unit: &'static str, units: u32, script: &'static str) -> Work {
    Work { name, unit, units, before: "", script, after: "" }
}

/// What libata does; the modules of `guest/batch` change its part of it.
const IDE: Work = Work {
    after: "cmp /tmp/copy /folder/disk",
    ..work(
        "IDE, reads of 256 KiB",
        "command",
        COMMANDS as u32,
        "dd if=/dev/sda of=/tmp/copy bs=256k iflag=direct status=none",
    )
};
const FILES: Work = Work {
    before: "modprobe ext4; mkdir -p /tmp/fs; mount -t ext4 /dev/sda /tmp/fs",
    after: "umount /tmp/fs",
    ..work(
        "ext2 on IDE: 16 files of 16 KiB written, flushed, read, removed",
        "file",
        16,
        "for i in $(seq 16); do dd if=/dev/zero of=/tmp/fs/$i bs=16k count=1 conv=fsync status=none; done
         echo 3 >/proc/sys/vm/drop_caches; cat /tmp/fs/[0-9]* >/dev/null; rm /tmp/fs/[0-9]*; sync",
    )
};
const OTHERS: [Work; 5] = [
    work("nothing", "second", 2, "sleep 2"),
    work(
        "PCI configuration spaces",
        "scan",
        5,
        "for i in 1 2 3 4 5; do for f in /sys/bus/pci/devices/*; do od -An -v -tx1 $f/config; done; done",
    ),
    work("serial port", "character", 1000, "printf '%1000s' '' >/dev/ttyS0"),
    work(
        "RTC",
        "time read",
        50,
        "i=0; while [ $i -lt 50 ]; do cat /sys/class/rtc/rtc0/time; i=$((i + 1)); done",
    ),
    Work {
        before: "echo acpi_pm >/sys/devices/system/clocksource/clocksource0/current_clocksource",
        after: "echo kvm-clock >/sys/devices/system/clocksource/clocksource0/current_clocksource",
        ..work(
            "PM timer as the clock",
            "time asked",
            2000,
            "bash -c 'i=0; while [ $i -lt 2000 ]; do x=$EPOCHREALTIME; i=$((i + 1)); done'",
        )
    },
];

/// One VM, in one mode.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    l1: &'a L1,
    guest: &'a L2<'a>,
    pub mode: &'static str,
    /// The VM has the library: `--vm NAME` for its status.
    interposed: Option<&'static str>,
    /// Of its vCPU, in L1.
    thread: u64,
}

/// What some work took.
pub struct Measured {
    pub row: Row,
    ports: PortExits,
    /// Returns of KVM_RUN from the kernel, of all units, with an access for QEMU.
    access_exits: u64,
}

/// What has been done by now.
struct Counts {
    exits: u64,
    cpu_ms: f64,
    /// Accesses without an exit.
    spared: u64,
    interpreted: u64,
    reasons: Reasons,
}

impl<'a> Side<'a> {
    pub fn new(
        l1: &'a L1,
        guest: &'a L2<'a>,
        mode: &'static str,
        interposed: Option<&'static str>,
    ) -> Result<Self> {
        Ok(Side { l1, guest, mode, interposed, thread: guest.vcpu_thread()? })
    }

    fn counts(&self) -> Result<Counts> {
        let exits = self.l1.guest_exits()?;
        // User and system time in hundredths of a second, behind the name in parentheses.
        let said = self.l1.run("cut -d')' -f2 /proc/$(pidof qemu-system-x86_64)/stat", MINUTE)?;
        let ticks: Vec<f64> =
            said.split_whitespace().skip(11).take(2).filter_map(|word| word.parse().ok()).collect();
        ensure!(ticks.len() == 2, "the times of one process: {said}");
        let (spared, interpreted, reasons) = match self.interposed {
            None => (0, 0, Reasons::default()),
            Some(name) => {
                let status = self.l1.clustering(&format!("{ALL_SITES} --vm {name}"))?;
                let batched = batches(&status)?.get("accesses").copied().unwrap_or_default();
                (saved(&status) + batched, interpreted(&status), Reasons::of(&status))
            }
        };
        Ok(Counts { exits, cpu_ms: ticks.iter().sum::<f64>() * 10.0, spared, interpreted, reasons })
    }

    /// `work` returns ms by the guest's clock, of all units.
    pub fn measure(
        &self,
        name: &str,
        unit: &'static str,
        units: u32,
        work: impl FnOnce() -> Result<f64>,
    ) -> Result<Measured> {
        let before = self.counts()?;
        let (returns, ports) = (self.l1.count_user_exits()?, self.l1.count_port_exits()?);
        let calls = self.l1.count_system_calls(self.thread)?;
        let ms = work().with_context(|| format!("{name}, {}", self.mode))?;
        let calls = calls.end()?;
        let (returns, ports) = (returns.read_any()?, ports.read()?);
        let after = self.counts()?;
        let each = |count: f64| count / f64::from(units);
        // KVM_RUN returns from the kernel for a doorbell, and QEMU does not see it.
        let seen = returns.accesses().saturating_sub(ports.of(DOORBELL..=DOORBELL));
        let row = Row {
            work: name.to_owned(),
            mode: self.mode,
            unit,
            units,
            vm_exits: each((after.exits - before.exits) as f64),
            port_exits: each(ports.all() as f64),
            inb_exits: each(ports.of_bytes(true) as f64),
            outb_exits: each(ports.of_bytes(false) as f64),
            kvm_run_returns: each(returns.total() as f64),
            accesses: each((seen + after.spared - before.spared) as f64),
            system_calls: each(calls as f64),
            interpreted: each((after.interpreted - before.interpreted) as f64),
            reasons: after.reasons.since(&before.reasons),
            host_cpu_ms: each(after.cpu_ms - before.cpu_ms),
            guest_ms: each(ms),
        };
        Ok(Measured { row, ports, access_exits: seen })
    }

    fn scripted(&self, work: &Work) -> Result<Measured> {
        self.guest.run(&format!("set -e; {}", work.before))?;
        let measured = self.measure(work.name, work.unit, work.units, || {
            let said = self.guest.run(&format!(
                "set -e; begun=$(/usr/bin/date +%s%N); {{ {}\n}} >/tmp/said
                 echo $(($(/usr/bin/date +%s%N) - begun))",
                work.script
            ))?;
            Ok(said.trim().parse::<f64>().with_context(|| said)? / 1e6)
        })?;
        self.guest.run(&format!("set -e; {}", work.after))?;
        Ok(measured)
    }

    /// What libata does: its rows, and the exits of the commands by port.
    fn libata(&self, rows: &mut Vec<Row>) -> Result<IdeWork> {
        let commands = self.scripted(&IDE)?;
        rows.push(commands.row);
        rows.push(self.scripted(&FILES)?.row);
        Ok(IdeWork { counts: BTreeMap::new(), ports: commands.ports })
    }

    /// All work; the exits of IDE commands by port, and returns of KVM_RUN for accesses per ping.
    fn all(&self, rows: &mut Vec<Row>) -> Result<(IdeWork, f64)> {
        for work in &OTHERS {
            rows.push(self.scripted(work)?.row);
        }
        self.guest.find_ide()?;
        let ide = self.libata(rows)?;
        self.guest.raise_ne2000()?;
        let ping = || Ok(self.guest.ping_gateway(PINGS)? * f64::from(PINGS));
        let pings = self.measure("NE2000, pings of 1,000 bytes", "ping", PINGS, ping)?;
        rows.push(pings.row);
        Ok((ide, pings.access_exits as f64 / f64::from(PINGS)))
    }
}

/// A disk with a file system, for one VM.
fn disk(l1: &L1, name: &str) -> Result<std::path::PathBuf> {
    let path = l1.old_disk()?;
    l1.run(&format!("mke2fs -q -F {}", path.display()), MINUTE)?;
    let own = path.with_file_name(format!("{name}.disk"));
    fs::rename(&path, &own)?;
    Ok(own)
}

/// Boots one; its row.
fn boot<'a>(
    l1: &'a L1,
    name: &'static str,
    before: &str,
    disk: &Path,
    say: &dyn Fn(&str),
) -> Result<(L2<'a>, u64)> {
    let machine = OldMachine { name, version: Version::Host, before, args: "", append: "" };
    let (guest, boot) = l1.old_machine(&machine, disk, say)?;
    fs::copy(disk, guest.folder().join("disk"))?;
    Ok((guest, boot.accesses()))
}

/// `l1` has no other guest.
pub fn side_by_side(l1: &L1, say: &dyn Fn(&str)) -> Result<Outcome> {
    let modules = l1.host.batch_modules(say)?;
    let mut rows = Vec::new();
    let image = disk(l1, "plain")?;
    let (guest, plain_boot) = boot(l1, "plain", "", &image, say)?;
    let side = Side::new(l1, &guest, "plain", None)?;
    let (plain, plain_pings) = side.all(&mut rows)?;
    say(&format!("plain: {plain_pings:.1} exits per ping"));
    guest.kill()?;

    let name = "clustered";
    let image = disk(l1, name)?;
    let (guest, clustered_boot) = boot(l1, name, &l1.interposed_with("--batch")?, &image, say)?;
    let side = Side::new(l1, &guest, "clusters", Some(name))?;
    let (clustered, pings) = side.all(&mut rows)?;
    say(&format!("clusters: {pings:.1} exits per ping"));
    // The disk has changed since.
    guest.use_batches(&modules, &image)?;
    l1.clustering(&format!("batch-only --vm {name}"))?;
    let side = Side { mode: "batches", ..side };
    let batched = side.libata(&mut rows)?;
    l1.clustering(&format!("on --vm {name}"))?;
    let side = Side { mode: "both", ..side };
    fs::copy(&image, guest.folder().join("disk"))?;
    side.libata(&mut rows)?;
    say("batches");
    guest.kill()?;

    let each = |exits: f64| exits / COMMANDS as f64;
    let figures = Figures {
        ide_exits_plain: each(plain.registers() as f64),
        ide_exits_clustered: each(clustered.registers_and_select() as f64),
        // One of the rings of a command is for these registers.
        ide_exits_batch: each(batched.registers() as f64 + batched.doorbells() as f64 / RINGS as f64),
        boot_user_exits_ratio: clustered_boot as f64 / plain_boot.max(1) as f64,
        ne2000_exits_per_ping: pings,
    };
    say(&format!("boot: {plain_boot} plain, {clustered_boot} with clusters; {figures:?}"));
    Ok(Outcome { rows, figures })
}

pub fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "\nFor each unit of the work, in L1 (times are of a translated processor; system calls are those of the vCPU's thread):\n\n\
         | work | unit | mode | exits | of them for ports | returns of KVM_RUN | accesses answered by QEMU | system calls | \
         instructions interpreted | host CPU, ms | guest's clock, ms |\n\
         |---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in by_work(rows) {
        text += &format!(
            "| {} | {} | {} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.0} | {:.1} | {:.2} |\n",
            row.work,
            row.unit,
            row.mode,
            row.vm_exits,
            row.port_exits,
            row.kvm_run_returns,
            row.accesses,
            row.system_calls,
            row.interpreted,
            row.host_cpu_ms,
            row.guest_ms
        );
    }
    text += "\nWhy accesses took exits with clusters, in all units:\n\n";
    for row in rows.iter().filter(|row| row.mode == "clusters") {
        text += &format!("- {}: {}\n", row.work, row.reasons.words());
    }
    text += &format!(
        "\nThe paper's table 4, for {}: exits of the whole run\n\n| mode | by inb | by outb |\n|---|---|---|\n",
        FILES.name
    );
    for row in rows.iter().filter(|row| row.work == FILES.name) {
        let all = |each: f64| each * f64::from(row.units);
        text += &format!("| {} | {:.0} | {:.0} |\n", row.mode, all(row.inb_exits), all(row.outb_exits));
    }
    text
}

/// The rows of each work one after the other.
pub fn by_work(rows: &[Row]) -> Vec<&Row> {
    let mut works: Vec<&str> = Vec::new();
    for row in rows {
        if !works.contains(&row.work.as_str()) {
            works.push(&row.work);
        }
    }
    works.iter().flat_map(|work| rows.iter().filter(move |row| row.work == *work)).collect()
}
