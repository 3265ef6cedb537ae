//! Taking an invariant out, to prove that the tests notice.
//!
//! A test is only worth something if it fails when what it tests is gone. With the feature `mutations` the code asks [`removed`]
//! before it keeps an invariant; a test removes one and must see failures. Without the feature the question is a constant
//! and costs nothing.

/// The invariants, by number (docs/architecture.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Invariant {
    /// 1: what the guest does during quiescence is kept: kicks are latched, accesses wait.
    KeepsWhatArrives = 1,
    /// 2: resuming looks at every ring again.
    LooksAgain = 2,
    /// 3: resuming signals every queue once.
    SignalsOnce = 3,
    /// 4: loaded state is hostile input.
    DistrustsLoaded = 4,
    /// 5: a missed deadline gives the running device back whole.
    GivesBack = 5,
    /// 6: every store to guest memory is marked in the dirty log, after the store.
    MarksStores = 6,
    /// 7: one poll is bounded in bytes, requests and system calls, whatever guest or peer ask for.
    BoundsPolls = 7,
    /// 8: what one client can take of what all share has a quota.
    KeepsQuotas = 8,
}

impl Invariant {
    /// Those that the conformance suite checks on each device and host, in order. The tests of the others are listed in
    /// `crates/testkit/tests/bounds.rs`.
    pub const OF_DEVICES: [Invariant; 6] = [
        Invariant::KeepsWhatArrives,
        Invariant::LooksAgain,
        Invariant::SignalsOnce,
        Invariant::DistrustsLoaded,
        Invariant::GivesBack,
        Invariant::MarksStores,
    ];
}

/// Names the invariant that a process begins without, by number. Only heard with the feature `mutations`.
pub const VARIABLE: &str = "IOPLANE_INVARIANT_REMOVED";

/// The environment has not been asked yet.
#[cfg(feature = "mutations")]
const UNKNOWN: u8 = u8::MAX;

#[cfg(feature = "mutations")]
static REMOVED: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(UNKNOWN);

/// What the environment says, which holds until [`remove`] is called. Allocates, once.
#[cfg(feature = "mutations")]
#[cold]
fn asked() -> u8 {
    use std::sync::atomic::Ordering::SeqCst;
    let said = std::env::var(VARIABLE).ok().and_then(|number| number.parse().ok()).unwrap_or(0);
    REMOVED.compare_exchange(UNKNOWN, said, SeqCst, SeqCst).map_or_else(|known| known, |_| said)
}

/// Takes `invariant` out for this process, or puts all of them back with `None`.
#[cfg(feature = "mutations")]
pub fn remove(invariant: Option<Invariant>) {
    REMOVED.store(invariant.map_or(0, |l| l as u8), std::sync::atomic::Ordering::SeqCst);
}

/// A bound that goes with `invariant`: `bound`, or [`u64::MAX`] if the invariant has been taken out.
#[inline(always)]
pub fn bound(invariant: Invariant, bound: u64) -> u64 {
    if removed(invariant) { u64::MAX } else { bound }
}

/// Whether `invariant` has been taken out. Always false without the feature `mutations`.
#[inline(always)]
pub fn removed(invariant: Invariant) -> bool {
    #[cfg(feature = "mutations")]
    {
        let known = REMOVED.load(std::sync::atomic::Ordering::Relaxed);
        (if known == UNKNOWN { asked() } else { known }) == invariant as u8
    }
    #[cfg(not(feature = "mutations"))]
    {
        let _ = invariant;
        false
    }
}

#[cfg(feature = "mutations")]
static TWICE: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Takes out, or puts back, that every descriptor is read once, which is no invariant but what keeps a driver that changes its rings from
/// being believed twice. Says whether that can be done here: not without the feature `mutations`.
pub fn read_twice(twice: bool) -> bool {
    #[cfg(feature = "mutations")]
    TWICE.store(twice, std::sync::atomic::Ordering::SeqCst);
    let _ = twice;
    cfg!(feature = "mutations")
}

/// Whether [`read_twice`] has taken it out. Always false without the feature `mutations`.
#[inline(always)]
pub fn reads_twice() -> bool {
    #[cfg(feature = "mutations")]
    return TWICE.load(std::sync::atomic::Ordering::Relaxed);
    #[cfg(not(feature = "mutations"))]
    false
}
