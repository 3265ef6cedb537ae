//! Bringing a function to rest for a while, and letting it go on.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ioplane_api::report::RestReport;
use ioplane_api::request::QuiesceForm;
use ioplane_device::Stop;
use ioplane_embed::{Front, FrontError, Presence};
use ioplane_pci::Function;

use super::body::Body;
use super::{Card, lock};
use crate::refusal::Refusal;
use crate::served::blocking;

/// How long a function is held before it goes on by itself: its guest waits, and QEMU gives up on an access after twice this.
const HOLD: Duration = Duration::from_secs(30);
/// How long a stop by force may take.
const FORCE: Duration = Duration::from_secs(2);
/// The longest deadline that makes sense.
const LONGEST: Duration = Duration::from_secs(3600);
/// How long to wait for somebody else's quiescent point (a VMM takes memory away) before trying again.
const AGAIN: Duration = Duration::from_millis(2);

/// Whether somebody holds a function, and until when. The function goes on when that is over.
pub struct Hold {
    front: Arc<Front<Body>>,
    name: String,
    until: Mutex<Option<Instant>>,
}

/// How a function came to rest.
struct Rest {
    drained: bool,
    waited: Duration,
    reason: Option<String>,
}

impl Hold {
    /// Nobody does.
    pub fn new(front: Arc<Front<Body>>, name: String) -> Arc<Self> {
        Arc::new(Hold { front, name, until: Mutex::default() })
    }

    /// How long it is held yet.
    pub fn left(&self) -> Option<Duration> {
        lock(&self.until).map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Nobody holds it any more, and it does not go on.
    pub fn forget(&self) -> bool {
        lock(&self.until).take().is_some()
    }

    /// From now on. In a runtime.
    fn begin(self: &Arc<Self>) {
        let mut until = Instant::now() + HOLD;
        *lock(&self.until) = Some(until);
        let hold = self.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep_until(until.into()).await;
                let mut held = lock(&hold.until);
                // Let go in between, and perhaps held again.
                if *held != Some(until) {
                    return;
                }
                tracing::warn!(function = hold.name, "nobody let it go on: going on by itself");
                match hold.front.resume() {
                    Ok(()) => {
                        *held = None;
                        return;
                    }
                    Err(error) => {
                        tracing::error!(function = hold.name, %error, "it does not go on: trying again");
                        until += HOLD;
                        *held = Some(until);
                    }
                }
            }
        });
    }

    /// It goes on.
    fn end(&self) -> Result<(), Refusal> {
        self.front.resume().map_err(|error| refuse(&self.name, &error))
    }
}

fn refuse(name: &str, error: &FrontError) -> Refusal {
    let what = format!("{name}: {error}");
    match error {
        FrontError::Closed => Refusal::missing(what, "see `ioplane pci list`"),
        FrontError::Not { .. } => Refusal::busy(what, "see `ioplane pci show`, and try again"),
        FrontError::Device(_) | FrontError::Stuck(_) => Refusal::conflict(
            what,
            format!("restart the guest, or take it away: ioplane pci remove {name} --force"),
        ),
    }
}

/// Brings the function to rest. It is held when this returns well, and as before otherwise. Blocks.
fn rest(front: &Front<Body>, name: &str, form: &QuiesceForm) -> Result<Rest, Refusal> {
    let begun = Instant::now();
    let deadline = begun + Duration::from_millis(form.deadline_ms).min(LONGEST);
    // The VMM may have one of its own at the same time: it needs a moment.
    while let Err(error) = front.begin_quiesce() {
        let busy = matches!(error, FrontError::Not { .. }) && front.presence() != Presence::Closed;
        if !busy || Instant::now() >= deadline + FORCE {
            return Err(refuse(name, &error));
        }
        std::thread::sleep(AGAIN);
    }
    front.wait_settled(deadline);
    let reason = match front.finish() {
        Ok(()) => None,
        Err(late) if form.or_go_on => {
            let reason = late.reason.clone();
            late.undrain().map_err(|error| refuse(name, &error))?;
            return Err(Refusal::conflict(
                format!("{name} did not come to rest within {} ms: {reason}; it goes on", form.deadline_ms),
                "give it a longer --deadline, or leave --or-go-on out to stop it by force",
            ));
        }
        Err(late) => {
            let reason = late.reason.clone();
            if let Err(error) = late.suspend(Instant::now() + FORCE) {
                // Not a matter of patience: whatever happens now, its guest goes on.
                let _ = front.undrain();
                return Err(refuse(name, &error));
            }
            Some(reason)
        }
    };
    // Somebody may have let go what settled in between.
    if front.presence() != Presence::Held {
        return Err(Refusal::busy(format!("{name} is {:?} again", front.presence()), "try again"));
    }
    let drained = front.stop() == Some(Stop::Drained);
    Ok(Rest { drained, waited: begun.elapsed(), reason: reason.filter(|_| !drained) })
}

impl Card {
    /// Its name.
    pub(super) fn name(&self) -> String {
        self.note.read().now.name
    }

    /// Brings it to rest and holds it there, until [`Card::go_on`] or for half a minute.
    pub async fn quiesce(&self, form: QuiesceForm) -> Result<RestReport, Refusal> {
        let _changing = self.changing.lock().await;
        let name = self.name();
        if self.held.left().is_some() {
            return Err(Refusal::conflict(
                format!("{name} is held already"),
                format!("let it go on first: ioplane pci resume {name}"),
            ));
        }
        let (front, of) = (self.front.clone(), name.clone());
        let rest = blocking(move || rest(&front, &of, &form)).await?;
        self.held.begin();
        tracing::info!(function = name, drained = rest.drained, reason = rest.reason, "held");
        Ok(RestReport {
            name,
            drained: rest.drained,
            waited_us: rest.waited.as_micros() as u64,
            reason: rest.reason,
            held_ms: HOLD.as_millis() as u64,
        })
    }

    /// It goes on. Says whether it was held.
    pub async fn go_on(&self) -> Result<bool, Refusal> {
        let _changing = self.changing.lock().await;
        // One that nobody holds may be at rest for not having gone on when it should have.
        if !self.held.forget() && self.front.presence() != Presence::Held {
            return Ok(false);
        }
        let held = self.held.clone();
        if let Err(refused) = blocking(move || held.end()).await {
            // It is held still: it can be tried again, and is.
            self.held.begin();
            return Err(refused);
        }
        tracing::info!(function = self.name(), "goes on");
        Ok(true)
    }

    /// Tries again what kept a guest from using it. Says whether there was anything to do.
    pub async fn mend(&self) -> Result<bool, Refusal> {
        if self.handle.status().connected {
            return Err(Refusal::conflict(
                format!("a guest is using {}", self.name()),
                "let it reset the function, or shut it down first",
            ));
        }
        let _changing = self.changing.lock().await;
        let mend = |front: &Front<Body>, name: &str| {
            let mended = front.while_held(|held| {
                // A client that has come meanwhile has what it needs.
                held.with(|body, still| body.unusable().map(|_| body.admit(still)))
            });
            match mended.map_err(|error| refuse(name, &error))? {
                None => Ok(false),
                Some(Ok(())) => Ok(true),
                Some(Err(why)) => Err(Refusal::conflict(
                    format!("{name} takes no guest: {why}"),
                    format!(
                        "ioplane pci reset {name} tries again; ioplane pci remove {name} gives it back to the host"
                    ),
                )),
            }
        };
        self.at_rest(QuiesceForm::default(), mend).await
    }

    /// Does something to the function at rest: one that somebody holds as it is, one that runs is brought to rest for it. `act` is
    /// told the front, with the function held; whether it is to be let go on afterwards.
    pub(super) async fn at_rest<R: Send + 'static>(
        &self,
        form: QuiesceForm,
        act: impl FnOnce(&Front<Body>, &str) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<R, Refusal> {
        let (front, name, held) = (self.front.clone(), self.name(), self.held.left().is_some());
        let outcome = blocking(move || {
            if !held {
                rest(&front, &name, &form)?;
            }
            let outcome = act(&front, &name);
            if !held && front.presence() == Presence::Held {
                let resumed = front.resume().map_err(|error| refuse(&name, &error));
                return outcome.and_then(|done| resumed.map(|()| done));
            }
            outcome
        })
        .await;
        if !held && outcome.is_err() && self.front.presence() == Presence::Held {
            // It did not go on: tried again, by the clock or by `ioplane pci resume`.
            self.held.begin();
        }
        outcome
    }
}
