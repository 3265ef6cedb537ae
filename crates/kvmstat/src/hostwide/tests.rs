//! Made-up trees: what a debugfs and a `/proc` look like.

use std::os::unix::fs::symlink;

use super::*;

struct Host {
    root: tempfile::TempDir,
}

impl Host {
    fn new() -> Host {
        let host = Host { root: tempfile::tempdir().unwrap() };
        fs::create_dir_all(host.debug().join("kvm")).unwrap();
        fs::create_dir_all(host.proc()).unwrap();
        host
    }

    fn debug(&self) -> PathBuf {
        self.root.path().join("debug")
    }

    fn proc(&self) -> PathBuf {
        self.root.path().join("proc")
    }

    fn counters(&self) -> KvmCounters {
        KvmCounters::of(&self.proc(), Some(&self.debug()))
    }

    /// A VM that a thread of a process has made.
    fn vm(&self, process: u32, thread: u32, name: &str, vcpus: usize) {
        for id in [process, thread] {
            let folder = self.proc().join(id.to_string());
            fs::create_dir_all(folder.join("fd")).unwrap();
            fs::write(folder.join("status"), format!("Name:\tx\nTgid:\t{process}\nPid:\t{id}\n")).unwrap();
            fs::write(folder.join("comm"), "qemu-system-x86\n").unwrap();
            fs::write(folder.join("cmdline"), format!("qemu\0-name\0{name}\0")).unwrap();
            let fd = |number: usize, target: &str| {
                let _ = symlink(target, folder.join("fd").join(number.to_string()));
            };
            fd(9, "anon_inode:kvm-vm");
            (0..vcpus).for_each(|vcpu| fd(10 + vcpu, &format!("anon_inode:kvm-vcpu:{vcpu}")));
        }
    }

    fn count(&self, folder: &str, counters: &[(&str, u64)]) {
        let folder = self.debug().join("kvm").join(folder);
        fs::create_dir_all(folder.join("vcpu0")).unwrap();
        for (name, value) in counters {
            fs::write(folder.join(name), format!("{value}\n")).unwrap();
        }
    }
}

#[test]
fn rates_of_all_vms_most_first() {
    let host = Host::new();
    host.vm(100, 100, "web", 2);
    // Made by another thread than the first.
    host.vm(200, 207, "db", 1);
    host.count("100-9", &[("exits", 1000), ("io_exits", 100), ("halt_wait_ns", 0), ("halt_exits", 0)]);
    host.count("207-9", &[("exits", 5)]);
    // KVM's totals over all VMs lie beside the folders.
    fs::write(host.debug().join("kvm/exits"), "1005\n").unwrap();
    let before = host.counters().look().unwrap();
    host.count(
        "100-9",
        &[("exits", 3000), ("io_exits", 1100), ("halt_wait_ns", 2_000_000_000), ("halt_exits", 600)],
    );
    host.count("207-9", &[("exits", 9005)]);
    let rates = host.counters().look().unwrap().over(&before, 2.0);
    let [db, web] = &rates.vms[..] else { panic!("{rates:?}") };
    assert_eq!((db.name.as_str(), db.pid, db.exits, db.other), ("db", 200, 4500.0, 4500.0));
    assert_eq!((web.name.as_str(), web.vcpus, web.exits), ("web", 2, 1000.0));
    assert_eq!((web.io, web.halt, web.other, web.halted_percent), (500.0, 300.0, 200.0, 50.0));
    let text = rates.to_string();
    assert!(text.contains("2 VMs, 5500 exits") && text.contains("exits --vm pid:200"), "{text}");
    assert!(rates.notes.is_empty(), "{:?}", rates.notes);
}

#[test]
fn a_vm_that_is_new_or_another_one_has_no_rates_yet() {
    let host = Host::new();
    host.vm(100, 100, "web", 1);
    host.vm(300, 300, "old", 1);
    host.count("100-9", &[("exits", 1000)]);
    host.count("300-9", &[("exits", 1000)]);
    let before = host.counters().look().unwrap();
    host.vm(400, 400, "new", 1);
    host.count("400-9", &[("exits", 77)]);
    // The process has made another VM, which counts from nothing.
    host.count("100-9", &[("exits", 10)]);
    fs::remove_dir_all(host.debug().join("kvm/300-9")).unwrap();
    let rates = host.counters().look().unwrap().over(&before, 1.0);
    assert_eq!(rates.vms, []);
    assert_eq!(rates.notes.len(), 2, "{:?}", rates.notes);
    assert!(!rates.to_string().contains("--vm"), "nothing to look into");
}

#[test]
fn one_process_with_two_vms_is_one_row() {
    let host = Host::new();
    host.vm(100, 100, "two", 2);
    for folder in ["100-9", "100-12"] {
        host.count(folder, &[("exits", 1)]);
    }
    let before = host.counters().look().unwrap();
    host.count("100-9", &[("exits", 11)]);
    host.count("100-12", &[("exits", 6)]);
    let rates = host.counters().look().unwrap().over(&before, 1.0);
    assert_eq!((rates.vms.len(), rates.vms[0].exits), (1, 15.0));
}

#[test]
fn a_process_that_cannot_be_seen_has_its_number() {
    let host = Host::new();
    host.count("555-3", &[("exits", 1)]);
    let look = host.counters().look().unwrap();
    let rates = look.over(&look, 1.0);
    assert_eq!((rates.vms[0].name.as_str(), rates.vms[0].vcpus), ("(process 555)", 0));
}

#[test]
fn strange_folders_and_counters_are_passed_over() {
    let host = Host::new();
    host.vm(100, 100, "a\u{1b}[2J", 1);
    for folder in ["x-9", "100-", "-9", "100", "99999999999999-1", "100-9-9"] {
        host.count(folder, &[("exits", 1)]);
    }
    host.count("101-3", &[("io_exits", 1)]);
    host.count("102-3", &[("io_exits", 1)]);
    fs::write(host.debug().join("kvm/101-3/exits"), "-4\n").unwrap();
    fs::write(host.debug().join("kvm/102-3/exits"), "1".repeat(10_000)).unwrap();
    assert_eq!(host.counters().look().unwrap().vms.len(), 0);
    host.count("100-9", &[("exits", u64::MAX), ("io_exits", u64::MAX)]);
    host.count("100-10", &[("exits", u64::MAX), ("io_exits", 7)]);
    let look = host.counters().look().unwrap();
    let text = look.over(&look, 1.0).to_string();
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
}

#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let host = Host::new();
    let why = |debugfs: Option<&Path>| {
        let folder = KvmCounters::of(&host.proc(), debugfs).folder;
        folder.expect_err("there are no counters")
    };
    assert!(why(None).contains("mount -t debugfs debugfs /sys/kernel/debug"));
    fs::remove_dir_all(host.debug().join("kvm")).unwrap();
    assert!(why(Some(&host.debug())).contains("is the module kvm loaded"));
}

#[test]
fn debugfs_is_where_it_is_mounted() {
    let mounts =
        "proc /proc proc rw 0 0\ntracefs /sys/kernel/debug/tracing tracefs rw 0 0\nnone /d debugfs rw 0 0\n";
    assert_eq!(debugfs(mounts), Some("/d".into()));
    assert_eq!(debugfs("proc /proc proc rw 0 0\nx"), None);
}
