//! The machine: what it is, who used its processors, and keeping work on the processor it was given.

use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Value, json};

/// The processor of the load generator and the processor of the backend.
#[derive(Debug, Clone, Copy)]
pub struct Cpus {
    /// Where the generator polls.
    pub front: usize,
    /// Where everything of the backend runs.
    pub back: usize,
}

impl Cpus {
    /// The first two processors that this process may use.
    pub fn choose() -> Result<Self> {
        let allowed = sched_getaffinity(None)?;
        let mut each = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
        match (each.next(), each.next()) {
            (Some(front), Some(back)) => Ok(Cpus { front, back }),
            _ => bail!(
                "two processors are needed, one for each side; this process may use only one (see taskset -p $$)"
            ),
        }
    }
}

/// Keeps the calling thread, and whatever it starts from now on, on `cpu`.
pub fn pin(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("pinning to processor {cpu}"))
}

/// Lets the calling thread, and whatever it starts from now on, run on both.
///
/// # Errors
/// When this process may not use them.
pub fn spread(cpus: Cpus) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpus.front);
    set.set(cpus.back);
    sched_setaffinity(None, &set).context("leaving a processor")
}

/// A cpuset of the kernel's, for the threads that an affinity does not bind: io_uring's workers follow their cpuset.
/// Taken away when dropped. Absent (with the reason) where this host has none to give.
pub struct CpuRoom {
    path: Option<PathBuf>,
    why_not: Option<String>,
}

impl CpuRoom {
    /// A room with processor `cpu` alone.
    pub fn new(cpu: usize) -> Self {
        let name = format!("ioplane-bench-{}", std::process::id());
        let mut why_not = String::new();
        for root in ["/sys/fs/cgroup/cpuset", "/sys/fs/cgroup"] {
            let path = PathBuf::from(root).join(&name);
            match Self::furnish(&path, cpu) {
                Ok(()) => return CpuRoom { path: Some(path), why_not: None },
                Err(error) => {
                    let _ = fs::remove_dir(&path);
                    why_not = format!("{root}: {error}");
                }
            }
        }
        CpuRoom { path: None, why_not: Some(why_not) }
    }

    fn furnish(path: &PathBuf, cpu: usize) -> std::io::Result<()> {
        if !path.with_file_name("cgroup.procs").exists() {
            return Err(std::io::Error::other("no cgroup there"));
        }
        fs::create_dir_all(path)?;
        fs::write(path.join("cpuset.cpus"), cpu.to_string())?;
        let mems = fs::read_to_string(path.with_file_name("cpuset.mems")).unwrap_or_else(|_| "0".into());
        fs::write(path.join("cpuset.mems"), mems.trim())
    }

    /// Moves the process in.
    pub fn take(&self, pid: u32) {
        if let Some(path) = &self.path {
            let _ = fs::write(path.join("cgroup.procs"), pid.to_string());
        }
    }

    /// What binds kernel workers, in words.
    pub fn describe(&self) -> String {
        match &self.why_not {
            None => "cpuset: threads and io_uring workers".into(),
            Some(why) => format!("affinity of threads only; io_uring workers may stray ({why})"),
        }
    }
}

impl Drop for CpuRoom {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The backends were killed; the kernel empties the room when the last of them is reaped.
            for _ in 0..50 {
                if fs::remove_dir(path).is_ok() {
                    return;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        }
    }
}

/// Time on a processor of every thread of the processes, io_uring's workers (`iou-wrk-*`) included, in ns by thread.
#[derive(Debug, Clone, Default)]
pub struct CpuTimes(HashMap<(u32, u32), u64>);

impl CpuTimes {
    /// Reads `/proc/PID/task/*/schedstat`.
    pub fn of(pids: &[u32]) -> Self {
        let mut times = HashMap::new();
        for &pid in pids {
            let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for task in tasks.flatten() {
                let Some(tid) = task.file_name().to_str().and_then(|name| name.parse().ok()) else {
                    continue;
                };
                if let Some(ns) = schedstat(&task.path().join("schedstat")) {
                    times.insert((pid, tid), ns);
                }
            }
        }
        CpuTimes(times)
    }

    /// The same of all kernel threads (children of kthreadd).
    pub fn of_kernel() -> Self {
        let mut times = HashMap::new();
        let Ok(all) = fs::read_dir("/proc") else { return Self::default() };
        for process in all.flatten() {
            let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            // Kernel threads have no memory of their own: statm is all zeros.
            let kernel = fs::read_to_string(process.path().join("statm")).is_ok_and(|s| s.starts_with("0 "));
            if kernel && let Some(ns) = schedstat(&process.path().join("schedstat")) {
                times.insert((pid, pid), ns);
            }
        }
        CpuTimes(times)
    }

    /// What was used since `before`, in ns. A thread that ended in between is not in it.
    pub fn since(&self, before: &Self) -> u64 {
        self.0.iter().map(|(task, ns)| ns.saturating_sub(before.0.get(task).copied().unwrap_or(0))).sum()
    }
}

/// Who used how much processor time between two moments.
pub struct Books {
    at: Instant,
    cpu: CpuTimes,
    own: CpuTimes,
    kernel: CpuTimes,
    busy: u64,
}

/// Interrupts so far by which one processor has woken or called another: the lines RES and CAL of `/proc/interrupts`, of all processors. In a virtual
/// machine each is an exit of both. `None` where the kernel does not count them under these names.
pub fn processor_interrupts() -> Option<u64> {
    interrupts_between(&fs::read_to_string("/proc/interrupts").ok()?)
}

fn interrupts_between(text: &str) -> Option<u64> {
    let counts = text.lines().filter_map(|line| {
        let (name, counts) = line.trim_start().split_once(':')?;
        matches!(name, "RES" | "CAL")
            .then(|| counts.split_whitespace().map_while(|count| count.parse::<u64>().ok()).sum())
    });
    counts.reduce(|sum: u64, line| sum + line)
}

/// What [`Books`] say when they are closed.
#[derive(Debug, Clone, Copy)]
pub struct Account {
    /// The time between, s.
    pub seconds: f64,
    /// Processor time of the backend, its io_uring workers included, ns.
    pub cpu_ns: u64,
    /// Processor time of this process, the generator, ns.
    pub own_ns: u64,
    /// Processor time of all kernel threads meanwhile, whoever they worked for, ns.
    pub kernel_ns: u64,
    /// Processor time of neither side nor the kernel's threads, as a part of one processor.
    pub foreign: f64,
}

impl Account {
    /// How much of the time the generator, or a backend that polls, was not on its processor: what others took.
    pub fn disturbance(&self) -> f64 {
        let least = self.own_ns.min(self.cpu_ns) as f64;
        (1.0 - least / (self.seconds * 1e9)).clamp(0.0, 1.0)
    }
}

impl Books {
    /// From now on; `pids` are the backend's processes.
    pub fn open(pids: &[u32]) -> Self {
        let kernel = CpuTimes::of_kernel();
        let own = CpuTimes::of(&[std::process::id()]);
        let cpu = CpuTimes::of(pids);
        // The clock last, so that what the books cost is not in the time counted.
        let busy = busy();
        Books { at: Instant::now(), cpu, own, kernel, busy }
    }

    /// When they were opened.
    pub fn opened(&self) -> Instant {
        self.at
    }

    /// Until now.
    pub fn close(self, pids: &[u32]) -> Account {
        let at = Instant::now();
        let end = Books::open(pids);
        let (cpu_ns, own_ns) = (end.cpu.since(&self.cpu), end.own.since(&self.own));
        let kernel_ns = end.kernel.since(&self.kernel);
        let seconds = (at - self.at).as_secs_f64();
        let busy = (end.busy - self.busy) as f64;
        let foreign = ((busy - (cpu_ns + own_ns + kernel_ns) as f64) / (seconds * 1e9)).max(0.0);
        Account { seconds, cpu_ns, own_ns, kernel_ns, foreign }
    }
}

fn schedstat(path: &std::path::Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

/// Busy time of all processors in user and system mode and what the hypervisor took, in ns (resolution 10 ms).
fn busy() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> = stat.split_whitespace().skip(1).take(8).filter_map(|f| f.parse().ok()).collect();
    // user, nice, system; steal is the eighth. Idle, iowait and the interrupts (ours and everybody's) are left out.
    [0, 1, 2, 7].iter().filter_map(|at| fields.get(*at)).sum::<u64>() * 10_000_000
}

/// How long the processors of this machine have had nothing to do.
pub struct Idle {
    at: Instant,
    idle: Duration,
}

/// How long they have had something to do between two moments.
#[derive(Debug, Clone, Copy)]
pub struct Busy {
    /// The time between, s.
    pub seconds: f64,
    /// Busy time of all processors together: whatever is not idle, interrupts and what the hypervisor took included; s.
    pub busy: f64,
}

impl Idle {
    /// Until now.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read.
    pub fn now() -> Result<Self> {
        Ok(Idle {
            at: Instant::now(),
            idle: Duration::from_nanos(idle(&fs::read_to_string("/proc/stat")?).1),
        })
    }

    /// From then until now.
    ///
    /// # Errors
    /// As [`Idle::now`].
    pub fn busy_since(&self) -> Result<Busy> {
        let text = fs::read_to_string("/proc/stat")?;
        let seconds = self.at.elapsed().as_secs_f64();
        let (processors, now) = idle(&text);
        let idle = Duration::from_nanos(now).saturating_sub(self.idle).as_secs_f64();
        Ok(Busy { seconds, busy: seconds * processors as f64 - idle })
    }
}

/// How many processors there are, and how long all of them together have been idle, ns. With ticks that stop while a processor is idle
/// (NO_HZ) the kernel counts this by the clock; the steps are those of USER_HZ.
fn idle(stat: &str) -> (usize, u64) {
    let processors = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
    let fields: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|field| field.parse().ok())
        .collect();
    // user, nice, system, idle, iowait.
    (processors, fields.iter().skip(3).take(2).sum::<u64>() * 10_000_000)
}

/// The threads of `pid` that are io_uring workers, and the processors they may use.
pub fn io_workers(pid: u32) -> Vec<String> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut found = Vec::new();
    for task in tasks.flatten() {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let field = |name: &str| {
            status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_string())
        };
        if field("Name:").is_some_and(|name| name.starts_with("iou-")) {
            found.extend(field("Cpus_allowed_list:"));
        }
    }
    found
}

/// What the figures were measured on.
pub fn describe() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |text: &str, name: &str| {
        let value = text.lines().find(|line| line.starts_with(name)).and_then(|line| line.split(':').nth(1));
        value.unwrap_or("").trim().to_string()
    };
    json!({
        "cpu": field(&cpuinfo, "model name"),
        "cpus": cpuinfo.lines().filter(|line| line.starts_with("processor")).count(),
        "virtual": cpuinfo.contains(" hypervisor "),
        "memory": field(&read("/proc/meminfo"), "MemTotal"),
        "kernel": read("/proc/sys/kernel/osrelease").trim(),
    })
}

/// The commit of the tree, with `-dirty` where it is.
pub fn commit() -> String {
    let output =
        std::process::Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12"]).output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().into(),
        _ => "unknown".into(),
    }
}

/// The command that makes the figures again: `script/bench`, the benchmark's name, its options.
pub fn command() -> String {
    let mut words: Vec<String> = std::env::args().collect();
    let program = words.first().map(|path| path.rsplit('/').next().unwrap_or(path).to_string());
    words.drain(..words.len().min(1));
    let name = match program.as_deref() {
        Some("ioplane-exits-bench") if words.iter().any(|word| word == "--clusters") => {
            words.retain(|word| word != "--clusters");
            "exits-clusters "
        }
        Some("ioplane-exits-bench") if words.iter().any(|word| word == "--sweeps") => {
            words.retain(|word| word != "--sweeps");
            "exits-sweeps "
        }
        Some("ioplane-exits-bench") => "exits ",
        Some("ioplane-migrate-bench") => "migrate ",
        Some("ioplane-passthrough-bench") => "passthrough ",
        Some("ioplane-elvis") => "elvis-guests ",
        _ => "",
    };
    format!("script/bench {name}{}", words.join(" ")).trim_end().to_string()
}

/// Today, in UTC.
pub fn date() -> String {
    let output = std::process::Command::new("date").args(["-u", "+%Y-%m-%d"]).output();
    output.map_or_else(|_| "unknown".into(), |output| String::from_utf8_lossy(&output.stdout).trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_that_of_all_processors_waiting_for_disks_included() {
        let text = "cpu  10 20 30 400 5 6 7 8 0 0\ncpu0 5 10 15 200 5 6 7 8 0 0\ncpu1 5 10 15 200 0 0 0 0 0 0\nintr 1 2\n";
        assert_eq!(idle(text), (2, 4_050_000_000));
        assert_eq!(idle(""), (0, 0));
    }

    #[test]
    fn interrupts_between_processors_are_those_of_both_lines_and_all_processors() {
        let text = "           CPU0       CPU1\n  0:  5  5  IO-APIC  timer\nLOC:  9  9  Local timer interrupts\n\
                    RES:   1897   1420   Rescheduling interrupts\nCAL:     20      3   Function call interrupts\n";
        assert_eq!(interrupts_between(text), Some(1897 + 1420 + 20 + 3));
        assert_eq!(interrupts_between("IPI0:  4  4  Rescheduling interrupts\n"), None);
    }
}
