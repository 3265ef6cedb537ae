//! IDE commands by batches, in a guest of L1 with the modules of `guest/batch`: what the modules count, what the host counts, and the exits
//! by port, with and without them.

use crate::assets::BATCH_MODULES;
use crate::clustering::{grown, vcpus};
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

    /// Whether [`COMMANDS`] commands went by batches, as guest and host count them. A slow host cuts some batches short: what is left of one
    /// takes another ring, or no ring if it is a single access, which the module issues by itself, since that is one exit either way.
    pub fn ensure_batched(&self, host: &BTreeMap<String, u64>) -> Result<()> {
        let [batched, single, rings] = ["batched", "single", "rings"].map(|name| self.counts[name]);
        ensure!(batched + single == COMMANDS * ACCESSES, "accesses: {self:?}");
        ensure!(single <= host["cut_short"] && single <= COMMANDS * RINGS, "single ones: {self:?}, {host:?}");
        ensure!(rings + single == COMMANDS * RINGS + host["cut_short"], "rings: {self:?}, {host:?}");
        ensure!(host["accesses"] == batched && host["answered"] == rings, "the host's: {self:?}, {host:?}");
        let refused = ["left", "refused", "not_stored"].map(|name| host[name]);
        ensure!(refused == [0; 3], "refused: {host:?}");
        ensure!(self.registers() <= single && self.doorbells() <= rings, "exits: {self:?}, {host:?}");
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(counts: &[(&str, u64)]) -> BTreeMap<String, u64> {
        counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    fn work(batched: u64, single: u64, rings: u64) -> IdeWork {
        let counts = counts(&[("batched", batched), ("single", single), ("rings", rings)]);
        IdeWork { counts, ports: PortExits::default() }
    }

    fn host(accesses: u64, answered: u64, cut_short: u64) -> BTreeMap<String, u64> {
        let done = [("accesses", accesses), ("answered", answered), ("cut_short", cut_short)];
        counts(&[&done[..], &[("left", 0), ("refused", 0), ("not_stored", 0)]].concat())
    }

    #[test]
    fn what_a_slow_host_cuts_short_still_adds_up() -> Result<()> {
        work(68, 0, 12).ensure_batched(&host(68, 12, 0))?;
        // Two cut short: one takes another ring, of the other a single access is left.
        work(67, 1, 13).ensure_batched(&host(67, 13, 2))
    }

    #[test]
    fn a_single_access_that_nothing_was_cut_short_for_is_found() {
        assert!(work(67, 1, 12).ensure_batched(&host(67, 12, 0)).is_err());
        assert!(work(67, 0, 12).ensure_batched(&host(67, 12, 0)).is_err());
        assert!(work(68, 0, 13).ensure_batched(&host(68, 13, 0)).is_err());
        assert!(work(68, 0, 12).ensure_batched(&host(68, 11, 0)).is_err());
    }
}
