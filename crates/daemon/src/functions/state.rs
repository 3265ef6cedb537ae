//! Saving a function's state, and loading it.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ioplane_api::report::StateFileV1;
use ioplane_api::request::QuiesceForm;
use ioplane_api::spec::{FunctionSpec, ModeWord, SourceSpec};
use ioplane_device::{Loaded, Refused, State};
use ioplane_embed::Front;

use super::Card;
use super::body::Body;
use crate::refusal::Refusal;

fn file_of(State { kind, version, body }: State) -> StateFileV1 {
    StateFileV1 {
        format: StateFileV1::FORMAT.to_owned(),
        version: StateFileV1::VERSION,
        kind,
        state_version: version,
        body: STANDARD.encode(body),
    }
}

fn state_of(file: StateFileV1) -> Result<State, Refusal> {
    let refuse = |why: String| Refusal::invalid(why, "give a file that `ioplane pci save` has written");
    if file.format != StateFileV1::FORMAT || file.version != StateFileV1::VERSION {
        return Err(refuse(format!(
            "it is {:.40} version {}, this is {} version {}",
            file.format,
            file.version,
            StateFileV1::FORMAT,
            StateFileV1::VERSION
        )));
    }
    let body = STANDARD.decode(file.body).map_err(|error| refuse(format!("the state: {error}")))?;
    if body.len() > State::MAX_BODY {
        return Err(refuse(format!("a state of {} bytes, more than any device saves", body.len())));
    }
    Ok(State { kind: file.kind, version: file.state_version, body })
}

/// Puts a state into the held function and starts it; it is held as before if that is refused. Blocks.
fn load(front: &Front<Body>, name: &str, state: &State) -> Result<(), Refusal> {
    let refuse =
        |error: &dyn std::fmt::Display, remedy: &str| Refusal::conflict(format!("{name}: {error}"), remedy);
    let lost = |error| {
        let remedy = format!("take it away and add it again: ioplane pci remove {name} --force");
        Refusal::failed(format!("{name}: {error}"), remedy)
    };
    let held = front.take().map_err(lost)?;
    let loaded = match held.load(state) {
        Ok(loaded) => loaded,
        Err(Refused { kept, error }) => {
            front.hold(kept).map_err(lost)?;
            let remedy = "give a state that the same kind of function has saved; this one is as it was";
            return Err(refuse(&error, remedy));
        }
    };
    front.start(loaded).or_else(|Refused { kept, error }| {
        front.hold(Loaded::into_quiescent(kept)).map_err(lost)?;
        Err(refuse(&error, "it has the state and does not run: ioplane pci resume tries again"))
    })
}

impl Card {
    /// Nobody has seen what was done to a function that is passed through as it is.
    fn may_be_saved(&self) -> Result<(), Refusal> {
        let FunctionSpec { name, source, .. } = self.note.read().now;
        match source {
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
        let _changing = self.changing.lock().await;
        let save = |front: &Front<Body>, name: &str| {
            front.save().map_err(|error| {
                Refusal::conflict(
                    format!("{name}: {error}"),
                    format!("see `ioplane pci show {name}`, and try again"),
                )
            })
        };
        self.at_rest(form, save).await.map(file_of)
    }

    /// Puts a state into it, and lets it go on from there.
    pub async fn load(&self, file: StateFileV1) -> Result<(), Refusal> {
        self.may_be_saved()?;
        let state = state_of(file)?;
        let _changing = self.changing.lock().await;
        // What is in flight is lost with the state that it belongs to: no reason to wait for it.
        let form = QuiesceForm { deadline_ms: 0, or_go_on: false };
        self.at_rest(form, move |front, name| load(front, name, &state)).await?;
        self.held.forget();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_read_and_what_is_none_is_not() {
        let state = State { kind: "rtl8139".into(), version: 3, body: vec![0, 255, 7] };
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
        assert!(other(|file| file.body = "%".into()).starts_with("the state: "));
        assert!(
            other(|file| file.body = STANDARD.encode(vec![0; State::MAX_BODY + 1])).contains("1048577 bytes")
        );
    }
}
