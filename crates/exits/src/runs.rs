//! Device accesses that come one after another: what a VMM that looks ahead could answer in one exit.
//!
//! ```text
//!   out 1f2, out 1f3, host interrupt, out 1f4, HLT    a run of three; the host's own interrupts come anywhere
//!   out 1f2, write febf0010, read febf0014            a run of three: ports and MMIO are alike
//!   out 1f2, interrupt, out 20, out 1f3               no run: the guest's handler came in between
//!   out 1f2, 50 us of the guest, out 1f3              no run: nobody looks ahead so far
//!   in 608, in 608, in 608 (one instruction)          no run: a loop, each turn of which waits for the last one's answer
//! ```
//!
//! That an interrupt of the guest's came in between is told by its injection, by the window that was waited for to inject it, by KVM
//! when it accepts one for this vCPU in this vCPU's thread, and by the guest being seen far away from its last access.
//! Where the processor delivers interrupts by itself (APICv, AVIC), one that another thread has posted to a vCPU that runs
//! leaves no trace in that one's thread: if its handler takes no exit, is shorter than [`GAP_NS`] and none of the host's interrupts shows the
//! guest in it, the run goes on as if it had not been.

use foldhash::HashMap;

use crate::event::Detail;
use crate::reason::Kind;

/// Longer runs are recorded as their beginning.
pub const LONGEST: usize = 16;
/// An instruction farther than this from the last access, in bytes, is somewhere else: code between two accesses of one row is near.
pub(crate) const NEAR: u64 = 4096;
/// A guest that has run for longer than this between two accesses has done something else. It is how long a cluster of the interposer may last (`ioplane run
/// --time-limit`).
pub(crate) const GAP_NS: u64 = 50_000;
/// So many different runs are told apart.
const RUNS: usize = 4096;

/// An exit that is over, or as much of it as is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SeenExit {
    pub kind: Kind,
    /// The guest's instruction.
    pub rip: u64,
    pub detail: Detail,
    /// The VMM has answered it.
    pub user: bool,
    /// When the guest was left, in ns.
    pub at: u64,
    /// When it went on, where that is known.
    pub end: Option<u64>,
}

/// The instruction that begins a run, and what is accessed from there on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Run {
    /// The guest's first instruction of it.
    pub rip: u64,
    /// Ports and addresses.
    steps: [Detail; LONGEST],
    length: usize,
}

impl Default for Run {
    fn default() -> Run {
        Run { rip: 0, steps: [Detail::Nothing; LONGEST], length: 0 }
    }
}

impl Run {
    /// One that begins with that instruction; of more than [`LONGEST`] accesses the first.
    pub(crate) fn of(rip: u64, accesses: impl Iterator<Item = Detail>) -> Run {
        let mut run = Run { rip, ..Run::default() };
        for (step, access) in run.steps.iter_mut().zip(accesses) {
            *step = access;
            run.length += 1;
        }
        run
    }

    /// The accesses in their order; [`LONGEST`] of them stand for as many or more.
    pub fn steps(&self) -> &[Detail] {
        &self.steps[..self.length]
    }
}

/// How often a run was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// The whole of it.
    pub times: u64,
    /// Of all accesses together, how many the VMM has answered. KVM answers the others by itself.
    pub user: u64,
}

/// The run that a thread is in.
#[derive(Clone, Copy, Debug, Default)]
pub struct ThreadRun {
    run: Run,
    /// The last access, and its instruction.
    last: Option<(u64, Detail)>,
    /// When the guest went on after the last exit, or was left where that is not known.
    since: u64,
    /// How many of the accesses the VMM has answered.
    user: u64,
    /// Its beginning was perhaps not seen.
    torn: bool,
}

/// How often each run was seen. Its size is bounded by [`RUNS`].
#[derive(Clone, Debug, Default)]
pub struct Runs {
    seen: HashMap<Run, RunCounts>,
    /// Runs that found no room.
    pub crowded: u64,
}

impl Runs {
    /// Takes a thread's next exit. What the guest did not cause is passed over; anything else but an access ends the run.
    pub(crate) fn exit(&mut self, row: &mut ThreadRun, exit: SeenExit) {
        let SeenExit { kind, rip, detail, user, at, end } = exit;
        if row.last.is_some() && at.saturating_sub(row.since) > GAP_NS {
            self.end(row);
        }
        match (kind, detail) {
            // It is opened for an interrupt, which is delivered now.
            (Kind::InterruptWindow, _) => self.end(row),
            (Kind::HostInterrupt | Kind::Timer, _) => {
                if row.last.is_some_and(|(last, _)| rip.abs_diff(last) > NEAR) {
                    self.end(row);
                }
            }
            (Kind::Port, Detail::Port { .. }) | (Kind::Memory, Detail::Memory { .. }) => {
                // A loop begins its next turn: the same again, or the first again.
                let again = row.last == Some((rip, detail));
                let first = row.run.steps().first() == Some(&detail) && row.run.rip == rip;
                if again || first {
                    self.end(row);
                }
                if row.run.length == 0 {
                    row.run.rip = rip;
                }
                if row.run.length < LONGEST {
                    row.run.steps[row.run.length] = detail;
                    row.run.length += 1;
                    row.user += u64::from(user);
                }
                row.last = Some((rip, detail));
            }
            _ => self.end(row),
        }
        row.since = end.unwrap_or(at);
    }

    /// Nothing was seen until now: the first run that ends does not count.
    pub(crate) fn fresh(&mut self, row: &mut ThreadRun) {
        *row = ThreadRun { torn: true, ..ThreadRun::default() };
    }

    /// The guest does something else now. A single access is no run.
    pub(crate) fn end(&mut self, row: &mut ThreadRun) {
        let ThreadRun { run, torn, user, .. } = std::mem::take(row);
        if torn || run.length < 2 {
            return;
        }
        self.add(run, RunCounts { times: 1, user });
    }

    /// Takes what was seen of a run.
    pub(crate) fn add(&mut self, run: Run, more: RunCounts) {
        if self.seen.len() < RUNS || self.seen.contains_key(&run) {
            let counts = self.seen.entry(run).or_default();
            counts.times += more.times;
            counts.user += more.user;
        } else {
            self.crowded += more.times;
        }
    }

    /// All runs and how often each was seen.
    pub fn iter(&self) -> impl Iterator<Item = (&Run, RunCounts)> {
        self.seen.iter().map(|(run, counts)| (run, *counts))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::FaultCause;

    fn out(port: u16) -> Detail {
        Detail::Port { port, width: 1, write: true, queue: None }
    }

    fn ports(run: &Run) -> Vec<u16> {
        let port = |step: &Detail| if let Detail::Port { port, .. } = step { *port } else { 0 };
        run.steps().iter().map(port).collect()
    }

    fn memory(address: u64) -> Detail {
        Detail::Memory { address, width: 4, write: true }
    }

    impl Runs {
        /// An exit that takes no time, at once after the last one.
        fn at_once(&mut self, row: &mut ThreadRun, kind: Kind, rip: u64, detail: Detail) {
            self.exit(row, SeenExit { kind, rip, detail, user: true, at: 0, end: None });
        }
    }

    /// What was seen: first instruction, ports, how often; in order.
    fn seen(runs: &Runs) -> Vec<(u64, Vec<u16>, u64)> {
        let mut all: Vec<_> = runs.iter().map(|(run, seen)| (run.rip, ports(run), seen.times)).collect();
        all.sort();
        all
    }

    #[test]
    fn one_instruction_that_writes_six_ports_in_a_row() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for _ in 0..50 {
            for port in 0x1f2..=0x1f7 {
                runs.at_once(&mut row, Kind::Port, 7, out(port));
                runs.at_once(&mut row, Kind::HostInterrupt, 99, Detail::Nothing);
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
            runs.at_once(&mut row, Kind::Port, 7, out(0x1f2));
            runs.at_once(&mut row, Kind::Port, 9, out(0x1f3));
            runs.at_once(&mut row, kind, rip, Detail::Nothing);
            // Its handler.
            runs.at_once(&mut row, Kind::Port, rip, out(0x20));
            runs.at_once(&mut row, Kind::Halt, 9, Detail::Nothing);
            assert_eq!(seen(&runs), [(7, vec![0x1f2, 0x1f3], 1)], "{kind:?}");
        }
    }

    #[test]
    fn what_is_not_in_a_row_is_no_run() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for port in [0x1f2, 0x1f3, 0x1f4].repeat(20) {
            runs.at_once(&mut row, Kind::Port, u64::from(port), out(port));
            runs.at_once(&mut row, Kind::Halt, 9, Detail::Nothing);
        }
        // A loop that polls.
        for _ in 0..20 {
            runs.at_once(
                &mut row,
                Kind::Port,
                8,
                Detail::Port { port: 0x608, width: 4, write: false, queue: None },
            );
        }
        runs.end(&mut row);
        assert_eq!(seen(&runs), []);
    }

    /// An interrupt that the processor has delivered by itself leaves no trace but the time of its handler.
    #[test]
    fn a_guest_that_runs_for_long_does_something_else() {
        let lengths = |pause: u64, end: Option<u64>| {
            let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
            let mut at = 1000;
            for port in [1, 2, 3, 4] {
                let (kind, rip, detail) = (Kind::Port, u64::from(port), out(port));
                let end = end.map(|time| at + time);
                runs.exit(&mut row, SeenExit { kind, rip, detail, user: true, at, end });
                at = end.unwrap_or(at) + if port == 2 { pause } else { 500 };
            }
            runs.end(&mut row);
            let mut lengths: Vec<usize> = runs.iter().map(|(run, _)| run.steps().len()).collect();
            lengths.sort_unstable();
            lengths
        };
        // The VMM's time is not the guest's.
        assert_eq!(lengths(GAP_NS, Some(10 * GAP_NS)), [4]);
        assert_eq!(lengths(GAP_NS + 1, Some(10 * GAP_NS)), [2, 2]);
        assert_eq!(lengths(GAP_NS, None), [4]);
        assert_eq!(lengths(GAP_NS + 1, None), [2, 2]);
    }

    /// Nor does the host's interrupt in the middle of a long pause make it two short ones, but it does of a guest that is still near.
    #[test]
    fn a_pause_is_between_two_exits_of_any_kind() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        let mut exit = |kind, detail, at| {
            runs.exit(&mut row, SeenExit { kind, rip: 7, detail, user: true, at, end: Some(at) });
        };
        exit(Kind::Port, out(1), 0);
        exit(Kind::HostInterrupt, Detail::Nothing, GAP_NS);
        exit(Kind::Port, out(2), 2 * GAP_NS);
        exit(Kind::HostInterrupt, Detail::Nothing, 3 * GAP_NS + 1);
        exit(Kind::Port, out(3), 3 * GAP_NS + 2);
        exit(Kind::Halt, Detail::Nothing, 3 * GAP_NS + 3);
        assert_eq!(seen(&runs), [(7, vec![1, 2], 1)]);
    }

    #[test]
    fn mmio_and_ports_are_of_one_run() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for (rip, kind, detail, user) in [
            (1, Kind::Memory, memory(0xfebf_0010), true),
            (2, Kind::Memory, memory(0xfebf_0014), true),
            (3, Kind::Port, out(0x70), false),
            // A page of memory that was missing is no access to a device.
            (4, Kind::Memory, Detail::Fault(FaultCause::Missing), false),
            (5, Kind::Memory, memory(0xfebf_0018), true),
        ] {
            runs.exit(&mut row, SeenExit { kind, rip, detail, user, at: 0, end: None });
        }
        runs.end(&mut row);
        let all: Vec<_> = runs.iter().map(|(run, seen)| (run.steps().to_vec(), seen)).collect();
        let steps = vec![memory(0xfebf_0010), memory(0xfebf_0014), out(0x70)];
        assert_eq!(all, [(steps, RunCounts { times: 1, user: 2 })]);
    }

    #[test]
    fn a_loop_within_a_run_ends_it() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for (rip, port) in [(1, 0x70), (2, 0x71), (3, 0x64), (3, 0x64), (3, 0x64), (4, 0x60)] {
            runs.at_once(&mut row, Kind::Port, rip, out(port));
        }
        runs.end(&mut row);
        assert_eq!(seen(&runs), [(1, vec![0x70, 0x71, 0x64], 1), (3, vec![0x64, 0x60], 1)]);
    }

    #[test]
    fn long_runs_and_many_runs_are_bounded() {
        let (mut runs, mut row) = (Runs::default(), ThreadRun::default());
        for rip in 0..2 * RUNS as u64 {
            for port in 0..40 {
                runs.at_once(&mut row, Kind::Port, rip + u64::from(port), out(port));
            }
            runs.end(&mut row);
        }
        assert_eq!((runs.seen.len(), runs.crowded), (RUNS, RUNS as u64));
        assert!(runs.iter().all(|(run, seen)| run.steps().len() == LONGEST && seen.times == 1));
    }
}
