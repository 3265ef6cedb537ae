//! Numbers for simulations: the same in every run.

#![allow(dead_code, reason = "each simulation uses some of it")]

/// A generator of the splitmix64 family, enough for arrivals.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 to 1, neither of them.
    pub fn part(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// The time to the next of events that come at random, `mean` apart.
    pub fn exponential(&mut self, mean: f64) -> u64 {
        (-self.part().ln() * mean) as u64
    }
}

/// The value below which `part` of `values` lie; sorts them.
pub fn quantile(values: &mut [u64], part: f64) -> u64 {
    values.sort_unstable();
    let at = ((values.len() as f64 * part).ceil() as usize).clamp(1, values.len().max(1)) - 1;
    values.get(at).copied().unwrap_or(0)
}
