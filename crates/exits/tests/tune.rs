//! The script that runs in guests, on folders that look like a guest's /sys and /proc.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

struct Guest {
    folder: tempfile::TempDir,
}

impl Guest {
    fn new() -> Guest {
        Guest { folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self, path: &str, text: &str) -> PathBuf {
        let file = self.folder.path().join(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        file
    }

    fn tune(&self, words: &[&str]) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/tune/tune.sh");
        let at = |path: &str| self.folder.path().join(path);
        Command::new("sh")
            .arg(script)
            .args(words)
            .env("IOPLANE_TUNE_STATE", at("run"))
            .env("IOPLANE_TUNE_SYS", at("sys"))
            .env("IOPLANE_TUNE_PROC", at("proc"))
            .output()
            .unwrap()
    }

    /// Nothing is left to undo.
    fn forgot(&self, word: &str) {
        let left = |name: String| self.folder.path().join("run").join(name).exists();
        assert!(!left(word.into()) && !left(format!("{word}.run")));
    }
}

/// The script's own last word; those of `cat` and of the shell come before it.
fn last_line(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).lines().last().unwrap_or_default().to_owned()
}

fn refused(file: &Path) -> String {
    format!("tune: {} does not take none; everything is as it was", file.display())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap().trim().to_owned()
}

const CLOCK: &str = "sys/devices/system/clocksource/clocksource0";

#[test]
fn a_clock_is_changed_and_put_back() {
    let guest = Guest::new();
    guest.file(&format!("{CLOCK}/available_clocksource"), "tsc kvm-clock acpi_pm \n");
    let current = guest.file(&format!("{CLOCK}/current_clocksource"), "acpi_pm\n");
    // Twice: what is put back is what was there at first.
    for _ in 0..2 {
        assert!(guest.tune(&["apply", "clocksource"]).status.success());
        assert_eq!(read(&current), "kvm-clock");
    }
    assert!(guest.tune(&["undo", "clocksource"]).status.success());
    assert_eq!(read(&current), "acpi_pm");
    let again = guest.tune(&["undo", "clocksource"]);
    assert!(again.status.success() && String::from_utf8_lossy(&again.stdout).contains("nothing to undo"));
}

#[test]
fn a_guest_without_a_better_clock_is_left_alone() {
    let guest = Guest::new();
    guest.file(&format!("{CLOCK}/available_clocksource"), "acpi_pm hpet\n");
    let current = guest.file(&format!("{CLOCK}/current_clocksource"), "acpi_pm\n");
    let refused = guest.tune(&["apply", "clocksource"]);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("neither kvm-clock nor tsc"));
    assert_eq!(read(&current), "acpi_pm");
}

#[test]
fn what_fails_half_way_is_undone() {
    let guest = Guest::new();
    let first = guest.file("sys/block/vda/queue/scheduler", "mq-deadline\n");
    // The second disk's setting cannot be read.
    let second = guest.folder.path().join("sys/block/vdb/queue/scheduler");
    fs::create_dir_all(&second).unwrap();
    let failed = guest.tune(&["apply", "scheduler"]);
    assert!(!failed.status.success());
    assert_eq!(last_line(&failed), refused(&second));
    assert_eq!(read(&first), "mq-deadline");
    guest.forgot("scheduler");
}

/// A disk that was plugged in later does not take it: the first one keeps what an earlier run has given it, and `undo` knows what it had.
#[test]
fn what_an_earlier_run_has_done_stays() {
    let guest = Guest::new();
    let first = guest.file("sys/block/vda/queue/scheduler", "mq-deadline\n");
    assert!(guest.tune(&["apply", "scheduler"]).status.success());
    assert_eq!(read(&first), "none");
    // Somebody has changed it since; that is what this run finds, and goes back to.
    fs::write(&first, "kyber\n").unwrap();
    let second = guest.folder.path().join("sys/block/vdb/queue/scheduler");
    fs::create_dir_all(&second).unwrap();
    let failed = guest.tune(&["apply", "scheduler"]);
    assert!(!failed.status.success());
    assert_eq!(last_line(&failed), refused(&second));
    assert_eq!(read(&first), "kyber", "as it was before this run");
    fs::write(&first, "none\n").unwrap();
    let again = guest.tune(&["apply", "scheduler"]);
    assert_eq!(last_line(&again), refused(&second));
    assert_eq!(read(&first), "none", "an earlier run's");
    fs::remove_dir(&second).unwrap();
    assert!(guest.tune(&["undo", "scheduler"]).status.success());
    assert_eq!(read(&first), "mq-deadline");
    guest.forgot("scheduler");
}

/// IDE, SATA and SCSI disks as virtio's; kernels before 5.0 call it noop. No other block device is touched.
#[test]
fn every_disk_loses_its_scheduler() {
    let guest = Guest::new();
    let file = |disk: &str, text: &str| guest.file(&format!("sys/block/{disk}/queue/scheduler"), text);
    let (sda, sdb, vda) =
        (file("sda", "[mq-deadline] none\n"), file("sdb", "noop [cfq]\n"), file("vda", "[bfq] none\n"));
    let others = [file("loop0", "[mq-deadline] none\n"), file("sr0", "[mq-deadline] none\n")];
    assert!(guest.tune(&["apply", "scheduler"]).status.success());
    assert_eq!([&sda, &sdb, &vda].map(|file| read(file)), ["none", "noop", "none"]);
    assert!(others.iter().all(|file| read(file) == "[mq-deadline] none"));
    assert!(guest.tune(&["undo", "scheduler"]).status.success());
    assert_eq!([&sda, &sdb, &vda].map(|file| read(file)), ["mq-deadline", "cfq", "bfq"]);
    guest.forgot("scheduler");
    let none = Guest::new().tune(&["apply", "scheduler"]);
    assert!(!none.status.success() && last_line(&none).contains("neither vd* nor sd*"), "{none:?}");
}

/// Both settings of each NIC, or none; what is no NIC keeps its own.
#[test]
fn interrupts_of_nics_are_turned_on_later() {
    let guest = Guest::new();
    let nic = |name: &str, device: bool| {
        if device {
            guest.file(&format!("sys/class/net/{name}/device/vendor"), "0x8086\n");
        }
        let file = |key: &str, value: &str| guest.file(&format!("sys/class/net/{name}/{key}"), value);
        (file("napi_defer_hard_irqs", "0\n"), file("gro_flush_timeout", "7\n"))
    };
    let (eth0, lo) = (nic("eth0", true), nic("lo", false));
    let values = |(defer, flush): &(PathBuf, PathBuf)| [read(defer), read(flush)];
    assert!(guest.tune(&["apply", "napi"]).status.success());
    assert_eq!(
        (values(&eth0), values(&lo)),
        (["2", "50000"].map(String::from), ["0", "7"].map(String::from))
    );
    assert!(guest.tune(&["undo", "napi"]).status.success());
    assert_eq!(values(&eth0), ["0", "7"]);
    guest.forgot("napi");
    // The second file takes no value: the first one has its own again.
    fs::remove_file(&eth0.0).unwrap();
    fs::create_dir(&eth0.0).unwrap();
    let failed = guest.tune(&["apply", "napi"]);
    assert!(
        !failed.status.success() && last_line(&failed).contains("does not take 2; everything is as it was")
    );
    assert_eq!(read(&eth0.1), "7");
    guest.forgot("napi");
    let old = Guest::new();
    old.file("sys/class/net/eth0/device/vendor", "0x8086\n");
    let refused = old.tune(&["apply", "napi"]);
    assert!(!refused.status.success() && last_line(&refused).contains("Linux 5.8"), "{refused:?}");
}

const DISKS: &str = "\
 254 0 vda 100 1 2 3 40 1 2 3 0 5 6 7 8 9 10 11 12
 254 1 vda1 100 1 2 3 40 1 2 3 0 5 6 7 8 9 10 11 12
   8 0 sda 1000 1 2 3 400 1 2 3 0 5 6
   7 0 loop0 5000 0 0 0 0 0 0 0 0 0 0
";
const NICS: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  999   7777    0    0    0     0          0         0   999    7777    0    0    0     0       0          0
  eth0: 90000     60    1    2    3     4          5         6 40000      30    7    8    9    10      11         12
enp0s3:90000 600 1 2 3 4 5 6 40000 300 7 8 9 10 11 12
";

/// Reads, writes, discards and flushes of whole disks, also of kernels that count no discards; packets of NICs; nothing is changed.
#[test]
fn the_guest_s_work_is_counted() {
    let guest = Guest::new();
    guest.file("proc/diskstats", DISKS);
    guest.file("proc/net/dev", NICS);
    guest.file("proc/stat", "cpu  1 2 3\nintr 5 6\nctxt 4711\nbtime 1\n");
    for device in ["block/vda", "block/sda", "net/eth0", "net/enp0s3"] {
        let at = device.replacen("net", "class/net", 1);
        guest.file(&format!("sys/{at}/device/vendor"), "1\n");
    }
    guest.file("sys/block/loop0/size", "1\n");
    guest.file("sys/class/net/lo/mtu", "1\n");
    let said = guest.tune(&["work", "all"]);
    assert!(said.status.success(), "{said:?}");
    let wanted = format!("disk_requests {}\npackets 990\ncontext_switches 4711\n", 100 + 40 + 7 + 11 + 1400);
    assert_eq!(String::from_utf8_lossy(&said.stdout), wanted);
    assert!(!guest.folder.path().join("run").exists(), "nothing is written");
    // What it cannot tell it leaves out.
    let bare = Guest::new().tune(&["work", "all"]);
    assert!(bare.status.success() && bare.stdout.is_empty(), "{bare:?}");
}

/// Killed after it has changed something, before it has said so.
#[test]
fn a_run_that_was_cut_off_can_be_undone() {
    let guest = Guest::new();
    let disk = guest.file("sys/block/vda/queue/scheduler", "none\n");
    guest.file("run/scheduler.run", &format!("{} mq-deadline\n", disk.display()));
    assert!(guest.tune(&["apply", "scheduler"]).status.success());
    assert!(guest.tune(&["undo", "scheduler"]).status.success());
    assert_eq!(read(&disk), "mq-deadline");
    guest.forgot("scheduler");
}

/// A file that is bound read-only says its value and takes none, from root neither.
#[test]
fn what_takes_no_value_has_none_to_put_back() {
    let guest = Guest::new();
    let first = guest.file("sys/block/vda/queue/scheduler", "mq-deadline\n");
    let second = guest.file("sys/block/vdb/queue/scheduler", "bfq\n");
    let bound = |options: &str| {
        let script = format!("mount --bind {0} {0} && mount -o remount,bind,{options} {0}", second.display());
        Command::new("sh").args(["-c", &script]).status().unwrap().success()
    };
    assert!(bound("ro"), "root is needed to bind a file read-only");
    let failed = guest.tune(&["apply", "scheduler"]);
    assert!(Command::new("umount").arg(&second).status().unwrap().success());
    assert!(!failed.status.success());
    assert_eq!(last_line(&failed), refused(&second));
    assert_eq!((read(&first), read(&second)), ("mq-deadline".into(), "bfq".into()));
    guest.forgot("scheduler");
}

#[test]
fn the_console_has_four_numbers() {
    let guest = Guest::new();
    let printk = guest.file("proc/sys/kernel/printk", "7\t4\t1\t7\n");
    assert!(guest.tune(&["apply", "console"]).status.success());
    assert_eq!(read(&printk), "1");
    assert!(guest.tune(&["undo", "console"]).status.success());
    assert_eq!(read(&printk), "7\t4\t1\t7");
}

#[test]
fn other_words_do_nothing() {
    let guest = Guest::new();
    for words in [&["apply", "everything"][..], &["dance", "console"], &["apply"], &[]] {
        assert!(!guest.tune(words).status.success(), "{words:?}");
    }
}
