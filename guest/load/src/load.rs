//! A verified mixed load from its start to its last verification.
//!
//! ```text
//!   Load::start -> workers (threads * depth, each with its own chunks) -> Load::join -> Report
//!                        \-> progress() and mark() meanwhile              `-> verify() reads all again
//! ```

use crate::blockdev::{ALIGN, Aligned, Disk, failed, range};
use crate::ledger::Ledger;
use crate::protocol::{LoadSpec, Progress, Report, Times, Verified};
use crate::sector::{SECTOR, Stamp, mix};
use crate::worker::{Counts, Kind, Plan, Shared, Tally, known, run};
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What bounds a load's memory.
#[derive(Clone, Copy, Debug)]
pub struct Limits;

impl Limits {
    /// Requests in flight: each has a thread and a buffer.
    pub const WORKERS: u64 = 256;
    /// Bytes of one request.
    pub const BLOCK: u32 = 1 << 20;
    /// Bytes of all buffers together.
    pub const BUFFERS: u64 = 64 << 20;
    /// Blocks of the region: four bytes each.
    pub const BLOCKS: u64 = 16 << 20;
}

/// A load that runs or has ended.
#[derive(Debug)]
pub struct Load {
    shared: Arc<Shared>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    earlier: Mutex<Counts>,
}

impl Load {
    /// Checks the specification, opens the disk and starts the workers.
    pub fn start(spec: &LoadSpec) -> Result<Load> {
        let writes = spec.prefill || spec.mix.write + spec.mix.discard + spec.mix.zero > 0;
        let disk = Disk::open(&spec.device, writes)?;
        let started = Instant::now();
        let plan = plan(spec, &disk, started)?;
        let nonce = spec.load.bytes().fold(mix(spec.seed), |sum, byte| mix(sum ^ u64::from(byte)));
        let stamp = Stamp::new(&disk.name, nonce);
        let shared = Arc::new(Shared {
            stamp,
            ledger: Ledger::new((plan.chunks * plan.units_per_chunk) as usize),
            tally: Tally::new(started),
            started,
            stop: AtomicBool::new(false),
            in_flight: (0..plan.workers).map(|_| AtomicU64::new(0)).collect(),
            disk,
            plan,
        });
        let mut workers = Vec::new();
        for index in 0..shared.plan.workers {
            let own = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("load-{index}")).stack_size(128 << 10);
            match thread.spawn(move || run(&own, index)) {
                Ok(handle) => workers.push(handle),
                Err(error) => {
                    shared.stop.store(true, Ordering::Relaxed);
                    return Err(error).context("start a load's thread; lower threads or depth");
                }
            }
        }
        Ok(Load { shared, workers: Mutex::new(workers), earlier: Mutex::new(Counts::new(started)) })
    }

    /// Asks the workers to end after their present requests.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }

    /// Whether all workers have ended.
    pub fn ended(&self) -> bool {
        lock(&self.workers).iter().all(JoinHandle::is_finished)
    }

    /// Counts since the start, and the age of the oldest request in flight.
    pub fn progress(&self) -> Progress {
        let earlier = lock(&self.earlier).clone();
        let now = self.shared.started.elapsed();
        let begun = self.shared.in_flight.iter().map(|s| s.load(Ordering::Relaxed)).filter(|t| *t > 0).min();
        self.shared.tally.with(|counts| Progress {
            seconds: now.as_secs_f64(),
            requests: counts.requests.iter().chain(&earlier.requests).sum(),
            bytes: counts.bytes + earlier.bytes,
            errors: counts.errors + earlier.errors,
            mismatches: counts.mismatches + earlier.mismatches,
            oldest_us: begun.map_or(0, |begun| (now.as_micros() as u64 + 1).saturating_sub(begun)),
        })
    }

    /// The report of the stretch since the last mark; a new stretch begins.
    pub fn mark(&self) -> Report {
        let now = Instant::now();
        let stretch = self.shared.tally.with(|counts| std::mem::replace(counts, Counts::new(now)));
        lock(&self.earlier).add(&stretch);
        report(&stretch, now)
    }

    /// Waits for the workers to end, calling `tick` once a second, and reports the whole load.
    pub fn join(&self, mut tick: impl FnMut(Progress)) -> Report {
        let mut next = Instant::now() + Duration::from_secs(1);
        while !self.ended() {
            std::thread::sleep(Duration::from_millis(20));
            if Instant::now() >= next {
                next += Duration::from_secs(1);
                tick(self.progress());
            }
        }
        for worker in lock(&self.workers).drain(..) {
            if worker.join().is_err() {
                self.shared.tally.with(|counts| {
                    counts.errors += 1;
                    counts.problem("a worker panicked; see the guest's console".into());
                });
            }
        }
        let now = Instant::now();
        let mut whole = lock(&self.earlier).clone();
        self.shared.tally.with(|counts| whole.add(counts));
        report(&whole, now)
    }

    /// Reads everything the ended load knows once more, past the page cache, and checks it.
    pub fn verify(&self) -> Result<Verified> {
        if !self.ended() {
            bail!("the load still runs; stop it and wait for its report first");
        }
        let Shared { disk, stamp, ledger, plan, .. } = &*self.shared;
        disk.sync().context("sync before verifying")?;
        let mut found = Verified::default();
        let mut sum = Sha256::new();
        let chunk = (plan.unit * plan.units_per_chunk) as usize;
        let mut buffer = Aligned::new(chunk);
        for first in (0..ledger.len()).step_by(plan.units_per_chunk as usize) {
            let blocks = first..first + plan.units_per_chunk as usize;
            if blocks.clone().all(|block| !known(ledger.expect(block))) {
                continue;
            }
            let at = plan.offset + first as u64 * plan.unit;
            if let Err(error) = disk.read(buffer.all(), at, true) {
                found.errors += 1;
                note(&mut found.problems, failed("read", at, chunk, &error).to_string());
                continue;
            }
            for (block, bytes) in blocks.zip(buffer.all().chunks_exact(plan.unit as usize)) {
                let expect = ledger.expect(block);
                if !known(expect) {
                    continue;
                }
                found.blocks += 1;
                found.bytes += plan.unit;
                sum.update(bytes);
                let sector = (plan.offset + block as u64 * plan.unit) / SECTOR as u64;
                if let Err(mismatch) = stamp.check(bytes, sector, expect) {
                    found.mismatches += 1;
                    note(&mut found.problems, mismatch.to_string());
                }
            }
        }
        found.sha256 = hex(&sum.finalize());
        Ok(found)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop();
    }
}

fn plan(spec: &LoadSpec, disk: &Disk, started: Instant) -> Result<Plan> {
    let workers = u64::from(spec.threads.max(1)) * u64::from(spec.depth.max(1));
    if workers > Limits::WORKERS {
        bail!("threads * depth is {workers}, more than {}; lower one", Limits::WORKERS);
    }
    if spec.block_sizes.is_empty() {
        bail!("block_sizes is empty; give at least one, such as 4096");
    }
    for size in &spec.block_sizes {
        if *size == 0 || !size.is_multiple_of(disk.logical.max(512)) || *size > Limits::BLOCK {
            let (low, high) = (disk.logical.max(512), Limits::BLOCK);
            bail!("block size {size} is not a multiple of {low} up to {high}");
        }
    }
    let mix = spec.mix;
    if [mix.read, mix.write, mix.sync, mix.discard, mix.zero].iter().all(|weight| *weight == 0) {
        bail!("mix chooses nothing; give at least one weight above 0");
    }
    if mix.discard > 0 && !disk.discards {
        bail!("{} offers no discard; set mix.discard to 0", disk.name);
    }
    let unit = spec.block_sizes.iter().copied().fold(0, gcd);
    // Where pages of the cache hold several blocks, two workers must not share a page: chunks are whole pages.
    let largest = spec.block_sizes.iter().copied().max().unwrap_or(0).max(16 * ALIGN as u32);
    let chunk =
        u64::from(largest.next_multiple_of(unit)).next_multiple_of(lcm(u64::from(unit), ALIGN as u64));
    let bytes = range(disk, spec.offset, spec.bytes)?;
    let chunks = bytes / chunk;
    if chunks < workers {
        bail!(
            "the region has {bytes} bytes, {workers} workers with chunks of {chunk} need {}",
            workers * chunk
        );
    }
    if bytes / u64::from(unit) > Limits::BLOCKS {
        bail!("the region has more than {} blocks of {unit} bytes; give a smaller `bytes`", Limits::BLOCKS);
    }
    if workers * chunk > Limits::BUFFERS {
        bail!("buffers would take {} bytes, more than {}; lower depth", workers * chunk, Limits::BUFFERS);
    }
    Ok(Plan {
        offset: spec.offset,
        unit: u64::from(unit),
        units_per_chunk: chunk / u64::from(unit),
        chunks,
        workers,
        sizes: spec.block_sizes.clone(),
        mix,
        direct: spec.direct,
        prefill: spec.prefill,
        seed: spec.seed,
        until: spec.seconds.map(|seconds| started + Duration::from_secs(seconds)),
    })
}

fn report(counts: &Counts, now: Instant) -> Report {
    let seconds = now.duration_since(counts.since).as_secs_f64();
    let of = |kind: Kind| counts.requests[kind as usize];
    Report {
        seconds,
        requests: counts.requests.iter().sum(),
        reads: of(Kind::Read),
        writes: of(Kind::Write),
        syncs: of(Kind::Sync),
        discards: of(Kind::Discard),
        zeroes: of(Kind::Zero),
        bytes: counts.bytes,
        mb_per_s: counts.bytes as f64 / 1e6 / seconds.max(1e-6),
        p50_us: counts.times.value_at_quantile(0.5),
        p99_us: counts.times.value_at_quantile(0.99),
        max_us: counts.times.max(),
        times: Times(
            counts
                .times
                .iter_recorded()
                .map(|step| (step.value_iterated_to(), step.count_at_value().into()))
                .collect(),
        ),
        errors: counts.errors,
        mismatches: counts.mismatches,
        problems: counts.problems.clone(),
    }
}

fn note(problems: &mut Vec<String>, what: String) {
    if problems.len() < 8 {
        problems.push(what);
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

/// Bytes in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
