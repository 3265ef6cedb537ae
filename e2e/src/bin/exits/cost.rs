//! What the profiler costs the guest that is watched.

use super::{MINUTE, exits};
use anyhow::{Context, Result, bail, ensure};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::pairs::{Compared, alternate};
use ioplane_e2e::{Job, L1, Planted};
use ioplane_figures::goals::UNRESOLVED;
use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fmt::{Display, Formatter};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

/// Exits of each kind in a native run, how many runs each way in a row, and how often that is done.
const TIMES: u16 = 1000;
const RUNS: usize = 8;
const ROUNDS: usize = 24;
/// By then a watcher has found out what fires here, and asks for that alone.
const WARM: Duration = Duration::from_secs(1);
/// Of each count in L1; the cost must be known within so many per cent, or is not known after so long.
const COUNTED_S: f64 = 0.5;
const LIMIT: Duration = Duration::from_secs(300);
const BOUND: f64 = 3.0;

/// On this machine's own KVM.
pub struct Native {
    pub ns_per_event: f64,
    /// ns of an exit: alone, watched, sampled, and of a guest beside one that is watched.
    pub ns_per_exit: [f64; 4],
    /// Hits of tracepoints for each exit.
    pub events_per_exit: f64,
    /// Whether `kvm_exit` fires.
    pub whole: bool,
}

impl Native {
    /// So many per cent fewer exits a second: watched, sampled, beside one that is watched.
    pub fn cost_percent(&self) -> [f64; 3] {
        let [alone, watched, sampled, beside] = self.ns_per_exit;
        [watched, sampled, beside].map(|ns| (1.0 - alone / ns) * 100.0)
    }

    pub fn table(&self) -> String {
        let [full, one_in_100, neighbour] = self.cost_percent();
        let [alone, watched, sampled, beside] = self.ns_per_exit;
        format!(
            "\nNatively, a guest that does nothing but exit ({}): {alone:.0} ns an exit, watched {watched:.0} ns ({full:.1} % fewer a \
             second), one in a hundred {sampled:.0} ns ({one_in_100:.1} %), beside one that is watched {beside:.0} ns ({neighbour:.1} %); \
             {:.2} events an exit, {:.0} ns an event\n",
            if self.whole { "kvm_exit fires" } else { "a software KVM, where kvm_exit never fires" },
            self.events_per_exit,
            self.ns_per_event,
        )
    }
}

/// The tiny guest; it runs when it is told to.
pub(super) struct Tiny {
    child: Child,
    input: ChildStdin,
}

impl Tiny {
    fn start() -> Result<Tiny> {
        Self::start_as(&[&TIMES.to_string()], &[])
    }

    /// With other words, and with more in its environment.
    pub(super) fn start_as(words: &[&str], environment: &[(&str, &OsStr)]) -> Result<Tiny> {
        let own = std::env::current_exe()?;
        let program: PathBuf = own.parent().context("a folder")?.join("examples/tiny-guest");
        let mut child = Command::new(&program)
            .args(words)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("run {}", program.display()))?;
        let input = child.stdin.take().context("standard input")?;
        let mut line = String::new();
        BufReader::new(child.stderr.take().context("standard error")?).read_line(&mut line)?;
        if line.trim() != "ready" {
            let _ = child.kill();
            child.wait()?;
            bail!("no guest runs here: {}", line.trim());
        }
        Ok(Tiny { child, input })
    }

    /// Runs it: how many exits, and ns for all of them.
    pub(super) fn go(&mut self) -> Result<(f64, f64)> {
        self.input.write_all(b"go\n")?;
        let mut line = String::new();
        BufReader::new(self.child.stdout.as_mut().context("standard output")?).read_line(&mut line)?;
        let truth: Value = serde_json::from_str(&line)?;
        let sites = truth["sites"].as_array().into_iter().flatten();
        let all: u64 = sites.filter_map(|site| site["exits"].as_u64()).sum();
        Ok((all as f64, truth["ns"].as_f64().context("ns")?))
    }

    /// The same so often: how many exits, and ns for one.
    fn runs(&mut self, times: usize) -> Result<(f64, f64)> {
        let (mut exits, mut ns) = (0.0, 0.0);
        for _ in 0..times {
            let run = self.go()?;
            exits += run.0;
            ns += run.1;
        }
        Ok((exits, ns / exits))
    }

    /// The same for so long: how many exits.
    fn runs_for(&mut self, time: Duration) -> Result<f64> {
        let begun = Instant::now();
        let mut exits = 0.0;
        while begun.elapsed() < time {
            exits += self.go()?.0;
        }
        Ok(exits)
    }

    pub(super) fn end(mut self) -> Result<()> {
        self.input.write_all(b"end\n")?;
        self.child.wait()?;
        Ok(())
    }
}

/// Somebody watches a guest, until it ends.
struct Watcher(Child);

impl Watcher {
    fn start(guest: &Tiny, options: &[&str]) -> Result<Watcher> {
        // tracefs may not be mounted here: it is, for the watch alone.
        let mount = "mount -t tracefs ioplane /sys/kernel/tracing 2>/dev/null; exec \"$0\" \"$@\"";
        let mut child = Command::new("unshare")
            .args(["-m", "sh", "-c", mount])
            .arg(binary()?)
            .args(["exits", "--vm", &guest.child.id().to_string(), "--for", "1h", "--json"])
            .args(options)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut said = String::new();
        BufReader::new(child.stderr.take().context("standard error")?).read_line(&mut said)?;
        if !said.starts_with("watching") {
            let _ = child.kill();
            child.wait()?;
            bail!("{}", said.trim());
        }
        Ok(Watcher(child))
    }

    /// Ends it as Ctrl-C does: what it has seen.
    fn stop(mut self) -> Result<Value> {
        kill_process(Pid::from_child(&self.0), Signal::INT)?;
        let mut output = String::new();
        self.0.stdout.take().context("standard output")?.read_to_string(&mut output)?;
        ensure!(self.0.wait()?.success(), "{output}");
        Ok(serde_json::from_str(&output)?)
    }
}

/// Two guests that do the same: one with nobody watching, then watched and the other beside it, then sampled. A tracepoint is one for all VMs, so a guest is alone only
/// while nobody watches any. The ratios of each round count, and of those the middle ones: what else this machine does meets all of them.
pub fn native(say: &dyn Fn(&str)) -> Result<Native> {
    let mut guests = [Tiny::start()?, Tiny::start()?];
    let mut each: [Vec<f64>; 4] = Default::default();
    let (mut count, mut events, mut whole) = (0.0, 0.0, false);
    for round in 0..ROUNDS {
        // Each is the first as often as the others.
        for turn in 0..3 {
            match (turn + round) % 3 {
                0 => each[0].push(guests[0].runs(RUNS)?.1),
                1 => {
                    let watcher = Watcher::start(&guests[0], &[])?;
                    let warm = guests[0].runs_for(WARM)?;
                    let (exits, ns) = guests[0].runs(RUNS)?;
                    each[1].push(ns);
                    each[3].push(guests[1].runs(RUNS)?.1);
                    let watched = watcher.stop()?;
                    ensure!(watched["lost"] == 0, "events were lost: {:#}", watched["notes"]);
                    events += watched["events"].as_f64().unwrap_or(0.0);
                    count += exits + warm;
                    whole |= watched["by_vcpu"].as_array().is_some_and(|rows| !rows.is_empty());
                }
                _ => {
                    let watcher = Watcher::start(&guests[0], &["--sample", "100"])?;
                    let warm = guests[0].runs_for(WARM)?;
                    let (exits, ns) = guests[0].runs(RUNS)?;
                    each[2].push(ns);
                    let sampled = watcher.stop()?;
                    let recorded = sampled["recorded"].as_f64().unwrap_or(0.0);
                    ensure!(
                        recorded > (exits + warm) / 1000.0,
                        "{recorded} of {exits} sampled: {:#}",
                        sampled["notes"]
                    );
                }
            }
        }
    }
    for guest in guests {
        guest.end()?;
    }
    let events_per_exit = events / count;
    ensure!(events_per_exit > 0.0, "no tracepoint of KVM fires here");
    let ratios =
        [1, 2, 3].map(|index| middle(each[index].iter().zip(&each[0]).map(|(one, alone)| one / alone)));
    let alone = middle(each[0].iter().copied());
    let ns_per_exit = [alone, alone * ratios[0], alone * ratios[1], alone * ratios[2]];
    say(&format!("natively: {ns_per_exit:.0?} ns an exit, of {count:.0} exits in {ROUNDS} rounds"));
    let ns_per_event = (ns_per_exit[1] - alone) / events_per_exit;
    Ok(Native { ns_per_event, ns_per_exit, events_per_exit, whole })
}

/// The mean without the fifth at either end: a slice of a sample is in every other round, so that the one in the middle would say nothing of
/// it, and the sum would say most of what else this machine does.
fn middle(all: impl Iterator<Item = f64>) -> f64 {
    let mut all: Vec<f64> = all.collect();
    all.sort_by(f64::total_cmp);
    let end = all.len() / 5;
    let middle = &all[end..all.len() - end];
    middle.iter().sum::<f64>() / middle.len() as f64
}

/// So many fewer exits.
#[derive(Serialize)]
pub struct Fewer {
    pub percent: Value,
    pub interval: Option<[f64; 2]>,
    pub pairs: usize,
}

impl Fewer {
    /// Of exits with a watcher against those without.
    fn of(compared: &Compared) -> Fewer {
        Fewer {
            percent: compared.percent.as_f64().map_or(compared.percent.clone(), |more| json!(-more)),
            interval: compared.interval.map(|[low, high]| [-high, -low]),
            pairs: compared.pairs,
        }
    }
}

impl Display for Fewer {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.percent.as_f64() {
            Some(percent) => write!(f, "{percent:.1} % fewer")?,
            None => f.write_str(UNRESOLVED)?,
        }
        match self.interval {
            Some([low, high]) => write!(f, " (95 % interval {low:.1} to {high:.1}, {} pairs)", self.pairs),
            None => write!(f, " ({} pairs)", self.pairs),
        }
    }
}

/// A guest that reads a port again and again.
fn planted(l1: &L1) -> Result<Job<'_>> {
    let planted = Planted::new();
    fs::write(l1.folder().join("planted.elf"), &planted.elf)?;
    let folder = l1.folder().display();
    let guest = l1.start(&format!(
        "exec qemu-system-x86_64 -accel kvm -cpu host -machine q35 -m 128 -nodefaults -no-user-config -display none \
         -name planted -kernel {folder}/planted.elf -chardev file,id=begun,path={folder}/begun \
         -device isa-debugcon,iobase=0xe9,chardev=begun"
    ))?;
    l1.run(&format!("while [ ! -s {folder}/begun ]; do sleep 0.1; done"), 2 * MINUTE)?;
    Ok(guest)
}

/// With stock QEMU in L1, by L1's clock. KVM's own counter tells how many exits there were, watched or not.
pub fn in_l1(l1: &L1, say: &dyn Fn(&str)) -> Result<Fewer> {
    let guest = planted(l1)?;
    // Exits a second.
    let count = || -> Result<f64> {
        let look = "cat /sys/kernel/debug/kvm/*-*/exits; date +%s%N";
        let said = l1.run(&format!("{look}; sleep {COUNTED_S}; {look}"), 2 * MINUTE)?;
        let numbers: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        let [exits, at, later, end] = numbers[..] else { bail!("four numbers: {said}") };
        Ok((later - exits) / ((end - at) / 1e9))
    };
    // It finds out what fires, and asks for that alone, within its first second.
    let watch = format!(
        "rm -f /tmp/watched; {} exits --vm planted --for 1h >/dev/null 2>/tmp/watched & watch=$!
         while ! grep -q watching /tmp/watched; do kill -0 $watch || exit 1; sleep 0.05; done; sleep 1; echo $watch",
        binary()?.display()
    );
    let fewer = Fewer::of(&alternate(BOUND, LIMIT, |watched| {
        if !watched {
            return count();
        }
        let watcher = l1.run(&watch, MINUTE)?;
        let counted = count();
        l1.run(
            &format!("kill {0}; while kill -0 {0} 2>/dev/null; do sleep 0.05; done", watcher.trim()),
            MINUTE,
        )?;
        counted
    })?);
    let report = exits(l1, "--vm planted --for 1s")?;
    say(&format!(
        "{fewer}; {} events for {} exits, {} lost",
        report["events"], report["exits"], report["lost"]
    ));
    guest.kill()?;
    Ok(fewer)
}
