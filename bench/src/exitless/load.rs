//! The load: a closed loop of 4 KiB requests at random places, a fixed number of them in flight.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use ioplane_testkit::driver::{Disk, DiskOp};
use ioplane_testkit::front::FrontEnd;

use crate::guest::{PATIENCE, drain};
use ioplane_figures::machine::{Account, Books};

/// Bytes of a request.
pub const BLOCK: u32 = 4096;
/// Sectors of a request.
pub const SECTORS: u64 = BLOCK as u64 / 512;

/// How the driver learns that requests are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// It looks at the used ring all the time and wants no interrupts.
    Polling,
    /// As Linux: asks for one interrupt, sleeps on the eventfd, takes all there is, submits as many, asks again.
    Interrupts,
}

#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Read or write.
    pub op: DiskOp,
    /// Requests in flight.
    pub depth: u16,
    /// Blocks of the disk.
    pub blocks: u64,
    /// Polling or interrupts.
    pub waiting: Waiting,
    /// Not counted, first.
    pub warm: Duration,
    /// Counted.
    pub time: Duration,
}

/// What one round measured.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// Requests completed in the time counted.
    pub requests: u64,
    /// The time counted, s.
    pub seconds: f64,
    /// Latency, ns.
    pub latency: Histogram<u64>,
    /// Sum of what was written to the kick eventfd.
    pub kicks: u64,
    /// Sum of what was read from the call eventfd.
    pub interrupts: u64,
    /// Processor time of the backend, its io_uring workers included, ns.
    pub cpu_ns: u64,
    /// Processor time of all kernel threads meanwhile, whoever they worked for, ns.
    pub kernel_ns: u64,
    /// Processor time of neither side nor the kernel's threads, as a part of one processor.
    pub foreign: f64,
}

/// Xorshift: good enough to scatter requests, and costs nothing.
#[derive(Debug, Clone)]
pub struct Scatter(u64);

impl Scatter {
    /// The same places for everybody who starts with the same `seed`.
    pub fn new(seed: u64) -> Self {
        Scatter(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(limit)) >> 64) as u64
    }
}

/// A queue, from the driver's side, and whose processor time is charged for it.
pub struct Target<'a> {
    /// The connection; without one (an in-process backend) kicks are only counted and there are no interrupts.
    pub front: Option<&'a mut FrontEnd>,
    /// Queue 0.
    pub disk: &'a mut Disk,
    /// Processes of the backend.
    pub pids: Vec<u32>,
}

struct Snapshot {
    kicks: u64,
    interrupts: u64,
    books: Books,
}

impl Target<'_> {
    fn kick(&mut self, kicks: &mut u64) {
        *kicks += 1;
        if let Some(front) = &mut self.front {
            front.kick(0);
        }
    }

    fn call<R>(&mut self, act: impl FnOnce(&mut ioplane_testkit::front::EventFd) -> R) -> Option<R> {
        self.front.as_mut()?.events(0).map(|(_, call)| act(call))
    }

    fn interrupts(&mut self) -> u64 {
        let sum = self.call(|call| {
            call.take();
            call.sum()
        });
        sum.unwrap_or(0)
    }
}

/// Runs `load` on `target`: warms up, counts, and waits for what is in flight.
pub fn run(target: &mut Target<'_>, load: &Load, scatter: &mut Scatter) -> Result<Outcome> {
    let mut latency = Histogram::<u64>::new_with_bounds(1, 100_000_000_000, 2)?;
    let mut started = vec![Instant::now(); usize::from(load.depth).max(256)];
    let (mut kicks, mut requests) = (0u64, 0u64);
    let polling = load.waiting == Waiting::Polling;
    target.call(|call| call.take());
    if polling {
        target.disk.ring().disable_interrupts();
    } else {
        target.disk.ring().enable_interrupts();
    }
    for _ in 0..load.depth {
        let token = target.disk.submit(load.op, scatter.below(load.blocks) * SECTORS, BLOCK);
        started[token.context("fewer slots than the load is deep")?.slot()] = Instant::now();
    }
    if target.disk.ring().kick_needed() {
        target.kick(&mut kicks);
    }
    let begin = Instant::now();
    let mut until = begin + load.warm;
    let mut before: Option<Snapshot> = None;
    let (mut progress, mut idle) = (begin, 0u32);
    let (account, kicks, interrupts) = loop {
        // At most `depth` at a time: with a fast backend there is always one more, and kicks must not wait for ever.
        let mut batch = 0;
        let mut now = progress;
        while batch < load.depth {
            let Some(done) = target.disk.reap()? else { break };
            if batch == 0 {
                now = Instant::now();
            }
            if !done.ok() {
                bail!("a {:?} ended with status {:#x}", load.op, done.status);
            }
            let slot = done.token.slot();
            latency.saturating_record((now - started[slot]).as_nanos() as u64);
            batch += 1;
            if let Some(token) = target.disk.submit(load.op, scatter.below(load.blocks) * SECTORS, BLOCK) {
                started[token.slot()] = now;
            }
        }
        if batch > 0 {
            requests += u64::from(batch);
            progress = now;
            if target.disk.ring().kick_needed() {
                target.kick(&mut kicks);
            }
            idle = 0;
        } else if polling {
            std::hint::spin_loop();
            idle += 1;
            if idle.is_multiple_of(1024) {
                now = Instant::now();
            }
        }
        if !polling && batch < load.depth && target.disk.ring().enable_interrupts() {
            target.call(|call| call.wait(Duration::from_millis(200)));
            target.disk.ring().disable_interrupts();
            now = Instant::now();
        }
        if now >= until {
            match before.take() {
                None => {
                    latency.reset();
                    requests = 0;
                    let interrupts = target.interrupts();
                    let books = Books::open(&target.pids);
                    progress = books.opened();
                    until = progress + load.time;
                    before = Some(Snapshot { kicks, interrupts, books });
                }
                Some(start) => {
                    let account = start.books.close(&target.pids);
                    break (account, kicks - start.kicks, target.interrupts() - start.interrupts);
                }
            }
        }
        if now.saturating_duration_since(progress) > PATIENCE {
            bail!("nothing completed for {PATIENCE:?} with {} in flight", target.disk.in_flight());
        }
    };
    drain(target.disk)?;
    let Account { seconds, cpu_ns, kernel_ns, foreign, .. } = account;
    Ok(Outcome { requests, seconds, latency, kicks, interrupts, cpu_ns, kernel_ns, foreign })
}
