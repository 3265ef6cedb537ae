//! Switches and NICs.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use ioplane_api::refusal::Code;
use ioplane_api::report::{DoneReport, EventWord};
use ioplane_api::spec::{Form, LimitsSpec, NicChangeForm, NicForm, SwitchForm};

use super::daemon::left;
use super::{Answer, Body, Own, Removal, form, form_or_usual, json, put, removal, whole};
use crate::capture::{self, CaptureQuery};
use crate::refusal::Refusal;
use crate::served::blocking;

pub async fn switches(State(daemon): Own) -> Answer {
    json(daemon.switches.report())
}

pub async fn switch(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.switches.report_of(&name)?)
}

pub async fn add_switch(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: SwitchForm = form_or_usual(body)?;
    let wanted = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    let leave = daemon.may_change()?;
    whole(
        leave,
        blocking(move || {
            let new = daemon.switches.put(wanted)?;
            put(new, daemon.switches.report_of(&name)?)
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
            )
            .coded(Code::InUse));
        }
        let plugged =
            daemon.functions.records().into_values().find(|one| one.now.switch() == Some(name.as_str()));
        if let Some(function) = plugged {
            return Err(Refusal::conflict(
                format!("PCI function {} is plugged into switch {name}", function.now.name),
                format!("`ioplane pci remove {}` first", function.now.name),
            )
            .coded(Code::InUse));
        }
        daemon.switches.remove(&name, true).await?;
        daemon.sweep().await;
        json(DoneReport { done: vec![format!("switch {name} removed")] })
    })
    .await
}

pub async fn nics(State(daemon): Own) -> Answer {
    json(daemon.reports(&daemon.nics).await)
}

pub async fn nic(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.report_of(&daemon.nics, &name).await?)
}

pub async fn add_nic(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: NicForm = form(body)?;
    let wanted = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    whole(daemon.may_change()?, async move {
        let new = daemon.nics.put(wanted).await?;
        put(new, daemon.report_of(&daemon.nics, &name).await?)
    })
    .await
}

pub async fn set_nic(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let change: NicChangeForm = form(body)?;
    if change == NicChangeForm::default() {
        return Err(Refusal::invalid("no change", format!("send {}", NicChangeForm::FIELDS.join(", or "))));
    }
    whole(daemon.may_change()?, async move {
        daemon.nics.served(&name)?.change(change.clone()).await?;
        let report = daemon.report_of(&daemon.nics, &name).await?;
        let words = |limits: LimitsSpec| limits.words("frames").unwrap_or("none".to_owned());
        let link = change.link.map(|link| format!("link {}", link.word()));
        let sent = (change.tx_limits() != LimitsSpec::default())
            .then(|| format!("limits of what it sends: {}", words(report.tx_limits())));
        let received = (change.rx_limits() != LimitsSpec::default())
            .then(|| format!("limits of what it receives: {}", words(report.rx_limits())));
        let group =
            change.group.as_ref().map(|_| format!("group: {}", report.group.as_deref().unwrap_or("none")));
        let changed = [link, sent, received, group].into_iter().flatten().collect::<Vec<_>>().join(", ");
        tracing::info!(nic = name, changed, "set");
        daemon.nics.tell(EventWord::Changed, &name, &changed);
        json(report)
    })
    .await
}

pub async fn remove_nic(State(daemon): Own, Path(name): Path<String>, query: Removal) -> Answer {
    let force = removal(query)?;
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
    let wrong =
        |bad: QueryRejection| Refusal::invalid(bad.body_text(), "write ?snaplen=NUMBER").at("snaplen");
    let Query(query) = query.map_err(wrong)?;
    capture::begin(&daemon.switches, &name, &query, left(&daemon))
}
