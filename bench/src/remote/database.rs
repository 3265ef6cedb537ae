//! The paper's Figure 10: a VM with a database moves to another host while it works, leaves its disk behind, and then takes it along.
//!
//! ```text
//!   local        its disk is an image of the first host
//!   prepares     the image is published, a QEMU starts on the second host
//!   moves        QEMU's migration
//!   remote       its disk is the first host's, over TCP
//!   swaps        the disk is swapped to an image of the second host
//!   local again
//! ```
//!
//! The database is this host's PostgreSQL in a guest with one vCPU, under pgbench (TPC-B-like, 4 clients, each transaction is committed to the disk). pgbench
//! says each second of the guest how many transactions there were; when it says so is taken from the host's clock, as the guest's stands still while the VM does.

use std::io::{Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ioplane_e2e::assets::{Guest, database, host_version};
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::hosts::machine;
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, Stage, play};
use ioplane_e2e::{Accelerator, Qemu, Version, Vm};
use ioplane_figures::machine::{pin, spread};
use ioplane_figures::report::{median, rounded};
use serde_json::{Map, Value, json};

use super::Bench;
use crate::measured::Figure;
use ioplane_figures::plot::{Panel, svg};

const CONFIG: &str = "[[core]]\nspin_us = 200\n";
const DISK: &str = "db";
/// Seconds that pgbench's rate settles, and that are not shown.
const SETTLE: Duration = Duration::from_secs(5);
/// How long a guest may take to boot and to start its server.
const BOOT: Duration = Duration::from_secs(180);

/// What happens, and when it begins.
const PHASES: [&str; 6] = ["local", "prepares", "moves", "remote", "swaps", "local again"];

/// Measures, with so long in each phase that lasts as long as one likes; writes the plot there. Says why not where there is no VM or no PostgreSQL.
pub fn measure(bench: &Bench, stay: Duration, plot: Option<&Path>) -> Result<Vec<(&'static str, Figure)>> {
    let news = |line: &str| eprintln!("{line}");
    let ready = host_version().and_then(|_| Guest::prepare(&news)).and_then(|_| database(&news));
    let image = match ready {
        Ok(image) => image,
        Err(why) => {
            eprintln!("a VM with a database: {why:#}");
            return Ok(vec![("database", Figure::missing(format!("no VM with a database: {why:#}")))]);
        }
    };
    // Translation needs a processor of its own, beside the daemons.
    spread(bench.place.cpus)?;
    let course = run(&image, stay);
    pin(bench.place.cpus.front)?;
    let course = course?;
    if let Some(path) = plot {
        std::fs::write(path, course.plot()).with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(vec![("database", course.figure())])
}

/// What was seen: times in s from the beginning.
struct Course {
    /// When each of [`PHASES`] began.
    began: Vec<f64>,
    /// When pgbench said that a second was over, and the transactions per second of the host since it said so before.
    seconds: Vec<(f64, f64)>,
}

fn run(image: &Path, stay: Duration) -> Result<Course> {
    let mut course = None;
    play(CONFIG, |stage| {
        let other = Daemon::start(CONFIG)?;
        let own = stage.image(DISK);
        let copied = std::process::Command::new("cp")
            .args(["--reflink=auto", "--sparse=always"])
            .args([image, &own])
            .status()?;
        ensure!(copied.success(), "copying {}", image.display());
        stage.add(DISK, &own, &[])?;
        let vm = qemu("db0", &stage.daemon)?.launch(&stage.guest)?;
        let console = Console::default();
        console.follow(&vm);
        let heard = std::thread::scope(|scope| -> Result<_> {
            let hearing = scope.spawn(|| console.hear());
            let done = phases(stage, &other, vm, &console, stay);
            console.over.store(true, Ordering::Release);
            let heard = hearing.join().map_err(|_| anyhow!("the thread that reads the console panicked"))?;
            Ok((done.with_context(|| format!("the second host's daemon:\n{}", other.log()))?, heard?))
        })?;
        course = Some(Course::new(&heard.0, &heard.1)?);
        Ok(())
    })?;
    course.context("nothing was seen")
}

/// A QEMU of this host for the guest.
fn qemu(name: &str, host: &Daemon) -> Result<Qemu<'static>> {
    let args = host.qemu_args(Version::Host, MEMORY_MIB, &[DISK])?;
    let qemu = Qemu::new(name).version(Version::Host).memory_mib(MEMORY_MIB).args(&args);
    Ok(qemu.machine(&machine()?))
}

/// Goes through all phases; when each began, and when the last one ended.
fn phases(
    stage: &Stage,
    other: &Daemon,
    mut vm: Vm,
    console: &Console,
    stay: Duration,
) -> Result<Vec<Instant>> {
    let mut began = Vec::new();
    let mut begin = |phase: usize| {
        stage.say(format!("the database's disk: {}", PHASES[phase]));
        began.push(Instant::now());
    };
    console.until_works(BOOT).map_err(|error| vm.explain(error))?;
    std::thread::sleep(SETTLE);
    begin(0);
    std::thread::sleep(stay);

    begin(1);
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    stage.daemon.cli(&["publish", "disk", "published", "--disk", DISK, "--listen", &listen, "--plain"])?;
    other.cli(&["disk", "add", DISK, "--remote", &format!("nbd://{listen}/published")])?;
    let mut next = qemu("db1", other)?.incoming().launch(&stage.guest)?;
    console.follow(&next);
    // It goes on as soon as it has arrived, and does not wait for us.
    next.qmp().execute("cont", json!({}))?;
    begin(2);
    vm.send_to(&mut next).map_err(|error| next.explain(vm.explain(error)))?;
    begin(3);
    // It has no guest any more.
    drop(vm);
    console.until_works(MINUTE).map_err(|error| next.explain(error))?;
    std::thread::sleep(stay);

    begin(4);
    let copy = stage.image("copy");
    other.cli(&["swap", DISK, "--to", copy.to_str().context("the image's path is not UTF-8")?])?;
    begin(5);
    let backing = other.cli(&["disk", "show", DISK])?["backing"].to_string();
    ensure!(backing.contains("copy.img"), "after the swap its disk is {backing}");
    std::thread::sleep(stay);
    console.until_works(MINUTE).map_err(|error| next.explain(error))?;
    began.push(Instant::now());
    Ok(began)
}

/// A second of pgbench's.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Second {
    heard: Instant,
    /// Seconds of the guest since pgbench began.
    guest: f64,
    /// Transactions per second of the guest.
    rate: f64,
}

/// What the guest has printed, through whichever QEMU it is in.
#[derive(Default)]
struct Console {
    /// Of each QEMU, and how much of it has been read.
    paths: Mutex<Vec<(PathBuf, u64)>>,
    seconds: Mutex<Vec<Second>>,
    trouble: Mutex<Option<String>>,
    over: AtomicBool,
}

impl Console {
    fn follow(&self, vm: &Vm) {
        lock(&self.paths).push((vm.folder().join("console.log"), 0));
    }

    /// Reads until it is over.
    fn hear(&self) -> Result<Vec<Second>> {
        let mut begun = String::new();
        while !self.over.load(Ordering::Acquire) {
            let mut said = String::new();
            for (path, read) in lock(&self.paths).iter_mut() {
                // A QEMU that has ended took its folder along, and a new one has none yet.
                let Ok(mut file) = std::fs::File::open(&*path) else { continue };
                file.seek(SeekFrom::Start(*read))?;
                let mut bytes = Vec::new();
                *read += file.read_to_end(&mut bytes)? as u64;
                said += &String::from_utf8_lossy(&bytes);
            }
            let heard = Instant::now();
            begun += &said;
            while let Some((line, rest)) = begun.split_once('\n') {
                if let Some((guest, rate)) = second(line)? {
                    lock(&self.seconds).push(Second { heard, guest, rate });
                } else if line.contains("ioplane-database: pgbench ended") || line.contains("ERROR") {
                    *lock(&self.trouble) = Some(line.trim().to_owned());
                }
                begun = rest.to_owned();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        if let Some(trouble) = lock(&self.trouble).take() {
            bail!("the database: {trouble}");
        }
        Ok(lock(&self.seconds).clone())
    }

    /// Waits for two more seconds of pgbench's with transactions in them.
    fn until_works(&self, limit: Duration) -> Result<()> {
        let works = || lock(&self.seconds).iter().filter(|second| second.rate > 0.0).count();
        let (before, end) = (works(), Instant::now() + limit);
        while works() < before + 2 {
            ensure!(Instant::now() < end, "the database does not work within {limit:?}");
            if let Some(trouble) = &*lock(&self.trouble) {
                bail!("the database: {trouble}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

/// What a line of pgbench's says: the seconds since it began, and transactions per second; nothing if it is another line.
fn second(line: &str) -> Result<Option<(f64, f64)>> {
    let Some(said) = line.trim().strip_prefix("progress: ") else { return Ok(None) };
    let mut parts = said.split(", ");
    let mut number = |unit: &str| parts.next()?.strip_suffix(unit)?.trim().parse::<f64>().ok();
    let Some(found) = number(" s").zip(number(" tps")) else { return Ok(None) };
    ensure!(said.trim_end().ends_with(", 0 failed"), "transactions failed: {line}");
    Ok(Some(found))
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Course {
    fn new(began: &[Instant], seconds: &[Second]) -> Result<Self> {
        let [first, .., last] = began else { bail!("no phases") };
        let at = |moment: Instant| (moment - *first).as_secs_f64();
        let pairs = seconds.windows(2).filter(|pair| pair[0].heard >= *first && pair[1].heard <= *last);
        let seconds = pairs.map(|pair| {
            let transactions = pair[1].rate * (pair[1].guest - pair[0].guest);
            (at(pair[1].heard), transactions / (at(pair[1].heard) - at(pair[0].heard)).max(0.001))
        });
        Ok(Course { seconds: seconds.collect(), began: began.iter().map(|moment| at(*moment)).collect() })
    }

    /// The median of a phase's seconds, if it has any.
    fn median(&self, phase: usize) -> Option<f64> {
        let within = |at: f64| at >= self.began[phase] && at < self.began[phase + 1];
        let rates: Vec<f64> =
            self.seconds.iter().filter(|(at, _)| within(*at)).map(|(_, rate)| *rate).collect();
        (!rates.is_empty()).then(|| median(rates))
    }

    fn figure(&self) -> Figure {
        let rows = self
            .seconds
            .iter()
            .map(|(at, rate)| json!({ "s": rounded(*at), "transactions_per_s": rounded(*rate) }));
        let phases = PHASES.iter().enumerate().map(|(index, name)| {
            let mut phase = Map::new();
            phase.insert("phase".into(), (*name).into());
            phase.insert("from_s".into(), rounded(self.began[index]).into());
            phase.insert("transactions_per_s".into(), json!(self.median(index).map(rounded)));
            Value::from(phase)
        });
        let slowest = self.seconds.iter().map(|(_, rate)| *rate).fold(f64::INFINITY, f64::min);
        Figure::table(rows.collect())
            .beside("phases", phases.collect::<Vec<_>>())
            .beside("slowest_second_transactions_per_s", slowest)
            .beside("database", "PostgreSQL under pgbench -c 4, scale 2, fsync, one vCPU")
            .beside("guest", format!("{}, {MEMORY_MIB} MiB", Accelerator::detect()))
    }

    fn plot(&self) -> String {
        svg(&[Panel {
            title: "PostgreSQL while its VM moves and its disk follows",
            unit: "transactions per second, pgbench",
            across: "seconds",
            from: 0.0,
            step: 5.0,
            width: 760.0,
            marks: self.began.iter().copied().zip(PHASES).collect(),
            lines: vec![("transactions per second", self.seconds.clone())],
        }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_of_pgbench_is_understood() {
        let line = "progress: 77.0 s, 46.0 tps, lat 87.841 ms stddev 53.899, 0 failed\r";
        assert_eq!(second(line).unwrap(), Some((77.0, 46.0)));
        assert_eq!(second("ioplane-database: up").unwrap(), None);
        assert_eq!(second("progress: nothing").unwrap(), None);
        assert!(second("progress: 78.0 s, 46.0 tps, lat 87.841 ms stddev 53.899, 2 failed").is_err());
    }

    #[test]
    fn a_vm_that_stands_still_has_fewer_transactions_in_a_second_of_the_host() {
        let begin = Instant::now();
        let at = |ms: u64| begin + Duration::from_millis(ms);
        let second = |ms, guest, rate| Second { heard: at(ms), guest, rate };
        // For a second between the second and the third of these it stood still.
        let seconds = [second(0, 1.0, 40.0), second(1000, 2.0, 40.0), second(3000, 3.0, 40.0)];
        let began = [at(0), at(1500), at(1600), at(2000), at(2000), at(2500), at(4000)];
        let course = Course::new(&began, &seconds).unwrap();
        assert_eq!(course.seconds, [(1.0, 40.0), (3.0, 20.0)]);
        assert_eq!((course.median(0), course.median(1), course.median(5)), (Some(40.0), None, Some(20.0)));
        assert!(course.plot().contains("local again"));
    }
}
