//! Port accesses that come one after another: what a VMM that looks ahead could answer in one exit.
//!
//! ```text
//!   out 1f2, out 1f3, host interrupt, out 1f4, HLT    a run of three; the host's own interrupts come anywhere
//!   out 1f2, interrupt, out 20, out 1f3               no run: the guest's handler came in between
//!   in 608, in 608, in 608 (one instruction)          no run: a loop, each turn of which waits for the last one's answer
//! ```
//!
//! That an interrupt of the guest's came in between is told by its injection, by the window that was waited for to inject it, by KVM
//! when it accepts one for this vCPU in this vCPU's thread, and by the guest being seen far away from its last access.
//! Where the processor delivers interrupts by itself (APICv, AVIC), one that another thread has posted to a vCPU that runs
//! leaves no trace in that one's thread: if its handler takes no exit and none of the host's interrupts shows the guest in
//! it, the run goes on as if it had not been.

use foldhash::HashMap;

use crate::event::Detail;
use crate::reason::Kind;

/// Longer runs are recorded as their beginning.
pub const LONGEST: usize = 16;
/// An instruction farther than this from the last access, in bytes, is somewhere else: code between two accesses of one row is near.
const NEAR: u64 = 4096;
/// So many different runs are told apart.
const RUNS: usize = 4096;

/// One access of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Step {
    /// The port.
    pub port: u16,
    /// Bytes at a time.
    pub width: u8,
    /// OUT, not IN.
    pub write: bool,
}

/// The instruction that begins a run, and what is accessed from there on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run {
    /// The guest's first instruction of it.
    pub rip: u64,
    steps: [Step; LONGEST],
    length: usize,
}

impl Run {
    /// The accesses in their order; [`LONGEST`] of them stand for as many or more.
    pub fn steps(&self) -> &[Step] {
        &self.steps[..self.length]
    }
}

/// The run that a thread is in.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadRun {
    run: Run,
    /// The last access, and its instruction.
    last: Option<(u64, Step)>,
    /// Its beginning was perhaps not seen.
    torn: bool,
}

/// How often each run was seen. Its size is bounded by [`RUNS`].
#[derive(Clone, Debug, Default)]
pub struct Runs {
    seen: HashMap<Run, u64>,
    /// Runs that found no room.
    pub crowded: u64,
}

impl Runs {
    /// Takes a thread's next exit. What the guest did not cause is passed over; anything else but a port ends the run.
    pub(crate) fn exit(&mut self, row: &mut ThreadRun, kind: Kind, rip: u64, detail: Detail) {
        match (kind, detail) {
            // It is opened for an interrupt, which is delivered now.
            (Kind::InterruptWindow, _) => self.end(row),
            (Kind::HostInterrupt | Kind::Timer, _) => {
                if row.last.is_some_and(|(last, _)| rip.abs_diff(last) > NEAR) {
                    self.end(row);
                }
            }
            (Kind::Port, Detail::Port { port, width, write }) => {
                let step = Step { port, width, write };
                // A loop begins its next turn: the same again, or the first again.
                let again = row.last == Some((rip, step));
                let first = row.run.steps().first() == Some(&step) && row.run.rip == rip;
                if again || first {
                    self.end(row);
                }
                if row.run.length == 0 {
                    row.run.rip = rip;
                }
                if row.run.length < LONGEST {
                    row.run.steps[row.run.length] = step;
                    row.run.length += 1;
                }
                row.last = Some((rip, step));
            }
            _ => self.end(row),
        }
    }

    /// Nothing was seen until now: the first run that ends does not count.
    pub(crate) fn fresh(&mut self, row: &mut ThreadRun) {
        *row = ThreadRun { torn: true, ..ThreadRun::default() };
    }

    /// The guest does something else now. A single access is no run.
    pub(crate) fn end(&mut self, row: &mut ThreadRun) {
        let ThreadRun { run, torn, .. } = std::mem::take(row);
        if torn || run.length < 2 {
            return;
        }
        if self.seen.len() < RUNS || self.seen.contains_key(&run) {
            *self.seen.entry(run).or_default() += 1;
        } else {
            self.crowded += 1;
        }
    }

    /// All runs and how often each was seen.
    pub fn iter(&self) -> impl Iterator<Item = (&Run, u64)> {
        self.seen.iter().map(|(run, times)| (run, *times))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn out(port: u16) -> Detail {
        Detail::Port { port, width: 1, write: true }
    }

    fn ports(run: &Run) -> Vec<u16> {
        run.steps().iter().map(|step| step.port).collect()
    }

    /// What was seen: first instruction, ports, how often; in order.
    fn seen(runs: &Runs) -> Vec<(u64, Vec<u16>, u64)> {
        let mut all: Vec<_> = runs.iter().map(|(run, times)| (run.rip, ports(run), times)).collect();
        all.sort();
        all
    }

    #[test]
    fn one_instruction_that_writes_six_ports_in_a_row() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for _ in 0..50 {
            for port in 0x1f2..=0x1f7 {
                runs.exit(&mut row, Kind::Port, 7, out(port));
                runs.exit(&mut row, Kind::HostInterrupt, 99, Detail::Nothing);
            }
        }
        runs.end(&mut row);
        assert_eq!(seen(&runs), [(7, vec![0x1f2, 0x1f3, 0x1f4, 0x1f5, 0x1f6, 0x1f7], 50)]);
    }

    #[test]
    fn hole_21_an_interrupt_without_an_injection_ends_a_run() {
        let other =
            [(Kind::InterruptWindow, 7), (Kind::HostInterrupt, 0xffff_8000), (Kind::Timer, 7 + 2 * NEAR)];
        for (kind, rip) in other {
            let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
            runs.exit(&mut row, Kind::Port, 7, out(0x1f2));
            runs.exit(&mut row, Kind::Port, 9, out(0x1f3));
            runs.exit(&mut row, kind, rip, Detail::Nothing);
            // Its handler.
            runs.exit(&mut row, Kind::Port, rip, out(0x20));
            runs.exit(&mut row, Kind::Halt, 9, Detail::Nothing);
            assert_eq!(seen(&runs), [(7, vec![0x1f2, 0x1f3], 1)], "{kind:?}");
        }
    }

    #[test]
    fn what_is_not_in_a_row_is_no_run() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for port in [0x1f2, 0x1f3, 0x1f4].repeat(20) {
            runs.exit(&mut row, Kind::Port, u64::from(port), out(port));
            runs.exit(&mut row, Kind::Halt, 9, Detail::Nothing);
        }
        // A loop that polls.
        for _ in 0..20 {
            runs.exit(&mut row, Kind::Port, 8, Detail::Port { port: 0x608, width: 4, write: false });
        }
        runs.end(&mut row);
        assert_eq!(seen(&runs), []);
    }

    #[test]
    fn a_loop_within_a_run_ends_it() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for (rip, port) in [(1, 0x70), (2, 0x71), (3, 0x64), (3, 0x64), (3, 0x64), (4, 0x60)] {
            runs.exit(&mut row, Kind::Port, rip, out(port));
        }
        runs.end(&mut row);
        assert_eq!(seen(&runs), [(1, vec![0x70, 0x71, 0x64], 1), (3, vec![0x64, 0x60], 1)]);
    }

    #[test]
    fn long_runs_and_many_runs_are_bounded() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for rip in 0..2 * RUNS as u64 {
            for port in 0..40 {
                runs.exit(&mut row, Kind::Port, rip + u64::from(port), out(port));
            }
            runs.end(&mut row);
        }
        assert_eq!((runs.seen.len(), runs.crowded), (RUNS, RUNS as u64));
        assert!(runs.iter().all(|(run, times)| run.steps().len() == LONGEST && times == 1));
    }
}
