//! The interposer in L1: its shared object, how many exits the VMMs of L1 really see, by the kernel's own tracepoint, and which
//! accesses their devices get, by QEMU's own.

use crate::l1::L1;
use crate::l2::L2;
use crate::process::built;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
const EVENT: &str = "/sys/kernel/tracing/events/kvm/kvm_userspace_exit";

/// `libioplane_interposer.so`, as it was built with the test.
pub fn library() -> Result<PathBuf> {
    built("libioplane_interposer.so").context("build it: cargo build -p ioplane-interposer")
}

/// A count that runs in L1's kernel, of returns of KVM_RUN by their reason.
#[derive(Debug)]
pub struct Counting<'a>(&'a L1);

/// Returns of KVM_RUN by reason, as the tracepoint calls them (`KVM_EXIT_IO` is 2, `KVM_EXIT_MMIO` 6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UserExits(pub BTreeMap<u32, u64>);

impl L1 {
    /// Begins to count; one count at a time.
    pub fn count_user_exits(&self) -> Result<Counting<'_>> {
        self.run(
            &format!(
                "mountpoint -q /sys/kernel/tracing || mount -t tracefs tracefs /sys/kernel/tracing
                 grep -q hist: {EVENT}/trigger && echo '!hist:keys=reason' >{EVENT}/trigger
                 echo 'hist:keys=reason' >{EVENT}/trigger"
            ),
            MINUTE,
        )?;
        Ok(Counting(self))
    }
}

impl Counting<'_> {
    /// What has been counted so far.
    pub fn read(&self) -> Result<UserExits> {
        let said = self.0.run(&format!("cat {EVENT}/hist"), MINUTE)?;
        let mut exits = BTreeMap::new();
        for line in said.lines().filter(|line| line.starts_with('{')) {
            // { reason:          2 } hitcount:         17
            let numbers = line.split(|letter: char| !letter.is_ascii_digit()).filter(|word| !word.is_empty());
            let numbers: Vec<u64> = numbers.map(str::parse).collect::<Result<_, _>>()?;
            ensure!(numbers.len() == 2, "{line}");
            exits.insert(u32::try_from(numbers[0])?, numbers[1]);
        }
        ensure!(!exits.is_empty(), "no exit was counted: {said}");
        Ok(UserExits(exits))
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
    switch(true)?;
    guest.run(work)?;
    switch(false)?;
    let wanted = names.iter().map(|name| format!("-e \"name '{name}'\"")).collect::<Vec<_>>().join(" ");
    let said = l1.run(&format!("grep {wanted} /tmp/{name}.trace; rm /tmp/{name}.trace"), MINUTE)?;
    let access = |line: &str| -> Option<String> {
        // memory_region_ops_read cpu 0 mr 0x55d0c addr 0x1f7 value 0x50 size 1 name 'ide'
        let (_, line) = line.split_once("memory_region_ops_")?;
        let (what, line) = line.split_once(' ')?;
        Some(format!("{what} {}", &line[line.find("addr ")?..]))
    };
    said.lines().map(|line| access(line).with_context(|| format!("{line:?} is no access"))).collect()
}
