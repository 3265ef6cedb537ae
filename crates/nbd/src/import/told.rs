//! What an exporter of ours tells beside the connections, by whichever way it does (docs/decisions/0072-the-session-of-two-hosts.md).

use std::sync::Arc;

use super::Import;
use super::connect::image_of;

/// How the exporter says that the export is.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ExporterState {
    /// It has told nothing.
    #[default]
    Silent,
    /// It is served.
    Served,
    /// Requests below it fail, or its image is not as it was published, as it says: its device, or the way to that.
    Troubled(String),
    /// A person has taken it away there.
    Withdrawn,
    /// The exporter ends, and says so: no failure of the network.
    Stopping,
}

/// What has been told last.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Told {
    /// How the export is.
    pub state: ExporterState,
    /// Who has the claim to write it.
    pub holder: Option<String>,
    /// Why it tells nothing, where it does not.
    pub why: Option<String>,
}

impl Import {
    /// Whether the exporter had sessions when the import was opened: [`super::open_session`].
    pub fn has_sessions(&self) -> bool {
        self.shared.has_sessions
    }

    /// What the exporter has told last. Nothing is done about it but that it is shown: what a connection finds counts.
    pub fn tell(&self, told: Told) {
        self.shared.told.store(Arc::new(told));
        self.shared.options.news.notify_one();
    }

    /// What it has told last.
    pub fn told(&self) -> Arc<Told> {
        self.shared.told.load_full()
    }

    /// The exporter has told that it is this instance and has so many bytes: more than before is taken, if connections have found the same instance.
    /// Less is never taken. To be called again while that holds: a connection that finds the instance later may have found another size.
    pub fn tell_size(&self, instance: &str, bytes: u64) {
        let known = self.shared.instance.load_full();
        let same = known.is_some_and(|known| *known == instance && is_same_disk(&known, instance));
        let block = u64::from(self.shared.facts.logical_block());
        // What nobody can have would be refused when it is looked at by a connection, too.
        if same && bytes <= i64::MAX as u64 {
            self.shared.grow(bytes - bytes % block);
        }
    }

    /// Its size in bytes by now.
    pub fn bytes(&self) -> u64 {
        self.shared.size.now()
    }
}

/// Whether two instances are of one image. An instance without an image is nobody's.
pub(super) fn is_same_disk(known: &str, now: &str) -> bool {
    !image_of(known).is_empty() && image_of(known) == image_of(now)
}
