//! HTTP with JSON on the control socket: what the command line and other programs talk to.
//!
//! | method and path | body | answer |
//! |---|---|---|
//! | `GET /v1/status` | | [`ioplane_api::report::StatusReport`] |
//! | `GET /v1/disks`, `GET /v1/disks/NAME` | | [`ioplane_api::report::DiskReport`], several or one |
//! | `PUT /v1/disks/NAME` | [`DiskForm`] | 201 and the disk |
//! | `PATCH /v1/disks/NAME` | [`ChangeForm`] | the disk |
//! | `DELETE /v1/disks/NAME?force=true` | | what was done |
//! | `PUT /v1/disks/NAME/twin` | [`TwinForm`] | 201 and the disk: it has a second socket |
//! | `DELETE /v1/disks/NAME/twin?force=true` | | the disk: it has none any more |
//! | `GET /v1/switches` | | [`ioplane_api::report::SwitchReport`], all |
//! | `GET /v1/switches/NAME` | | [`ioplane_api::report::SwitchTableReport`] |
//! | `PUT /v1/switches/NAME` | [`ioplane_api::spec::SwitchForm`] | 201 and the switch |
//! | `DELETE /v1/switches/NAME` | | what was done |
//! | `GET /v1/nics`, `GET /v1/nics/NAME` | | [`ioplane_api::report::NicReport`], several or one |
//! | `PUT /v1/nics/NAME` | [`ioplane_api::spec::NicForm`] | 201 and the NIC |
//! | `PATCH /v1/nics/NAME` | [`LinkForm`] | the NIC |
//! | `DELETE /v1/nics/NAME?force=true` | | what was done |
//! | `GET /v1/pci`, `GET /v1/pci/NAME` | | [`ioplane_api::report::FunctionReport`], several or one |
//! | `PUT /v1/pci/NAME` | [`ioplane_api::spec::FunctionForm`] | 201 and the PCI function |
//! | `DELETE /v1/pci/NAME?force=true` | | what was done |
//! | `POST /v1/pci/NAME/quiesce` | [`QuiesceForm`] | [`ioplane_api::report::RestReport`]: it is held |
//! | `POST /v1/pci/NAME/resume` | | what was done |
//! | `POST /v1/pci/NAME/reset` | | what was done |
//! | `POST /v1/pci/NAME/save` | [`QuiesceForm`] | [`ioplane_api::report::StateFileV1`] |
//! | `POST /v1/pci/NAME/load` | [`ioplane_api::report::StateFileV1`] | what was done |
//! | `GET /v1/ports/NAME/capture?snaplen=N` | | pcapng, until the client goes |
//! | `GET /v1/cores`, `GET /v1/cores/ID` | | [`ioplane_api::report::CoreReport`], several or one |
//! | `POST /v1/cores` | [`CoreForm`] | 201 and the core |
//! | `PATCH /v1/cores/ID` | [`NotifyForm`] | the core |
//! | `DELETE /v1/cores/ID` | | what was done |
//! | `PUT /v1/notify` | [`NotifyForm`] | all cores |
//! | `POST /v1/queues/move` | [`MoveForm`] | the disk, NIC or switch |
//! | `GET /v1/config/save`, `POST /v1/config/save` | | [`ioplane_api::report::SavedReport`]: what would be appended to the configuration, what was |
//! | `POST /v1/reload` | | what was done; 422 with every problem |
//! | `POST /v1/upgrade` | [`UpgradeForm`] | [`ioplane_api::report::UpgradeReport`], from the daemon that leaves |
//!
//! Errors are `{"error", "remedy"}` with 404, 405, 409, 413, 422, 500 or 503. A request that has been read is carried out to its
//! end, whether or not its client stays.

mod configuration;
mod function;
mod network;
mod twin;

use std::future::Future;
use std::sync::Arc;

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, patch, post, put};
use ioplane_api::refusal::{Kind, RefusalBody};
use ioplane_api::report::{CoreReport, DoneReport};
use ioplane_api::request::{ChangeForm, CoreForm, MoveForm, NotifyForm, UpgradeForm};
#[cfg(doc)]
use ioplane_api::request::{LinkForm, QuiesceForm, TwinForm};
use ioplane_api::size::Size;
use ioplane_api::spec::{BackingSpec, CoreSpec, DiskForm};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Daemon;
use super::ledger::DiskRecord;
use super::served::blocking;
use super::shelf::OnFailure;
use crate::refusal::Refusal;

/// Largest body: a form is some hundred bytes.
const BODY: usize = 64 << 10;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RemoveQuery {
    force: bool,
}

type Own = State<Arc<Daemon>>;
type Body = Result<Bytes, BytesRejection>;
type Answer = Result<Response, Refusal>;

/// The whole API.
pub fn router(daemon: Arc<Daemon>) -> Router {
    Router::new()
        .route("/v1/status", get(status))
        .route("/v1/disks", get(disks))
        .route("/v1/disks/{name}", get(disk).put(add).patch(change).delete(remove))
        .route("/v1/disks/{name}/twin", put(twin::open).delete(twin::close))
        .route("/v1/switches", get(network::switches))
        .route(
            "/v1/switches/{name}",
            get(network::switch).put(network::add_switch).delete(network::remove_switch),
        )
        .route("/v1/nics", get(network::nics))
        .route(
            "/v1/nics/{name}",
            get(network::nic).put(network::add_nic).patch(network::set_nic).delete(network::remove_nic),
        )
        .route("/v1/pci", get(function::functions))
        .route("/v1/pci/{name}", get(function::function).put(function::add).delete(function::remove))
        .route("/v1/pci/{name}/quiesce", post(function::quiesce))
        .route("/v1/pci/{name}/resume", post(function::resume))
        .route("/v1/pci/{name}/reset", post(function::reset))
        .route("/v1/pci/{name}/save", post(function::save))
        .route("/v1/pci/{name}/load", post(function::load).layer(DefaultBodyLimit::max(function::STATE)))
        .route("/v1/ports/{name}/capture", get(network::capture))
        .route("/v1/cores", get(cores).post(add_core))
        .route("/v1/cores/{id}", patch(set_core).get(core).delete(retire))
        .route("/v1/notify", put(notify))
        .route("/v1/queues/move", post(move_queue))
        .route("/v1/config/save", get(configuration::preview).post(configuration::save))
        .route("/v1/reload", post(reload))
        .route("/v1/upgrade", post(upgrade))
        .fallback(async || Refusal::missing("there is no such resource", "see the table in docs/guide"))
        .method_not_allowed_fallback(async || {
            Refusal::method("this resource does not know this method", "see the table in docs/guide")
        })
        .layer(DefaultBodyLimit::max(BODY))
        .with_state(daemon)
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = match self.kind {
            Kind::Missing => StatusCode::NOT_FOUND,
            Kind::Conflict => StatusCode::CONFLICT,
            Kind::Huge => StatusCode::PAYLOAD_TOO_LARGE,
            Kind::Method => StatusCode::METHOD_NOT_ALLOWED,
            Kind::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            Kind::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, axum::Json(RefusalBody { error: self.error, remedy: self.remedy })).into_response()
    }
}

fn json(report: impl Serialize) -> Answer {
    Ok(axum::Json(report).into_response())
}

fn created(report: impl Serialize) -> Answer {
    Ok((StatusCode::CREATED, axum::Json(report)).into_response())
}

/// A body as a form.
fn form<T: DeserializeOwned>(body: Body) -> Result<T, Refusal> {
    form_up_to(body, BODY)
}

/// The same of a resource with another limit.
fn form_up_to<T: DeserializeOwned>(body: Body, limit: usize) -> Result<T, Refusal> {
    let body = body.map_err(|rejected| match rejected.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            Refusal::huge(format!("a body of more than {limit} bytes"), "a form has some hundred")
        }
        _ => Refusal::invalid(rejected.body_text(), "send the body whole"),
    })?;
    serde_json::from_slice(&body).map_err(|error| {
        Refusal::invalid(format!("the body: {error}"), "send JSON with the fields of this resource")
    })
}

/// Does `work` to its end, whatever becomes of the request: dropping a change half-way would leave what is written down
/// behind what is served.
async fn whole<R: Send + 'static>(
    leave: tokio::sync::OwnedRwLockReadGuard<()>,
    work: impl Future<Output = Result<R, Refusal>> + Send + 'static,
) -> Result<R, Refusal> {
    let work = async move {
        let _leave = leave;
        work.await
    };
    tokio::spawn(work).await.unwrap_or_else(|error| {
        Err(Refusal::failed(error.to_string(), "this is a bug: report it with the log"))
    })
}

async fn status(State(daemon): Own) -> Answer {
    json(daemon.status().await)
}

async fn disks(State(daemon): Own) -> Answer {
    json(daemon.disks.report().await)
}

async fn disk(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.disks.report_of(&name).await?)
}

async fn add(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: DiskForm = form(body)?;
    let now = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    whole(daemon.may_change()?, async move {
        daemon.disks.add(DiskRecord::added(now), OnFailure::Forget).await?;
        created(daemon.disks.report_of(&name).await?)
    })
    .await
}

async fn change(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: ChangeForm = form(body)?;
    let backing = match form {
        ChangeForm {
            size: Some(size),
            path: None,
            memory: None,
            format: None,
            direct: None,
            engine: None,
            shrink,
        } => {
            return whole(daemon.may_change()?, async move {
                daemon.disks.served(&name)?.resize(size, shrink).await?;
                tracing::info!(disk = name, %size, "resized");
                json(daemon.disks.report_of(&name).await?)
            })
            .await;
        }
        ChangeForm { size: None, shrink: false, path: Some(path), memory: None, format, direct, engine } => {
            let (direct, engine) = (direct.unwrap_or_default(), engine.unwrap_or_default());
            BackingSpec::File { path, format, direct, engine }
        }
        ChangeForm {
            size: None,
            shrink: false,
            path: None,
            memory: Some(Size(bytes)),
            format: None,
            direct: None,
            engine: None,
        } => BackingSpec::Memory { bytes },
        _ => {
            let remedy = "send size (and shrink), or path (and format, direct, engine), or memory";
            return Err(Refusal::invalid("neither one change nor another", remedy));
        }
    };
    whole(daemon.may_change()?, async move {
        let text = backing.name();
        daemon.disks.served(&name)?.replace(backing).await?;
        tracing::info!(disk = name, backing = text, "backing replaced");
        json(daemon.disks.report_of(&name).await?)
    })
    .await
}

async fn remove(
    State(daemon): Own,
    Path(name): Path<String>,
    query: Result<Query<RemoveQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer {
    let force = force(query)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.remove(&name, force, true).await?;
        json(DoneReport { done: vec![format!("disk {name} removed")] })
    })
    .await
}

fn force(
    query: Result<Query<RemoveQuery>, axum::extract::rejection::QueryRejection>,
) -> Result<bool, Refusal> {
    let Query(RemoveQuery { force }) =
        query.map_err(|bad| Refusal::invalid(bad.body_text(), "there is only ?force=true"))?;
    Ok(force)
}

fn core_id(id: &str) -> Result<u32, Refusal> {
    id.parse().map_err(|_| Refusal::missing(format!("there is no I/O core {id:?}"), "cores have numbers"))
}

fn one_core(daemon: &Daemon, id: u32) -> Result<CoreReport, Refusal> {
    daemon.cores.check(id)?;
    let found = daemon.cores.report().into_iter().find(|core| core.id == id);
    found.ok_or_else(|| Refusal::busy(format!("I/O core {id} is only starting"), "ask again"))
}

async fn cores(State(daemon): Own) -> Answer {
    json(daemon.cores.report())
}

async fn core(State(daemon): Own, Path(id): Path<String>) -> Answer {
    json(one_core(&daemon, core_id(&id)?)?)
}

async fn add_core(State(daemon): Own, body: Body) -> Answer {
    let form: CoreForm = form(body)?;
    let mut spec = CoreSpec { cpu: form.cpu, ..CoreSpec::new(0) };
    spec.notify = form.notify.unwrap_or(spec.notify);
    spec.spin_us = form.spin_us.unwrap_or(spec.spin_us);
    spec.budget = form.budget.unwrap_or(spec.budget);
    spec.manners = form.manners.unwrap_or(spec.manners);
    whole(
        daemon.may_change()?,
        blocking(move || {
            let id = daemon.cores.start(spec, false, None)?;
            created(one_core(&daemon, id)?)
        }),
    )
    .await
}

fn set(daemon: &Daemon, id: Option<u32>, form: &NotifyForm) -> Result<(), Refusal> {
    if form.notify.is_none() && form.spin_us.is_none() {
        return Err(Refusal::invalid("nothing to change", "send notify or spin_us"));
    }
    let probe = CoreSpec { spin_us: form.spin_us.unwrap_or(0), ..CoreSpec::new(0) };
    let flaws = probe.flaws();
    if !flaws.is_empty() {
        return Err(Refusal::flaws(&flaws));
    }
    daemon.cores.set(id, |core| {
        core.notify = form.notify.unwrap_or(core.notify);
        core.spin_us = form.spin_us.unwrap_or(core.spin_us);
    })
}

async fn set_core(State(daemon): Own, Path(id): Path<String>, body: Body) -> Answer {
    let (id, form): (u32, NotifyForm) = (core_id(&id)?, form(body)?);
    whole(
        daemon.may_change()?,
        blocking(move || {
            set(&daemon, Some(id), &form)?;
            json(one_core(&daemon, id)?)
        }),
    )
    .await
}

async fn notify(State(daemon): Own, body: Body) -> Answer {
    let form: NotifyForm = form(body)?;
    whole(
        daemon.may_change()?,
        blocking(move || {
            set(&daemon, None, &form)?;
            json(daemon.cores.report())
        }),
    )
    .await
}

async fn retire(State(daemon): Own, Path(id): Path<String>) -> Answer {
    let id = core_id(&id)?;
    whole(
        daemon.may_change()?,
        blocking(move || {
            daemon.cores.retire(id)?;
            json(DoneReport { done: vec![format!("I/O core {id} retired")] })
        }),
    )
    .await
}

async fn move_queue(State(daemon): Own, body: Body) -> Answer {
    let MoveForm { disk, queue, core } = form(body)?;
    whole(daemon.may_change()?, async move {
        let name = disk;
        if daemon.nics.records().contains_key(&name) {
            daemon.nics.move_queue(&name, queue, core).await?;
            return json(daemon.nics.report_of(&name).await?);
        }
        if daemon.switches.switch(&name).is_ok() && !daemon.disks.records().contains_key(&name) {
            return blocking(move || {
                daemon.switches.move_uplink(&name, queue, core)?;
                json(daemon.switches.report_of(&name)?)
            })
            .await;
        }
        daemon.disks.move_queue(&name, queue, core).await?;
        json(daemon.disks.report_of(&name).await?)
    })
    .await
}

async fn reload(State(daemon): Own) -> Answer {
    let done = whole(daemon.may_change()?, async move {
        daemon.reload().await.map_err(|problems| {
            let remedy = "correct the lines named, then reload again; what was being served is still served";
            Refusal::invalid(problems.to_string(), remedy)
        })
    });
    json(DoneReport { done: done.await? })
}

async fn upgrade(State(daemon): Own, body: Body) -> Answer {
    let form: UpgradeForm = form(body)?;
    // To its end, like any change; what else changes something waits outside.
    let done = tokio::spawn(async move { daemon.upgrade(form).await }).await;
    json(done.unwrap_or_else(|error| {
        Err(Refusal::failed(error.to_string(), "this is a bug: report it with the log"))
    })?)
}
