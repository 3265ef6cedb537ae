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
const USER_EXITS: Histogram =
    Histogram { event: "kvm_userspace_exit", key: "reason", trigger: "hist:keys=reason" };
/// Exits for ports: the reason that SVM has for them, or VMX; on both the first word of information has the port above bit 16.
const PORT_EXITS: Histogram = Histogram {
    event: "kvm_exit",
    key: "info1",
    trigger: "hist:keys=info1 if exit_reason == 123 || exit_reason == 30",
};

/// `libioplane_interposer.so`, as it was built with the test.
pub fn library() -> Result<PathBuf> {
    built("libioplane_interposer.so").context("build it: cargo build -p ioplane-interposer")
}

/// A count by one key that L1's kernel keeps of one of KVM's tracepoints.
#[derive(Debug)]
struct Histogram {
    event: &'static str,
    key: &'static str,
    trigger: &'static str,
}

impl Histogram {
    fn file(&self, name: &str) -> String {
        format!("/sys/kernel/tracing/events/kvm/{}/{name}", self.event)
    }

    /// Begins anew.
    fn begin(&self, l1: &L1) -> Result<()> {
        let (trigger, file) = (self.trigger, self.file("trigger"));
        l1.run(
            &format!(
                "mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
                 grep -q hist: {file} && echo '!{trigger}' >{file}
                 echo '{trigger}' >{file}"
            ),
            MINUTE,
        )
        .map(drop)
    }

    /// What has been counted so far.
    fn read(&self, l1: &L1) -> Result<Vec<(u64, u64)>> {
        histogram(&l1.run(&format!("cat {}", self.file("hist")), MINUTE)?, &format!("{}:", self.key))
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

/// Exits by port, also those that KVM has answered itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortExits(pub BTreeMap<u16, u64>);

impl L1 {
    /// Begins to count; one count at a time.
    pub fn count_user_exits(&self) -> Result<Counting<'_>> {
        USER_EXITS.begin(self)?;
        Ok(Counting(self))
    }

    /// Begins to count exits by port; one such count at a time.
    pub fn count_port_exits(&self) -> Result<CountingPorts<'_>> {
        PORT_EXITS.begin(self)?;
        Ok(CountingPorts(self))
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
        let named = counts.map(|(reason, count)| Ok((u32::try_from(reason)?, count)));
        Ok(UserExits(named.collect::<Result<_>>()?))
    }
}

impl CountingPorts<'_> {
    /// What has been counted so far.
    pub fn read(&self) -> Result<PortExits> {
        let mut exits = BTreeMap::new();
        for (info, count) in PORT_EXITS.read(self.0)? {
            *exits.entry(u16::try_from(info >> 16 & 0xffff)?).or_default() += count;
        }
        Ok(PortExits(exits))
    }
}

impl PortExits {
    /// Those for these ports.
    pub fn of(&self, ports: RangeInclusive<u16>) -> u64 {
        self.0.range(ports).map(|(_, count)| count).sum()
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

/// The lines of a histogram of one key: `{ reason:          2 } hitcount:         17`.
fn histogram(said: &str, key: &str) -> Result<Vec<(u64, u64)>> {
    let line = |line: &str| -> Option<(u64, u64)> {
        let (value, count) = line.strip_prefix('{')?.trim_start().strip_prefix(key)?.split_once('}')?;
        Some((value.trim().parse().ok()?, count.trim().strip_prefix("hitcount:")?.trim().parse().ok()?))
    };
    let lines = said.lines().filter(|line| line.starts_with('{'));
    lines.map(|text| line(text).with_context(|| format!("{text:?} counts {key}"))).collect()
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
    use super::histogram;

    #[test]
    fn lines_of_a_histogram_are_read() {
        let said = "# event histogram\n\n{ info1:   33030145 } hitcount:         12\n{ info1:          1 } hitcount:          1\n\nTotals:\n    Hits: 13\n";
        assert_eq!(histogram(said, "info1:").unwrap(), [(33_030_145, 12), (1, 1)]);
        assert!(histogram(said, "reason:").is_err());
    }
}
