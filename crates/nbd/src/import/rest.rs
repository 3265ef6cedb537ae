//! No guest uses the disk: what it has written is made durable, and the claim is given back, until somebody uses it again.

use std::hash::{BuildHasher, RandomState};
use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tokio::time::sleep;

use super::Import;
use super::options::{ClaimWish, RememberedClaim};
use super::status::{ClaimStanding, ConnectionState};
use crate::error::NbdError;

/// How often it is asked whether a connection has been made.
const LOOK: Duration = Duration::from_millis(20);

impl Import {
    /// Says that no guest uses the import from now on: durable before it returns, so that a restart gives back what this process could not. `migrates`: the guest
    /// may go on elsewhere with the memory that it has.
    pub(super) fn begin_rest(&self, migrates: bool) {
        let claim = &self.shared.claim;
        // A front end that has stopped what never ran: another one's rings run.
        let stays = self.keeps_claim.load(Ordering::Acquire);
        if !claim.is_kept() || stays || self.shared.channels.load(Ordering::Acquire) > 0 {
            return;
        }
        let address = &self.shared.options.address;
        if migrates && claim.held().is_some() && self.shared.writes.has_unanswered() {
            let why = "requests were in flight when its rings stopped, and a guest that goes on elsewhere would be without them";
            tracing::warn!(%address, "the claim to an export is kept: {why}");
            claim.stands(ClaimStanding::Releasing { since: Instant::now(), failure: why.into() });
            return;
        }
        if let Err(error) = tokio::task::block_in_place(|| self.shared.set_claim_down()) {
            tracing::warn!(%address, %error, "it is not noted that a claim is given back");
        }
        self.runtime.spawn(give_back(self.me.clone(), claim.starts()));
    }

    /// As [`ioplane_storage::Backing::rest`], if no channel is open: after a change of the backing, say.
    pub fn rest_if_unused(&self) {
        if self.shared.channels.load(Ordering::Acquire) == 0 {
            self.shared.claim.forget_guest();
            self.begin_rest(false);
        }
    }

    /// Makes up for a release that an earlier process has begun.
    pub(super) fn catch_up_release(&self) {
        let options = &self.shared.options.claim;
        let remembered = options.as_ref().map_or(RememberedClaim::None, |claim| claim.keeper.remembered());
        let inherits = options.as_ref().is_some_and(|claim| claim.wish == ClaimWish::Inherit);
        if matches!(remembered, RememberedClaim::SetDown(_)) && !inherits && self.shared.claim.is_kept() {
            self.runtime.spawn(give_back(self.me.clone(), self.shared.claim.starts()));
        }
    }

    /// Flushes what was written. If the exporter is another instance, or its disk has failed, what is retained is written again first, by a connection as a queue
    /// has one.
    async fn flush_retained(&self) -> Result<(), NbdError> {
        self.shared.take_over();
        let first = self.flush().await;
        let Err(error) = first else { return Ok(()) };
        let rewrites = self.shared.shelf.is_some() && self.shared.claim.lost().is_none();
        if !rewrites || !matches!(error, NbdError::Unsuitable(_)) {
            return Err(error);
        }
        let opened = self.open_channel(1, false);
        let (channel, link) = opened.map_err(|error| NbdError::Unsuitable(error.to_string()))?;
        let limit = self.shared.options.connect_timeout;
        let end = Instant::now() + limit;
        loop {
            match link.status().state {
                ConnectionState::Connected { .. } => break,
                ConnectionState::Stopped { why, .. } => return Err(NbdError::Unsuitable(why)),
                _ if Instant::now() >= end => return Err(NbdError::Slow(limit)),
                _ => sleep(LOOK).await,
            }
        }
        let outcome = self.flush().await;
        drop(channel);
        outcome
    }

    /// Says whether there was anything to be given back.
    async fn give_back_once(&self, since: Instant) -> Result<bool, NbdError> {
        let claim = &self.shared.claim;
        if claim.held().is_none() && !self.shared.own_again().await? {
            return Ok(false);
        }
        claim.stands(ClaimStanding::Releasing { since, failure: String::new() });
        tokio::task::block_in_place(|| self.shared.set_claim_down())?;
        self.flush_retained().await?;
        self.shared.release().await.map(|()| true)
    }
}

/// Until the claim is given back, or the import is used again or gone.
async fn give_back(import: Weak<Import>, starts: u64) {
    let since = Instant::now();
    let mut pause = Duration::ZERO;
    loop {
        sleep(pause).await;
        let Some(import) = import.upgrade() else { return };
        let (shared, claim) = (&import.shared, &import.shared.claim);
        let _turn = claim.turn.lock().await;
        if claim.starts() != starts || shared.channels.load(Ordering::Acquire) > 0 || claim.lost().is_some() {
            return;
        }
        let address = &shared.options.address;
        match import.give_back_once(since).await {
            Ok(given) => {
                if given {
                    tracing::info!(%address, "the claim to an export was given back");
                }
                claim.stands(ClaimStanding::Free);
                return;
            }
            Err(error) if claim.lost().is_some() => {
                // It stands as refused: there is nothing to be given back.
                tracing::warn!(%address, %error, "a claim was taken over before it was given back");
                return;
            }
            Err(error) => {
                tracing::warn!(%address, %error, "the claim to an export is not given back yet");
                claim.stands(ClaimStanding::Releasing { since, failure: error.to_string() });
            }
        }
        let (least, most) = shared.options.retry;
        let random = RandomState::new().hash_one(0) % 1000;
        pause = (pause * 2).clamp(least, most.max(least)).mul_f64(0.75 + random as f64 / 2000.0);
    }
}
