//! What is written down when a disk goes on with another backing, before it does: while its mirror answers nothing that only the old backing
//! has, it does not matter which of the two a daemon that starts after a crash finds noted (docs/decisions/0047-swap.md, "Commit").

use std::sync::Arc;
use std::time::Duration;

use ioplane_api::spec::BackingSpec;
use ioplane_storage::ImageId;
use ioplane_storage::mirror::Mirror;

use super::mark::{self, Mark, unfinished_text};
use super::swap_kill::{self, SwapKillPoint};
use super::{Disk, Opened};
use crate::refusal::Refusal;
use crate::served::{StateRecord, blocking};
use crate::state_file::{DiskRecord, StateFile};

/// How often it is looked at whether the new backing has failed: the guest waits for that.
const LOOK: Duration = Duration::from_millis(2);
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
        Commit(Arc::new(Inside { note, state_file, before, from: from.clone(), to: to.clone() }))
    }

    /// Notes that the disk is on the new backing. After an error some of it may be: [`Commit::undo`].
    pub async fn begin(&self, mirror: &Arc<Mirror>, fresh: Arc<Opened>) -> Result<(), Refusal> {
        let (inside, mirror) = (self.0.clone(), mirror.clone());
        blocking(move || inside.begin(&mirror, &fresh)).await
    }

    /// Notes that the disk is on the old backing, and lets the guest's requests end there alone. Until that is written they wait, however long
    /// it takes: whoever found the new backing noted would lack them.
    pub async fn undo(&self, mirror: &Mirror) {
        loop {
            let inside = self.0.clone();
            let Err(refused) = blocking(move || inside.undo()).await else { break };
            tracing::error!(
                why = refused.error,
                hint = refused.remedy,
                "a swap has failed, and that cannot be written down: requests of the guest wait until it can"
            );
            tokio::time::sleep(AGAIN).await;
        }
        mirror.end_commit();
    }
}

impl Inside {
    fn begin(&self, mirror: &Mirror, fresh: &Opened) -> Result<(), Refusal> {
        if !mirror.is_decided() && !mirror.begin_commit() {
            return Err(Refusal::busy("something is still to be copied", "it is tried again"));
        }
        mark::clear(&self.to, Mark::Unfinished, &self.state_file)?;
        swap_kill::here(SwapKillPoint::Unmarked);
        let device = matches!(&self.to, BackingSpec::File { path, .. } if !path.is_file());
        self.record(&self.to, device.then(|| fresh.backing.info().bytes), fresh.image, true)?;
        swap_kill::here(SwapKillPoint::Recorded);
        swap_kill::fail_if_wanted(mirror);
        Ok(())
    }

    /// In this order: a daemon that dies in between finds a swap that was not switched, and marks the new backing.
    fn undo(&self) -> Result<(), Refusal> {
        let DiskRecord { now, bytes, image, .. } = &self.before;
        self.record(&now.backing, *bytes, *image, false)?;
        swap_kill::here(SwapKillPoint::Undone);
        mark::set(&self.to, Mark::Unfinished, &unfinished_text(&now.name, &self.from), &self.state_file)
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
