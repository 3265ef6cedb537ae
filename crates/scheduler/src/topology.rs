//! Processors, their SMT siblings and their NUMA nodes, read from a sysfs tree.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

/// Processors beyond which a list is not believed.
const MOST_CPUS: u32 = 65_536;

/// Why the tree could not be read.
#[derive(Debug, thiserror::Error)]
pub enum TopologyError {
    /// A file is missing or unreadable.
    #[error("{}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{}: {text:?} is not a list of processors such as 0-3,8", path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// What it holds.
        text: String,
    },
}

/// One processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuPlace {
    /// Its NUMA node; 0 where the host has none.
    pub node: u32,
    /// Processors of the same physical core, this one among them.
    pub siblings: BTreeSet<u32>,
}

/// The processors that are online.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuTopology {
    cpus: BTreeMap<u32, CpuPlace>,
}

impl CpuTopology {
    /// Reads `devices/system/{cpu,node}` below `sysfs`, which is `/sys` outside of tests. Control plane: some hundred small reads.
    pub fn read(sysfs: &Path) -> Result<Self, TopologyError> {
        let system = sysfs.join("devices/system");
        let online = cpu_list(&system.join("cpu/online"))?;
        let nodes = nodes(&system.join("node"))?;
        let mut cpus = BTreeMap::new();
        for cpu in &online {
            let path = system.join(format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
            let mut siblings = match cpu_list(&path) {
                // Kernels without the file have no siblings to speak of.
                Err(TopologyError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    BTreeSet::new()
                }
                other => other?,
            };
            siblings.retain(|sibling| online.contains(sibling));
            siblings.insert(*cpu);
            cpus.insert(*cpu, CpuPlace { node: nodes.get(cpu).copied().unwrap_or(0), siblings });
        }
        Ok(CpuTopology { cpus })
    }

    /// One processor, if it is online.
    pub fn cpu(&self, cpu: u32) -> Option<&CpuPlace> {
        self.cpus.get(&cpu)
    }

    /// All that are online.
    pub fn cpus(&self) -> impl Iterator<Item = (u32, &CpuPlace)> {
        self.cpus.iter().map(|(cpu, place)| (*cpu, place))
    }

    /// The node of a processor; `None` if it is not online.
    pub fn node(&self, cpu: u32) -> Option<u32> {
        self.cpu(cpu).map(|place| place.node)
    }

    /// All nodes that have processors.
    pub fn nodes(&self) -> BTreeSet<u32> {
        self.cpus.values().map(|place| place.node).collect()
    }

    /// The node of all processors, where there is only one.
    pub fn only_node(&self) -> Option<u32> {
        let nodes = self.nodes();
        nodes.first().copied().filter(|_| nodes.len() == 1)
    }

    /// The processor for one I/O core more: of those in `allowed` that none of `taken` runs on. Prefers node `near`, then a physical core on which no I/O
    /// core runs, since two that poll on siblings have half a core each, then the lowest number.
    pub fn next_cpu(&self, allowed: &BTreeSet<u32>, taken: &BTreeSet<u32>, near: Option<u32>) -> Option<u32> {
        self.cpus()
            .filter(|(cpu, _)| allowed.contains(cpu) && !taken.contains(cpu))
            .min_by_key(|(cpu, place)| {
                let far = near.is_some_and(|near| near != place.node);
                let beside = !place.siblings.is_disjoint(taken);
                // A core of one's own on another node before half of one here.
                (beside, far, *cpu)
            })
            .map(|(cpu, _)| cpu)
    }
}

/// The node of each processor.
fn nodes(directory: &Path) -> Result<BTreeMap<u32, u32>, TopologyError> {
    let mut of = BTreeMap::new();
    let entries = match directory.read_dir() {
        Err(source) if source.kind() == io::ErrorKind::NotFound => return Ok(of),
        other => other.map_err(|source| TopologyError::Read { path: directory.to_owned(), source })?,
    };
    for entry in entries {
        let entry = entry.map_err(|source| TopologyError::Read { path: directory.to_owned(), source })?;
        let name = entry.file_name();
        let Some(node) = name.to_str().and_then(|name| name.strip_prefix("node")?.parse().ok()) else {
            continue;
        };
        for cpu in cpu_list(&entry.path().join("cpulist"))? {
            of.insert(cpu, node);
        }
    }
    Ok(of)
}

/// A list as the kernel writes it: `0-3,8,10-11`, or nothing.
fn cpu_list(path: &Path) -> Result<BTreeSet<u32>, TopologyError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| TopologyError::Read { path: path.to_owned(), source })?;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        (first <= last && last < MOST_CPUS).then_some(first..=last)
    };
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        match range(part.trim()) {
            Some(range) => cpus.extend(range),
            None => return Err(TopologyError::Syntax { path: path.to_owned(), text: text.clone() }),
        }
    }
    Ok(cpus)
}
