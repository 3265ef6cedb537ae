//! The same of a move that was broken off, from what is written down of it.

use anyhow::Result;
use ioplane_cli::client::Client;

use super::super::guard::Guards;
use super::super::journal::{self, Journal};
use super::super::monitor::Monitor;
use super::cooperating::Holding;
use super::{DeviceTime, Functions, MovedFunction, Moving, Stand};

impl<'a> Functions<'a> {
    /// Those of a move that was broken off, by what is written down of it. `sent`: the other QEMU may have all of the guest.
    pub fn found(
        vm: &'a str,
        journal: Journal<'a>,
        there: &'a Client,
        far: Option<Monitor>,
        sent: bool,
        at_rest: impl Fn(&str) -> bool,
    ) -> Functions<'a> {
        let all = journal.note.functions.iter().map(|noted| Moving {
            name: noted.name.clone(),
            direct: noted.direct,
            // Its guest is not waited for.
            cooperates: false,
            found: journal::found(noted),
            stand: if at_rest(&noted.name) { Stand::Still } else { Stand::Logged },
            command: noted.command,
            pin: noted.pin,
            msix: None,
            carried: None,
            moved: MovedFunction::of(&noted.name, "", ""),
        });
        let note = &journal.note;
        Functions {
            vm,
            here: journal.here(),
            there,
            // One that is not there cannot run.
            far_state: if far.is_some() { "unknown" } else { "paused" }.to_owned(),
            all: all.collect(),
            guards: Guards::taken(&note.guards),
            paused_before: note.paused_before,
            holding: Holding::noted(note.downtime_limit),
            latch: note.latch,
            sent: sent && far.is_some(),
            far,
            running: note.running,
            // Perhaps: that is not written down.
            held: [true, true],
            attended: false,
            // Perhaps, too.
            keeps: true,
            kept: false,
            late: None,
            stalls: None,
            telling: None,
            // Perhaps.
            went_ahead: true,
            gone: false,
            time: DeviceTime::default(),
            journal,
        }
    }

    /// Has the guest go on here. What could not be undone; what is written down goes only if there is nothing of that.
    pub fn recover(&mut self, monitor: &mut Monitor) -> Result<Vec<String>> {
        if let Some(far) = &mut self.far {
            self.far_state = far.state()?;
        }
        let troubles = self.undo(monitor);
        if troubles.is_empty() {
            self.journal.end()?;
        }
        Ok(troubles)
    }
}
