//! Another backing behind a disk, while requests of its guest are under way: those end with the backing before, and whatever comes goes to the new one,
//! so nothing stands still (docs/decisions/0075-exchange-under-way.md). Where that cannot be, the disk comes to rest.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ioplane_api::report::RemoteWord;
use ioplane_device::Change;
use ioplane_nbd::import::Import;
use ioplane_storage::mirror::Mirror;
use ioplane_storage::{Backing, StorageError};
use ioplane_virtio::blk::{Blk, ChannelExchange, FreshChannel, LeftChannel};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::mark::{self, Mark, unfinished_text};
use super::swap_rule::{DaemonSwapRule, removed};
use super::{Disk, Opened, remote};
use crate::context::DaemonContext;
use crate::refusal::Refusal;
use crate::served::blocking;
use crate::state_file::SwapRecord;

/// How long new connections to a server may take before the queues get them: what comes then waits for them.
const CONNECTED: Duration = Duration::from_secs(2);
/// How often that is looked at, and whether the old channels have nothing in flight any more.
const LOOK: Duration = Duration::from_millis(1);
/// How long requests under way may take before it is said that something waits for them.
const LONG: Duration = Duration::from_secs(10);

/// How long requests that are under way past a new mirror may take before it is taken out again.
const PAST_THE_MIRROR: Duration = Duration::from_secs(10);

/// What may keep a backing from being put in.
type Allowed = Box<dyn FnOnce(&Blk) -> Result<(), Refusal> + Send>;
/// Writes down that it is there.
type Noted = Box<dyn FnOnce() -> Result<(), Refusal> + Send>;

/// What is asked and done at the moment of the exchange.
pub(super) struct Passage {
    pub allowed: Allowed,
    pub noted: Noted,
}

impl Passage {
    /// Nothing.
    pub fn free() -> Self {
        Passage { allowed: Box::new(|_| Ok(())), noted: Box::new(|| Ok(())) }
    }
}

/// How a backing came to be behind a disk.
pub(super) enum Passed {
    /// Requests went on.
    UnderWay,
    /// The same, and some of those before have not ended in the time that they had. The backing before is used until they have.
    StillEnding(Ending),
    /// None could begin for a while.
    AtRest,
}

/// The end of an exchange that nobody has waited for yet. It comes to it whether or not anybody does.
pub(super) struct Ending {
    over: JoinHandle<Result<bool, Refusal>>,
    all_taken: Option<bool>,
}

impl Ending {
    /// Until no queue has anything in flight with the backing before. Says whether all queues have taken the new one.
    async fn all_taken(&mut self) -> Result<bool, Refusal> {
        if let Some(all_taken) = self.all_taken {
            return Ok(all_taken);
        }
        let over = (&mut self.over).await.map_err(|error| Refusal::bug(error.to_string()))?;
        Ok(*self.all_taken.insert(over?))
    }
}

/// How many exchanges of a disk have not come to their end: of each, some request is under way with the backing before.
#[derive(Default)]
pub(super) struct Exchanges(watch::Sender<usize>);

impl Exchanges {
    fn begin(&self) -> OpenExchange {
        self.0.send_modify(|open| *open += 1);
        OpenExchange(self.0.clone())
    }

    async fn none_open(&self) {
        let mut open = self.0.subscribe();
        // Its sender is ours.
        let _ = open.wait_for(|open| *open == 0).await;
    }
}

struct OpenExchange(watch::Sender<usize>);

impl Drop for OpenExchange {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

enum Step {
    Done(Arc<dyn Backing>, Arc<ChannelExchange>),
    Refused(Refusal),
    /// Nothing was done: its queues have changed.
    NotNow(Passage),
}

/// Channels of `backing` for these queues.
fn open(backing: &dyn Backing, queues: &[(u16, u16)]) -> Result<Vec<FreshChannel>, StorageError> {
    queues.iter().map(|(queue, size)| FreshChannel::open(backing, *queue, *size)).collect()
}

/// Until all connections of an import are there, within [`CONNECTED`].
async fn connected(import: &Import) {
    let end = Instant::now() + CONNECTED;
    while remote::report(import).state != RemoteWord::Connected && Instant::now() < end {
        tokio::time::sleep(LOOK).await;
    }
}

/// What [`Ending::all_taken`] waits for.
async fn over(exchange: Arc<ChannelExchange>, disk: String, _open: OpenExchange) -> Result<bool, Refusal> {
    let (begun, mut told, mut all) = (Instant::now(), false, true);
    loop {
        let over = exchange.is_over();
        // What a queue gave back before it let go of the exchange is there now.
        fence(Ordering::Acquire);
        while let Some(left) = exchange.next_left() {
            all &= matches!(left, LeftChannel::Ended(_));
            // Closing may wait for an image's last I/O.
            blocking(move || {
                drop(left);
                Ok(())
            })
            .await?;
        }
        if over {
            // Channels that no queue has taken are closed with it.
            blocking(move || {
                drop(exchange);
                Ok(())
            })
            .await?;
            return Ok(all);
        }
        if !told && begun.elapsed() > LONG {
            tracing::warn!(disk, "requests of the guest are still under way with the backing before");
            told = true;
        }
        tokio::time::sleep(LOOK).await;
    }
}

impl Disk {
    /// Puts `fresh` behind the disk, and gives the one before. `imports`: those whose connections it needs. `patience`: how long to wait for the end of what
    /// is under way with the one before, and with those before that. After an error the disk is as [`Disk::exchange`] leaves it.
    pub(super) async fn pass(
        &self,
        fresh: Arc<dyn Backing>,
        imports: Vec<Arc<Import>>,
        patience: Duration,
        passage: Passage,
    ) -> Result<(Arc<dyn Backing>, Passed), Refusal> {
        // Two instances change one inside the other.
        if self.served.second().is_some() {
            return self.pass_at_rest(fresh, passage).await;
        }
        let name = self.served.note.read().now.name;
        let queues = self.served.handle.change(|model| (model.running_queues(), false)).await?;
        let backing = fresh.clone();
        let channels = match blocking(move || Ok(open(&*backing, &queues))).await? {
            Ok(channels) => channels,
            Err(error) => {
                tracing::info!(disk = name, %error, "its queues come to rest for another backing");
                return self.pass_at_rest(fresh, passage).await;
            }
        };
        for import in &imports {
            connected(import).await;
        }
        let new = fresh.clone();
        let step = move |model: &mut Blk| {
            if let Err(why) = model.may_exchange(&*new, &channels) {
                tracing::info!(why, "its queues come to rest for another backing");
                return Step::NotNow(passage);
            }
            match (passage.allowed)(model).and_then(|()| (passage.noted)()) {
                Ok(()) => {
                    let (old, exchange) = model.exchange_backing(new, channels);
                    Step::Done(old, exchange)
                }
                Err(refused) => Step::Refused(refused),
            }
        };
        let step = move |model: &mut Blk| {
            let step = tokio::task::block_in_place(|| step(model));
            let change = match &step {
                Step::Done(_, exchange) => Some(exchange.change()),
                _ => None,
            };
            (step, change)
        };
        let (old, exchange) = match self.served.handle.change_queues(step).await? {
            Step::Done(old, exchange) => (old, exchange),
            Step::Refused(refused) => return Err(refused),
            Step::NotNow(passage) => return self.pass_at_rest(fresh, passage).await,
        };
        // What comes back is seen to its end, whether or not anybody waits for that.
        let over = tokio::spawn(over(exchange, name, self.exchanges.begin()));
        let mut ending = Ending { over, all_taken: None };
        let ended = async {
            let all_taken = ending.all_taken().await?;
            self.exchanges.none_open().await;
            Ok(all_taken)
        };
        match tokio::time::timeout(patience, ended).await {
            Ok(Ok(true)) => Ok((old, Passed::UnderWay)),
            Ok(Ok(false)) => {
                self.exchange_again(fresh).await?;
                Ok((old, Passed::AtRest))
            }
            Ok(Err(refused)) => Err(refused),
            Err(_) => Ok((old, Passed::StillEnding(ending))),
        }
    }

    /// A queue could not take `fresh`, and still has the backing before.
    async fn exchange_again(&self, fresh: Arc<dyn Backing>) -> Result<(), Refusal> {
        self.exchange(fresh, |_| Ok(()), || Ok(())).await.map(drop)
    }

    /// Waits for the end of what [`Disk::pass`] has put `fresh` in for. Nothing keeps others from changing the disk meanwhile.
    pub(super) async fn see_to_the_end(
        &self,
        fresh: Arc<dyn Backing>,
        ending: &mut Ending,
    ) -> Result<(), Refusal> {
        if ending.all_taken().await? {
            return Ok(());
        }
        let _changing = self.served.changing.lock().await;
        self.exchange_again(fresh).await
    }

    /// The last word of a swap: `passage` decides it, and the new backing takes the place of the mirror. A disk with a migration socket comes to rest for both.
    pub(super) async fn pass_the_mirror(
        &self,
        mirror: &Mirror,
        opened: &Opened,
        passage: Passage,
    ) -> Result<(Arc<dyn Backing>, Passed), Refusal> {
        let fresh = opened.backing.clone();
        if self.served.second().is_some() {
            return self.pass_at_rest(fresh, passage).await;
        }
        let Passage { allowed, noted } = passage;
        let decide = move |model: &mut Blk| {
            let decided = tokio::task::block_in_place(|| allowed(model).and_then(|()| noted()));
            // It says nothing, and has every queue look at the mirror.
            (decided, Some(Change::Own(Arc::new(()))))
        };
        self.served.handle.change_queues(decide).await??;
        // From here on it is used alone, by the mirror at first.
        let begun = Instant::now();
        while !mirror.has_settled() {
            if begun.elapsed() > LONG {
                let remedy = "it is waited for; see `ioplane disk show` for the new backing";
                return Err(Refusal::busy(
                    "writes of the guest to both backings are still under way",
                    remedy,
                ));
            }
            tokio::time::sleep(LOOK).await;
        }
        let imports = opened.import.clone().into_iter().collect();
        self.pass(fresh, imports, LONG, Passage::free()).await
    }

    async fn pass_at_rest(
        &self,
        fresh: Arc<dyn Backing>,
        passage: Passage,
    ) -> Result<(Arc<dyn Backing>, Passed), Refusal> {
        self.exchange(fresh, passage.allowed, passage.noted).await.map(|old| (old, Passed::AtRest))
    }

    /// Lets go of a swap's target, if it is on another machine: at once, or, if something is `ending` with it, later and without waiting here. `old` is behind
    /// the disk.
    pub(super) async fn leave_target(
        self: &Arc<Self>,
        old: Arc<dyn Backing>,
        ending: Option<Ending>,
        target: Option<Arc<Import>>,
    ) {
        let disk = self.clone();
        let leave = async move {
            if let Some(target) = target {
                remote::leave(&target, true).await;
            }
        };
        let Some(mut ending) = ending else { return leave.await };
        tokio::spawn(async move {
            if let Err(refused) = disk.see_to_the_end(old, &mut ending).await {
                tracing::error!(
                    error = refused.error,
                    "a backing that is not used any more cannot be taken out"
                );
            }
            leave.await;
        });
    }

    /// Notes the swap and marks its target, both before anything is copied, and lets the guest's requests pass by a mirror. When this returns well, what was
    /// written past the mirror has ended, and nothing has been copied yet. Beside a refusal: what has yet to end with the target.
    pub(super) async fn put_mirror_in(
        &self,
        old: Arc<dyn Backing>,
        opened: &Opened,
        note: SwapRecord,
        context: &DaemonContext,
    ) -> Result<Arc<Mirror>, (Refusal, Option<Ending>)> {
        let not_begun = |refused| (refused, None);
        let mirror =
            Mirror::new(old.clone(), opened.backing.clone()).map_err(|error| not_begun(error.into()))?;
        let name = self.served.note.read().now.name;
        let state_file = context.state_file.clone();
        blocking(move || {
            let text = unfinished_text(&name, &note.from);
            let to = note.to.clone();
            state_file.change(|entries| {
                entries.swaps.insert(name, note);
            })?;
            if !removed(DaemonSwapRule::TargetMarked) {
                mark::set(&to, Mark::Unfinished, &text, &state_file)?;
            }
            // Whatever it was before, that is overwritten.
            mark::clear(&to, Mark::Superseded, &state_file)
        })
        .await
        .map_err(not_begun)?;
        let imports = self.shown_import().into_iter().chain(opened.import.clone()).collect();
        let passed = self.pass(mirror.clone(), imports, PAST_THE_MIRROR, Passage::free()).await;
        let refused = match passed {
            Err(refused) => refused,
            // Of a queue that was stopped meanwhile something may be under way that no channel knows of any more.
            Ok((_, Passed::UnderWay | Passed::AtRest)) => {
                let quiet = mirror.clone();
                match blocking(move || Ok(quiet.wait_quiet(Instant::now() + PAST_THE_MIRROR))).await {
                    Ok(true) => return Ok(mirror),
                    Ok(false) => past_the_mirror(),
                    Err(refused) => refused,
                }
            }
            Ok((_, Passed::StillEnding(_))) => past_the_mirror(),
        };
        mirror.abandon();
        let imports = self.shown_import().into_iter().collect();
        let ending = match self.pass(old, imports, Duration::ZERO, Passage::free()).await {
            Ok((_, Passed::StillEnding(ending))) => Some(ending),
            Ok(_) => None,
            Err(refused) => {
                // It is no more than a detour: requests reach the old backing alone, and nothing was written to the new one.
                tracing::error!(
                    error = refused.error,
                    "the mirror of a swap that has not begun cannot be taken out"
                );
                None
            }
        };
        Err((refused, ending))
    }
}

fn past_the_mirror() -> Refusal {
    Refusal::busy(
        "requests of the guest do not end, so nobody knows what is to be copied",
        "see `ioplane disk show`, and swap again when its backing answers",
    )
}
