//! How many entries of its core's ring a poller may have in flight.

use ioplane_device::mutation::{Invariant, bound};

/// One in so many entries is left to pollers with fewer than [`LEAST_SHARE`] in flight, such as one that has just come.
const LEFT_TO_FEW: usize = 16;

/// In flight of one poller, however many there are.
pub(crate) const LEAST_SHARE: usize = 8;

/// Whether a poller with so many `own` in flight may have one more, where all `pollers` have `all` in flight, of `most`.
///
/// One half is for whoever comes first. The other is divided among the pollers, so that one below its share is never refused, whatever the
/// others have in flight and however long that takes: a guest with many queues on a silent disk leaves the others theirs. With more
/// than some 800 pollers, of which each may have the least, the shares are more than there is.
#[inline]
pub(crate) fn admits(most: usize, all: usize, pollers: usize, own: usize) -> bool {
    let (half, left) = (most / 2, most / LEFT_TO_FEW);
    if all < half {
        // Nearly always, and without a division.
        return true;
    }
    let share = ((most - half - left) / pollers.max(1)).max(LEAST_SHARE);
    let share = bound(Invariant::KeepsQuotas, share as u64) as usize;
    let limit = if own < LEAST_SHARE { most } else { most - left };
    own < share && all < limit
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever the others do, in whatever order they come, and though none of it ever ends.
    #[test]
    fn a_poller_below_its_share_is_never_refused() {
        const MOST: usize = 1600;
        for pollers in 2..80 {
            let share = (MOST / 2 - MOST / LEFT_TO_FEW) / pollers;
            for first in 0..pollers {
                let mut own = vec![0; pollers];
                // The last is the one that comes when all others have what they can get.
                for at in (0..pollers - 1).map(|at| (at + first) % (pollers - 1)) {
                    while admits(MOST, own.iter().sum(), pollers, own[at]) {
                        own[at] += 1;
                    }
                }
                let last = &mut 0;
                let others: usize = own.iter().sum();
                while admits(MOST, others + *last, pollers, *last) {
                    *last += 1;
                }
                assert!(*last >= share.max(LEAST_SHARE), "{last} of {share} with {pollers} pollers");
                assert!(others + *last <= MOST);
            }
        }
    }
}
