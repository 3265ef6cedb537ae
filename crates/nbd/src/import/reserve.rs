//! What an exporter keeps of its capacity for an import.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

use arc_swap::ArcSwap;
use tokio::sync::Mutex;

use super::Import;
use super::connect::{Reached, reach};
use super::options::{ClaimWish, ImportOptions};
use crate::error::NbdError;
use crate::reserve::{ReserveReply, ReservedRates};

/// A server of others, or an older one.
const KEEPS_NOTHING: &str = "the server keeps nothing for single clients";

/// What is reserved for an import.
#[derive(Debug)]
pub(super) struct Reservation {
    /// What the exporter last said that it keeps.
    granted: ArcSwap<ReservedRates>,
    /// It may keep something that has to be given back.
    kept: AtomicBool,
    /// Held while the exporter is asked. The number of questions so far.
    asked: Mutex<u64>,
}

impl Reservation {
    /// What the exporter keeps, which is what was asked for when it was reached. Otherwise the disk is refused to whoever adds it; one that was there
    /// before goes on without: its guest has the disk already, and one that cannot be used would be worse.
    pub fn begin(options: &ImportOptions, reached: &Reached) -> Result<Reservation, NbdError> {
        let wanted = options.reserve.as_ref().map_or_else(ReservedRates::default, |reserve| reserve.rates);
        let begun = |granted: ReservedRates| Reservation {
            granted: ArcSwap::from_pointee(granted),
            kept: AtomicBool::new(!wanted.is_none()),
            asked: Mutex::default(),
        };
        if wanted.is_none() {
            return Ok(begun(wanted));
        }
        let Err(why) = granted(wanted, reached.reserved.as_ref()) else { return Ok(begun(wanted)) };
        let wish = options.claim.as_ref().map(|claim| claim.wish);
        if !matches!(wish, Some(ClaimWish::Own | ClaimWish::Inherit)) {
            return Err(NbdError::Reservation(why));
        }
        tracing::warn!(address = %options.address, why, "nothing is reserved any more");
        Ok(begun(ReservedRates::default()))
    }

    /// What the exporter last said that it keeps.
    pub fn rates(&self) -> ReservedRates {
        **self.granted.load()
    }

    /// Gives back what the exporter keeps.
    pub async fn give_back(&self, options: &ImportOptions) {
        let mut asked = self.asked.lock().await;
        *asked += 1;
        if !self.kept.load(Ordering::Relaxed) {
            return;
        }
        match ask(options, ReservedRates::default()).await {
            Ok(()) => self.set(ReservedRates::default()),
            Err(error) => {
                tracing::warn!(address = %options.address, %error, "a reservation was not given back")
            }
        }
    }

    fn set(&self, rates: ReservedRates) {
        self.kept.store(!rates.is_none(), Ordering::Relaxed);
        self.granted.store(rates.into());
    }
}

/// Whether the exporter keeps what was asked for; otherwise why not.
fn granted(wanted: ReservedRates, reply: Option<&ReserveReply>) -> Result<(), String> {
    match reply {
        Some(ReserveReply::Granted(rates)) if *rates == wanted => Ok(()),
        Some(ReserveReply::Refused(why)) => Err(why.clone()),
        Some(ReserveReply::Granted(_)) | None => Err(KEEPS_NOTHING.to_owned()),
    }
}

/// Asks for so much in place of what is kept. [`NbdError::Reservation`]: the exporter has refused, and keeps what it kept.
async fn ask(options: &ImportOptions, rates: ReservedRates) -> Result<(), NbdError> {
    let query =
        options.reserve_query(rates).ok_or_else(|| NbdError::Reservation(KEEPS_NOTHING.to_owned()))?;
    let reached = reach(options, query).await?;
    granted(rates, reached.reserved.as_ref()).map_err(NbdError::Reservation)
}

impl Import {
    /// Has the exporter keep so much in place of what it keeps, while the import is used. Its connections go on, and draw from the new reservation at once.
    ///
    /// # Errors
    /// [`NbdError::Reservation`]: the exporter has refused; what it kept it still keeps. Others: it has not answered. It may have granted that all the same, so
    /// it is asked for what it kept before, until it answers.
    pub async fn reserve(&self, rates: ReservedRates) -> Result<(), NbdError> {
        let (options, reservation) = (&self.shared.options, &self.shared.reservation);
        let mut asked = reservation.asked.lock().await;
        *asked += 1;
        let outcome = ask(options, rates).await;
        match &outcome {
            Ok(()) => reservation.set(rates),
            Err(NbdError::Reservation(_)) => {}
            Err(_) => {
                reservation.kept.store(true, Ordering::Relaxed);
                self.runtime.spawn(restore(self.me.clone(), *asked));
            }
        }
        outcome
    }
}

/// Asks for what was kept before a question that was not answered, until there is an answer to that, or another question.
async fn restore(import: Weak<Import>, number: u64) {
    loop {
        let Some(pause) = import.upgrade().map(|import| import.shared.options.retry.1) else { return };
        tokio::time::sleep(pause).await;
        let Some(import) = import.upgrade() else { return };
        let (options, reservation) = (&import.shared.options, &import.shared.reservation);
        let asked = reservation.asked.lock().await;
        if *asked != number {
            return;
        }
        let before = reservation.rates();
        match ask(options, before).await {
            Ok(()) => return reservation.set(before),
            Err(NbdError::Reservation(why)) => {
                tracing::warn!(address = %options.address, why, "a reservation is not as it was");
                return;
            }
            Err(error) => {
                tracing::debug!(address = %options.address, %error, "a reservation is not restored yet")
            }
        }
    }
}
