//! The same numbers for Prometheus, on a loopback port and only when asked for.

mod function;
mod network;

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ioplane_api::report::{
    CoreReport, Counts, DiskReport, FailureReport, QueueReport, ServedState, StatusReport,
};
use ioplane_device::Histogram;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::Daemon;
use crate::refusal::Refusal;

/// What is served there.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new().route("/metrics", get(metrics)).with_state(daemon)
}

async fn metrics(State(daemon): State<Arc<Daemon>>) -> Response {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(daemon.status().await)));
    let mut text = String::new();
    match prometheus_client::encoding::text::encode(&mut text, &registry) {
        Ok(()) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => Refusal::failed(error.to_string(), "this is a bug: report it").into_response(),
    }
}

/// One scrape.
#[derive(Debug)]
struct Scrape(StatusReport);

type Labels = Vec<(&'static str, String)>;

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let StatusReport { disks, cores, .. } = &self.0;
        let encoder = &mut encoder;
        let queue = |disk: &DiskReport, queue: &QueueReport| -> Labels {
            let core = queue.core.map_or("none".to_owned(), |core| core.to_string());
            vec![("disk", disk.name.clone()), ("queue", queue.index.to_string()), ("core", core)]
        };
        let counter = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&Counts) -> u64| {
            let all = disks.iter().flat_map(|disk| disk.queues.iter().map(move |q| (disk, q)));
            each(encoder, name, help, all.map(|(disk, q)| (queue(disk, q), ConstCounter::new(of(&q.counts)))))
        };
        counter(encoder, "ioplane_requests", "Requests answered", |c| c.requests)?;
        counter(encoder, "ioplane_read_bytes", "Bytes read by the guest", |c| c.bytes_read)?;
        counter(encoder, "ioplane_written_bytes", "Bytes written by the guest", |c| c.bytes_written)?;
        counter(encoder, "ioplane_kicks", "Kicks of the guest, each an exit", |c| c.kicks)?;
        counter(
            encoder,
            "ioplane_kicks_avoided",
            "Batches of requests that were found without a kick",
            |c| c.kicks_avoided,
        )?;
        counter(encoder, "ioplane_interrupts", "Interrupts sent to the guest", |c| c.interrupts)?;
        counter(encoder, "ioplane_interrupts_avoided", "Batches answered without an interrupt", |c| {
            c.interrupts_avoided
        })?;
        counter(encoder, "ioplane_guest_faults", "Faults of the guest, each stopping a queue", |c| c.faults)?;
        counter(encoder, "ioplane_replayed", "Requests done again after a crash of the daemon", |c| {
            c.replayed
        })?;

        let causes = disks.iter().flat_map(|disk| {
            disk.queues.iter().flat_map(move |q| {
                let errors = q.counts.errors;
                [
                    ("io", errors.io),
                    ("space", errors.space),
                    ("request", errors.request),
                    ("unsupported", errors.unsupported),
                ]
                .map(|(cause, count)| {
                    let mut labels = queue(disk, q);
                    labels.push(("cause", cause.to_owned()));
                    (labels, ConstCounter::new(count))
                })
            })
        });
        each(encoder, "ioplane_errors", "Requests that failed, by cause", causes)?;

        let all = || disks.iter().flat_map(|disk| disk.queues.iter().map(move |q| (disk, q)));
        let help = "Time from taking a request to answering it; the sum is reckoned from the buckets";
        let latency = all().map(|(disk, q)| (queue(disk, q), q.counts.latency.as_slice()));
        times(encoder, "ioplane_request_seconds", help, latency)?;
        let help = "How long a request may have waited for the core; see docs/guide/status.md";
        let wait = all().map(|(disk, q)| (queue(disk, q), q.counts.wait.as_slice()));
        times(encoder, "ioplane_wait_seconds", help, wait)?;

        let gauge = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&DiskReport) -> i64| {
            let labels = |disk: &DiskReport| -> Labels { vec![("disk", disk.name.clone())] };
            each(encoder, name, help, disks.iter().map(|disk| (labels(disk), ConstGauge::new(of(disk)))))
        };
        gauge(encoder, "ioplane_disk_connected", "1 while a front end is connected", |d| d.connected.into())?;
        gauge(encoder, "ioplane_disk_bytes", "Size of the disk", |d| d.size as i64)?;
        gauge(encoder, "ioplane_disk_failed", "1 while the disk cannot be served", |d| {
            (d.state == ServedState::Failed).into()
        })?;

        let failures = self.0.failures();
        let labels =
            |one: &FailureReport| -> Labels { vec![("kind", one.kind.clone()), ("name", one.name.clone())] };
        let reasons = failures.iter().map(|one| {
            let mut labels = labels(one);
            labels.push(("reason", one.error.clone()));
            (labels, ConstGauge::new(1i64))
        });
        each(encoder, "ioplane_not_served", "1 for what is to be served and cannot be, and why", reasons)?;
        let next = failures.iter().filter_map(|one| {
            let left = one.retry?.next_ms? as f64 / 1000.0;
            Some((labels(one), ConstGauge::new(left)))
        });
        each(encoder, "ioplane_next_try_seconds", "Time until that is tried again", next)?;

        network::encode(&self.0, encoder)?;
        function::encode(&self.0, encoder)?;
        network::vms(&self.0, encoder)?;

        let labels = |core: &CoreReport| -> Labels { vec![("core", core.id.to_string())] };
        let gauge = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&CoreReport) -> f64| {
            each(encoder, name, help, cores.iter().map(|core| (labels(core), ConstGauge::new(of(core)))))
        };
        gauge(encoder, "ioplane_core_busy_ratio", "Share of time spent on work", |c| c.busy_percent / 100.0)?;
        gauge(encoder, "ioplane_core_seats", "Queues on the core", |c| f64::from(c.seats))?;
        gauge(encoder, "ioplane_core_polled", "1 while polled, 0 while notified", |c| {
            f64::from(u8::from(c.notify == "polled"))
        })?;
        let counter = |encoder: &mut DescriptorEncoder<'_>, name, help, of: fn(&CoreReport) -> f64| {
            each(encoder, name, help, cores.iter().map(|core| (labels(core), ConstCounter::new(of(core)))))
        };
        counter(encoder, "ioplane_core_sleeps", "Times the core went to sleep", |c| c.sleeps as f64)?;
        counter(encoder, "ioplane_core_wakes", "Times the core was woken", |c| c.wakes as f64)?;
        counter(encoder, "ioplane_core_cpu_seconds", "Processor time of the core", |c| c.cpu_us as f64 / 1e6)
    }
}

/// One family: a metric for each set of labels.
fn each<M: EncodeMetric>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    metrics: impl Iterator<Item = (Labels, M)>,
) -> Result<(), std::fmt::Error> {
    let mut metrics = metrics.peekable();
    let Some((_, first)) = metrics.peek() else { return Ok(()) };
    let mut family = encoder.encode_descriptor(name, help, None, first.metric_type())?;
    for (labels, metric) in metrics {
        metric.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// One family of histograms.
fn times<'t>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    all: impl Iterator<Item = (Labels, &'t [u64])>,
) -> Result<(), std::fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (labels, buckets) in all {
        let (sum, count, buckets) = seconds(buckets);
        family.encode_family(&labels)?.encode_histogram::<Labels>(sum, count, &buckets, None)?;
    }
    Ok(())
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
