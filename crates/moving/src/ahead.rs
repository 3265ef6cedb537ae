//! What a guest's driver has said by the mailbox, said ahead on the function that the guest is to have, while the guest runs on the one that it has.
//!
//! ```text
//!   here, it runs:   said ------------------------> said (again) ...                         stop --> save
//!   there:                \--> go_ahead: reset, messages   \--> nothing, or anew                          \--> load --> replay: the difference
//! ```
//!
//! Unicast addresses are never said ahead: both functions may be of one card, whose switch would deliver the guest's frames to the one that nobody
//! drives yet. The function is no bus master, and none of its rings is on.

use ioplane_hardware::Hardware;
use ioplane_model::DirectModel;
use serde::{Deserialize, Serialize};

use crate::error::{DirectStateError, MovingError};
use crate::kept::{Ahead, Kept};
use crate::mailbox::Latched;
use crate::movable::Movable;
use crate::plan::MovePlan;
use crate::replay::{Surroundings, wait};
use crate::state::{DirectStateV2, decode, encode, is_of};

const MAGIC: [u8; 4] = *b"ioMM";

/// What was said, for another host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct SaidV2 {
    model: String,
    kept: Kept,
}

/// A message's words behind the header that fits them, as [`Movable::said`] has it.
pub fn seal_said(body: &[u8]) -> Vec<u8> {
    crate::state::sealed(MAGIC, body)
}

/// Whether a stranger's bytes are what a driver of `table` could have said. Touches nothing.
pub fn check_said(table: &'static DirectModel, bytes: &[u8]) -> Result<(), MovingError> {
    read(&MovePlan::new(table)?, bytes)?;
    Ok(())
}

fn read(plan: &MovePlan, bytes: &[u8]) -> Result<Kept, DirectStateError> {
    let SaidV2 { model, kept } = decode(MAGIC, bytes)?;
    is_of(plan, &model)?;
    kept.doubt(&plan.table.mailbox).map_err(DirectStateError::Impossible)?;
    Ok(kept)
}

impl<H: Hardware> Movable<H> {
    /// What the guest's driver has said so far and was accepted, for [`Movable::go_ahead`] on another function; at most [`MOST`](crate::MOST) bytes. The
    /// same as long as it has said nothing more. Touches no register.
    pub fn said(&self) -> Result<Vec<u8>, MovingError> {
        self.running()?;
        let model = self.plan.table.model.name.to_owned();
        Ok(encode(MAGIC, &SaidV2 { model, kept: self.kept.clone() })?)
    }

    /// Says ahead what another function's guest has said, a stranger's word, on one that nobody has driven since its last reset. It is reset for it,
    /// unless it has said just that; it is no bus master then. Says how many messages stand.
    ///
    /// # Errors
    ///
    /// Nothing stands, and it is reset.
    pub fn go_ahead(&mut self, said: &[u8], around: &mut dyn Surroundings) -> Result<u64, MovingError> {
        self.running()?;
        let kept = read(&self.plan, said)?.ahead();
        let table = &self.plan.table.mailbox;
        let words =
            |kept: &Kept| -> Vec<_> { kept.messages(table).into_iter().map(|(_, words)| words).collect() };
        let same = |ahead: &&Ahead| ahead.stands && words(&ahead.kept) == words(&kept);
        if let Some(ahead) = self.ahead.as_ref().filter(same) {
            return Ok(ahead.messages);
        }
        if !kept.begun {
            self.forget_ahead()?;
            return Ok(0);
        }
        self.ahead = Some(Ahead { kept: kept.clone(), address: [0; 2], messages: 0, stands: false });
        let sent = self.messages;
        let done = self.say_ahead(&kept, around);
        // Those of replays are counted.
        let messages = std::mem::replace(&mut self.messages, sent) - sent;
        let outcome = done.map(|address| {
            self.ahead = Some(Ahead { kept, address, messages, stands: true });
            messages
        });
        if outcome.is_err() {
            self.forget_ahead()?;
        }
        outcome
    }

    fn say_ahead(&mut self, kept: &Kept, around: &mut dyn Surroundings) -> Result<[u32; 2], MovingError> {
        self.reset_alone(around)?;
        let address = self.say_begin(around)?;
        for (message, words) in kept.messages(&self.plan.table.mailbox) {
            self.say(message, &words, around)?;
        }
        // What comes from here on is news.
        self.line().look()?;
        while self.latched.message && self.line().take()?.is_none() {
            wait(around, || "a message of the physical function is taken".to_owned())?;
        }
        self.latched = Latched::default();
        Ok(address)
    }

    /// How many messages were said ahead and stand, as far as is known.
    pub fn ahead(&self) -> u64 {
        self.ahead.as_ref().filter(|ahead| ahead.stands).map_or(0, |ahead| ahead.messages)
    }

    /// How many of them the last replay has built upon; 0 if it has begun with a reset.
    pub fn built_upon(&self) -> u64 {
        self.built_upon
    }

    /// What was said ahead may not hold any more: a replay says all of it again.
    pub fn doubt_ahead(&mut self) {
        if let Some(ahead) = &mut self.ahead {
            ahead.stands = false;
        }
    }

    /// The administrator has set the function's address since something was said ahead; zeros for none.
    pub fn has_address(&mut self, address: [u8; 6]) {
        let [a, b, c, d, e, f] = address;
        if let Some(ahead) = &mut self.ahead {
            ahead.address = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, 0, 0])];
        }
    }

    /// The move is broken off, or somebody else uses the function: it is reset, so that it leaves the guest's groups and VLANs. `false`: nothing was said.
    pub fn forget_ahead(&mut self) -> Result<bool, MovingError> {
        if self.ahead.is_none() {
            return Ok(false);
        }
        self.hardware.reset()?;
        (self.ahead, self.latched) = (None, Latched::default());
        Ok(true)
    }

    /// Says what is missing where the rest was said ahead. `false`: nothing stands, and all of it is to be said after a reset. At least one message is
    /// said: a physical function that has forgotten this one meanwhile refuses it.
    pub(crate) fn say_difference(
        &mut self,
        state: &DirectStateV2,
        around: &mut dyn Surroundings,
    ) -> Result<bool, MovingError> {
        let table = &self.plan.table.mailbox;
        let Some(ahead) = self.ahead.take().filter(|ahead| ahead.stands) else { return Ok(false) };
        let Some(mut missing) = state.kept.besides(&ahead.kept, table) else { return Ok(false) };
        if ahead.address != state.kept.address {
            missing.splice(0..0, state.kept.address_message(table));
        }
        if missing.is_empty() {
            let said = ahead.kept.messages(table);
            missing.extend(said.into_iter().min_by_key(|(_, words)| words.len()));
        }
        // The physical function has something to say, or was reset: nobody knows what it still has.
        self.line().look()?;
        if self.latched.message || self.latched.ready || missing.is_empty() {
            return Ok(false);
        }
        for (message, words) in missing {
            match self.say(message, &words, around) {
                Err(MovingError::Refused { .. }) => return Ok(false),
                said => said?,
            };
        }
        self.built_upon = ahead.messages;
        Ok(true)
    }
}
