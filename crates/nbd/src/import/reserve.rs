//! What an exporter keeps of its capacity for an import.
//!
//! ```text
//!   settled --reserve, granted or refused--> settled
//!      \--reserve, no answer--> in doubt --ask for what was kept before, then for less, until one is granted--> settled
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::ArcSwap;
use tokio::sync::{Mutex, OwnedMutexGuard, watch};

use super::Import;
use super::connect::{CONNECTING, Reached, reach};
use super::options::ImportOptions;
use crate::error::NbdError;
use crate::reserve::{ReserveReply, ReservedRates};

/// A server of others, or an older one.
const KEEPS_NOTHING: &str = "the server keeps nothing for single clients";
/// After [`Reservation::end`].
const ENDED: &str = "nobody uses the disk any more";

/// What is reserved for an import.
#[derive(Debug)]
pub(super) struct Reservation {
    standing: ArcSwap<ReserveStanding>,
    /// The exporter knows reservations, as it last said.
    known: AtomicBool,
    /// Held while the exporter is asked.
    asked: Arc<Mutex<Asked>>,
    /// Set once nothing more is asked for: a question that is under way is given up.
    ended: watch::Sender<bool>,
}

/// What can be told of a reservation.
#[derive(Debug, Clone, Default)]
pub(super) struct ReserveStanding {
    /// What the exporter keeps, or the least that it may keep.
    pub rates: ReservedRates,
    /// Why that is not what was asked for, or not certain.
    pub why: Option<String>,
}

/// How the questions to the exporter stand.
#[derive(Debug, Default)]
struct Asked {
    /// Questions so far. One that goes on in the background ends when there is a later one.
    number: u64,
    /// The exporter may keep something that has to be given back.
    kept: bool,
    doubt: Option<Doubt>,
}

/// The exporter may have granted what it did not answer.
#[derive(Debug, Clone, Copy)]
struct Doubt {
    /// What it kept before, for certain.
    before: ReservedRates,
    /// What it was asked for last.
    latest: ReservedRates,
    /// In each unit the least that it may keep.
    least: ReservedRates,
}

impl Doubt {
    /// What is asked for, one after the other, until one is granted. What is kept is always granted again, and so is less: what is granted in the
    /// end is what is kept.
    fn questions(&self) -> Vec<ReservedRates> {
        let mut questions = vec![self.before, self.latest, self.least, ReservedRates::default()];
        questions.dedup();
        questions
    }
}

fn least(a: ReservedRates, b: ReservedRates) -> ReservedRates {
    ReservedRates { requests: a.requests.min(b.requests), bytes: a.bytes.min(b.bytes) }
}

impl Reservation {
    /// What the exporter keeps, which is what was asked for when it was reached. Otherwise the disk is refused to whoever adds it; one that was there
    /// before goes on without: its guest has the disk already, and one that cannot be used would be worse.
    pub fn begin(options: &ImportOptions, reached: &Reached) -> Result<Reservation, NbdError> {
        let wanted = options.reserve.as_ref().map_or_else(ReservedRates::default, |reserve| reserve.rates);
        let begun = |rates, why, kept| Reservation {
            standing: ArcSwap::from_pointee(ReserveStanding { rates, why }),
            known: AtomicBool::new(reached.knows_reservations),
            asked: Arc::new(Mutex::new(Asked { kept, ..Asked::default() })),
            ended: watch::Sender::new(false),
        };
        if wanted.is_none() && !options.resumes() {
            // It was only asked whether it knows reservations: it may keep what an earlier disk of the same holder has left.
            return Ok(begun(wanted, None, reached.knows_reservations));
        }
        let Err(why) = granted(wanted, reached) else { return Ok(begun(wanted, None, !wanted.is_none())) };
        if !options.resumes() {
            return Err(NbdError::Reservation(why));
        }
        tracing::warn!(address = %options.address, why, "nothing is reserved any more");
        // It may keep something else that the holder had.
        Ok(begun(ReservedRates::default(), Some(why), reached.knows_reservations))
    }

    pub fn standing(&self) -> Arc<ReserveStanding> {
        self.standing.load_full()
    }

    /// The disk is given up before anybody has used it: gives back what was reserved when it was opened.
    pub async fn undo(&self, options: &ImportOptions) {
        if !self.standing().rates.is_none() {
            self.give_back(options).await;
        }
    }

    /// Nothing more is asked for, but what is kept may be given back. A question that is under way is given up, with a connection that the exporter may
    /// yet read: it refuses what is older than the next question of the holder.
    pub fn stop_asking(&self) {
        self.ended.send_replace(true);
    }

    /// The same, and nothing is given back. When this returns no question is under way: whoever asks on behalf of the same holder later has the last word.
    pub async fn end(&self) {
        self.stop_asking();
        let mut asked = self.asked.lock().await;
        asked.number += 1;
        asked.kept = false;
    }

    /// The same, and gives back what the exporter keeps.
    pub async fn give_back(&self, options: &ImportOptions) {
        self.stop_asking();
        let mut asked = self.asked.lock().await;
        asked.number += 1;
        if !asked.kept {
            return;
        }
        match self.ask_in_any_case(options, ReservedRates::default()).await {
            Ok(()) => self.settle(&mut asked, ReservedRates::default(), None),
            Err(error) => {
                tracing::warn!(address = %options.address, %error, "a reservation was not given back")
            }
        }
    }

    fn has_ended(&self) -> bool {
        *self.ended.borrow()
    }

    /// Asks for so much in place of what is kept. [`NbdError::Reservation`]: the exporter has refused, and keeps what it kept. [`NbdError::GivenUp`]: nobody
    /// wants to know any more, and the exporter may have granted it.
    async fn ask(&self, options: &ImportOptions, rates: ReservedRates) -> Result<(), NbdError> {
        let mut ended = self.ended.subscribe();
        tokio::select! {
            biased;
            _ = ended.wait_for(|ended| *ended) => Err(NbdError::GivenUp),
            answer = self.ask_in_any_case(options, rates) => answer,
        }
    }

    /// The same, also after [`Reservation::stop_asking`].
    async fn ask_in_any_case(&self, options: &ImportOptions, rates: ReservedRates) -> Result<(), NbdError> {
        let query = options.reserve_query(rates);
        let query = query.ok_or_else(|| NbdError::Reservation(KEEPS_NOTHING.to_owned()))?;
        let reached = reach(options, query).await?;
        self.known.store(reached.knows_reservations, Ordering::Relaxed);
        granted(rates, &reached).map_err(NbdError::Reservation)
    }

    fn knows(&self) -> bool {
        self.known.load(Ordering::Relaxed)
    }

    /// The exporter keeps that.
    fn settle(&self, asked: &mut Asked, rates: ReservedRates, why: Option<String>) {
        asked.kept = !rates.is_none();
        asked.doubt = None;
        self.standing.store(Arc::new(ReserveStanding { rates, why }));
    }

    /// What the exporter kept when that was last certain.
    fn before(&self, asked: &Asked) -> ReservedRates {
        asked.doubt.map_or_else(|| self.standing().rates, |doubt| doubt.before)
    }

    /// The exporter may have granted `latest`: what is told is what it keeps at least.
    fn doubt(&self, asked: &mut Asked, latest: ReservedRates, why: String) {
        let before = self.before(asked);
        let least = least(latest, asked.doubt.map_or(before, |doubt| doubt.least));
        asked.kept = true;
        asked.doubt = Some(Doubt { before, latest, least });
        self.standing.store(Arc::new(ReserveStanding { rates: least, why: Some(why) }));
    }
}

/// Whether the exporter keeps what was asked for; otherwise why not.
fn granted(wanted: ReservedRates, reached: &Reached) -> Result<(), String> {
    match &reached.reserved {
        Some(ReserveReply::Granted(rates)) if *rates == wanted => Ok(()),
        Some(ReserveReply::Refused(why)) => Err(why.clone()),
        None if wanted.is_none() => Ok(()),
        Some(ReserveReply::Granted(_)) | None => Err(KEEPS_NOTHING.to_owned()),
    }
}

/// Whether the exporter was certainly not asked: there was no connection.
fn unasked(error: &NbdError) -> bool {
    matches!(error, NbdError::Os { doing: CONNECTING, .. })
}

impl Import {
    /// Has the exporter keep so much in place of what it keeps, while the import is used; says what it kept before. Its connections go on, and draw from the
    /// new reservation at once.
    ///
    /// # Errors
    /// [`NbdError::Reservation`]: the exporter has refused, or is none of ours; what it kept it still keeps. Others: it has not answered. It may have
    /// granted that all the same, so it is asked for what it kept before, until it answers.
    pub async fn reserve(&self, rates: ReservedRates) -> Result<ReservedRates, NbdError> {
        let (options, reservation) = (&self.shared.options, &self.shared.reservation);
        // One of ours may have become a newer one since it was opened.
        if !reservation.knows() && !self.shared.fenced {
            let nothing = rates.is_none().then(ReservedRates::default);
            return nothing.ok_or_else(|| NbdError::Reservation(KEEPS_NOTHING.to_owned()));
        }
        let mut asked = reservation.asked.lock().await;
        if reservation.has_ended() {
            return Err(NbdError::Reservation(ENDED.to_owned()));
        }
        asked.number += 1;
        let before = reservation.before(&asked);
        match reservation.ask(options, rates).await {
            Ok(()) => {
                reservation.settle(&mut asked, rates, None);
                Ok(before)
            }
            Err(error) => {
                if !matches!(error, NbdError::Reservation(_)) && !unasked(&error) {
                    let why = format!("a change was not answered: {error}");
                    reservation.doubt(&mut asked, rates, why);
                }
                self.find_out(&asked);
                Err(error)
            }
        }
    }

    /// If it is in doubt what the exporter keeps, asks it in the background.
    fn find_out(&self, asked: &Asked) {
        if asked.doubt.is_some() && self.shared.reservation.knows() {
            self.runtime.spawn(find_out(self.me.clone(), asked.number));
        }
    }

    /// Another import of the same holder is opened, and asks for so much, which replaces what this one has. Meanwhile this one asks for nothing.
    pub async fn lend_reservation(&self, rates: ReservedRates) -> LentReservation {
        let mut asked = self.shared.reservation.asked.clone().lock_owned().await;
        asked.number += 1;
        LentReservation { import: self.me.clone(), rates, asked: Some(asked) }
    }
}

/// What an import has reserved, while another one takes its place. If that does not come to its end, the exporter is asked in the background for what it
/// kept before.
#[derive(Debug)]
pub struct LentReservation {
    import: Weak<Import>,
    rates: ReservedRates,
    asked: Option<OwnedMutexGuard<Asked>>,
}

impl LentReservation {
    /// The other import is used in place of this one, and says from now on what is reserved.
    pub fn pass_on(mut self) {
        if let Some(mut asked) = self.asked.take() {
            asked.kept = false;
            if let Some(import) = self.import.upgrade() {
                import.shared.reservation.stop_asking();
            }
        }
    }
}

impl Drop for LentReservation {
    fn drop(&mut self) {
        let (Some(mut asked), Some(import)) = (self.asked.take(), self.import.upgrade()) else { return };
        let reservation = &import.shared.reservation;
        if reservation.knows() {
            reservation.doubt(&mut asked, self.rates, "another one was asked for, and given up".to_owned());
            import.find_out(&asked);
        }
    }
}

/// Asks until it is certain what the exporter keeps, or there is another question.
async fn find_out(import: Weak<Import>, number: u64) {
    let mut refusal: Option<String> = None;
    let mut refused = 0;
    loop {
        let pause = {
            let Some(import) = import.upgrade() else { return };
            let (options, reservation) = (&import.shared.options, &import.shared.reservation);
            // Given up between two questions: whoever waits for it need not wait for all of them.
            let mut asked = reservation.asked.lock().await;
            let Some(doubt) = asked.doubt.filter(|_| asked.number == number && !reservation.has_ended())
            else {
                return;
            };
            let questions = doubt.questions();
            let Some(rates) = questions.get(refused).copied() else {
                // It refuses to give back, too.
                reservation.settle(&mut asked, ReservedRates::default(), refusal);
                asked.kept = true;
                return;
            };
            match reservation.ask(options, rates).await {
                Ok(()) => {
                    if let Some(why) = &refusal {
                        tracing::warn!(address = %options.address, why, "a reservation is not as it was");
                    }
                    return reservation.settle(&mut asked, rates, refusal);
                }
                Err(NbdError::Reservation(why)) => {
                    refusal.get_or_insert(why);
                    refused += 1;
                    continue;
                }
                Err(NbdError::GivenUp) => return,
                Err(error) => {
                    tracing::debug!(address = %options.address, %error, "a reservation is not certain yet");
                    refused = 0;
                    options.retry.1
                }
            }
        };
        tokio::time::sleep(pause).await;
    }
}
