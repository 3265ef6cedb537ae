//! The PCI functions of a VM that moves: the steps of docs/decisions/0077-a-function-in-steps.md at both daemons, and what their QEMUs have to be told of
//! the functions, by their monitors. Why in this order: docs/decisions/0078-a-vm-moves-with-its-functions.md.
//!
//! ```text
//!   here:   log --> migrate --> pre-switchover: INTx off --> rest --> carried ---> migrate-continue --> completed -------------------------> gone --------> leave
//!   there:  stop (VF) ahead ...                                       (VF) take -'                     take --> BARs, command, MSI-X --> (VF) replay --> cont -'
//! ```
//!
//! Whatever fails before `gone` is written down, the functions here go on, and the guest with them. What is changed is written down first, and then whose the
//! guest is: [`super::journal`], for whoever brings a move to its end that was broken off. A function whose driver cooperates comes to rest before
//! pre-switchover: [`cooperating`].

mod ahead;
mod attended;
mod broken_off;
mod cooperating;
mod kept;
mod late;
mod silence;
mod stall;
mod vcpus;
mod way_back;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::{
    CarriedFunctionV1, DoneReport, FunctionReport, MsixReport, ReplayedFunctionReport, RestedFunctionReport,
    SetUpFunctionReport,
};
use ioplane_api::request::{FunctionStepForm, MoveNoteForm, NotedFunction, VectorForm, WriteVectorsForm};
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::hint;
use serde::Serialize;
use serde_json::{Value, json};

use super::bus::{self, Found, Place, Size, with_ports};
use super::guard::Guards;
use super::journal::{self, Journal};
use super::monitor::{Followed, Monitor, PATIENCE};
use super::ready::Far;
use super::{failed, refused, with_remedy};
pub(super) use cooperating::announced;
pub(super) use late::Late;
pub(super) use vcpus::hold;

/// Between two looks at a migration: the guest stands still until it is seen that it has stopped.
const LOOK: Duration = Duration::from_millis(5);
/// How long a step may take, ms; QEMU gives up on a function after five seconds.
const STEP: u64 = 4000;
/// Of a guest that stands still.
pub(super) const STEPS: FunctionStepForm =
    FunctionStepForm { deadline_ms: STEP, guest_stopped: true, unsent: false };
/// For an answer of the QEMU here while it sends the last of the guest, which stands still.
const SWITCH_OVER: Duration = Duration::from_secs(20);
/// For the other QEMU to have loaded the guest, once this one has sent it.
const ARRIVAL: Duration = Duration::from_secs(60);
/// Of the command register (PCI Local Bus Specification 3.0, 6.2.2).
const INTX_OFF: u32 = 1 << 10;
/// Of the message control of MSI-X: all vectors are masked (6.8.2.3).
const FUNCTION_MASK: u32 = 1 << 14;
/// Where a message of MSI has a logical destination (bit 2) that no processor is in (Intel SDM volume 3, 12.11.1).
const NOBODY: u64 = 0xfee0_0004;

/// What has been moved of a function.
#[derive(Debug, Clone, Serialize)]
pub(super) struct MovedFunction {
    pub name: String,
    pub mode: String,
    /// Its place on the guest's bus.
    pub place: String,
    /// Bytes of its state.
    pub state_bytes: u64,
    /// Pages that it had written and that QEMU sent once more.
    pub pages_sent: u64,
    /// Register accesses that brought it to rest here.
    pub stop_accesses: u64,
    /// And there to where it was.
    pub replay_accesses: u64,
    /// Messages to the physical function there that did so.
    pub replay_messages: u64,
    /// Frames that the physical function there sent to it, which moved the heads of its receive rings to where they were.
    pub replay_frames: u64,
    /// And those that had been said ahead, while its guest ran.
    pub messages_ahead: u64,
    /// For how long it stood still while the guest ran, ms, where its driver cooperates; `None`: it came to rest with the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rested_before_ms: Option<f64>,
    /// Whether the driver there has brought it back by now, where its driver has to and its guest runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub brought_back: Option<bool>,
}

impl MovedFunction {
    fn of(name: &str, mode: &str, place: &str) -> MovedFunction {
        MovedFunction {
            name: name.to_owned(),
            mode: mode.to_owned(),
            place: place.to_owned(),
            state_bytes: 0,
            pages_sent: 0,
            stop_accesses: 0,
            replay_accesses: 0,
            replay_messages: 0,
            replay_frames: 0,
            messages_ahead: 0,
            rested_before_ms: None,
            brought_back: None,
        }
    }
}

/// What the devices took of the time in which the guest stood still, ms.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct DeviceTime {
    /// From pre-switchover to `migrate-continue`.
    pub stop_ms: f64,
    /// From the end of the migration to `cont`.
    pub revive_ms: f64,
    /// Both, and what QEMU did in between.
    pub stood_still_ms: f64,
    /// What was done in it, in its order.
    pub steps: Vec<StepTime>,
    #[serde(skip)]
    last: Option<Instant>,
}

/// A part of the time in which the guest stood still.
#[derive(Debug, Clone, Serialize)]
pub(super) struct StepTime {
    step: &'static str,
    ms: f64,
}

impl DeviceTime {
    /// What has been done since the last step, or since the guest stands still, was this one.
    fn step(&mut self, step: &'static str) {
        if let Some(last) = self.last.replace(Instant::now()) {
            self.steps.push(StepTime { step, ms: ms(last) });
        }
    }
}

/// How far a function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stand {
    Runs,
    Logged,
    Still,
    Left,
}

struct Moving {
    name: String,
    /// A guest drives the hardware itself: it is brought back register by register, or by its driver.
    direct: bool,
    /// By its driver, which needs a guest that runs to give its lock back.
    cooperates: bool,
    found: Found,
    stand: Stand,
    /// The command register as it was, once the guest stands still.
    command: Option<u32>,
    /// It has a wired interrupt, which is switched off by that register.
    pin: bool,
    msix: Option<MsixReport>,
    carried: Option<CarriedFunctionV1>,
    moved: MovedFunction,
}

impl Moving {
    fn noted(&self) -> NotedFunction {
        journal::noted(&self.name, self.direct, &self.found, (self.command, self.pin))
    }

    fn path(&self, step: &str) -> String {
        format!("/v1/pci/{}/{step}", self.name)
    }

    /// Notes how the guest has set the function up, as far as its state does not say so.
    fn note_set_up(&mut self, here: &Client) -> Result<()> {
        let SetUpFunctionReport { command, pin, msix } = self.step(here, "set-up")?;
        (self.command, self.pin, self.msix) = (Some(command.into()), pin, msix);
        Ok(())
    }

    fn step<R: serde::de::DeserializeOwned>(&self, host: &Client, step: &str) -> Result<R> {
        self.step_as(host, step, STEPS)
    }

    fn step_as<R: serde::de::DeserializeOwned>(
        &self,
        host: &Client,
        step: &str,
        form: FunctionStepForm,
    ) -> Result<R> {
        host.ask(Method::POST, &self.path(step), Some(&form))
    }

    /// Comes to rest. What it has written is sent then, unless it is left `unsent` for another time.
    fn rest(&mut self, here: &Client, unsent: bool) -> Result<()> {
        // It may have come to rest although the answer says no, or does not come.
        self.stand = Stand::Still;
        let deadline_ms = if self.cooperates { cooperating::LOCKED } else { STEP };
        let form = FunctionStepForm { deadline_ms, unsent, ..STEPS };
        let rested: RestedFunctionReport = self.step_as(here, "rest", form)?;
        self.moved.stop_accesses += rested.stop_accesses;
        match rested.pages_sent {
            Some(pages) => self.moved.pages_sent = pages,
            None if unsent => {}
            None => {
                return Err(failed(
                    format!("what PCI function {} has written is not logged any more", self.name),
                    "try again",
                ));
            }
        }
        Ok(())
    }
}

/// What has been moved.
pub(super) struct Moved {
    /// What QEMU says of the migration.
    pub ended: Value,
    pub functions: Vec<MovedFunction>,
    pub time: DeviceTime,
    /// The guest ran, and does so there.
    pub running: bool,
}

/// All of a VM's, and both hosts.
pub(super) struct Functions<'a> {
    vm: &'a str,
    here: &'a Client,
    there: &'a Client,
    /// Of the QEMU there; `None` if that has ended.
    far: Option<Monitor>,
    journal: Journal<'a>,
    all: Vec<Moving>,
    guards: Guards,
    /// `pause-before-switchover` was on before.
    paused_before: bool,
    /// What was done to this QEMU so that functions come to rest before the guest stands still.
    holding: cooperating::Holding,
    /// What the guest here has left in the address port of its bus, once it stands still.
    latch: Option<u32>,
    /// This QEMU has sent all of the guest.
    sent: bool,
    /// The state of the VM there, as it was seen last.
    far_state: String,
    /// The guest ran before it stood still for the move.
    running: bool,
    /// The vCPUs here, and those there, enter no guest.
    held: [bool; 2],
    /// Somebody else drives the migration.
    attended: bool,
    /// And does not wait: QEMU itself does, for vCPUs that the library keeps. And whether they are kept now.
    keeps: bool,
    kept: bool,
    /// The other host, whose QEMU is not there yet.
    late: Option<Late>,
    /// Lets vCPUs go that QEMU's main loop waits for.
    stalls: Option<stall::Stalls>,
    /// What the guest says goes ahead.
    telling: Option<ahead::Telling>,
    /// Something may have been said there.
    went_ahead: bool,
    /// The guest is the other host's.
    gone: bool,
    time: DeviceTime,
}

/// The monitor there, as long as its QEMU is.
fn not_ended(far: &mut Option<Monitor>) -> Result<&mut Monitor> {
    far.as_mut().ok_or_else(|| failed("the QEMU there has ended", ""))
}

impl<'a> Functions<'a> {
    /// Those of a VM, if it and both hosts are ready. Nothing is changed.
    pub fn look(
        vm: &'a str,
        reports: &[FunctionReport],
        here: &'a Client,
        monitor: &mut Monitor,
        Far { there, monitor: far, late }: Far<'a>,
        note: MoveNoteForm,
    ) -> Result<Functions<'a>> {
        let keeps = late.is_some();
        // That of one who does not wait is left to him.
        let paused_before = super::ready::settings(monitor, "here")? || keeps;
        let names: Vec<&str> = reports.iter().map(|report| report.name.as_str()).collect();
        let guards = Guards::of(monitor, &names)?;
        if !bus::has_ports(monitor)? {
            return Err(refused(
                format!("the machine of VM {vm} has no ports by which configuration space is reached"),
                "give it a machine with PCI ports, as q35 and pc",
            ));
        }
        let on_bus = bus::functions(monitor)?;
        let mut all = Vec::new();
        for report in reports {
            let found = super::ready::on_the_bus(monitor, &on_bus, report)?;
            let moved = MovedFunction::of(&report.name, &report.mode, &found.place.to_string());
            let cooperates = report.mode == cooperating::MODE;
            all.push(Moving {
                name: report.name.clone(),
                direct: cooperates || report.mode == "migratable",
                cooperates,
                found,
                stand: Stand::Runs,
                command: None,
                pin: false,
                msix: None,
                carried: None,
                moved,
            });
        }
        let moving: Vec<Found> = all.iter().map(|one: &Moving| one.found.clone()).collect();
        super::ready::no_others(monitor, &on_bus, &moving)?;
        Ok(Functions {
            vm,
            here,
            there,
            far,
            journal: Journal::begin(here, vm, note)?,
            all,
            guards,
            paused_before,
            holding: cooperating::Holding::default(),
            latch: None,
            sent: false,
            far_state: "inmigrate".to_owned(),
            running: false,
            held: [false; 2],
            attended: false,
            keeps,
            kept: false,
            late,
            stalls: None,
            telling: None,
            went_ahead: false,
            gone: false,
            time: DeviceTime::default(),
        })
    }

    fn far(&mut self) -> Result<&mut Monitor> {
        not_ended(&mut self.far)
    }

    /// Whether this reason against a migration goes before it begins.
    pub fn removes(&self, why: &str) -> bool {
        self.guards.explain(why)
    }

    /// Moves the VM, which runs if `running`, with them to where `uri` says; without one somebody else drives the migration.
    pub fn go(
        mut self,
        monitor: &mut Monitor,
        uri: Option<&str>,
        running: bool,
        interrupted: &AtomicBool,
    ) -> Result<Moved> {
        (self.running, self.attended) = (running, uri.is_none());
        match self.attempt(monitor, uri, interrupted) {
            Ok(ended) => {
                if let Err(error) = self.journal.end() {
                    hint(format!("that the move has come to its end is not written down: {error:#}"));
                }
                let functions = self.all.into_iter().map(|one| one.moved).collect();
                Ok(Moved { ended, functions, time: self.time, running: self.running })
            }
            Err(error) if self.gone => Err(self.stranded(error)),
            Err(error) if uri.is_none() && self.has_left() => Err(self.lost_to_it(error)),
            Err(error) => Err(self.stay(monitor, error)),
        }
    }

    fn attempt(
        &mut self,
        monitor: &mut Monitor,
        uri: Option<&str>,
        interrupted: &AtomicBool,
    ) -> Result<Value> {
        self.journal.note.running = self.running;
        self.journal.note.paused_before = self.paused_before;
        self.journal.note.guards = self.guards.noted();
        self.note_functions();
        self.journal.write()?;
        journal::moment("noted");
        // Before the guards are out: whoever migrates it then has to wait for the functions.
        match self.keeps {
            true => {
                self.ask()?;
                self.stalls = self.watch_stalls(monitor);
            }
            false => {
                self.pause_before(monitor, true)?;
                // While it waits for a guest this only says that the guest is not to run by itself.
                self.far()?.execute("stop", &json!({}))?;
            }
        }
        self.guards.remove(monitor)?;
        for one in &mut self.all {
            let _: DoneReport = self.here.ask(Method::POST, &one.path("log"), None::<&()>)?;
            one.stand = Stand::Logged;
        }
        journal::moment("logged");
        match uri {
            Some(uri) => {
                // With as much time as possible before the stop.
                self.tell_ahead();
                self.let_go_of_former();
                drop(monitor.execute("migrate", &json!({ "uri": uri }))?);
            }
            None => {
                if !self.keeps {
                    self.hold_there();
                }
                self.is_begun(monitor, interrupted)?;
                // Whoever drives it has set it to migrate as he likes; from now on QEMU lets nobody change that.
                super::ready::settings(monitor, "here")?;
                if self.keeps {
                    self.find_other(monitor, interrupted)?;
                }
                self.tell_ahead();
            }
        }
        let now = match self.all.iter().any(|one| one.cooperates) {
            true => self.come_to_rest_first(monitor, interrupted)?,
            false => self.follow(monitor, |now| now["status"] == "pre-switchover", interrupted)?,
        };
        let begun = *self.time.last.insert(Instant::now());
        match now["status"].as_str() {
            Some("pre-switchover") if !self.keeps => {}
            Some(kept::STOPPING) => self.keep(monitor)?,
            status if self.keeps => return Err(self.missed(monitor, status.unwrap_or_default())),
            _ => {
                self.sent = true;
                return Err(did_not_wait());
            }
        }
        // What is under way there comes first; QEMU waits for its vCPUs by now.
        self.telling = None;
        self.is_awaited()?;
        if uri.is_none() {
            self.is_received()?;
        }
        self.are_in_place(monitor)?;
        self.time.step("looks");
        self.stand_still(monitor, interrupted)?;
        journal::moment("taken");
        match uri {
            None if self.keeps => self.let_stop(monitor)?,
            None => {
                attended::still_waits(monitor)?;
                self.hold_here();
            }
            Some(_) => {}
        }
        // From here on it answers nothing while it waits for the other one to read.
        monitor.set_patience(SWITCH_OVER);
        if !self.keeps {
            monitor.execute("migrate-continue", &json!({ "state": "pre-switchover" }))?;
        }
        self.time.stop_ms = ms(begun);
        let ended = monitor.follow("completed", LOOK, interrupted, Some(Instant::now() + ARRIVAL), None);
        let ended = match ended {
            Ok(ended) => followed(ended)?,
            // Whoever drives it may have ended the QEMU here already: the one there knows.
            Err(_) if self.keeps => Value::Null,
            Err(error) => return Err(error),
        };
        self.sent = true;
        self.time.step("switch-over");
        monitor.set_patience(PATIENCE);
        let arriving = Instant::now();
        journal::moment("sent");
        self.arrived()?;
        self.time.step("arrival");
        self.revive()?;
        self.time.step("set-up there");
        journal::moment("revived");
        self.replay()?;
        self.time.step("replay");
        not_cancelled(interrupted)?;
        if uri.is_none() {
            self.stands_still_there()?;
        }
        journal::moment("replayed");
        self.journal.give_away()?;
        self.gone = true;
        journal::moment("gone");
        // The functions here stand still whether they were told so or not: the guest does not wait for their resets.
        let continued = self.let_go_there().and_then(|()| match uri {
            _ if !self.running => Ok(()),
            Some(_) => self.far()?.execute("cont", &json!({})).map(drop),
            // It is left to whoever does not wait.
            None if self.keeps => Ok(()),
            None => self.have_run(),
        });
        self.time.step("cont");
        journal::moment("continued");
        (self.time.revive_ms, self.time.stood_still_ms) = (ms(arriving), ms(begun));
        self.leave();
        journal::moment("left");
        continued?;
        if self.running {
            self.are_brought_back();
        }
        Ok(ended)
    }

    fn note_functions(&mut self) {
        self.journal.note.functions = self.all.iter().map(Moving::noted).collect();
    }

    /// They are where they were before memory was copied: the guest may have rebooted meanwhile, or have been told to let go of one.
    fn are_in_place(&self, monitor: &mut Monitor) -> Result<()> {
        let on_bus = bus::functions(monitor)?;
        match self.all.iter().find(|one| !on_bus.contains(&one.found)) {
            None => Ok(()),
            Some(one) => Err(failed(
                format!("PCI function {} is no longer at {} in the guest", one.name, one.found.place),
                "try again, when the guest has settled",
            )),
        }
    }

    fn pause_before(&mut self, monitor: &mut Monitor, yes: bool) -> Result<()> {
        if self.paused_before {
            return Ok(());
        }
        let pause = json!({ "capability": "pause-before-switchover", "state": yes });
        monitor.execute("migrate-set-capabilities", &json!({ "capabilities": [pause] })).map(drop)
    }

    /// The other QEMU is there, and waits.
    fn is_awaited(&mut self) -> Result<()> {
        self.far_state = self.far()?.state()?;
        match self.far_state.as_str() {
            "inmigrate" => Ok(()),
            state => Err(failed(
                format!("the VM there is {state}, and not waiting for a guest any more"),
                "start its QEMU again with -incoming",
            )),
        }
    }

    /// Brings all of them to rest, and has the other daemon look at the states of those that are brought back register by register.
    fn stand_still(&mut self, monitor: &mut Monitor, interrupted: &AtomicBool) -> Result<()> {
        // Before the first one is at rest: accesses to one that is wait, and the monitor with them. Daemons are asked what they know, since each of HMP's
        // commands takes time in which the guest stands still.
        for one in &mut self.all {
            one.note_set_up(self.here)?;
        }
        let wired = self.all.iter().any(|one| one.pin);
        if wired {
            self.journal.note.latch = Some(*self.latch.insert(bus::latch(monitor)?));
        }
        self.journal.note.running = self.running;
        self.note_functions();
        self.journal.write()?;
        journal::moment("commands");
        if wired {
            let all = &self.all;
            with_ports(monitor, &mut self.latch, |ports| {
                all.iter().filter(|one| one.pin).try_for_each(|one| switch_wire_off(ports, one))
            })?;
        }
        self.time.step("set-up here");
        // Buffers of several functions may lie in one page, which nobody may write to while it is sent.
        let several = self.all.len() > 1;
        for one in self.all.iter_mut().filter(|_| several) {
            not_cancelled(interrupted)?;
            one.rest(self.here, true)?;
        }
        for one in &mut self.all {
            not_cancelled(interrupted)?;
            one.rest(self.here, false)?;
            self.time.step("rest");
            journal::moment("rested");
            let carried: CarriedFunctionV1 = self.here.get(&one.path("carried"))?;
            one.moved.state_bytes = (carried.state.len() / 4 * 3) as u64;
            // That of one whose driver cooperates is in the guest's memory, which is not there yet.
            if one.direct && !one.cooperates {
                put(self.there, one, &carried)?;
            }
            one.carried = Some(carried);
            self.time.step("state");
        }
        not_cancelled(interrupted)
    }

    /// The other QEMU has all of the guest.
    fn arrived(&mut self) -> Result<()> {
        let end = Instant::now() + ARRIVAL;
        loop {
            self.far_state = self.far()?.state()?;
            let state = &self.far_state;
            match state.as_str() {
                "paused" => return Ok(()),
                // Somebody has said so already.
                "running" if self.held[1] => return Ok(()),
                "inmigrate" | "postmigrate" | "finish-migrate" if Instant::now() < end => {
                    std::thread::sleep(LOOK)
                }
                _ => {
                    return Err(failed(
                        format!("the VM has been sent, and is {state} there"),
                        "see what the QEMU there says",
                    ));
                }
            }
        }
    }

    /// Has the other QEMU know the functions as this one did, after the states of those that were saved are loaded: the other way round they time out.
    fn revive(&mut self) -> Result<()> {
        for one in self.all.iter().filter(|one| !one.direct || one.cooperates) {
            if let Some(carried) = &one.carried {
                put(self.there, one, carried)?;
            }
        }
        let on_bus = bus::functions(self.far()?)?;
        for one in &self.all {
            if !on_bus.contains(&one.found) {
                let Found { place, kind, .. } = &one.found;
                return Err(failed(
                    format!(
                        "the QEMU there has no {kind} at {place}, where PCI function {} is here",
                        one.name
                    ),
                    "start it with the same devices in the same order",
                ));
            }
        }
        let (there, all) = (self.there, &self.all);
        let Some(far) = &mut self.far else { return Ok(()) };
        with_ports(far, &mut None, |ports| {
            if all.iter().any(|one| one.pin) {
                ports.route_again(&on_bus)?;
            }
            all.iter().try_for_each(|one| set_up(ports, there, one))
        })
    }

    /// The guest is the other host's from here on. A function here that could not be told so stands still all the same.
    fn leave(&mut self) {
        for one in &mut self.all {
            one.stand = Stand::Left;
        }
        for one in &self.all {
            let path = one.path("leave");
            if let Err(error) = self.here.ask::<DoneReport>(Method::POST, &path, None::<&()>)
                && !self.has_lost_its_vmm(one)
            {
                hint(format!(
                    "PCI function {} here could not be reset, and stands still: {error:#}",
                    one.name
                ));
            }
        }
    }

    /// Brings back register by register those that are not loaded.
    fn replay(&mut self) -> Result<()> {
        for one in self.all.iter_mut().filter(|one| one.direct) {
            // One that did not come to its state takes another try.
            let replay = || one.step::<ReplayedFunctionReport>(self.there, "replay");
            let replayed = replay().or_else(|_| replay())?;
            one.moved.replay_accesses = replayed.replay_accesses;
            one.moved.replay_messages = replayed.replay_messages;
            one.moved.replay_frames = replayed.replay_frames;
            one.moved.messages_ahead = replayed.messages_ahead;
        }
        Ok(())
    }

    /// There is no way back.
    fn stranded(mut self, error: anyhow::Error) -> anyhow::Error {
        let state = self.far().and_then(Monitor::state).unwrap_or_default();
        let remedy = match (state.as_str(), self.running) {
            _ if self.held[1] => {
                "the guest is there, and its vCPUs may be held: `ioplane move recover` here lets it go on; end the QEMU here, and do not let it continue"
            }
            ("running", _) | ("paused", false) => {
                "the guest is there: end the QEMU here, and do not let it continue"
            }
            _ => {
                "the guest is there and stands still: say `cont` by the monitor there; end the QEMU here, and do not let it continue"
            }
        };
        with_remedy(error, &format!("VM {} has moved", self.vm), remedy)
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

fn followed(followed: Followed) -> Result<Value> {
    match followed {
        Followed::There(now) => Ok(now),
        Followed::Ended { cancelled: true, why } => Err(refused(format!("the move was cancelled{why}"), "")),
        Followed::Ended { cancelled: false, why } => Err(failed(format!("QEMU has given it up{why}"), "")),
    }
}

fn did_not_wait() -> anyhow::Error {
    failed(
        "QEMU did not wait before the switch-over",
        "set the capability pause-before-switchover by its monitor, and see whether it stays set",
    )
}

fn not_cancelled(interrupted: &AtomicBool) -> Result<()> {
    match interrupted.load(Ordering::SeqCst) {
        false => Ok(()),
        true => Err(refused("the move was cancelled", "")),
    }
}

fn put(there: &Client, one: &Moving, carried: &CarriedFunctionV1) -> Result<()> {
    there.ask::<DoneReport>(Method::PUT, &one.path("carried"), Some(carried)).map(drop)
}

/// Switches the wired interrupt of a function off: QEMU migrates the bus's count of wires that are up, and not which function has one up.
fn switch_wire_off(ports: &mut bus::Ports<'_>, one: &Moving) -> Result<()> {
    let command = one.command.unwrap_or(0);
    ports.write(one.found.place, bus::COMMAND, Size::Word, command | INTX_OFF)
}

/// Sets a function up as it was, by the monitor of the QEMU that has it now.
fn set_up(ports: &mut bus::Ports<'_>, there: &Client, one: &Moving) -> Result<()> {
    let place: Place = one.found.place;
    let (Some(carried), Some(command)) = (&one.carried, one.command) else { return Ok(()) };
    // The others have the value that they have anyway: nobody has driven it.
    for (number, bar) in (0..).zip(carried.bars).filter(|(_, bar)| *bar != 0) {
        ports.write(place, bus::bar_at(number), Size::Long, bar)?;
    }
    // With the wired interrupt as the guest had it: from here on the function may raise it.
    ports.write(place, bus::COMMAND, Size::Word, command)?;
    let Some(MsixReport { at, control: now, table }) = &one.msix else { return Ok(()) };
    let (control, now) = (at.saturating_add(bus::MSIX_CONTROL), u32::from(*now));
    let mut switch = |value: u32| ports.write(place, control, Size::Word, value);
    let write = |table: Vec<VectorForm>| {
        let form = WriteVectorsForm { table, deadline_ms: STEP, guest_stopped: true };
        there.ask::<DoneReport>(Method::PUT, &one.path("vectors"), Some(&form))
    };
    let wired = |number: usize| carried.vectors.iter().any(|wired| usize::from(*wired) == number);
    let masked = |(number, vector): (usize, &VectorForm)| vector.masked && wired(number);
    if table.iter().enumerate().any(masked) || (now & FUNCTION_MASK != 0 && !carried.vectors.is_empty()) {
        // QEMU wires only what is not masked, and keeps a wire that is masked later: so all that had one get it, and then come the masks, under that of
        // the function. A mask by itself would have QEMU ask the daemon something that waits for QEMU to write the table. Meanwhile the messages go to
        // nobody: the guest would get one of a vector that it has masked.
        let open = table.iter().enumerate().map(|(number, vector)| VectorForm {
            address: NOBODY,
            masked: !wired(number),
            ..*vector
        });
        write(open.collect())?;
        switch(now & !FUNCTION_MASK)?;
        switch(now | FUNCTION_MASK)?;
    }
    if !table.is_empty() {
        write(table.clone())?;
    }
    switch(now)
}
