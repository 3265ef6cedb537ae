//! What an exporter keeps for a disk, changed while a guest uses it (docs/decisions/0063-capacity-and-reservations.md).

use std::sync::Arc;

use ioplane_api::spec::LimitsSpec;
use ioplane_nbd::NbdError;
use ioplane_nbd::import::Import;
use ioplane_nbd::reserve::ReservedRates;

use super::{Disk, LEAVE, Leaving, lock};
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

/// What it has reserved at an exporter is for others. Waits for the exporter, but not for long.
pub async fn give_back(import: &Import) {
    if tokio::time::timeout(LEAVE, import.give_back_reservation()).await.is_err() {
        let address = import.status().address;
        tracing::warn!(address, "a reservation was not given back: no answer");
    }
}

/// `import` has taken the place of another one that may have reserved something, and reserves nothing. Waits for the exporter, but not for long.
pub async fn reserve_nothing(import: &Arc<Import>) {
    let asking = import.clone();
    // Goes on if it takes longer.
    let asked = tokio::spawn(async move { asking.reserve(ReservedRates::default()).await.err() });
    if let Ok(Ok(Some(error))) = tokio::time::timeout(LEAVE, asked).await {
        let address = import.status().address;
        tracing::warn!(address, %error, "a reservation was not given back");
    }
}

/// An exporter has granted a rate that is not written down yet.
pub struct Granted {
    import: Arc<Import>,
    /// What it kept before.
    before: ReservedRates,
}

impl Granted {
    /// Refuses if the disk has another backing now, or is about to.
    pub fn still_holds(&self, disk: &Disk) -> Result<(), Refusal> {
        disk.not_swapping()?;
        if self.is_used(disk) {
            return Ok(());
        }
        let remedy = "see `ioplane disk show`, and try again if that is still to be";
        Err(Refusal::conflict("the disk has got another backing meanwhile", remedy))
    }

    fn is_used(&self, disk: &Disk) -> bool {
        lock(&disk.backing).import.as_ref().is_some_and(|import| Arc::ptr_eq(import, &self.import))
    }

    /// Has the exporter keep what it kept before; nothing, if the disk is gone from there.
    pub async fn undo(self, disk: &Disk) {
        let Granted { import, before } = &self;
        let gone = *disk.left() == Some(Leaving::ForGood);
        if gone || !self.is_used(disk) {
            return give_back(import).await;
        }
        if let Err(error) = import.reserve(*before).await {
            tracing::warn!(address = import.status().address, %error, "a reservation is not as it was before");
        }
    }
}

impl Disk {
    /// Has the exporter keep so much in place of what it keeps. If it refuses it keeps what it kept.
    pub(super) async fn reserve(&self, reserved: LimitsSpec) -> Result<Granted, Refusal> {
        self.not_swapping()?;
        let Some(import) = lock(&self.backing).import.clone() else {
            let remedy = "leave it out: only disks of other machines have reservations";
            return Err(Refusal::conflict("it is no disk of another machine", remedy).at("reserve_iops"));
        };
        let error = match import.reserve(rates(reserved)).await {
            Ok(before) => return Ok(Granted { import, before }),
            Err(error) => error,
        };
        let status = import.status();
        let place = status.address;
        Err(match (error, status.reserved_why) {
            (NbdError::Reservation(why), _) => refused(&place, &why),
            (error, None) => {
                let remedy = "see `ioplane disk show`, and try again when its server can be reached";
                Refusal::failed(format!("{place}: the reservation stays as it was: {error}"), remedy)
            }
            (error, Some(_)) => {
                let remedy =
                    "see `ioplane disk show`: the old reservation is asked for until the server answers";
                Refusal::failed(format!("{place}: it is not certain what is reserved: {error}"), remedy)
            }
        })
    }
}
