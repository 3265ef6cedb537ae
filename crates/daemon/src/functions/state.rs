//! Saving a function's state, and loading it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ioplane_api::report::StateFileV1;
use ioplane_api::request::QuiesceForm;
use ioplane_api::spec::{FunctionSpec, ModeWord, SourceSpec};
use ioplane_device::{LoadError, SavedState};

use super::Card;
use super::hold::{gone, policy, refuse};
use crate::refusal::Refusal;
use crate::served::ServedKind;

fn file_of(SavedState { kind, version, body }: SavedState) -> StateFileV1 {
    StateFileV1 {
        format: StateFileV1::FORMAT.to_owned(),
        version: StateFileV1::VERSION,
        kind,
        state_version: version,
        body: STANDARD.encode(body),
    }
}

fn state_of(file: StateFileV1) -> Result<SavedState, Refusal> {
    let refuse = |why: String| Refusal::invalid(why, "give a file that `ioplane pci save` has written");
    let own = (StateFileV1::FORMAT, StateFileV1::VERSION);
    let body = body_of((&file.format, file.version), own, &file.body).map_err(refuse)?;
    Ok(SavedState { kind: file.kind, version: file.state_version, body })
}

/// The state in a file that says this format and version, if these are our `own`; or what is wrong with it.
pub(super) fn body_of(told: (&str, u32), own: (&str, u32), state: &str) -> Result<Vec<u8>, String> {
    if told != own {
        return Err(format!("it is {:.40} version {}, this is {} version {}", told.0, told.1, own.0, own.1));
    }
    let body = STANDARD.decode(state).map_err(|error| format!("its base64: {error}"))?;
    if body.len() > SavedState::MAX_BODY {
        return Err(format!("a state of {} bytes, more than any device saves", body.len()));
    }
    Ok(body)
}

impl Card {
    /// Nobody has seen what was done to a function that is passed through as it is.
    fn may_be_saved(&self) -> Result<(), Refusal> {
        let FunctionSpec { name, source, .. } = self.note().read().now;
        match source {
            SourceSpec::Host { mode: ModeWord::Migratable | ModeWord::Cooperating, .. } => {
                Err(Refusal::conflict(
                    format!(
                        "{name} is driven by its guest past the daemon: it goes to another function as it is, and to no file"
                    ),
                    format!("ioplane pci move {name} --to ADDRESS"),
                ))
            }
            SourceSpec::Host { mode: ModeWord::Passthrough, address, .. } => Err(Refusal::conflict(
                format!(
                    "{name} is passed through as it is: nobody knows its state, so it can be neither saved nor loaded"
                ),
                format!("if `ioplane pci list` names a model for {address}, add it with --mode virtual"),
            )),
            _ => Ok(()),
        }
    }

    /// What another function of its kind needs to go on from here. One that runs is brought to rest for it, and goes on.
    pub async fn save(&self, form: QuiesceForm) -> Result<StateFileV1, Refusal> {
        self.may_be_saved()?;
        let _changing = self.served.changing.lock().await;
        let saved = self.at_quiescence(form, |held| held.save()).await?;
        let name = self.name();
        saved.map(file_of).map_err(|error| {
            Refusal::conflict(
                format!("{name}: {error}"),
                format!("see `ioplane pci show {name}`, and try again"),
            )
        })
    }

    /// Puts a state into it, and lets it go on from there.
    pub async fn load(&self, file: StateFileV1) -> Result<(), Refusal> {
        self.may_be_saved()?;
        let state = state_of(file)?;
        let _changing = self.served.changing.lock().await;
        self.load_state(state).await
    }

    /// The same, by whoever changes it already.
    pub(super) async fn load_state(&self, state: SavedState) -> Result<(), Refusal> {
        // What is in flight is lost with the state that it belongs to: no reason to wait for it.
        let form = QuiesceForm { deadline_ms: 0, or_resume: false };
        let name = self.name();
        let loaded = self.served.handle.load(policy(&form), state).await.map_err(|_| gone(&name))?;
        loaded.map_err(|error| refuse(&name, &form, &error))?.map_err(|error| {
            let remedy = match error {
                LoadError::NotStarted(_) => {
                    "it has the state and does not run: ioplane pci resume tries again"
                }
                _ => "give a state that the same kind of function has saved; this one is as it was",
            };
            Refusal::conflict(format!("{name}: {error}"), remedy)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_read_and_what_is_none_is_not() {
        let state = SavedState { kind: "rtl8139".into(), version: 3, body: vec![0, 255, 7] };
        let file = file_of(state.clone());
        assert_eq!(state_of(file.clone()).unwrap(), state);
        let other = |change: fn(&mut StateFileV1)| {
            let mut file = file.clone();
            change(&mut file);
            state_of(file).unwrap_err().error
        };
        assert_eq!(
            other(|file| file.version = 2),
            "it is ioplane-function version 2, this is ioplane-function version 1"
        );
        assert!(other(|file| file.format = "x".repeat(1000)).len() < 120);
        assert!(other(|file| file.body = "%".into()).starts_with("its base64: "));
        assert!(
            other(|file| file.body = STANDARD.encode(vec![0; SavedState::MAX_BODY + 1]))
                .contains("1048577 bytes")
        );
    }
}
