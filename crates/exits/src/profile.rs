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
use crate::times::{STEPS, SiteTimes, Times};

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
    /// Whether an exit or an entry was ever told of.
    whole: bool,
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
                    self.ports[1] +=
                        u64::from(known != pending.site.detail && matches!(detail, Detail::Port { .. }));
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
                *self.interrupts.entry(vector).or_default() += 1;
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
        self.count(pending.site, tally, time);
        if let Some(vcpu) = pending.vcpu
            && (self.vcpus.len() < VCPUS || self.vcpus.contains_key(&vcpu))
        {
            self.vcpus.entry(vcpu).or_default().add(tally);
            if pending.kind == Kind::Halt {
                let halted = self.halted.entry(vcpu).or_default();
                *halted = halted.saturating_add(tally.host_ns);
            }
        }
    }

    fn count(&mut self, mut site: Site, tally: SiteCounts, time: Option<u64>) {
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
        if let Some(time) = time {
            record.times.add(time, &mut self.room.0);
        }
    }

    fn consequence(&mut self, detail: Detail) {
        let kind = match detail {
            Detail::Port { .. } => Kind::Port,
            Detail::Memory { .. } | Detail::Fault => Kind::Memory,
            Detail::Msr { .. } => Kind::Msr,
            Detail::Cpuid { .. } => Kind::Cpuid,
            Detail::Hypercall { .. } => Kind::Hypercall,
            Detail::Nothing => Kind::Other,
        };
        let site = Site { reason: Reason::of_kind(kind), rip: None, detail, nested: false };
        if self.consequences.len() < SITES || self.consequences.contains_key(&site) {
            self.consequences.entry(site).or_default().add(SiteCounts { count: 1, ..SiteCounts::default() });
        } else {
            self.crowded += 1;
        }
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
        !self.whole && !self.consequences.is_empty()
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
        (Detail::Nothing, Detail::Fault) => kind == Kind::Memory,
        (Detail::Nothing, _) => true,
        (Detail::Fault, Detail::Memory { .. }) => true,
        // KVM_EXIT_FAST_MMIO knows no width.
        (Detail::Memory { width: 0, .. }, Detail::Memory { .. }) => true,
        _ => false,
    };
    if better {
        *known = said;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exit(code: u64, rip: u64) -> Event {
        let reason = Reason::from_kvm(2, code);
        Event::Exit { reason, rip, vcpu: Some(0), detail: Detail::Nothing }
    }

    const ENTRY: Event = Event::Entry { vcpu: Some(0) };

    #[test]
    fn an_exit_has_its_detail_and_its_time() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let mmio = Detail::Memory { address: 0xfee0_00b0, width: 4, write: true };
        for (at, event) in [
            (5, ENTRY),
            (10, exit(0x400, 0x99)),
            (11, Event::Detail(Detail::Fault)),
            (12, Event::Detail(mmio)),
            (13, Event::UserSpace),
            (40, ENTRY),
        ] {
            profile.take(&mut thread, at, event);
        }
        let (site, tally) = profile.sites().next().unwrap();
        assert_eq!((site.detail, site.rip), (mmio, Some(0x99)));
        assert_eq!(
            *tally,
            SiteCounts { count: 1, timed: 1, host_ns: 30, user: 1, user_ns: 27, ..SiteCounts::default() }
        );
        assert_eq!(profile.vcpus(), [(0, *tally)]);
    }

    /// With APICv or AVIC nothing is injected: a timer that has run out is accepted, and the processor does the rest.
    #[test]
    fn hole_21_an_accepted_interrupt_ends_a_run_of_its_own_vcpu() {
        let port = |port: u16, rip: u64| Event::Exit {
            reason: Reason::from_kvm(2, 0x7b),
            rip,
            vcpu: Some(0),
            detail: Detail::Port { port, width: 1, write: true },
        };
        let seen = |accepted: u32| {
            let (mut profile, mut thread) = (Profile::default(), Thread::default());
            let events = [
                port(0x70, 1),
                ENTRY,
                port(0x71, 3),
                Event::Accepted { vcpu: accepted },
                ENTRY,
                port(0x20, 5),
            ];
            for (at, event) in events.into_iter().enumerate() {
                profile.take(&mut thread, at as u64, event);
            }
            profile.end(&mut thread);
            let lengths: Vec<usize> = profile.runs.iter().map(|(run, _)| run.steps().len()).collect();
            lengths
        };
        assert_eq!(seen(0), [2], "the handler's access is not of the run");
        assert_eq!(seen(1), [3], "an interrupt that it sends to another vCPU");
    }

    #[test]
    fn what_kvm_did_before_it_told_belongs_to_the_exit() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let command = Detail::Msr { index: 0x830, write: true };
        for (at, event) in [
            (1, ENTRY),
            (2, Event::Detail(command)),
            (3, exit(0x7c, 7)),
            (4, ENTRY),
            // Of an entry before, and of another kind: not this one's.
            (5, Event::Detail(command)),
            (6, ENTRY),
            (7, exit(0x7c, 8)),
            (8, ENTRY),
            (9, Event::Detail(command)),
            (10, exit(0x78, 9)),
            (11, ENTRY),
        ] {
            profile.take(&mut thread, at, event);
        }
        let detail = |rip: u64| profile.sites().find(|(site, _)| site.rip == Some(rip)).unwrap().0.detail;
        assert_eq!((detail(7), detail(8), detail(9)), (command, Detail::Nothing, Detail::Nothing));
    }

    #[test]
    fn interrupts_of_a_samples_making_are_no_exits_of_the_guests() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        // Ended by ours; by one that came before; in a halt.
        for (code, at) in [(0x60, 20), (0x60, 10), (0x78, 20)] {
            profile.fresh(&mut thread);
            profile.take(&mut thread, 1, ENTRY);
            profile.take(&mut thread, at, exit(code, 5));
            profile.cut(&mut thread, 15);
        }
        // Begun by ours, told late; the next one is not ours.
        profile.fresh(&mut thread);
        for at in [1, 5] {
            profile.take(&mut thread, at, exit(0x60, 5));
            profile.take(&mut thread, at + 1, ENTRY);
        }
        let mut sites: Vec<_> =
            profile.sites().map(|(s, tally)| (s.reason.kind(), tally.count, tally.timed)).collect();
        sites.sort_unstable();
        let mut wanted = [(Kind::HostInterrupt, 2, 1), (Kind::Halt, 1, 0)];
        wanted.sort_unstable();
        assert_eq!(sites, wanted);
        assert_eq!(profile.cut, 2);
    }

    #[test]
    fn a_slices_first_and_last_runs_are_not_whole() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let port = |port: u16| {
            let detail = Detail::Port { port, width: 1, write: true };
            Event::Exit { reason: Reason::from_kvm(2, 0x7b), rip: u64::from(port), vcpu: None, detail }
        };
        profile.fresh(&mut thread);
        for event in [port(1), port(2), exit(0x78, 9), port(3), port(4), exit(0x78, 9), port(5), port(6)] {
            profile.take(&mut thread, 1, event);
        }
        profile.cut(&mut thread, 9);
        let runs: Vec<_> = profile.runs.iter().map(|(run, seen)| (run.rip, seen.times)).collect();
        assert_eq!(runs, [(3, 1)]);
    }

    #[test]
    fn an_entry_is_enough_to_know_hardware() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        profile.take(&mut thread, 1, Event::Detail(Detail::Msr { index: 1, write: true }));
        assert!(profile.is_by_consequence());
        profile.take(&mut thread, 2, ENTRY);
        assert!(!profile.is_by_consequence());
    }

    #[test]
    fn a_nested_guest_s_exits_have_no_address() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        for (at, event) in
            [(1, exit(0x78, 7)), (2, Event::Nested), (9, ENTRY), (10, exit(0x78, 7)), (12, ENTRY)]
        {
            profile.take(&mut thread, at, event);
        }
        let mut sites: Vec<_> =
            profile.sites().map(|(site, tally)| (site.nested, site.rip, tally.host_ns)).collect();
        sites.sort_unstable();
        assert_eq!(sites, [(false, Some(7), 2), (true, None, 8)]);
    }

    #[test]
    fn kvm_is_asked_for_ports_until_exits_tell_them() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let port = Detail::Port { port: 0x70, width: 1, write: true };
        let told = Event::Exit { reason: Reason::from_kvm(2, 0x7b), rip: 1, vcpu: None, detail: port };
        for at in 0..64 {
            assert!(!profile.tells_ports());
            profile.take(&mut thread, at, told);
            profile.take(&mut thread, at, Event::Detail(port));
        }
        assert!(profile.tells_ports());
        // An encrypted guest's exit has no fields.
        profile.take(&mut thread, 99, exit(0x403, 1));
        profile.take(&mut thread, 99, Event::Detail(port));
        assert!(!profile.tells_ports());
    }

    #[test]
    fn exits_without_entries_count_without_time() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        profile.take(&mut thread, 1, exit(0x78, 1));
        profile.take(&mut thread, 2, exit(0x78, 1));
        profile.lost(&mut thread, 3);
        profile.take(&mut thread, 9, ENTRY);
        profile.take(&mut thread, 10, exit(0x78, 1));
        profile.end(&mut thread);
        assert_eq!(profile.total(), SiteCounts { count: 3, ..SiteCounts::default() });
        assert_eq!(profile.lost_records, 3);
    }

    #[test]
    fn runs_end_where_the_guest_is_interrupted_or_records_are_lost() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let out = |port| {
            let reason = Reason::from_kvm(2, 0x7b);
            let detail = Detail::Port { port, width: 1, write: true };
            Event::Exit { reason, rip: port.into(), vcpu: Some(0), detail }
        };
        for event in [out(1), ENTRY, exit(0x60, 5), ENTRY, out(2), Event::Interrupt { vector: 3 }, ENTRY] {
            profile.take(&mut thread, 1, event);
        }
        for port in [3, 4] {
            profile.take(&mut thread, 2, out(port));
        }
        profile.lost(&mut thread, 1);
        for port in [5, 6, 7] {
            profile.take(&mut thread, 3, out(port));
        }
        profile.end(&mut thread);
        let mut runs: Vec<_> =
            profile.runs.iter().map(|(run, seen)| (run.rip, run.steps().len(), seen.times)).collect();
        runs.sort_unstable();
        assert_eq!(runs, [(1, 2, 1), (5, 3, 1)]);
    }

    /// What an MMIO exit was about KVM tells after it, and whether the VMM has answered it.
    #[test]
    fn mmio_is_of_a_run_with_what_kvm_says_of_it() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let mmio = |address: u64| Event::Detail(Detail::Memory { address, width: 4, write: true });
        let events = [
            exit(0x400, 1),
            mmio(0xfebf_0000),
            Event::UserSpace,
            ENTRY,
            exit(0x400, 2),
            mmio(0xfebf_0004),
            Event::UserSpace,
            // Injected after the second: the next access is the handler's.
            Event::Interrupt { vector: 9 },
            ENTRY,
            exit(0x400, 3),
            mmio(0xfebf_0008),
            ENTRY,
        ];
        for (at, event) in events.into_iter().enumerate() {
            profile.take(&mut thread, at as u64, event);
        }
        profile.end(&mut thread);
        let runs: Vec<_> = profile.runs.iter().map(|(run, seen)| (run.steps().to_vec(), seen)).collect();
        let step = |address: u64| Detail::Memory { address, width: 4, write: true };
        let counts = crate::runs::RunCounts { times: 1, user: 2 };
        assert_eq!(runs, [(vec![step(0xfebf_0000), step(0xfebf_0004)], counts)]);
    }

    #[test]
    fn time_without_a_processor_is_nobodys_work() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let preempted = Event::SwitchedOut { preempted: true };
        let waits = Event::SwitchedOut { preempted: false };
        for (at, event) in [
            // Told of a thread that has lost its processor before the watch.
            (1, Event::SwitchedIn),
            (100, exit(0x7b, 7)),
            (110, preempted),
            (130, Event::SwitchedIn),
            (140, Event::UserSpace),
            (150, waits),
            (250, Event::SwitchedIn),
            (260, preempted),
            (262, Event::SwitchedIn),
            // The same exit still: the VMM has called KVM_RUN and was sent back.
            (265, Event::UserSpace),
            (300, ENTRY),
            (400, exit(0x78, 9)),
            (410, waits),
            (1410, Event::SwitchedIn),
            (1420, ENTRY),
        ] {
            profile.take(&mut thread, at, event);
        }
        let of = |rip: u64| *profile.sites().find(|(site, _)| site.rip == Some(rip)).unwrap().1;
        let port = of(7);
        assert_eq!((port.host_ns, port.user_ns), (200, 160 - 102));
        assert_eq!((port.preempted_ns, port.blocked_ns), (22, 100));
        let halt = of(9);
        assert_eq!((halt.host_ns, halt.user_ns, halt.preempted_ns, halt.blocked_ns), (1020, 0, 0, 1000));
        let site = *profile.sites().find(|(site, _)| site.rip == Some(9)).unwrap().0;
        assert_eq!(profile.times(&site).unwrap().max_ns, 1020);
    }

    /// What was lost in between is no time without a processor.
    #[test]
    fn a_switch_whose_end_is_lost_does_not_count() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        profile.take(&mut thread, 1, exit(0x7b, 7));
        profile.take(&mut thread, 2, Event::SwitchedOut { preempted: true });
        profile.lost(&mut thread, 1);
        profile.take(&mut thread, 50, exit(0x7b, 7));
        profile.take(&mut thread, 60, Event::SwitchedIn);
        profile.take(&mut thread, 70, ENTRY);
        assert_eq!((profile.total().host_ns, profile.total().preempted_ns), (20, 0));
    }

    /// The first exit of a slice is still the one that has begun it.
    #[test]
    fn a_switch_is_not_the_first_thing_in_a_slice() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        profile.fresh(&mut thread);
        profile.take(&mut thread, 1, Event::SwitchedIn);
        profile.take(&mut thread, 2, exit(0x60, 5));
        assert_eq!(profile.cut, 1);
    }

    #[test]
    fn halts_are_kept_apart() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        for (at, event) in [(0, exit(0x78, 1)), (900, ENTRY), (1000, exit(0x7b, 1)), (1030, ENTRY)] {
            profile.take(&mut thread, at, event);
        }
        assert_eq!((profile.vcpus()[0].1.host_ns, profile.halted_ns(0)), (930, 900));
    }

    #[test]
    fn memory_is_bounded() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        for rip in 0..SITES as u64 + 1000 {
            profile.take(&mut thread, rip, exit(0x7b, rip));
        }
        profile.end(&mut thread);
        assert_eq!(profile.crowded, 1000);
        assert_eq!(profile.sites().count(), SITES + 1);
        assert_eq!(profile.total().count, SITES as u64 + 1000);
    }

    /// As many different things as can be, for as long as a test may take: what is kept does not grow with the time.
    #[test]
    fn hours_of_anything_are_bounded() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let mut random = 88_172_645_463_325_252_u64;
        let mut exits = 0;
        for at in 0..2_000_000_u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let address = Detail::Memory { address: random, width: 4, write: false };
            let event = match random % 8 {
                0 => ENTRY,
                1 => Event::Detail(address),
                2 => Event::Interrupt { vector: (random >> 9) as u8 },
                3 => Event::Entry { vcpu: Some((random >> 20) as u32) },
                _ => {
                    exits += 1;
                    let reason = Reason::from_kvm(2, random >> 16);
                    let vcpu = Some((random >> 40) as u32);
                    Event::Exit { reason, rip: random, vcpu, detail: Detail::Nothing }
                }
            };
            profile.take(&mut thread, at, event);
        }
        profile.end(&mut thread);
        assert!(profile.sites.len() <= 2 * SITES + 1 && profile.consequences.len() <= SITES);
        assert!(profile.halted.len() <= profile.vcpus.len());
        assert!(profile.vcpus.len() <= VCPUS && profile.interrupts.len() <= 256);
        assert_eq!(profile.total().count, exits);
    }

    #[test]
    fn a_software_kvm_shows_consequences_only() {
        let (mut profile, mut thread) = (Profile::default(), Thread::default());
        let port = Detail::Port { port: 0x3f8, width: 1, write: true };
        profile.take(&mut thread, 1, Event::Detail(port));
        profile.take(&mut thread, 2, Event::Detail(port));
        let read = Detail::Memory { address: 0xd_0000, width: 4, write: false };
        profile.take(&mut thread, 2, Event::Asked(read));
        profile.take(&mut thread, 2, Event::Detail(read));
        assert!(profile.is_by_consequence());
        assert_eq!(profile.total().count, 3);
        profile.take(&mut thread, 3, exit(0x7b, 7));
        profile.end(&mut thread);
        assert!(!profile.is_by_consequence());
        assert_eq!(profile.total().count, 1);
    }
}
