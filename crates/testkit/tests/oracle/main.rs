//! Our chips, bare and mediated, against the ones that QEMU emulates: the same scripts drive both, and every read, frame, level of
//! INTA# and byte of memory is compared. QEMU's code and the data sheets are the oracle, not our own model.

mod ne2000;
#[path = "../monitor/rig.rs"]
#[allow(dead_code, reason = "the tests of the monitor use all of it")]
mod rig;
mod rtl8139;

use std::io::Write;

use ioplane_memory::GuestView;
use ioplane_pci::Function;
use ioplane_testkit::oracle::{Book, Driven, Entry, Logged, Rig, Whose};
use ioplane_testkit::qtest::{self, Qemu};
use rig::{OWN, Watched};

/// A script: what it is named, and what it does.
type Script<'a> = (&'a str, &'a dyn Fn(&mut Logged<'_>) -> Result<(), String>);

impl<F: Function> Driven for Watched<F> {
    fn arrived(&mut self) {
        self.turn();
    }

    fn settle(&mut self) {
        self.interrupts();
    }
}

/// Whether there is a QEMU to compare with. If not, that is said.
fn missing() -> bool {
    if qtest::installed() {
        return false;
    }
    let program = qtest::PROGRAM;
    let _ = writeln!(
        std::io::stderr(),
        "SKIPPED: our chips were NOT compared with QEMU's: {program} is not installed (script/bootstrap installs it)"
    );
    true
}

/// A QEMU of its own for a script, which is a card at power-on.
fn theirs(model: &str, (name, script): &Script<'_>) -> Vec<Entry> {
    let qemu = Qemu::start(model, OWN).unwrap_or_else(|error| panic!("{name}: {error}"));
    let view = GuestView::new(qemu.memory().clone());
    play(&mut (qemu, view), name, script)
}

fn play(rig: &mut dyn Rig, name: &str, script: &dyn Fn(&mut Logged<'_>) -> Result<(), String>) -> Vec<Entry> {
    let mut logged = Logged::new(rig);
    if let Err(error) = script(&mut logged) {
        let from = logged.log.len().saturating_sub(12);
        panic!("{name}: {error}; before it: {:02x?}", &logged.log[from..]);
    }
    logged.log
}

/// One of ours, and how to make it.
type Candidate<'a> = (Whose, &'a dyn Fn() -> Box<dyn Rig>);

/// Plays scripts on QEMU's card and on ours, and says all that differs.
fn compare(model: &str, scripts: &[Script<'_>], book: &mut Book, ours: &[Candidate<'_>]) -> Vec<String> {
    let mut wrong = Vec::new();
    for script in scripts {
        let expected = theirs(model, script);
        for (whose, make) in ours {
            let mut rig = make();
            let got = play(&mut *rig, script.0, script.1);
            wrong.extend(book.compare(script.0, *whose, &expected, &got).err());
        }
    }
    wrong
}
