//! Events become a profile: how often, from where, about what, and how long the host was busy with it.
//!
//! ```text
//!   Exit --pending--> Detail* UserSpace? --> Entry      one site: (reason, rip, detail)
//!            `--> Exit again: the entry was lost, or KVM went in again at once; counted, without a time
//! ```

use foldhash::HashMap;

use crate::event::{Detail, Event};
use crate::reason::{Kind, Reason};
use crate::runs::{Runs, SeenExit, ThreadRun};
use crate::times::{STEPS, SiteTimes, Times, step};

/// So many different sites are told apart; what comes then is counted as one without a place.
pub const SITES: usize = 1 << 16;
/// So many vCPUs.
const VCPUS: usize = 4096;

/// Where and about what exits happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// Why.
    pub reason: Reason,
    /// The guest's instruction; nothing where it is not known, or where sites are too many.
    pub rip: Option<u64>,
    /// About what.
    pub detail: Detail,
    /// It was a guest's of the guest; whose instruction that was cannot be told.
    pub nested: bool,
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SiteCounts {
    /// How many exits.
    pub count: u64,
    /// Of these, whose end was seen too.
    pub timed: u64,
    /// From exit to entry, of those, in ns.
    pub host_ns: u64,
    /// Of all, how many went on to the VMM.
    pub user: u64,
    /// Of `host_ns`: from handing over to the VMM to the entry, while the thread had a processor.
    pub user_ns: u64,
    /// Of `host_ns`: without a processor, though the thread would have run.
    pub preempted_ns: u64,
    /// Of `host_ns`: waiting, as in HLT or for a page.
    pub blocked_ns: u64,
}

impl SiteCounts {
    pub(crate) fn add(&mut self, other: SiteCounts) {
        self.count += other.count;
        self.timed += other.timed;
        self.host_ns = self.host_ns.saturating_add(other.host_ns);
        self.user += other.user;
        self.user_ns = self.user_ns.saturating_add(other.user_ns);
        self.preempted_ns = self.preempted_ns.saturating_add(other.preempted_ns);
        self.blocked_ns = self.blocked_ns.saturating_add(other.blocked_ns);
    }
}

impl std::iter::Sum for SiteCounts {
    fn sum<I: Iterator<Item = SiteCounts>>(all: I) -> SiteCounts {
        all.fold(SiteCounts::default(), |mut sum, tally| {
            sum.add(tally);
            sum
        })
    }
}

/// The exit that a thread is in.
#[derive(Clone, Copy, Debug)]
struct Pending {
    at: u64,
    site: Site,
    /// The site's; it is asked for with each event.
    kind: Kind,
    vcpu: Option<u32>,
    user: bool,
    /// When KVM has handed over to the VMM.
    user_at: u64,
    /// Without a processor so far, in ns: preempted, and waiting.
    off: [u64; 2],
    /// Of both, since KVM has handed over.
    off_user: u64,
    /// It is in a run, or has ended one.
    told: bool,
}

/// What one thread's events were so far; they come in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Thread {
    pending: Option<Pending>,
    vcpu: Option<u32>,
    /// What KVM did before it told of the exit: Linux up to 6.1 answers some MSRs of AMD's guests at once.
    early: Option<Detail>,
    row: ThreadRun,
    /// Since when it has no processor, and whether it was preempted.
    off: Option<(u64, bool)>,
    /// A slice of a sample has just begun.
    fresh: bool,
}

/// What is kept of a site.
#[derive(Clone, Debug, Default)]
struct SiteRecord {
    counts: SiteCounts,
    times: Times,
}

/// How many steps of times have room.
#[derive(Clone, Debug)]
struct Room(usize);

impl Default for Room {
    fn default() -> Room {
        Room(STEPS)
    }
}

impl Pending {
    /// Where the time went until the guest went on. What is left of it was KVM's.
    fn parts(&self, end: Option<u64>) -> SiteCounts {
        let Some(end) = end else { return SiteCounts::default() };
        let user_ns =
            if self.user { end.saturating_sub(self.user_at).saturating_sub(self.off_user) } else { 0 };
        let [preempted_ns, blocked_ns] = self.off;
        SiteCounts { user_ns, preempted_ns, blocked_ns, ..SiteCounts::default() }
    }
}

impl Thread {
    /// It has a processor again.
    fn back(&mut self, at: u64) {
        let (Some((since, preempted)), Some(pending)) = (self.off.take(), self.pending.as_mut()) else {
            return;
        };
        let time = at.saturating_sub(since.max(pending.at));
        let off = &mut pending.off[usize::from(!preempted)];
        *off = off.saturating_add(time);
        if pending.user && since >= pending.user_at {
            pending.off_user = pending.off_user.saturating_add(time);
        }
    }
}

/// Everything that was counted. Its size is bounded by [`SITES`].
///
/// Its maps are looked into for each event, with a seeded hash that is fast and not cryptographic: a guest chooses the keys, and has no answer
/// from which to guess the seed.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    sites: HashMap<Site, SiteRecord>,
    /// Steps of times that all sites together may still have.
    room: Room,
    /// Whether it is told when threads have no processor.
    pub(crate) switches: bool,
    vcpus: HashMap<u32, SiteCounts>,
    /// Of those, host time in HLT and MWAIT, in ns.
    halted: HashMap<u32, u64>,
    /// Device accesses that come one after another.
    pub runs: Runs,
    /// Exits by what KVM did about them, where no exit was seen before.
    consequences: HashMap<Site, SiteCounts>,
    /// Injected interrupts by vector.
    interrupts: HashMap<u8, u64>,
    /// How often the window for spinning guests changed.
    pub spin_windows: u64,
    /// Records of events that found no room in a ring.
    pub lost_records: u64,
    /// Exits of sites that were not told apart any more.
    pub crowded: u64,
    /// Port exits whose own fields gave the port, and ports that only KVM's next word gave.
    pub(crate) ports: [u64; 2],
    /// Exits that only the beginnings and ends of a sample's slices have caused.
    pub(crate) cut: u64,
    /// Whether KVM did something where no exit was told of.
    pub(crate) told_by_kvm: bool,
    /// Whether an exit or an entry was ever told of.
    pub(crate) whole: bool,
}

impl Profile {
    /// Takes the next event of a thread.
    pub fn take(&mut self, thread: &mut Thread, at: u64, event: Event) {
        // They say nothing about which exits there are.
        match event {
            Event::SwitchedOut { preempted } => return thread.off = Some((at, preempted)),
            Event::SwitchedIn => return thread.back(at),
            _ => {}
        }
        let fresh = std::mem::take(&mut thread.fresh);
        self.whole |= matches!(event, Event::Exit { .. } | Event::Entry { .. });
        match event {
            // Linux before 6.5 tells of AMD's exits after it has served their interrupts: of this one, which has begun the slice, too.
            Event::Exit { reason, .. } if fresh && reason.kind() == Kind::HostInterrupt => self.cut += 1,
            Event::Exit { reason, rip, vcpu, detail } => {
                self.finish(thread, None);
                let kind = reason.kind();
                let early = thread.early.take().filter(|_| kind == Kind::Msr && detail == Detail::Nothing);
                self.ports[0] += u64::from(matches!(detail, Detail::Port { .. }));
                let site = Site { reason, rip: Some(rip), detail: early.unwrap_or(detail), nested: false };
                thread.vcpu = vcpu.or(thread.vcpu);
                thread.pending = Some(Pending {
                    at,
                    site,
                    kind,
                    vcpu: thread.vcpu,
                    user: false,
                    user_at: 0,
                    off: [0; 2],
                    off_user: 0,
                    told: false,
                });
            }
            Event::Entry { vcpu } => {
                thread.vcpu = vcpu.or(thread.vcpu);
                thread.early = None;
                self.finish(thread, Some(at));
            }
            Event::Detail(detail) => match &mut thread.pending {
                Some(pending) => {
                    let known = pending.site.detail;
                    refine(&mut pending.site.detail, detail, pending.kind);
                    let by_kvm = |detail| matches!(detail, Detail::Port { .. });
                    self.ports[1] += u64::from(!by_kvm(known) && by_kvm(pending.site.detail));
                }
                None => {
                    thread.early = matches!(detail, Detail::Msr { .. }).then_some(detail);
                    self.consequence(detail);
                }
            },
            Event::Asked(detail) => {
                if let Some(pending) = &mut thread.pending {
                    refine(&mut pending.site.detail, detail, pending.kind);
                }
            }
            Event::UserSpace => {
                if let Some(pending) = thread.pending.as_mut().filter(|pending| !pending.user) {
                    (pending.user, pending.user_at) = (true, at);
                }
            }
            Event::Interrupt { vector } => {
                self.tell(thread, None);
                self.runs.end(&mut thread.row);
                self.add_interrupts(vector, 1);
            }
            // In this thread: its own timer's, or one that it sends to another vCPU.
            Event::Accepted { vcpu } => {
                if thread.vcpu.is_none_or(|own| own == vcpu) {
                    self.tell(thread, None);
                    self.runs.end(&mut thread.row);
                }
            }
            Event::SpinWindow => self.spin_windows += 1,
            Event::SwitchedOut { .. } | Event::SwitchedIn => {}
            Event::Nested => {
                if let Some(pending) = &mut thread.pending {
                    (pending.site.nested, pending.site.rip, pending.told) = (true, None, true);
                    thread.row = ThreadRun::default();
                }
            }
        }
    }

    /// Some of a thread's records are lost: what it was in cannot be told any more, only that it was.
    pub fn lost(&mut self, thread: &mut Thread, records: u64) {
        self.lost_records += records;
        self.finish(thread, None);
        (thread.row, thread.off) = (ThreadRun::default(), None);
    }

    /// The watch is over: the exit that a thread is in counts, its time does not.
    pub fn end(&mut self, thread: &mut Thread) {
        self.finish(thread, None);
        self.runs.end(&mut thread.row);
    }

    /// A slice of a sample begins: the thread was interrupted for that, if it runs.
    pub(crate) fn fresh(&mut self, thread: &mut Thread) {
        thread.fresh = true;
        // What comes may be the middle of a run.
        self.runs.fresh(&mut thread.row);
    }

    /// A slice ends, since then (CLOCK_MONOTONIC, ns). If a thread was interrupted for that, this exit would not have been without us.
    pub(crate) fn cut(&mut self, thread: &mut Thread, since: u64) {
        let ours = |pending: &Pending| pending.kind == Kind::HostInterrupt && pending.at >= since;
        if thread.pending.take_if(|pending| ours(pending)).is_some() {
            self.cut += 1;
        }
        self.finish(thread, None);
        // The run that it was in may be the beginning of a longer one.
        (thread.early, thread.off, thread.row) = (None, None, ThreadRun::default());
    }

    /// The runs hear of the exit that a thread is in when all is known about it, or when an interrupt is delivered after it.
    fn tell(&mut self, thread: &mut Thread, end: Option<u64>) {
        let Some(pending) = thread.pending.as_mut().filter(|pending| !pending.told) else { return };
        pending.told = true;
        let Pending { at, site, kind, user, .. } = *pending;
        let rip = site.rip.unwrap_or_default();
        self.runs.exit(&mut thread.row, SeenExit { kind, rip, detail: site.detail, user, at, end });
    }

    fn finish(&mut self, thread: &mut Thread, end: Option<u64>) {
        self.tell(thread, end);
        let Some(pending) = thread.pending.take() else { return };
        let time = end.and_then(|end| end.checked_sub(pending.at));
        let tally = SiteCounts {
            count: 1,
            timed: u64::from(time.is_some()),
            host_ns: time.unwrap_or(0),
            user: u64::from(pending.user),
            ..pending.parts(end.filter(|_| time.is_some()))
        };
        self.count(pending.site, tally, time.map(|ns| (Some(step(ns)), ns)));
        if let Some(vcpu) = pending.vcpu {
            let halted = if pending.kind == Kind::Halt { tally.host_ns } else { 0 };
            self.add_vcpu(vcpu, tally, halted);
        }
    }

    /// Takes a vCPU's exits, and how much of their host time it was halted, in ns.
    pub(crate) fn add_vcpu(&mut self, vcpu: u32, counts: SiteCounts, halted_ns: u64) {
        if self.vcpus.len() < VCPUS || self.vcpus.contains_key(&vcpu) {
            self.vcpus.entry(vcpu).or_default().add(counts);
            if halted_ns > 0 {
                let halted = self.halted.entry(vcpu).or_default();
                *halted = halted.saturating_add(halted_ns);
            }
        }
    }

    /// Takes exits of a site that were counted elsewhere: all without a time, or all of one step of [`crate::times`], or of
    /// steps that found no room, none longer than so many ns.
    pub(crate) fn add_site(&mut self, site: Site, counts: SiteCounts, step: Option<(Option<u16>, u64)>) {
        self.whole = true;
        self.count(site, counts, step);
    }

    fn count(&mut self, mut site: Site, tally: SiteCounts, step: Option<(Option<u16>, u64)>) {
        if self.sites.len() >= SITES && !self.sites.contains_key(&site) {
            self.crowded += tally.count;
            // By reason alone; there are few of those.
            site = Site { rip: None, detail: Detail::Nothing, ..site };
            if self.sites.len() >= 2 * SITES && !self.sites.contains_key(&site) {
                site.reason = Reason::of_kind(Kind::Other);
            }
        }
        let record = self.sites.entry(site).or_default();
        record.counts.add(tally);
        if let Some((step, longest)) = step {
            let count = u32::try_from(tally.count).unwrap_or(u32::MAX);
            record.times.add_step(step, count, longest, &mut self.room.0);
        }
    }

    fn consequence(&mut self, detail: Detail) {
        self.add_consequence(detail, 1);
    }

    /// Takes what KVM did so often where no exit was seen before.
    pub(crate) fn add_consequence(&mut self, detail: Detail, count: u64) {
        self.told_by_kvm = true;
        let kind = match detail {
            Detail::Port { .. } => Kind::Port,
            Detail::Memory { .. } | Detail::Fault(_) => Kind::Memory,
            Detail::Msr { .. } => Kind::Msr,
            Detail::Cpuid { .. } => Kind::Cpuid,
            Detail::Hypercall { .. } => Kind::Hypercall,
            Detail::Nothing => Kind::Other,
        };
        let site = Site { reason: Reason::of_kind(kind), rip: None, detail, nested: false };
        if self.consequences.len() < SITES || self.consequences.contains_key(&site) {
            self.consequences.entry(site).or_default().add(SiteCounts { count, ..SiteCounts::default() });
        } else {
            self.crowded += count;
        }
    }

    /// Takes injected interrupts of a vector.
    pub(crate) fn add_interrupts(&mut self, vector: u8, count: u64) {
        *self.interrupts.entry(vector).or_default() += count;
    }

    /// Takes exits whose site found no room, not even by its reason.
    pub(crate) fn add_unplaced(&mut self, count: u64) {
        self.crowded += count;
        let site =
            Site { reason: Reason::of_kind(Kind::Other), rip: None, detail: Detail::Nothing, nested: false };
        self.count(site, SiteCounts { count, ..SiteCounts::default() }, None);
    }

    /// All sites. If no exit was ever seen, what KVM did about them.
    pub fn sites(&self) -> impl Iterator<Item = (&Site, &SiteCounts)> {
        let by_consequence = self.is_by_consequence();
        let consequences = self.consequences.iter().filter(move |_| by_consequence);
        let sites = self.sites.iter().filter(move |_| !by_consequence);
        consequences.chain(sites.map(|(site, record)| (site, &record.counts)))
    }

    /// How long the exits of a site took.
    pub fn times(&self, site: &Site) -> Option<SiteTimes> {
        self.sites.get(site)?.times.summary()
    }

    /// Whether exits tell their ports by themselves, here and always so far.
    pub fn tells_ports(&self) -> bool {
        self.ports[0] >= 64 && self.ports[1] == 0
    }

    /// Whether `kvm_exit` never fired though KVM did something, as on a software KVM.
    pub fn is_by_consequence(&self) -> bool {
        !self.whole && self.told_by_kvm
    }

    /// Each vCPU's share, by number.
    pub fn vcpus(&self) -> Vec<(u32, SiteCounts)> {
        let mut all: Vec<_> = self.vcpus.iter().map(|(vcpu, tally)| (*vcpu, *tally)).collect();
        all.sort_by_key(|(vcpu, _)| *vcpu);
        all
    }

    /// How much of a vCPU's host time it was halted, in ns.
    pub fn halted_ns(&self, vcpu: u32) -> u64 {
        self.halted.get(&vcpu).copied().unwrap_or(0)
    }

    /// Injected interrupts: vector and how many, most first.
    pub fn interrupts(&self) -> Vec<(u8, u64)> {
        let mut all: Vec<_> = self.interrupts.iter().map(|(vector, count)| (*vector, *count)).collect();
        all.sort_by_key(|(vector, count)| (std::cmp::Reverse(*count), *vector));
        all
    }

    /// The sum over all sites.
    pub fn total(&self) -> SiteCounts {
        self.sites().map(|(_, tally)| *tally).sum()
    }
}

/// A device's address says more than that a page was missing; otherwise the first word counts, since a string instruction says many.
fn refine(known: &mut Detail, said: Detail, kind: Kind) {
    let better = match (*known, said) {
        (Detail::Nothing, Detail::Fault(_)) => kind == Kind::Memory,
        (Detail::Nothing, _) => true,
        (Detail::Fault(_), Detail::Memory { .. }) => true,
        // KVM_EXIT_FAST_MMIO knows no width.
        (Detail::Memory { width: 0, .. }, Detail::Memory { .. }) => true,
        (Detail::Port { port: known, queue: None, .. }, Detail::Port { port, queue: Some(_), .. }) => {
            known == port
        }
        _ => false,
    };
    if better {
        *known = said;
    }
}

#[cfg(test)]
mod tests;
