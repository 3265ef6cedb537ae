//! What an exporter keeps of its capacity for an import.

use super::connect::{Reached, reach};
use super::options::ImportOptions;
use crate::error::NbdError;
use crate::reserve::{ReserveReply, ReservedRates};

/// Whether the exporter keeps what was asked for when it was reached.
pub(super) fn check(options: &ImportOptions, reached: &Reached) -> Result<(), NbdError> {
    let Some(wanted) = &options.reserve else { return Ok(()) };
    match &reached.reserved {
        Some(ReserveReply::Granted(rates)) if *rates == wanted.rates => Ok(()),
        Some(ReserveReply::Refused(why)) => Err(NbdError::Reservation(why.clone())),
        Some(ReserveReply::Granted(_)) | None => {
            Err(NbdError::Reservation("the server keeps nothing for single clients".to_owned()))
        }
    }
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
