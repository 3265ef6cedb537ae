//! What is written down when a disk goes on with another backing, before it does: while its mirror answers nothing that only the old backing
//! has, it does not matter which of the two a daemon that starts after a crash finds noted (docs/decisions/0047-swap.md, "Commit").

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ioplane_api::spec::BackingSpec;
use ioplane_storage::ImageId;
use ioplane_storage::mirror::Mirror;

use super::mark::{self, Mark, unfinished_text};
use super::swap_kill::{self, SwapKillPoint};
use super::swap_rule::{DaemonSwapRule, removed};
use super::{Disk, Opened};
use crate::refusal::Refusal;
use crate::served::{StateRecord, blocking};
use crate::state_file::{DiskRecord, StateFile};

/// How often it is looked at whether the new backing has failed: the guest waits for that.
const LOOK: Duration = Duration::from_millis(2);
/// How long the new backing, which has failed, may take to be marked.
const MARKING: Duration = Duration::from_secs(1);
/// Between two attempts to undo.
const AGAIN: Duration = Duration::from_secs(1);

/// Returns when a mirror has failed. Asked for as long as a commit takes.
pub(super) async fn failure(mirror: &Mirror) {
    while mirror.fault().is_none() {
        tokio::time::sleep(LOOK).await;
    }
}

/// One attempt to go on with the new backing, as far as it is written down.
#[derive(Clone)]
pub(super) struct Commit(Arc<Inside>);

struct Inside {
    note: Arc<StateRecord<Disk>>,
    state_file: Arc<StateFile>,
    /// What was noted of the disk before.
    before: DiskRecord,
    from: BackingSpec,
    to: BackingSpec,
    /// Whether it has been undone, and so notes nothing more. Locked while the state file is written.
    undone: Mutex<bool>,
}

impl Commit {
    /// Of a disk that is noted in `note` to be on `from`, and is to go to `to`.
    pub fn of(
        note: Arc<StateRecord<Disk>>,
        state_file: Arc<StateFile>,
        from: &BackingSpec,
        to: &BackingSpec,
    ) -> Commit {
        let before = note.read();
        let (from, to, undone) = (from.clone(), to.clone(), Mutex::default());
        Commit(Arc::new(Inside { note, state_file, before, from, to, undone }))
    }

    /// Notes that the disk is on the new backing, once [`Mirror::begin_commit`] has said so. After an error, or if this is dropped, some of it may
    /// be noted: [`Commit::undo`]. Ends when the new backing fails, even if it does not answer.
    pub async fn begin(&self, mirror: &Arc<Mirror>, fresh: &Arc<Opened>) -> Result<(), Refusal> {
        let (inside, ours, fresh) = (self.0.clone(), mirror.clone(), fresh.clone());
        tokio::select! {
            begun = blocking(move || inside.begin(&ours, &fresh)) => begun,
            () = failure(mirror) => Err(Refusal::busy("the new backing has failed", "see to it, then swap again")),
        }
    }

    /// Notes that the disk is on the old backing, and lets the guest's requests end there alone. Until that is written they wait, however long
    /// it takes: whoever found the new backing noted would lack them.
    ///
    /// The new one has failed and need not answer. After a power failure the marks alone say which one is right, so before the guest goes on
    /// either the new one is marked, or the old one's mark is away.
    pub async fn undo(&self, mirror: &Mirror) {
        let inside = self.0.clone();
        self.until_written(move || inside.record_old()).await;
        swap_kill::here(SwapKillPoint::Undone);
        let inside = self.0.clone();
        let marking = blocking(move || inside.mark_new());
        // If it has not failed nobody waits for this, and there will be another attempt.
        let patience = mirror.fault().map_or(Duration::MAX, |_| MARKING);
        let refused = match tokio::time::timeout(patience, marking).await {
            Ok(Ok(())) => None,
            Ok(Err(refused)) => Some(refused.error),
            Err(_) => Some("it does not answer".to_owned()),
        };
        if let Some(why) = refused {
            tracing::error!(
                why,
                backing = self.0.to.name(),
                "an unfinished copy cannot be marked: do not use it"
            );
            let inside = self.0.clone();
            self.until_written(move || inside.unmark_old()).await;
        }
        mirror.end_commit();
    }

    async fn until_written(&self, write: impl Fn() -> Result<(), Refusal> + Clone + Send + 'static) {
        while let Err(refused) = blocking(write.clone()).await {
            tracing::error!(
                why = refused.error,
                hint = refused.remedy,
                "a swap has failed, and that cannot be written down: requests of the guest wait until it can"
            );
            tokio::time::sleep(AGAIN).await;
        }
    }
}

impl Inside {
    fn begin(&self, mirror: &Mirror, fresh: &Opened) -> Result<(), Refusal> {
        mark::clear(&self.to, Mark::Unfinished, &self.state_file)?;
        swap_kill::here(SwapKillPoint::Unmarked);
        let undone = self.undone.lock().unwrap_or_else(PoisonError::into_inner);
        if *undone {
            // It may have been marked again before it was unmarked here.
            self.mark_new()?;
            return Err(Refusal::busy("it was undone meanwhile", "swap again"));
        }
        let device = matches!(&self.to, BackingSpec::File { path, .. } if !path.is_file());
        if !removed(DaemonSwapRule::SwitchRecorded) {
            self.record(&self.to, device.then(|| fresh.backing.info().bytes), fresh.image, true)?;
        }
        drop(undone);
        swap_kill::here(SwapKillPoint::Recorded);
        swap_kill::fail_if_wanted(mirror);
        Ok(())
    }

    /// Before the new one is marked: a daemon that dies in between finds a swap that was not switched, and does the rest.
    fn record_old(&self) -> Result<(), Refusal> {
        let mut undone = self.undone.lock().unwrap_or_else(PoisonError::into_inner);
        *undone = true;
        swap_kill::here(SwapKillPoint::Failed);
        let DiskRecord { bytes, image, .. } = self.before;
        self.record(&self.from, bytes, image, false)
    }

    fn mark_new(&self) -> Result<(), Refusal> {
        if swap_kill::unmarkable() {
            return Err(Refusal::failed("a test does not let it be marked", "see the test"));
        }
        mark::set_or_note(&self.to, &unfinished_text(&self.before.now.name, &self.from), &self.state_file)
    }

    fn unmark_old(&self) -> Result<(), Refusal> {
        mark::clear_durably(&self.from, Mark::Superseded, &self.state_file)
    }

    fn record(
        &self,
        backing: &BackingSpec,
        bytes: Option<u64>,
        image: Option<ImageId>,
        switched: bool,
    ) -> Result<(), Refusal> {
        let change = |record: &mut DiskRecord| {
            record.now.backing = backing.clone();
            (record.bytes, record.image) = (bytes, image);
        };
        let name = self.before.now.name.clone();
        self.note.change_beside(change, |entries| {
            entries.swaps.entry(name).and_modify(|swap| swap.switched = switched);
        })
    }
}
