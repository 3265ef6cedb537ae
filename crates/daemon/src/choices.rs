//! How cores learn of the requests of queues, and why: read from the meters of their slots.

use std::collections::BTreeMap;

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
                let known = (meter.poller(), report(&meter.choices().read(), core.age_ns()));
                let key = (meter.kind(), meter.device().to_owned(), meter.queue());
                let entry = all.entry(key).or_insert_with(|| known.clone());
                // A queue that has been moved just now may still be known to the core that it was on.
                if entry.0 < known.0 {
                    *entry = known;
                }
            }
        }
        Choices(all)
    }

    fn of(&self, kind: &'static str, device: &str, queue: u16, core: Option<u32>) -> Option<ChoiceReport> {
        // What its front end has stopped is on no core, whatever a table still has.
        core?;
        self.0.get(&(kind, device.to_owned(), queue)).map(|(_, report)| report.clone())
    }

    /// Enters those of a disk.
    pub fn enter_disk(&self, disk: &mut DiskReport) {
        for QueueReport { index, core, choice, .. } in &mut disk.queues {
            *choice = self.of("virtio-blk", &disk.name, *index, *core);
        }
    }

    /// Enters those of a NIC.
    pub fn enter_nic(&self, nic: &mut NicReport) {
        for NicQueueReport { index, core, choice, .. } in &mut nic.queues {
            *choice = self.of("virtio-net", &nic.name, *index, *core);
        }
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
        let report = report(&meter.read(), 10_000_000);
        assert_eq!((report.choice, report.reason), (ChoiceWord::Armed, ChoiceReason::SpunInVain));
        assert_eq!((report.for_us, report.spin_us), (7000, Some(25)));
        let counts: Vec<_> =
            report.counts.iter().map(|count| (count.choice, count.times, count.us)).collect();
        assert_eq!(counts, [(ChoiceWord::Polled, 1, 2000), (ChoiceWord::Armed, 1, 7000)]);
    }
}
