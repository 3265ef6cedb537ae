//! Where a function is on its way from one host to another, as the state file has it: written there before it is so.
//!
//! ```text
//!   here:   rest: AtRest --> leave: Left          | replay, resume: nothing
//!   there:  take: Taken --> replay: nothing       | the daemon, or the VMM, ends: AtRest and Taken are Lost
//! ```

use ioplane_api::report::MoveStep;

use super::Card;
use crate::refusal::Refusal;
use crate::served::ServedKind;
use crate::state_file::{FunctionRecord, MoveStepRecord};

/// A daemon that has ended has not kept the state of a function that stood still; whoever uses it now is the first.
pub(super) fn restarted(record: FunctionRecord) -> FunctionRecord {
    let step = record.step.map(|MoveStepRecord { step, .. }| MoveStepRecord {
        step: match step {
            MoveStep::AtRest | MoveStep::Taken | MoveStep::Lost => MoveStep::Lost,
            MoveStep::Left => MoveStep::Left,
        },
        connections: 0,
    });
    FunctionRecord { step, ..record }
}

/// What is true of what was written down, once so many VMMs have come.
pub(super) fn now(record: &FunctionRecord, connections: u64, connected: bool) -> Option<MoveStep> {
    let MoveStepRecord { step, connections: at } = record.step?;
    match step {
        // Another VMM has it.
        _ if at != connections => None,
        MoveStep::AtRest | MoveStep::Taken if !connected => Some(MoveStep::Lost),
        step => Some(step),
    }
}

impl Card {
    /// Writes down where it is about to be. If that fails it is not to be there.
    pub(super) fn mark(&self, step: Option<MoveStep>) -> Result<(), Refusal> {
        if step.is_none() && self.note().read().step.is_none() {
            return Ok(());
        }
        let connections = self.served.handle.status().connections;
        self.note().change(|record| record.step = step.map(|step| MoveStepRecord { step, connections }))
    }

    /// The same after a step whose outcome does not depend on it.
    pub(super) fn unmark(&self) {
        if let Err(refused) = self.mark(None) {
            tracing::warn!(
                function = self.name(),
                error = refused.error,
                "it goes on, and that is not written down"
            );
        }
    }

    /// Whether it may go on with the guest that it has: not once that was written down as another host's.
    pub(super) fn may_go_on(&self) -> Result<(), Refusal> {
        let (name, peer) = (self.name(), self.served.handle.status().peer);
        let Some(pid) = peer else { return Ok(()) };
        let left = self.note().look(|entries| {
            let mut moves = entries.moves.values();
            moves
                .any(|note| note.gone && note.pid == pid && note.functions.iter().any(|one| one.name == name))
        });
        match left {
            false => Ok(()),
            true => Err(Refusal::conflict(
                format!(
                    "the guest of {name} is another host's by what is written down: it does not go on here"
                ),
                "end the QEMU here; `ioplane move recover VM` brings a move that was broken off to its end",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use ioplane_api::spec::FunctionForm;

    use super::*;

    #[test]
    fn a_step_is_that_of_the_vmm_that_it_was_done_for() {
        let form = FunctionForm { host: "00:05.0".parse().ok(), ..FunctionForm::default() };
        let spec = form.spec("f").unwrap();
        let record = |step, connections| FunctionRecord {
            step: Some(MoveStepRecord { step, connections }),
            ..FunctionRecord::added(spec.clone())
        };
        let at_rest = record(MoveStep::AtRest, 3);
        assert_eq!(now(&at_rest, 3, true), Some(MoveStep::AtRest));
        assert_eq!(now(&at_rest, 3, false), Some(MoveStep::Lost));
        assert_eq!(now(&at_rest, 4, true), None);
        assert_eq!(now(&record(MoveStep::Left, 3), 3, false), Some(MoveStep::Left));
        assert_eq!(now(&restarted(at_rest), 0, false), Some(MoveStep::Lost));
        assert_eq!(now(&restarted(record(MoveStep::Left, 3)), 0, false), Some(MoveStep::Left));
        assert_eq!(now(&restarted(record(MoveStep::Left, 3)), 1, true), None);
    }
}
