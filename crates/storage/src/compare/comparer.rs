//! What compares: a thread of the control side calls [`Comparer::run`]; tests call [`Comparer::step`] themselves.
//!
//! A *lane* reads one run from both copies. Lanes are judged in the order in which they have begun, so that what differs is found in the
//! order of the disk. After the first pass, which looks at everything, a few more look again at what differed and had been written.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::CoreContext;
use ioplane_memory::{GuestRange, GuestView};

use super::blocks::unit;
use super::{CompareFault, Findings, SECTOR};
use crate::channel::{Backing, Fault, IoChannel, Op, Outcome, StorageError, Submitted, Tag};
use crate::mirror::Step;
use crate::mirror::ranges::DirtyMap;
use crate::pace::{LOOK, Pace, transit_memory, wait_for_either};

/// Runs that are read at once, and the longest one in bytes.
const LANES: u16 = 8;
const RUN: u64 = 256 << 10;
/// How often what differs and was written is compared again.
const AGAIN: u64 = 3;
/// How long the end of reads is waited for when nobody wants them any more.
const DRAIN: Duration = Duration::from_secs(2);
/// Bytes that are looked at in one piece.
const PAGE: usize = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Disk,
    Other,
}

#[derive(Debug, Clone, Copy, Default)]
struct Lane {
    offset: u64,
    len: u64,
    /// Whether the disk, and the other copy, has yet to be read.
    disk: bool,
    other: bool,
}

/// Compares a disk with another copy.
pub struct Comparer {
    disk: Box<dyn IoChannel>,
    other: Box<dyn IoChannel>,
    /// The sizes of both, and of their blocks.
    disk_shape: (u64, u64),
    other_shape: (u64, u64),
    context: CoreContext,
    view: GuestView,
    lanes: [Lane; LANES as usize],
    /// The lane that has begun first, and how many are under way.
    oldest: u16,
    busy: u16,
    /// Bytes of all runs that have begun.
    begun: u64,
    /// Where the pass is.
    cursor: u64,
    /// Written since the beginning.
    written: Arc<DirtyMap>,
    /// To be looked at again: it differed, and had been written.
    again: DirtyMap,
    unit: u64,
    findings: Findings,
    fault: Option<CompareFault>,
    ended: Vec<(Side, Tag, Outcome)>,
}

impl std::fmt::Debug for Comparer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Comparer")
            .field("lanes", &self.lanes)
            .field("findings", &self.findings)
            .finish_non_exhaustive()
    }
}

impl Comparer {
    pub(super) fn new(
        disk: &Arc<dyn Backing>,
        other: &Arc<dyn Backing>,
        written: &Arc<DirtyMap>,
    ) -> Result<Self, StorageError> {
        let shape = |backing: &Arc<dyn Backing>| {
            let info = backing.info();
            (info.bytes, u64::from(info.logical_block.max(1)))
        };
        let (disk_shape, other_shape) = (shape(disk), shape(other));
        let view = transit_memory(2 * u64::from(LANES) * RUN, &**other, "making memory for comparing")?;
        let bytes = disk_shape.0.min(other_shape.0);
        // Blocks are those of the map of what was written.
        let unit = unit(disk_shape.0);
        Ok(Comparer {
            disk: disk.channel(LANES)?,
            other: other.channel(LANES)?,
            disk_shape,
            other_shape,
            context: CoreContext::default(),
            view,
            lanes: [Lane::default(); LANES as usize],
            oldest: 0,
            busy: 0,
            begun: 0,
            cursor: 0,
            written: written.clone(),
            again: DirtyMap::none(bytes, unit),
            unit,
            findings: Findings { bytes, ..Findings::default() },
            fault: None,
            ended: Vec::with_capacity(2 * usize::from(LANES)),
        })
    }

    /// What has been found so far; all of it when [`Comparer::run`] has returned well.
    pub fn findings(&self) -> &Findings {
        &self.findings
    }

    /// Compares until all is done, until `enough` says so, or until something fails. `rate`: bytes of each copy per second at most. `enough`
    /// is asked about every millisecond, and by it the caller cancels.
    pub fn run(
        &mut self,
        rate: Option<u64>,
        enough: &mut dyn FnMut(&Findings) -> bool,
    ) -> Result<(), CompareFault> {
        let mut pace = Pace::new(rate, RUN, Instant::now());
        let mut asked = None::<Instant>;
        loop {
            let now = Instant::now();
            let may_begin = pace.may_begin(now);
            if asked.is_none_or(|asked| now.duration_since(asked) >= LOOK) {
                asked = Some(now);
                if enough(&self.findings) {
                    self.drain();
                    return Err(CompareFault::Cancelled);
                }
            }
            let begun = self.begun;
            let step = match self.step(may_begin) {
                Ok(step) => step,
                Err(fault) => {
                    self.drain();
                    return Err(fault);
                }
            };
            pace.spend(self.begun - begun);
            match step {
                Step::Moved => {}
                Step::Waits => wait_for_either(&*self.disk, &*self.other),
                Step::Clean => return Ok(()),
            }
        }
    }

    /// Lets reads end that are under way, as far as they do so soon: who drops a channel before leaves I/O behind.
    fn drain(&mut self) {
        let end = Instant::now() + DRAIN;
        while self.disk.in_flight() + self.other.in_flight() > 0 && Instant::now() < end {
            self.disk.push(&mut self.context);
            self.other.push(&mut self.context);
            if !self.reap() {
                wait_for_either(&*self.disk, &*self.other);
            }
        }
    }

    /// Gets on as far as it can without waiting. `may_begin`: whether another run may be begun; one at most is.
    pub fn step(&mut self, may_begin: bool) -> Result<Step, CompareFault> {
        let mut moved = self.reap();
        // Only those that are whole, and in their order.
        while self.busy > 0 {
            let Lane { offset, len, disk, other } = self.lanes[usize::from(self.oldest)];
            if disk || other || self.fault.is_some() {
                break;
            }
            self.judge(self.oldest, offset, len);
            self.oldest = (self.oldest + 1) % LANES;
            self.busy -= 1;
            moved = true;
        }
        let mut more = true;
        if may_begin && self.busy < LANES && self.fault.is_none() {
            match self.next() {
                Some((offset, len)) => {
                    moved = true;
                    self.begin(offset, len);
                }
                None => more = false,
            }
        }
        self.disk.push(&mut self.context);
        self.other.push(&mut self.context);
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        // The next pass begins when this one has been judged.
        if !more && self.busy == 0 {
            let left = self.again.count();
            if left == 0 || self.findings.passes == AGAIN {
                return Ok(Step::Clean);
            }
            (self.findings.passes, self.cursor) = (self.findings.passes + 1, 0);
            moved = true;
        }
        Ok(if moved { Step::Moved } else { Step::Waits })
    }

    /// What this pass looks at next.
    fn next(&mut self) -> Option<(u64, u64)> {
        let bytes = self.findings.bytes;
        if self.findings.passes == 0 {
            let (offset, len) = (self.cursor, RUN.min(bytes - self.cursor));
            self.cursor += len;
            return (len > 0).then_some((offset, len));
        }
        if self.cursor >= bytes {
            return None;
        }
        let first = self.again.next(self.cursor / self.unit)?;
        let most = (first + RUN / self.unit).min(self.again.chunks());
        let end = (first + 1..most).find(|block| !self.again.is_marked(*block)).unwrap_or(most);
        for block in first..end {
            self.unmark_again(block);
        }
        self.cursor = end * self.unit;
        Some((first * self.unit, (end * self.unit).min(bytes) - first * self.unit))
    }

    fn begin(&mut self, offset: u64, len: u64) {
        let lane = (self.oldest + self.busy) % LANES;
        self.busy += 1;
        self.begun += len;
        self.lanes[usize::from(lane)] = Lane { offset, len, disk: true, other: true };
        for side in [Side::Disk, Side::Other] {
            let (bytes, block) = if side == Side::Disk { self.disk_shape } else { self.other_shape };
            // The end of the shorter copy may be within a block of the longer one.
            let len = len.next_multiple_of(block).min(bytes - offset);
            let into = [memory(lane, side, len)];
            let op = Op::Read { offset, into: &into };
            let channel = if side == Side::Disk { &mut self.disk } else { &mut self.other };
            if let Submitted::Done(outcome) = channel.submit(&mut self.context, &self.view, &op, Tag(lane)) {
                self.part_ended(side, Tag(lane), outcome);
            }
        }
    }

    /// Takes in what has ended below; whether anything has.
    fn reap(&mut self) -> bool {
        let mut ended = std::mem::take(&mut self.ended);
        let sides = [(Side::Disk, &mut self.disk), (Side::Other, &mut self.other)];
        for (side, channel) in sides {
            if channel.in_flight() > 0 {
                channel.reap(&mut self.context, &mut |tag, outcome| ended.push((side, tag, outcome)));
            }
        }
        let any = !ended.is_empty();
        ended.drain(..).for_each(|(side, tag, outcome)| self.part_ended(side, tag, outcome));
        self.ended = ended;
        any
    }

    fn part_ended(&mut self, side: Side, tag: Tag, outcome: Outcome) {
        let lane = &mut self.lanes[usize::from(tag.0)];
        let offset = lane.offset;
        *(if side == Side::Disk { &mut lane.disk } else { &mut lane.other }) = false;
        if let Err(fault) = outcome {
            let fault = match side {
                Side::Disk => CompareFault::Disk { offset, fault },
                Side::Other => CompareFault::Other { offset, fault },
            };
            self.fault.get_or_insert(fault);
        }
    }

    /// Both have been read. Whatever a write has put there that was read, its mark is there.
    fn judge(&mut self, lane: u16, offset: u64, len: u64) {
        let mut pages = [[0u8; PAGE]; 2];
        let first_pass = self.findings.passes == 0;
        for at in (0..len).step_by(PAGE) {
            let size = PAGE.min((len - at) as usize);
            for (side, page) in [Side::Disk, Side::Other].into_iter().zip(&mut pages) {
                let from = memory(lane, side, len).gpa + at;
                if let Err(fault) = self.view.read(from, &mut page[..size]) {
                    // Memory of ours that is gone.
                    self.fault = Some(CompareFault::Disk { offset, fault: Fault::Guest(fault) });
                    return;
                }
            }
            let [disk, other] = &pages;
            if disk[..size] == other[..size] {
                continue;
            }
            let sectors = disk[..size].chunks(SECTOR as usize).zip(other[..size].chunks(SECTOR as usize));
            for (sector, (disk, other)) in (offset + at..).step_by(SECTOR as usize).zip(sectors) {
                if disk == other {
                    continue;
                }
                let block = sector / self.unit;
                if self.written.is_marked(block) {
                    self.mark_again(block);
                } else if first_pass {
                    self.findings.differs(sector, disk.len() as u64);
                }
            }
        }
        if first_pass {
            self.findings.compared += len;
        }
    }

    fn bytes_of(&self, block: u64) -> u64 {
        self.unit.min(self.findings.bytes - block * self.unit)
    }

    fn mark_again(&mut self, block: u64) {
        if !self.again.is_marked(block) {
            self.again.mark(block * self.unit, 1);
            self.findings.written += self.bytes_of(block);
        }
    }

    fn unmark_again(&mut self, block: u64) {
        if self.again.take(block) {
            self.findings.written -= self.bytes_of(block);
        }
    }
}

/// Where a lane has what it reads of a copy.
fn memory(lane: u16, side: Side, len: u64) -> GuestRange {
    let half = if side == Side::Disk { 0 } else { RUN };
    GuestRange { gpa: u64::from(lane) * 2 * RUN + half, len: len as u32 }
}

impl Drop for Comparer {
    fn drop(&mut self) {
        self.disk.detach(&mut self.context);
        self.other.detach(&mut self.context);
    }
}
