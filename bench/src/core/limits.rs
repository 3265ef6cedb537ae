//! A disk with a limit and a guest that always asks: how far from the limit what passes is.

use anyhow::Result;
use ioplane_testkit::driver::{DiskPlan, Shape};

use super::drive::{Completion, Flow, drive};
use super::offered::Offered;
use super::stage::{FORM, Stage};
use super::{Bench, SECOND};
use crate::daemon::Configuration;
use crate::exitless::load::BLOCK;
use crate::guest::Form;
use crate::measured::Figure;

/// The whole burst is used up after it, ns.
const WARM: u64 = SECOND / 2;

/// A limit, in requests.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Limit {
    per_second: f64,
    burst: f64,
}

/// Requests of the limit on bandwidth.
const LARGE: u32 = 64 << 10;

/// What is limited: one disk, or a group of two.
struct Limited {
    name: &'static str,
    /// The lines of the limit, in the table of the disk or of the group.
    keys: &'static str,
    /// The disks are in a group, which has the limit.
    in_group: bool,
    disks: &'static [&'static str],
    limit: Limit,
    form: Form,
    /// Of a request.
    bytes: u32,
}

const LIMITED: [Limited; 3] = [
    Limited {
        name: "iops",
        keys: "iops_limit = 2000\niops_burst = 20",
        in_group: false,
        disks: &["disk"],
        limit: Limit { per_second: 2000.0, burst: 20.0 },
        form: FORM,
        bytes: BLOCK,
    },
    Limited {
        name: "bandwidth",
        keys: "bandwidth_limit = \"64M\"\nbandwidth_burst = \"1M\"",
        in_group: false,
        disks: &["disk"],
        limit: Limit { per_second: 1024.0, burst: 16.0 },
        form: Form {
            ring: 128,
            queues: 1,
            plan: DiskPlan { slots: 32, max_bytes: LARGE, segments: 1, shape: Shape::Indirect },
        },
        bytes: LARGE,
    },
    Limited {
        name: "group_iops",
        keys: "iops_limit = 2000\niops_burst = 20",
        in_group: true,
        disks: &["one", "other"],
        limit: Limit { per_second: 2000.0, burst: 20.0 },
        form: FORM,
        bytes: BLOCK,
    },
];

pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let (mut error, mut excess) = (Figure::of(0.0), Figure::of(0.0));
    let (mut most_error, mut most_excess) = (0.0f64, 0.0f64);
    for limited in LIMITED {
        let Limited { name, limit, .. } = limited;
        eprintln!("limit: {name}");
        let passed = pass(bench, &limited)?;
        let off = percent_off(&passed, limit);
        let over = excess_of(&passed, limit);
        most_error = most_error.max(off.unwrap_or(100.0).abs());
        most_excess = most_excess.max(over);
        error = error.beside(&format!("{name}_percent_off"), off);
        excess = excess.beside(name, over);
    }
    let error = error.map(|_| most_error).beside("seconds", bench.pace.limit_span.as_secs_f64());
    let excess = excess.map(|_| most_excess);
    Ok(vec![("limit_error_percent", error), ("limit_excess_requests", excess)])
}

/// What passes while guests always ask, by time of completion.
fn pass(bench: &Bench, limited: &Limited) -> Result<Vec<Completion>> {
    let Limited { name, keys, in_group, disks, form, bytes, .. } = *limited;
    let mut configuration = Configuration::new(bench.mode);
    let lines = if in_group {
        configuration = configuration.group("limited", keys);
        "memory = \"64M\"\ngroup = \"limited\"".to_owned()
    } else {
        format!("memory = \"64M\"\n{keys}")
    };
    let all: Vec<_> = disks.iter().map(|disk| (*disk, lines.as_str())).collect();
    let mut stage = Stage::configured(bench, &format!("limit-{name}"), configuration, &all)?;
    for disk in disks {
        stage.connect(disk, form)?;
    }
    let mut passed = Vec::new();
    stage.turn(|stage| {
        let flow = |guest| Flow::new(guest, 0, Offered::Backlog(32), bytes, 1);
        let mut flows: Vec<_> = stage.guests.iter_mut().map(flow).collect();
        drive(&mut flows, bench.pace.limit_span, |completion| passed.push(completion))
    })?;
    passed.sort_by_key(|completion| completion.at);
    Ok(passed)
}

/// By how many percent the rate is off, once the burst is used up: negative if less passed. None if too little passed to tell.
fn percent_off(passed: &[Completion], limit: Limit) -> Option<f64> {
    let mut counted = passed.iter().skip_while(|completion| completion.at < WARM);
    let (first, last) = (counted.next()?, passed.last()?);
    let seconds = (last.at - first.at) as f64 / SECOND as f64;
    let count = counted.count() as f64;
    (seconds > 0.0).then(|| (count / seconds / limit.per_second - 1.0) * 100.0)
}

/// By how many requests any interval of time T had more than rate * T + burst + 1; 0 if none had.
///
/// A request was done between two looks of the generator at its queue. The interval goes from the earlier look of its first request to the
/// later look of its last one, so a generator that was late finds none. Requests pass before they are done: a daemon that loses its
/// processor between both shows some that the limit did not let pass too early.
fn excess_of(passed: &[Completion], limit: Limit) -> f64 {
    let seconds = |ns: u64| ns as f64 / SECOND as f64;
    // The earliest moment of each request and all after it.
    let mut earliest: Vec<u64> = passed.iter().map(|completion| completion.not_before).collect();
    for at in (1..earliest.len()).rev() {
        earliest[at - 1] = earliest[at - 1].min(earliest[at]);
    }
    // count - rate * (end - begin) is largest where "begin" contributes most.
    let (mut begin, mut most) = (f64::NEG_INFINITY, 0.0f64);
    for (number, completion) in passed.iter().enumerate() {
        begin = begin.max(limit.per_second * seconds(earliest[number]) - number as f64);
        let count = begin + (number + 1) as f64 - limit.per_second * seconds(completion.at);
        most = most.max(count - limit.burst - 1.0);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Limit = Limit { per_second: 1000.0, burst: 10.0 };
    const MS: u64 = 1_000_000;

    /// Requests seen to be done at `times`, and not to be done `before` ns before.
    fn passed(before: u64, times: impl Iterator<Item = u64>) -> Vec<Completion> {
        let one = |at: u64| Completion { flow: 0, due: 0, not_before: at.saturating_sub(before), at };
        times.map(one).collect()
    }

    #[test]
    fn the_rate_is_exact_or_off() {
        let at = |gap: u64| passed(0, (0..3000).map(move |number| number * gap));
        assert!(percent_off(&at(MS), LIMIT).unwrap().abs() < 1e-9);
        assert!((percent_off(&at(MS * 5 / 4), LIMIT).unwrap() + 20.0).abs() < 1e-9, "too few");
        assert!((percent_off(&at(MS / 2), LIMIT).unwrap() - 100.0).abs() < 1e-9, "too many");
        assert_eq!(percent_off(&at(1), LIMIT), None, "all within the burst's time");
        assert_eq!(percent_off(&[], LIMIT), None);
    }

    #[test]
    fn a_burst_and_one_request_are_no_excess() {
        // Burst and one at once, then one each millisecond.
        let times = || (0..11).map(|_| 0).chain((1..100).map(|number| number * MS));
        assert!(excess_of(&passed(0, times()), LIMIT) < 1e-9);
        // Three more at once, late in the run.
        let more = times().chain((0..13).map(|_| 100 * MS));
        let excess = excess_of(&passed(0, more), LIMIT);
        assert!((excess - 12.0).abs() < 1e-6, "the burst had not come back: {excess}");
    }

    #[test]
    fn what_the_generator_saw_late_is_no_excess() {
        // Seen all at once after a long look elsewhere: they may have been done at any time between.
        assert_eq!(excess_of(&passed(100 * MS, (0..50).map(|_| 200 * MS)), LIMIT), 0.0);
        assert!(excess_of(&passed(MS, (0..50).map(|_| 200 * MS)), LIMIT) > 30.0);
    }

    #[test]
    fn completions_out_of_order_do_not_count_twice() {
        // The second may have been done first: both together began then.
        let mut two = passed(MS, [5 * MS, 6 * MS].into_iter());
        two[1].not_before = 0;
        assert!(excess_of(&two, Limit { per_second: 1.0, burst: 0.0 }) > 0.9);
        assert_eq!(excess_of(&two, Limit { per_second: 1000.0, burst: 0.0 }), 0.0);
    }
}
