//! Nodes of processes, read from made-up `/proc` trees, and from this host's.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use ioplane_scheduler::{CpuTopology, ProcessNodes};

/// A host with processors 0 and 1 on node 0, 2 and 3 on node 1, and a process.
struct Host {
    root: tempfile::TempDir,
    topology: CpuTopology,
    nodes: ProcessNodes,
}

const PID: u32 = 77;

impl Host {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("sys/devices/system/cpu/online", "0-3\n");
        write("sys/devices/system/node/node0/cpulist", "0-1\n");
        write("sys/devices/system/node/node1/cpulist", "2-3\n");
        write("proc/77/status", "Name:\tqemu\nMems_allowed:\t3\nMems_allowed_list:\t0-1\n");
        let topology = CpuTopology::read(&root.path().join("sys")).unwrap();
        let nodes = ProcessNodes::new(root.path().join("proc"));
        Host { root, topology, nodes }
    }

    /// A thread has taken so many ticks, and ran last on `cpu`.
    fn thread(&self, thread: u32, cpu: u32, ticks: u64) {
        let folder = self.root.path().join(format!("proc/{PID}/task/{thread}"));
        fs::create_dir_all(&folder).unwrap();
        let mut fields = vec!["0".to_owned(); 50];
        (fields[11], fields[12], fields[36]) =
            ((ticks / 2).to_string(), (ticks - ticks / 2).to_string(), cpu.to_string());
        fs::write(folder.join("stat"), format!("{thread} (CPU 0) /KVM) {}\n", fields.join(" "))).unwrap();
    }

    fn look(&mut self) -> Option<u32> {
        self.nodes.look(&BTreeSet::from([PID]), &self.topology).get(&PID).copied()
    }
}

#[test]
fn a_guest_is_where_it_takes_its_processor_time() {
    let mut host = Host::new();
    host.thread(77, 0, 5);
    host.thread(78, 3, 1000);
    host.thread(79, 2, 900);
    assert_eq!(host.look(), Some(1));
    // Silent, it is where it was.
    assert_eq!(host.look(), Some(1));
    // A thread that only sleeps elsewhere says nothing, nor does one look at a guest that is moved around.
    host.thread(79, 0, 900);
    host.thread(78, 1, 1100);
    assert_eq!(host.look(), Some(1));
    host.thread(78, 3, 1200);
    assert_eq!(host.look(), Some(1));
    // Three looks in a row do.
    for (ticks, node) in [(1300, 1), (1400, 1), (1500, 0)] {
        host.thread(78, 1, ticks);
        assert_eq!(host.look(), Some(node), "{ticks}");
    }
    // One that runs on both nodes has none.
    for (ticks, node) in [(100, Some(0)), (200, Some(0)), (300, None)] {
        host.thread(78, 1, 1500 + ticks);
        host.thread(79, 2, 900 + ticks);
        assert_eq!(host.look(), node, "{ticks}");
    }
}

#[test]
fn memory_that_is_bound_to_a_node_is_there_wherever_threads_run() {
    let mut host = Host::new();
    host.thread(78, 0, 1000);
    fs::write(host.root.path().join("proc/77/status"), "Mems_allowed_list:\t1\n").unwrap();
    assert_eq!(host.look(), Some(1));
}

#[test]
fn what_cannot_be_read_is_not_known() {
    let mut host = Host::new();
    assert_eq!(host.look(), None, "no threads");
    for stat in ["", "78", "78 (x) R 1 2", "78 (x) R a b c"] {
        fs::create_dir_all(host.root.path().join("proc/77/task/78")).unwrap();
        fs::write(host.root.path().join("proc/77/task/78/stat"), stat).unwrap();
        assert_eq!(host.look(), None, "{stat:?}");
    }
    // On a processor that is on no node that is known.
    host.thread(78, 9, 1000);
    assert_eq!(host.look(), None);
    fs::remove_dir_all(host.root.path().join("proc/77")).unwrap();
    assert_eq!(host.look(), None, "it has ended");
}

#[test]
fn this_process_is_on_a_node_of_this_host() {
    let topology = CpuTopology::read(Path::new("/sys")).unwrap();
    let mut nodes = ProcessNodes::new("/proc".into());
    let pids = BTreeSet::from([std::process::id()]);
    let deadline = Instant::now() + Duration::from_secs(60);
    // On several nodes it may be on each a little: then nothing is known of it.
    while topology.nodes().len() == 1 {
        match nodes.look(&pids, &topology).first_key_value() {
            Some((pid, node)) => {
                assert_eq!((*pid, Some(*node)), (std::process::id(), topology.only_node()));
                return;
            }
            None => assert!(Instant::now() < deadline, "it is not known on which node this process is"),
        }
    }
}
