//! Families of samples, as Prometheus wants them: the unit is the end of a name, `_total` that of a counter, `_info` that of labels
//! without a number. Names and labels: docs/decisions/0030.

use std::fmt::Result;
use std::sync::LazyLock;

use ioplane_device::Histogram;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

pub type Labels = Vec<(&'static str, String)>;

/// Name, unit and help of a family.
#[derive(Debug)]
pub struct Family {
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
}

impl Family {
    /// Things without a unit.
    pub fn new(name: &'static str, help: &'static str) -> Self {
        Family { name, unit: None, help }
    }

    /// Bytes: `_bytes` ends the name by itself.
    pub fn bytes(name: &'static str, help: &'static str) -> Self {
        Family { name, unit: Some(Unit::Bytes), help }
    }

    /// Rates: `_` and the unit end the name by themselves.
    pub fn rates(name: &'static str, unit: &'static str, help: &'static str) -> Self {
        Family { name, unit: Some(Unit::Other(unit.to_owned())), help }
    }

    /// Seconds: `_seconds` ends the name by itself.
    pub fn seconds(name: &'static str, help: &'static str) -> Self {
        Family { name, unit: Some(Unit::Seconds), help }
    }
}

/// Units of rates.
pub const REQUESTS_PER_SECOND: &str = "requests_per_second";
pub const BYTES_PER_SECOND: &str = "bytes_per_second";

/// Writes families to one page. A family without a sample is left out.
#[derive(Debug)]
pub struct Families<'p, 'e>(pub &'p mut DescriptorEncoder<'e>);

impl Families<'_, '_> {
    /// Counts, each since its device or core began.
    pub fn counters(&mut self, family: Family, samples: impl Iterator<Item = (Labels, u64)>) -> Result {
        self.each(&family, samples.map(|(labels, count)| (labels, ConstCounter::new(count))))
    }

    /// Counted time, in seconds.
    pub fn counted_seconds(
        &mut self,
        family: Family,
        samples: impl Iterator<Item = (Labels, f64)>,
    ) -> Result {
        self.each(&family, samples.map(|(labels, seconds)| (labels, ConstCounter::new(seconds))))
    }

    /// Whole numbers that go up and down.
    pub fn gauges(&mut self, family: Family, samples: impl Iterator<Item = (Labels, i64)>) -> Result {
        self.each(&family, samples.map(|(labels, value)| (labels, ConstGauge::new(value))))
    }

    /// Fractions that go up and down.
    pub fn fractions(&mut self, family: Family, samples: impl Iterator<Item = (Labels, f64)>) -> Result {
        self.each(&family, samples.map(|(labels, value)| (labels, ConstGauge::new(value))))
    }

    /// Labels to join other families with; `_info` ends the name by itself.
    pub fn infos(&mut self, family: Family, samples: impl Iterator<Item = Labels>) -> Result {
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let mut encoder = self.0.encode_descriptor(family.name, family.help, None, MetricType::Info)?;
        samples.try_for_each(|labels| encoder.encode_info(&labels))
    }

    /// Times, from the buckets of an [`Histogram`] of the device crate; in seconds.
    pub fn durations<'t>(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl Iterator<Item = (Labels, &'t [u64])>,
    ) -> Result {
        let mut samples = samples.peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let mut encoder =
            self.0.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Histogram)?;
        samples.try_for_each(|(labels, buckets)| {
            let (sum, count, buckets) = seconds(buckets);
            encoder.encode_family(&labels)?.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
        })
    }

    fn each<M: EncodeMetric>(
        &mut self,
        family: &Family,
        samples: impl Iterator<Item = (Labels, M)>,
    ) -> Result {
        let mut samples = samples.peekable();
        let Some((labels, first)) = samples.peek() else { return Ok(()) };
        let alone = labels.is_empty();
        let mut encoder =
            self.0.encode_descriptor(family.name, family.help, family.unit.as_ref(), first.metric_type())?;
        if alone && let Some((_, metric)) = samples.next() {
            return metric.encode(encoder);
        }
        samples.try_for_each(|(labels, metric)| metric.encode(encoder.encode_family(&labels)?))
    }
}

/// Powers of two of nanoseconds that are shown: from 1 us to 17 s.
const POWERS: std::ops::RangeInclusive<u32> = 10..=34;

/// Upper edges of a histogram's buckets, ns. The histogram does not show them; the quantile of a single count does.
static EDGES: LazyLock<Vec<u64>> = LazyLock::new(|| {
    let buckets = Histogram::default().snapshot().len();
    let single = |index| (0..buckets).map(|i| u64::from(i == index)).collect::<Vec<_>>();
    (0..buckets).map(|index| Histogram::quantile(&single(index), 1.0)).collect()
});

/// Sum in seconds, count, and buckets by powers of two, each without those below it.
fn seconds(latency: &[u64]) -> (f64, u64, Vec<(f64, u64)>) {
    let bounds = POWERS.map(|power| (1u64 << power) as f64 / 1e9).chain([f64::INFINITY]);
    let mut buckets: Vec<(f64, u64)> = bounds.map(|bound| (bound, 0)).collect();
    let mut sum = 0.0;
    for (edge, count) in EDGES.iter().zip(latency) {
        let edge = *edge as f64 / 1e9;
        sum += edge * *count as f64;
        if let Some(bucket) = buckets.iter_mut().find(|(bound, _)| edge <= *bound) {
            bucket.1 += count;
        }
    }
    (sum, latency.iter().sum(), buckets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_add_up() {
        let histogram = Histogram::default();
        for ns in [500, 1_000, 100_000, 3_000_000, 60_000_000_000] {
            histogram.record(ns, 2);
        }
        let (sum, count, buckets) = seconds(&histogram.snapshot());
        assert_eq!(count, 10);
        assert_eq!(buckets.iter().map(|b| b.1).sum::<u64>(), 10);
        assert_eq!((buckets[0].1, buckets[buckets.len() - 1].1), (4, 2), "{buckets:?}");
        assert!(sum > 120.0 && sum < 150.0, "{sum}");
        assert!(seconds(&[]).1 == 0);
    }
}
