//! KVM's own counters of a VM, to check a profile against: debugfs, or a statistics descriptor that the VMM has open.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use ioplane_plain::file_text;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::vm::Vm;

/// So many counters, and so many bytes a name; Linux 6.12 has 60 of 48.
const COUNTERS: usize = 4096;
const NAME: usize = 256;

/// What KVM has counted since the VM began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Where they are from.
    pub source: String,
    /// Every counter that has a single value.
    pub counters: BTreeMap<String, u64>,
}

impl Totals {
    /// Reads them; nothing if neither source is there for us. That takes milliseconds: `exits` is read last, so that it is what it
    /// was when this returns.
    pub fn read(vm: &Vm) -> Option<Totals> {
        let mut totals = debugfs(vm).or_else(|| descriptors(vm))?;
        totals.refresh(vm);
        Some(totals)
    }

    /// The same, with `exits` as it was when this was called.
    pub fn read_at_once(vm: &Vm) -> Option<Totals> {
        let exits = exits_of(vm);
        let mut totals = Totals::read(vm)?;
        if let (Some(exits), Some(counter)) = (exits, totals.counters.get_mut("exits")) {
            *counter = exits;
        }
        Some(totals)
    }

    fn refresh(&mut self, vm: &Vm) {
        if let (Some(exits), Some(counter)) = (exits_of(vm), self.counters.get_mut("exits")) {
            *counter = exits;
        }
    }

    /// What has been counted since `earlier`; nothing if the two are from different sources.
    pub fn since(&self, earlier: &Totals) -> Option<Totals> {
        if self.source != earlier.source {
            return None;
        }
        let difference = |(name, value): (&String, &u64)| {
            let before = earlier.counters.get(name)?;
            Some((name.clone(), value.saturating_sub(*before)))
        };
        Some(Totals {
            source: self.source.clone(),
            counters: self.counters.iter().filter_map(difference).collect(),
        })
    }

    /// All exits.
    pub fn exits(&self) -> Option<u64> {
        self.counters.get("exits").copied()
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in self.counters.iter().filter(|(_, value)| **value > 0) {
            writeln!(f, "{value:>12} {name}")?;
        }
        Ok(())
    }
}

/// That one counter from debugfs.
pub fn exits_of(vm: &Vm) -> Option<u64> {
    let folders = vm.vm_fds.iter().map(|fd| format!("/sys/kernel/debug/kvm/{}-{fd}/exits", vm.pid));
    let texts = folders.filter_map(|path| file_text(Path::new(&path), 4096).ok());
    texts.filter_map(|text| text.trim().parse::<u64>().ok()).reduce(|a, b| a + b)
}

/// `/sys/kernel/debug/kvm/PID-FD/NAME`, one number a file.
fn debugfs(vm: &Vm) -> Option<Totals> {
    let mut counters = BTreeMap::new();
    for fd in &vm.vm_fds {
        let folder = format!("/sys/kernel/debug/kvm/{}-{fd}", vm.pid);
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten().take(COUNTERS) {
            let Ok(text) = file_text(&entry.path(), 4096) else { continue };
            if let (Some(name), Ok(value)) = (entry.file_name().to_str(), text.trim().parse::<u64>()) {
                *counters.entry(name.to_owned()).or_default() += value;
            }
        }
    }
    (!counters.is_empty()).then(|| Totals { source: "debugfs".into(), counters })
}

/// The descriptors that QEMU opens for `query-stats`. We cannot ask KVM for new ones: it answers only the process that owns the VM.
pub(crate) fn descriptors(vm: &Vm) -> Option<Totals> {
    let process = pidfd_open(Pid::from_raw(i32::try_from(vm.pid).ok()?)?, PidfdFlags::empty()).ok()?;
    let mut counters = BTreeMap::new();
    for entry in fs::read_dir(Path::new("/proc").join(vm.pid.to_string()).join("fd")).ok()?.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.to_string_lossy().into_owned();
        let is_stats = ["anon_inode:kvm-vm-stats", "anon_inode:kvm-vcpu-stats:"];
        if !is_stats.iter().any(|start| target.starts_with(start)) {
            continue;
        }
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(copy) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) else { continue };
        for (name, value) in read_descriptor(&copy).unwrap_or_default() {
            *counters.entry(name).or_default() += value;
        }
    }
    let source = "the VMM's statistics descriptors".into();
    (!counters.is_empty()).then_some(Totals { source, counters })
}

/// The binary format of `KVM_GET_STATS_FD` (Linux, Documentation/virt/kvm/api.rst, 4.133).
fn read_descriptor(fd: &OwnedFd) -> Option<Vec<(String, u64)>> {
    use std::os::fd::AsFd;
    parse(|at, length| read_at(fd.as_fd(), at, length))
}

fn read_at(fd: BorrowedFd<'_>, at: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    let mut done = 0;
    while done < length {
        match rustix::io::pread(fd, &mut bytes[done..], at + done as u64) {
            Ok(0) | Err(_) => return None,
            Ok(more) => done += more,
        }
    }
    Some(bytes)
}

fn parse(read: impl Fn(u64, usize) -> Option<Vec<u8>>) -> Option<Vec<(String, u64)>> {
    let word = |bytes: &[u8], at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let header = read(0, 24)?;
    let (name_size, count) = (word(&header, 4)? as usize, word(&header, 8)? as usize);
    let (descriptions, data) = (u64::from(word(&header, 16)?), u64::from(word(&header, 20)?));
    if name_size > NAME || count > COUNTERS {
        return None;
    }
    let each = 16 + name_size;
    let table = read(descriptions, each * count)?;
    let mut found = Vec::new();
    for entry in table.chunks_exact(each) {
        let values = u16::from_ne_bytes([entry[6], entry[7]]);
        let offset = word(entry, 8)?;
        if values != 1 {
            // A histogram.
            continue;
        }
        let name = entry[16..].split(|byte| *byte == 0).next().unwrap_or_default();
        let value = read(data + u64::from(offset), 8)?;
        let value = u64::from_ne_bytes(value.try_into().ok()?);
        found.push((String::from_utf8_lossy(name).into_owned(), value));
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn image() -> Vec<u8> {
        let mut image = Vec::new();
        for word in [0u32, 8, 2, 24, 24, 24 + 2 * 24] {
            image.extend(word.to_ne_bytes());
        }
        for (values, offset, name) in [(1u16, 0u32, b"exits\0\0\0"), (3, 8, b"hist\0\0\0\0")] {
            image.extend([0; 6]);
            image.extend(values.to_ne_bytes());
            image.extend(offset.to_ne_bytes());
            image.extend([0; 4]);
            image.extend(name);
        }
        image.extend(77u64.to_ne_bytes());
        image
    }

    fn from(image: &[u8]) -> Option<Vec<(String, u64)>> {
        parse(|at, length| Some(image.get(at as usize..(at as usize).checked_add(length)?)?.to_vec()))
    }

    #[test]
    fn single_values_are_read() {
        assert_eq!(from(&image()), Some(vec![("exits".into(), 77)]));
        assert_eq!(from(&image()[..70]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = from(&bytes);
        }
    }
}
