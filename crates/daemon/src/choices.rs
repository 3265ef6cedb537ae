//! How cores learn of the requests of queues, and why: read from the meters of their slots.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use ioplane_api::report::{
    ChoiceCount, ChoiceReason, ChoiceReport, ChoiceWord, DiskReport, NicQueueReport, NicReport, QueueReport,
};
use ioplane_cores::Pool;
use ioplane_device::PollerId;
use ioplane_scheduler::{ArmReason, LimitUnit, QueueChoices, QueueMode};

/// What a mode is called outside, and its reason.
pub fn called(mode: QueueMode) -> (ChoiceWord, ChoiceReason) {
    match mode {
        QueueMode::Fixed => (ChoiceWord::Fixed, ChoiceReason::None),
        QueueMode::Polled => (ChoiceWord::Polled, ChoiceReason::None),
        QueueMode::Armed(reason) => {
            let reason = match reason {
                ArmReason::LongGaps => ChoiceReason::LongGaps,
                ArmReason::SpunInVain => ChoiceReason::SpunInVain,
                ArmReason::Ceiling => ChoiceReason::Ceiling,
                ArmReason::Objective => ChoiceReason::Objective,
                ArmReason::SlowDisk => ChoiceReason::SlowDisk,
            };
            (ChoiceWord::Armed, reason)
        }
        QueueMode::Held(LimitUnit::Requests) => (ChoiceWord::Held, ChoiceReason::RequestLimit),
        QueueMode::Held(LimitUnit::Bytes) => (ChoiceWord::Held, ChoiceReason::ByteLimit),
    }
}

/// As a report, at `now_ns` of the core's clock.
fn report(choices: &QueueChoices, now_ns: u64) -> ChoiceReport {
    let (choice, reason) = called(choices.mode);
    let counts = choices.each(now_ns).map(|(mode, count)| {
        let (choice, reason) = called(mode);
        ChoiceCount { choice, reason, why: mode.to_string(), times: count.times, us: count.ns / 1000 }
    });
    ChoiceReport {
        choice,
        reason,
        for_us: now_ns.saturating_sub(choices.since_ns) / 1000,
        spin_us: (choices.spin_ns != u64::MAX).then_some(choices.spin_ns.div_ceil(1000)),
        counts: counts.collect(),
    }
}

/// Those of all queues that are on a core, by kind, device and queue.
#[derive(Debug, Default)]
pub struct Choices(BTreeMap<(&'static str, String, u16), (PollerId, ChoiceReport)>);

impl Choices {
    /// Reads them. Locks each core's table of queues for a moment.
    pub fn read(pool: &Pool, wanted: impl Fn(&str) -> bool) -> Self {
        let mut all = BTreeMap::new();
        for core in pool.cores() {
            for meter in core.meters().iter().filter(|meter| wanted(meter.device())) {
                let Some(read) = meter.choices().read() else { continue };
                let key = (meter.kind(), meter.device().to_owned(), meter.queue());
                keep_last(&mut all, key, meter.poller(), report(&read, core.age_ns()));
            }
        }
        Choices(all)
    }

    fn of(&self, kind: &'static str, device: &str, queue: u16, core: Option<u32>) -> Option<ChoiceReport> {
        // What its front end has stopped is on no core, whatever a table still has.
        core?;
        self.0.get(&(kind, device.to_owned(), queue)).map(|(_, report)| report.clone())
    }
}

/// A report of a device with queues.
pub trait WithChoices {
    /// Enters what was chosen for its queues.
    fn enter(&mut self, choices: &Choices);
}

impl WithChoices for DiskReport {
    fn enter(&mut self, choices: &Choices) {
        for QueueReport { index, core, choice, .. } in &mut self.queues {
            *choice = choices.of("virtio-blk", &self.name, *index, *core);
        }
    }
}

impl WithChoices for NicReport {
    fn enter(&mut self, choices: &Choices) {
        for NicQueueReport { index, core, choice, .. } in &mut self.queues {
            *choice = choices.of("virtio-net", &self.name, *index, *core);
        }
    }
}

/// Keeps what its last poller says of a queue: one that has been moved just now may still be known to the core that it was on.
pub fn keep_last<K: Ord, T>(all: &mut BTreeMap<K, (PollerId, T)>, queue: K, poller: PollerId, said: T) {
    match all.entry(queue) {
        Entry::Vacant(entry) => {
            entry.insert((poller, said));
        }
        Entry::Occupied(mut entry) if entry.get().0 < poller => {
            entry.insert((poller, said));
        }
        Entry::Occupied(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use ioplane_scheduler::ChoiceMeter;

    use super::*;

    #[test]
    fn each_mode_has_a_name_of_its_own() {
        let names: Vec<_> = QueueMode::ALL.into_iter().map(called).collect();
        for (at, name) in names.iter().enumerate() {
            assert!(!names[..at].contains(name), "{name:?} twice");
            assert_ne!(name.0, ChoiceWord::Other);
            assert_ne!(name.1, ChoiceReason::Other);
        }
    }

    #[test]
    fn a_report_has_what_was_noted_up_to_now() {
        let meter = ChoiceMeter::default();
        meter.begin(QueueMode::Polled, 1_000_000);
        meter.spin(24_500, ioplane_scheduler::SpinReason::Cheapest);
        meter.enter(QueueMode::Armed(ArmReason::SpunInVain), 3_000_000);
        let report = report(&meter.read().unwrap(), 10_000_000);
        assert_eq!((report.choice, report.reason), (ChoiceWord::Armed, ChoiceReason::SpunInVain));
        assert_eq!((report.for_us, report.spin_us), (7000, Some(25)));
        let counts: Vec<_> =
            report.counts.iter().map(|count| (count.choice, count.times, count.us)).collect();
        assert_eq!(counts, [(ChoiceWord::Polled, 1, 2000), (ChoiceWord::Armed, 1, 7000)]);
    }
}
