//! What comes from a guest around its longest gap.

use ioplane_e2e::streams::{Driven, Gap};

/// Seconds that are shown before the longest gap begins, and after that.
pub const SHOWN: (f64, f64) = (5.0, 15.0);

/// What came from a guest around its longest gap: seconds since that began, and how much a second.
#[derive(Clone, Debug, Default)]
pub struct OverTime {
    pub datagrams: Vec<(f64, f64)>,
    pub tcp_bytes: Vec<(f64, f64)>,
}

impl OverTime {
    pub fn of(driven: &Driven, gap: &Gap) -> OverTime {
        let begins_s = (gap.at_ms - gap.ms) / 1e3;
        let (before, after) = SHOWN;
        OverTime {
            datagrams: driven.datagrams.around(begins_s, before, after),
            tcp_bytes: driven.tcp_bytes.around(begins_s, before, after),
        }
    }
}
