//! The disk goes on with the new backing while requests are under way, by seeded schedules: two queues of a guest, whose channels are exchanged one after the
//! other, and disks that carry operations out in any order, in halves, and fail. What each read finds, and what is there in the end, is what some order of
//! the requests leaves that keeps to their beginnings and ends.
//!
//! All in one thread: a schedule is its seed. Swaps up to that moment: `mirror.rs`.

mod disorder;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use disorder::{DISK, Disorder, Random};
use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::mirror::{Mirror, Step};
use ioplane_storage::*;

const SECTOR: u64 = 512;
const DEPTH: u16 = 6;
/// Bytes of a request's buffer.
const BUFFER: u64 = 16 << 10;
const SEEDS: u64 = 300;
/// No schedule takes as many actions.
const STUCK: u32 = 400_000;

/// A write, by its number: what each of its sectors holds.
struct Written {
    sectors: Range<u64>,
    begun: u64,
    /// When it ended, and whether well.
    ended: Option<(u64, bool)>,
}

/// All writes; the first is what the disk held before. And when each sector of each was seen first: from then on it is there.
#[derive(Default)]
struct History {
    writes: Vec<Written>,
    seen: HashMap<(u64, u64), u64>,
}

impl History {
    /// Whether a sector may hold what the write `number` wrote, for who began to look at `begun` and saw it at `seen`. `durable`: what was only seen
    /// need not be there.
    fn allows(&self, sector: u64, number: u64, begun: u64, seen: u64, durable: bool) -> Result<(), String> {
        let found = self.writes.get(number as usize).filter(|one| one.sectors.contains(&sector));
        let Some(found) = found else { return Err(format!("sector {sector} holds what nobody wrote there")) };
        if found.begun >= seen {
            return Err(format!("sector {sector} holds a later write"));
        }
        let Some(end) = self.there(number, found, sector, durable) else { return Ok(()) };
        let over = |(number, one): (u64, &Written)| {
            one.sectors.contains(&sector)
                && one.begun > end
                && self.there(number, one, sector, durable).is_some_and(|there| there < begun)
        };
        match (0..).zip(&self.writes).position(over) {
            Some(later) => Err(format!("sector {sector} holds write {number}, and write {later} is lost")),
            None => Ok(()),
        }
    }

    /// From when on it is there for everybody: it has ended well, or somebody has seen it.
    fn there(&self, number: u64, one: &Written, sector: u64, durable: bool) -> Option<u64> {
        let ended = match one.ended {
            // Of one that has failed nobody knows what is there.
            Some((_, false)) => return None,
            ended => ended.map(|(ended, _)| ended),
        };
        let seen = self.seen.get(&(number, sector)).copied().filter(|_| !durable);
        ended.into_iter().chain(seen).min()
    }
}

fn stamp(number: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    bytes.chunks_mut(8).for_each(|part| part.copy_from_slice(&number.to_le_bytes()));
    bytes
}

/// The number that a sector is stamped with; all of it.
fn stamped(bytes: &[u8]) -> Result<u64, String> {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    if bytes == stamp(number) { Ok(number) } else { Err("a sector of two writes".to_owned()) }
}

enum Asked {
    Read,
    Write(u64),
    Flush,
}

struct Request {
    asked: Asked,
    sectors: Range<u64>,
    begun: u64,
}

/// A queue of the guest.
struct Line {
    channel: Box<dyn IoChannel>,
    /// The one before, until nothing of it is in flight.
    leaving: Option<Box<dyn IoChannel>>,
    view: GuestView,
    requests: Vec<Option<Request>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    /// Once the disk has gone on: an operation of the old disk fails, which is of no consequence.
    Old,
    /// One of the new disk does, which the guest is told.
    New,
    /// The old disk loses all, and says so to nobody.
    Lost,
    /// The queues are stopped with requests under way, and what these had is begun again by others.
    Stopped,
}

struct Schedule {
    random: Random,
    context: CoreContext,
    time: u64,
    old: Disorder,
    new: Disorder,
    lines: [Line; 2],
    history: History,
    errors: u64,
    /// The disk has gone on with the new backing: flushes are of that.
    decided: bool,
    /// Requests have been begun again, so what somebody has seen of them may be gone for a while.
    replayed: bool,
    actions: u32,
}

impl Schedule {
    fn new(seed: u64) -> (Self, Arc<Mirror>) {
        let mut random = Random::new(seed);
        let (old, new) = (Disorder::new(&mut random), Disorder::new(&mut random));
        {
            let mut inside = old.inside();
            inside.content = stamp(0).repeat((DISK / SECTOR) as usize);
            inside.durable = inside.content.clone();
        }
        let mirror = Mirror::new(Arc::new(old.clone()), Arc::new(new.clone())).unwrap();
        let line = || Line {
            channel: mirror.channel(DEPTH).unwrap(),
            leaving: None,
            view: GuestView::new(Arc::new(GuestMap::anonymous(u64::from(DEPTH) * BUFFER).unwrap())),
            requests: (0..DEPTH).map(|_| None).collect(),
        };
        let first = Written { sectors: 0..DISK / SECTOR, begun: 0, ended: Some((0, true)) };
        let schedule = Schedule {
            random,
            context: CoreContext::default(),
            time: 0,
            old,
            new,
            lines: [line(), line()],
            history: History { writes: vec![first], ..History::default() },
            errors: 0,
            decided: false,
            replayed: false,
            actions: 0,
        };
        (schedule, mirror)
    }

    fn now(&mut self) -> u64 {
        self.time += 1;
        self.time
    }

    /// A new request, if a queue has room.
    fn guest(&mut self) -> Result<(), String> {
        let at = self.random.below(2) as usize;
        let Some(tag) = self.lines[at].requests.iter().position(Option::is_none) else { return Ok(()) };
        let len = 1 + self.random.below(12);
        let around = [0, 120, DISK / SECTOR - 30][self.random.below(3) as usize];
        let first = (around + self.random.below(8)).min(DISK / SECTOR - len);
        let (sectors, begun) = (first..first + len, self.now());
        let gpa = tag as u64 * BUFFER;
        let ranges = [GuestRange { gpa, len: (len * SECTOR) as u32 }];
        let offset = first * SECTOR;
        let (asked, op) = match self.random.below(8) {
            0..=2 => (Asked::Read, Op::Read { offset, into: &ranges }),
            3 => (Asked::Flush, Op::Flush),
            _ => {
                let number = self.history.writes.len() as u64;
                self.history.writes.push(Written { sectors: sectors.clone(), begun, ended: None });
                self.lines[at].view.write(gpa, &stamp(number).repeat(len as usize)).unwrap();
                (Asked::Write(number), Op::Write { offset, from: &ranges })
            }
        };
        let Line { channel, view, requests, .. } = &mut self.lines[at];
        requests[tag] = Some(Request { asked, sectors, begun });
        match channel.submit(&mut self.context, view, &op, Tag(tag as u16)) {
            Submitted::Pending => Ok(()),
            Submitted::Done(outcome) => self.ended(at, tag, outcome),
        }
    }

    fn ended(&mut self, at: usize, tag: usize, outcome: Outcome) -> Result<(), String> {
        let now = self.now();
        let line = &mut self.lines[at];
        let request = line.requests[tag].take().ok_or("a request ended twice")?;
        self.errors += u64::from(outcome.is_err());
        match request.asked {
            Asked::Write(number) => {
                self.history.writes[number as usize].ended = Some((now, outcome.is_ok()));
                Ok(())
            }
            Asked::Read if outcome.is_ok() => {
                let mut bytes =
                    vec![0; (request.sectors.end - request.sectors.start) as usize * SECTOR as usize];
                line.view.read(tag as u64 * BUFFER, &mut bytes).unwrap();
                request.sectors.zip(bytes.chunks(SECTOR as usize)).try_for_each(|(sector, bytes)| {
                    let number = stamped(bytes)?;
                    self.history.allows(sector, number, request.begun, now, self.replayed)?;
                    self.history.seen.entry((number, sector)).or_insert(now);
                    Ok(())
                })
            }
            Asked::Flush if outcome.is_ok() && self.decided => {
                let durable = self.new.inside().durable.clone();
                self.holds(&durable, request.begun, now, true).map_err(|why| format!("after a flush {why}"))
            }
            Asked::Read | Asked::Flush => Ok(()),
        }
    }

    fn holds(&self, content: &[u8], begun: u64, seen: u64, durable: bool) -> Result<(), String> {
        (0..).zip(content.chunks(SECTOR as usize)).try_for_each(|(sector, bytes)| {
            self.history.allows(sector, stamped(bytes)?, begun, seen, durable)
        })
    }

    fn reap(&mut self, at: usize) -> Result<(), String> {
        let mut ended = Vec::new();
        let Line { channel, leaving, .. } = &mut self.lines[at];
        for channel in leaving.iter_mut().chain([channel]) {
            channel.reap(&mut self.context, &mut |tag, outcome| ended.push((usize::from(tag.0), outcome)));
            channel.push(&mut self.context);
        }
        if leaving.as_ref().is_some_and(|channel| channel.in_flight() == 0) {
            *leaving = None;
        }
        ended.into_iter().try_for_each(|(tag, outcome)| self.ended(at, tag, outcome))
    }

    /// Anything but a new request.
    fn go_on(&mut self) -> Result<(), String> {
        self.actions += 1;
        if self.actions > STUCK {
            return Err("it does not end".to_owned());
        }
        let at = self.random.below(2) as usize;
        match self.random.below(6) {
            0 | 1 => self.old.clone().act(&mut self.random),
            2 | 3 => self.new.clone().act(&mut self.random),
            _ => self.reap(at)?,
        }
        Ok(())
    }

    fn load(&mut self, requests: u64) -> Result<(), String> {
        for _ in 0..requests {
            self.guest()?;
            for _ in 0..self.random.below(8) {
                self.go_on()?;
            }
        }
        Ok(())
    }

    /// The queues are stopped, and started again with channels of `backing` once nothing of them is under way there any more.
    fn stop(&mut self, backing: &dyn Backing) -> Result<(), String> {
        for line in &mut self.lines {
            line.leaving = None;
            line.channel = self.new.channel(DEPTH).unwrap();
        }
        while !backing.wait_quiet(Instant::now()) {
            self.go_on()?;
        }
        self.replayed = true;
        for at in 0..2 {
            self.lines[at].channel = backing.channel(DEPTH).unwrap();
            for tag in 0..usize::from(DEPTH) {
                let Line { channel, view, requests, .. } = &mut self.lines[at];
                let Some(Request { asked, sectors, .. }) = &requests[tag] else { continue };
                let offset = sectors.start * SECTOR;
                let len = ((sectors.end - sectors.start) * SECTOR) as u32;
                let ranges = [GuestRange { gpa: tag as u64 * BUFFER, len }];
                let op = match asked {
                    Asked::Read => Op::Read { offset, into: &ranges },
                    Asked::Write(_) => Op::Write { offset, from: &ranges },
                    Asked::Flush => Op::Flush,
                };
                if let Submitted::Done(outcome) =
                    channel.submit(&mut self.context, view, &op, Tag(tag as u16))
                {
                    self.ended(at, tag, outcome)?;
                }
            }
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.lines.iter().any(|line| line.requests.iter().any(Option::is_some) || line.leaving.is_some())
    }
}

/// One swap; what is wrong with it.
fn run(seed: u64, trouble: Trouble) -> Result<(), String> {
    let (mut schedule, mirror) = Schedule::new(seed);
    let mut copier = mirror.copier().unwrap();
    let requests = schedule.random.below(60);
    schedule.load(requests)?;
    mirror.start_mirroring();
    while !schedule.decided {
        // What failed is not tried here: until the disk goes on nothing does.
        while copier.step(true).map_err(|fault| fault.to_string())? != Step::Clean {
            if schedule.random.one_in(4) {
                schedule.guest()?;
            }
            schedule.go_on()?;
        }
        copier.sync().map_err(|fault| fault.to_string())?;
        if !mirror.begin_commit() {
            continue;
        }
        let requests = schedule.random.below(40);
        schedule.load(requests)?;
        schedule.decided = mirror.decide();
    }
    let when = schedule.random.below(4);
    match trouble {
        Trouble::None | Trouble::Stopped => {}
        Trouble::Lost => schedule.old.inside().content = stamp(0).repeat((DISK / SECTOR) as usize),
        Trouble::Old => schedule.old.inside().fails_in = Some(when),
        Trouble::New => schedule.new.inside().fails_in = Some(when),
    }
    let mut exchanged = [false; 2];
    let mut stops = trouble == Trouble::Stopped;
    while exchanged.contains(&false) || schedule.random.one_in(2) {
        let requests = schedule.random.below(12);
        schedule.load(requests)?;
        if stops && schedule.random.one_in(2) {
            stops = false;
            schedule.stop(&*mirror)?;
            exchanged = [false; 2];
        }
        schedule.go_on()?;
        let at = schedule.random.below(2) as usize;
        // As the daemon does it: the mirror alone uses the new backing until all that went to both has ended.
        if mirror.has_settled() && !std::mem::replace(&mut exchanged[at], true) {
            let fresh = schedule.new.channel(DEPTH).unwrap();
            let line = &mut schedule.lines[at];
            line.leaving = Some(std::mem::replace(&mut line.channel, fresh));
        }
    }
    while schedule.is_busy() {
        schedule.go_on()?;
    }
    let end = schedule.now();
    let content = schedule.new.inside().content.clone();
    schedule.holds(&content, end, end, schedule.replayed)?;
    match (trouble, schedule.errors) {
        (_, 0) | (Trouble::New, 1) => Ok(()),
        (_, errors) => Err(format!("{errors} requests failed")),
    }
}

const TROUBLES: [Trouble; 5] = [Trouble::None, Trouble::Old, Trouble::New, Trouble::Lost, Trouble::Stopped];

#[test]
fn requests_go_on_when_the_disk_goes_on_with_the_new_backing() {
    for seed in 0..SEEDS {
        for trouble in TROUBLES {
            run(seed, trouble).unwrap_or_else(|wrong| panic!("seed {seed}, {trouble:?}: {wrong}"));
        }
    }
}

#[cfg(feature = "mutations")]
#[test]
fn every_rule_that_is_taken_out_is_noticed() {
    use ioplane_storage::mirror::mutation::{SwapRule, remove};
    for rule in [SwapRule::Decided, SwapRule::Settled, SwapRule::Left, SwapRule::ReadAgain] {
        remove(Some(rule));
        let mut schedules = (0..SEEDS).flat_map(|seed| TROUBLES.map(|trouble| (seed, trouble)));
        let noticed = schedules
            .find_map(|(seed, trouble)| run(seed, trouble).err().map(|wrong| (seed, trouble, wrong)));
        remove(None);
        println!("{rule:?}: {noticed:?}");
        assert!(noticed.is_some(), "nothing depends on {rule:?}?");
    }
}
