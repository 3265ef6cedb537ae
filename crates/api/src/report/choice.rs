//! How a core learns of a queue's requests, and why.

use serde::{Deserialize, Serialize};

words! {
    /// How a core learns of a queue's requests.
    ChoiceWord, Other,
    /// As the mode of the core says, for all its queues: nothing is decided for this one.
    Fixed "fixed",
    /// It is looked at in every turn of the core.
    Polled "polled",
    /// Its driver is asked to kick.
    Armed "armed",
    /// A limit holds its requests back.
    Held "held",
    /// In a way that is not known here.
    Other "other",
}

words! {
    /// Why a queue is armed, or held back.
    ChoiceReason, Other,
    /// Nothing needs a reason.
    None "none",
    /// Its requests come further apart than polling on is worth.
    LongGaps "long_gaps",
    /// No request came for as long as it was worth polling.
    SpunInVain "spun_in_vain",
    /// The CPU ceiling of its core forbids polling.
    Ceiling "ceiling",
    /// No request came for the core's spin, the most that a p99 objective may take.
    Objective "objective",
    /// Its requests have waited for the disk for longer than the core polls.
    SlowDisk "slow_disk",
    /// A limit of requests per second.
    RequestLimit "request_limit",
    /// A limit of bytes per second.
    ByteLimit "byte_limit",
    /// One that is not known here.
    Other "other",
}

/// How the core of a queue learns of its requests, and how it did so since the queue came to this core.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ChoiceReport {
    /// Now.
    pub choice: ChoiceWord,
    /// Why.
    pub reason: ChoiceReason,
    /// For how long it has been so, microseconds.
    pub for_us: u64,
    /// On an adaptive core: for how long it is looked at in vain before it is armed, microseconds; nothing: for as long as the core's own spin.
    pub spin_us: Option<u64>,
    /// Each way and reason that there was.
    pub counts: Vec<ChoiceCount>,
}

/// One of the ways, for one reason.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ChoiceCount {
    /// The way.
    pub choice: ChoiceWord,
    /// The reason.
    pub reason: ChoiceReason,
    /// The reason in words.
    pub why: String,
    /// How often the queue went over to it.
    pub times: u64,
    /// For how long it was so, microseconds.
    pub us: u64,
}

/// In which ways a queue was served between two moments.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChoiceParts {
    /// Parts of the time, 0 to 1, in which it was polled, armed, and held back. All of them 0 where nothing was decided for it.
    pub polled: f64,
    /// Armed.
    pub armed: f64,
    /// Held back by a limit.
    pub held: f64,
    /// For which reason it was armed or held back for longest, and that in words.
    pub most: Option<(ChoiceReason, String)>,
}

impl ChoiceReport {
    /// In which ways the queue was served from `before` on. A queue that has come to another core since has no past.
    pub fn since(&self, before: Option<&ChoiceReport>) -> ChoiceParts {
        let was = |count: &ChoiceCount| {
            let all = before.map_or(&[][..], |before| &before.counts);
            let same = all.iter().find(|other| (other.choice, other.reason) == (count.choice, count.reason));
            same.map_or(0, |count| count.us)
        };
        let began_anew = self.counts.iter().any(|count| count.us < was(count));
        let spent = |count: &ChoiceCount| (count.us - if began_anew { 0 } else { was(count) }) as f64;
        let all: f64 = self.counts.iter().map(spent).sum();
        if all <= 0.0 {
            return ChoiceParts::default();
        }
        let part = |word: ChoiceWord| {
            let of = self.counts.iter().filter(|count| count.choice == word);
            // The sum of nothing is -0.0, which would be shown.
            of.map(spent).sum::<f64>() / all + 0.0
        };
        let reasons = self.counts.iter().filter(|count| count.reason != ChoiceReason::None);
        let most = reasons.max_by(|a, b| spent(a).total_cmp(&spent(b))).filter(|count| spent(count) > 0.0);
        ChoiceParts {
            polled: part(ChoiceWord::Polled),
            armed: part(ChoiceWord::Armed),
            held: part(ChoiceWord::Held),
            most: most.map(|count| (count.reason, count.why.clone())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(counts: &[(ChoiceWord, ChoiceReason, u64)]) -> ChoiceReport {
        let count = |&(choice, reason, us): &(ChoiceWord, ChoiceReason, u64)| {
            let why = reason.word().to_owned();
            ChoiceCount { choice, reason, why, times: 1, us }
        };
        ChoiceReport { counts: counts.iter().map(count).collect(), ..ChoiceReport::default() }
    }

    #[test]
    fn parts_are_of_the_time_between() {
        use {ChoiceReason as Why, ChoiceWord as How};
        let before = report(&[(How::Polled, Why::None, 900), (How::Armed, Why::LongGaps, 100)]);
        let after = report(&[
            (How::Polled, Why::None, 1000),
            (How::Armed, Why::LongGaps, 200),
            (How::Armed, Why::Ceiling, 700),
            (How::Held, Why::ByteLimit, 100),
        ]);
        let parts = after.since(Some(&before));
        assert_eq!((parts.polled, parts.armed, parts.held), (0.1, 0.8, 0.1));
        assert_eq!(parts.most, Some((Why::Ceiling, "ceiling".to_owned())));
        // Another core has counted from zero.
        let moved = report(&[(How::Polled, Why::None, 30), (How::Armed, Why::LongGaps, 10)]);
        assert_eq!(moved.since(Some(&after)).polled, 0.75);
        assert_eq!(format!("{:.0} %", 100.0 * moved.since(None).held), "0 %", "without a sign");
        assert_eq!(after.since(Some(&after)), ChoiceParts::default());
    }
}
