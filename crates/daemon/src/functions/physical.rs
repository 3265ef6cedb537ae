//! What the administrator has set for a virtual function at its physical one: shown, carried along, set for a guest that moves here, put back.

use std::sync::Arc;

use ioplane_api::report::PhysicalReport;
use ioplane_api::request::PhysicalForm;
use ioplane_api::spec::{AdoptSpec, SourceSpec, VfVlan};
use ioplane_hardware::{Keeper, VfError, VfShown};
use ioplane_passthrough::{Carried, CarryError};

use super::body::Body;
use super::service::After;
use super::{Card, carry};
use crate::refusal::Refusal;
use crate::served::{ServedKind, blocking};

/// What a step has met.
enum NotTaken {
    Carry(CarryError),
    Settings(VfError),
}

impl From<VfError> for Refusal {
    fn from(error: VfError) -> Self {
        let text = error.to_string();
        match error {
            VfError::Nonsense(_) => {
                Refusal::invalid(text, "give what the source's daemon says").at("settings")
            }
            VfError::Wider { word, command, .. } => Refusal::conflict(
                text,
                format!(
                    "to allow it: `{command}` on the host where it is to go, or add the function there with --adopt {word}"
                ),
            ),
            VfError::NotOffered { .. } | VfError::Refused { .. } => Refusal::conflict(
                text,
                "change it on the host where the guest is (ip link set), or give it a function here that has it",
            ),
            VfError::Unread(_) => Refusal::conflict(
                text,
                "its physical function has to be driven by its host, in the network namespace of the daemon",
            ),
            VfError::Record { .. } => Refusal::failed(text, "see the run directory of the daemon"),
        }
    }
}

/// The same, of a function with this name.
fn refuse(name: &str, error: VfError) -> Refusal {
    let refused = Refusal::from(error);
    Refusal { error: format!("{name}: {}", refused.error), ..refused }
}

/// Puts back what the physical function had, when nobody has the function any more.
pub(super) fn put_back(keeper: Option<&Arc<Keeper>>) -> Option<After> {
    let keeper = keeper?.clone();
    Some(Box::new(move || Ok(keeper.put_back()?)))
}

/// As it is reported. Blocks.
pub(super) fn shown(keeper: Option<&Keeper>) -> Option<PhysicalReport> {
    let VfShown { interface, number, address, settings, own } = keeper?.show().ok()?;
    Some(PhysicalReport { interface, number, address, settings, own })
}

impl Card {
    /// Puts back what its physical function had, when nobody has it any more.
    pub(super) fn put_back(&self) -> Option<After> {
        put_back(self.keeper.as_ref())
    }

    fn adopts(&self) -> AdoptSpec {
        match self.note().read().now.source {
            SourceSpec::Host { adopt, .. } => adopt,
            SourceSpec::Emulated { .. } => AdoptSpec::default(),
        }
    }

    /// On the function's thread, which also sees its VMM come and go.
    async fn with_settings<R: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Body) -> Result<R, NotTaken> + Send + 'static,
    ) -> Result<R, Refusal> {
        let name = self.name();
        self.on_its_thread(act).await?.map_err(|error| match error {
            NotTaken::Carry(error) => carry::refuse(&name, &error),
            NotTaken::Settings(error) => refuse(&name, error),
        })
    }

    /// What goes along with its guest. It stands still.
    pub(super) async fn administered(&self) -> Result<Option<PhysicalForm>, Refusal> {
        let Some(keeper) = self.keeper.clone() else { return Ok(None) };
        let name = self.name();
        blocking(move || keeper.carried().map_err(|error| refuse(&name, error))).await
    }

    /// The VLAN that its administrator has put it into.
    pub(super) async fn vlan(&self) -> Option<VfVlan> {
        let keeper = self.keeper.clone();
        blocking(move || Ok(shown(keeper.as_deref()))).await.ok()?.and_then(|shown| shown.settings.vlan)
    }

    /// Whether a guest that had this at the physical function of its host can have it here. Its VMM waits for that guest.
    pub async fn may_take(&self, form: PhysicalForm) -> Result<(), Refusal> {
        let _changing = self.changes()?;
        self.has_guest()?;
        let adopt = self.adopts();
        let act = move |body: &mut Body| {
            let carry = body.carry().map_err(NotTaken::Carry)?;
            carry.may_load().map_err(NotTaken::Carry)?;
            // Trying a VLAN takes it from the function where its guest's driver has it as well.
            carry.is_under(None);
            body.keeper().map_or(Ok(()), |keeper| keeper.may_adopt(&form, &adopt)).map_err(NotTaken::Settings)
        };
        self.with_settings(act).await
    }

    /// Takes a state of one that its guest drives itself, after the settings that it was under: replay talks to the physical function.
    pub(super) async fn take_direct(
        &self,
        carried: Carried,
        physical: Option<PhysicalForm>,
    ) -> Result<(), Refusal> {
        let adopt = self.adopts();
        let act = move |body: &mut Body| {
            body.carry().and_then(|carry| carry.may_load()).map_err(NotTaken::Carry)?;
            let keeper = body.keeper().cloned();
            if let (Some(keeper), Some(form)) = (&keeper, &physical) {
                keeper.adopt(form, &adopt).map_err(NotTaken::Settings)?;
            }
            // What was said ahead was said under what the physical function had then.
            if let (Ok(carry), Some(keeper)) = (body.carry(), &keeper)
                && carry.ahead() > 0
            {
                carry.is_under(keeper.since_noted());
            }
            let taken = body.carry().and_then(|carry| carry.load_carried(&carried));
            if taken.is_err()
                && let Some(Err(error)) = keeper.map(|keeper| keeper.put_back())
            {
                tracing::warn!(%error, "a state was not taken, and what the physical function had is not put back");
            }
            taken.map_err(NotTaken::Carry)
        };
        self.with_settings(act).await?;
        if let Some(PhysicalForm { settings, .. }) = physical {
            let settings = settings.words().join(", ");
            tracing::info!(
                function = self.name(),
                settings,
                "is under the settings that its guest's function had"
            );
        }
        Ok(())
    }

    /// Its guest is another host's. What could not be put back is tried again when its next VMM comes.
    pub(super) async fn settings_left(&self) {
        let Some(keeper) = self.keeper.clone() else { return };
        if let Err(refused) = blocking(move || Ok(keeper.left()?)).await {
            let name = self.name();
            tracing::warn!(
                function = name,
                error = refused.error,
                "left, and its physical function is not as it was"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_type() {
        let error = VfError::Wider {
            wanted: "trust on".into(),
            own: "trust off".into(),
            word: "trust",
            command: "ip link set pf0 vf 1 trust on".into(),
        };
        let refused = refuse("nic0", error);
        assert_eq!(
            refused.error,
            "nic0: its guest has `trust on` at the physical function of its host, and `trust off` where it is to go allows less"
        );
        assert_eq!(
            refused.remedy,
            "to allow it: `ip link set pf0 vf 1 trust on` on the host where it is to go, or add the function there with --adopt trust"
        );
        assert_eq!(Refusal::from(VfError::Nonsense("x".into())).field.as_deref(), Some("settings"));
    }
}
