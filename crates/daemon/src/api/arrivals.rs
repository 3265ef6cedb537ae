//! VMs that are expected from other hosts, and hosts to which VMs move.

use axum::extract::{Path, State};
use ioplane_api::report::DoneReport;
use ioplane_api::request::{ExpectForm, MovePeerForm};

use super::form::{Body, form};
use super::{Answer, Own, json, put, whole};

/// Longest name of a VM, bytes.
const LONGEST: usize = 4096;

fn done(line: String) -> Answer {
    json(DoneReport { done: vec![line] })
}

pub async fn expected(State(daemon): Own) -> Answer {
    json(daemon.arrivals.report())
}

pub async fn expect(State(daemon): Own, Path(vm): Path<String>, body: Body) -> Answer {
    let form: ExpectForm = form(body)?;
    if vm.is_empty() || vm.len() > LONGEST {
        let error = format!("a name of {} bytes", vm.len());
        return Err(crate::refusal::Refusal::invalid(error, "give QEMU's -name"));
    }
    whole(daemon.may_change()?, async move {
        let (new, report) = daemon.expect(&vm, form).await?;
        put(new, report)
    })
    .await
}

pub async fn unexpect(State(daemon): Own, Path(vm): Path<String>) -> Answer {
    daemon.arrivals.end(&vm)?;
    tracing::info!(vm, "it is expected no longer");
    done(format!("VM {vm} is expected no longer"))
}

pub async fn peer(State(daemon): Own, Path(vm): Path<String>, body: Body) -> Answer {
    let form: MovePeerForm = form(body)?;
    json(daemon.peers.put(&vm, form).await?)
}

pub async fn end_peer(State(daemon): Own, Path(vm): Path<String>) -> Answer {
    done(match daemon.peers.remove(&vm) {
        true => format!("the other host is not reached for VM {vm} any more"),
        false => format!("no other host was reached for VM {vm}: nothing to do"),
    })
}
