//! Who may write an export: one holder at a time, whose claim has a generation that only grows (docs/decisions/0052-claims.md).
//!
//! ```text
//!   importer --ioplane:claim=HOLDER/VERB/GENERATION/NAME--> exporter        a query of NBD_OPT_SET_META_CONTEXT
//!            <-----ioplane:claim=granted/GENERATION--------                 the name in its reply
//!            --ioplane:epoch=HOLDER/SESSION/CHANNEL/EPOCH/GENERATION-->     for each connection
//! ```
//!
//! What is read here was sent by a peer: everything has a length and a form, and whatever has not is no query.

mod book;
mod record;

use std::fmt;

pub use book::{ClaimBook, ClaimStore};
pub use record::ClaimRecord;

/// The metadata context by which clients claim an export. Without `=` a client asks whether the exporter keeps claims for this export.
pub const CLAIM: &str = "ioplane:claim";
/// Longest identity of a holder, as it says it.
pub const LONGEST_HOLDER: usize = 64;
/// The same with the name of its host before it, as an exporter writes it down.
const LONGEST_JOINED: usize = LONGEST_HOLDER + 256;
/// Longest name of a holder for people, and longest reason.
pub const LONGEST_NAME: usize = 256;

/// Whether this can be the identity of a holder: letters, digits, `-` and `.`; `/` only where an exporter has put the name of a host before it.
pub fn is_holder(text: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'/');
    (1..=LONGEST_JOINED).contains(&text.len()) && text.bytes().all(plain)
}

/// What is left of a text that people read: no control characters, and not too long.
pub fn readable(text: &str) -> String {
    readable_within(text, LONGEST_NAME)
}

/// The same, of at most so many bytes.
pub fn readable_within(text: &str, most: usize) -> String {
    let mut text: String = text.chars().filter(|c| !c.is_control()).collect();
    let end = (0..=most.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
    text.truncate(end);
    text
}

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimVerb {
    /// The next generation, if nobody holds the export.
    Ask,
    /// To go on with this one.
    Own(u64),
    /// The next one, whoever holds the export.
    TakeOver,
    /// To hold it no more.
    Release(u64),
}

/// A query `ioplane:claim=HOLDER/VERB/GENERATION/NAME`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimQuery {
    /// Who asks.
    pub holder: String,
    /// What for.
    pub verb: ClaimVerb,
    /// Who that is, for people.
    pub name: String,
}

impl ClaimQuery {
    /// `None` if it is no such query.
    pub fn of(query: &str) -> Option<ClaimQuery> {
        let mut parts = query.strip_prefix(CLAIM)?.strip_prefix('=')?.splitn(4, '/');
        let (holder, verb, generation, name) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let generation: u64 = generation.parse().ok()?;
        let verb = match (verb, generation) {
            ("ask", 0) => ClaimVerb::Ask,
            ("takeover", 0) => ClaimVerb::TakeOver,
            ("own", 1..) => ClaimVerb::Own(generation),
            ("release", 1..) => ClaimVerb::Release(generation),
            _ => return None,
        };
        let named = !name.is_empty() && readable(name) == name;
        (is_holder(holder) && holder.len() <= LONGEST_HOLDER && named).then(|| ClaimQuery {
            holder: holder.into(),
            verb,
            name: name.into(),
        })
    }
}

impl fmt::Display for ClaimQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (verb, generation) = match self.verb {
            ClaimVerb::Ask => ("ask", 0),
            ClaimVerb::TakeOver => ("takeover", 0),
            ClaimVerb::Own(generation) => ("own", generation),
            ClaimVerb::Release(generation) => ("release", generation),
        };
        write!(f, "{CLAIM}={}/{verb}/{generation}/{}", self.holder, readable(&self.name))
    }
}

/// Why a client may not write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimDenial {
    /// Another one holds the export.
    Held,
    /// Nobody holds it, and this client's own claim was released.
    Released,
    /// The exporter knows no such claim: its image was replaced or restored, or the client is wrong.
    Unknown,
    /// Clients without a generation use it.
    Shared,
    /// There is no next generation.
    Exhausted,
    /// The exporter could not do it, and says why.
    Failed,
}

impl ClaimDenial {
    const ALL: [(ClaimDenial, &str); 6] = [
        (ClaimDenial::Held, "held"),
        (ClaimDenial::Released, "released"),
        (ClaimDenial::Unknown, "unknown"),
        (ClaimDenial::Shared, "shared"),
        (ClaimDenial::Exhausted, "exhausted"),
        (ClaimDenial::Failed, "failed"),
    ];

    fn word(self) -> &'static str {
        ClaimDenial::ALL.into_iter().find(|(denial, _)| *denial == self).map_or("failed", |(_, word)| word)
    }
}

/// A refusal, with what the exporter knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRefusal {
    /// Why.
    pub why: ClaimDenial,
    /// The generation that was granted last; 0 if none was.
    pub generation: u64,
    /// When, in seconds since 1970.
    pub since: u64,
    /// To whom, for people; of a failure, what failed.
    pub name: String,
}

impl fmt::Display for ClaimRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ClaimRefusal { generation, name, .. } = self;
        let since = date(self.since);
        match self.why {
            ClaimDenial::Held => write!(f, "it is held by {name} (generation {generation}) since {since}"),
            ClaimDenial::Released => write!(
                f,
                "this claim was released; the last one was that of {name} (generation {generation})"
            ),
            ClaimDenial::Unknown if *generation == 0 => {
                f.write_str("the exporter knows no claim of this disk")
            }
            ClaimDenial::Unknown => {
                write!(
                    f,
                    "the exporter does not know this claim; it knows that of {name} (generation {generation})"
                )
            }
            ClaimDenial::Shared => write!(f, "clients that have no claim use it: {name}"),
            ClaimDenial::Exhausted => write!(f, "there is no generation after {generation}"),
            ClaimDenial::Failed => write!(f, "the exporter cannot grant it: {name}"),
        }
    }
}

/// `2026-11-26 22:10 UTC`.
pub fn date(since_1970: u64) -> String {
    let time = i64::try_from(since_1970).ok().and_then(|s| time::OffsetDateTime::from_unix_timestamp(s).ok());
    time.map_or_else(
        || format!("{since_1970} s after 1970"),
        |at| {
            let (date, month) = (at.date(), u8::from(at.month()));
            format!("{}-{month:02}-{:02} {:02}:{:02} UTC", date.year(), date.day(), at.hour(), at.minute())
        },
    )
}

/// What an exporter answers: the name of the context in its reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimReply {
    /// The client is the holder, with this generation.
    Granted(u64),
    /// It is no more.
    Released(u64),
    /// It is not.
    Refused(ClaimRefusal),
}

impl ClaimReply {
    /// `None` if it is none.
    pub fn of(context: &str) -> Option<ClaimReply> {
        let (word, rest) = context.strip_prefix(CLAIM)?.strip_prefix('=')?.split_once('/')?;
        match word {
            "granted" => rest.parse().ok().filter(|generation| *generation > 0).map(ClaimReply::Granted),
            "released" => rest.parse().ok().map(ClaimReply::Released),
            "refused" => {
                let mut parts = rest.splitn(4, '/');
                let (why, generation) = (parts.next()?, parts.next()?.parse().ok()?);
                let (since, name) = (parts.next()?.parse().ok()?, readable(parts.next()?));
                let (why, _) = ClaimDenial::ALL.into_iter().find(|(_, word)| *word == why)?;
                Some(ClaimReply::Refused(ClaimRefusal { why, generation, since, name }))
            }
            _ => None,
        }
    }
}

impl fmt::Display for ClaimReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ClaimReply::Granted(generation) => write!(f, "{CLAIM}=granted/{generation}"),
            ClaimReply::Released(generation) => write!(f, "{CLAIM}=released/{generation}"),
            ClaimReply::Refused(ClaimRefusal { why, generation, since, name }) => {
                write!(f, "{CLAIM}=refused/{}/{generation}/{since}/{}", why.word(), readable(name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_what_they_were_written_from() {
        for verb in [ClaimVerb::Ask, ClaimVerb::Own(7), ClaimVerb::TakeOver, ClaimVerb::Release(u64::MAX)] {
            let query = ClaimQuery { holder: "3f-a".into(), verb, name: "data of host-b / rack 7".into() };
            assert_eq!(ClaimQuery::of(&query.to_string()), Some(query));
        }
        let long = format!("={}/ask/0/x", "a".repeat(LONGEST_HOLDER + 1));
        let name = format!("=a/ask/0/{}", "x".repeat(LONGEST_NAME + 1));
        let wrong = [
            "",
            "=",
            "=a",
            "=a/ask",
            "=a/ask/0",
            "=a/ask/0/",
            "=a/ask/1/x",
            "=a/own/0/x",
            "=a/own/-1/x",
            "=/ask/0/x",
        ];
        let wrong = wrong.into_iter().chain([
            "=a b/ask/0/x",
            "=a/own/18446744073709551616/x",
            "=a/take/0/x",
            "=a/ask/0/x\ny",
        ]);
        for tail in wrong.chain([long.as_str(), name.as_str()]) {
            assert_eq!(ClaimQuery::of(&format!("{CLAIM}{tail}")), None, "{tail}");
        }
    }

    #[test]
    fn replies_are_what_they_were_written_from() {
        let refused = |why| {
            ClaimReply::Refused(ClaimRefusal {
                why,
                generation: 3,
                since: 1_795_730_400,
                name: "data of host-b".into(),
            })
        };
        let all = ClaimDenial::ALL.map(|(why, _)| refused(why));
        for reply in [ClaimReply::Granted(1), ClaimReply::Released(u64::MAX)].into_iter().chain(all) {
            assert_eq!(ClaimReply::of(&reply.to_string()), Some(reply));
        }
        for tail in [
            "",
            "=",
            "=granted",
            "=granted/0",
            "=granted/x",
            "=refused/held/1/2",
            "=refused/no/1/2/x",
            "=no/1",
        ] {
            assert_eq!(ClaimReply::of(&format!("{CLAIM}{tail}")), None, "{tail}");
        }
        let Some(ClaimReply::Refused(refusal)) = ClaimReply::of(&refused(ClaimDenial::Held).to_string())
        else {
            panic!("a refusal");
        };
        assert_eq!(
            refusal.to_string(),
            "it is held by data of host-b (generation 3) since 2026-11-26 22:00 UTC"
        );
        assert_eq!(date(u64::MAX), format!("{} s after 1970", u64::MAX));
    }
}
