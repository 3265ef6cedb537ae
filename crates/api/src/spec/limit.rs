//! What a guest may do per second with one disk, or with one NIC in one direction.

use std::ops::RangeInclusive;

use super::Flaw;
use crate::size::Size;

/// Requests or frames per second.
const RATES: RangeInclusive<u64> = 1..=100_000_000;
/// Bytes per second: one block at least.
const BANDWIDTHS: RangeInclusive<u64> = 4096..=1 << 40;
/// Bursts in requests or frames.
const BURSTS: RangeInclusive<u64> = 1..=1_000_000_000;
/// Bursts in bytes.
const BYTE_BURSTS: RangeInclusive<u64> = 1..=1 << 40;
/// What a burst is if nobody says: what the limit lets through in this part of a second.
const USUAL_BURST: u64 = 10;

/// Limits in one direction, without the names that their fields have in each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LimitsSpec {
    /// Requests or frames per second.
    pub rate: Option<u64>,
    /// How many of these may pass at once after a pause.
    pub rate_burst: Option<u64>,
    /// Bytes per second.
    pub bandwidth: Option<Size>,
    /// How many bytes may pass at once after a pause.
    pub bandwidth_burst: Option<Size>,
}

/// Names of the fields of one [`LimitsSpec`], in its order.
pub type LimitFields = [&'static str; 4];

/// A limit and the burst that holds.
fn with_burst(limit: Option<u64>, burst: Option<u64>) -> Option<(u64, u64)> {
    limit.map(|limit| (limit, burst.unwrap_or((limit / USUAL_BURST).max(1))))
}

impl LimitsSpec {
    /// Requests or frames per second, and the burst.
    pub fn rate(&self) -> Option<(u64, u64)> {
        with_burst(self.rate, self.rate_burst)
    }

    /// Bytes per second, and the burst in bytes.
    pub fn bandwidth(&self) -> Option<(u64, u64)> {
        with_burst(self.bandwidth.map(|size| size.0), self.bandwidth_burst.map(|size| size.0))
    }

    /// So many requests and bytes, 0 for none.
    pub fn reserved(iops: u64, bandwidth: Size) -> Self {
        LimitsSpec { rate: Some(iops), bandwidth: Some(bandwidth), ..LimitsSpec::default() }.asked()
    }

    /// As a form has them: 0 is no limit.
    pub(super) fn asked(self) -> Self {
        LimitsSpec {
            rate: self.rate.filter(|rate| *rate > 0),
            bandwidth: self.bandwidth.filter(|bandwidth| bandwidth.0 > 0),
            ..self
        }
    }

    /// With what a change says: what it leaves out stays. A limit that is taken away (0) takes its burst with it.
    pub fn changed(self, change: LimitsSpec) -> Self {
        let rate_burst = change.rate_burst.or(self.rate_burst.filter(|_| change.rate != Some(0)));
        let bandwidth_burst =
            change.bandwidth_burst.or(self.bandwidth_burst.filter(|_| change.bandwidth != Some(Size(0))));
        let (rate, bandwidth) = (change.rate.or(self.rate), change.bandwidth.or(self.bandwidth));
        LimitsSpec { rate, rate_burst, bandwidth, bandwidth_burst }.asked()
    }

    /// What is wrong with them.
    pub(super) fn flaws(&self, fields: LimitFields) -> Vec<Flaw> {
        let bytes = |size: Option<Size>| size.map(|size| size.0);
        let checks = [
            (self.rate, RATES, false),
            (self.rate_burst, BURSTS, false),
            (bytes(self.bandwidth), BANDWIDTHS, true),
            (bytes(self.bandwidth_burst), BYTE_BURSTS, true),
        ];
        let mut flaws = Vec::new();
        for (field, (value, range, sizes)) in fields.into_iter().zip(checks) {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let show = |n: u64| if sizes { Size(n).to_string() } else { n.to_string() };
                let remedy = format!("give {} to {}", show(*range.start()), show(*range.end()));
                flaws.push(Flaw::new(field, format!("{field} = {}", show(value)), remedy));
            }
        }
        flaws
    }

    /// Bursts without a limit. A flaw where somebody asks for them; a configuration that takes a limit away may leave behind the burst that
    /// was set at run time, which then says nothing.
    pub(super) fn lonely(&self, fields: LimitFields) -> Vec<Flaw> {
        let [rate, rate_burst, bandwidth, bandwidth_burst] = fields;
        let lonely = [
            (rate, rate_burst, self.rate.is_none() && self.rate_burst.is_some()),
            (bandwidth, bandwidth_burst, self.bandwidth.is_none() && self.bandwidth_burst.is_some()),
        ];
        let flaw = |(limit, burst, lonely): (&str, &'static str, bool)| {
            let remedy = format!("give {limit} as well, or leave it out");
            lonely.then(|| Flaw::new(burst, format!("{burst} without {limit}"), remedy))
        };
        lonely.into_iter().filter_map(flaw).collect()
    }

    /// For people, without bursts; `unit` is what the rate counts. Nothing without a limit.
    pub fn rates(&self, unit: &str) -> Option<String> {
        let rate = self.rate.map(|rate| format!("{rate} {unit} per second"));
        let all: Vec<String> =
            rate.into_iter().chain(self.bandwidth.map(|size| format!("{size} per second"))).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    /// For people; `unit` is what the rate counts. Nothing without a limit.
    pub fn words(&self, unit: &str) -> Option<String> {
        let rate = self.rate().map(|(rate, burst)| format!("{rate} {unit} per second (burst {burst})"));
        let bandwidth = self.bandwidth().map(|(bytes, burst)| {
            let (bytes, burst) = (Size(bytes), Size(burst));
            format!("{bytes} per second (burst {burst})")
        });
        let all: Vec<String> = [rate, bandwidth].into_iter().flatten().collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: LimitFields = crate::spec::DiskSpec::LIMITS;

    #[test]
    fn a_change_leaves_alone_what_it_does_not_name() {
        let all = LimitsSpec {
            rate: Some(1000),
            rate_burst: Some(5),
            bandwidth: Some(Size(1 << 20)),
            bandwidth_burst: None,
        };
        let none = LimitsSpec::default();
        assert_eq!(all.changed(none), all);
        assert_eq!(none.changed(all), all);
        let changed = all.changed(LimitsSpec { rate: Some(0), ..none });
        assert_eq!(changed, LimitsSpec { rate: None, rate_burst: None, ..all });
        assert_eq!(changed.changed(LimitsSpec { bandwidth: Some(Size(0)), ..none }), none);
        assert_eq!((all.rate(), all.bandwidth()), (Some((1000, 5)), Some((1 << 20, (1 << 20) / 10))));
        assert_eq!(LimitsSpec { rate: Some(3), ..none }.rate(), Some((3, 1)));
    }

    #[test]
    fn flaws_name_their_field() {
        let flaws = |spec: LimitsSpec| {
            let flaws = [spec.flaws(FIELDS), spec.lonely(FIELDS)].concat();
            assert!(flaws.iter().all(|flaw| !flaw.remedy.is_empty()));
            flaws.into_iter().map(|flaw| flaw.field).collect::<Vec<_>>()
        };
        let none = LimitsSpec::default();
        assert_eq!(flaws(none), Vec::<&str>::new());
        assert_eq!(flaws(LimitsSpec { rate: Some(100_000_001), ..none }), ["iops_limit"]);
        assert_eq!(flaws(LimitsSpec { bandwidth: Some(Size(4095)), ..none }), ["bandwidth_limit"]);
        assert_eq!(flaws(LimitsSpec { rate_burst: Some(5), ..none }), ["iops_burst"]);
        assert_eq!(flaws(LimitsSpec { bandwidth_burst: Some(Size(5)), ..none }), ["bandwidth_burst"]);
        let burst = LimitsSpec { rate: Some(1), rate_burst: Some(0), ..none };
        assert_eq!(flaws(burst), ["iops_burst"]);
    }

    #[test]
    fn limits_in_words() {
        let limits = LimitsSpec { rate: Some(500), bandwidth: Some(Size(10 << 20)), ..LimitsSpec::default() };
        let words = "500 frames per second (burst 50), 10M per second (burst 1M)";
        assert_eq!(limits.words("frames").as_deref(), Some(words));
        assert_eq!(limits.rates("frames").as_deref(), Some("500 frames per second, 10M per second"));
        assert_eq!(LimitsSpec::default().words("frames").or(LimitsSpec::default().rates("frames")), None);
    }
}
