//! Which bytes of a read have come.

use crate::error::Violation;

/// Most separate runs of bytes that are kept track of. Servers send a read from its first byte to its last, or in a few threads.
const MOST_RUNS: usize = 32;

/// Ranges without overlaps, sorted; ranges that touch are one. Positions in bytes from the start of the request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coverage {
    runs: [(u32, u32); MOST_RUNS],
    count: usize,
    bytes: u32,
}

impl Coverage {
    pub const EMPTY: Coverage = Coverage { runs: [(0, 0); MOST_RUNS], count: 0, bytes: 0 };

    pub fn clear(&mut self) {
        (self.count, self.bytes) = (0, 0);
    }

    /// Bytes that have come.
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Notes that `length` bytes from `start` on come now.
    pub fn add(&mut self, start: u32, length: u32) -> Result<(), Violation> {
        let end = start + length;
        // The first run that ends at or after the new one's start.
        let at = self.runs[..self.count].partition_point(|run| run.1 < start);
        let touches_left = at < self.count && self.runs[at].1 == start;
        let next = if touches_left { at + 1 } else { at };
        if next < self.count && self.runs[next].0 < end {
            return Err(Violation::Overlap { offset: start.into() });
        }
        let touches_right = next < self.count && self.runs[next].0 == end;
        match (touches_left, touches_right) {
            (true, true) => {
                self.runs[at].1 = self.runs[next].1;
                self.runs.copy_within(next + 1..self.count, next);
                self.count -= 1;
            }
            (true, false) => self.runs[at].1 = end,
            (false, true) => self.runs[next].0 = start,
            (false, false) if self.count == MOST_RUNS => return Err(Violation::Scattered),
            (false, false) => {
                self.runs.copy_within(at..self.count, at + 1);
                self.runs[at] = (start, end);
                self.count += 1;
            }
        }
        self.bytes += length;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against a set of bytes: what overlaps is refused, and nothing else but too many runs.
        #[test]
        fn agrees_with_a_set_of_bytes(parts in prop::collection::vec((0u32..200, 1u32..20), 0..60)) {
            let (mut coverage, mut bytes) = (Coverage::EMPTY, [false; 256]);
            for (start, length) in parts {
                let range = start as usize..(start + length) as usize;
                let overlaps = bytes[range.clone()].contains(&true);
                match coverage.add(start, length) {
                    Ok(()) => {
                        prop_assert!(!overlaps);
                        bytes[range].fill(true);
                    }
                    Err(Violation::Scattered) => prop_assert!(!overlaps),
                    Err(_) => prop_assert!(overlaps),
                }
                prop_assert_eq!(coverage.bytes() as usize, bytes.iter().filter(|byte| **byte).count());
            }
        }
    }

    #[test]
    fn a_reply_in_crumbs_is_refused() {
        let mut coverage = Coverage::EMPTY;
        for crumb in 0..MOST_RUNS as u32 {
            coverage.add(crumb * 2, 1).unwrap();
        }
        assert_eq!(coverage.add(500, 1), Err(Violation::Scattered));
        coverage.add(1, 1).unwrap();
        coverage.add(500, 1).unwrap();
    }
}
