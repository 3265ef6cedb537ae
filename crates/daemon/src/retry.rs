//! Trying again what could not be served.

use std::sync::Arc;

use super::Daemon;
use super::disk::Disk;
use super::exports::PublishedDisk;
use super::functions::Card;
use super::nic::Nic;
use super::registry::{Registered, Registry};

impl Daemon {
    /// Tries again, for as long as the daemon lives, what could not be served: each at its time, none waiting for another.
    pub(super) async fn retry(self: Arc<Self>) {
        loop {
            let context = self.disks.context();
            // Before looking, so that what fails in between is not missed.
            let failed = context.failed.notified();
            let devices = [self.disks.next(), self.nics.next(), self.functions.next()];
            let next = devices.into_iter().chain([self.exports.next(), self.switches.next()]);
            let due = async {
                match next.flatten().min() {
                    Some(next) => tokio::time::sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = failed => continue,
                () = due => {}
            }
            self.retry_due::<Disk>();
            self.retry_due::<Nic>();
            self.retry_due::<Card>();
            self.retry_due::<PublishedDisk>();
            for name in self.switches.due() {
                let daemon = self.clone();
                tokio::spawn(async move {
                    let Ok(_leave) = daemon.may_change() else { return daemon.switches.later(&name) };
                    // A reload opens uplinks too.
                    let _one = daemon.reloading.lock().await;
                    daemon.switches.retry(&name).await;
                });
            }
        }
    }

    fn retry_due<K: Registered>(self: &Arc<Self>) {
        for name in K::registry(self).due() {
            let daemon = self.clone();
            tokio::spawn(async move {
                let registry: &Registry<K> = K::registry(&daemon);
                // While everything is being handed over nothing is opened; a successor tries by itself.
                let Ok(_leave) = daemon.may_change() else { return registry.later(&name) };
                let _ = registry.retry(&name).await;
            });
        }
    }
}
