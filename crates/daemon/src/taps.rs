//! TAP devices that the daemon has made.
//!
//! One that goes with the process that made it takes its place in a bridge, its addresses and its queue settings along, and a daemon
//! that is killed would come back with one that is in no bridge. So they stay, whatever becomes of the daemon, for as long as a switch
//! or a PCI function is to have them; the state file knows which are ours. One that somebody else has made is never taken away.

use ioplane_network::{Tap, interface};

use super::state_file::{Entries, StateFile};
use crate::refusal::Refusal;

/// Lets a device stay that was made by opening it, and writes that down first.
pub fn keep(name: &str, tap: &Tap, state_file: &StateFile) -> Result<(), Refusal> {
    let number = interface(name);
    let ours = if tap.made() {
        number
    } else {
        state_file.entries().taps.get(name).copied().filter(|it| Some(*it) == number)
    };
    state_file.change(|entries| {
        match ours {
            Some(number) => entries.taps.insert(name.to_owned(), number),
            // Somebody has made another one of that name.
            None => entries.taps.remove(name),
        };
    })?;
    if tap.made() && ours.is_some() {
        tap.persist()?;
    }
    Ok(())
}

/// Takes away those of ours that nothing is to have any more. May block.
pub fn sweep(state_file: &StateFile) {
    let entries = state_file.entries();
    for (name, number) in entries.taps.iter().filter(|(name, _)| !wanted(&entries, name)) {
        if let Err(error) = Tap::remove(name, *number) {
            // Somebody has it open, who is to have it in a moment perhaps: the next sweep looks again.
            tracing::debug!(tap = name, %error, "a TAP device that the daemon made is left for now");
            continue;
        }
        let forgotten = state_file.change(|entries| {
            entries.taps.remove(name);
        });
        if let Err(error) = forgotten {
            tracing::error!(%error, "the state file");
        }
    }
}

fn wanted(entries: &Entries, name: &str) -> bool {
    entries.switches.values().any(|switch| switch.now.uplink.as_deref() == Some(name))
        || entries.functions.values().any(|function| function.now.tap() == Some(name))
}
