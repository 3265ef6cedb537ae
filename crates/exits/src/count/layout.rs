//! What crosses between the kernel's programs and us: the structures of `bpf/count.bpf.c`, and what they mean.

#![allow(unsafe_code)]
// UNSAFETY: promises the loader that these structures are plain numbers without gaps.

use aya::Pod;

use crate::event::{Detail, FaultCause};
use crate::profile::{Site, SiteCounts};
use crate::reason::{Isa, Kind, Reason};
use crate::runs::{LONGEST, Run, RunCounts};

/// Reasons with numbers below this are told apart by their sort.
pub(super) const CODES: usize = 2048;
/// The step of an exit whose end was not told.
pub(super) const UNTIMED: u16 = u16::MAX;
/// Of [`RawThread::vcpu_known`]; a thread that has only entered a guest has another value than this and 0.
pub(super) const VCPU_KNOWN: u8 = 1;
/// The step of an exit whose time is known, and whose step has found no room.
pub(super) const ANY_STEP: u16 = u16::MAX - 1;
const NESTED: u8 = 1;

/// `struct detail`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawDetail {
    data: u64,
    kind: u8,
    width: u8,
    write: u8,
    queue_known: u8,
    queue: u16,
    zero: u16,
}

/// `struct site`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawSite {
    rip: u64,
    detail: RawDetail,
    reason: u32,
    /// Which step of its time, as [`crate::times`] numbers them.
    pub step: u16,
    isa: u8,
    flags: u8,
}

/// `struct counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawCounts {
    pub count: u64,
    host_ns: u64,
    pub max_ns: u64,
    user: u64,
    user_ns: u64,
    preempted_ns: u64,
    blocked_ns: u64,
}

/// `struct run`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawRun {
    rip: u64,
    length: u64,
    steps: [RawDetail; LONGEST],
}

/// `struct run_counts`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RawRunCounts {
    times: u64,
    user: u64,
}

/// `struct thread`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RawThread {
    at: u64,
    user_at: u64,
    preempted_ns: u64,
    blocked_ns: u64,
    off_user: u64,
    off_at: u64,
    rip: u64,
    detail: RawDetail,
    early: RawDetail,
    reason: u32,
    pub vcpu: u32,
    pending: u8,
    isa: u8,
    kind: u8,
    user: u8,
    nested: u8,
    told: u8,
    off_preempted: u8,
    pub vcpu_known: u8,
    since: u64,
    last_rip: u64,
    last: RawDetail,
    run: RawRun,
    run_user: u64,
    in_run: u64,
    pub exits: u64,
    pub consequences: u64,
    pub events: u64,
    pub spin_windows: u64,
    pub lost: u64,
    pub runs_crowded: u64,
    pub ports_by_exit: u64,
    pub ports_by_kvm: u64,
    pub halted_ns: u64,
    timed: u64,
    all: RawCounts,
    pub vectors: [u64; 256],
}

// SAFETY: numbers only, without gaps (their sizes are compared below), and any bits are a value of them.
unsafe impl Pod for RawDetail {}
// SAFETY: as above.
unsafe impl Pod for RawSite {}
// SAFETY: as above.
unsafe impl Pod for RawCounts {}
// SAFETY: as above.
unsafe impl Pod for RawRun {}
// SAFETY: as above.
unsafe impl Pod for RawRunCounts {}
// SAFETY: as above.
unsafe impl Pod for RawThread {}

const _: () = {
    assert!(size_of::<RawDetail>() == 16 && size_of::<RawSite>() == 32 && size_of::<RawCounts>() == 56);
    assert!(size_of::<RawRun>() == 16 + 16 * LONGEST && size_of::<RawRunCounts>() == 16);
    assert!(size_of::<RawThread>() == 7 * 8 + 2 * 16 + 16 + 2 * 8 + 16 + 272 + 12 * 8 + 56 + 256 * 8);
};

impl RawThread {
    /// One that has seen nothing yet.
    pub fn new() -> Box<RawThread> {
        // SAFETY: numbers only: all zero is a value.
        Box::new(unsafe { std::mem::zeroed() })
    }

    /// The exit that it is in, which counts without a time.
    pub fn unfinished(&self) -> Option<(RawSite, RawCounts)> {
        let site = RawSite {
            rip: self.rip,
            detail: self.detail,
            reason: self.reason,
            step: UNTIMED,
            isa: self.isa,
            flags: if self.nested != 0 { NESTED } else { 0 },
        };
        let counts = RawCounts { count: 1, user: self.user.into(), ..RawCounts::default() };
        (self.pending != 0).then_some((site, counts))
    }

    /// The run that it is in, if it is one.
    pub fn run(&self) -> Option<(RawRun, RawRunCounts)> {
        (self.run.length >= 2).then_some((self.run, RawRunCounts { times: 1, user: self.run_user }))
    }

    /// All of its exits.
    pub fn counts(&self) -> SiteCounts {
        self.all.counts(self.timed)
    }
}

impl RawDetail {
    /// Nothing where it is none that the program writes.
    fn detail(&self) -> Detail {
        let (width, write) = (self.width, self.write != 0);
        match self.kind {
            1 => {
                let queue = (self.queue_known != 0).then_some(self.queue);
                Detail::Port { port: self.data as u16, width, write, queue }
            }
            2 => Detail::Memory { address: self.data, width, write },
            3 => Detail::Msr { index: self.data as u32, write },
            4 => Detail::Cpuid { leaf: self.data as u32 },
            5 => Detail::Hypercall { number: self.data as u32 },
            6 => Detail::Fault(match self.data {
                0 => FaultCause::Missing,
                1 => FaultCause::WriteProtected,
                2 => FaultCause::Protected,
                _ => FaultCause::Unknown,
            }),
            _ => Detail::Nothing,
        }
    }
}

impl RawSite {
    /// Whether only what KVM did about it betrays the exit.
    pub fn is_consequence(&self) -> bool {
        self.isa == 0
    }

    /// What it was about.
    pub fn detail(&self) -> Detail {
        self.detail.detail()
    }

    /// The site; `crowded`: by its reason alone.
    pub fn site(&self, crowded: bool) -> Site {
        let isa = match self.isa {
            1 => Isa::Vmx,
            2 => Isa::Svm,
            _ => Isa::Unknown,
        };
        let nested = self.flags & NESTED != 0;
        Site {
            reason: Reason { isa, code: self.reason },
            rip: (!nested && !crowded).then_some(self.rip),
            detail: self.detail(),
            nested,
        }
    }
}

impl RawCounts {
    /// Of these, `timed` have a time.
    pub fn counts(&self, timed: u64) -> SiteCounts {
        SiteCounts {
            count: self.count,
            timed,
            host_ns: self.host_ns,
            user: self.user,
            user_ns: self.user_ns,
            preempted_ns: self.preempted_ns,
            blocked_ns: self.blocked_ns,
        }
    }
}

impl RawRun {
    /// The run.
    pub fn run(&self) -> Run {
        let length = (self.length as usize).min(LONGEST);
        Run::of(self.rip, self.steps[..length].iter().map(RawDetail::detail))
    }
}

impl RawRunCounts {
    /// How often it was seen.
    pub fn counts(&self) -> RunCounts {
        RunCounts { times: self.times, user: self.user }
    }
}

/// The sorts of all reasons, Intel's and then AMD's, as the program numbers them.
pub(super) fn kinds() -> Vec<u8> {
    let of = |isa: Isa| (0..CODES as u32).map(move |code| number(Reason { isa, code }.kind()));
    of(Isa::Vmx).chain(of(Isa::Svm)).collect()
}

/// Sorts that the program treats alike have one number.
fn number(kind: Kind) -> u8 {
    match kind {
        Kind::Port => 1,
        Kind::Memory => 2,
        Kind::Msr => 3,
        Kind::Halt => 4,
        Kind::HostInterrupt => 5,
        Kind::InterruptWindow => 6,
        Kind::Timer => 7,
        Kind::Cpuid | Kind::Hypercall | Kind::Pause | Kind::Apic | Kind::Other => 0,
    }
}
