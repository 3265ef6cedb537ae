//! On which NUMA node the memory of a guest is, as far as `/proc` says it of the process that the guest is.
//!
//! Where all of the process's memory has to be on one node (`Mems_allowed_list`: a cpuset, as libvirt's strict `numatune` makes one), it is there. Otherwise it is where
//! the process takes its processor time: the kernel takes a page from the node of the thread that touches it first, and moves pages after threads that stay elsewhere. Nothing
//! is known of a process that takes less than three quarters of its time on one node. Memory policies (`numactl --membind`, `host-nodes` of QEMU) are not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::topology::CpuTopology;

/// Ticks of processor time (10 ms each) below which nothing new is learnt of a process.
const FEWEST_TICKS: u64 = 10;

/// Looks in a row that have to agree before a process is said to be on another node than before.
const AGREEING: u32 = 3;

/// Threads of a process that are looked at, at most.
const MOST_THREADS: usize = 4096;

/// What is known of the processes of guests. Control plane: reads a file per thread.
#[derive(Debug)]
pub struct ProcessNodes {
    procfs: PathBuf,
    processes: BTreeMap<u32, ProcessNode>,
}

/// Of one process.
#[derive(Debug, Default)]
struct ProcessNode {
    /// Processor time that each thread had taken at the last look, ticks.
    ticks: BTreeMap<u32, u64>,
    node: Option<u32>,
    /// Another one that it has been on for so many looks.
    next: (Option<u32>, u32),
}

impl ProcessNodes {
    /// Reads below `procfs`, which is `/proc` outside of tests.
    pub fn new(procfs: PathBuf) -> Self {
        ProcessNodes { procfs, processes: BTreeMap::new() }
    }

    /// Looks at these processes, and forgets all others. The node of each of which one is known.
    pub fn look(&mut self, pids: &BTreeSet<u32>, topology: &CpuTopology) -> BTreeMap<u32, u32> {
        self.processes.retain(|pid, _| pids.contains(pid));
        for pid in pids {
            let process = self.procfs.join(pid.to_string());
            self.processes.entry(*pid).or_default().look(&process, topology);
        }
        self.processes.iter().filter_map(|(pid, process)| Some((*pid, process.node?))).collect()
    }
}

impl ProcessNode {
    fn look(&mut self, process: &Path, topology: &CpuTopology) {
        if let Some(node) = only_node_allowed(process) {
            // It need not be settled: it is a rule.
            (self.node, self.next) = (Some(node), (None, 0));
            return;
        }
        let mut by_node: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        let before = std::mem::take(&mut self.ticks);
        for (thread, cpu, ticks) in threads(process) {
            let new = ticks.saturating_sub(before.get(&thread).copied().unwrap_or(0));
            let node = by_node.entry(topology.node(cpu)).or_default();
            *node = node.saturating_add(new);
            self.ticks.insert(thread, ticks);
        }
        let all = by_node.values().fold(0u64, |all, ticks| all.saturating_add(*ticks));
        if all < FEWEST_TICKS {
            // Counted until there are enough.
            self.ticks = before;
            return;
        }
        let most = by_node.into_iter().max_by_key(|(_, ticks)| *ticks);
        self.settle(
            most.filter(|(_, ticks)| ticks.saturating_mul(4) >= all.saturating_mul(3))
                .and_then(|(node, _)| node),
        );
    }

    /// It was mostly on `node` since the last look.
    fn settle(&mut self, node: Option<u32>) {
        if node == self.node {
            self.next = (None, 0);
            return;
        }
        let times = if self.next.0 == node { self.next.1 + 1 } else { 1 };
        self.next = (node, times);
        if self.node.is_none() || times >= AGREEING {
            (self.node, self.next) = (node, (None, 0));
        }
    }
}

/// The node on which all memory of the process has to be, if there is one.
fn only_node_allowed(process: &Path) -> Option<u32> {
    let status = fs::read_to_string(process.join("status")).ok()?;
    let list = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"))?;
    // More than one has a comma or a dash in it.
    list.trim().parse().ok()
}

/// Thread, processor on which it ran last, and processor time, ticks. What cannot be read is left out: it has ended meanwhile.
fn threads(process: &Path) -> Vec<(u32, u32, u64)> {
    let Ok(entries) = fs::read_dir(process.join("task")) else { return Vec::new() };
    let thread = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        let (cpu, ticks) = thread_time(&fs::read_to_string(entry.path().join("stat")).ok()?)?;
        Some((number, cpu, ticks))
    };
    entries.flatten().take(MOST_THREADS).filter_map(thread).collect()
}

/// Processor and processor time in the line of a thread's `stat`: fields 39, 14 and 15 of proc_pid_stat(5). The name, field 2, may have anything in it.
fn thread_time(stat: &str) -> Option<(u32, u64)> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
    let cpu = u32::try_from(field(39)?).ok()?;
    Some((cpu, field(14)?.saturating_add(field(15)?)))
}
