//! When enough of a disk is copied for its writes to go to both backings, and whether its guest is held to a rate until then
//! (docs/decisions/0047-swap.md).

use std::num::NonZeroU64;

/// What is left is little enough to mirror from now on.
const LITTLE: u64 = 32 << 20;
/// After so many passes it is mirrored however much is left: then the guest cannot write faster than the new backing. Where the guest is held, after so many
/// that bring too little although it is.
const PASSES: u64 = 3;

/// How the passes of a copy go.
#[derive(Debug)]
pub struct Converging {
    /// The rate to which the guest may be held.
    hold: Option<NonZeroU64>,
    holding: bool,
    /// Passes that have been looked at, and what was left when the last one of them ended.
    passes: u64,
    before: u64,
    /// Passes under the hold that have left more than half of what there was.
    in_vain: u64,
}

/// What follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Copy on.
    Copy,
    /// Copy on, with the guest held to this rate.
    Hold(NonZeroU64),
    /// Let writes go to both.
    Mirror,
}

impl Converging {
    /// Of a disk of so many bytes, none of which is copied.
    pub fn new(bytes: u64, hold: Option<NonZeroU64>) -> Self {
        Converging { hold, holding: false, passes: 0, before: bytes, in_vain: 0 }
    }

    /// After so many passes, with so much left.
    pub fn next(&mut self, passes: u64, left: u64) -> Next {
        if passes >= 1 && left <= LITTLE {
            return Next::Mirror;
        }
        let Some(rate) = self.hold else {
            return if passes >= PASSES { Next::Mirror } else { Next::Copy };
        };
        if passes <= self.passes {
            return Next::Copy;
        }
        self.passes = passes;
        let shrinks = left <= self.before / 2;
        self.before = left;
        match (shrinks, self.holding) {
            (true, _) => Next::Copy,
            (false, false) => {
                self.holding = true;
                Next::Hold(rate)
            }
            (false, true) => {
                self.in_vain += 1;
                if self.in_vain >= PASSES { Next::Mirror } else { Next::Copy }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const RATE: NonZeroU64 = NonZeroU64::new(10 * MIB).unwrap();

    fn all(hold: Option<NonZeroU64>, left: &[u64]) -> Vec<Next> {
        let mut converging = Converging::new(1000 * MIB, hold);
        // It is asked all the time, and passes count once.
        let mut next = |(passes, left): (usize, &u64)| {
            let next = converging.next(passes as u64, left * MIB);
            assert!(next == Next::Mirror || converging.next(passes as u64, left * MIB) == Next::Copy);
            next
        };
        left.iter().enumerate().map(&mut next).collect()
    }

    #[test]
    fn without_a_rate_three_passes_are_enough() {
        use Next::*;
        assert_eq!(all(None, &[1000, 900, 900, 900]), [Copy, Copy, Copy, Mirror]);
        assert_eq!(all(None, &[10, 32]), [Copy, Mirror], "the first pass is made, whatever is left");
    }

    #[test]
    fn a_guest_is_held_once_a_pass_leaves_more_than_half() {
        use Next::*;
        assert_eq!(
            all(Some(RATE), &[1000, 400, 150, 60, 20]),
            [Copy, Copy, Copy, Copy, Mirror],
            "it converges by itself"
        );
        assert_eq!(
            all(Some(RATE), &[1000, 400, 390, 150, 60, 33, 20]),
            [Copy, Copy, Hold(RATE), Copy, Copy, Copy, Mirror]
        );
        // It comes to an end although the rate is too high.
        assert_eq!(
            all(Some(RATE), &[1000, 900, 900, 440, 430, 430]),
            [Copy, Hold(RATE), Copy, Copy, Copy, Mirror]
        );
    }
}
