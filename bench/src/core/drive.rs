//! The generator: one thread that drives any number of queues, each with its own load, and polls their used rings.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ioplane_testkit::driver::{Disk, DiskOp};
use ioplane_testkit::front::EventFd;

use super::offered::Offered;
use crate::exitless::load::Scatter;
use crate::guest::{Guest, PATIENCE};

/// Most completions of one queue between two looks at the others.
const TURN: u32 = 256;

/// A queue and its load: reads at random places.
pub struct Flow<'a> {
    kick: Option<&'a mut EventFd>,
    disk: &'a mut Disk,
    offered: Offered,
    /// Of each request.
    bytes: u32,
    places: u64,
    scatter: Scatter,
    /// When the request in each slot was due and when it was submitted.
    times: Vec<[u64; 2]>,
    /// When nothing was done that had not been taken.
    empty_at: u64,
    /// Ask for an interrupt after each look that found something, as Linux does.
    pub interrupts: bool,
    /// Requests may fail: they are hostile.
    pub may_fail: bool,
    /// Most requests that are submitted between two looks at the other queues. What the generator takes for more of them would be counted as
    /// latency of the others.
    pub at_once: u32,
}

/// A request that is done. Times in ns since the generator began.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    /// Index of its flow.
    pub flow: usize,
    /// When it was wanted.
    pub due: u64,
    /// A moment after its submission at which it was not done.
    pub not_before: u64,
    /// After it was seen to be done.
    pub at: u64,
}

impl<'a> Flow<'a> {
    /// Reads of `bytes` by queue `queue`. Flows with the same `seed` go to the same places.
    pub fn new(guest: &'a mut Guest, queue: u16, offered: Offered, bytes: u32, seed: u64) -> Self {
        let kick = guest.front.kicks().nth(queue.into()).flatten();
        Flow::of(kick, &mut guest.queues[usize::from(queue)], guest.capacity, offered, bytes, seed)
    }

    /// Reads of `bytes` by each queue of `guest`, `depth` in flight of each, to places of its own, by seeds from `seed` on.
    pub fn each_queue(guest: &'a mut Guest, depth: u16, bytes: u32, seed: u64) -> Vec<Self> {
        let capacity = guest.capacity;
        let queues = (seed..).zip(guest.front.kicks().zip(&mut guest.queues));
        let flow =
            |(seed, (kick, disk))| Flow::of(kick, disk, capacity, Offered::Backlog(depth), bytes, seed);
        queues.map(flow).collect()
    }

    fn of(
        kick: Option<&'a mut EventFd>,
        disk: &'a mut Disk,
        capacity: u64,
        offered: Offered,
        bytes: u32,
        seed: u64,
    ) -> Self {
        // Slots are numbered from 0; a ring has no more of them than entries.
        let slots = disk.place().size;
        Flow {
            kick,
            disk,
            places: (capacity / u64::from(bytes.next_multiple_of(512))).max(1),
            offered,
            bytes,
            scatter: Scatter::new(seed),
            times: vec![[0; 2]; usize::from(slots)],
            empty_at: 0,
            interrupts: false,
            may_fail: false,
            at_once: u32::MAX,
        }
    }

    fn begin(&mut self) {
        if self.interrupts {
            self.disk.ring().enable_interrupts();
        } else {
            self.disk.ring().disable_interrupts();
        }
    }

    fn submit(&mut self, now: u64) {
        let stride = u64::from(self.bytes.next_multiple_of(512)) / 512;
        let mut submitted = 0;
        while submitted < self.at_once && self.disk.next().is_some() {
            let in_flight = self.disk.in_flight();
            let Some(due) = self.offered.due(now, in_flight) else { break };
            let (sector, bytes) = (self.scatter.below(self.places) * stride, self.bytes);
            if let Some(token) = self.disk.submit(DiskOp::Read, sector, bytes) {
                self.times[token.slot()] = [due, now];
                submitted += 1;
            }
        }
        if submitted > 0
            && self.disk.ring().kick_needed()
            && let Some(kick) = &mut self.kick
        {
            kick.signal();
        }
    }

    /// Takes what is done; whether anything was. It is `now`, or a little later.
    fn reap(
        &mut self,
        index: usize,
        now: u64,
        begin: Instant,
        done: &mut impl FnMut(Completion),
    ) -> Result<bool> {
        let (mut count, mut at) = (0, 0);
        while count < TURN {
            let Some(one) = self.disk.reap()? else { break };
            if count == 0 {
                at = ns(begin.elapsed());
            }
            ensure!(one.ok() || self.may_fail, "a read ended with status {:#x}", one.status);
            ensure!(!one.ok() || one.len == self.bytes + 1, "a read of {} gave {}", self.bytes, one.len);
            let [due, submitted] = self.times[one.token.slot()];
            done(Completion { flow: index, due, not_before: submitted.max(self.empty_at), at });
            count += 1;
        }
        if count < TURN {
            self.empty_at = now;
        }
        if self.interrupts && count > 0 {
            self.disk.ring().enable_interrupts();
        }
        Ok(count > 0)
    }
}

/// Drives `flows` for `time`, then takes what is in flight without telling of it. `done` must not take long.
pub fn drive(flows: &mut [Flow<'_>], time: Duration, done: impl FnMut(Completion)) -> Result<()> {
    drive_and_watch(flows, time, done, |_, _| {})
}

/// As [`drive`], and tells when each turn of the generator began and the one before, ns: by so much each queue may have been looked at too late.
pub fn drive_and_watch(
    flows: &mut [Flow<'_>],
    time: Duration,
    done: impl FnMut(Completion),
    turn: impl FnMut(u64, u64),
) -> Result<()> {
    drive_while(flows, |now| now < ns(time), done, turn)
}

/// The same for as long as `goes_on` says so of the time, ns.
pub fn drive_while(
    flows: &mut [Flow<'_>],
    mut goes_on: impl FnMut(u64) -> bool,
    mut done: impl FnMut(Completion),
    mut turn: impl FnMut(u64, u64),
) -> Result<()> {
    flows.iter_mut().for_each(Flow::begin);
    let begin = Instant::now();
    let (mut last, mut progress) = (0, 0);
    let end = loop {
        let now = ns(begin.elapsed());
        if !goes_on(now) {
            break now;
        }
        turn(now, last);
        last = now;
        let mut waiting = 0;
        for (index, flow) in flows.iter_mut().enumerate() {
            if flow.reap(index, now, begin, &mut done)? {
                progress = now;
            }
            flow.submit(now);
            waiting += u32::from(flow.disk.in_flight());
        }
        if waiting == 0 {
            progress = now;
        }
        ensure!(now - progress < ns(PATIENCE), "nothing completed for {PATIENCE:?} with {waiting} in flight");
    };
    for flow in flows {
        flow.interrupts = false;
        flow.begin();
        let last = Instant::now();
        while flow.disk.in_flight() > 0 {
            flow.reap(0, end, begin, &mut |_| {})?;
            ensure!(last.elapsed() < PATIENCE, "{} requests were never completed", flow.disk.in_flight());
        }
    }
    Ok(())
}

/// Requests per second of one flow, after an eighth of the time to warm up.
pub fn rate(flow: Flow<'_>, time: Duration) -> Result<f64> {
    let (mut count, warm) = (0u64, ns(time) / 8);
    drive(&mut [flow], time, |completion| count += u64::from(completion.at >= warm))?;
    Ok(count as f64 / (ns(time) - warm) as f64 * 1e9)
}

pub fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}
