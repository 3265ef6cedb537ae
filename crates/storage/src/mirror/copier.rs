//! What copies: a thread of the control side calls [`Copier::run`]; tests call [`Copier::step`] themselves.
//!
//! A *lane* copies one run of chunks: it claims the range, takes the marks away, waits until writes that were under way there have ended,
//! reads, writes, and lets writes in again. Lanes bound what is in flight, and the memory.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView};

use super::ranges::CHUNK;
use super::{MirrorFault, State, errno};
use crate::channel::{Backing, IoChannel, Op, Outcome, StorageError, Submitted, Tag};
use crate::pace::{LOOK, Pace, transit_memory, wait_for_either};

/// Runs that are copied at once, and the longest one in bytes.
const LANES: u16 = 8;
const RUN: u64 = 256 << 10;
/// The tag of a flush.
const SYNC: Tag = Tag(LANES);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Idle,
    /// Waits for the end of writes in its range.
    Claimed,
    Reading,
    Writing,
}

#[derive(Debug, Clone, Copy)]
struct Lane {
    stage: Stage,
    offset: u64,
    len: u64,
}

/// What [`Copier::step`] found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It has got on.
    Moved,
    /// It waits for a backing, or for writes of the guest.
    Waits,
    /// Nothing is marked and nothing under way.
    Clean,
}

/// Copies what is marked from the old backing to the new one.
pub struct Copier {
    state: Arc<State>,
    old: Box<dyn IoChannel>,
    new: Box<dyn IoChannel>,
    context: CoreContext,
    view: GuestView,
    lanes: [Lane; LANES as usize],
    /// Where to look next, in chunks.
    cursor: u64,
    /// How often the end of the disk has been reached.
    passes: u64,
    /// How the flush ended that was submitted last.
    synced: Option<Outcome>,
    ended: Vec<(Tag, Outcome)>,
}

impl std::fmt::Debug for Copier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copier")
            .field("lanes", &self.lanes)
            .field("passes", &self.passes)
            .finish_non_exhaustive()
    }
}

impl Copier {
    pub(super) fn new(
        old: &Arc<dyn Backing>,
        new: &Arc<dyn Backing>,
        state: &Arc<State>,
    ) -> Result<Self, StorageError> {
        let view = transit_memory(u64::from(LANES) * RUN, &**new, "making memory for copying")?;
        Ok(Copier {
            state: state.clone(),
            old: old.channel(LANES + 1)?,
            new: new.channel(LANES + 1)?,
            context: CoreContext::default(),
            view,
            lanes: [Lane { stage: Stage::Idle, offset: 0, len: 0 }; LANES as usize],
            cursor: 0,
            passes: 0,
            synced: None,
            ended: Vec::with_capacity(usize::from(LANES) + 1),
        })
    }

    /// How often it has been through the whole disk.
    pub fn passes(&self) -> u64 {
        self.passes
    }

    /// Copies until nothing is marked, until `enough` says so, or until something fails. `rate`: bytes per second at most. `enough` is asked
    /// about every millisecond, and by it the caller cancels. Returns with nothing under way unless something has failed.
    pub fn run(
        &mut self,
        rate: Option<u64>,
        enough: &mut dyn FnMut(&Copier) -> bool,
    ) -> Result<(), MirrorFault> {
        let mut pace = Pace::new(rate, RUN, Instant::now());
        let mut asked = None::<Instant>;
        loop {
            let now = Instant::now();
            let may_begin = pace.may_begin(now);
            if asked.is_none_or(|asked| now.duration_since(asked) >= LOOK) {
                asked = Some(now);
                if enough(self) {
                    return self.finish();
                }
            }
            let before = self.state.copied.load(Ordering::Relaxed);
            let step = self.step(may_begin)?;
            pace.spend(self.state.copied.load(Ordering::Relaxed) - before);
            match step {
                // An I/O core that shares the processor does not wait for the end of a slice.
                Step::Moved => std::thread::yield_now(),
                Step::Waits => self.wait(),
                Step::Clean => return Ok(()),
            }
        }
    }

    /// Brings what is under way to its end, and begins nothing.
    fn finish(&mut self) -> Result<(), MirrorFault> {
        while self.lanes.iter().any(|lane| lane.stage != Stage::Idle) {
            if self.step(false)? == Step::Waits {
                self.wait();
            }
        }
        Ok(())
    }

    /// Makes durable in the new backing what has ended there. Blocks.
    pub fn sync(&mut self) -> Result<(), MirrorFault> {
        self.synced = None;
        match self.new.submit(&mut self.context, &self.view, &Op::Flush, SYNC) {
            Submitted::Done(outcome) => self.synced = Some(outcome),
            Submitted::Pending => self.new.push(&mut self.context),
        }
        loop {
            match self.synced {
                Some(Ok(())) => return Ok(()),
                Some(Err(fault)) => return Err(self.fail(MirrorFault::New(errno(fault)))),
                None => {}
            }
            self.reap();
            if self.synced.is_none() {
                self.check()?;
                self.wait();
            }
        }
    }

    fn fail(&self, fault: MirrorFault) -> MirrorFault {
        self.state.fail(fault);
        MirrorFault::of_code(self.state.fault.load(Ordering::SeqCst)).unwrap_or(fault)
    }

    fn check(&self) -> Result<(), MirrorFault> {
        MirrorFault::of_code(self.state.fault.load(Ordering::SeqCst)).map_or(Ok(()), Err)
    }

    /// Gets on as far as it can without waiting. `may_begin`: whether lanes that are idle may take on another run.
    pub fn step(&mut self, may_begin: bool) -> Result<Step, MirrorFault> {
        self.check()?;
        let mut moved = self.reap();
        let mut searched = false;
        for lane in 0..LANES {
            if self.lanes[usize::from(lane)].stage == Stage::Idle && may_begin && !searched {
                // One run per step: with channels that do all on the spot, `enough` and the rate are asked in between.
                searched = true;
                moved |= self.claim(lane);
            }
            let Lane { stage, offset, len } = self.lanes[usize::from(lane)];
            if stage == Stage::Claimed && self.state.locks.is_free(offset, len) {
                moved = true;
                self.lanes[usize::from(lane)].stage = Stage::Reading;
                let into = [Self::memory(lane, len)];
                let op = Op::Read { offset, into: &into };
                if let Submitted::Done(outcome) =
                    self.old.submit(&mut self.context, &self.view, &op, Tag(lane))
                {
                    self.ended(Tag(lane), outcome);
                }
            }
        }
        self.old.push(&mut self.context);
        self.new.push(&mut self.context);
        self.check()?;
        let idle = self.lanes.iter().all(|lane| lane.stage == Stage::Idle);
        Ok(match idle && self.state.map.count() == 0 {
            true => Step::Clean,
            false if moved => Step::Moved,
            false => Step::Waits,
        })
    }

    fn memory(lane: u16, len: u64) -> GuestRange {
        GuestRange { gpa: u64::from(lane) * RUN, len: len as u32 }
    }

    /// Claims the next run of marked chunks for a lane. False if there is none to be had now.
    fn claim(&mut self, lane: u16) -> bool {
        let state = &self.state;
        let first = match state.map.next(self.cursor) {
            Some(chunk) => chunk,
            None => {
                self.passes += u64::from(self.cursor > 0);
                self.cursor = 0;
                match state.map.next(0) {
                    Some(chunk) => chunk,
                    None => return false,
                }
            }
        };
        let most = (first + RUN / CHUNK).min(state.map.chunks());
        let end = (first + 1..most).find(|chunk| !state.map.is_marked(*chunk)).unwrap_or(most);
        let offset = first * CHUNK;
        let len = (end * CHUNK).min(state.bytes) - offset;
        self.cursor = if end < state.map.chunks() { end } else { 0 };
        self.passes += u64::from(self.cursor == 0);
        if !state.locks.claim(offset, len) {
            return false;
        }
        state.runs.fetch_add(1, Ordering::SeqCst);
        // Before the read: a write that ends after this marks them again, or is waited for.
        for chunk in first..end {
            state.map.take(chunk);
        }
        self.lanes[usize::from(lane)] = Lane { stage: Stage::Claimed, offset, len };
        true
    }

    /// Takes in what has ended below; whether anything has.
    fn reap(&mut self) -> bool {
        let mut ended = std::mem::take(&mut self.ended);
        if self.old.in_flight() > 0 {
            self.old.reap(&mut self.context, &mut |tag, outcome| ended.push((tag, outcome)));
        }
        if self.new.in_flight() > 0 {
            self.new.reap(&mut self.context, &mut |tag, outcome| ended.push((tag, outcome)));
        }
        let any = !ended.is_empty();
        ended.drain(..).for_each(|(tag, outcome)| self.ended(tag, outcome));
        self.ended = ended;
        any
    }

    /// A step of a lane has ended. A lane is in one of the two channels at a time, so its stage says in which.
    fn ended(&mut self, tag: Tag, outcome: Outcome) {
        if tag == SYNC {
            self.synced = Some(outcome);
            return;
        }
        let lane = usize::from(tag.0);
        let Lane { stage, offset, len } = self.lanes[lane];
        match (stage, outcome) {
            (Stage::Reading, Ok(())) => {
                self.lanes[lane].stage = Stage::Writing;
                let from = [Self::memory(tag.0, len)];
                let op = match self.is_zero(from[0]) {
                    // Holes stay holes where the new backing has such.
                    true => Op::WriteZeroes { offset, len, unmap: true },
                    false => Op::Write { offset, from: &from },
                };
                if let Submitted::Done(outcome) = self.new.submit(&mut self.context, &self.view, &op, tag) {
                    self.ended(tag, outcome);
                }
            }
            (Stage::Writing, Ok(())) => {
                self.lanes[lane].stage = Stage::Idle;
                self.state.locks.release(offset, len);
                self.state.copied.fetch_add(len, Ordering::Relaxed);
                self.state.runs.fetch_sub(1, Ordering::SeqCst);
            }
            (Stage::Reading, Err(fault)) => drop(self.fail(MirrorFault::Old(errno(fault)))),
            (_, Err(fault)) => drop(self.fail(MirrorFault::New(errno(fault)))),
            (Stage::Idle | Stage::Claimed, Ok(())) => {
                debug_assert!(false, "lane {lane} has nothing under way")
            }
        }
    }

    /// Whether memory holds zeros only.
    fn is_zero(&self, range: GuestRange) -> bool {
        let mut page = [0u8; 4096];
        (0..u64::from(range.len)).step_by(page.len()).all(|at| {
            let len = page.len().min((u64::from(range.len) - at) as usize);
            self.view.read(range.gpa + at, &mut page[..len]).is_ok()
                && page[..len].iter().all(|byte| *byte == 0)
        })
    }

    /// Waits for the channels below, for [`LOOK`] at most.
    fn wait(&self) {
        wait_for_either(&*self.old, &*self.new);
    }
}

impl Drop for Copier {
    /// Nobody waits for a copier that is gone.
    fn drop(&mut self) {
        for lane in &self.lanes {
            if lane.stage != Stage::Idle {
                self.state.locks.release(lane.offset, lane.len);
            }
        }
        // What was claimed is not marked any more, and not copied.
        if self.lanes.iter().any(|lane| lane.stage != Stage::Idle) {
            self.state.fail(MirrorFault::Stopped);
        }
        self.old.detach(&mut self.context);
        self.new.detach(&mut self.context);
    }
}
