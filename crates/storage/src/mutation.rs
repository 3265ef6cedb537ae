//! Taking a promise to the guest out, to prove that the tests would notice; as `ioplane_memory::mutation` does with the invariants.
//!
//! With the feature `mutations` a promise is gone after [`remove`], or for a whole process if it was started with the
//! environment variable `IOPLANE_WITHOUT_FLUSH`, `IOPLANE_WITHOUT_FENCE` or `IOPLANE_WITHOUT_LOCKS`. Without the feature the question is a constant.
//! Tests of hosts that must not rely on one kernel's locks take these out.

/// What a disk promises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Promise {
    /// A flush is acknowledged after `fdatasync` has returned.
    Flush = 1,
    /// An image is opened after the last request of the dead process on it has ended.
    Fence = 2,
    /// An image that somebody alive has is nobody else's who would write to it, or count on its content.
    Locks = 4,
}

#[cfg(feature = "mutations")]
static REMOVED: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Takes `promise` out for this process, or puts all back with `None`.
#[cfg(feature = "mutations")]
pub fn remove(promise: Option<Promise>) {
    REMOVED.store(promise.map_or(0, |promise| promise as u8), std::sync::atomic::Ordering::SeqCst);
}

/// Whether `promise` has been taken out. Always false without the feature `mutations`.
#[inline(always)]
pub(crate) fn removed(promise: Promise) -> bool {
    #[cfg(feature = "mutations")]
    return (REMOVED.load(std::sync::atomic::Ordering::Relaxed) | removed_at_start()) & promise as u8 != 0;
    #[cfg(not(feature = "mutations"))]
    {
        let _ = promise;
        false
    }
}

#[cfg(feature = "mutations")]
fn removed_at_start() -> u8 {
    static AT_START: std::sync::OnceLock<u8> = std::sync::OnceLock::new();
    *AT_START.get_or_init(|| {
        let names = [
            ("IOPLANE_WITHOUT_FLUSH", Promise::Flush),
            ("IOPLANE_WITHOUT_FENCE", Promise::Fence),
            ("IOPLANE_WITHOUT_LOCKS", Promise::Locks),
        ];
        let set = names.iter().filter(|(name, _)| std::env::var_os(name).is_some());
        set.fold(0, |all, (_, promise)| all | *promise as u8)
    })
}
