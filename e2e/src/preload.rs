//! The interposer in L1: its shared object, how many exits the VMMs of L1 really see, by the kernel's own tracepoint, and which
//! accesses their devices get, by QEMU's own.

use crate::l1::L1;
use crate::l2::L2;
use crate::process::built;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// Returns of KVM_RUN.
const USER_EXITS: Histogram<1> = Histogram { event: "kvm/kvm_userspace_exit", keys: ["reason"] };
/// Exits for ports: the reason that SVM has for them, or VMX; on both the first word of information has the port above bit 16.
const PORT_EXITS: Histogram<2> = Histogram { event: "kvm/kvm_exit", keys: ["exit_reason", "info1"] };
const SVM_PORT: u64 = 123;
const VMX_PORT: u64 = 30;
const SYSTEM_CALLS: Histogram<1> = Histogram { event: "raw_syscalls/sys_enter", keys: ["id"] };

/// `libioplane_interposer.so`, as it was built with the test.
pub fn library() -> Result<PathBuf> {
    built("libioplane_interposer.so").context("build it: cargo build -p ioplane-interposer")
}

/// Whether tests of clusters are to take their time: `script/test nightly:clusters`.
pub fn long_form() -> bool {
    std::env::var_os("IOPLANE_CLUSTERS").is_some_and(|which| which == "long")
}

/// A count that L1's kernel keeps of one of its tracepoints, by these fields.
#[derive(Debug)]
struct Histogram<const KEYS: usize> {
    event: &'static str,
    keys: [&'static str; KEYS],
}

impl<const KEYS: usize> Histogram<KEYS> {
    fn file(&self, name: &str) -> String {
        format!("/sys/kernel/tracing/events/{}/{name}", self.event)
    }

    /// Removes what is there, whatever it is filtered by.
    fn removal(&self) -> String {
        let file = self.file("trigger");
        format!(
            "mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
             grep ^hist: {file} | sed 's/ \\[.*//; s/^/!/' >/tmp/histograms || true
             while read -r line; do echo \"$line\" >{file}; done </tmp/histograms"
        )
    }

    /// Begins anew; `filter` is empty, or `if` and what has to hold.
    fn begin(&self, l1: &L1, filter: &str) -> Result<()> {
        let (removal, keys, file) = (self.removal(), self.keys.join(","), self.file("trigger"));
        l1.run(&format!("{removal}\necho 'hist:keys={keys} {filter}' >{file}"), MINUTE).map(drop)
    }

    /// What has been counted so far.
    fn read(&self, l1: &L1) -> Result<Vec<([u64; KEYS], u64)>> {
        histogram(&l1.run(&format!("cat {}", self.file("hist")), MINUTE)?, self.keys)
    }

    /// The same, and counts no more.
    fn end(&self, l1: &L1) -> Result<Vec<([u64; KEYS], u64)>> {
        let script = format!("cat {}\n{}", self.file("hist"), self.removal());
        histogram(&l1.run(&script, MINUTE)?, self.keys)
    }
}

/// A count that runs in L1's kernel, of returns of KVM_RUN by their reason.
#[derive(Debug)]
pub struct Counting<'a>(&'a L1);

/// Returns of KVM_RUN by reason, as the tracepoint calls them (`KVM_EXIT_IO` is 2, `KVM_EXIT_MMIO` 6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserExits(pub BTreeMap<u32, u64>);

/// A count that runs in L1's kernel, of exits for ports.
#[derive(Debug)]
pub struct CountingPorts<'a>(&'a L1);

/// Exits by what the port's instruction is, also those that KVM has answered itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortExits(pub BTreeMap<PortAccess, u64>);

/// What a port's instruction does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PortAccess {
    pub port: u16,
    pub bytes: u8,
    pub input: bool,
}

impl PortAccess {
    /// By the first word of information of an exit: SVM's `EXITINFO1`, or VMX's exit qualification.
    fn of(reason: u64, info: u64) -> PortAccess {
        let (input, bytes) = match reason {
            SVM_PORT => (info & 1, info >> 4 & 7),
            _ => (info >> 3 & 1, (info & 7) + 1),
        };
        PortAccess { port: (info >> 16) as u16, bytes: bytes as u8, input: input != 0 }
    }
}

/// A count that runs in L1's kernel, of the system calls of one thread.
#[derive(Debug)]
pub struct CountingCalls<'a>(&'a L1);

impl L1 {
    /// Begins to count; one count at a time.
    pub fn count_user_exits(&self) -> Result<Counting<'_>> {
        USER_EXITS.begin(self, "")?;
        Ok(Counting(self))
    }

    /// Begins to count exits by port; one such count at a time.
    pub fn count_port_exits(&self) -> Result<CountingPorts<'_>> {
        PORT_EXITS.begin(self, &format!("if exit_reason == {SVM_PORT} || exit_reason == {VMX_PORT}"))?;
        Ok(CountingPorts(self))
    }

    /// Begins to count the system calls of a thread; one such count at a time.
    pub fn count_system_calls(&self, thread: u64) -> Result<CountingCalls<'_>> {
        SYSTEM_CALLS.begin(self, &format!("if common_pid == {thread}"))?;
        Ok(CountingCalls(self))
    }

    /// All exits of L1's guests so far, by KVM's own counters.
    pub fn guest_exits(&self) -> Result<u64> {
        let said = self.run(
            "mountpoint -q /sys/kernel/debug || mount -t debugfs debugfs /sys/kernel/debug
             cat /sys/kernel/debug/kvm/*-*/exits",
            MINUTE,
        )?;
        said.lines()
            .map(|line| line.trim().parse::<u64>().with_context(|| format!("{line:?} is a count")))
            .sum()
    }
}

impl Counting<'_> {
    /// What has been counted so far; there was something to count.
    pub fn read(&self) -> Result<UserExits> {
        let exits = self.read_any()?;
        ensure!(!exits.0.is_empty(), "no exit was counted");
        Ok(exits)
    }

    /// What has been counted so far, also if that is nothing.
    pub fn read_any(&self) -> Result<UserExits> {
        let counts = USER_EXITS.read(self.0)?.into_iter();
        let named = counts.map(|([reason], count)| Ok((u32::try_from(reason)?, count)));
        Ok(UserExits(named.collect::<Result<_>>()?))
    }
}

impl CountingPorts<'_> {
    /// What has been counted so far.
    pub fn read(&self) -> Result<PortExits> {
        let mut exits = BTreeMap::new();
        for ([reason, info], count) in PORT_EXITS.read(self.0)? {
            *exits.entry(PortAccess::of(reason, info)).or_default() += count;
        }
        Ok(PortExits(exits))
    }
}

impl CountingCalls<'_> {
    /// How many there were. They are not counted any more: counting makes each call of each process slower.
    pub fn end(self) -> Result<u64> {
        Ok(SYSTEM_CALLS.end(self.0)?.into_iter().map(|(_, count)| count).sum())
    }
}

impl PortExits {
    /// Those for these ports.
    pub fn of(&self, ports: RangeInclusive<u16>) -> u64 {
        let these = self.0.iter().filter(|(access, _)| ports.contains(&access.port));
        these.map(|(_, count)| count).sum()
    }

    /// Those for accesses of one byte: `inb` if `input`, else `outb`.
    pub fn of_bytes(&self, input: bool) -> u64 {
        let these = self.0.iter().filter(|(access, _)| access.bytes == 1 && access.input == input);
        these.map(|(_, count)| count).sum()
    }

    /// Those for all ports.
    pub fn all(&self) -> u64 {
        self.0.values().sum()
    }
}

impl UserExits {
    /// Those for a device access.
    pub fn accesses(&self) -> u64 {
        [2, 6].iter().filter_map(|reason| self.0.get(reason)).sum()
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

/// At most so many percent of the accesses that exited `without`.
pub fn fewer(with: &UserExits, without: &UserExits, percent: u64) -> Result<()> {
    ensure!(without.accesses() > 2000, "{without:?}: too few to prove anything");
    let at_most = without.accesses() * percent / 100;
    ensure!(with.accesses() <= at_most, "{with:?}, without: {without:?}");
    Ok(())
}

/// The lines of a histogram: `{ exit_reason:        123, info1:   33030145 } hitcount:         17`.
fn histogram<const KEYS: usize>(said: &str, keys: [&str; KEYS]) -> Result<Vec<([u64; KEYS], u64)>> {
    let line = |line: &str| -> Option<([u64; KEYS], u64)> {
        let (fields, count) = line.strip_prefix('{')?.split_once('}')?;
        let mut fields = fields.split(',').map(|field| field.split_once(':'));
        let mut values = [0; KEYS];
        for (key, value) in keys.iter().zip(&mut values) {
            let (name, number) = fields.next()??;
            *value = (name.trim() == *key).then(|| number.trim().parse().ok())??;
        }
        Some((values, count.trim().strip_prefix("hitcount:")?.trim().parse().ok()?))
    };
    let lines = said.lines().filter(|line| line.starts_with('{'));
    lines.map(|text| line(text).with_context(|| format!("{text:?} counts {keys:?}"))).collect()
}

/// What [`access_trace`] needs in the arguments of a guest's QEMU.
pub fn trace_args(name: &str) -> String {
    format!("-D /tmp/{name}.trace")
}

/// The accesses that devices of a guest get from its processor during `work`, a line each: `read addr 0x1f7 value 0x50 size 1
/// name 'ide'`. Only those of the memory regions in `names`, as QEMU calls them.
pub fn access_trace(l1: &L1, guest: &L2<'_>, name: &str, names: &[&str], work: &str) -> Result<Vec<String>> {
    let switch = |on: bool| {
        let both =
            ["read", "write"].map(|what| json!({"name": format!("memory_region_ops_{what}"), "enable": on}));
        guest.qmp_each(&[("trace-event-set-state", &both[0]), ("trace-event-set-state", &both[1])])
    };
    // QEMU goes on writing to the same file.
    let file = format!("/tmp/{name}.trace");
    let before =
        l1.run(&format!("stat -c %s {file} 2>/dev/null || echo 0"), MINUTE)?.trim().parse::<u64>()?;
    switch(true)?;
    guest.run(work)?;
    switch(false)?;
    let wanted = names.iter().map(|name| format!("-e \"name '{name}'\"")).collect::<Vec<_>>().join(" ");
    let said = l1.run(&format!("tail -c +{} {file} | grep {wanted}", before + 1), MINUTE)?;
    let access = |line: &str| -> Option<String> {
        // memory_region_ops_read cpu 0 mr 0x55d0c addr 0x1f7 value 0x50 size 1 name 'ide'
        let (_, line) = line.split_once("memory_region_ops_")?;
        let (what, line) = line.split_once(' ')?;
        Some(format!("{what} {}", &line[line.find("addr ")?..]))
    };
    said.lines().map(|line| access(line).with_context(|| format!("{line:?} is no access"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_histogram_are_read() {
        let said = "# event histogram\n\n{ info1:   33030145 } hitcount:         12\n{ info1:          1 } hitcount:          1\n\nTotals:\n    Hits: 13\n";
        assert_eq!(histogram(said, ["info1"]).unwrap(), [([33_030_145], 12), ([1], 1)]);
        assert!(histogram(said, ["reason"]).is_err());
        let said = "{ exit_reason:        123, info1:   33030145 } hitcount:         12\n";
        assert_eq!(histogram(said, ["exit_reason", "info1"]).unwrap(), [([123, 33_030_145], 12)]);
    }

    #[test]
    fn direction_and_size_are_read() {
        let access = |bytes, input| PortAccess { port: 0x1f7, bytes, input };
        assert_eq!(PortAccess::of(SVM_PORT, 0x1f7_0000 | 1 << 4 | 1), access(1, true));
        assert_eq!(PortAccess::of(SVM_PORT, 0x1f7_0000 | 1 << 6), access(4, false));
        assert_eq!(PortAccess::of(VMX_PORT, 0x1f7_0000 | 1 << 3), access(1, true));
        assert_eq!(PortAccess::of(VMX_PORT, 0x1f7_0000 | 3), access(4, false));
    }
}
