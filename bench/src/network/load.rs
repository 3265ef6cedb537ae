//! The loads: as fast as the ring takes frames, at a rate, and one frame to and fro.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, poll};

use super::frame::Stamp;
use super::nic::{Nic, RING};
use ioplane_figures::machine::{Account, Books};

/// Most frames sent or taken at one queue before the next one's turn.
const BATCH: u32 = 64;
/// Give up when nothing comes for this long.
const PATIENCE: Duration = Duration::from_secs(10);
/// What was sent and did not come within this time is lost.
const LATE: Duration = Duration::from_millis(20);

/// Two NICs and the way between them, `a` the one that streams.
pub struct Path {
    /// Sends.
    pub a: Nic,
    /// Receives.
    pub b: Nic,
    /// The last number seen of each flow of `a`, and of `b`.
    seen: [Vec<u64>; 2],
    /// Whether frames arrive with their stamps: not through a backend that copies nothing.
    pub stamped: bool,
}

/// How frames are sent.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Frames a second; as fast as the rings take them without.
    pub rate: Option<f64>,
    /// Sleeps on the eventfds when there is nothing to do, as a guest with interrupts; else looks all the time.
    pub sleeps: bool,
    /// Not counted, first.
    pub warm: Duration,
    /// Counted.
    pub time: Duration,
}

/// What one round measured.
#[derive(Debug, Clone, Copy)]
pub struct Outcome {
    /// Frames that arrived in the time counted.
    pub frames: u64,
    /// Frames that were sent and never arrived, warming up included.
    pub lost: u64,
    /// Frames that were sent, warming up included.
    pub sent: u64,
    /// Frames that were due at the rate and could not be sent.
    pub owed: u64,
    /// Kicks of both NICs.
    pub kicks: u64,
    /// Interrupts of both NICs.
    pub interrupts: u64,
    /// Time and processor time.
    pub account: Account,
}

impl Path {
    /// A path whose frames are all new.
    pub fn new(a: Nic, b: Nic) -> Self {
        let flows = |nic: &Nic| vec![0; usize::from(nic.shape.pairs * RING)];
        let seen = [flows(&a), flows(&b)];
        Path { a, b, seen, stamped: true }
    }

    fn pairs(&self) -> u16 {
        self.a.shape.pairs
    }

    /// Sends what is due, pair by pair; how many frames went.
    #[inline]
    fn send(&mut self, due: u64) -> Result<u32> {
        let mut went = 0;
        for pair in 0..self.pairs() {
            let most = due.saturating_sub(u64::from(went)).min(BATCH.into()) as u32;
            went += self.a.send(pair, most)?;
        }
        Ok(went)
    }

    /// Takes what came; how many frames.
    #[inline]
    fn receive(&mut self) -> Result<u32> {
        let mut came = 0;
        for pair in 0..self.pairs() {
            let (seen, stamped) = (&mut self.seen[0], self.stamped);
            came += self.b.receive(pair, BATCH, |stamp| if stamped { mark(seen, stamp) } else { Ok(()) })?;
        }
        Ok(came)
    }

    /// Streams from `a` to `b`; `pids` are the backend's.
    pub fn stream(&mut self, load: &Load, pids: &[u32]) -> Result<Outcome> {
        self.a.quiet();
        self.b.quiet();
        let sent_before = self.sent();
        let (mut frames, mut arrived) = (0u64, 0u64);
        let mut went = 0u64;
        let begin = Instant::now();
        let mut until = begin + load.warm;
        let mut paced_from = begin;
        let mut before: Option<(Books, u64, u64)> = None;
        let (mut progress, mut now, mut turn) = (begin, begin, 0u32);
        let (account, kicks, interrupts, owed) = loop {
            let due = load.rate.map_or(u64::MAX, |rate| ((now - paced_from).as_secs_f64() * rate) as u64);
            let sent = self.send(due.saturating_sub(went))?;
            went += u64::from(sent);
            let came = self.receive()?;
            frames += u64::from(came);
            arrived += u64::from(came);
            turn = turn.wrapping_add(1);
            if sent == 0 && came == 0 {
                if load.sleeps {
                    self.sleep()?;
                    now = Instant::now();
                }
                std::hint::spin_loop();
            }
            // The clock costs as much as a frame: without a rate to keep it is read every few turns.
            if load.rate.is_none() && !turn.is_multiple_of(16) {
                continue;
            }
            now = Instant::now();
            if came > 0 {
                progress = now;
            }
            if now >= until {
                match before.take() {
                    None => {
                        let (kicks, interrupts) = self.notifications();
                        let books = Books::open(pids);
                        (progress, paced_from, now) = (books.opened(), books.opened(), books.opened());
                        (went, frames) = (0, 0);
                        until = now + load.time;
                        before = Some((books, kicks, interrupts));
                    }
                    Some((books, kicks, interrupts)) => {
                        let account = books.close(pids);
                        let (k, i) = self.notifications();
                        let owed = if load.rate.is_some() { due.saturating_sub(went) } else { 0 };
                        break (account, k - kicks, i - interrupts, owed);
                    }
                }
            }
            if now.saturating_duration_since(progress) > PATIENCE {
                bail!("no frame came for {PATIENCE:?}");
            }
        };
        let sent = self.sent() - sent_before;
        arrived += self.drain()?;
        let lost = sent.saturating_sub(arrived);
        Ok(Outcome { frames, lost, sent, owed, kicks, interrupts, account })
    }

    fn sent(&self) -> u64 {
        (0..self.pairs()).map(|pair| self.a.sent(pair)).sum()
    }

    fn notifications(&mut self) -> (u64, u64) {
        let ((ka, ia), (kb, ib)) = (self.a.notifications(), self.b.notifications());
        (ka + kb, ia + ib)
    }

    /// Waits until all that was sent has been used and nothing comes any more; how many frames came meanwhile.
    pub fn drain(&mut self) -> Result<u64> {
        self.a.quiet();
        self.b.quiet();
        let begin = Instant::now();
        let (mut last, mut came) = (begin, 0);
        loop {
            let frames = self.receive()?;
            let left = self.a.reap()? + self.b.reap()?;
            let now = Instant::now();
            if frames > 0 || left > 0 {
                last = now;
            }
            came += u64::from(frames);
            if now - last > LATE {
                return Ok(came);
            }
            ensure!(now - begin < PATIENCE, "{left} frames were never sent");
        }
    }

    /// Asks for interrupts as Linux's driver does (receive: at the next buffer; transmit, only when the ring is full: when
    /// three quarters are back) and sleeps until the first, unless there is something to do.
    fn sleep(&mut self) -> Result<()> {
        let mut quiet = true;
        for belt in &mut self.b.rx {
            quiet &= belt.wake_after(1);
        }
        for belt in &mut self.a.tx {
            let full = belt.in_flight() == belt.slots().count;
            if full {
                quiet &= belt.wake_after(belt.in_flight() / 4 * 3);
            }
        }
        if quiet {
            wait(&[&self.a, &self.b], Duration::from_millis(10))?;
            self.notifications();
        }
        self.a.quiet();
        self.b.quiet();
        Ok(())
    }

    /// One frame to and fro for `time`, from the first pair to wherever it arrives; round trips in ns.
    pub fn ping(&mut self, time: Duration) -> Result<Histogram<u64>> {
        let mut trips = Histogram::<u64>::new_with_bounds(1, 100_000_000_000, 2)?;
        self.a.quiet();
        self.b.quiet();
        let begin = Instant::now();
        let mut start = begin;
        let warm = time / 8;
        while start - begin < time {
            ensure!(self.a.send(0, 1)? == 1, "no room for one frame");
            self.one(true, start)?;
            ensure!(self.b.send(0, 1)? == 1, "no room for one frame");
            self.one(false, start)?;
            let now = Instant::now();
            if start - begin > warm {
                trips.saturating_record((now - start).as_nanos() as u64);
            }
            start = now;
        }
        self.drain()?;
        Ok(trips)
    }

    /// Waits for one frame at `b` (or at `a`).
    fn one(&mut self, at_b: bool, since: Instant) -> Result<()> {
        let mut turn = 0u32;
        let pairs = self.pairs();
        loop {
            let (nic, seen) =
                if at_b { (&mut self.b, &mut self.seen[0]) } else { (&mut self.a, &mut self.seen[1]) };
            for pair in 0..pairs {
                if nic.receive(pair, 1, |stamp| mark(seen, stamp))? > 0 {
                    return Ok(());
                }
            }
            turn = turn.wrapping_add(1);
            if turn.is_multiple_of(4096) && since.elapsed() > PATIENCE {
                bail!("a single frame was lost on its way to {}", if at_b { "b" } else { "a" });
            }
            std::hint::spin_loop();
        }
    }
}

/// A frame of each flow comes once, and after the one before it.
#[inline]
fn mark(seen: &mut [u64], stamp: Stamp) -> Result<()> {
    match seen.get_mut(usize::from(stamp.flow)) {
        Some(last) if *last < stamp.number => {
            *last = stamp.number;
            Ok(())
        }
        Some(last) => bail!("frame {} of flow {} came after {last}", stamp.number, stamp.flow),
        None => bail!("a frame that nobody sent: {stamp:?}"),
    }
}

/// Sleeps until a call of any queue of `nics`, or until `time` is over.
pub fn wait(nics: &[&Nic], time: Duration) -> Result<()> {
    let calls = nics.iter().flat_map(|nic| nic.calls());
    let mut fds: Vec<_> = calls.map(|call| PollFd::new(call, PollFlags::IN)).collect();
    poll(&mut fds, time.try_into().ok().as_ref())?;
    Ok(())
}
