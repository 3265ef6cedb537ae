//! A function that a guest drives itself goes to another daemon's, in steps. Whoever asks for them stops the guest, and has the VMM at the
//! destination set the function up as it was.
//!
//! ```text
//!   here:   log, while memory is copied --> rest --> carried ----------------> leave     | whatever fails before that: replay
//!   there:  (ahead, meanwhile)                          \--> take --> (its VMM) --> replay
//! ```

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ioplane_api::report::{CarriedFunctionV1, MoveStep, ReplayedFunctionReport, RestedFunctionReport};
use ioplane_api::request::{FunctionStepForm, PhysicalForm, QuiesceForm};
use ioplane_api::spec::{ModeWord, PciAddress, SourceSpec};
use ioplane_device::{Access, Device, Lifecycle, Quiescent, RegisterAddress, SavedState};
use ioplane_hardware::PhysicalFunction;
use ioplane_host::vfio_user::{DmaWrite, Handle};
use ioplane_moving::{PAGE, PageSet};
use ioplane_passthrough::{Carried, Carry, CarryError, Motion, Replayed, SetUp};
use ioplane_pci::spec;

use super::around::{FramesFrom, Here};
use super::body::Body;
use super::hold::gone;
use super::state::body_of;
use super::{Card, announce, hold};
use crate::refusal::Refusal;
use crate::served::{ServedKind, blocking};

/// The longest that a step may take: QEMU's vfio-user client gives up on a message after five seconds.
const LONGEST: Duration = Duration::from_secs(4);
/// For another host's words, which are said for a second after a reset.
const SOON: Duration = Duration::from_secs(2);
/// Between two looks at a function that comes to rest.
const LOOK: Duration = Duration::from_millis(1);

/// What to do about a function that answers nothing any more.
pub(super) const RESET: &str =
    "reset it in the guest (echo 1 >/sys/bus/pci/devices/ADDRESS/reset), or restart the guest";
/// What to do about a function whose VMM has mapped its registers.
const STAYS: &str =
    "move its VM to another host (ioplane move vm), or remove it, and add it without --mapped";
/// What to do where the hardware did not do its part.
pub(super) const LINKS: &str =
    "its guest has the function that it had; see whether both physical functions have a link, and try again";

/// A step that was not done.
pub(super) fn refuse(name: &str, error: &CarryError) -> Refusal {
    let text = format!("{name}: {error}");
    match error {
        CarryError::NoGuest => Refusal::conflict(text, "start the guest's QEMU with it first"),
        CarryError::Held => Refusal::conflict(text, format!("resume it first: ioplane pci resume {name}")),
        CarryError::Dead(_) => Refusal::conflict(text, RESET),
        CarryError::Still => Refusal::conflict(text, "let it go on, or leave it, before another step"),
        CarryError::Runs => Refusal::conflict(text, "bring it to rest first, or load a state"),
        CarryError::Driven => Refusal::conflict(
            text,
            "start QEMU there with -S -incoming, and load the state before its guest runs",
        ),
        CarryError::NoDriver | CarryError::Page(_) => Refusal::conflict(
            text,
            "load the changed driver (guest/igbvf, guest/ixgbevf) in the guest and raise its interface; an unmodified driver's function is moved with --mode migratable",
        ),
        CarryError::Mapped => Refusal::conflict(text, STAYS),
        CarryError::SaysItself => {
            Refusal::conflict(text, "move it without: its driver, or its state, says them")
        }
        CarryError::NotSetUp(_) => Refusal::conflict(
            text,
            "write command, BARs and the MSI-X table by the monitor of its QEMU, as they were, and try again",
        ),
        CarryError::Failed(_) => Refusal::conflict(
            text,
            "see whether the physical function has a link; a function that stands still takes another try",
        ),
    }
}

pub(super) fn patience(deadline_ms: u64) -> Result<Duration, Refusal> {
    let patience = Duration::from_millis(deadline_ms);
    if patience <= LONGEST {
        return Ok(patience);
    }
    let text = format!("a deadline of {deadline_ms} ms: QEMU gives up on the function before");
    Err(Refusal::invalid(text, format!("give at most {} ms", LONGEST.as_millis())).at("deadline_ms"))
}

/// By what a function is brought to where its guest was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Way {
    /// The guest drives the function itself: it stands still, and is brought back register by register.
    Direct(FramesFrom),
    /// The same, and the guest's driver brings it back: its guest may run meanwhile.
    Cooperating(PciAddress),
    /// The daemon knows all of it: it is held, saved and loaded.
    Saved,
}

impl Way {
    /// A function whose guest runs is touched by none of the steps that need its rings.
    pub(super) fn stands_still(&self, name: &str, guest_stopped: bool) -> Result<(), Refusal> {
        if guest_stopped || matches!(self, Way::Cooperating(_)) {
            return Ok(());
        }
        Err(Refusal::conflict(
            format!("the guest of {name} runs: its rings are used while the other function is set up"),
            "stop it by its VMM's monitor first; `ioplane pci move --qmp SOCKET` does so",
        )
        .at("guest_stopped"))
    }

    /// Who sends frames to it, where some are needed. Blocks.
    pub(super) fn physical(&self) -> Result<Option<PhysicalFunction>, Refusal> {
        match self {
            Way::Direct(frames) => frames.physical().map(Some),
            Way::Cooperating(_) | Way::Saved => Ok(None),
        }
    }
}

/// A function that is on its way to rest, or on to another one. Whoever waits for that may be gone at any time.
pub(super) struct Resting {
    handle: Handle<Body>,
    /// It has not arrived.
    given_up: bool,
    /// It goes on then, and may take so long for that; else it stands still, if it does.
    goes_on: Option<Duration>,
}

impl Resting {
    pub(super) fn new(handle: &Handle<Body>, goes_on: Option<Duration>) -> Resting {
        Resting { handle: handle.clone(), given_up: true, goes_on }
    }

    /// It has arrived.
    pub(super) fn done(mut self) {
        self.given_up = false;
    }
}

impl Drop for Resting {
    fn drop(&mut self) {
        if !self.given_up {
            return;
        }
        let (handle, goes_on) = (self.handle.clone(), self.goes_on);
        let go_on = move |body: &mut Body| {
            let carry = body.carry()?;
            carry.give_up();
            match (carry.motion(), goes_on) {
                (Motion::Runs, _) | (_, None) => Ok(()),
                (Motion::Stopping | Motion::Still, Some(patience)) => {
                    carry.replay(&mut Here::new(None, patience)).map(drop)
                }
            }
        };
        tokio::spawn(async move {
            let gone_on = handle.with(move |device: &mut Lifecycle<Body>| device.with(go_on)).await;
            // One that has ended has no guest that waits.
            if let Ok(Ok(Err(error))) = gone_on {
                tracing::warn!(error = %error, "a function was not moved, and does not go on");
            }
        });
    }
}

/// What goes to another daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Gone {
    state: SavedState,
    set_up: SetUp,
    physical: Option<PhysicalForm>,
}

fn file_of(gone: Gone) -> CarriedFunctionV1 {
    let Gone { state, set_up: SetUp { command, bars, msix, vectors }, physical } = gone;
    CarriedFunctionV1 {
        format: CarriedFunctionV1::FORMAT.to_owned(),
        version: CarriedFunctionV1::VERSION,
        kind: state.kind,
        state_version: state.version,
        state: STANDARD.encode(state.body),
        command,
        bars,
        msix,
        vectors,
        physical,
    }
}

fn gone_of(file: CarriedFunctionV1) -> Result<Gone, Refusal> {
    let CarriedFunctionV1 {
        format,
        version,
        kind,
        state_version,
        state,
        command,
        bars,
        msix,
        vectors,
        physical,
    } = file;
    let refuse = |why: String| {
        Refusal::invalid(
            why,
            "give what the source's daemon says: GET /v1/pci/NAME/carried, of the same version",
        )
    };
    let own = (CarriedFunctionV1::FORMAT, CarriedFunctionV1::VERSION);
    let body = body_of((&format, version), own, &state).map_err(refuse)?;
    let state = SavedState { kind, version: state_version, body };
    Ok(Gone { state, set_up: SetUp { command, bars, msix, vectors }, physical })
}

/// An aligned word of its configuration space.
pub(super) fn config_word(body: &mut Body, at: usize) -> u32 {
    let mut bytes = [0; 4];
    body.access(RegisterAddress::Config(at as u64), Access::Read(&mut bytes));
    u32::from_le_bytes(bytes)
}

/// How the VMM has set up a function whose state has the rest.
fn set_up_of(body: &mut Body) -> SetUp {
    let mut word = |at| config_word(body, at);
    let command = word(spec::COMMAND) as u16;
    let bars = [0, 1, 2, 3, 4, 5].map(|at| word(spec::BAR0 + 4 * at));
    SetUp { command, bars, msix: 0, vectors: Vec::new() }
}

impl Card {
    /// Which function of the host it is, if another one's registers can be brought to where its are.
    pub(super) fn may_be_exchanged(&self) -> Result<(PciAddress, Way), Refusal> {
        if let SourceSpec::Host { mode: ModeWord::Cooperating, mapped: true, .. } =
            self.note().read().now.source
        {
            return Err(refuse(&self.name(), &CarryError::Mapped));
        }
        match self.way() {
            Ok(way @ Way::Direct(FramesFrom { address, .. }) | way @ Way::Cooperating(address)) => {
                Ok((address, way))
            }
            _ => Err(self.not_to_be_moved()),
        }
    }

    fn not_to_be_moved(&self) -> Refusal {
        let name = self.name();
        Refusal::conflict(
            format!("{name} was not added to be moved: what its guest did to it is not known"),
            format!("remove {name}, and add it with --mode migratable, or cooperating if its driver does"),
        )
    }

    pub(super) fn way(&self) -> Result<Way, Refusal> {
        match self.note().read().now.source {
            SourceSpec::Host { address, mode: ModeWord::Migratable, uplink, .. } => {
                Ok(Way::Direct(FramesFrom { address, uplink }))
            }
            SourceSpec::Host { address, mode: ModeWord::Cooperating, .. } => Ok(Way::Cooperating(address)),
            SourceSpec::Host { mode: ModeWord::Passthrough, .. } => Err(self.not_to_be_moved()),
            SourceSpec::Host { mode: ModeWord::Virtual, .. } | SourceSpec::Emulated { .. } => Ok(Way::Saved),
        }
    }

    /// One step, on the function's thread, between two messages of its VMM.
    pub(super) async fn step<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut dyn Carry) -> Result<R, CarryError> + Send + 'static,
    ) -> Result<R, Refusal> {
        let done = self.on_its_thread(|body| body.carry().and_then(act)).await?;
        done.map_err(|error| refuse(&self.name(), &error))
    }

    /// Anything on its thread. One that is away has no time.
    pub(super) async fn on_its_thread<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Body) -> R + Send + 'static,
    ) -> Result<R, Refusal> {
        let name = self.name();
        let done = self.served.handle.with(move |device: &mut Lifecycle<Body>| device.with(act)).await;
        done.map_err(|_| gone(&name))?
            .map_err(|error| Refusal::busy(format!("{name}: {error}"), "try again in a moment"))
    }

    /// Whether it does not go on, or cannot by itself.
    async fn stands_still(&self, way: &Way) -> bool {
        match way {
            // One that does not say may stand still.
            Way::Direct(_) | Way::Cooperating(_) => {
                !matches!(self.step(|direct| Ok(direct.motion())).await, Ok(Motion::Runs))
            }
            Way::Saved => self.served.handle.held().is_some(),
        }
    }

    /// Its guest stands still: nobody waits here for somebody else.
    pub(super) fn changes(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, Refusal> {
        let busy = |_| Refusal::busy(format!("{} is being changed", self.name()), "try again in a moment");
        self.served.changing.try_lock().map_err(busy)
    }

    /// The same, where another host's words may still be said: they are soon.
    pub(super) async fn changes_soon(&self) -> Result<tokio::sync::MutexGuard<'_, ()>, Refusal> {
        match tokio::time::timeout(SOON, self.served.changing.lock()).await {
            Ok(changing) => Ok(changing),
            Err(_) => self.changes(),
        }
    }

    /// A step that is for a function which stands still.
    fn is_held(&self) -> Result<(), Refusal> {
        match self.served.handle.held() {
            Some(_) => Ok(()),
            None => Err(refuse(&self.name(), &CarryError::Runs)),
        }
    }

    pub(super) fn has_guest(&self) -> Result<(), Refusal> {
        match self.served.handle.status().connected {
            true => Ok(()),
            false => Err(refuse(&self.name(), &CarryError::NoGuest)),
        }
    }

    /// Brings it to rest, where it stays, and has its VMM send what it has written. Its VMM is served meanwhile.
    pub async fn rest(&self, form: FunctionStepForm) -> Result<RestedFunctionReport, Refusal> {
        let (name, begun, patience) = (self.name(), Instant::now(), patience(form.deadline_ms)?);
        let way = self.way()?;
        way.stands_still(&name, form.guest_stopped)?;
        let _changing = self.changes()?;
        self.has_guest()?;
        let _trapped = self.trapped().await?;
        self.mark(Some(MoveStep::AtRest))?;
        let rested = match way {
            Way::Direct(_) | Way::Cooperating(_) => self.rest_direct(begun + patience).await,
            Way::Saved => {
                let form = QuiesceForm { deadline_ms: form.deadline_ms, or_resume: false };
                self.rest_saved(&form).await.map(|()| 0)
            }
        };
        if rested.is_err() && !self.stands_still(&way).await {
            self.unmark();
        }
        let stop_accesses = rested?;
        let waited_us = begun.elapsed().as_micros() as u64;
        // A guest that runs may write to the same pages, and so may functions that are not at rest. Then another `rest` sends them.
        let pages_sent =
            if form.guest_stopped && !form.unsent { self.send_written(way).await? } else { None };
        tracing::info!(function = name, stop_accesses, pages_sent, "stands still, to be moved");
        Ok(RestedFunctionReport { name, stop_accesses, waited_us, pages_sent })
    }

    pub(super) async fn rest_direct(&self, deadline: Instant) -> Result<u64, Refusal> {
        let mut stop_accesses = 0;
        let resting = Resting::new(&self.served.handle, None);
        loop {
            let (still, motion, accesses) = self
                .step(|direct| {
                    let before = direct.accesses();
                    let still = direct.rest()?;
                    Ok((still, direct.motion(), direct.accesses() - before))
                })
                .await?;
            stop_accesses += accesses;
            if still {
                resting.done();
                return Ok(stop_accesses);
            }
            if Instant::now() >= deadline {
                return Err(late(&self.name(), motion));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn rest_saved(&self, form: &QuiesceForm) -> Result<(), Refusal> {
        self.has_guest()?;
        let (name, handle) = (self.name(), &self.served.handle);
        if handle.held().is_some_and(|left| left < Duration::MAX) {
            return Err(refuse(&name, &CarryError::Held));
        }
        if handle.held().is_none() {
            // The other host may have its state soon: it does not resume by itself.
            let held = handle.hold(hold::policy(form), Duration::MAX).await.map_err(|_| gone(&name))?;
            held.map_err(|error| hold::refuse(&name, form, &error))?;
        }
        Ok(())
    }

    /// Pages that it writes are logged from here on, until it goes on from a state or `end_log`.
    pub async fn log(&self) -> Result<(), Refusal> {
        let way = self.way()?;
        let _changing = self.changes()?;
        self.served.keep_unsent(PageSet::new());
        let _trapped = self.trapped().await?;
        match way {
            Way::Direct(_) | Way::Cooperating(_) => self.step(|direct| direct.begin_log()).await,
            Way::Saved => {
                self.has_guest()?;
                self.log_saved(true).await.map(drop)
            }
        }
    }

    /// They are no longer logged. Says whether they were.
    pub async fn end_log(&self) -> Result<bool, Refusal> {
        let way = self.way()?;
        let _changing = self.changes()?;
        self.served.keep_unsent(PageSet::new());
        match way {
            Way::Direct(_) | Way::Cooperating(_) => {
                self.step(|direct| {
                    let logged = direct.logs();
                    direct.end_log();
                    Ok(logged)
                })
                .await
            }
            Way::Saved => self.log_saved(false).await,
        }
    }

    async fn log_saved(&self, yes: bool) -> Result<bool, Refusal> {
        let name = self.name();
        let logged = self.served.handle.log(yes).await.map_err(|_| gone(&name))?;
        logged.map_err(|error| Refusal::failed(format!("{name}: {error}"), "free memory, and try again"))
    }

    /// Has the VMM write once more what the function has written since its memory is copied: so the VMM sends it. Says how many pages; `None`
    /// if nothing was logged. Pages that the VMM was not told of are named again by the next call.
    async fn send_written(&self, way: Way) -> Result<Option<u64>, Refusal> {
        let (name, handle) = (self.name(), &self.served.handle);
        let written: Option<PageSet> = match way {
            Way::Direct(_) | Way::Cooperating(_) => {
                self.step(|direct| Ok(direct.logs().then(|| direct.written()))).await?
            }
            Way::Saved => {
                let written = handle.written().await.map_err(|_| gone(&name))?;
                written.map(|addresses| addresses.into_iter().map(|address| address / PAGE).collect())
            }
        };
        let Some(mut pages) = written else { return Ok(None) };
        pages.append(&mut self.served.keep_unsent(PageSet::new()));
        let error = match handle.write(again(&pages), Instant::now() + LONGEST).await {
            Ok(Ok(_)) => return Ok(Some(pages.len() as u64)),
            Ok(Err(error)) => error.to_string(),
            Err(_) => return Err(gone(&name)),
        };
        self.served.keep_unsent(pages);
        Err(Refusal::conflict(
            format!("{name} stands still, and its VMM does not send what it has written: {error}"),
            "try again, or let it go on: POST /v1/pci/NAME/replay",
        ))
    }

    /// What another daemon's function needs to go on from here.
    pub async fn carried(&self) -> Result<CarriedFunctionV1, Refusal> {
        let name = self.name();
        let went = match self.way()? {
            Way::Direct(_) | Way::Cooperating(_) => {
                let (Carried { state: body, set_up }, (kind, version)) =
                    self.step(|direct| Ok((direct.carried()?, direct.kind()))).await?;
                let state = SavedState { kind: kind.to_owned(), version, body };
                Gone { state, set_up, physical: self.administered().await? }
            }
            Way::Saved => {
                let _changing = self.changes()?;
                self.is_held()?;
                let act = |held: &mut Quiescent<Body>| {
                    let set_up = held.with(|body, _| set_up_of(body));
                    held.save().map(|state| Gone { state, set_up, physical: None })
                };
                let saved = self.at_quiescence(QuiesceForm::default(), act).await?;
                saved.map_err(|error| {
                    Refusal::conflict(format!("{name}: {error}"), format!("see `ioplane pci show {name}`"))
                })?
            }
        };
        Ok(file_of(went))
    }

    /// Takes what another daemon's function had. Says whether it stands still, until its replay; else it goes on from there at once.
    pub async fn take(&self, file: CarriedFunctionV1) -> Result<bool, Refusal> {
        let way = self.way()?;
        let Gone { state, set_up, physical } = gone_of(file)?;
        let _changing = self.changes_soon().await?;
        match way {
            Way::Direct(_) | Way::Cooperating(_) => {
                // A replay may need the physical function, and then there is no way back.
                let asked = way.clone();
                blocking(move || asked.physical().map(drop)).await?;
                let version = u32::from(ioplane_moving::VERSION);
                if state.version != version {
                    let text = format!(
                        "the state is of version {}, and this host reads version {version}",
                        state.version
                    );
                    return Err(Refusal::conflict(text, "use the same version of ioplane on both hosts"));
                }
                let carried = Carried { state: state.body, set_up };
                if self.step(|direct| Ok(direct.motion())).await? == Motion::Runs {
                    self.mark(Some(MoveStep::Taken))?;
                }
                let taken = self.take_direct(carried, physical).await;
                if taken.is_err() && !self.stands_still(&way).await {
                    self.unmark();
                }
                taken.map(|()| true)
            }
            Way::Saved => {
                self.has_guest()?;
                self.load_state(state).await?;
                self.announce().await;
                Ok(false)
            }
        }
    }

    /// Frames for an emulated NIC come here from now on, whoever had its address before.
    async fn announce(&self) {
        let announce = |device: &mut Lifecycle<Body>| device.with(Body::announce);
        // One that is not told is found by the next frame of its guest.
        let _ = self.served.handle.with(announce).await;
    }

    /// It goes on from its state: there, or here after all.
    pub async fn replay(&self, form: FunctionStepForm) -> Result<ReplayedFunctionReport, Refusal> {
        let (name, begun, patience) = (self.name(), Instant::now(), patience(form.deadline_ms)?);
        let way = self.way()?;
        way.stands_still(&name, form.guest_stopped)?;
        let _changing = self.changes()?;
        self.may_go_on()?;
        let (replay_accesses, replay_messages, replay_frames, messages_ahead, took) = match way {
            Way::Direct(_) | Way::Cooperating(_) => {
                let mut around = blocking(move || Ok(Here::new(way.physical()?, patience))).await?;
                let (Replayed { accesses, messages, ahead, took }, around) = self
                    .step(move |direct| direct.replay(&mut around).map(|replayed| (replayed, around)))
                    .await?;
                let frames = around.frames();
                announce::begin(&self.served.handle, &name, around.physical(), self.vlan().await);
                (accesses, messages, frames, ahead, took)
            }
            Way::Saved => {
                self.is_held()?;
                self.log_saved(false).await?;
                self.let_go().await?;
                self.announce().await;
                (0, 0, 0, 0, begun.elapsed())
            }
        };
        self.unmark();
        self.served.keep_unsent(PageSet::new());
        tracing::info!(
            function = name,
            replay_accesses,
            replay_messages,
            messages_ahead,
            "goes on from its state"
        );
        let took_us = took.as_micros() as u64;
        Ok(ReplayedFunctionReport {
            name,
            replay_accesses,
            replay_messages,
            replay_frames,
            messages_ahead,
            took_us,
        })
    }

    /// Its guest is another function's from here on.
    pub async fn leave(&self) -> Result<(), Refusal> {
        let way = self.way()?;
        let _changing = self.changes()?;
        match way {
            Way::Direct(_) | Way::Cooperating(_) => {
                if self.step(|direct| Ok(direct.motion())).await? == Motion::Still {
                    self.mark(Some(MoveStep::Left))?;
                }
                self.step(|direct| direct.leave()).await?;
                self.settings_left().await;
            }
            Way::Saved => {
                self.is_held()?;
                self.mark(Some(MoveStep::Left))?;
                self.log_saved(false).await?;
                let reset = |held: &mut Quiescent<Body>| held.with(|body, proof| body.reset(proof));
                self.at_quiescence(QuiesceForm::default(), reset).await?;
                self.let_go().await?;
            }
        }
        self.served.keep_unsent(PageSet::new());
        Ok(())
    }
}

/// Pages that follow each other are one write.
fn again(pages: &PageSet) -> Vec<DmaWrite> {
    let mut writes: Vec<DmaWrite> = Vec::new();
    for address in pages.iter().map(|page| page * PAGE) {
        match writes.last_mut() {
            Some(DmaWrite::Again { address: from, len }) if *from + *len == address => *len += PAGE,
            _ => writes.push(DmaWrite::Again { address, len: PAGE }),
        }
    }
    writes
}

/// It has not come to rest in time.
fn late(name: &str, motion: Motion) -> Refusal {
    match motion {
        Motion::Runs => Refusal::conflict(
            format!(
                "{name}: the deadline passed while its frames are sent, or its driver has the lock; it goes on"
            ),
            "see whether its physical function has a link, and try again; a driver that cooperates needs a guest that runs",
        ),
        Motion::Stopping | Motion::Still => Refusal::conflict(
            format!("{name}: the deadline passed while its queues end"),
            "try again, or let it go on: POST /v1/pci/NAME/replay",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_carried_is_read_and_what_is_none_is_not() {
        let set_up =
            SetUp { command: 6, bars: [0xfe00_0000, 0, 0, 1, 2, 3], msix: 0x8002, vectors: vec![0, 2] };
        let state = SavedState { kind: "rtl8139".into(), version: 3, body: vec![0, 255, 7] };
        let physical = Some(PhysicalForm::default());
        let went = Gone { state, set_up, physical };
        let file = file_of(went.clone());
        assert_eq!(gone_of(file.clone()).unwrap(), went);
        let other = |change: fn(&mut CarriedFunctionV1)| {
            let mut file = file.clone();
            change(&mut file);
            gone_of(file).unwrap_err().error
        };
        assert_eq!(
            other(|file| file.version = 2),
            "it is ioplane-carried-function version 2, this is ioplane-carried-function version 1"
        );
        assert!(other(|file| file.format = "x".repeat(1000)).len() < 130);
        assert!(other(|file| file.state = "%".into()).starts_with("its base64: "));
    }

    #[test]
    fn pages_that_follow_each_other_are_written_at_once() {
        let write = |page, pages| DmaWrite::Again { address: page * PAGE, len: pages * PAGE };
        assert_eq!(again(&PageSet::from([0, 1, 3, 7, 8, 9])), [write(0, 2), write(3, 1), write(7, 3)]);
        assert_eq!(again(&PageSet::new()), []);
    }

    #[test]
    fn steps_say_how_long_they_may_take_and_that_the_guest_stands_still() {
        assert_eq!(patience(4000).unwrap(), LONGEST);
        assert_eq!(patience(4001).unwrap_err().field.as_deref(), Some("deadline_ms"));
        let address: PciAddress = "0000:01:10.0".parse().unwrap();
        let direct = Way::Direct(FramesFrom { address, uplink: None });
        direct.stands_still("nic0", true).unwrap();
        assert_eq!(direct.stands_still("nic0", false).unwrap_err().field.as_deref(), Some("guest_stopped"));
        Way::Cooperating(address).stands_still("nic0", false).unwrap();
        assert!(late("nic0", Motion::Runs).error.ends_with("it goes on"));
    }
}
