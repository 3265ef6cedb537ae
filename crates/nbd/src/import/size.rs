//! The size of an export, which may grow while it is imported.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Read by channels, changed by whoever has learned of it. It never becomes less.
#[derive(Debug)]
pub(super) struct ExportSize {
    bytes: AtomicU64,
    /// Woken when it has grown.
    news: Arc<Notify>,
}

impl ExportSize {
    pub fn new(bytes: u64, news: Arc<Notify>) -> Arc<ExportSize> {
        Arc::new(ExportSize { bytes: AtomicU64::new(bytes), news })
    }

    /// In bytes.
    #[inline]
    pub fn now(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// It has so many bytes by now. Says what it had if that was less.
    pub fn grow(&self, bytes: u64) -> Option<u64> {
        let before = self.bytes.fetch_max(bytes, Ordering::AcqRel);
        (before < bytes).then(|| {
            self.news.notify_one();
            before
        })
    }
}
