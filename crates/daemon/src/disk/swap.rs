//! A disk goes on with another backing while its guest uses it: copied, mirrored, switched (docs/decisions/0047-swap.md).
//!
//! ```text
//!   begin: state file, target marked unfinished, mirror put in --> copy --> mirror --> sync --> old marked superseded
//!            --> commit: new one's mark taken away; state file says the new one --> equal? decided; mirror out, new one in
//! ```
//! Whatever fails takes the mirror out again, and the disk is on its old backing. A daemon that dies leaves that to the next one
//! ([`recover`]).

use std::fs::OpenOptions;
use std::num::NonZeroU64;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ioplane_api::report::{EventWord, SwapReport, SwapWord};
use ioplane_api::request::SwapForm;
use ioplane_api::size::Size;
use ioplane_api::spec::{BackingForm, BackingSpec, DiskSpec, FormatWord, ServedSpec};
use ioplane_nbd::import::{ClaimWish, Import};
use ioplane_storage::mirror::{Copier, Mirror, MirrorFault};
use rustix::io::Errno;
use tokio::sync::{oneshot, watch};

use super::converge::{Converging, Next};
use super::ends::{SwapSource, fail_when_unreachable, has_kept_all};
use super::held::Opening;
use super::mark::{self, Mark, unfinished_text};
use super::passage::{Ending, Passage, Passed};
use super::swap_kill::{self, SwapKillPoint};
use super::{Disk, Opened, held, lock, open_unchecked, remote};
use crate::context::{DaemonContext, Opener};
use crate::ledger;
use crate::refusal::Refusal;
use crate::served::{ServedKind, blocking};
use crate::state_file::{DiskRecord, StateFile, SwapRecord};

/// The lowest rate to which a guest is held: a write of 1 MiB takes a quarter of a second then.
const LEAST_HOLD: u64 = 4 << 20;
/// Attempts to switch, or to take the mirror out: each waits for the guest's requests to end.
const ATTEMPTS: u32 = 20;
/// Between two attempts.
pub(super) const PAUSE: Duration = Duration::from_millis(200);
/// How long a swap that comes to nothing waits for requests that are under way by its mirror.
const ENDING: Duration = Duration::from_secs(20);
/// How long a command waits for a swap to be cancelled.
const CANCEL: Duration = Duration::from_secs(60);

/// A swap, under way or ended.
pub struct Swap {
    pub(super) from: BackingSpec,
    pub(super) to: BackingSpec,
    rate: Option<u64>,
    hold: Option<NonZeroU64>,
    /// The target was made for this.
    created: bool,
    bytes: u64,
    begun: Instant,
    /// The disk is on the new backing, by one of its sockets at least: there is no way back.
    pub(super) arrived: AtomicBool,
    /// Gone once it has ended.
    mirror: Mutex<Option<Arc<Mirror>>>,
    standing: watch::Sender<Standing>,
}

#[derive(Clone)]
struct Standing {
    state: SwapWord,
    /// Once it has ended: bytes copied and left, and how long it took.
    ended: Option<(u64, u64, Duration)>,
    pause: Option<Duration>,
    why: Option<Refusal>,
}

impl Swap {
    fn mirror(&self) -> Option<Arc<Mirror>> {
        self.mirror.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn has_arrived(&self) -> bool {
        self.arrived.load(Ordering::SeqCst)
    }

    fn state(&self) -> SwapWord {
        self.standing.borrow().state
    }

    fn enter(&self, state: SwapWord) {
        self.standing.send_modify(|standing| standing.state = state);
    }

    fn end(&self, state: SwapWord, pause: Option<Duration>, why: Option<Refusal>) {
        let mirror = self.mirror.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (copied, left) = mirror.map_or((0, 0), |mirror| (mirror.copied(), mirror.left()));
        let ended = Some((copied, left, self.begun.elapsed()));
        self.standing.send_modify(|standing| *standing = Standing { state, ended, pause, why });
    }

    pub(super) fn report(&self) -> SwapReport {
        let Standing { state, ended, pause, why } = self.standing.borrow().clone();
        let (copied, left, time) = ended.unwrap_or_else(|| {
            let (copied, left) = self.mirror().map_or((0, 0), |mirror| (mirror.copied(), mirror.left()));
            (copied, left, self.begun.elapsed())
        });
        SwapReport {
            from: self.from.name(),
            to: self.to.name(),
            state,
            bytes: self.bytes,
            copied,
            left,
            bytes_per_s: (copied as f64 / time.as_secs_f64().max(0.001)) as u64,
            rate: self.rate,
            hold: self.hold.map(NonZeroU64::get),
            holding: self.mirror().is_some_and(|mirror| mirror.is_holding()),
            for_ms: time.as_millis() as u64,
            pause_us: pause.map(|pause| pause.as_micros() as u64),
            error: why.as_ref().map(|why| why.error.clone()),
            remedy: why.map(|why| why.remedy),
        }
    }
}

/// How a swap is to go.
struct Manner {
    rate: Option<u64>,
    hold: Option<NonZeroU64>,
    overwrite: bool,
}

/// What a swap asks for.
fn target(form: SwapForm) -> Result<(BackingSpec, Manner), Refusal> {
    let SwapForm { path, memory, remote, timeout_s, format, direct, engine, rate, hold, overwrite } = form;
    let mut flaws = Vec::new();
    let backing =
        BackingForm { path, memory, remote, timeout_s, format, direct, engine, ..BackingForm::default() }
            .spec(&mut flaws);
    if rate.is_some_and(|Size(rate)| rate < 4096) {
        let remedy = "give at least 4K bytes per second, or leave it out";
        return Err(Refusal::invalid("a rate at which it would never end", remedy).at("rate"));
    }
    if let Some(low) = hold.filter(|Size(hold)| *hold < LEAST_HOLD) {
        let remedy = format!("give at least {}, or leave it out", Size(LEAST_HOLD));
        return Err(Refusal::invalid(format!("{low} per second would stop the guest"), remedy).at("hold"));
    }
    let hold = hold.and_then(|Size(hold)| NonZeroU64::new(hold));
    match backing {
        Some(backing) if flaws.is_empty() => {
            Ok((backing, Manner { rate: rate.map(|Size(rate)| rate), hold, overwrite }))
        }
        _ => Err(Refusal::flaws(&flaws)),
    }
}

/// Makes the target, or sees to it that nothing is lost there, and opens it; whether it was made. Blocks.
fn open_target(
    spec: &DiskSpec,
    bytes: u64,
    overwrite: bool,
    owner: &Opener,
    state_file: &StateFile,
) -> Result<(Opened, bool), Refusal> {
    let holds = |what: &str| {
        let error = format!("{what} may hold something, and would be overwritten");
        Refusal::conflict(error, "if it may be lost, say --overwrite (overwrite in the API)").at("overwrite")
    };
    let may_overwrite = overwrite || mark::is_set(&spec.backing, Mark::Unfinished, state_file);
    let mut created = false;
    let mut opened_as = spec.backing.clone();
    match &mut opened_as {
        BackingSpec::Memory { bytes: size } if *size != bytes => {
            let error = format!("{} of memory for a disk of {}", Size(*size), Size(bytes));
            return Err(Refusal::invalid(error, format!("give {bytes}")).at("memory"));
        }
        BackingSpec::Memory { .. } => {}
        BackingSpec::Remote(spec) if !may_overwrite => return Err(holds(&spec.remote.to_string())),
        // What this disk has once written there and not flushed is overwritten, so that nobody needs to know of it.
        BackingSpec::Remote(spec) => remote::forget_mark(&spec.remote, &owner.socket),
        BackingSpec::File { path, format, .. } => {
            // Whatever it looks like, it will be what the disk is.
            *format = Some(FormatWord::Raw);
            let os = |error: std::io::Error| {
                let error = format!("{}: {error}", path.display());
                Refusal::failed(error, "is its directory there, writable, and is there space?").at("path")
            };
            match std::fs::metadata(&*path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                    create(path, bytes).map_err(os)?;
                    created = true;
                }
                Err(error) => return Err(os(error)),
                Ok(there) if there.is_file() => {
                    if !may_overwrite && there.blocks() > 0 {
                        return Err(holds(&path.display().to_string()));
                    }
                    if there.len() == 0 {
                        OpenOptions::new()
                            .write(true)
                            .open(&*path)
                            .and_then(|file| file.set_len(bytes))
                            .map_err(os)?;
                    }
                }
                Ok(there) if there.file_type().is_block_device() && !may_overwrite => {
                    return Err(holds(&path.display().to_string()));
                }
                Ok(_) => {}
            }
        }
    }
    let shape = (false, spec.block_size);
    let owner = &Opener { wish: ClaimWish::New, ..owner.clone() };
    let opened = open_unchecked(&spec.name, &opened_as, shape, None, owner).and_then(|opened| {
        if created {
            ledger::forget(&spec.backing, &owner.state_dir)?;
        }
        held::check(&opened, &spec.backing, Opening::InPlace, owner)?;
        // Not before it is ours. A device may be longer than the disk; a file is made as long, if its content may be lost.
        let whole = opened.backing.info().bytes;
        let resized = match &spec.backing {
            BackingSpec::File { path, .. } if path.is_file() => whole != bytes && may_overwrite,
            BackingSpec::File { .. } => whole > bytes,
            _ => false,
        };
        if resized {
            opened.backing.resize(bytes)?;
        }
        Ok(opened)
    });
    if opened.is_err() && created {
        remove_created(&spec.backing);
    }
    Ok((opened?, created))
}

/// Makes an image that is there after a power failure, too.
fn create(path: &Path, bytes: u64) -> std::io::Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let made = file.set_len(bytes).and_then(|()| std::fs::File::open(directory)?.sync_all());
    if made.is_err() {
        let _ = std::fs::remove_file(path);
    }
    made
}

fn remove_created(backing: &BackingSpec) {
    if let BackingSpec::File { path, .. } = backing
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::warn!(image = %path.display(), %error, "the target of a swap could not be removed");
    }
}

/// The niceness of threads that copy and compare: an I/O core that shares a processor with them comes first, and they get a tenth.
const COPIES: i32 = 10;

/// Does `work` on a thread of its own: it may take hours, and nobody waits for it when the daemon ends.
pub(super) async fn on_thread<R: Send + 'static>(
    work: impl FnOnce() -> R + Send + 'static,
) -> Result<R, Refusal> {
    let (sender, receiver) = oneshot::channel();
    let thread = std::thread::Builder::new().name("copies".to_owned()).spawn(move || {
        // Of this thread. A lower priority needs no right; without it guests wait longer.
        let _ = rustix::process::setpriority_process(None, COPIES);
        let _ = sender.send(work());
    });
    thread.map_err(|error| {
        Refusal::failed(format!("a thread of its own: {error}"), "raise the limit on threads")
    })?;
    receiver.await.map_err(|_| Refusal::bug("a thread of copies has ended without a word"))
}

fn fault(fault: MirrorFault) -> Refusal {
    let remedy = match fault {
        MirrorFault::New(errno) if errno == Errno::NOSPC.raw_os_error() => {
            "make room for the whole disk there, then swap again"
        }
        MirrorFault::New(_) => "see to the new backing, then swap again",
        MirrorFault::Old(_) => "the disk has places that cannot be read: see to the old backing",
        MirrorFault::Stopped | MirrorFault::Cancelled => "swap again",
    };
    Refusal::failed(fault.to_string(), remedy)
}

/// What is noted of a swap of a dead daemon: finishes it if the switch was recorded, else rolls it back. Blocks.
pub(super) fn recover(record: &DiskRecord, state_file: &StateFile) -> Result<(), Refusal> {
    let name = &record.now.name;
    let Some(swap) = state_file.entries().swaps.remove(name) else { return Ok(()) };
    if swap.switched {
        tracing::info!(disk = name, backing = swap.to.name(), "the swap of a daemon that died is done");
    } else {
        // It may have been taken away just before the switch would have been recorded. An image that was removed needs none.
        if !matches!(&swap.to, BackingSpec::File { path, .. } if !path.exists())
            && let Err(refused) = mark::set_or_note(&swap.to, &unfinished_text(name, &swap.from), state_file)
        {
            tracing::error!(why = refused.error, "an unfinished copy cannot be marked: do not use it");
        }
        mark::clear(&swap.from, Mark::Superseded, state_file)?;
        let (from, to) = (swap.from.name(), swap.to.name());
        tracing::warn!(disk = name, from, to, "the swap of a daemon that died is rolled back: begin it anew");
    }
    state_file.change(|entries| {
        entries.swaps.remove(name);
    })?;
    Ok(())
}

impl Disk {
    fn swapping(&self) -> MutexGuard<'_, Option<Arc<Swap>>> {
        self.swap.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The swap that is under way, or the last one.
    pub(super) fn swap_report(&self) -> Option<SwapReport> {
        self.swapping().as_ref().map(|swap| swap.report())
    }

    /// What the disk was on before it was swapped, as far as this daemon knows.
    pub(super) fn swapped_from(&self) -> Option<BackingSpec> {
        let done = self.swapping().clone().filter(|swap| swap.state() == SwapWord::Done);
        done.map(|swap| swap.from.clone())
    }

    /// Refuses what cannot be done while the disk has two backings, or is compared.
    pub fn not_swapping(&self) -> Result<(), Refusal> {
        self.not_verifying()?;
        let swap = self.swapping().clone().filter(|swap| swap.state().is_under_way());
        swap.map_or(Ok(()), |swap| {
            let name = self.served.note.read().now.name;
            Err(Refusal::conflict(
                format!("disk {name} is being swapped to {}", swap.to.name()),
                format!("wait for the end of that, or cancel it: ioplane swap {name} --cancel"),
            ))
        })
    }

    /// Begins a swap. When this returns well the mirror is in, and the rest goes on by itself.
    pub async fn begin_swap(
        self: &Arc<Self>,
        form: SwapForm,
        context: &Arc<DaemonContext>,
    ) -> Result<(), Refusal> {
        let (to, Manner { rate, hold, overwrite }) = target(form)?;
        let changing = self.served.changing.lock().await;
        self.not_swapping()?;
        let record = self.served.note.read();
        let spec = DiskSpec { backing: to.clone(), ..record.now.clone() };
        if let Some(flaw) = spec.flaws().first() {
            return Err(Refusal::flaws(std::slice::from_ref(flaw)));
        }
        if record.now.read_only {
            let remedy = "copy the image, then `ioplane disk replace`";
            return Err(Refusal::conflict("a read-only disk does not change while it is copied", remedy));
        }
        let from = record.now.backing.clone();
        // Of an image its lock says so.
        if matches!(to, BackingSpec::Remote { .. }) && from.same_content(&to) {
            let error = format!("the disk is on {} already", to.name());
            return Err(Refusal::conflict(error, "there is nothing to swap").at("remote"));
        }
        let (bytes, old) =
            self.served.handle.change(|model| ((model.bytes(), model.backing().clone()), false)).await?;
        let (owner, state_file) = (context.opener(&record.now), context.state_file.clone());
        let wanted = spec.clone();
        let (opened, created) =
            blocking(move || open_target(&wanted, bytes, overwrite, &owner, &state_file)).await?;
        let note = SwapRecord { from: from.clone(), to: to.clone(), switched: false };
        let begun = self.put_mirror_in(old.clone(), &opened, note, context).await;
        let mirror = match begun {
            Ok(mirror) => mirror,
            Err((refused, ending)) => {
                let target = opened.import.clone();
                drop(opened);
                self.leave_target(old, ending, target).await;
                self.forget(&to, created, context).await;
                return Err(refused);
            }
        };
        let standing = Standing { state: SwapWord::Copying, ended: None, pause: None, why: None };
        let swap = Arc::new(Swap {
            from,
            to,
            rate,
            hold,
            created,
            bytes,
            begun: Instant::now(),
            arrived: AtomicBool::new(false),
            mirror: Mutex::new(Some(mirror.clone())),
            standing: watch::Sender::new(standing),
        });
        *self.swapping() = Some(swap.clone());
        drop(changing);
        let (disk, context) = (self.clone(), context.clone());
        tokio::spawn(async move { disk.carry_out(swap, mirror, opened, context).await });
        Ok(())
    }

    /// Takes away what was noted of a swap that comes to nothing.
    async fn forget(&self, to: &BackingSpec, created: bool, context: &DaemonContext) {
        let (to, name, state_file) =
            (to.clone(), self.served.note.read().now.name, context.state_file.clone());
        let forgotten = blocking(move || {
            if created {
                mark::clear(&to, Mark::Unfinished, &state_file)?;
                remove_created(&to);
            }
            state_file.change(|entries| {
                entries.swaps.remove(&name);
            })?;
            Ok(())
        });
        if let Err(error) = forgotten.await {
            tracing::error!(%error, "the state file");
        }
    }

    /// All of a swap after its beginning.
    async fn carry_out(
        self: Arc<Self>,
        swap: Arc<Swap>,
        mirror: Arc<Mirror>,
        opened: Opened,
        context: Arc<DaemonContext>,
    ) {
        let name = self.served.note.read().now.name;
        let (before, import) = (self.shown_import(), opened.import.clone());
        let target = import.clone();
        let outcome = tokio::select! {
            outcome = self.copy_and_switch(&swap, &mirror, (opened, before.clone()), &context) => outcome,
            never = fail_when_unreachable(import, &mirror) => match never {},
        };
        match outcome {
            Ok(pause) => {
                swap_kill::here(SwapKillPoint::Switched);
                self.finish(&context).await;
                if let Some(before) = before {
                    remote::leave(&before, true).await;
                }
                // It was claimed for the copy. If no guest uses the disk nobody would give the claim back.
                if let Some(target) = target {
                    target.rest_if_unused();
                }
                tracing::info!(
                    disk = name,
                    backing = swap.to.name(),
                    pause_us = pause.as_micros(),
                    "swapped"
                );
                swap.end(SwapWord::Done, Some(pause), None);
            }
            Err(refused) => {
                let cancelled = mirror.fault() == Some(MirrorFault::Cancelled);
                // From here on the guest waits for the old backing only.
                mirror.abandon();
                let ending = self.take_mirror_out(&mirror).await;
                self.leave_target(mirror.old().clone(), ending, target).await;
                let (from, state_file) = (swap.from.clone(), context.state_file.clone());
                let cleared = blocking(move || mark::clear(&from, Mark::Superseded, &state_file)).await;
                match cleared {
                    Ok(()) => self.forget(&swap.to, swap.created, &context).await,
                    // What is noted is enough for the next daemon to take the mark away.
                    Err(error) => {
                        tracing::error!(disk = name, %error, "the old backing is marked superseded, and is not")
                    }
                }
                let state = if cancelled { SwapWord::Cancelled } else { SwapWord::Failed };
                tracing::warn!(disk = name, to = swap.to.name(), why = refused.error, "not swapped");
                swap.end(state, None, Some(refused));
            }
        }
        context.events.tell(
            EventWord::Changed,
            Disk::COMMAND,
            &name,
            &format!("swap: {}", swap.report().words()),
        );
    }

    /// The import that the disk is on, if it is on one.
    pub(super) fn shown_import(&self) -> Option<Arc<Import>> {
        lock(&self.backing).import.clone()
    }

    /// Gives what has yet to end, if that takes too long to wait for.
    async fn take_mirror_out(&self, mirror: &Arc<Mirror>) -> Option<Ending> {
        for attempt in 1..=ATTEMPTS {
            let changing = self.served.changing.lock().await;
            let old = mirror.old().clone();
            let imports = self.shown_import().into_iter().collect();
            // What the guest has under way may end later: it has no part in the mirror any more.
            let out = self.pass(old.clone(), imports, Duration::ZERO, Passage::free()).await;
            drop(changing);
            let out = match out {
                // The target is used until then.
                Ok((_, Passed::StillEnding(mut ending))) => {
                    match tokio::time::timeout(ENDING, self.see_to_the_end(old, &mut ending)).await {
                        Ok(out) => out,
                        Err(_) => return Some(ending),
                    }
                }
                out => out.map(drop),
            };
            let Err(refused) = out else { return None };
            // It is no more than a detour: requests reach the old backing alone.
            tracing::warn!(error = refused.error, attempt, "the mirror of a swap cannot be taken out yet");
            if attempt < ATTEMPTS {
                tokio::time::sleep(PAUSE * attempt).await;
            }
        }
        None
    }

    async fn copy_and_switch(
        &self,
        swap: &Arc<Swap>,
        mirror: &Arc<Mirror>,
        (opened, from): (Opened, Option<Arc<Import>>),
        context: &DaemonContext,
    ) -> Result<Duration, Refusal> {
        let source = Arc::new(SwapSource::new(from));
        swap_kill::here(SwapKillPoint::Begun);
        let copier = mirror.copier()?;
        let mut converging = Converging::new(swap.bytes, swap.hold);
        let little =
            move |copier: &Copier, mirror: &Mirror| match converging.next(copier.passes(), mirror.left()) {
                Next::Copy => false,
                Next::Hold(rate) => {
                    mirror.hold(rate, Instant::now());
                    false
                }
                Next::Mirror => true,
            };
        let mut copier = copy(copier, swap.rate, (mirror, &source), little).await?;
        mirror.start_mirroring();
        swap_kill::here(SwapKillPoint::Mirroring);
        let opened = Arc::new(opened);
        let mut attempt = 0;
        loop {
            swap.enter(SwapWord::Mirroring);
            copier = copy(copier, swap.rate, (mirror, &source), |_, _| false).await?;
            let synced = on_thread(move || {
                let outcome = copier.sync();
                (copier, outcome)
            });
            let outcome;
            (copier, outcome) = synced.await?;
            outcome.map_err(fault)?;
            has_kept_all(&opened)?;
            if source.restarts(mirror) {
                continue;
            }
            swap_kill::here(SwapKillPoint::Synced);
            swap.enter(SwapWord::Switching);
            let refused = match self.switch(swap, (mirror, &source), &opened, context).await {
                Ok(arrival) => return Ok(self.passes_on(arrival, &opened).await),
                Err(_) if swap.has_arrived() => return Ok(self.bring_rest(swap, mirror, &opened).await),
                Err(refused) => refused,
            };
            mirror.fault().map_or(Ok(()), |why| Err(fault(why)))?;
            if attempt == ATTEMPTS {
                return Err(refused);
            }
            tracing::info!(why = refused.error, "not yet switched");
            attempt += 1;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The disk is on the new backing, and the swap is forgotten. If that cannot be done now, the next daemon does it.
    async fn finish(&self, context: &DaemonContext) {
        let (name, state_file) = (self.served.note.read().now.name, context.state_file.clone());
        let finished = blocking(move || {
            state_file.change(|entries| {
                entries.swaps.remove(&name);
            })?;
            Ok(())
        });
        if let Err(error) = finished.await {
            tracing::error!(%error, "a swap that is done is still noted");
        }
    }

    /// Ends the swap that is under way, and waits until the disk is on one backing.
    pub async fn cancel_swap(&self) -> Result<(), Refusal> {
        let swap = self.swapping().clone().filter(|swap| swap.state().is_under_way());
        let Some(swap) = swap else {
            let name = self.served.note.read().now.name;
            return Err(Refusal::conflict(
                format!("disk {name} is not being swapped"),
                "there is nothing to cancel",
            ));
        };
        if let Some(mirror) = swap.mirror() {
            mirror.abandon();
        }
        let mut standing = swap.standing.subscribe();
        let ended = standing.wait_for(|standing| !standing.state.is_under_way());
        match tokio::time::timeout(CANCEL, ended).await {
            Ok(_) => Ok(()),
            Err(_) if swap.has_arrived() => Err(Refusal::busy(
                "requests of the guest do not end, so that the mirror is still in",
                "it is too late to cancel: the disk is on the new backing; see `ioplane disk show`",
            )),
            Err(_) => Err(Refusal::busy(
                "requests of the guest do not end, so that the mirror is still in",
                "the guest uses the old backing already; see `ioplane disk show`",
            )),
        }
    }
}

/// Copies until nothing is left, or `enough`, and gives the copier back.
async fn copy(
    mut copier: Copier,
    rate: Option<u64>,
    (mirror, source): (&Arc<Mirror>, &Arc<SwapSource>),
    mut enough: impl FnMut(&Copier, &Mirror) -> bool + Send + 'static,
) -> Result<Copier, Refusal> {
    let (mirror, source) = (mirror.clone(), source.clone());
    let copied = on_thread(move || {
        let outcome = copier.run(rate, &mut |copier| {
            source.restarts(&mirror);
            enough(copier, &mirror)
        });
        (copier, outcome)
    });
    let (copier, outcome) = copied.await?;
    outcome.map_err(fault)?;
    Ok(copier)
}
