//! A vCPU that the library makes wait, and that QEMU's main loop waits for: a reset of the guest, `stop`, `info registers`. The monitor that would say so is
//! silent then (docs/decisions/0087-virsh-migrate.md). On a thread of its own, since the attendance waits for that monitor.
//!
//! ```text
//!   a command is not answered, a vCPU waits, and QEMU's main thread waits for another thread, at each look of 250 ms  -->  those vCPUs are let go
//! ```
//!
//! QEMU's stop for the switch-over is made by its migration thread: its main loop answers meanwhile. What is wanted back after that waits as before.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use ioplane_api::report::VcpusReport;
use ioplane_api::request::StopWord;
use ioplane_cli::client::Client;
use ioplane_cli::output::hint;

use super::super::monitor::Unanswered;
use super::vcpus::say;

/// Between two looks.
const PACE: Duration = Duration::from_millis(20);
/// A monitor that has not answered for so long is looked at.
const SLOW: Duration = Duration::from_millis(40);
/// How long all looks have to say the same, and how many at least: on a machine that is loaded there are fewer in that time.
const SILENT: Duration = Duration::from_millis(250);
const LOOKS: u32 = 6;
/// For an answer of the daemon here.
const PATIENCE: Duration = Duration::from_secs(2);

/// The thread that looks. It ends with this value.
pub(super) struct Stalls(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    over: AtomicBool,
    let_go: AtomicBool,
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::SeqCst);
    }
}

impl Stalls {
    /// Begins to look at the VMM of a function, whose monitor this is.
    pub(super) fn watch(socket: &Path, function: &str, unanswered: Arc<Unanswered>) -> Stalls {
        let shared = Arc::new(Shared::default());
        let (socket, function, of_thread) = (socket.to_owned(), function.to_owned(), shared.clone());
        std::thread::spawn(move || {
            if let Err(error) = look_on(&socket, &function, &unanswered, &of_thread) {
                hint(format!(
                    "a reset of the guest may make it stand still for five seconds until it is migrated: {error:#}"
                ));
            }
        });
        Stalls(shared)
    }

    /// Whether a vCPU was let go.
    pub(super) fn has_let_go(&self) -> bool {
        self.0.let_go.load(Ordering::SeqCst)
    }
}

/// How long all looks have said that the main loop waits for a vCPU.
#[derive(Debug, Default)]
struct Stall {
    /// Number of the command that is not answered.
    command: u64,
    since: Option<Instant>,
    looks: u32,
    /// vCPUs were let go since that command: it waits for others now.
    known: bool,
}

impl Stall {
    /// One look. Whether those that wait are to be let go.
    fn sees(&mut self, command: u64, shown: &VcpusReport, now: Instant) -> bool {
        if self.command != command {
            *self = Stall { command, ..Stall::default() };
        }
        if !(shown.stop == StopWord::Ask && shown.waiting > 0 && shown.main_waits) {
            // It has gone on: what comes next may be the stop for the switch-over.
            (self.since, self.looks, self.known) = (None, 0, false);
            return false;
        }
        let since = *self.since.get_or_insert(now);
        self.looks += 1;
        let is_one = self.known || (self.looks >= LOOKS && now.duration_since(since) >= SILENT);
        self.known |= is_one;
        is_one
    }
}

fn look_on(socket: &Path, function: &str, unanswered: &Unanswered, shared: &Shared) -> Result<()> {
    let here = Client::new(socket)?.with_patience(PATIENCE).keeping();
    let (path, mut stall) = (format!("/v1/pci/{function}/vcpus"), Stall::default());
    let silent = || unanswered.now().filter(|(_, time)| *time >= SLOW).map(|(command, _)| command);
    while !shared.over.load(Ordering::SeqCst) {
        std::thread::sleep(PACE);
        let Some(command) = silent() else { continue };
        // A function whose VMM has ended has no vCPUs.
        let Ok(shown) = here.get::<VcpusReport>(&path) else { continue };
        // It may have answered in the meantime.
        if !stall.sees(command, &shown, Instant::now()) || silent() != Some(command) {
            continue;
        }
        // First: whoever finds that QEMU's stop was not held up asks for the reason.
        let before = shared.let_go.swap(true, Ordering::SeqCst);
        match say(&here, function, StopWord::Pass) {
            Ok(()) if !before => hint(
                "the main loop of the QEMU here waited for a vCPU, as for a reset of the guest: that was let go; what is wanted back from now on waits as before",
            ),
            Ok(()) => {}
            // It has gone by itself.
            Err(_) => shared.let_go.store(before, Ordering::SeqCst),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(waiting: u32, main_waits: bool) -> VcpusReport {
        VcpusReport { held: false, inside: 0, stop: StopWord::Ask, waiting, main_waits }
    }

    /// Looks as often as it does in this time. When vCPUs are let go, ms.
    fn goes_on(stall: &mut Stall, command: u64, begun: Instant, ms: u64, shown: &VcpusReport) -> Option<u64> {
        let mut looks = (0..ms).step_by(20);
        looks.find(|ms| stall.sees(command, shown, begun + Duration::from_millis(*ms)))
    }

    #[test]
    fn vcpus_are_let_go_that_a_silent_main_loop_waits_for() {
        let (mut stall, begun) = (Stall::default(), Instant::now());
        let let_go = goes_on(&mut stall, 1, begun, 1000, &shown(2, true)).unwrap();
        assert!((250..300).contains(&let_go), "{let_go}");
        // The next one that the same command waits for.
        assert!(stall.sees(1, &shown(1, true), begun + Duration::from_millis(let_go + 20)));
        // Of another command nothing is known.
        assert!(!stall.sees(2, &shown(1, true), begun + Duration::from_millis(let_go + 40)));
    }

    #[test]
    fn a_monitor_that_is_merely_slow_has_nobody_let_go() {
        let begun = Instant::now();
        let kept = VcpusReport { stop: StopWord::Keep, ..shown(2, true) };
        for shown in [shown(0, true), shown(2, false), kept] {
            assert_eq!(goes_on(&mut Stall::default(), 1, begun, 9000, &shown), None, "{shown:?}");
        }
        // It has done something in between.
        let mut stall = Stall::default();
        for round in 0..9 {
            let begun = begun + Duration::from_millis(round * 240);
            assert_eq!(goes_on(&mut stall, 1, begun, 220, &shown(2, true)), None);
            assert!(!stall.sees(1, &shown(2, false), begun + Duration::from_millis(230)));
        }
        // Each command has been answered.
        for command in 0..9 {
            let begun = begun + Duration::from_millis(command * 200);
            assert_eq!(goes_on(&mut stall, command + 2, begun, 200, &shown(2, true)), None);
        }
        // Whoever looks got a processor twice in that time.
        let mut stall = Stall::default();
        assert!(!stall.sees(1, &shown(2, true), begun));
        assert!(!stall.sees(1, &shown(2, true), begun + Duration::from_secs(2)));
    }
}
