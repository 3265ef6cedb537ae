//! What is written down of a move, at the daemon here: before anything is changed that could not be put back otherwise. One entry moves ownership.
//!
//! ```text
//!   begun: what the guest had --> its address port and command registers --> gone: the guest is the other host's
//! ```

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::DoneReport;
use ioplane_api::request::{MoveNoteForm, NotedFunction, NotedGuard};
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::CommandError;

use super::bus::{Found, Place};
use super::refused;

/// How often it is asked what is written down, by one that does not answer, and how long apart.
const ASKED: u32 = 10;
const PAUSE: Duration = Duration::from_millis(100);

/// What was written down, in memory as on disk.
pub(super) struct Journal<'a> {
    here: &'a Client,
    vm: &'a str,
    pub note: MoveNoteForm,
}

fn path(vm: &str) -> String {
    format!("/v1/moves/{vm}")
}

fn is_missing(error: &anyhow::Error) -> bool {
    let body = error.downcast_ref::<CommandError>();
    body.is_some_and(|CommandError(body)| body.code == Code::NotFound.word())
}

/// What is written down of a move of this VM, if there is anything.
pub(super) fn read(here: &Client, vm: &str) -> Result<Option<MoveNoteForm>> {
    match here.get(&path(vm)) {
        Ok(note) => Ok(Some(note)),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

impl<'a> Journal<'a> {
    /// Of a move that begins; nothing is written yet. `note` says which VM it is and where the others are.
    pub fn begin(here: &'a Client, vm: &'a str, note: MoveNoteForm) -> Result<Journal<'a>> {
        if read(here, vm)?.is_some_and(|known| known.pid == note.pid) {
            return Err(refused(
                format!("a move of VM {vm} was broken off"),
                format!("ioplane move recover {vm} brings it to its end"),
            ));
        }
        Ok(Journal { here, vm, note })
    }

    /// Of one that was broken off.
    pub fn found(here: &'a Client, vm: &'a str, note: MoveNoteForm) -> Journal<'a> {
        Journal { here, vm, note }
    }

    /// The daemon that has it.
    pub fn here(&self) -> &'a Client {
        self.here
    }

    /// Writes down what is noted.
    pub fn write(&self) -> Result<()> {
        self.here.ask::<DoneReport>(Method::PUT, &path(self.vm), Some(&self.note)).map(drop)
    }

    /// The guest is the other host's from here on, if this says so. An error: it is not. A daemon that has died since has no function that could go
    /// on, whatever it has written down.
    pub fn give_away(&mut self) -> Result<()> {
        self.note.gone = true;
        let Err(first) = self.write() else { return Ok(()) };
        for _ in 0..ASKED {
            match read(self.here, self.vm) {
                Ok(Some(known)) if known.gone => return Ok(()),
                Ok(_) => {
                    self.note.gone = false;
                    return Err(first);
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
        Ok(())
    }

    /// It has come to its end.
    pub fn end(&self) -> Result<()> {
        match self.here.ask::<DoneReport>(Method::DELETE, &path(self.vm), None::<&()>) {
            Ok(_) => Ok(()),
            Err(error) if is_missing(&error) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// A note with nothing in it that the guest had.
pub(super) fn blank(pid: u32, to: &str, qmp: &str, there: PathBuf, qmp_there: PathBuf) -> MoveNoteForm {
    MoveNoteForm {
        peer: None,
        pid,
        gone: false,
        to: to.to_owned(),
        qmp: qmp.to_owned(),
        there,
        qmp_there,
        running: false,
        paused_before: false,
        downtime_limit: None,
        latch: None,
        guards: Vec::<NotedGuard>::new(),
        functions: Vec::new(),
    }
}

/// A function of the guest's bus, as it is noted.
pub(super) fn noted(
    name: &str,
    direct: bool,
    found: &Found,
    (command, pin): (Option<u32>, bool),
) -> NotedFunction {
    let Found { place: Place { bus, slot, function }, id, kind, .. } = found;
    NotedFunction {
        name: name.to_owned(),
        direct,
        place: [*bus, *slot, *function],
        id: id.clone(),
        kind: kind.clone(),
        command,
        pin,
    }
}

/// The other way round.
pub(super) fn found(noted: &NotedFunction) -> Found {
    let [bus, slot, function] = noted.place;
    let place = Place { bus, slot, function };
    Found { place, id: noted.id.clone(), kind: noted.kind.clone(), class: 0 }
}

/// A moment at which a test kills this process. With the feature `kill-points` it is killed where the environment variable `IOPLANE_MOVE_KILL` says so.
pub(super) fn moment(name: &str) {
    #[cfg(feature = "kill-points")]
    if std::env::var_os("IOPLANE_MOVE_KILL").is_some_and(|wanted| wanted == name) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        loop {
            std::thread::park();
        }
    }
    #[cfg(not(feature = "kill-points"))]
    let _ = name;
}
