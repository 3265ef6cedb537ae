//! Programs in the kernel count what records of perf tell: both watch one guest at once, on this machine's own KVM.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use ioplane_exits::{Detail, QueuePorts, Source, Tracefs, Watch, WatchOptions};
use ioplane_kvmstat::Vm;

/// Set where tracefs was mounted for the test alone.
const INSIDE: &str = "IOPLANE_TEST_TRACEFS";

/// A guest that does each thing that it can so many times when it is told to.
struct Tiny(Child);

impl Tiny {
    /// Nothing where no guest runs, which is said.
    fn start() -> Option<Tiny> {
        let test = std::env::current_exe().unwrap();
        let program: PathBuf = test.ancestors().nth(2).unwrap().join("examples/tiny-guest");
        let mut command = Command::new(&program);
        command.arg("300").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut guest =
            Tiny(command.spawn().unwrap_or_else(|error| panic!("{}: {error}", program.display())));
        let mut line = String::new();
        BufReader::new(guest.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
        if line.trim() != "ready" {
            println!("SKIPPED (cannot be had here): no guest runs: {}", line.trim());
            return None;
        }
        Some(guest)
    }

    fn go(&mut self) {
        self.told("go");
    }

    fn told(&mut self, word: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{word}").unwrap();
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("sites"), "{line}");
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Every site, and how often it was seen.
fn sites(watch: &Watch) -> BTreeMap<String, u64> {
    watch.profile().sites().map(|(site, counts)| (format!("{site:?}"), counts.count)).collect()
}

/// Runs this test again where tracefs is mounted, if it is not. True where it is.
fn with_tracefs(test: &str) -> bool {
    if Tracefs::find().is_ok() || std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let mount = "mount -t tracefs ioplane /sys/kernel/tracing 2>/dev/null; exec \"$0\" \"$@\"";
    let again = Command::new("unshare")
        .args(["-m", "sh", "-c", mount])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .status();
    assert!(again.unwrap().success());
    false
}

#[test]
fn programs_count_what_perf_records() {
    if !with_tracefs("programs_count_what_perf_records") {
        return;
    }
    let (Some(mut guest), Some(mut other)) = (Tiny::start(), Tiny::start()) else { return };
    let start = |guest: &Tiny, source| {
        let vm = Vm::choose(Some(&format!("pid:{}", guest.0.id()))).unwrap();
        Watch::start(vm, WatchOptions { source, ..WatchOptions::default() })
    };
    let mut watches = match start(&guest, Source::Programs) {
        Ok(counted) => [counted, start(&guest, Source::Perf).unwrap()],
        Err(error) => {
            println!("SKIPPED (cannot be had here): {error}");
            return;
        }
    };
    // Another VM's exits are nobody's here.
    other.go();
    guest.go();
    for watch in &mut watches {
        assert!(watch.turn(Duration::from_millis(10)).unwrap());
        watch.stop().unwrap();
    }
    let [counted, recorded] = watches.each_ref().map(sites);
    assert!(counted.values().sum::<u64>() > 10 * 300, "{counted:#?}");
    assert_eq!(counted, recorded);
    let [counted, recorded] = watches.each_ref().map(Watch::seen);
    assert_eq!(counted.counted, recorded.counted);
    // After the end nothing is counted.
    let before = sites(&watches[0]);
    guest.go();
    watches[0].refresh().unwrap();
    assert_eq!(sites(&watches[0]), before);
}

/// A profile that is looked at while it grows, and a guest that ends while it is watched.
#[test]
fn a_profile_grows_until_its_guest_ends() {
    if !with_tracefs("a_profile_grows_until_its_guest_ends") {
        return;
    }
    let Some(mut guest) = Tiny::start() else { return };
    let vm = Vm::choose(Some(&format!("pid:{}", guest.0.id()))).unwrap();
    let mut watch =
        match Watch::start(vm, WatchOptions { source: Source::Programs, ..WatchOptions::default() }) {
            Ok(watch) => watch,
            Err(error) => {
                println!("SKIPPED (cannot be had here): {error}");
                return;
            }
        };
    let mut last = 0;
    for _ in 0..3 {
        guest.go();
        watch.turn(Duration::from_millis(10)).unwrap();
        watch.refresh().unwrap();
        let total = watch.profile().total().count;
        assert!(total > last + 10 * 300, "{total} after {last}");
        last = total;
    }
    drop(guest);
    // Its threads are found gone at the next look for them.
    while watch.turn(Duration::from_millis(100)).unwrap() {}
    watch.stop().unwrap();
    assert_eq!(watch.profile().total().count, last);
}

/// Most of the time in user space is in the one function that computes, whoever counts the exits.
#[test]
fn the_function_of_the_vmm_is_named() {
    if !with_tracefs("the_function_of_the_vmm_is_named") {
        return;
    }
    let Some(mut guest) = Tiny::start() else { return };
    for (source, sample) in
        [(Source::Programs, 1), (Source::Perf, 1), (Source::Perf, 2), (Source::Tracefs, 1)]
    {
        let vm = Vm::choose(Some(&format!("pid:{}", guest.0.id()))).unwrap();
        let mut watch = match Watch::start(vm, WatchOptions { source, sample, ..WatchOptions::default() }) {
            Ok(watch) => watch,
            Err(error) => {
                println!("SKIPPED (cannot be had here): {error}");
                continue;
            }
        };
        let begun = std::time::Instant::now();
        while begun.elapsed() < Duration::from_secs(1) {
            guest.told("busy");
            assert!(watch.turn(Duration::from_millis(10)).unwrap());
        }
        watch.stop().unwrap();
        let found = watch.vmm();
        if source == Source::Tracefs {
            assert_eq!((found, watch.unsampled()), (None, None));
            continue;
        }
        let time = found.unwrap_or_else(|| panic!("no sample: {:?}", watch.unsampled()));
        let first = &time.functions[0];
        assert!(first.name.starts_with("tiny_vmm_computes [tiny-guest"), "{source:?}: {time:#?}");
        assert!(first.percent > 80.0 && time.samples >= 10, "{source:?}: {time:#?}");
        println!("{source:?}, 1 of {sample}: {} samples, {:.1} %", time.samples, first.percent);
    }
}

/// The guest writes 5 to one port, 16 bits wide: that is a queue if it is said to be one, whoever watches.
#[test]
fn what_is_written_to_a_port_of_queues_is_told() {
    if !with_tracefs("what_is_written_to_a_port_of_queues_is_told") {
        return;
    }
    let Some(mut guest) = Tiny::start() else { return };
    for source in [Source::Programs, Source::Perf, Source::Tracefs] {
        for (ports, queue) in [(vec![], None), (vec![0xeee2, 0xeee0], Some(5))] {
            let vm = Vm::choose(Some(&format!("pid:{}", guest.0.id()))).unwrap();
            let queues = QueuePorts::new(ports);
            let mut watch = match Watch::start(vm, WatchOptions { source, queues, ..WatchOptions::default() })
            {
                Ok(watch) => watch,
                Err(error) => {
                    println!("SKIPPED (cannot be had here): {error}");
                    continue;
                }
            };
            guest.told("go");
            watch.turn(Duration::from_millis(10)).unwrap();
            watch.stop().unwrap();
            let details = watch.profile().sites().map(|(site, counts)| (site.detail, counts.count));
            let ports: Vec<_> = details
                .filter_map(|(detail, count)| match detail {
                    Detail::Port { port, write: true, queue, .. } => Some((port, queue, count)),
                    _ => None,
                })
                .collect();
            assert!(ports.contains(&(0xeee0, queue, 301)), "{source:?}: {ports:x?}");
            assert!(ports.iter().all(|(port, queue, _)| *port == 0xeee0 || queue.is_none()), "{ports:x?}");
        }
    }
}
