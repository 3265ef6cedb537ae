//! Kill points: the moments of a request's life at which a test kills the daemon, by name.
//!
//! Crash replay is right if the guest cannot tell at which of these the daemon died. With the feature `kill-points` the
//! environment variable `IOPLANE_KILL_AT=NAME:N` makes the process send itself SIGKILL the N-th time it passes that point;
//! with `IOPLANE_KILL_ONCE=FILE` it counts only once that file exists. Without the feature nothing of this is in the binary.

macro_rules! points {
    ($($(#[$doc:meta])* $variant:ident $name:literal,)*) => {
        /// A moment in the life of a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum KillPoint { $($(#[$doc])* $variant,)* }

        impl KillPoint {
            /// All of them, in the order in which a request passes them.
            pub const ALL: &[KillPoint] = &[$(KillPoint::$variant,)*];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $(KillPoint::$variant => $name,)* }
            }
        }
    };
}

points! {
    /// The available index has been read, nothing is recorded yet.
    Seen "seen",
    /// The journal says that the head is in flight; its descriptors have not been read.
    Journalled "journalled",
    /// The request has been read and checked; the storage does not know it.
    Parsed "parsed",
    /// The storage has it noted down, the kernel has not.
    Submitted "submitted",
    /// The kernel has it.
    Pushed "pushed",
    /// The storage says that it has ended; the guest's status byte is as it was.
    Reaped "reaped",
    /// The status byte is written, the used element is not.
    StatusWritten "status-written",
    /// The used element is written and noted as part of the batch; the used index does not show it.
    UsedWritten "used-written",
    /// The used index shows it; the journal still says in flight.
    Published "published",
    /// The journal's in-flight marks of the batch are off; its used index is the old one.
    Unmarked "unmarked",
    /// The journal is whole; the driver has not been interrupted.
    Settled "settled",
    /// The driver has been interrupted.
    Signalled "signalled",
    /// After a crash: the journal has been read, nothing has been submitted again.
    Recovered "recovered",
    /// After a crash: a request has been submitted again.
    Replayed "replayed",
}

/// Dies here if the test wants that.
#[inline(always)]
pub fn here(point: KillPoint) {
    #[cfg(feature = "kill-points")]
    armed::pass(point);
    #[cfg(not(feature = "kill-points"))]
    let _ = point;
}

/// Dies here if `offset` is on the sector that the environment variable `IOPLANE_KILL_AT_SECTOR` names: a request that
/// kills the daemon whenever it is tried.
#[inline(always)]
pub fn at_offset(offset: u64) {
    #[cfg(feature = "kill-points")]
    armed::pass_offset(offset);
    #[cfg(not(feature = "kill-points"))]
    let _ = offset;
}

/// Whether the journal is kept. A test takes it out, to show that crash replay stands on it.
#[inline(always)]
pub fn journal_kept() -> bool {
    #[cfg(feature = "kill-points")]
    return !armed::without_journal();
    #[cfg(not(feature = "kill-points"))]
    true
}

#[cfg(feature = "kill-points")]
mod armed {
    use super::KillPoint;
    use std::path::PathBuf;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    static PLAN: OnceLock<Option<(KillPoint, u64)>> = OnceLock::new();
    static PASSED: AtomicU64 = AtomicU64::new(0);

    fn plan() -> Option<(KillPoint, u64)> {
        let text = std::env::var("IOPLANE_KILL_AT").ok()?;
        let (name, times) = text.split_once(':').unwrap_or((&text, "1"));
        let point = KillPoint::ALL.iter().copied().find(|p| p.name() == name);
        let point = point.unwrap_or_else(|| panic!("IOPLANE_KILL_AT={text}: no kill point is called {name}"));
        Some((
            point,
            times.parse().unwrap_or_else(|_| panic!("IOPLANE_KILL_AT={text}: {times} is not a count")),
        ))
    }

    pub fn pass(point: KillPoint) {
        if let Some((wanted, times)) = *PLAN.get_or_init(plan)
            && wanted == point
            && counts()
            && PASSED.fetch_add(1, Ordering::Relaxed) + 1 == times
        {
            die();
        }
    }

    fn counts() -> bool {
        static ONCE: OnceLock<Option<PathBuf>> = OnceLock::new();
        let file = ONCE.get_or_init(|| std::env::var_os("IOPLANE_KILL_ONCE").map(Into::into));
        file.as_ref().is_none_or(|file| file.exists())
    }

    pub fn pass_offset(offset: u64) {
        static SECTOR: OnceLock<Option<u64>> = OnceLock::new();
        let sector = SECTOR.get_or_init(|| std::env::var("IOPLANE_KILL_AT_SECTOR").ok()?.parse().ok());
        if *sector == Some(offset / 512) {
            die();
        }
    }

    fn die() -> ! {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        // The signal is on its way; nothing after this point may happen.
        loop {
            std::thread::park();
        }
    }

    pub fn without_journal() -> bool {
        static WITHOUT: OnceLock<bool> = OnceLock::new();
        *WITHOUT.get_or_init(|| std::env::var_os("IOPLANE_WITHOUT_JOURNAL").is_some())
    }
}
