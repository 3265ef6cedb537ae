//! The authority's list of revoked certificates: a newer one in the identity's directory counts from then on, and connections of those on it end.

use std::sync::Arc;
use std::time::Duration;

use ioplane_identity::{ListNews, ListWatch};
use tokio::time::MissedTickBehavior;

use super::Daemon;

/// Between two looks at the file.
const LOOKS: Duration = Duration::from_secs(2);

impl Daemon {
    /// Looks for a newer list, for ever. What a handshake finds first is told of here, too.
    pub(crate) async fn watch_revocations(self: Arc<Self>) {
        let identity = self.devices().identity().clone();
        let mut watch = ListWatch::new(identity.clone());
        let mut looks = tokio::time::interval(LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            looks.tick().await;
            let looked = tokio::task::spawn_blocking(move || {
                let news = watch.look();
                (watch, news)
            });
            watch = match looked.await {
                Ok((watch, news)) => {
                    tell(news);
                    watch
                }
                Err(_) => ListWatch::new(identity.clone()),
            };
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
