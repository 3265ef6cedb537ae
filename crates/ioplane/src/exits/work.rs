//! What the guest got done while it was watched, by its own counters: exits per request, packet or context switch compare two measurements of a
//! guest whose load changes; exits per second do not.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ioplane_cli::args::WatchArgs;
use ioplane_exits::{Action, Report};
use serde::Serialize;

use super::reach::Reach;
use super::watch;

/// What runs in the guest: it also applies and undoes.
pub(super) const TUNE: &str = include_str!("../../../../guest/tune/tune.sh");
/// Fewer than this are no work: reading the counters by ssh causes some itself.
const LEAST: u64 = 200;
/// From this share of further exits per unit on, a change did harm; less is noise.
const HARM_PERCENT: f64 = 10.0;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Unit {
    /// Requests that disks have completed.
    DiskRequest,
    /// Packets that NICs have sent and received.
    Packet,
    /// Changes from one task to another.
    ContextSwitch,
}

impl Unit {
    /// The nearer to what a user waits for, the earlier.
    const ALL: [Unit; 3] = [Unit::DiskRequest, Unit::Packet, Unit::ContextSwitch];

    /// Many of it.
    pub(super) fn words(self) -> &'static str {
        match self {
            Unit::DiskRequest => "disk requests",
            Unit::Packet => "packets",
            Unit::ContextSwitch => "context switches",
        }
    }

    pub(super) fn word(self) -> &'static str {
        match self {
            Unit::DiskRequest => "disk request",
            Unit::Packet => "packet",
            Unit::ContextSwitch => "context switch",
        }
    }

    /// The line of the script that counts it.
    fn key(self) -> &'static str {
        match self {
            Unit::DiskRequest => "disk_requests",
            Unit::Packet => "packets",
            Unit::ContextSwitch => "context_switches",
        }
    }

    /// What a change is meant to help, where that is one unit.
    fn of(action: Action) -> Option<Unit> {
        match action {
            Action::Scheduler => Some(Unit::DiskRequest),
            Action::Napi => Some(Unit::Packet),
            Action::Clocksource | Action::Console => None,
        }
    }
}

/// The counters at one moment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Counters {
    at: Instant,
    /// As [`Unit::ALL`]; nothing where the guest does not tell.
    counts: [Option<u64>; 3],
}

impl Counters {
    /// Asks the guest.
    pub(super) fn read(reach: &Reach, script: &str) -> Result<Counters> {
        let done = reach.run(script, ["work", "all"])?;
        ensure!(done.status == 0, "the guest's counters cannot be read: {}{}", done.said, done.error.trim());
        Ok(Counters { at: Instant::now(), counts: parse(&done.said) })
    }

    /// The work from an earlier moment on: how long, and how many of each unit. A counter that went back is a disk or NIC that went.
    pub(super) fn since(&self, earlier: &Counters) -> Work {
        let mut counts = [None; 3];
        for (count, (now, before)) in counts.iter_mut().zip(self.counts.into_iter().zip(earlier.counts)) {
            *count = now.zip(before).and_then(|(now, before)| now.checked_sub(before));
        }
        Work { time: self.at - earlier.at, counts }
    }
}

/// `KEY NUMBER`, a line each; others are passed over.
fn parse(said: &str) -> [Option<u64>; 3] {
    Unit::ALL.map(|unit| {
        let value = |line: &str| line.strip_prefix(unit.key())?.strip_prefix(' ')?.parse().ok();
        said.lines().find_map(value)
    })
}

/// What was done between two moments.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Work {
    time: Duration,
    counts: [Option<u64>; 3],
}

impl Work {
    /// Units per second and exits per unit. The counters are read a little before and after the exits are watched: both are rates of their own time.
    fn of(&self, unit: usize, report: &Report) -> Option<Rate> {
        let count = self.counts[unit].filter(|count| *count >= LEAST)?;
        let rate = count as f64 / self.time.as_secs_f64().max(1e-9);
        let exits = report.exits as f64 / report.seconds.max(1e-9);
        Some(Rate { count, rate, exits_each: exits / rate })
    }
}

/// Work of one unit, of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Rate {
    count: u64,
    /// Per second.
    pub rate: f64,
    /// All exits, per unit.
    pub exits_each: f64,
}

/// One measurement: the exits, and what the guest got done meanwhile.
pub(super) struct Measured {
    pub report: Report,
    pub work: Work,
}

pub(super) fn measure(args: &WatchArgs, reach: &Reach) -> Result<Measured> {
    let begun = Counters::read(reach, TUNE)?;
    let report = watch(args, None)?;
    Ok(Measured { report, work: Counters::read(reach, TUNE)?.since(&begun) })
}

/// A profile of a guest that was reached: the report, and exits per unit of its work.
#[derive(Serialize)]
pub(super) struct Profiled<'a> {
    #[serde(flatten)]
    report: &'a Report,
    work: Vec<UnitRate>,
}

/// Work of one unit.
#[derive(Serialize)]
struct UnitRate {
    unit: Unit,
    #[serde(flatten)]
    rate: Rate,
}

impl Measured {
    pub(super) fn profiled(&self) -> Profiled<'_> {
        let units = Unit::ALL.into_iter().enumerate();
        let work =
            units.filter_map(|(at, unit)| Some(UnitRate { unit, rate: self.work.of(at, &self.report)? }));
        Profiled { report: &self.report, work: work.collect() }
    }
}

impl fmt::Display for Profiled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\nthe guest's work", self.report)?;
        if self.work.is_empty() {
            writeln!(f, ": too little to divide exits by")?;
        } else {
            writeln!(f, "\n{:>12} {:>12} {:>12}  unit", "units", "a second", "exits each")?;
        }
        for UnitRate { unit, rate: Rate { count, rate, exits_each } } in &self.work {
            writeln!(f, "{count:>12} {rate:>12.1} {exits_each:>12.2}  {}", unit.word())?;
        }
        Ok(())
    }
}

/// Work of one unit, before and after; nothing where the guest did too little of it to compare.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct UnitRow {
    pub unit: Unit,
    pub before: Option<Rate>,
    pub after: Option<Rate>,
}

/// A change that made exits more per unit.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Harm {
    pub unit: Unit,
    /// So much more.
    pub percent: f64,
    /// The command that takes it back.
    pub undo: String,
}

impl fmt::Display for Harm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Harm { unit, percent, undo } = self;
        write!(f, "harm: took {percent:.0} % more exits per {}: undo it with `{undo}`", unit.word())
    }
}

/// The units of which there was enough before or after.
pub(super) fn rows(before: (&Work, &Report), after: (&Work, &Report)) -> Vec<UnitRow> {
    let rows = Unit::ALL.into_iter().enumerate().map(|(at, unit)| UnitRow {
        unit,
        before: before.0.of(at, before.1),
        after: after.0.of(at, after.1),
    });
    rows.filter(|row| row.before.is_some() || row.after.is_some()).collect()
}

/// The unit by which a change is judged: its own if there is one, else the first of which there was enough before and after.
pub(super) fn judged<'a>(rows: &'a [UnitRow], actions: &[Action]) -> Option<&'a UnitRow> {
    let own: Vec<Unit> = actions.iter().filter_map(|action| Unit::of(*action)).collect();
    let mut whole = rows.iter().filter(|row| row.before.is_some() && row.after.is_some());
    if own.is_empty() { whole.next() } else { whole.find(|row| own.contains(&row.unit)) }
}

/// Whether that unit took more exits after than before.
pub(super) fn harm(row: &UnitRow, undo: impl FnOnce() -> String) -> Option<Harm> {
    let percent = (row.after?.exits_each / row.before?.exits_each - 1.0) * 100.0;
    (percent.is_finite() && percent >= HARM_PERCENT).then(|| Harm { unit: row.unit, percent, undo: undo() })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// So many of each unit in two seconds.
    pub(in super::super) fn work(counts: [Option<u64>; 3]) -> Work {
        Work { time: Duration::from_secs(2), counts }
    }

    #[test]
    fn lines_are_counters_and_others_are_passed_over() {
        let said = "hello\npackets 12\ncontext_switches -4\ndisk_requests 18446744073709551615\npackets 99\npacketsx 7\n";
        assert_eq!(parse(said), [Some(u64::MAX), Some(12), None]);
        assert_eq!(parse("packets 99999999999999999999\npackets\n"), [None; 3]);
    }

    #[test]
    fn work_is_what_was_added() {
        let at = Instant::now();
        let counters = |after: u64, counts| Counters { at: at + Duration::from_secs(after), counts };
        let before = counters(0, [Some(100), Some(50), None]);
        let work = counters(4, [Some(700), Some(20), Some(9)]).since(&before);
        // A NIC has gone, and its packets with it; context switches were not told before.
        assert_eq!(work, Work { time: Duration::from_secs(4), counts: [Some(600), None, None] });
    }

    #[test]
    fn a_guest_that_hangs_or_lies_is_an_error() {
        let reach = Reach::Command(vec!["env".into()]);
        let error = Counters::read(&reach, "echo no such file >&2; exit 7").unwrap_err();
        assert!(format!("{error:#}").contains("counters cannot be read: no such file"), "{error:#}");
        let counters = Counters::read(&reach, "echo \"$1 $2\"; echo packets 5").unwrap();
        assert_eq!(counters.counts, [None, Some(5), None]);
    }
}
