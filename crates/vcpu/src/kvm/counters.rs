//! What clustering has done for a vCPU, in memory that another process may read while it changes.
//!
//! One thread writes at a time, so each number is right by itself; two numbers that are read one after the other may be of
//! different moments.

use std::sync::atomic::{AtomicU64, Ordering};

use super::vm::ClusterObstacle;
use crate::memory::StopReason;

/// Places of the guest's code that are told apart for each vCPU; a power of two. The first stands for all that find no
/// room.
pub const SITES: usize = 256;
/// How many neighbours are looked at for a place.
const PROBES: usize = 8;
/// Instructions that are told apart; more than the decoder knows.
const INSTRUCTIONS: usize = 2048;

/// Why a cluster ended, or why none was begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterEnd {
    /// The interpreter has stopped.
    Stopped(StopReason),
    /// The VMM has made another call on the vCPU's descriptor.
    OtherCall,
    /// KVM had another exit for the VMM when it completed an access.
    KernelExit,
    /// It is switched off.
    SwitchedOff,
    /// It is not done for this VM.
    Obstacle(ClusterObstacle),
    /// The slots are being changed, or the VMM shares registers itself.
    Busy,
    /// An exception or interrupt is pending, or interrupts are held back.
    EventPending,
    /// The guest uses breakpoints.
    DebugRegisters,
    /// The thread blocks SIGSEGV or SIGBUS, so that memory that has gone away would end the process.
    FaultsBlocked,
    /// Attempts at this place have not paid.
    NotWorthIt,
    /// A fault of the interposer: it is off from then on.
    Panic,
}

macro_rules! reasons {
    ($($name:literal: $pattern:pat),* $(,)?) => {
        /// Names of the reasons, in the order of the counters.
        pub const REASONS: [&str; count!($($name)*)] = [$($name),*];

        impl ClusterEnd {
            /// Which of [`REASONS`] it is.
            pub fn index(self) -> usize {
                use ClusterEnd::*;
                match self { $($pattern => const { position($name) }),* }
            }
        }
    };
}

/// Where a name is in [`REASONS`].
const fn position(name: &str) -> usize {
    let name = name.as_bytes();
    let mut index = 0;
    loop {
        let other = REASONS[index].as_bytes();
        let mut same = other.len() == name.len();
        let mut at = 0;
        while same && at < name.len() {
            same = other[at] == name[at];
            at += 1;
        }
        if same {
            return index;
        }
        index += 1;
    }
}

macro_rules! count {
    () => { 0 };
    ($first:literal $($rest:literal)*) => { 1 + count!($($rest)*) };
}

reasons! {
    "mode": Stopped(StopReason::Mode),
    "instruction": Stopped(StopReason::Instruction),
    "exception": Stopped(StopReason::Exception),
    "privilege": Stopped(StopReason::Privilege),
    "interrupts enabled": Stopped(StopReason::InterruptWindow),
    "page tables": Stopped(StopReason::Translation(_)),
    "operand of a device": Stopped(StopReason::DeviceOperand),
    "device of the kernel": Stopped(StopReason::KernelDevice),
    "logged or read-only memory": Stopped(StopReason::Slot),
    "fault of the mapping": Stopped(StopReason::HostFault),
    "locked operation": Stopped(StopReason::Atomic),
    "instruction limit": Stopped(StopReason::InstructionLimit),
    "access limit": Stopped(StopReason::AccessLimit),
    "time limit": Stopped(StopReason::TimeLimit),
    "wanted by the VMM": Stopped(StopReason::Kicked),
    "other call of the VMM": OtherCall,
    "another exit": KernelExit,
    "switched off": SwitchedOff,
    "refused: local APIC in the VMM": Obstacle(ClusterObstacle::UserSpaceApic),
    "refused: protected VM": Obstacle(ClusterObstacle::Protected),
    "refused: guest_memfd": Obstacle(ClusterObstacle::GuestMemfd),
    "refused: dirty ring": Obstacle(ClusterObstacle::DirtyRing),
    "refused: debugger": Obstacle(ClusterObstacle::GuestDebug),
    "refused: remote TLB flush": Obstacle(ClusterObstacle::RemoteFlush),
    "refused: shadow page tables": Obstacle(ClusterObstacle::ShadowTables),
    "refused: unknown memory": Obstacle(ClusterObstacle::UnknownMemory),
    "VM being changed": Busy,
    "event pending": EventPending,
    "breakpoints": DebugRegisters,
    "faults are blocked": FaultsBlocked,
    "not worth it": NotWorthIt,
    "fault of the interposer": Panic,
}

/// Numbers for each reason.
pub const REASON_COUNTERS: usize = 32;
const _: () = assert!(REASONS.len() <= REASON_COUNTERS);

/// What becomes of a guest's batches ([`crate::batch`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchEvent {
    /// The doorbell has got its answer, without an error.
    Answered,
    /// Of those: with entries left.
    CutShort,
    /// The answer is an error.
    Refused,
    /// The answer has the last value, which could not be stored.
    NotStored,
    /// The VMM was given the doorbell.
    Left,
    /// An entry was answered.
    Entry,
}

/// What has become of a vCPU's batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// Doorbells that got an answer without an error.
    pub answered: u64,
    /// Of those, with entries left: the VMM or an interrupt wanted the vCPU, or the time was up.
    pub cut_short: u64,
    /// Doorbells whose answer was an error of the array.
    pub refused: u64,
    /// Doorbells whose answer had a value that could not be stored in the array.
    pub not_stored: u64,
    /// Doorbells that the VMM was given, so that the guest found nobody there.
    pub left: u64,
    /// Accesses that devices have answered.
    pub accesses: u64,
}

/// Numbers in [`BatchCounts`].
const BATCH_COUNTERS: usize = 6;

/// A place where the guest has exited with an access and code was interpreted after it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SiteCounters {
    rip: AtomicU64,
    clusters: AtomicU64,
    accesses: AtomicU64,
    instructions: AtomicU64,
    cycles: AtomicU64,
    ends: [AtomicU64; REASON_COUNTERS],
}

/// The counters of one vCPU. All zeros are a value of it.
#[repr(C)]
#[derive(Debug)]
pub struct VcpuCounters {
    real_accesses: AtomicU64,
    made_up_accesses: AtomicU64,
    completions: AtomicU64,
    returns: AtomicU64,
    /// By [`BatchEvent`].
    batches: [AtomicU64; BATCH_COUNTERS],
    not_begun: [AtomicU64; REASON_COUNTERS],
    sites: [SiteCounters; SITES],
    instructions: [AtomicU64; INSTRUCTIONS],
}

/// What clustering has done for one vCPU since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounts {
    /// Returns of KVM_RUN from the kernel, with whatever exit.
    pub returns: u64,
    /// Those with an access that may begin a cluster.
    pub real_accesses: u64,
    /// Returns with an access that the interpreter has found: exits saved.
    pub made_up_accesses: u64,
    /// Calls of KVM_RUN that entered nothing and only completed an access.
    pub completions: u64,
}

/// What is known of one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSite {
    /// Linear address of the instruction that exited; 0 for all that found no room.
    pub rip: u64,
    /// How often code was interpreted after it.
    pub clusters: u64,
    /// Accesses found: exits saved.
    pub accesses: u64,
    /// Instructions interpreted.
    pub instructions: u64,
    /// Cycles of the time stamp counter that it took.
    pub cycles: u64,
    /// How often each of [`REASONS`] ended it.
    pub ends: [u64; REASON_COUNTERS],
}

/// What one cluster adds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cluster {
    pub(super) rip: u64,
    pub(super) accesses: u32,
    pub(super) instructions: u64,
    pub(super) cycles: u64,
}

fn add(counter: &AtomicU64, more: u64) {
    // One writer: no need for an atomic addition.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

impl Default for VcpuCounters {
    fn default() -> Self {
        Self {
            real_accesses: AtomicU64::new(0),
            made_up_accesses: AtomicU64::new(0),
            completions: AtomicU64::new(0),
            returns: AtomicU64::new(0),
            batches: [const { AtomicU64::new(0) }; BATCH_COUNTERS],
            not_begun: [const { AtomicU64::new(0) }; REASON_COUNTERS],
            sites: std::array::from_fn(|_| SiteCounters::default()),
            instructions: [const { AtomicU64::new(0) }; INSTRUCTIONS],
        }
    }
}

impl VcpuCounters {
    /// The totals.
    pub fn counts(&self) -> ClusterCounts {
        ClusterCounts {
            returns: read(&self.returns),
            real_accesses: read(&self.real_accesses),
            made_up_accesses: read(&self.made_up_accesses),
            completions: read(&self.completions),
        }
    }

    /// What has become of batches.
    pub fn batches(&self) -> BatchCounts {
        let count = |event: BatchEvent| read(&self.batches[event as usize]);
        BatchCounts {
            answered: count(BatchEvent::Answered),
            cut_short: count(BatchEvent::CutShort),
            refused: count(BatchEvent::Refused),
            not_stored: count(BatchEvent::NotStored),
            left: count(BatchEvent::Left),
            accesses: count(BatchEvent::Entry),
        }
    }

    /// How often each of [`REASONS`] was why nothing was interpreted after an access.
    pub fn not_begun(&self) -> [u64; REASON_COUNTERS] {
        std::array::from_fn(|index| read(&self.not_begun[index]))
    }

    /// The places that have been seen.
    pub fn sites(&self) -> impl Iterator<Item = ClusterSite> + '_ {
        self.sites.iter().map(SiteCounters::counts).filter(|site| site.clusters != 0)
    }

    /// Instructions that are not interpreted and have ended clusters, by
    /// [`Interpreter::last_instruction`](crate::Interpreter::last_instruction).
    pub fn instructions(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.instructions.iter().map(read).enumerate().filter(|(_, count)| *count != 0)
    }

    /// A copy of what another process has.
    pub(super) fn of(bytes: &[u8]) -> Self {
        let mut words = bytes
            .chunks_exact(8)
            .map(|word| word.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte)));
        let counters = Self::default();
        counters.each(&mut |counter| counter.store(words.next().unwrap_or(0), Ordering::Relaxed));
        counters
    }

    /// Writes all of it, so that memory is behind it.
    pub(super) fn reset(&self) {
        self.each(&mut |counter| counter.store(0, Ordering::Relaxed));
    }

    /// All counters, in the order in which they are in memory.
    fn each(&self, visit: &mut impl FnMut(&AtomicU64)) {
        for counter in [&self.real_accesses, &self.made_up_accesses, &self.completions, &self.returns] {
            visit(counter);
        }
        self.batches.iter().for_each(&mut *visit);
        self.not_begun.iter().for_each(&mut *visit);
        for site in &self.sites {
            for counter in [&site.rip, &site.clusters, &site.accesses, &site.instructions, &site.cycles] {
                visit(counter);
            }
            site.ends.iter().for_each(&mut *visit);
        }
        self.instructions.iter().for_each(&mut *visit);
    }

    pub(super) fn returned(&self) {
        add(&self.returns, 1);
    }

    pub(super) fn real_access(&self) {
        add(&self.real_accesses, 1);
    }

    pub(super) fn made_up_access(&self) {
        add(&self.made_up_accesses, 1);
    }

    pub(super) fn completion(&self) {
        add(&self.completions, 1);
    }

    pub(super) fn batch(&self, event: BatchEvent) {
        add(&self.batches[event as usize], 1);
    }

    pub(super) fn stopped_at(&self, instruction: usize) {
        if let Some(counter) = self.instructions.get(instruction) {
            add(counter, 1);
        }
    }

    pub(super) fn declined(&self, why: ClusterEnd) {
        add(&self.not_begun[why.index()], 1);
    }

    pub(super) fn ended(&self, cluster: &Cluster, why: ClusterEnd) {
        let site = self.site(cluster.rip);
        add(&site.clusters, 1);
        add(&site.accesses, cluster.accesses.into());
        add(&site.instructions, cluster.instructions);
        add(&site.cycles, cluster.cycles);
        add(&site.ends[why.index()], 1);
    }

    fn site(&self, rip: u64) -> &SiteCounters {
        let mixed = rip ^ rip >> 8 ^ rip >> 16;
        let first = usize::try_from(mixed % SITES as u64).unwrap_or(0);
        for offset in 0..PROBES {
            let site = &self.sites[(first + offset) % SITES];
            if std::ptr::eq(site, &raw const self.sites[0]) {
                continue;
            }
            match read(&site.rip) {
                found if found == rip => return site,
                0 => {
                    site.rip.store(rip, Ordering::Relaxed);
                    return site;
                }
                _ => {}
            }
        }
        &self.sites[0]
    }
}

impl SiteCounters {
    fn counts(&self) -> ClusterSite {
        ClusterSite {
            rip: read(&self.rip),
            clusters: read(&self.clusters),
            accesses: read(&self.accesses),
            instructions: read(&self.instructions),
            cycles: read(&self.cycles),
            ends: std::array::from_fn(|index| read(&self.ends[index])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paging::TranslationFault;

    #[test]
    fn each_place_has_its_numbers_and_what_finds_no_room_shares() {
        let counters = VcpuCounters::default();
        let places = 400_u64;
        for place in 1..=places {
            let cluster = Cluster { rip: place << 4, accesses: 2, instructions: 10, cycles: 100 };
            counters.ended(&cluster, ClusterEnd::Stopped(StopReason::TimeLimit));
            counters.ended(&cluster, ClusterEnd::OtherCall);
        }
        let sites: Vec<ClusterSite> = counters.sites().collect();
        assert!(sites.len() > 200, "{} places", sites.len());
        assert_eq!(sites.iter().map(|site| site.accesses).sum::<u64>(), 4 * places);
        let time = ClusterEnd::Stopped(StopReason::TimeLimit).index();
        for site in sites.iter().filter(|site| site.rip != 0) {
            assert_eq!((site.clusters, site.instructions, site.cycles), (2, 20, 200));
            assert_eq!(site.ends[time], 1);
        }
        assert!(sites[0].rip == 0 && sites[0].clusters > 0, "more places than room");
    }

    #[test]
    fn the_order_in_memory_is_the_order_in_which_they_are_read() {
        use std::mem::offset_of;
        let words = size_of::<VcpuCounters>() / 8;
        let bytes: Vec<u8> = (0..words as u64).flat_map(u64::to_le_bytes).collect();
        let counters = VcpuCounters::of(&bytes);
        assert_eq!(read(&counters.returns), offset_of!(VcpuCounters, returns) as u64 / 8);
        let last = &counters.sites[SITES - 1];
        let offset = offset_of!(VcpuCounters, sites) + (SITES - 1) * size_of::<SiteCounters>();
        assert_eq!(read(&last.cycles), (offset + offset_of!(SiteCounters, cycles)) as u64 / 8);
        assert_eq!(read(&counters.instructions[INSTRUCTIONS - 1]), words as u64 - 1);
    }

    #[test]
    fn the_guide_explains_every_reason() {
        let guide = include_str!("../../../../docs/guide/fewer-exits.md");
        let rows: Vec<&str> = guide.lines().filter(|line| line.starts_with("| `")).collect();
        for reason in REASONS.iter().filter(|reason| !reason.starts_with("refused: ")) {
            let name = format!("`{reason}`");
            let explained = |row: &&str| row.split(" | ").next().is_some_and(|names| names.contains(&name));
            assert!(rows.iter().any(explained), "{reason} is missing in fewer-exits.md");
        }
    }

    #[test]
    fn reasons_have_names_of_their_own() {
        let names: std::collections::BTreeSet<&str> = REASONS.into_iter().collect();
        assert_eq!(names.len(), REASONS.len());
        let fault = ClusterEnd::Stopped(StopReason::Translation(TranslationFault::NotDirty));
        assert_eq!(REASONS[fault.index()], "page tables");
        assert_eq!(REASONS[ClusterEnd::Panic.index()], "fault of the interposer");
    }
}
