//! The numbers of the status report for Prometheus, on a loopback port and only when asked for.
//!
//! ```text
//!   GET /metrics --> StatusReport --disk, network, function, core--> Families --> OpenMetrics text
//!                    /proc/self ----process----------------------------^
//! ```
//!
//! Counters carry what stays as it is: `device`, `queue`, `cause`. Where a queue runs changes, so it is in an `_info` family of its
//! own; a label that changes would end one series and begin another (docs/decisions/0030).

mod cores;
mod disk;
mod families;
mod function;
mod network;
mod process;
mod remote;

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ioplane_api::report::{FailureReport, StatusReport, VmReport};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Registry;

use crate::Daemon;
use crate::refusal::Refusal;
use families::{Families, Family, Labels};

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

#[derive(Debug)]
struct Scrape(StatusReport);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        let (status, families) = (&self.0, &mut Families(&mut encoder));
        let version = vec![("version", status.version.clone())];
        families.infos(Family::new("ioplane_build", "Version of the daemon"), std::iter::once(version))?;
        disk::write(status, families)?;
        network::write(status, families)?;
        function::write(status, families)?;
        remote::write(status, families)?;
        queues(status, families)?;
        vms(status, families)?;
        failures(status, families)?;
        cores::write(status, families)?;
        process::write(families)
    }
}

/// `none` for a queue or an uplink that does not run.
fn core_label(core: Option<u32>) -> String {
    core.map_or("none".to_owned(), |core| core.to_string())
}

/// Where queues run, to join their counters with.
fn queues(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let labels = |kind: &str, device: &str, queue: u16, core| -> Labels {
        vec![
            ("device", device.to_owned()),
            ("queue", queue.to_string()),
            ("kind", kind.to_owned()),
            ("core", core_label(core)),
        ]
    };
    let disks = status.disks.iter().flat_map(|disk| {
        disk.queues.iter().map(move |queue| labels("disk", &disk.name, queue.index, queue.core))
    });
    let nics = status.nics.iter().flat_map(|nic| {
        nic.queues.iter().map(move |queue| labels("nic", &nic.name, queue.index, queue.core))
    });
    families.infos(Family::new("ioplane_queue", "I/O core that a queue runs on"), disks.chain(nics))
}

/// Which VM uses which device.
fn vms(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let disks = status.disks.iter().map(|disk| ("disk", &disk.name, &disk.vm));
    let nics = status.nics.iter().map(|nic| ("nic", &nic.name, &nic.vm));
    let functions = status.functions.iter().map(|one| ("pci", &one.name, &one.vm));
    let samples = disks.chain(nics).chain(functions).filter_map(|(kind, device, vm)| {
        let VmReport { name, pid } = vm.as_ref()?;
        Some(vec![
            ("device", device.clone()),
            ("kind", kind.to_owned()),
            ("vm", name.clone()),
            ("pid", pid.to_string()),
        ])
    });
    families.infos(Family::new("ioplane_device_vm", "VM that a device is connected to"), samples)
}

/// What is to be served and cannot be. Why is in the status report: a text for people is no label, each wording would be a series.
fn failures(status: &StatusReport, families: &mut Families<'_, '_>) -> std::fmt::Result {
    let all = status.failures();
    let labels =
        |one: &FailureReport| -> Labels { vec![("device", one.name.clone()), ("kind", one.kind.clone())] };
    let family =
        Family::new("ioplane_not_served", "1 for what is configured or was added and cannot be served");
    families.gauges(family, all.iter().map(|one| (labels(one), 1)))?;
    let next = all.iter().filter_map(|one| Some((labels(one), one.retry?.next_ms? as f64 / 1000.0)));
    families.fractions(Family::seconds("ioplane_next_try", "Time until serving it is tried again"), next)
}
