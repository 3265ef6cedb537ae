//! Which places of the guest's code are worth an attempt.

/// Places that are told apart; a power of two. Places that share an entry share its fate.
const PLACES: usize = 1024;
/// Attempts without a further access after which a place is left alone.
const PATIENCE: i16 = 4;
/// How much an attempt that has paid is remembered, in attempts that do not.
const MEMORY: i16 = 16;
/// How many exits a place that is left alone waits for its next attempt.
const REST: i16 = 256;

/// Learns, by the address of the instruction that exits, whether further accesses follow closely.
#[derive(Debug)]
pub struct Predictor {
    /// Positive: attempts that may fail. Negative: exits until the next attempt.
    credit: Box<[i16]>,
}

impl Default for Predictor {
    fn default() -> Self {
        Self { credit: vec![PATIENCE; PLACES].into_boxed_slice() }
    }
}

impl Predictor {
    fn entry(&mut self, rip: u64) -> Option<&mut i16> {
        let mixed = rip ^ rip >> 10 ^ rip >> 20;
        let index = usize::try_from(mixed & (PLACES as u64 - 1)).ok()?;
        self.credit.get_mut(index)
    }

    /// Whether to interpret after an exit at `rip`. Counts the exit.
    pub fn worth_it(&mut self, rip: u64) -> bool {
        let Some(credit) = self.entry(rip) else { return false };
        if *credit > 0 {
            return true;
        }
        *credit += 1;
        // One attempt after the rest; if it fails, another rest.
        *credit > 0
    }

    /// What the attempt after an exit at `rip` gave.
    pub fn learn(&mut self, rip: u64, further_accesses: u32) {
        let Some(credit) = self.entry(rip) else { return };
        if further_accesses > 0 {
            *credit = (*credit + 2).clamp(PATIENCE, MEMORY);
        } else {
            *credit -= 1;
            if *credit <= 0 {
                *credit = -REST;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_without_followers_is_left_alone_and_tried_again() {
        let mut predictor = Predictor::default();
        let mut attempts = 0;
        for _ in 0..1000 {
            if predictor.worth_it(0x1234) {
                attempts += 1;
                predictor.learn(0x1234, 0);
            }
        }
        assert!((PATIENCE..12).contains(&attempts), "{attempts} attempts");
        for _ in 0..300 {
            if predictor.worth_it(0x1234) {
                predictor.learn(0x1234, 3);
            }
        }
        assert!(predictor.worth_it(0x1234), "it pays now");
        predictor.learn(0x1234, 0);
        assert!(predictor.worth_it(0x1234), "one failure is forgiven");
        assert!(predictor.worth_it(0x4321), "others are not concerned");
    }
}
