//! Bringing a function to a quiescent point for a while, and resuming it.

use std::time::{Duration, Instant};

use ioplane_api::report::QuiesceReport;
use ioplane_api::request::QuiesceForm;
use ioplane_device::{OnMiss, QuiesceError, QuiescePolicy, Quiescent, Stop};
use ioplane_pci::Function;

use super::Card;
use super::body::Body;
use crate::refusal::Refusal;
use crate::served::ServedKind;

/// How long a function is held before it resumes by itself: its guest waits, and QEMU gives up on an access after twice this.
pub(super) const HOLD: Duration = Duration::from_secs(30);
/// How long suspending may take.
const FORCE: Duration = Duration::from_secs(2);
/// The longest deadline that makes sense.
const LONGEST: Duration = Duration::from_secs(3600);

/// What becomes of a function that is asked for by `form`. The VMM's own quiescent points, when it takes memory away, come first.
pub(super) fn policy(form: &QuiesceForm) -> QuiescePolicy {
    let deadline = Instant::now() + Duration::from_millis(form.deadline_ms).min(LONGEST);
    let on_miss = if form.or_resume { OnMiss::Undrain } else { OnMiss::Suspend { timeout: FORCE } };
    QuiescePolicy { deadline, on_miss }
}

/// Its service has ended.
pub(super) fn gone(name: &str) -> Refusal {
    Refusal::missing(format!("{name} is gone"), "see `ioplane pci list`")
}

/// A function that did not become quiescent as `form` wants it, or does not resume.
pub(super) fn refuse(name: &str, form: &QuiesceForm, error: &QuiesceError) -> Refusal {
    let stuck = format!("restart the guest, or take it away: ioplane pci remove {name} --force");
    match error {
        QuiesceError::NotHere(_) => {
            Refusal::busy(format!("{name}: {error}"), "see `ioplane pci show`, and try again")
        }
        QuiesceError::Missed { reason } if form.or_resume => Refusal::conflict(
            format!("{name} was not quiescent within {} ms: {reason}; it has resumed", form.deadline_ms),
            "give it a longer --deadline, or leave --or-resume out to suspend it",
        ),
        QuiesceError::Missed { reason } => {
            Refusal::conflict(format!("{name} was not quiescent: {reason}; it has resumed"), stuck)
        }
        QuiesceError::NotUndrained { .. } | QuiesceError::NotResumed(_) => {
            Refusal::conflict(format!("{name}: {error}"), stuck)
        }
    }
}

impl Card {
    pub(super) fn name(&self) -> String {
        self.note().read().now.name
    }

    /// Brings it to a quiescent point and holds it there, until [`Card::resume`] or for half a minute.
    pub async fn quiesce(&self, form: QuiesceForm) -> Result<QuiesceReport, Refusal> {
        let _changing = self.served.changing.lock().await;
        let name = self.name();
        if self.served.handle.held().is_some() {
            return Err(Refusal::conflict(
                format!("{name} is held already"),
                format!("resume it first: ioplane pci resume {name}"),
            ));
        }
        let begun = Instant::now();
        let held = self.served.handle.hold(policy(&form), HOLD).await.map_err(|_| gone(&name))?;
        let quiesced = held.map_err(|error| refuse(&name, &form, &error))?;
        let (drained, waited) = (quiesced.stop == Stop::Drained, begun.elapsed());
        let reason = quiesced.missed.filter(|_| !drained);
        tracing::info!(function = name, drained, reason, "held");
        Ok(QuiesceReport {
            name,
            drained,
            waited_us: waited.as_micros() as u64,
            reason,
            connected: self.served.handle.status().connected,
            held_ms: HOLD.as_millis() as u64,
        })
    }

    /// It resumes. Says whether it was held.
    pub async fn resume(&self) -> Result<bool, Refusal> {
        let _changing = self.served.changing.lock().await;
        self.may_go_on()?;
        let held = self.let_go().await?;
        if held {
            self.unmark();
        }
        Ok(held)
    }

    /// The same, by whoever changes it already.
    pub(super) async fn let_go(&self) -> Result<bool, Refusal> {
        let name = self.name();
        let resumed = self.served.handle.resume().await.map_err(|_| gone(&name))?;
        let held = resumed
            .map_err(|error| refuse(&name, &QuiesceForm::default(), &QuiesceError::NotResumed(error)))?;
        if held {
            tracing::info!(function = name, "resumed");
        }
        Ok(held)
    }

    /// Tries again what kept a guest from using it. Says whether there was anything to do.
    pub async fn mend(&self) -> Result<bool, Refusal> {
        let name = self.name();
        if self.served.handle.status().connected {
            return Err(Refusal::conflict(
                format!("a guest is using {name}"),
                "let it reset the function, or shut it down first",
            ));
        }
        let _changing = self.served.changing.lock().await;
        // A client that has come meanwhile has what it needs.
        let mend =
            |held: &mut Quiescent<Body>| held.with(|body, proof| body.unusable().map(|_| body.admit(proof)));
        match self.at_quiescence(QuiesceForm::default(), mend).await? {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(why)) => Err(Refusal::conflict(
                format!("{name} takes no guest: {why}"),
                format!(
                    "ioplane pci reset {name} tries again; ioplane pci remove {name} gives it back to the host"
                ),
            )),
        }
    }

    /// Does something to the function while it is quiescent: one that somebody holds as it is, one that runs is quiesced for it and resumes.
    pub(super) async fn at_quiescence<R: Send + 'static>(
        &self,
        form: QuiesceForm,
        act: impl FnOnce(&mut Quiescent<Body>) -> R + Send + 'static,
    ) -> Result<R, Refusal> {
        let name = self.name();
        let done = self.served.handle.at_quiescence(policy(&form), act).await.map_err(|_| gone(&name))?;
        done.map_err(|error| refuse(&name, &form, &error))
    }
}
