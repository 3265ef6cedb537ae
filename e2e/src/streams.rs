//! What `ioplane-stream` says of the traffic between a guest and whoever is at the other end of its cable.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

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
    /// What came from the guest, over time: datagrams, and bytes of TCP.
    #[serde(default)]
    pub datagrams: Series,
    #[serde(default)]
    pub tcp_bytes: Series,
    /// Datagrams that the kernel there had meanwhile and handed to nobody, by the names of its counters ([`refused`]).
    #[serde(default)]
    pub refused: BTreeMap<String, u64>,
}

/// What the kernel has counted of datagrams that nobody got or that did not leave: of `/proc/net/snmp`, the counters of UDP that are not zero.
pub fn refused(snmp: &str) -> BTreeMap<String, u64> {
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Udp: "));
    let (names, values) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let entry = |(name, value): (&str, &str)| Some((name.to_owned(), value.parse().ok()?));
    let all = names.split_whitespace().zip(values.split_whitespace()).filter_map(entry);
    all.filter(|(name, value)| !["InDatagrams", "OutDatagrams"].contains(&name.as_str()) && *value > 0)
        .collect()
}

/// How much came in each [`Series::STEP`] since the beginning. What comes after the last step is not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Series(pub Vec<u64>);

impl Series {
    pub const STEP: Duration = Duration::from_millis(250);
    const STEPS: usize = 4800;

    /// So much came so long after the beginning.
    pub fn add(&mut self, after: Duration, amount: u64) {
        let step = (after.as_nanos() / Self::STEP.as_nanos()) as usize;
        if step >= Self::STEPS {
            return;
        }
        if step >= self.0.len() {
            self.0.resize(step + 1, 0);
        }
        self.0[step] += amount;
    }

    /// As points: seconds from a moment, and how much a second there. From `before` seconds before it to `after` behind it.
    pub fn around(&self, moment_s: f64, before: f64, after: f64) -> Vec<(f64, f64)> {
        let step = Self::STEP.as_secs_f64();
        let points = self
            .0
            .iter()
            .enumerate()
            .map(|(at, amount)| ((at as f64 + 0.5) * step - moment_s, *amount as f64 / step));
        points.filter(|(at, _)| (-before..=after).contains(at)).collect()
    }
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
    fn what_the_kernel_refuses_is_read() {
        let said = "Tcp: RtoMin\nTcp: 200\nUdp: InDatagrams NoPorts InErrors OutDatagrams InCsumErrors\nUdp: 7 0 3 9 3\nUdpLite: InErrors\nUdpLite: 1\n";
        let counted = [("InErrors".to_owned(), 3), ("InCsumErrors".to_owned(), 3)];
        assert_eq!(refused(said), BTreeMap::from(counted));
        assert_eq!(refused(""), BTreeMap::new());
    }

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

    #[test]
    fn a_series_has_what_came_in_each_step_and_ends() {
        let mut series = Series::default();
        for (ms, amount) in [(0, 3), (249, 1), (250, 5), (1_000, 2), (u64::MAX / 2, 9)] {
            series.add(Duration::from_millis(ms), amount);
        }
        assert_eq!(series.0, [4, 5, 0, 0, 2]);
        assert_eq!(series.around(0.5, 0.2, 0.5), [(-0.125, 20.0), (0.125, 0.0), (0.375, 0.0)]);
    }
}
