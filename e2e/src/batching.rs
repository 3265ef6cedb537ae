//! IDE commands by batches, in a guest of L1 with the modules of `guest/batch`: what the modules count, what the host counts, and the exits
//! by port, with and without them.

use crate::assets::BATCH_MODULES;
use crate::clustering::vcpus;
use crate::l1::L1;
use crate::l2::L2;
use crate::preload::PortExits;
use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub const DOORBELL: u16 = 0x0e60;
/// More than 256 sectors for each command, which takes libata all eleven writes: each register twice, and the device.
pub const READ: &str =
    "dd if=/dev/sda of=/tmp/copy bs=256k iflag=direct 2>&1; cmp /tmp/copy /folder/disk && sync";
/// As many commands as that takes for a disk of 1 MiB.
pub const COMMANDS: u64 = 4;
pub const WRITES: u64 = 11;
/// Before them libata selects the device, by its register: that is not the module's.
pub const SELECT: u64 = 1;
/// The registers of a command, the status that follows them, the bus master's set-up and the command: what one command takes.
pub const RINGS: u64 = 3;
pub const ACCESSES: u64 = WRITES + 1 + 2 + 3;
pub const DEBUG: &str = "/sys/kernel/debug/ioplane_batch";

/// `name number` lines, as the module writes them.
fn numbers(text: &str) -> Result<BTreeMap<String, u64>> {
    let line = |line: &str| -> Option<(String, u64)> {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.trim().parse().ok()?))
    };
    text.lines().map(|text| line(text).with_context(|| format!("{text:?} is no count"))).collect()
}

/// What the host says of the batches of a guest's only vCPU.
pub fn batches(status: &Value) -> Result<BTreeMap<String, u64>> {
    let [vcpu] = vcpus(status) else { bail!("one vCPU: {status:#}") };
    let counts = vcpu["batches"].as_object().context("counts of batches")?;
    counts.iter().map(|(name, count)| Ok((name.clone(), count.as_u64().context("a count")?))).collect()
}

/// How each of these has grown.
pub fn grown(now: &BTreeMap<String, u64>, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let grown = |name: &str, count: u64| count.saturating_sub(before.get(name).copied().unwrap_or_default());
    now.iter().map(|(name, count)| (name.clone(), grown(name, *count))).collect()
}

/// What some work of a guest took.
#[derive(Debug)]
pub struct IdeWork {
    /// By the module; empty without it.
    pub counts: BTreeMap<String, u64>,
    pub ports: PortExits,
}

impl IdeWork {
    /// Exits for the registers that select a device and begin a command, by their own ports.
    pub fn registers_and_select(&self) -> u64 {
        self.ports.of(0x1f1..=0x1f6)
    }

    /// Those for the eleven of each command: what is right where each access is an exit, so that the selects are too.
    pub fn registers(&self) -> u64 {
        self.registers_and_select().saturating_sub(COMMANDS * SELECT)
    }

    pub fn doorbells(&self) -> u64 {
        self.ports.of(DOORBELL..=DOORBELL)
    }
}

impl L2<'_> {
    /// Has its libata use the module; what the module found.
    pub fn use_batches(&self, modules: &Path, disk: &Path) -> Result<BTreeMap<String, u64>> {
        self.find_ide()?;
        fs::copy(disk, self.folder().join("disk"))?;
        for name in BATCH_MODULES {
            fs::copy(modules.join(name), self.folder().join(name))?;
        }
        let loads: String = BATCH_MODULES.map(|name| format!("insmod /folder/{name}\n")).concat();
        let said = self.run(&format!(
            "set -e; mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
             {loads} dmesg | grep -e ioplane_batch: -e ioplane_ata:"
        ))?;
        eprintln!("{said}");
        ensure!(said.contains("ports of ata_piix use batches"), "{said}");
        let compared = numbers(&self.run(&format!("cat {DEBUG}/compare"))?)?;
        eprintln!("{compared:?}");
        ensure!(compared["result"] == 0 && compared["different"] == 0, "{compared:?}");
        Ok(compared)
    }

    /// Reads its disk by [`COMMANDS`] commands.
    pub fn ide_commands(&self, l1: &L1) -> Result<IdeWork> {
        self.batch_work(l1, READ)
    }

    /// Counts during any work.
    pub fn batch_work(&self, l1: &L1, script: &str) -> Result<IdeWork> {
        let counts = || numbers(&self.run(&format!("[ ! -e {DEBUG} ] || cat {DEBUG}/counts"))?);
        let before = counts()?;
        let ports = l1.count_port_exits()?;
        self.run(script)?;
        let ports = ports.read()?;
        Ok(IdeWork { counts: grown(&counts()?, &before), ports })
    }
}
