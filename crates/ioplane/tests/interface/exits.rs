//! `ioplane exits top --openmetrics`: what Prometheus is told of made-up VMs.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use ioplane_kvmstat::KvmCounters;
use ioplane_testkit::golden;

/// A process with a VM, as `/proc` and debugfs show it.
fn vm(root: &Path, pid: u32, name: &str, vcpus: usize, counters: &[(&str, u64)]) {
    let process = root.join("proc").join(pid.to_string());
    fs::create_dir_all(process.join("fd")).unwrap();
    fs::write(process.join("status"), format!("Name:\tx\nTgid:\t{pid}\nPid:\t{pid}\n")).unwrap();
    fs::write(process.join("comm"), "qemu-system-x86\n").unwrap();
    fs::write(process.join("cmdline"), format!("qemu\0-name\0{name}\0")).unwrap();
    symlink("anon_inode:kvm-vm", process.join("fd/9")).unwrap();
    for vcpu in 0..vcpus {
        symlink(format!("anon_inode:kvm-vcpu:{vcpu}"), process.join("fd").join((10 + vcpu).to_string()))
            .unwrap();
    }
    let folder = root.join("debug/kvm").join(format!("{pid}-9"));
    fs::create_dir_all(&folder).unwrap();
    for (name, value) in counters {
        fs::write(folder.join(name), format!("{value}\n")).unwrap();
    }
}

#[test]
fn counters_of_all_vms_for_prometheus() {
    let root = tempfile::tempdir().unwrap();
    let all = [
        ("exits", 1000),
        ("io_exits", 100),
        ("mmio_exits", 200),
        ("halt_exits", 300),
        ("irq_exits", 40),
        ("irq_window_exits", 50),
        ("signal_exits", 6),
        ("hypercalls", 7),
        ("irq_injections", 80),
        ("insn_emulation", 90),
        ("pf_taken", 11),
        ("halt_wait_ns", 2_000_000_000),
        ("halt_poll_success_ns", 400_000_000),
        ("halt_poll_fail_ns", 100_000_000),
    ];
    vm(root.path(), 100, "web", 2, &all);
    // Its kernel counts nothing else. Whoever names a VM may write any label.
    vm(root.path(), 200, "a\"b\\c\u{1b}[2J\n} 1", 1, &[("exits", u64::MAX)]);
    // Two of one name are told apart.
    vm(root.path(), 300, "db", 1, &[("exits", 3)]);
    vm(root.path(), 301, "db", 1, &[("exits", 4)]);
    // A name is no way to be taken for one of them.
    vm(root.path(), 302, "db (300)", 1, &[("exits", 5)]);
    let counters = KvmCounters::of(&root.path().join("proc"), Some(&root.path().join("debug")));
    let text = counters.look().unwrap().open_metrics().unwrap();
    assert!(text.ends_with("\n# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    let series: Vec<&str> = text.lines().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
    let once: BTreeSet<&&str> = series.iter().collect();
    assert_eq!(once.len(), series.len(), "{text}");
    golden!("exits-top.text").check(&text);
}

/// A host without VMs is no error for Prometheus.
#[test]
fn no_vm_is_an_empty_answer() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("debug/kvm")).unwrap();
    let counters = KvmCounters::of(&root.path().join("proc"), Some(&root.path().join("debug")));
    assert_eq!(counters.look().unwrap().open_metrics().unwrap(), "# EOF\n");
}
