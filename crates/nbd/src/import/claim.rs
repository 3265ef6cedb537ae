//! The import's claim to write: asked for when it is opened or its first channel is, remembered before it is used, given back when no guest uses the disk
//! (docs/decisions/0056-claims-at-ring-start.md).
//!
//! ```text
//!   Free --first channel--> Waiting (another one holds it) --granted--> Held --rest--> Releasing --> Free
//!                              \--patience ends, or it changes hands--> Refused     \--a channel--> Held
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::{ArcSwap, ArcSwapOption};

use super::Shared;
use super::connect::{Reached, reach};
use super::failure::Failure;
use super::options::{ClaimOptions, ClaimTime, ClaimWish, ImportOptions, RememberedClaim};
use super::status::ClaimStanding;
use crate::claim::{ClaimDenial, ClaimQuery, ClaimRefusal, ClaimReply, ClaimVerb};
use crate::error::NbdError;

/// How long clients without a claim may take to be gone: the exporter may not have noticed yet that one has closed its connection.
const SHARED: Duration = Duration::from_secs(1);
/// Least and most time between two questions to an exporter that another one holds. The guest of a move stands still meanwhile, and its source mostly
/// needs a few ms for the release.
const ASK_AGAIN: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(200));

impl ClaimOptions {
    /// Blocks.
    fn holder(&self) -> Result<String, NbdError> {
        tokio::task::block_in_place(|| self.keeper.holder()).map_err(NbdError::ClaimFile)
    }

    fn query(&self, verb: ClaimVerb) -> Result<String, NbdError> {
        Ok(ClaimQuery { holder: self.holder()?, verb, name: self.name.clone() }.to_string())
    }

    fn remember(&self, generation: u64) -> Result<(), NbdError> {
        tokio::task::block_in_place(|| self.keeper.remember(generation)).map_err(NbdError::ClaimFile)
    }
}

/// Of a claim that no guest of this process has used.
const NO_GUEST: u64 = u64::MAX;

/// A claim that an import has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeldClaim {
    pub holder: String,
    pub generation: u64,
    /// Which of the guests that have come so far writes by it.
    guest: u64,
}

/// How an import stands with its exporter's claims.
#[derive(Debug)]
pub(super) struct ImportClaim {
    /// The exporter keeps claims for this export, and this import is to write.
    kept: bool,
    held: ArcSwapOption<HeldClaim>,
    /// Why it is gone for good: another one has taken it over.
    lost: ArcSwapOption<ClaimRefusal>,
    standing: ArcSwap<ClaimStanding>,
    /// It is remembered that nobody writes by it.
    pub(super) set_down: AtomicBool,
    /// The claim that was released last.
    last: ArcSwapOption<HeldClaim>,
    /// Guests that have left so far.
    guests: AtomicU64,
    /// Channels that were opened so far.
    starts: AtomicU64,
    /// Held while a claim is asked for or given back.
    pub(super) turn: tokio::sync::Mutex<Option<Denial>>,
}

/// A claim that was refused: those who waited for the same answer need not ask again.
#[derive(Debug)]
pub(super) struct Denial {
    at: Instant,
    why: String,
}

/// Why a channel may not connect.
#[derive(Debug)]
pub(super) enum Unclaimed {
    /// Another attempt may do better.
    Failed(Failure),
    /// A person has to decide.
    Refused(String),
}

impl From<NbdError> for Unclaimed {
    fn from(error: NbdError) -> Unclaimed {
        Unclaimed::Failed(error.into())
    }
}

/// Gets the claim of an import whose exporter was reached by `first`, as far as that is to be done when it is opened.
pub(super) async fn begin(options: &ImportOptions, first: &Reached) -> Result<ImportClaim, NbdError> {
    let claim = options.claim.as_ref().filter(|_| first.keeps_claims && !first.facts.read_only());
    let held = match claim {
        Some(claim) => at_open(options, claim).await?,
        None => None,
    };
    let standing = match (&claim, &held) {
        (None, _) => ClaimStanding::Untracked,
        (_, None) => ClaimStanding::Free,
        (_, Some(_)) => ClaimStanding::Held,
    };
    Ok(ImportClaim {
        kept: claim.is_some(),
        held: ArcSwapOption::from_pointee(held),
        lost: ArcSwapOption::empty(),
        standing: ArcSwap::from_pointee(standing),
        set_down: AtomicBool::new(false),
        last: ArcSwapOption::empty(),
        guests: AtomicU64::new(0),
        starts: AtomicU64::new(0),
        turn: tokio::sync::Mutex::default(),
    })
}

async fn at_open(options: &ImportOptions, claim: &ClaimOptions) -> Result<Option<HeldClaim>, NbdError> {
    let held = |generation| Ok(Some(HeldClaim { holder: claim.holder()?, generation, guest: 0 }));
    let later = claim.time != ClaimTime::Open;
    let verb = match (claim.wish, claim.keeper.remembered()) {
        (ClaimWish::Inherit, RememberedClaim::Held(generation)) => return held(generation),
        (ClaimWish::Inherit, _) => return Ok(None),
        (ClaimWish::TakeOver, _) => ClaimVerb::TakeOver,
        // Its release is made up for by whoever has opened the import.
        (ClaimWish::Own | ClaimWish::New, RememberedClaim::SetDown(_)) if later => return Ok(None),
        (
            ClaimWish::Own | ClaimWish::New,
            RememberedClaim::Held(generation) | RememberedClaim::SetDown(generation),
        ) => ClaimVerb::Own(generation),
        (ClaimWish::Own | ClaimWish::New, RememberedClaim::None) if later => return Ok(None),
        (ClaimWish::Own | ClaimWish::New, RememberedClaim::None) => ClaimVerb::Ask,
    };
    let mut answer = ask(options, claim, verb).await?;
    let end = Instant::now() + SHARED;
    while let ClaimReply::Refused(ClaimRefusal { why: ClaimDenial::Shared, .. }) = &answer
        && Instant::now() < end
    {
        tokio::time::sleep(SHARED / 20).await;
        answer = ask(options, claim, verb).await?;
    }
    if let (ClaimVerb::Own(_), ClaimReply::Refused(refusal)) = (verb, &answer)
        // An image that nobody has held yet is nobody's; and whoever begins anew has no guest that knows of an older claim.
        && (claim.wish == ClaimWish::New || refusal.generation == 0)
    {
        tokio::task::block_in_place(|| claim.keeper.released());
        if later {
            return Ok(None);
        }
        answer = ask(options, claim, ClaimVerb::Ask).await?;
    }
    match answer {
        ClaimReply::Granted(generation) => {
            if claim.keeper.remembered() != RememberedClaim::Held(generation) {
                claim.remember(generation)?;
            }
            held(generation)
        }
        ClaimReply::Refused(refusal) => Err(NbdError::Claim(refusal)),
        ClaimReply::Released(_) => Err(unsuitable()),
    }
}

fn unsuitable() -> NbdError {
    NbdError::Unsuitable("it answers a claim as if it were a release".into())
}

async fn ask(options: &ImportOptions, claim: &ClaimOptions, verb: ClaimVerb) -> Result<ClaimReply, NbdError> {
    let reached = reach(options, claim.query(verb)?).await?;
    reached.claim.ok_or_else(|| NbdError::Unsuitable("it does not answer a claim".into()))
}

impl ImportClaim {
    pub fn held(&self) -> Option<Arc<HeldClaim>> {
        self.held.load_full()
    }

    pub fn lost(&self) -> Option<Arc<ClaimRefusal>> {
        self.lost.load_full()
    }

    pub fn is_kept(&self) -> bool {
        self.kept
    }

    /// The generation of the claim; 0 without one.
    fn generation(&self) -> u64 {
        self.held().map_or(0, |held| held.generation)
    }

    pub fn standing(&self) -> ClaimStanding {
        ClaimStanding::clone(&self.standing.load())
    }

    pub fn stands(&self, standing: ClaimStanding) {
        self.standing.store(Arc::new(standing));
    }

    /// A channel is opened: the claim is wanted.
    pub fn count_start(&self) {
        self.starts.fetch_add(1, Ordering::AcqRel);
    }

    pub fn starts(&self) -> u64 {
        self.starts.load(Ordering::Acquire)
    }

    /// The guest that wrote by the claim is gone, or a person has decided: whoever comes next knows nothing that others could have changed.
    pub fn forget_guest(&self) {
        self.guests.fetch_add(1, Ordering::AcqRel);
    }
}

impl Shared {
    /// Sees to it that there is a claim, for a connection of a channel. Runs to its end, whatever becomes of the channel: an answer that nobody hears would
    /// leave the exporter with a holder that does not know of it.
    pub(super) async fn claim_to_write(self: &Arc<Self>) -> Result<(), Unclaimed> {
        if !self.claim.kept {
            return Ok(());
        }
        let shared = self.clone();
        match tokio::spawn(async move { shared.acquire(Instant::now()).await }).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Unclaimed::Failed("asking for the claim was given up".into())),
        }
    }

    async fn acquire(&self, since: Instant) -> Result<(), Unclaimed> {
        let Some(options) = &self.options.claim else { return Ok(()) };
        let mut denial = self.claim.turn.lock().await;
        if let Some(lost) = self.claim.lost() {
            return Err(Unclaimed::Refused(lost_words(&lost, self.claim.generation())));
        }
        // If its release has begun, the exporter has to be asked whether it has heard of that.
        if self.claim.held().is_some() && !self.claim.set_down.load(Ordering::Acquire) {
            self.claim.stands(ClaimStanding::Held);
            return Ok(());
        }
        if let Some(denied) = denial.as_ref().filter(|denied| denied.at > since) {
            return Err(Unclaimed::Refused(denied.why.clone()));
        }
        if self.channels.load(Ordering::Acquire) == 0 {
            return Err(Unclaimed::Failed("nobody uses the disk any more".into()));
        }
        if options.wish == ClaimWish::Inherit {
            tokio::task::block_in_place(|| options.keeper.read_again()).map_err(NbdError::ClaimFile)?;
        }
        let outcome = self.wait_for_claim(options, since).await;
        if let Err(Unclaimed::Refused(why)) = &outcome {
            *denial = Some(Denial { at: Instant::now(), why: why.clone() });
            self.claim.stands(ClaimStanding::Refused { why: why.clone() });
        } else if outcome.is_err() {
            self.claim.stands(ClaimStanding::Free);
        }
        outcome
    }

    /// Asks until it is granted, for as long as another one may be about to release it.
    async fn wait_for_claim(&self, options: &ClaimOptions, since: Instant) -> Result<(), Unclaimed> {
        let end = Instant::now() + options.patience;
        let mut pause = ASK_AGAIN.0;
        // The claim that is waited for.
        let mut awaited = None;
        loop {
            let remembered = options.keeper.remembered();
            let verb = match remembered {
                RememberedClaim::Held(generation) | RememberedClaim::SetDown(generation) => {
                    ClaimVerb::Own(generation)
                }
                RememberedClaim::None => ClaimVerb::Ask,
            };
            match ask(&self.options, options, verb).await? {
                ClaimReply::Granted(generation) => return self.granted(options, generation).await,
                ClaimReply::Released(_) => return Err(unsuitable().into()),
                ClaimReply::Refused(refusal) if verb != ClaimVerb::Ask => {
                    let begins = options.wish == ClaimWish::New || refusal.generation == 0;
                    if let (RememberedClaim::Held(generation), false) = (remembered, begins) {
                        self.lose_claim(&refusal);
                        return Err(Unclaimed::Refused(lost_words(&refusal, generation)));
                    }
                    // Its release has reached the exporter.
                    self.is_released(options);
                    continue;
                }
                ClaimReply::Refused(refusal)
                    if matches!(refusal.why, ClaimDenial::Held | ClaimDenial::Shared) =>
                {
                    let holder = (refusal.why == ClaimDenial::Held).then_some(refusal.generation);
                    if awaited.is_some() && holder.is_some() && awaited != holder {
                        return Err(Unclaimed::Refused(format!(
                            "another one has claimed it while this disk waited for its release: {refusal}"
                        )));
                    }
                    awaited = awaited.or(holder);
                    if Instant::now() >= end {
                        let waited = options.patience.as_secs();
                        return Err(Unclaimed::Refused(format!("{refusal}; it was waited for {waited} s")));
                    }
                    self.claim.stands(ClaimStanding::Waiting { since, refusal });
                }
                ClaimReply::Refused(refusal) => return Err(Unclaimed::Refused(refusal.to_string())),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(ASK_AGAIN.1);
            // Those who have stopped meanwhile do not get it.
            if self.channels.load(Ordering::Acquire) == 0 {
                return Err(Unclaimed::Failed("nobody uses the disk any more".into()));
            }
        }
    }

    /// A guest that goes on knows what it wrote and read before. If others have written since, it must not.
    async fn granted(&self, options: &ClaimOptions, generation: u64) -> Result<(), Unclaimed> {
        let guest = self.claim.guests.load(Ordering::Acquire);
        let last = self.claim.last.load_full().filter(|last| last.guest == guest);
        if let Some(last) = last.map(|last| last.generation)
            && generation > last + 1
        {
            let release = ask(&self.options, options, ClaimVerb::Release(generation)).await;
            if let Err(error) = release {
                tracing::warn!(address = %self.options.address, %error, "a claim that nobody uses was not given back");
            }
            tokio::task::block_in_place(|| options.keeper.released());
            return Err(Unclaimed::Refused(format!(
                "others have held it since this guest last used it (generation {last}, now {generation}), and may have written: shut this guest down"
            )));
        }
        options.remember(generation)?;
        let holder = options.holder()?;
        self.claim.set_down.store(false, Ordering::Release);
        self.claim.held.store(Some(Arc::new(HeldClaim { holder, generation, guest })));
        self.claim.stands(ClaimStanding::Held);
        Ok(())
    }

    /// The exporter has refused the claim: nothing is written any more.
    pub(super) fn lose_claim(&self, refusal: &ClaimRefusal) -> String {
        let why = lost_words(refusal, self.claim.generation());
        self.claim.lost.store(Some(Arc::new(refusal.clone())));
        self.claim.stands(ClaimStanding::Refused { why: why.clone() });
        why
    }

    /// The exporter knows that nobody writes by the claim any more.
    fn is_released(&self, options: &ClaimOptions) {
        if let Some(held) = self.claim.held.swap(None) {
            self.claim.last.store(Some(held));
        }
        self.claim.set_down.store(false, Ordering::Release);
        tokio::task::block_in_place(|| options.keeper.released());
        self.claim.stands(ClaimStanding::Free);
    }

    /// Asks the exporter whether a release that an earlier process has begun has reached it. If not, the claim is held until it has. Says whether it is. The
    /// caller has the claim's turn.
    pub(super) async fn own_again(&self) -> Result<bool, NbdError> {
        let Some(options) = &self.options.claim else { return Ok(false) };
        let RememberedClaim::SetDown(generation) = options.keeper.remembered() else { return Ok(false) };
        match ask(&self.options, options, ClaimVerb::Own(generation)).await? {
            ClaimReply::Granted(_) => {
                let holder = options.holder()?;
                self.claim.set_down.store(true, Ordering::Release);
                self.claim.held.store(Some(Arc::new(HeldClaim { holder, generation, guest: NO_GUEST })));
                Ok(true)
            }
            ClaimReply::Released(_) => Err(unsuitable()),
            ClaimReply::Refused(_) => {
                self.is_released(options);
                Ok(false)
            }
        }
    }

    /// It is remembered that nobody writes by the claim any more. Blocks.
    pub(super) fn set_claim_down(&self) -> Result<(), NbdError> {
        let Some(options) = self.options.claim.as_ref().filter(|_| self.claim.held().is_some()) else {
            return Ok(());
        };
        if self.claim.lost().is_none() && !self.claim.set_down.load(Ordering::Acquire) {
            options.keeper.set_down().map_err(NbdError::ClaimFile)?;
            self.claim.set_down.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Gives the claim back, so that others may write. What was written is flushed already, and nobody uses the import. The caller has the claim's turn.
    pub(super) async fn release(&self) -> Result<(), NbdError> {
        let (Some(held), Some(options)) = (self.claim.held(), &self.options.claim) else { return Ok(()) };
        if self.claim.lost().is_some() {
            return Ok(());
        }
        match ask(&self.options, options, ClaimVerb::Release(held.generation)).await? {
            ClaimReply::Refused(refusal) if refusal.why == ClaimDenial::Failed => {
                return Err(NbdError::Claim(refusal));
            }
            // It is not ours any more, whichever it is.
            ClaimReply::Released(_) | ClaimReply::Granted(_) | ClaimReply::Refused(_) => {}
        }
        self.is_released(options);
        Ok(())
    }

    /// The disk goes: who it was to the exporter is not remembered.
    pub(super) fn forget_claim(&self) {
        if let Some(options) = self.options.claim.as_ref().filter(|_| self.claim.kept) {
            tokio::task::block_in_place(|| options.keeper.forget());
        }
    }
}

/// What a person is told of a claim that is lost.
fn lost_words(refusal: &ClaimRefusal, ours: u64) -> String {
    let ClaimRefusal { why, generation, name, .. } = refusal;
    match why {
        ClaimDenial::Held if *generation > ours => {
            format!("taken over by {name} (generation {generation}, was {ours})")
        }
        _ => format!("the claim (generation {ours}) is refused: {refusal}"),
    }
}
