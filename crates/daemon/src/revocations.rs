//! The authority's list of revoked certificates: a newer one in the identity's directory counts from then on, and connections of those on it end.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ioplane_identity::ListNews;
use tokio::time::MissedTickBehavior;

use super::Daemon;

/// Between two looks at the file.
const LOOKS: Duration = Duration::from_secs(2);

/// What tells one file from the next. It is replaced, not written over.
type Version = (u64, u64, SystemTime);

fn version(path: &Path) -> Option<Version> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.ino(), metadata.len(), metadata.modified().ok()?))
}

impl Daemon {
    /// Looks for a newer list, for ever. What a handshake finds first is told of here, too.
    pub(crate) async fn watch_revocations(self: Arc<Self>) {
        let identity = self.devices().identity().clone();
        let mut looks = tokio::time::interval(LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut seen = None;
        loop {
            looks.tick().await;
            let identity = identity.clone();
            let looked = tokio::task::spawn_blocking(move || {
                let found = version(&identity.list_file());
                let news = match found == seen {
                    true => ListNews { ended: identity.ended(), ..ListNews::default() },
                    false => identity.look_again(),
                };
                (found, news)
            });
            if let Ok((found, news)) = looked.await {
                seen = found;
                tell(news);
            }
        }
    }
}

fn tell(news: ListNews) {
    if let Some(number) = news.number {
        tracing::info!(number, "a list of revoked certificates counts from now on");
    }
    for peer in news.ended {
        tracing::warn!(
            host = peer.name,
            serial = peer.serial,
            "its certificate is revoked: a connection was ended"
        );
    }
    if let Some(error) = news.refused {
        tracing::error!(%error, "the list of revoked certificates is not taken");
    }
}
