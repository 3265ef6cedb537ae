//! Taking a law out, to prove that the tests would notice.
//!
//! The conformance suite is only worth something if it fails when a law is gone. With the feature `mutations` each law
//! asks [`removed`] before it does its duty; a test names one law, runs the suite and must see it fail. Without the feature
//! the question is a constant and costs nothing.

/// The six laws of the house, by number (docs/architecture.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Law {
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
}

impl Law {
    /// All six, in order.
    pub const ALL: [Law; 6] = [
        Law::KeepsWhatArrives,
        Law::LooksAgain,
        Law::SignalsOnce,
        Law::DistrustsLoaded,
        Law::GivesBack,
        Law::MarksStores,
    ];
}

#[cfg(feature = "mutations")]
static REMOVED: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Takes `law` out for this process, or puts all of them back with `None`.
#[cfg(feature = "mutations")]
pub fn remove(law: Option<Law>) {
    REMOVED.store(law.map_or(0, |l| l as u8), std::sync::atomic::Ordering::SeqCst);
}

/// Whether `law` has been taken out. Always false without the feature `mutations`.
#[inline(always)]
pub fn removed(law: Law) -> bool {
    #[cfg(feature = "mutations")]
    return REMOVED.load(std::sync::atomic::Ordering::Relaxed) == law as u8;
    #[cfg(not(feature = "mutations"))]
    {
        let _ = law;
        false
    }
}

#[cfg(feature = "mutations")]
static TWICE: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);

/// Takes out, or puts back, that every descriptor is read once, which is no law but what keeps a driver that changes its rings from
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
