//! The import's claim to write: asked for when it is opened, remembered before it is used, given back when the disk goes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::connect::{Reached, reach};
use super::options::{ClaimOptions, ClaimWish, ImportOptions};
use crate::claim::{ClaimDenial, ClaimQuery, ClaimRefusal, ClaimReply, ClaimVerb};
use crate::error::NbdError;

/// How long clients without a claim may take to be gone: the exporter may not have noticed yet that one has closed its connection.
const SHARED: Duration = Duration::from_secs(1);

impl ClaimOptions {
    /// Blocks.
    fn holder(&self) -> Result<String, NbdError> {
        tokio::task::block_in_place(|| self.keeper.holder()).map_err(NbdError::ClaimFile)
    }

    fn query(&self, verb: ClaimVerb) -> Result<String, NbdError> {
        Ok(ClaimQuery { holder: self.holder()?, verb, name: self.name.clone() }.to_string())
    }
}

/// A claim that an import has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeldClaim {
    pub holder: String,
    pub generation: u64,
}

/// Gets the claim of an import whose exporter was reached by `first`. `None`: the exporter keeps no claims, or nothing is to be written.
pub(super) async fn begin(options: &ImportOptions, first: &Reached) -> Result<Option<HeldClaim>, NbdError> {
    let Some(claim) = options.claim.as_ref().filter(|_| first.keeps_claims && !first.facts.read_only())
    else {
        return Ok(None);
    };
    let held = |generation| Ok(Some(HeldClaim { holder: claim.holder()?, generation }));
    let remembered = claim.keeper.generation();
    let verb = match (claim.wish, remembered) {
        (ClaimWish::Inherit, remembered) => return remembered.map_or(Ok(None), held),
        (ClaimWish::TakeOver, _) => ClaimVerb::TakeOver,
        (ClaimWish::Own | ClaimWish::New, Some(generation)) => ClaimVerb::Own(generation),
        (ClaimWish::Own | ClaimWish::New, None) => ClaimVerb::Ask,
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
        answer = ask(options, claim, ClaimVerb::Ask).await?;
    }
    match answer {
        ClaimReply::Granted(generation) => {
            if remembered != Some(generation) {
                let remember = || claim.keeper.remember(generation);
                tokio::task::block_in_place(remember).map_err(NbdError::ClaimFile)?;
            }
            held(generation)
        }
        ClaimReply::Refused(refusal) => Err(NbdError::Claim(refusal)),
        ClaimReply::Released(_) => {
            Err(NbdError::Unsuitable("it answers a claim as if it were a release".into()))
        }
    }
}

async fn ask(options: &ImportOptions, claim: &ClaimOptions, verb: ClaimVerb) -> Result<ClaimReply, NbdError> {
    let reached = reach(options, claim.query(verb)?).await?;
    reached.claim.ok_or_else(|| NbdError::Unsuitable("it does not answer a claim".into()))
}

impl Shared {
    /// The exporter has refused the claim: nothing is written any more.
    pub(super) fn lose_claim(&self, refusal: &ClaimRefusal) -> String {
        self.claim_lost.store(Some(Arc::new(refusal.clone())));
        lost(refusal, self.claim.as_ref().map_or(0, |claim| claim.generation))
    }

    /// Gives the claim back. What was written is flushed already, and nobody uses the import.
    pub(super) async fn release(&self) -> Result<(), NbdError> {
        let (Some(held), Some(claim)) = (&self.claim, &self.options.claim) else { return Ok(()) };
        if self.claim_lost.load().is_none() {
            match ask(&self.options, claim, ClaimVerb::Release(held.generation)).await? {
                ClaimReply::Refused(refusal) if refusal.why == ClaimDenial::Failed => {
                    return Err(NbdError::Claim(refusal));
                }
                // It is not ours any more, whichever it is.
                ClaimReply::Released(_) | ClaimReply::Granted(_) | ClaimReply::Refused(_) => {}
            }
        }
        tokio::task::block_in_place(|| claim.keeper.forget());
        Ok(())
    }
}

/// What a person is told of a claim that is lost.
fn lost(refusal: &ClaimRefusal, ours: u64) -> String {
    let ClaimRefusal { why, generation, name, .. } = refusal;
    match why {
        ClaimDenial::Held if *generation > ours => {
            format!("taken over by {name} (generation {generation}, was {ours})")
        }
        _ => format!("the claim (generation {ours}) is refused: {refusal}"),
    }
}
