//! What an exporter keeps of its capacity for an import.

use super::connect::{Reached, reach};
use super::options::{ClaimWish, ImportOptions};
use crate::error::NbdError;
use crate::reserve::{ReserveReply, ReservedRates};

/// What the exporter keeps, which is what was asked for when it was reached. Otherwise the disk is refused to whoever adds it; one that was there
/// before goes on without: its guest has the disk already, and one that cannot be used would be worse.
pub(super) fn check(options: &ImportOptions, reached: &Reached) -> Result<ReservedRates, NbdError> {
    let Some(wanted) = &options.reserve else { return Ok(ReservedRates::default()) };
    let why = match &reached.reserved {
        Some(ReserveReply::Granted(rates)) if *rates == wanted.rates => return Ok(*rates),
        Some(ReserveReply::Refused(why)) => why.clone(),
        Some(ReserveReply::Granted(_)) | None => "the server keeps nothing for single clients".to_owned(),
    };
    let wish = options.claim.as_ref().map(|claim| claim.wish);
    if !matches!(wish, Some(ClaimWish::Own | ClaimWish::Inherit)) {
        return Err(NbdError::Reservation(why));
    }
    tracing::warn!(address = %options.address, why, "nothing is reserved any more");
    Ok(ReservedRates::default())
}

/// Gives back what the exporter keeps.
pub(super) async fn give_back(options: &ImportOptions) {
    let Some(query) = options.reserve_query(Some(ReservedRates::default())) else { return };
    let address = &options.address;
    match reach(options, query).await.map(|reached| reached.reserved) {
        Ok(Some(ReserveReply::Granted(_))) => {}
        Ok(refused) => {
            let why = refused.map_or("it does not answer that".to_owned(), |reply| reply.to_string());
            tracing::warn!(%address, why, "a reservation was not given back");
        }
        Err(error) => tracing::warn!(%address, %error, "a reservation was not given back"),
    }
}
