//! The processor time of a guest's QEMU, the guest's own included, by L1's kernel.

use super::MINUTE;
use anyhow::{Context, Result};
use ioplane_e2e::L1;

/// A group of L1's kernel, with one QEMU in it.
pub struct Used<'a> {
    l1: &'a L1,
    counts: String,
}

impl<'a> Used<'a> {
    /// Of the only QEMU, from now on.
    pub fn by_qemu(l1: &'a L1) -> Result<Used<'a>> {
        let said = l1.run(
            "set -e; groups=/tmp/used; mkdir -p $groups; mountpoint -q $groups || mount -t cgroup2 used $groups
             qemu=$(pidof qemu-system-x86_64); mkdir $groups/$qemu; echo $qemu >$groups/$qemu/cgroup.procs; echo $groups/$qemu/cpu.stat",
            MINUTE,
        )?;
        Ok(Used { l1, counts: said.trim().into() })
    }

    /// Microseconds by L1's clock so far, threads that have ended included.
    pub fn us(&self) -> Result<f64> {
        let said = self.l1.run(&format!("cat {}", self.counts), MINUTE)?;
        let mut words = said.lines().filter_map(|line| line.strip_prefix("usage_usec "));
        words.next().and_then(|word| word.parse().ok()).with_context(|| said.clone())
    }
}
