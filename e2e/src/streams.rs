//! What `ioplane-stream` says of the traffic between a guest and whoever is at the other end of its cable.

use serde::{Deserialize, Serialize};

/// Datagrams of one direction, by their numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counted {
    /// Different ones that came.
    pub received: u64,
    /// That came once more.
    pub duplicated: u64,
    /// That came after one with a higher number.
    pub reordered: u64,
    /// Numbers that did not come, of those below the highest: first and last of each stretch, at most [`MOST`] of them.
    pub missing: Vec<[u64; 2]>,
    /// How many did not come.
    pub lost: u64,
}

/// Most stretches that are told.
pub const MOST: usize = 64;

/// What the guest has seen.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Answered {
    pub datagrams: Counted,
    /// How many were echoed: the numbers that the other end expects.
    pub echoed: u64,
    /// Bytes of TCP that came and were right.
    pub bytes: u64,
    /// What was wrong with others, or with the connection.
    pub fault: Option<String>,
}

/// What the other end has seen.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Driven {
    /// When it began, by the clock of whoever sends: s since that machine has booted.
    pub begun_s: f64,
    /// Datagrams that were sent.
    pub sent: u64,
    /// That the guest had from here.
    pub there: Counted,
    /// Of the guest's.
    pub back: Counted,
    /// The longest times between two datagrams of the guest, ms: when the second came, and how long after the first.
    pub gaps: Vec<Gap>,
    /// Bytes of TCP that the guest had and that were right.
    pub bytes_there: u64,
    /// That came from it and were right.
    pub bytes_back: u64,
    /// The longest time between two reads of TCP.
    pub tcp_gap: Gap,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Gap {
    /// Since the beginning.
    pub at_ms: f64,
    pub ms: f64,
}

/// Which numbers have come.
#[derive(Debug, Default)]
pub struct Numbers {
    times: Vec<u8>,
    counted: Counted,
}

impl Numbers {
    /// Most numbers.
    const LIMIT: u64 = 1 << 22;

    /// One came. Says whether for the first time.
    pub fn came(&mut self, number: u64) -> bool {
        if number >= Self::LIMIT {
            return false;
        }
        let at = number as usize;
        if at >= self.times.len() {
            self.times.resize(at + 1, 0);
        } else if self.times[at] == 0 {
            self.counted.reordered += 1;
        }
        let first = self.times[at] == 0;
        self.times[at] = self.times[at].saturating_add(1);
        match first {
            true => self.counted.received += 1,
            false => self.counted.duplicated += 1,
        }
        first
    }

    /// What has come until now, of `all` if so many were sent.
    pub fn counted(&self, all: u64) -> Counted {
        let mut counted = self.counted.clone();
        let mut begun = None;
        for at in 0..all.min(Self::LIMIT) + 1 {
            let lacks = at < all && self.times.get(at as usize).is_none_or(|times| *times == 0);
            match (begun, lacks) {
                (None, true) => begun = Some(at),
                (Some(from), false) => {
                    counted.lost += at - from;
                    if counted.missing.len() < MOST {
                        counted.missing.push([from, at - 1]);
                    }
                    begun = None;
                }
                _ => {}
            }
        }
        counted
    }
}

/// The byte at a place of every stream.
pub fn byte(at: u64) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 13) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_counted() {
        let mut numbers = Numbers::default();
        for number in [0, 1, 4, 3, 3, 7] {
            numbers.came(number);
        }
        let missing = vec![[2, 2], [5, 6], [8, 9]];
        assert_eq!(
            numbers.counted(10),
            Counted { received: 5, duplicated: 1, reordered: 1, missing, lost: 5 }
        );
        assert!(!numbers.came(u64::MAX));
        assert_eq!(Numbers::default().counted(0), Counted::default());
    }
}
