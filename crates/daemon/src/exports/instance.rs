//! Which instance an export is: what a client that comes back compares (docs/decisions/0044-remote-requests-once.md).
//!
//! ```text
//!   IMAGE@BOOT            before the @: which disk it is.    behind it: whether something that was acknowledged may be lost
//!   IMAGE@BOOT.3          the third flush has failed
//!   IMAGE~CONTENT@BOOT    nobody may write it, and it was not written since it had this content
//! ```

use std::sync::{Arc, Mutex, PoisonError};

use ioplane_nbd::export::FailedFlushes;
use ioplane_storage::ImageId;

use super::random::random;
use crate::refusal::Refusal;

/// The instance that an export is at this moment. Clones are of the same export.
#[derive(Clone)]
pub struct ExportInstance {
    name: Arc<str>,
    failed: Arc<FailedFlushes>,
    unrecorded: Arc<Mutex<Option<String>>>,
}

impl ExportInstance {
    /// Of an image, in this boot of the host. What the kernel has taken survives this process, so its start does not count. `content`: of one that nobody may
    /// write.
    pub fn of(
        image: Option<ImageId>,
        content: Option<String>,
        failed: &Arc<FailedFlushes>,
    ) -> Result<ExportInstance, Refusal> {
        let image = match (image, content) {
            (Some(image), Some(content)) => format!("{image}~{content}"),
            (Some(image), None) => image.to_string(),
            // A disk in memory is another one after each start.
            (None, _) => random("uuid")?,
        };
        Ok(ExportInstance::new(&format!("{image}@{}", random("boot_id")?), failed))
    }

    /// Called `name` while no flush has failed.
    pub fn new(name: &str, failed: &Arc<FailedFlushes>) -> ExportInstance {
        ExportInstance { name: name.into(), failed: failed.clone(), unrecorded: Arc::default() }
    }

    /// Its name now: another one from the moment when a flush has failed.
    pub fn now(&self) -> String {
        self.counted().0
    }

    /// The same, and how many flushes have failed by then.
    pub fn counted(&self) -> (String, u64) {
        match self.failed.count() {
            0 => (self.name.to_string(), 0),
            count => (format!("{}.{count}", self.name), count),
        }
    }

    /// Why nobody may use the export, if that is so: a flush has failed, and the next process would not know.
    pub fn unrecorded(&self) -> Option<String> {
        self.unrecorded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Somebody has tried to write it down.
    pub fn set_unrecorded(&self, why: Option<String>) {
        *self.unrecorded.lock().unwrap_or_else(PoisonError::into_inner) = why;
    }
}
