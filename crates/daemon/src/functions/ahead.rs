//! What the guest of another host's function has said goes ahead of it, while it runs there.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ioplane_api::report::{AheadFunctionReport, SaidFunctionV1};
use ioplane_moving::MOST;
use ioplane_passthrough::CarryError;

use super::Card;
use super::around::Here;
use super::body::Body;
use super::carry::{Way, refuse};
use super::state::body_of;
use crate::refusal::Refusal;

/// For the messages after the reset. The guest does not wait for them, and its move for no longer than this.
const PATIENCE: Duration = Duration::from_secs(1);

fn file_of(said: &[u8]) -> SaidFunctionV1 {
    SaidFunctionV1 {
        format: SaidFunctionV1::FORMAT.to_owned(),
        version: SaidFunctionV1::VERSION,
        said: STANDARD.encode(said),
    }
}

fn said_of(file: &SaidFunctionV1) -> Result<Vec<u8>, Refusal> {
    let own = (SaidFunctionV1::FORMAT, SaidFunctionV1::VERSION);
    let said = body_of((&file.format, file.version), own, &file.said).map_err(|why| {
        Refusal::invalid(
            why,
            "give what the source's daemon says: GET /v1/pci/NAME/ahead, of the same version",
        )
    })?;
    match said.len() {
        0..=MOST => Ok(said),
        len => Err(Refusal::invalid(
            format!("messages of {len} bytes, more than {MOST}"),
            "give what the source's daemon says",
        )
        .at("said")),
    }
}

impl Card {
    /// Only what a guest's driver says by a mailbox that is trapped is known.
    fn says(&self) -> Result<(), Refusal> {
        match self.way()? {
            Way::Direct(_) => Ok(()),
            Way::Cooperating(_) | Way::Saved => Err(refuse(&self.name(), &CarryError::SaysItself)),
        }
    }

    /// What its guest has said so far.
    pub async fn said(&self) -> Result<SaidFunctionV1, Refusal> {
        self.says()?;
        self.has_guest()?;
        Ok(file_of(&self.step(|direct| direct.said()).await?))
    }

    /// Says it here, for a guest that is to come.
    pub async fn go_ahead(&self, file: SaidFunctionV1) -> Result<AheadFunctionReport, Refusal> {
        self.says()?;
        let (name, begun, said) = (self.name(), Instant::now(), said_of(&file)?);
        let _changing = self.changes()?;
        self.has_guest()?;
        let act = move |body: &mut Body| {
            let keeper = body.keeper().cloned();
            let direct = body.carry()?;
            if let Some(keeper) = keeper {
                if direct.ahead() > 0 && keeper.since_noted().is_none() {
                    direct.is_under(None);
                }
                if direct.ahead() == 0 {
                    // Before the first message: what changes from here on is seen at the stop.
                    keeper.note();
                }
            }
            direct.go_ahead(&said, &mut Here::new(None, PATIENCE))
        };
        let messages_ahead = self.on_its_thread(act).await?.map_err(|error| refuse(&name, &error))?;
        let took_us = begun.elapsed().as_micros() as u64;
        tracing::info!(
            function = name,
            messages_ahead,
            took_us,
            "has said what another host's guest has said"
        );
        Ok(AheadFunctionReport { name, messages_ahead, took_us })
    }

    /// The guest does not come. Says whether something had been said.
    pub async fn forget_ahead(&self) -> Result<bool, Refusal> {
        self.says()?;
        let _changing = self.changes_soon().await?;
        self.has_guest()?;
        let reset = self.step(|direct| direct.forget_ahead()).await?;
        if reset {
            tracing::info!(
                function = self.name(),
                "was reset: the guest whose words it has said does not come"
            );
        }
        Ok(reset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_is_read_and_what_was_not_is_not() {
        let file = file_of(&[0, 255, 7]);
        assert_eq!(said_of(&file).unwrap(), [0, 255, 7]);
        let other = |change: fn(&mut SaidFunctionV1)| {
            let mut file = file.clone();
            change(&mut file);
            said_of(&file).unwrap_err().error
        };
        assert_eq!(
            other(|file| file.version = 2),
            "it is ioplane-said-function version 2, this is ioplane-said-function version 1"
        );
        assert!(other(|file| file.format = "x".repeat(1000)).len() < 130);
        assert!(other(|file| file.said = "%".into()).starts_with("its base64: "));
        assert_eq!(
            other(|file| file.said = STANDARD.encode([0; MOST + 1])),
            "messages of 1025 bytes, more than 1024"
        );
    }
}
