//! HTTP with JSON on the control socket: what the command line and other programs talk to.
//!
//! [`Operation`] lists what there is; here is who does it. `GET /v1/openapi.json` is that list for programs. A PUT of what is so already
//! answers 200, of what is new 201, of what differs 409.
//!
//! Errors are problems of RFC 9457, [`RefusalBody`](ioplane_api::refusal::RefusalBody). A request that has been read is carried out to its end, whether or not its
//! client stays.

mod arrivals;
mod configuration;
mod cores;
mod daemon;
mod devices;
mod disk;
mod export;
mod form;
mod function;
mod group;
mod moving;
mod network;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::QueryRejection;
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{self, MethodFilter, MethodRouter};
use ioplane_api::operation::{Method, Operation};
use ioplane_api::refusal::{Code, MEDIA, RefusalKind};
use ioplane_api::spec::Form;
use ioplane_nbd::import::ClaimWish;
use serde::{Deserialize, Serialize};

use self::form::{Body, form, form_or_usual, form_up_to};
use super::Daemon;
use crate::refusal::Refusal;

/// Largest body: a form is some hundred bytes.
const BODY: usize = 64 << 10;
/// Where to look for what there is.
const LISTS: &str =
    "GET /v1/openapi.json lists what there is; docs/guide/errors.md explains the codes of errors";

type Own = State<Arc<Daemon>>;
pub(super) type Answer = Result<Response, Refusal>;

/// The whole API.
pub fn router(daemon: Arc<Daemon>) -> Router {
    let mut router = Router::new();
    for operation in Operation::ALL {
        let handler = route(*operation);
        if let Some(old) = operation.old_path() {
            router = router.route(old, handler.clone());
        }
        router = router.route(operation.path(), handler);
    }
    router
        .fallback(async || Refusal::missing("there is no such resource", LISTS).coded(Code::UnknownRoute))
        .method_not_allowed_fallback(async || {
            Refusal::method("this resource does not know this method", LISTS)
        })
        .with_state(daemon)
}

/// What answers an operation, with the bounds of its body and of its query.
pub(super) fn route(operation: Operation) -> MethodRouter<Arc<Daemon>> {
    let longest = match operation {
        Operation::LoadFunction | Operation::TakeFunction => function::STATE,
        _ => BODY,
    };
    let handler = handler(operation).route_layer(DefaultBodyLimit::max(longest));
    handler.route_layer(middleware::from_fn_with_state(operation, check_query))
}

fn handler(operation: Operation) -> MethodRouter<Arc<Daemon>> {
    let method = match operation.method() {
        Method::Get => MethodFilter::GET,
        Method::Put => MethodFilter::PUT,
        Method::Post => MethodFilter::POST,
        Method::Patch => MethodFilter::PATCH,
        Method::Delete => MethodFilter::DELETE,
    };
    match operation {
        Operation::Status => routing::on(method, daemon::status),
        Operation::Version => routing::on(method, daemon::version),
        Operation::Health => routing::on(method, daemon::health),
        Operation::Events => routing::on(method, daemon::events),
        Operation::OpenApi => routing::on(method, daemon::openapi),
        Operation::Explain => routing::on(method, daemon::explain),
        Operation::UnsavedConfiguration => routing::on(method, configuration::preview),
        Operation::SaveConfiguration => routing::on(method, configuration::save),
        Operation::Reload => routing::on(method, daemon::reload),
        Operation::Upgrade => routing::on(method, daemon::upgrade),
        Operation::Disks => routing::on(method, disk::disks),
        Operation::Disk => routing::on(method, disk::disk),
        Operation::PutDisk => routing::on(method, disk::add),
        Operation::ChangeDisk => routing::on(method, disk::change),
        Operation::RemoveDisk => routing::on(method, disk::remove),
        Operation::AcceptDisk => routing::on(method, disk::accept),
        Operation::PutMigrationSocket => routing::on(method, disk::open_migration_socket),
        Operation::RemoveMigrationSocket => routing::on(method, disk::close_migration_socket),
        Operation::StartSwap => routing::on(method, disk::start_swap),
        Operation::CancelSwap => routing::on(method, disk::cancel_swap),
        Operation::StartVerify => routing::on(method, disk::start_verify),
        Operation::CancelVerify => routing::on(method, disk::cancel_verify),
        Operation::Exports => routing::on(method, export::exports),
        Operation::Export => routing::on(method, export::export),
        Operation::PutExport => routing::on(method, export::add),
        Operation::ChangeExport => routing::on(method, export::change),
        Operation::ResizeExport => routing::on(method, export::resize),
        Operation::RemoveExport => routing::on(method, export::remove),
        Operation::Devices => routing::on(method, devices::devices),
        Operation::ForgetDevice => routing::on(method, devices::forget),
        Operation::ReleaseExport => routing::on(method, export::release),
        Operation::Switches => routing::on(method, network::switches),
        Operation::Switch => routing::on(method, network::switch),
        Operation::PutSwitch => routing::on(method, network::add_switch),
        Operation::RemoveSwitch => routing::on(method, network::remove_switch),
        Operation::Nics => routing::on(method, network::nics),
        Operation::Nic => routing::on(method, network::nic),
        Operation::PutNic => routing::on(method, network::add_nic),
        Operation::ChangeNic => routing::on(method, network::set_nic),
        Operation::RemoveNic => routing::on(method, network::remove_nic),
        Operation::Capture => routing::on(method, network::capture),
        Operation::Groups => routing::on(method, group::groups),
        Operation::Group => routing::on(method, group::group),
        Operation::PutGroup => routing::on(method, group::add),
        Operation::ChangeGroup => routing::on(method, group::change),
        Operation::RemoveGroup => routing::on(method, group::remove),
        Operation::Functions => routing::on(method, function::functions),
        Operation::Function => routing::on(method, function::function),
        Operation::PutFunction => routing::on(method, function::add),
        Operation::RemoveFunction => routing::on(method, function::remove),
        Operation::QuiesceFunction => routing::on(method, function::quiesce),
        Operation::ResumeFunction => routing::on(method, function::resume),
        Operation::ResetFunction => routing::on(method, function::reset),
        Operation::SaveFunction => routing::on(method, function::save),
        Operation::LoadFunction => routing::on(method, function::load),
        Operation::MoveFunction => routing::on(method, function::exchange),
        Operation::CheckMoveFunction => routing::on(method, function::check_exchange),
        Operation::LogFunction => routing::on(method, function::log),
        Operation::EndLogFunction => routing::on(method, function::end_log),
        Operation::RestFunction => routing::on(method, function::rest),
        Operation::CheckTakeFunction => routing::on(method, function::check_take),
        Operation::SaidFunction => routing::on(method, function::said),
        Operation::GoAheadFunction => routing::on(method, function::go_ahead),
        Operation::ForgetAheadFunction => routing::on(method, function::forget_ahead),
        Operation::CarriedFunction => routing::on(method, function::carried),
        Operation::TakeFunction => routing::on(method, function::take),
        Operation::HoldVcpus => routing::on(method, function::hold_vcpus),
        Operation::Vcpus => routing::on(method, function::vcpus),
        Operation::KeepVcpus => routing::on(method, function::keep_vcpus),
        Operation::SetUpFunction => routing::on(method, function::set_up),
        Operation::WriteVectors => routing::on(method, function::write_vectors),
        Operation::ReplayFunction => routing::on(method, function::replay),
        Operation::ShowMove => routing::on(method, moving::show),
        Operation::NoteMove => routing::on(method, moving::note),
        Operation::EndMove => routing::on(method, moving::end),
        Operation::PutMovePeer => routing::on(method, arrivals::peer),
        Operation::RemoveMovePeer => routing::on(method, arrivals::end_peer),
        Operation::ExpectedVms => routing::on(method, arrivals::expected),
        Operation::ExpectVm => routing::on(method, arrivals::expect),
        Operation::UnexpectVm => routing::on(method, arrivals::unexpect),
        Operation::LeaveFunction => routing::on(method, function::leave),
        Operation::Cores => routing::on(method, cores::cores),
        Operation::AddCore => routing::on(method, cores::add),
        Operation::Core => routing::on(method, cores::core),
        Operation::ChangeCore => routing::on(method, cores::change),
        Operation::RetireCore => routing::on(method, cores::retire),
        Operation::Notify => routing::on(method, cores::notify),
        Operation::MoveQueue => routing::on(method, cores::move_queue),
        Operation::UnpinQueue => routing::on(method, cores::unpin),
        Operation::Pool => routing::on(method, cores::pool),
        Operation::Decisions => routing::on(method, cores::decisions),
    }
}

/// Refuses keys in the query that nobody reads: whoever writes one expects it to do something.
async fn check_query(State(operation): State<Operation>, request: Request, next: Next) -> Answer {
    let keys = request.uri().query().unwrap_or_default().split('&');
    let known = operation.query();
    let unknown = keys
        .map(|pair| pair.split('=').next().unwrap_or_default())
        .find(|key| !key.is_empty() && !known.iter().any(|known| known.name == *key));
    if let Some(key) = unknown {
        let known: Vec<String> = known.iter().map(|key| format!("?{}=", key.name)).collect();
        let remedy = match known.is_empty() {
            true => "leave it out: this resource has no query".to_owned(),
            false => format!("leave it out: there is only {}", known.join(", ")),
        };
        let error = format!("there is no {key:.40?} in the query of this resource");
        return Err(Refusal::new(Code::UnknownQuery, error, remedy).at(key));
    }
    Ok(next.run(request).await)
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let kind = self.code.kind();
        let status = StatusCode::from_u16(kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let answer = (status, [(CONTENT_TYPE, MEDIA)], axum::Json(self.body()));
        // Seconds.
        if kind == RefusalKind::Busy {
            ([(RETRY_AFTER, "1")], answer).into_response()
        } else {
            answer.into_response()
        }
    }
}

pub(super) fn json(report: impl Serialize) -> Answer {
    Ok(axum::Json(report).into_response())
}

/// What to do about a form `F` of which no field was sent.
fn send_one<F: Form>() -> String {
    format!("send {}", F::FIELDS.join(", or "))
}

fn created(report: impl Serialize) -> Answer {
    Ok((StatusCode::CREATED, axum::Json(report)).into_response())
}

/// What a PUT answers: whether it has made something, or found it so.
fn put(new: bool, report: impl Serialize) -> Answer {
    if new { created(report) } else { json(report) }
}

/// How something is to be taken away.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RemoveQuery {
    force: bool,
}

type Removal = Result<Query<RemoveQuery>, QueryRejection>;

fn removal(query: Removal) -> Result<bool, Refusal> {
    let Query(RemoveQuery { force }) = query
        .map_err(|bad| Refusal::invalid(bad.body_text(), "write ?force=true, or nothing").at("force"))?;
    Ok(force)
}

/// What of an export is to be released.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ReleaseQuery {
    force: bool,
    reservations: bool,
}

type Release = Result<Query<ReleaseQuery>, QueryRejection>;

/// Whether by force, and whether it is reservations.
fn release_of(query: Release) -> Result<(bool, bool), Refusal> {
    let Query(ReleaseQuery { force, reservations }) = query.map_err(|bad| {
        Refusal::invalid(bad.body_text(), "write ?force=true, ?reservations=true, both, or nothing")
    })?;
    Ok((force, reservations))
}

/// How a disk is to be added.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AddQuery {
    takeover: bool,
}

type Addition = Result<Query<AddQuery>, QueryRejection>;

fn addition(query: Addition) -> Result<ClaimWish, Refusal> {
    let Query(AddQuery { takeover }) = query.map_err(|bad| {
        Refusal::invalid(bad.body_text(), "write ?takeover=true, or nothing").at("takeover")
    })?;
    Ok(if takeover { ClaimWish::TakeOver } else { ClaimWish::New })
}

/// Does `work` to its end, whatever becomes of the request: dropping a change half-way would leave what is written down
/// behind what is served.
async fn whole<R: Send + 'static>(
    leave: tokio::sync::OwnedRwLockReadGuard<()>,
    work: impl Future<Output = Result<R, Refusal>> + Send + 'static,
) -> Result<R, Refusal> {
    // In a box, so that tokio's task is compiled once for each result, and not once for each caller.
    let work: Pin<Box<dyn Future<Output = Result<R, Refusal>> + Send>> = Box::pin(async move {
        let _leave = leave;
        work.await
    });
    tokio::spawn(work).await.unwrap_or_else(|error| Err(Refusal::bug(error.to_string())))
}
