//! What a monitor counts, and the last things that happened: for `pci watch`, metrics and tests.

use std::collections::VecDeque;
use std::time::Instant;

use serde::Serialize;

use super::policy::Cause;

/// How many events are kept.
pub const EVENTS: usize = 64;
/// Most names of faults that are told apart; they are ours, not the guest's, so this is never reached.
const NAMES: usize = 64;

/// A denial, or something wrong with the hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MonitorFault {
    /// Whose doing.
    pub cause: Cause,
    /// Its name, as it is counted.
    pub name: &'static str,
    /// What exactly.
    pub text: String,
}

impl MonitorFault {
    /// A fault of that name.
    pub fn new(cause: Cause, name: &'static str, text: impl Into<String>) -> Self {
        MonitorFault { cause, name, text: text.into() }
    }

    pub(super) fn dma(name: &'static str, text: impl Into<String>) -> Self {
        MonitorFault::new(Cause::Dma, name, text)
    }

    pub(super) fn register(name: &'static str, text: impl Into<String>) -> Self {
        MonitorFault::new(Cause::Register, name, text)
    }

    pub(super) fn hardware(name: &'static str, text: impl Into<String>) -> Self {
        MonitorFault::new(Cause::Hardware, name, text)
    }
}

/// Faults of one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FaultCount {
    /// The name: `descriptor-outside`, `unknown-register`, ...
    pub name: &'static str,
    /// Whose doing.
    pub cause: Cause,
    /// How many.
    pub count: u64,
    /// The last one, in words.
    pub last: String,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MonitorEvent {
    /// The how manyth of all; those that are no longer kept had lower numbers.
    pub number: u64,
    /// Microseconds since the monitor began.
    pub at: u64,
    /// What.
    pub what: MonitorEventKind,
}

/// What can happen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MonitorEventKind {
    /// A region of the model went from one state to another.
    Moved {
        /// The region.
        region: &'static str,
        /// Its state before.
        from: &'static str,
        /// Its state now.
        to: &'static str,
    },
    /// Something was denied, or the hardware failed.
    Fault {
        /// Its name.
        name: &'static str,
        /// Whose doing.
        cause: Cause,
        /// What exactly.
        text: String,
    },
    /// The guest reset the device.
    Reset,
    /// The device stands still: held, saved.
    Parked,
    /// It goes on.
    Resumed,
}

/// The counts. All only rise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct MonitorTotals {
    /// Accesses by the guest to registers (not to the configuration space).
    pub accesses: u64,
    /// Of these: seen by the model.
    pub hooked: u64,
    /// Of these: gone straight to the hardware.
    pub straight: u64,
    /// Of these: answered from what the monitor keeps (virtual status and mask, ring addresses), without the hardware.
    pub kept: u64,
    /// Times that the model was asked or told of something.
    pub updates: u64,
    /// Descriptors that passed their check.
    pub descriptors: u64,
    /// Bytes of their buffers, and of blocks and card transfers that passed.
    pub vetted_bytes: u64,
    /// Everything that was denied, by the guest's doing.
    pub denied: u64,
    /// Interrupts from the hardware.
    pub heard: u64,
    /// Interrupts given to guests.
    pub given: u64,
    /// Bytes through the card's data port.
    pub port_bytes: u64,
}

/// All that a monitor tells of itself at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Reading {
    /// The counts.
    #[serde(flatten)]
    pub totals: MonitorTotals,
    /// Regions of the model, and the state of each.
    pub states: Vec<(&'static str, &'static str)>,
    /// Whether the device may change hands now.
    pub reusable: bool,
    /// Whether the policy `stop` has struck: every access is denied until a reset.
    pub stopped: bool,
    /// Whether the hardware has gone.
    pub gone: bool,
    /// Whether the guest reads registers from a page, without an exit.
    pub page_used: bool,
    /// Faults by name.
    pub faults: Vec<FaultCount>,
    /// The number that the next event will have.
    pub next_event: u64,
}

impl Reading {
    /// How many faults of that name there were.
    pub fn faults_of(&self, name: &str) -> u64 {
        self.faults.iter().find(|fault| fault.name == name).map_or(0, |fault| fault.count)
    }
}

#[derive(Debug)]
pub(super) struct Counts {
    pub(super) totals: MonitorTotals,
    faults: Vec<FaultCount>,
    events: VecDeque<MonitorEvent>,
    next: u64,
    began: Instant,
}

impl Counts {
    pub(super) fn new() -> Self {
        Counts {
            totals: MonitorTotals::default(),
            faults: Vec::new(),
            events: VecDeque::with_capacity(EVENTS),
            next: 0,
            began: Instant::now(),
        }
    }

    pub(super) fn happened(&mut self, what: MonitorEventKind) {
        if self.events.len() == EVENTS {
            self.events.pop_front();
        }
        let at = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.events.push_back(MonitorEvent { number: self.next, at, what });
        self.next += 1;
    }

    pub(super) fn fault(&mut self, fault: MonitorFault) {
        let MonitorFault { cause, name, text } = fault;
        if cause != Cause::Hardware {
            self.totals.denied += 1;
        }
        let room = self.faults.len() < NAMES;
        match self.faults.iter_mut().find(|known| known.name == name && known.cause == cause) {
            Some(known) => {
                known.count += 1;
                known.last.clone_from(&text);
            }
            None if room => {
                self.faults.push(FaultCount { name, cause, count: 1, last: text.clone() });
            }
            None => {}
        }
        self.happened(MonitorEventKind::Fault { name, cause, text });
    }

    pub(super) fn faults(&self) -> &[FaultCount] {
        &self.faults
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Those that are kept, from number `since` on.
    pub(super) fn events(&self, since: u64) -> Vec<MonitorEvent> {
        self.events.iter().filter(|event| event.number >= since).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_counted_by_name_and_events_are_bounded() {
        let mut counts = Counts::new();
        for n in 0..100 {
            counts.fault(MonitorFault::dma("descriptor-outside", format!("number {n}")));
        }
        counts.fault(MonitorFault::hardware("storm", "too many"));
        assert_eq!(counts.totals.denied, 100, "what the hardware does is not the guest's denial");
        assert_eq!((counts.faults()[0].count, counts.faults()[0].last.as_str()), (100, "number 99"));
        assert_eq!(counts.events(0).len(), EVENTS);
        let last = counts.events(counts.next() - 1);
        assert!(matches!(
            last[..],
            [MonitorEvent { number: 100, what: MonitorEventKind::Fault { name: "storm", .. }, .. }]
        ));
    }
}
