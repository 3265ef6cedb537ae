//! The last step of a swap: the disk goes on with the new backing, once both are equal (docs/decisions/0047-swap.md).

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ioplane_api::refusal::Code;
use ioplane_api::size::Size;
use ioplane_storage::Backing;
use ioplane_storage::mirror::Mirror;
use ioplane_virtio::blk::Blk;

use super::commit::{self, Commit};
use super::ends::{SwapSource, has_kept_all};
use super::mark::{self, Mark};
use super::passage::{Ending, Passage, Passed};
use super::swap::{PAUSE, Swap, on_thread};
use super::swap_kill::{self, SwapKillPoint};
use super::{Disk, Opened, Shown, lock};
use crate::context::DaemonContext;
use crate::refusal::Refusal;
use crate::served::blocking;

/// How long the backing that a disk has left is waited for.
const LEFT_BEHIND: Duration = Duration::from_secs(10);

/// The disk is on the new backing.
pub(super) struct Arrival {
    /// How long it was at rest for that.
    pause: Duration,
    /// What was behind it until then.
    before: Arc<dyn Backing>,
    /// Requests that are still under way with that.
    ending: Option<Ending>,
}

impl Disk {
    /// The disk is on the new backing by one of its sockets, and there is no way back: tries until all of it is. Whatever still passes by the mirror
    /// goes to the new backing alone.
    pub(super) async fn bring_rest(
        &self,
        swap: &Arc<Swap>,
        mirror: &Arc<Mirror>,
        opened: &Arc<Opened>,
    ) -> Duration {
        loop {
            tokio::time::sleep(PAUSE).await;
            let changing = self.served.changing.lock().await;
            match self.exchange_mirror(swap, mirror, opened, None).await {
                Ok(arrival) => {
                    drop(changing);
                    return self.passes_on(arrival, opened).await;
                }
                Err(refused) => tracing::warn!(why = refused.error, "a part of the disk has yet to follow"),
            }
            drop(changing);
        }
    }

    /// The new backing is in the mirror's place: until nothing is under way with the mirror any more, and it is closed.
    pub(super) async fn passes_on(&self, arrival: Arrival, opened: &Opened) -> Duration {
        let Arrival { pause, before, ending } = arrival;
        let followed = async {
            if let Some(mut ending) = ending {
                self.see_to_the_end(opened.backing.clone(), &mut ending).await?;
            }
            // What a queue has left behind that was stopped may still read into the guest's memory; as long as it is there a queue that starts waits for it.
            on_thread(move || {
                if !before.wait_quiet(Instant::now() + LEFT_BEHIND) {
                    tracing::warn!("the backing that a disk has left has I/O under way");
                }
                drop(before);
            })
            .await
        };
        if let Err(refused) = followed.await {
            // It leads to the new backing alone.
            tracing::error!(error = refused.error, "the mirror of a swap that is done cannot be taken out");
        }
        pause
    }

    /// The switch. All that is written down is written before the guest waits: the old backing is marked, and then, while nothing is answered
    /// that only the old one has, it is noted that the disk is on the new one.
    pub(super) async fn switch(
        &self,
        swap: &Arc<Swap>,
        (mirror, source): (&Arc<Mirror>, &Arc<SwapSource>),
        opened: &Arc<Opened>,
        context: &DaemonContext,
    ) -> Result<Arrival, Refusal> {
        let changing = self.served.changing.lock().await;
        let name = self.served.note.read().now.name;
        let (from, state_file) = (swap.from.clone(), context.state_file.clone());
        let text = format!(
            "disk {name} went on with {} (the right one, unless that is marked unfinished)",
            swap.to.name()
        );
        blocking(move || mark::set(&from, Mark::Superseded, &text, &state_file)).await?;
        swap_kill::here(SwapKillPoint::Marked);
        let commit = Commit::of(self.served.note.clone(), context.state_file.clone(), &swap.from, &swap.to);
        let ours = mirror.clone();
        if !blocking(move || Ok(ours.begin_commit())).await? {
            return Err(not_equal());
        }
        let outcome = match commit.begin(mirror, opened).await {
            Ok(()) => self.exchange_mirror(swap, mirror, opened, Some((&commit, source))).await,
            Err(refused) => {
                commit.undo(mirror).await;
                Err(refused)
            }
        };
        drop(changing);
        outcome
    }

    /// Goes on with the new backing if both are equal, and puts it in the mirror's place. If the new one fails first, what was noted by
    /// `commit` is undone at once: the guest's requests wait for that. Without `commit` the disk has arrived, and what
    /// is left is to follow.
    async fn exchange_mirror(
        &self,
        swap: &Arc<Swap>,
        mirror: &Arc<Mirror>,
        opened: &Arc<Opened>,
        commit: Option<(&Commit, &Arc<SwapSource>)>,
    ) -> Result<Arrival, Refusal> {
        let (equal, imported) = (mirror.clone(), opened.clone());
        let (commit, source) = (commit.map(|(commit, _)| commit), commit.map(|(_, source)| source.clone()));
        let allowed = move |model: &Blk| {
            if let Some(source) = &source {
                has_kept_all(&imported)?;
                // What it marks again is seen below.
                source.restarts(&equal);
                let (old, new) = (Size(model.bytes()), Size(imported.backing.info().bytes));
                if new < old {
                    let error = format!("the new backing has {new}, and the guest has a disk of {old}");
                    let remedy = "cancel the swap, then swap again";
                    return Err(Refusal::conflict(error, remedy).coded(Code::LosesData));
                }
            }
            if equal.is_decided() || equal.is_equal() { Ok(()) } else { Err(not_equal()) }
        };
        let (shown, fresh) = (self.backing.clone(), opened.clone());
        let (decided, arriving) = (mirror.clone(), swap.clone());
        // The last word: whoever cancels later comes too late.
        let noted = move || {
            if !decided.decide() {
                return Err(not_equal());
            }
            arriving.arrived.store(true, Ordering::SeqCst);
            *lock(&shown) = Shown { report: fresh.report.clone(), import: fresh.import.clone() };
            Ok(())
        };
        let begun = Instant::now();
        let passage = Passage { allowed: Box::new(allowed), noted: Box::new(noted) };
        let exchange = self.pass_the_mirror(mirror, opened, passage);
        tokio::pin!(exchange);
        let mut undone = commit.is_none();
        let outcome = tokio::select! {
            outcome = &mut exchange => outcome,
            commit = failed(commit, mirror) => {
                commit.undo(mirror).await;
                undone = true;
                exchange.await
            }
        };
        let pause = begun.elapsed();
        match outcome {
            Ok((before, passed)) => {
                let (pause, ending) = match passed {
                    Passed::UnderWay => (Duration::ZERO, None),
                    Passed::StillEnding(ending) => (Duration::ZERO, Some(ending)),
                    Passed::AtRest => (pause, None),
                };
                Ok(Arrival { pause, before, ending })
            }
            Err(refused) => {
                if let Some(commit) = commit.filter(|_| !undone && !swap.has_arrived()) {
                    commit.undo(mirror).await;
                }
                Err(refused)
            }
        }
    }
}

fn not_equal() -> Refusal {
    Refusal::busy("something is still to be copied", "it is tried again")
}

/// Returns when the new backing of a commit has failed, never without one.
async fn failed<'a>(commit: Option<&'a Commit>, mirror: &Mirror) -> &'a Commit {
    match commit {
        Some(commit) => {
            commit::failure(mirror).await;
            commit
        }
        None => std::future::pending().await,
    }
}
