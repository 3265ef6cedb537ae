//! What was said through the mailbox and accepted: kept, to be said again on another function.

use ioplane_model::{KeepRule, MailboxTable, MessageKind};
use serde::{Deserialize, Serialize};

use crate::addresses::{self, GuestAddress};

/// Kept messages. Hostile when it was loaded, until [`Kept::doubt`] has looked at it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    /// The message that begins anew was accepted.
    pub(super) begun: bool,
    /// The function's address, as words of a message.
    pub(super) address: [u32; 2],
    /// The last message of a kind: its place in the table, and its words.
    last: Vec<(u8, Vec<u32>)>,
    /// Kind, the bits that add, and the values.
    each: Vec<(u8, u32, Vec<u32>)>,
    /// Kind, and the elements in their order: the words after the first.
    lists: Vec<(u8, Vec<Vec<u32>>)>,
}

/// What was said ahead of a guest that is to come.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) kept: Kept,
    /// The function's address, in words of a message.
    pub(super) address: [u32; 2],
    pub(super) messages: u64,
    /// Nothing is known by which it would not hold any more.
    pub(super) stands: bool,
}

/// A message and its words.
pub(super) type Message = (&'static MessageKind, Vec<u32>);

impl Kept {
    /// Whether a message could be kept, should the other side accept it.
    pub(super) fn takes(&self, mailbox: &MailboxTable, place: usize, said: &[u32]) -> bool {
        let Some(message) = mailbox.messages.get(place) else { return false };
        let first = said.first().copied().unwrap_or(0);
        match message.keep {
            KeepRule::Each { word, field, adds, most } => {
                let value = said.get(usize::from(word)).copied().unwrap_or(0) & field;
                let found = self.each.iter().find(|(own, ..)| usize::from(*own) == place);
                let values = found.map_or(&[][..], |(.., values)| values);
                first & adds == 0 || values.contains(&value) || values.len() < usize::from(most)
            }
            KeepRule::List { number, most } => index(first, number) <= 1 || self.has_room(place, most),
            KeepRule::Address { further: Some(further), .. } => {
                let adds = first & (further.clear | further.add) == further.add;
                !adds || self.has_room(place, further.most)
            }
            _ => true,
        }
    }

    fn has_room(&self, place: usize, most: u8) -> bool {
        let found = self.lists.iter().find(|(own, _)| usize::from(*own) == place);
        found.is_none_or(|(_, list)| list.len() < usize::from(most))
    }

    /// A message was accepted with this answer.
    pub(super) fn accepted(&mut self, mailbox: &MailboxTable, place: usize, said: &[u32], answer: &[u32]) {
        let Some(message) = mailbox.messages.get(place) else { return };
        let word = |words: &[u32], at: u8| words.get(usize::from(at)).copied().unwrap_or(0);
        let address = |words: &[u32], at: u8| [word(words, at), word(words, at + 1)];
        let place = place as u8;
        match message.keep {
            KeepRule::Nothing => {}
            KeepRule::Begins { address: at } => {
                *self = Kept { begun: true, address: address(answer, at), ..Kept::default() };
            }
            KeepRule::Address { word: at, further } => {
                let bits = further.map_or(0, |further| word(said, 0) & (further.clear | further.add));
                match further {
                    Some(further) if bits == further.clear => self.lists.retain(|(own, _)| *own != place),
                    Some(further) if bits == further.add => {
                        let element = said.iter().copied().take(message.words.into()).skip(1).collect();
                        self.add(place, element, further.most);
                    }
                    _ => self.address = address(said, at),
                }
            }
            KeepRule::Last => {
                self.last.retain(|(own, _)| *own != place);
                self.last.push((place, said.iter().copied().take(message.words.into()).collect()));
            }
            KeepRule::Each { word: at, field, adds, most } => {
                let value = word(said, at) & field;
                let bits = word(said, 0) & adds;
                let found = self.each.iter().position(|(own, ..)| *own == place);
                let found = found.unwrap_or_else(|| {
                    self.each.push((place, 0, Vec::new()));
                    self.each.len() - 1
                });
                let (_, added, values) = &mut self.each[found];
                values.retain(|own| *own != value);
                if bits != 0 && values.len() < usize::from(most) {
                    *added = bits;
                    values.push(value);
                }
            }
            KeepRule::List { number, most } => {
                let index = index(word(said, 0), number);
                if index <= 1 {
                    self.lists.retain(|(own, _)| *own != place);
                }
                if index == 0 {
                    return;
                }
                let element = said.iter().copied().take(message.words.into()).skip(1).collect();
                self.add(place, element, most);
            }
        }
    }

    /// Adds an element to a list.
    fn add(&mut self, place: u8, element: Vec<u32>, most: u8) {
        let found = self.lists.iter().position(|(own, _)| *own == place);
        let found = found.unwrap_or_else(|| {
            self.lists.push((place, Vec::new()));
            self.lists.len() - 1
        });
        let (_, list) = &mut self.lists[found];
        if list.len() < usize::from(most) {
            list.push(element);
        }
    }

    /// What to say, in the order of the table: everything but the messages of the beginning and of the address.
    pub(super) fn messages(&self, mailbox: &'static MailboxTable) -> Vec<Message> {
        let mut said = Vec::new();
        for (place, message) in mailbox.messages.iter().enumerate() {
            for (own, words) in &self.last {
                if usize::from(*own) == place {
                    said.push((message, words.clone()));
                }
            }
            for (own, bits, values) in &self.each {
                let KeepRule::Each { word, .. } = message.keep else { continue };
                for value in values.iter().filter(|_| usize::from(*own) == place) {
                    let mut words = vec![0; message.words.into()];
                    words[usize::from(word)] = *value;
                    words[0] |= message.kind | bits;
                    said.push((message, words));
                }
            }
            for (own, list) in &self.lists {
                for (at, element) in (1..).zip(list).filter(|_| usize::from(*own) == place) {
                    let bits = match message.keep {
                        KeepRule::List { number, .. } => at << number.trailing_zeros() & number,
                        KeepRule::Address { further: Some(further), .. } => further.add,
                        _ => continue,
                    };
                    said.push((message, [&[message.kind | bits], &element[..]].concat()));
                }
            }
        }
        said
    }

    /// What of it may be said ahead of a move: all but unicast addresses, and so no list.
    pub(super) fn ahead(&self) -> Kept {
        Kept { address: [0; 2], lists: Vec::new(), ..self.clone() }
    }

    /// What is to be said besides `said`, which was said already, in the order of the table; addresses come without the function's own one. `None`:
    /// something was said that does not hold, or of which only the last holds.
    pub(super) fn besides(&self, said: &Kept, mailbox: &'static MailboxTable) -> Option<Vec<Message>> {
        let (before, mut all) = (said.messages(mailbox), self.messages(mailbox));
        let has = |messages: &[Message], words: &[u32]| messages.iter().any(|(_, own)| own == words);
        let holds = before.iter().all(|(_, words)| has(&all, words));
        all.retain(|(_, words)| !has(&before, words));
        let last = all.iter().any(|(message, _)| message.keep == KeepRule::Last);
        (self.begun && said.begun && holds && !last).then_some(all)
    }

    /// The message with the address.
    pub(super) fn address_message(&self, mailbox: &'static MailboxTable) -> Option<Message> {
        mailbox.messages.iter().find_map(|message| {
            let KeepRule::Address { word, .. } = message.keep else { return None };
            let mut words = vec![0; message.words.into()];
            words[0] = message.kind;
            words.iter_mut().skip(word.into()).zip(self.address).for_each(|(place, word)| *place = word);
            Some((message, words))
        })
    }

    /// Under which addresses the function receives.
    pub(super) fn addresses(&self, mailbox: &MailboxTable) -> Vec<GuestAddress> {
        let rule = |place: &u8| mailbox.messages.get(usize::from(*place)).map(|message| message.keep);
        let further = self.lists.iter().flat_map(|(place, list)| {
            // The words after the first, of which the address begins here.
            let from = match rule(place) {
                Some(KeepRule::Address { word, further: Some(_) }) => usize::from(word).checked_sub(1),
                Some(KeepRule::List { .. }) => Some(0),
                _ => None,
            };
            list.iter().filter_map(move |element| element.get(from?..)?.first_chunk().copied())
        });
        let mut vlans: Vec<u16> = Vec::new();
        for (place, _, values) in &self.each {
            if let Some(KeepRule::Each { field, .. }) = rule(place) {
                // Frames of VLAN 0 have a priority and no VLAN (IEEE 802.1Q-2018, 9.6).
                let numbers = values.iter().map(|value| (value & field) as u16);
                vlans.extend(numbers.filter(|number| *number != 0));
            }
        }
        addresses::of(self.begun.then_some(self.address), further, &vlans)
    }

    /// Whether a saved one could be.
    pub(super) fn doubt(&self, mailbox: &MailboxTable) -> Result<(), String> {
        let once = |place: u8, before: &mut u64| {
            let bit = 1u64.checked_shl(place.into()).unwrap_or(0);
            let new = bit != 0 && *before & bit == 0;
            *before |= bit;
            new
        };
        let mut seen = 0;
        for (place, words) in &self.last {
            let message = mailbox.messages.get(usize::from(*place));
            let fits = message.is_some_and(|message| {
                let first = words.first().copied().unwrap_or(0);
                message.keep == KeepRule::Last
                    && words.len() == usize::from(message.words)
                    && first & mailbox.kind == message.kind
                    && first & mailbox.accepted == 0
            });
            if !fits || !once(*place, &mut seen) {
                return Err(format!("a message of {} words that cannot be kept", words.len()));
            }
        }
        for (place, bits, values) in &self.each {
            let fits = mailbox.messages.get(usize::from(*place)).is_some_and(|message| match message.keep {
                KeepRule::Each { field, adds, most, .. } => {
                    values.len() <= usize::from(most)
                        && values.iter().all(|value| value & !field == 0)
                        && bits & !adds == 0
                        && (*bits != 0 || values.is_empty())
                }
                _ => false,
            });
            if !fits || !once(*place, &mut seen) {
                return Err(format!("{} values that cannot be kept", values.len()));
            }
        }
        for (place, list) in &self.lists {
            let fits = mailbox.messages.get(usize::from(*place)).is_some_and(|message| {
                let most = match message.keep {
                    KeepRule::List { most, .. } => most,
                    KeepRule::Address { further: Some(further), .. } => further.most,
                    _ => 0,
                };
                list.len() <= usize::from(most)
                    && list.iter().all(|element| element.len() + 1 == usize::from(message.words))
            });
            if !fits || !once(*place, &mut seen) {
                return Err(format!("a list of {} that cannot be kept", list.len()));
            }
        }
        if !self.begun && *self != Kept::default() {
            return Err("messages that were accepted before the first".to_owned());
        }
        Ok(())
    }
}

/// The number of an element of a list.
fn index(first: u32, number: u32) -> u32 {
    (first & number).checked_shr(number.trailing_zeros()).unwrap_or(0)
}
