//! The daemon itself: how it is, what happens in it, and what it is told to become.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use ioplane_api::openapi;
use ioplane_api::operation::JSON;
use ioplane_api::refusal::Code;
use ioplane_api::report::{DoneReport, HealthReport, HealthWord, ServedState, StatusReport, VersionReport};
use ioplane_api::request::UpgradeForm;
use ioplane_explain::{SECONDS, USUAL_SECONDS};
use serde::Deserialize;

use super::{Answer, Body, Own, form_or_usual, json, whole};
use crate::Daemon;
use crate::refusal::Refusal;

/// The document is the same as long as the process lives.
static DOCUMENT: LazyLock<String> =
    LazyLock::new(|| openapi::document(env!("CARGO_PKG_VERSION")).to_string());

pub async fn status(State(daemon): Own) -> Answer {
    json(daemon.status().await)
}

pub async fn version() -> Answer {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    json(VersionReport { version, api: vec!["v1".to_owned()], pid: std::process::id() })
}

pub async fn health(State(daemon): Own) -> Answer {
    json(health_of(&daemon.status().await))
}

fn health_of(status: &StatusReport) -> HealthReport {
    let failures = status.failures();
    let disks = status.disks.iter().map(|one| (&one.name, one.state));
    let nics = status.nics.iter().map(|one| (&one.name, one.state));
    let functions = status.functions.iter().map(|one| (&one.name, one.state));
    let exports = status.exports.iter().map(|one| (&one.name, one.state));
    let busy = disks
        .chain(nics)
        .chain(functions)
        .chain(exports)
        .filter(|(_, state)| matches!(state, ServedState::Opening | ServedState::Busy))
        .map(|(name, _)| name.clone());
    let busy: Vec<String> = busy.collect();
    let health = match (failures.is_empty(), busy.is_empty()) {
        (false, _) => HealthWord::Degraded,
        (true, false) => HealthWord::Busy,
        (true, true) => HealthWord::Ok,
    };
    HealthReport { health, failures, busy }
}

pub async fn events(State(daemon): Own) -> Answer {
    let end = left(&daemon);
    Ok(daemon.disks.context().events.stream(end))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ExplainQuery {
    seconds: u64,
}

impl Default for ExplainQuery {
    fn default() -> Self {
        ExplainQuery { seconds: USUAL_SECONDS }
    }
}

pub async fn explain(
    State(daemon): Own,
    Path(name): Path<String>,
    query: Result<Query<ExplainQuery>, QueryRejection>,
) -> Answer {
    let (least, most) = SECONDS.into_inner();
    let remedy = format!("write ?seconds=NUMBER, {least} to {most}");
    let refused = |error: String| Refusal::invalid(error, remedy.clone()).at("seconds");
    let Query(ExplainQuery { seconds }) = query.map_err(|bad| refused(bad.body_text()))?;
    if !SECONDS.contains(&seconds) {
        return Err(refused(format!("seconds = {seconds}")));
    }
    let (before, began) = (daemon.status().await, Instant::now());
    let missing = || {
        let error = format!("there is no disk, NIC, VM or group {name:.64?}");
        Refusal::missing(error, "ioplane status lists disks, NICs and groups, ioplane top the VMs")
    };
    if ioplane_explain::explain(&before, &before, 1.0, &name).is_none() {
        return Err(missing());
    }
    tokio::select! {
        () = tokio::time::sleep(Duration::from_secs(seconds)) => {}
        () = left(&daemon) => return Err(Refusal::busy("the devices are another process's now", "ask again")),
    }
    let after = daemon.status().await;
    let report = ioplane_explain::explain(&before, &after, began.elapsed().as_secs_f64(), &name);
    json(report.ok_or_else(missing)?)
}

/// Comes when everything is another process's.
pub fn left(daemon: &Daemon) -> impl Future<Output = ()> + Send + use<> {
    let mut left = daemon.handover.get().map(|context| context.left.subscribe());
    async move {
        match &mut left {
            Some(left) => drop(left.wait_for(Option::is_some).await),
            None => std::future::pending().await,
        }
    }
}

pub async fn openapi() -> Answer {
    Ok(([(CONTENT_TYPE, JSON)], DOCUMENT.as_str()).into_response())
}

pub async fn reload(State(daemon): Own) -> Answer {
    let done = whole(daemon.may_change()?, async move {
        daemon.reload().await.map_err(|problems| {
            Refusal::new(Code::Configuration, problems.to_string(), problems.after_reload())
        })
    });
    json(DoneReport { done: done.await? })
}

pub async fn upgrade(State(daemon): Own, body: Body) -> Answer {
    let form: UpgradeForm = form_or_usual(body)?;
    // To its end, like any change; what else changes something waits outside.
    let done = tokio::spawn(async move { daemon.upgrade(form).await }).await;
    json(done.unwrap_or_else(|error| Err(Refusal::bug(error.to_string())))?)
}
