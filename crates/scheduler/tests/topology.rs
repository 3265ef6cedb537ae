//! Topologies read from made-up sysfs trees.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use ioplane_scheduler::{CpuTopology, TopologyError};

/// Writes a tree: each processor's siblings, and the processors of each node.
fn tree(online: &str, siblings: &[&str], nodes: &[&str]) -> tempfile::TempDir {
    let root = tempfile::tempdir().unwrap();
    let system = root.path().join("devices/system");
    let write = |path: &Path, text: &str| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{text}\n")).unwrap();
    };
    write(&system.join("cpu/online"), online);
    for (cpu, list) in siblings.iter().enumerate() {
        write(&system.join(format!("cpu/cpu{cpu}/topology/thread_siblings_list")), list);
    }
    for (node, list) in nodes.iter().enumerate() {
        write(&system.join(format!("node/node{node}/cpulist")), list);
    }
    // What stands beside them on a host.
    if !nodes.is_empty() {
        write(&system.join("node/online"), "0");
        write(&system.join("node/has_cpu"), "0");
    }
    root
}

/// Two nodes of two cores of two threads: 0,4 and 1,5 on the first, 2,6 and 3,7 on the second.
fn two_nodes() -> CpuTopology {
    let siblings = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"];
    CpuTopology::read(tree("0-7", &siblings, &["0-1,4-5", "2-3,6-7"]).path()).unwrap()
}

fn set(cpus: &[u32]) -> BTreeSet<u32> {
    cpus.iter().copied().collect()
}

#[test]
fn nodes_and_siblings_are_read() {
    let topology = two_nodes();
    assert_eq!(topology.cpus().count(), 8);
    assert_eq!((topology.node(5), topology.node(6), topology.node(8)), (Some(0), Some(1), None));
    assert_eq!(topology.cpu(6).unwrap().siblings, set(&[2, 6]));
}

#[test]
fn a_core_of_its_own_on_the_wanted_node_comes_first() {
    let topology = two_nodes();
    let all = set(&[0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(topology.next_cpu(&all, &set(&[]), None), Some(0));
    assert_eq!(topology.next_cpu(&all, &set(&[]), Some(1)), Some(2));
    // The node's second core before the sibling of its first.
    assert_eq!(topology.next_cpu(&all, &set(&[2]), Some(1)), Some(3));
    // The other node before a sibling.
    assert_eq!(topology.next_cpu(&all, &set(&[2, 3]), Some(1)), Some(0));
    // A sibling, on the wanted node, when there is nothing else.
    assert_eq!(topology.next_cpu(&all, &set(&[0, 1, 2, 3]), Some(1)), Some(6));
    assert_eq!(topology.next_cpu(&set(&[0, 1]), &set(&[0, 1]), None), None);
}

#[test]
fn processors_that_are_offline_are_left_out() {
    let siblings = ["0-1", "0-1", "2-3"];
    let topology = CpuTopology::read(tree("0,2", &siblings, &["0-3"]).path()).unwrap();
    assert_eq!(topology.cpus().map(|(cpu, _)| cpu).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(topology.cpu(0).unwrap().siblings, set(&[0]));
}

#[test]
fn a_host_without_numa_or_siblings_is_one_node_of_single_cores() {
    let topology = CpuTopology::read(tree("0-1", &[], &[]).path()).unwrap();
    assert_eq!((topology.node(1), topology.cpu(1).unwrap().siblings.len()), (Some(0), 1));
}

#[test]
fn what_is_not_a_list_is_refused_with_its_path() {
    for text in ["0-x", "3-1", "0-4000000000", "a"] {
        let error = CpuTopology::read(tree(text, &[], &[]).path()).unwrap_err();
        assert!(matches!(error, TopologyError::Syntax { .. }), "{text}: {error}");
        assert!(error.to_string().contains("cpu/online"));
    }
    let error = CpuTopology::read(Path::new("/nowhere")).unwrap_err();
    assert!(matches!(error, TopologyError::Read { .. }));
}

#[test]
fn the_tree_of_this_host_is_read() {
    let topology = CpuTopology::read(Path::new("/sys")).unwrap();
    assert!(topology.cpus().count() > 0);
}

#[test]
fn the_nodes_of_a_host_are_known() {
    let (two, one) = (two_nodes(), CpuTopology::read(tree("0-3", &[], &[]).path()).unwrap());
    assert_eq!((two.nodes(), two.only_node()), (set(&[0, 1]), None));
    assert_eq!((one.nodes(), one.only_node()), (set(&[0]), Some(0)), "without nodes all is on the first");
    assert_eq!((CpuTopology::default().nodes(), CpuTopology::default().only_node()), (set(&[]), None));
}
