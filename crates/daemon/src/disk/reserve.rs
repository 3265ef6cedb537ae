//! What an exporter keeps for a disk, changed while a guest uses it (docs/decisions/0063-capacity-and-reservations.md).

use ioplane_api::spec::LimitsSpec;
use ioplane_nbd::NbdError;
use ioplane_nbd::import::Import;
use ioplane_nbd::reserve::ReservedRates;

use super::{Disk, lock};
use crate::refusal::Refusal;

/// As the exporter is asked.
pub fn rates(reserved: LimitsSpec) -> ReservedRates {
    ReservedRates { requests: reserved.rate.unwrap_or(0), bytes: reserved.bandwidth.map_or(0, |size| size.0) }
}

/// The exporter at `place` keeps no such part.
pub fn refused(place: &str, why: &str) -> Refusal {
    let remedy =
        "ask for what is free; or raise the capacity, on the machine that has the disk: ioplane publish set";
    Refusal::conflict(format!("{place}: {why}"), remedy).at("reserve_iops")
}

/// Has the exporter keep again what it kept before.
pub async fn restore(import: &Import, before: ReservedRates) {
    if let Err(error) = import.reserve(before).await {
        tracing::warn!(address = import.status().address, %error, "a reservation is not as it was before");
    }
}

impl Disk {
    /// Has the exporter keep so much in place of what it keeps, and says what that was. If it refuses it keeps what it kept.
    pub(super) async fn reserve(&self, reserved: LimitsSpec) -> Result<ReservedRates, Refusal> {
        self.not_swapping()?;
        let Some(import) = lock(&self.backing).import.clone() else {
            let remedy = "leave it out: only disks of other machines have reservations";
            return Err(Refusal::conflict("it is no disk of another machine", remedy).at("reserve_iops"));
        };
        let status = import.status();
        match import.reserve(rates(reserved)).await {
            Ok(()) => Ok(status.reserved),
            Err(NbdError::Reservation(why)) => Err(refused(&status.address, &why)),
            Err(error) => {
                let remedy = "see `ioplane disk show`, and try again when its server can be reached";
                Err(Refusal::failed(
                    format!("{}: the reservation stays as it was: {error}", status.address),
                    remedy,
                ))
            }
        }
    }

    /// After [`Disk::reserve`]: has the exporter keep what it kept before.
    pub(super) async fn restore(&self, before: ReservedRates) {
        let import = lock(&self.backing).import.clone();
        if let Some(import) = import {
            restore(&import, before).await;
        }
    }
}
