//! What of this daemon's interface the host reaches from which a VM comes: the functions and disks that the VM's QEMU here uses, and the steps of the
//! former until the guest runs here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, Request, State};
use axum::middleware::{self, Next};
use axum::routing::{delete, get};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use ioplane_api::operation::{Method, Operation};
use ioplane_api::refusal::Code;
use ioplane_api::report::{ArrivalWord, DoneReport, PoolReport, ServedState, StatusReport, VmReport};
use ioplane_netbus::NetbusError;
use ioplane_netbus::channel::ChannelRequest;
use tokio::sync::watch;

use super::{ExpectedVm, monitor};
use crate::Daemon;
use crate::api::{Answer, json, route};
use crate::refusal::Refusal;

/// The steps that are taken here.
const STEPS: [Operation; 10] = [
    Operation::Function,
    Operation::CheckTakeFunction,
    Operation::GoAheadFunction,
    Operation::ForgetAheadFunction,
    Operation::TakeFunction,
    Operation::HoldVcpus,
    Operation::WriteVectors,
    Operation::ReplayFunction,
    Operation::RestFunction,
    Operation::LeaveFunction,
];
/// For the answer that is on its way when it ends.
pub(super) const LAST: Duration = Duration::from_secs(2);

/// This daemon, and the VM that a connection is about.
#[derive(Clone)]
struct Parties(Arc<Daemon>, Arc<ExpectedVm>);

type Here = State<Parties>;

/// One connection, from its greeting to its end.
pub async fn attend(
    arrival: ChannelRequest,
    daemon: &Arc<Daemon>,
    one: &Arc<ExpectedVm>,
    ended: &mut watch::Receiver<bool>,
) -> Result<(), NetbusError> {
    if let Err(why) = monitor::may_come(daemon, one).await {
        return arrival.refuse(&why).await;
    }
    let channel = arrival.admit().await?;
    let service = TowerToHyperService::new(router(daemon.clone(), one.clone()));
    let connection = http1::Builder::new().serve_connection(TokioIo::new(channel), service);
    tokio::pin!(connection);
    let end = tokio::select! {
        served = connection.as_mut() => return closed(served),
        _ = ended.wait_for(|ended| *ended) => connection.as_mut(),
    };
    end.graceful_shutdown();
    match tokio::time::timeout(LAST, connection).await {
        Ok(served) => closed(served),
        Err(_) => Ok(()),
    }
}

/// Whoever goes in the middle is no news.
fn closed(served: hyper::Result<()>) -> Result<(), NetbusError> {
    match served {
        Err(error) if error.is_parse() => Err(NetbusError::Malformed(error.to_string())),
        _ => Ok(()),
    }
}

fn router(daemon: Arc<Daemon>, one: Arc<ExpectedVm>) -> Router {
    let here = Parties(daemon.clone(), one);
    let mut steps = Router::new();
    for operation in STEPS {
        let admitted = middleware::from_fn_with_state((here.clone(), operation), admit);
        steps = steps.route(operation.path(), route(operation).route_layer(admitted));
    }
    Router::new()
        .route(Operation::Status.path(), get(status))
        .route(Operation::Disks.path(), get(disks))
        .route(Operation::ExpectedVms.path(), get(expected))
        .route(Operation::UnexpectVm.path(), delete(settled))
        .with_state(here)
        .merge(steps.with_state(daemon))
        .fallback(async || {
            let remedy = "whoever administers that host can do it there";
            Refusal::missing("a host that moves a VM here does not reach that", remedy)
                .coded(Code::UnknownRoute)
        })
}

fn is_of(vm: Option<&VmReport>, one: &ExpectedVm) -> bool {
    vm.is_some_and(|vm| one.pid() == Some(vm.pid))
}

/// What the VM uses, and nothing else of this host.
async fn status(State(Parties(daemon, one)): Here) -> Answer {
    is_there(&daemon, &one).await?;
    json(of_the_vm(daemon.status().await, &one))
}

async fn disks(State(Parties(daemon, one)): Here) -> Answer {
    is_there(&daemon, &one).await?;
    json(of_the_vm(daemon.status().await, &one).disks)
}

/// A QEMU that libvirt starts may have come since the connection began, or may be another one.
async fn is_there(daemon: &Arc<Daemon>, one: &Arc<ExpectedVm>) -> Result<(), Refusal> {
    if !one.libvirt {
        return Ok(());
    }
    monitor::look(daemon, one).await.map_err(|unseen| {
        let place = one.qmp.display();
        let remedy = format!(
            "the VM's definition there needs `-qmp unix:{place},server=on,wait=off`; see what libvirt says there"
        );
        Refusal::conflict(unseen.to_string(), remedy)
    })
}

/// What is expected of that host: this VM.
async fn expected(State(Parties(_, one)): Here) -> Answer {
    json(vec![one.report()])
}

fn of_the_vm(mut status: StatusReport, one: &ExpectedVm) -> StatusReport {
    status.disks.retain(|disk| is_of(disk.vm.as_ref(), one));
    status.functions.retain(|function| is_of(function.vm.as_ref(), one));
    StatusReport {
        version: status.version,
        pid: status.pid,
        uptime_s: status.uptime_s,
        config: PathBuf::new(),
        disks: status.disks,
        switches: Vec::new(),
        nics: Vec::new(),
        groups: Vec::new(),
        functions: status.functions,
        exports: Vec::new(),
        cores: Vec::new(),
        pool: PoolReport::default(),
        decisions: Vec::new(),
        upgrade: None,
    }
}

/// The other host says that all is done: it is expected no longer.
async fn settled(State(Parties(daemon, one)): Here, Path(name): Path<String>) -> Answer {
    if name != one.vm {
        return Err(Refusal::missing(format!("no VM {name} is expected"), "it is of another move"));
    }
    daemon.arrivals.remove(&one);
    tracing::info!(vm = one.vm, from = %one.from, "its move here has come to its end");
    json(DoneReport { done: vec![format!("the move of {} has come to its end", one.vm)] })
}

/// A step of one of the VM's functions, as long as the guest is not this host's.
async fn admit(
    State((Parties(daemon, one), operation)): State<(Parties, Operation)>,
    Path(name): Path<String>,
    request: Request,
    next: Next,
) -> Answer {
    let vm = &one.vm;
    let other = || {
        Refusal::missing(
            format!("VM {vm} has no PCI function {name} there"),
            "add it there by this name, and start its QEMU with what `ioplane qemu-args` prints there",
        )
    };
    let report = daemon.functions.report_of(&name).await.map_err(|_| other())?;
    if report.state == ServedState::Busy {
        return Err(Refusal::busy(format!("PCI function {name} is busy"), "try again in a moment"));
    }
    if !report.connected || !is_of(report.vm.as_ref(), &one) {
        return Err(other());
    }
    if operation.method() != Method::Get {
        if one.state() == ArrivalWord::Arrived {
            return Err(Refusal::conflict(format!("VM {vm} has arrived: it is the other host's"), ""));
        }
        // That is asked before, or when nothing comes.
        if !matches!(operation, Operation::CheckTakeFunction | Operation::ForgetAheadFunction) {
            one.begin();
        }
        if operation == Operation::GoAheadFunction {
            one.ahead().insert(name);
        }
    }
    Ok(next.run(request).await)
}
