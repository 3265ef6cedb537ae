//! Places in a packed ring: an index and the wrap counter that goes with it (2.8.1).

use crate::spec::packed::{VIRTQ_DESC_F_AVAIL, VIRTQ_DESC_F_USED};

/// Where one side of a packed ring has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Descriptor in the ring.
    pub index: u16,
    /// The side's wrap counter there.
    pub wrap: bool,
}

impl Position {
    /// Where both sides begin.
    pub const START: Position = Position { index: 0, wrap: true };

    /// From the form of event suppression structures and of vhost-user's bases: the wrap counter is the top bit.
    #[inline]
    pub fn of_bits(bits: u16) -> Self {
        Position { index: bits & 0x7fff, wrap: bits & 0x8000 != 0 }
    }

    /// The same backwards.
    #[inline]
    pub fn bits(self) -> u16 {
        self.index | u16::from(self.wrap) << 15
    }

    /// `count` descriptors further in a ring of `size`; `count` is at most that.
    #[inline]
    pub fn after(self, count: u16, size: u16) -> Self {
        let at = u32::from(self.index) + u32::from(count);
        match at.checked_sub(u32::from(size)) {
            Some(at) => Position { index: at as u16, wrap: !self.wrap },
            None => Position { index: at as u16, wrap: self.wrap },
        }
    }

    /// `count` descriptors back; `count` is at most `size`.
    #[inline]
    pub fn before(self, count: u16, size: u16) -> Self {
        match self.index.checked_sub(count) {
            Some(index) => Position { index, wrap: self.wrap },
            // At most `size` back from an index below it: it fits.
            None => Position {
                index: (u32::from(self.index) + u32::from(size) - u32::from(count)) as u16,
                wrap: !self.wrap,
            },
        }
    }

    /// How many descriptors `to` is ahead, or `None` if no driver can be so far ahead of its device.
    #[inline]
    pub fn until(self, to: Position, size: u16) -> Option<u16> {
        let lap = if self.wrap == to.wrap { 0 } else { i32::from(size) };
        let ahead = i32::from(to.index) + lap - i32::from(self.index);
        u16::try_from(ahead).ok().filter(|ahead| *ahead <= size)
    }

    /// Whether a descriptor with these flags has been made available here.
    #[inline]
    pub fn sees_available(self, flags: u16) -> bool {
        flags & (VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED) == self.available()
    }

    /// Whether a descriptor with these flags has been used here.
    pub fn sees_used(self, flags: u16) -> bool {
        flags & (VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED) == self.used()
    }

    /// The two bits of a descriptor that is available here.
    #[inline]
    pub fn available(self) -> u16 {
        if self.wrap { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED }
    }

    /// The two bits of a descriptor that has been used here.
    #[inline]
    pub fn used(self) -> u16 {
        if self.wrap { VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED } else { 0 }
    }

    /// Whether moving on by `moved` descriptors, to here, has passed `event` (2.8.10.2; as 2.7.7.2 compares indexes).
    #[inline]
    pub fn passed(self, event: Position, moved: u32, size: u16) -> bool {
        let lap = if self.wrap == event.wrap { 0 } else { i32::from(size) };
        let behind = i32::from(self.index) + lap - i32::from(event.index);
        behind >= 1 && behind as u32 <= moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both sides walk; a free-running count beside them knows better.
    #[test]
    fn places_and_distances_agree_with_a_count_that_never_wraps() {
        for size in [1u16, 2, 3, 7, 64, 32768] {
            let place = |count: u64| Position {
                index: (count % u64::from(size)) as u16,
                wrap: (count / u64::from(size)).is_multiple_of(2),
            };
            assert_eq!(place(0), Position::START);
            let steps = [0, 1, 2, u64::from(size / 2), u64::from(size) - 1, u64::from(size)];
            for from in (0..5).chain(u64::from(size) * 3 - 2..u64::from(size) * 3 + 3) {
                for step in steps.into_iter().filter(|step| *step <= u64::from(size)) {
                    let (here, there) = (place(from), place(from + step));
                    assert_eq!(here.after(step as u16, size), there, "{from} + {step} in {size}");
                    assert_eq!(there.before(step as u16, size), here, "{from} + {step} in {size}");
                    assert_eq!(here.until(there, size), Some(step as u16), "{from} + {step} in {size}");
                    assert_eq!(Position::of_bits(there.bits()), there);
                    // An event is passed if it is one of the `step` descriptors that end here.
                    for event in from.saturating_sub(1)..=from + step {
                        let wanted = event >= from && event < from + step;
                        let lies_behind = from + step - event <= u64::from(size);
                        if lies_behind {
                            assert_eq!(there.passed(place(event), step as u32, size), wanted, "{event}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn available_and_used_look_different_and_neither_like_the_lap_before() {
        for wrap in [true, false] {
            let (here, lap) = (Position { index: 0, wrap }, Position { index: 0, wrap: !wrap });
            assert!(here.sees_available(here.available()) && here.sees_used(here.used()));
            for other in [here.used(), lap.available(), lap.used()] {
                assert!(!here.sees_available(other));
            }
            assert!(!here.sees_used(lap.used()) && !here.sees_used(here.available()));
        }
        assert!(!Position::START.sees_available(0), "a ring of zeros has nothing");
    }
}
