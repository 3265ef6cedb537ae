//! Disks follow their exports: in size, and in what people are told of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use ioplane_api::report::EventWord;
use ioplane_api::size::Size;
use ioplane_nbd::import::{Import, Told};
use tokio::time::MissedTickBehavior;

use super::Daemon;
use crate::disk::{Disk, exporter_news};

/// How often disks are looked at without news: one that was being swapped when its export grew follows then.
const LOOKS: Duration = Duration::from_secs(1);
/// Between two looks at least, however much exporters tell.
const REST: Duration = Duration::from_millis(50);

/// What was done about a disk of another machine last.
#[derive(Default)]
struct Followed {
    import: Weak<Import>,
    /// Its guest has been told of this size.
    bytes: Option<u64>,
    /// Why it has not been; said once.
    refused: Option<String>,
    /// By socket, which of its front ends has been told.
    front_ends: [u64; 2],
    told: Arc<Told>,
}

impl Daemon {
    /// Gives disks the size that their exports have, and says what exporters tell, for as long as the daemon lives.
    pub(super) async fn follow_exporters(self: Arc<Self>) {
        let exporters = self.disks.context().exporters().clone();
        let mut followed: BTreeMap<String, Followed> = BTreeMap::new();
        let mut looks = tokio::time::interval(LOOKS);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // Not put off by news, however many there are.
                biased;
                _ = looks.tick() => exporters.prune(),
                () = exporters.news().notified() => tokio::time::sleep(REST).await,
            }
            // While everything is being handed over the successor does it.
            let Ok(_leave) = self.may_change() else { continue };
            let names = self.disks.records();
            followed.retain(|name, _| names.contains_key(name));
            for name in names.into_keys() {
                let Ok(disk) = self.disks.served(&name) else { continue };
                let Some(import) = disk.import() else {
                    followed.remove(&name);
                    continue;
                };
                let known = followed.entry(name.clone()).or_default();
                if !std::ptr::eq(known.import.as_ptr(), Arc::as_ptr(&import)) {
                    *known = Followed { import: Arc::downgrade(&import), ..Followed::default() };
                }
                self.follow(&name, &disk, &import, known).await;
            }
        }
    }

    async fn follow(&self, name: &str, disk: &Disk, import: &Arc<Import>, known: &mut Followed) {
        let (told, bytes) = (import.told(), import.bytes());
        if let Some(text) = exporter_news(name, &known.told, &told) {
            tracing::warn!(disk = name, "{text}");
            self.disks.tell(EventWord::Changed, name, &text);
        }
        known.told = told;
        if known.bytes != Some(bytes) {
            self.follow_size(name, disk, import, bytes, known).await;
        }
        disk.tell_new_front_ends(&mut known.front_ends).await;
    }

    async fn follow_size(
        &self,
        name: &str,
        disk: &Disk,
        import: &Arc<Import>,
        bytes: u64,
        known: &mut Followed,
    ) {
        match disk.follow_size(import, Size(bytes)).await {
            Ok(()) => {
                if known.bytes.is_some() {
                    let text = format!("grown to {} with its export", Size(bytes));
                    tracing::info!(disk = name, bytes, "{text}");
                    self.disks.tell(EventWord::Changed, name, &text);
                }
                (known.bytes, known.refused) = (Some(bytes), None);
            }
            // Tried again: it may be swapped or compared at the moment.
            Err(refused) if known.refused.as_ref() != Some(&refused.error) => {
                tracing::warn!(
                    disk = name,
                    bytes,
                    why = refused.error,
                    "it does not have the size of its export yet"
                );
                known.refused = Some(refused.error);
            }
            Err(_) => {}
        }
    }
}
