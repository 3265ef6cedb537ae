//! Reservations: a part of an export's declared capacity that is kept for one import (docs/decisions/0063-capacity-and-reservations.md).
//!
//! ```text
//!   importer --ioplane:reserve=HOLDER/IOPS/BYTES/NAME--> exporter        a query of NBD_OPT_SET_META_CONTEXT
//!            <-----ioplane:reserve=granted/IOPS/BYTES---                 the name in its reply
//!            <-----ioplane:reserve=refused/WHY----------
//! ```
//!
//! Before it the importer asks `ioplane:order=NUMBER`, which exporters select that keep the order of questions: a question may be carried out after its asker
//! has given up and asked another one, and then the one with the lower number is refused.
//!
//! It is asked for when the import is opened, again to change it, and holds for all connections of HOLDER, which their epochs name, until as much as nothing
//! (0/0) is asked for. What is read here was sent by a peer: everything has a length and a form, and whatever has not is no query.

use std::fmt;

pub use ioplane_scheduler::ReservedRates;

use crate::claim::{LONGEST_HOLDER, is_holder, readable, readable_within};

/// The metadata context by which clients reserve.
pub const RESERVE: &str = "ioplane:reserve";
/// The metadata context by which clients number their questions about reservations: `ioplane:order=NUMBER`, before the question. Exporters that do not know
/// it select nothing.
pub const ORDER: &str = "ioplane:order";
/// Longest reason of a refusal.
pub const LONGEST_WHY: usize = 1024;

/// A query `ioplane:reserve=HOLDER/IOPS/BYTES/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReserveQuery {
    /// Who asks: the holder of the client's epochs.
    pub holder: String,
    /// How much per second; nothing of both gives back what was reserved.
    pub rates: ReservedRates,
    /// Who that is, for people.
    pub name: String,
}

/// The query that gives the next question of its handshake this number.
pub fn order_query(number: u64) -> String {
    format!("{ORDER}={number}")
}

/// The number in such a query; `None` if it is none. It was sent by a peer.
pub fn order_of(query: &str) -> Option<u64> {
    query.strip_prefix(ORDER)?.strip_prefix('=')?.parse().ok()
}

/// Requests and bytes, as they are written.
fn rates(requests: &str, bytes: &str) -> Option<ReservedRates> {
    Some(ReservedRates { requests: requests.parse().ok()?, bytes: bytes.parse().ok()? })
}

impl ReserveQuery {
    /// `None` if it is no such query.
    pub fn of(query: &str) -> Option<ReserveQuery> {
        let mut parts = query.strip_prefix(RESERVE)?.strip_prefix('=')?.splitn(4, '/');
        let (holder, requests, bytes, name) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let rates = rates(requests, bytes)?;
        let named = !name.is_empty() && readable(name) == name;
        (is_holder(holder) && holder.len() <= LONGEST_HOLDER && named).then(|| ReserveQuery {
            holder: holder.into(),
            rates,
            name: name.into(),
        })
    }
}

impl fmt::Display for ReserveQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReserveQuery { holder, rates: ReservedRates { requests, bytes }, name } = self;
        write!(f, "{RESERVE}={holder}/{requests}/{bytes}/{}", readable(name))
    }
}

/// What an exporter answers: the name of the context in its reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReserveReply {
    /// So much is kept for the client.
    Granted(ReservedRates),
    /// What was asked for is not; what the client had before it still has. In words for people.
    Refused(String),
}

impl ReserveReply {
    /// `None` if it is none.
    pub fn of(context: &str) -> Option<ReserveReply> {
        let (word, rest) = context.strip_prefix(RESERVE)?.strip_prefix('=')?.split_once('/')?;
        match word {
            "granted" => {
                let (requests, bytes) = rest.split_once('/')?;
                rates(requests, bytes).map(ReserveReply::Granted)
            }
            "refused" => Some(ReserveReply::Refused(readable_within(rest, LONGEST_WHY))),
            _ => None,
        }
    }
}

impl fmt::Display for ReserveReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReserveReply::Granted(ReservedRates { requests, bytes }) => {
                write!(f, "{RESERVE}=granted/{requests}/{bytes}")
            }
            ReserveReply::Refused(why) => {
                write!(f, "{RESERVE}=refused/{}", readable_within(why, LONGEST_WHY))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_and_replies_are_what_they_were_written_from() {
        for (requests, bytes) in [(0, 0), (6000, 0), (0, u64::MAX), (u64::MAX, 1)] {
            let rates = ReservedRates { requests, bytes };
            let query = ReserveQuery { holder: "3f-a".into(), rates, name: "disk data of b / rack 7".into() };
            assert_eq!(ReserveQuery::of(&query.to_string()), Some(query));
            let reply = ReserveReply::Granted(rates);
            assert_eq!(ReserveReply::of(&reply.to_string()), Some(reply));
        }
        for number in [0, 7, u64::MAX] {
            assert_eq!(order_of(&order_query(number)), Some(number));
        }
        for other in
            ["ioplane:order", "ioplane:order=", "ioplane:order=-1", "ioplane:order=1/2", "ioplane:orders=1"]
        {
            assert_eq!(order_of(other), None, "{other}");
        }
        let reply = ReserveReply::Refused("b asks for 6000/s, 4000 of 10000 are free".into());
        assert_eq!(ReserveReply::of(&reply.to_string()), Some(reply));
    }

    #[test]
    fn what_has_no_form_is_no_query() {
        let long = format!("={}/1/1/x", "a".repeat(LONGEST_HOLDER + 1));
        let name = format!("=a/1/1/{}", "x".repeat(4000));
        let wrong = [
            "",
            "=",
            "=a",
            "=a/1",
            "=a/1/1",
            "=a/1/1/",
            "=a/-1/1/x",
            "=a/1/1.5/x",
            "=a/18446744073709551616/1/x",
            "=a/1//x",
            "=/1/1/x",
            "=a b/1/1/x",
            "=a/1/1/x\ny",
            &long,
            &name,
        ];
        for other in wrong
            .map(|tail| format!("{RESERVE}{tail}"))
            .iter()
            .map(String::as_str)
            .chain(["ioplane:claim=a/1/1/x"])
        {
            assert_eq!(ReserveQuery::of(other), None, "{other}");
        }
        for other in ["", "=", "=granted", "=granted/1", "=granted/1/x", "=granted/1/1/1", "=maybe/1/1"] {
            assert_eq!(ReserveReply::of(&format!("{RESERVE}{other}")), None, "{other}");
        }
        let endless = format!("{RESERVE}=refused/{}\u{7}", "x".repeat(4000));
        let Some(ReserveReply::Refused(why)) = ReserveReply::of(&endless) else { panic!() };
        assert_eq!(why.len(), LONGEST_WHY);
    }
}
