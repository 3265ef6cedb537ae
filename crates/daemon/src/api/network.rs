//! Switches and NICs.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use ioplane_api::report::DoneReport;
use ioplane_api::request::LinkForm;
use ioplane_api::spec::{NicForm, SwitchForm};

use super::{Answer, Body, Own, RemoveQuery, created, force, form, json, whole};
use crate::capture::{self, CaptureQuery};
use crate::ledger::{NicRecord, SwitchRecord};
use crate::refusal::Refusal;
use crate::served::blocking;
use crate::shelf::OnFailure;

pub async fn switches(State(daemon): Own) -> Answer {
    json(daemon.switches.report())
}

pub async fn switch(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.switches.report_of(&name)?)
}

pub async fn add_switch(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: SwitchForm = form(body)?;
    let now = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    let leave = daemon.may_change()?;
    whole(
        leave,
        blocking(move || {
            daemon.switches.add(SwitchRecord { configured: None, now }, OnFailure::Forget)?;
            created(daemon.switches.report_of(&name)?)
        }),
    )
    .await
}

pub async fn remove_switch(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        let plugged = daemon.nics.records().into_values().find(|nic| nic.now.switch == name);
        if let Some(nic) = plugged {
            return Err(Refusal::conflict(
                format!("nic {} is plugged into switch {name}", nic.now.name),
                format!("`ioplane nic remove {}` first", nic.now.name),
            ));
        }
        let plugged =
            daemon.functions.records().into_values().find(|one| one.now.switch() == Some(name.as_str()));
        if let Some(function) = plugged {
            return Err(Refusal::conflict(
                format!("PCI function {} is plugged into switch {name}", function.now.name),
                format!("`ioplane pci remove {}` first", function.now.name),
            ));
        }
        daemon.switches.remove(&name, true).await?;
        daemon.sweep().await;
        json(DoneReport { done: vec![format!("switch {name} removed")] })
    })
    .await
}

pub async fn nics(State(daemon): Own) -> Answer {
    json(daemon.nics.report().await)
}

pub async fn nic(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.nics.report_of(&name).await?)
}

pub async fn add_nic(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: NicForm = form(body)?;
    let now = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    whole(daemon.may_change()?, async move {
        daemon.nics.add(NicRecord::added(now), OnFailure::Forget).await?;
        created(daemon.nics.report_of(&name).await?)
    })
    .await
}

pub async fn set_nic(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let LinkForm { link } = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.nics.served(&name)?.set_link(link).await?;
        tracing::info!(nic = name, link = link.word(), "link set");
        json(daemon.nics.report_of(&name).await?)
    })
    .await
}

pub async fn remove_nic(
    State(daemon): Own,
    Path(name): Path<String>,
    query: Result<Query<RemoveQuery>, QueryRejection>,
) -> Answer {
    let force = force(query)?;
    whole(daemon.may_change()?, async move {
        daemon.nics.remove(&name, force, true).await?;
        json(DoneReport { done: vec![format!("nic {name} removed")] })
    })
    .await
}

pub async fn capture(
    State(daemon): Own,
    Path(name): Path<String>,
    query: Result<Query<CaptureQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|bad| Refusal::invalid(bad.body_text(), "there is only ?snaplen=N"))?;
    let mut left = daemon.gone.get().map(|gone| gone.left.subscribe());
    let end = async move {
        match &mut left {
            Some(left) => drop(left.wait_for(Option::is_some).await),
            None => std::future::pending().await,
        }
    };
    capture::begin(&daemon.switches, &name, &query, end)
}
