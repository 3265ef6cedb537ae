//! How long the daemon holds a device.

use std::time::{Duration, Instant};

/// How long a device is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Held {
    /// Then it goes on by itself.
    Until(Instant),
    /// It goes on when it is told to, or when its client has left.
    UntilTold,
}

impl Held {
    /// From now on; [`Duration::MAX`] is for good.
    pub fn for_(lease: Duration) -> Held {
        if lease == Duration::MAX {
            return Held::UntilTold;
        }
        Instant::now().checked_add(lease).map_or(Held::UntilTold, Held::Until)
    }

    /// When it goes on by itself.
    pub fn until(self) -> Option<Instant> {
        match self {
            Held::Until(until) => Some(until),
            Held::UntilTold => None,
        }
    }
}
