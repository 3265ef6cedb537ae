//! Memory of a guest above 4 GiB, and whether a card really writes there.
//!
//! ```text
//!   0 .. 128 MiB   low    |   4 GiB .. 4 GiB + the rest   high: where Linux takes memory first for who has 64 bits of address
//! ```

use crate::l2::L2;
use crate::nics::{Nic, find};
use anyhow::{Context, Result, ensure};

/// What a machine of so much memory has below 4 GiB, MiB: enough for a kernel and its first disk to be loaded.
const LOW_MIB: u64 = 128;
const HIGH: u64 = 1 << 32;

/// The machine of a guest that has memory on both sides, for QEMU. Of 32-bit cards nothing is asked that they cannot reach: Linux copies.
/// Without an HPET: Linux takes another clock and lets it tick, each tick wakes QEMU's main thread, and L1 has one processor.
pub(crate) fn machine(mib: u64) -> String {
    format!("-machine q35,hpet=off,max-ram-below-4g={LOW_MIB}M -m {mib}M")
}

/// What a guest needs for vfio-user in QEMU 11.1: memory that can be shared; some of it is above 4 GiB. `args` of [`crate::L1::debian_by`] with [`crate::Version::Newer`].
pub fn shared_memory(mib: u64) -> String {
    let machine = machine(mib);
    format!("{machine} -machine memory-backend=m -object memory-backend-memfd,id=m,size={mib}M,share=on")
}

/// What QEMU's monitor shows of memory (`xp /NUMBERwx ADDRESS`).
fn words(said: &str) -> Result<Vec<u32>> {
    let lines = said.lines().filter_map(|line| line.split_once(':'));
    let all = lines.flat_map(|(_, words)| words.split_whitespace());
    all.map(|word| {
        let digits = word.strip_prefix("0x").with_context(|| said.to_owned())?;
        u32::from_str_radix(digits, 16).with_context(|| said.to_owned())
    })
    .collect()
}

impl L2<'_> {
    /// So many words of its physical memory, or of registers there, as QEMU sees them.
    pub fn physical(&self, address: u64, count: usize) -> Result<Vec<u32>> {
        let said = self.monitor(&format!("xp /{count}wx {address:#x}"))?;
        let words = words(&said)?;
        ensure!(words.len() == count, "{said}");
        Ok(words)
    }

    /// A card writes to memory above 4 GiB: it has buffers there, and frames go round its ring.
    pub fn writes_high(&self, nic: Nic) -> Result<()> {
        let (high, low) = self.buffers(nic)?;
        ensure!(high > 0, "{nic:?}: {high} buffers above 4 GiB, {low} below");
        Ok(())
    }

    /// Where the buffers are that its driver has given a card to receive into: how many above 4 GiB, how many below. The card is up.
    fn buffers(&self, nic: Nic) -> Result<(usize, usize)> {
        // The BAR of memory, where the ring's address is there, how many descriptors, and the word of theirs with the buffer's address
        // (RTL8139C+ data sheet, 6.34 and 9.1; 82574 data sheet, 10.2.5 and 7.1.5).
        let (line, register, count, at) = match nic {
            Nic::Rtl8139 => (2, 0xe4, 64, 2),
            Nic::I82574 => (1, 0x2800, 256, 0),
            Nic::Ne2000 | Nic::Virtio => anyhow::bail!("{nic:?} has no such ring"),
        };
        let script = format!("{} sed -n {line}p /sys/class/net/$name/device/resource", find(&nic.mac()));
        let said = self.run(&script)?;
        let bar = said.split_whitespace().next().and_then(|word| word.strip_prefix("0x"));
        let bar = u64::from_str_radix(bar.with_context(|| said.clone())?, 16)?;
        let wide = |words: &[u32]| u64::from(words[0]) | u64::from(words[1]) << 32;
        let ring = wide(&self.physical(bar + register, 2)?);
        ensure!(ring >= HIGH, "{nic:?}: the ring is at {ring:#x}");
        let descriptors = self.physical(ring, 4 * count)?;
        let buffers: Vec<u64> = descriptors.chunks(4).map(|one| wide(&one[at..at + 2])).collect();
        let high = buffers.iter().filter(|buffer| (HIGH..2 * HIGH).contains(*buffer)).count();
        eprintln!("{nic:?}: ring at {ring:#x}, {high} of {count} buffers above 4 GiB");
        Ok((high, count - high))
    }

    /// A command of QEMU's monitor for people; what it says.
    fn monitor(&self, command: &str) -> Result<String> {
        let said = self.qmp("human-monitor-command", &serde_json::json!({ "command-line": command }))?;
        said.as_str().map(str::to_owned).with_context(|| said.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_monitor() {
        let said = "0000000100000000: 0x00000001 0xffffffff\r\n0000000100000008: 0x0000000a\r\n";
        assert_eq!(words(said).expect("words"), [1, u32::MAX, 10]);
        assert!(words("0000: 0xno").is_err());
        assert!(words("Cannot access memory").expect("none").is_empty());
    }
}
