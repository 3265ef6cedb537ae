//! Disks.

use axum::extract::{Path, State};
use ioplane_api::report::{DoneReport, EventWord};
use ioplane_api::request::{ChangeForm, MigrationSocketForm, SwapForm, VerifyForm};
use ioplane_api::spec::{BackingForm, BackingSpec, DiskForm, LimitsSpec, RemoteSpec, TimeoutSpec};
use ioplane_nbd::import::ClaimWish;

use super::{Addition, Answer, Body, Own, Removal, addition, form, form_or_usual, json, put, removal, whole};
use crate::refusal::Refusal;

/// What to send to change a disk.
fn one_change() -> String {
    let options = RemoteSpec::OPTIONS.join(", ");
    format!(
        "send size (and shrink), or path (and format, direct, engine), or memory, or remote (and {options}), or iops_limit, iops_burst, bandwidth_limit, \
         bandwidth_burst, reserve_iops, reserve_bandwidth, timeout_s, on_timeout, qmp and group"
    )
}

pub async fn disks(State(daemon): Own) -> Answer {
    json(daemon.reports(&daemon.disks).await)
}

pub async fn disk(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.report_of(&daemon.disks, &name).await?)
}

pub async fn add(State(daemon): Own, Path(name): Path<String>, query: Addition, body: Body) -> Answer {
    let wish = addition(query)?;
    let form: DiskForm = form(body)?;
    let wanted = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    if wish == ClaimWish::TakeOver && !matches!(wanted.backing, BackingSpec::Remote { .. }) {
        return Err(Refusal::invalid("nobody else can hold it", "leave takeover out").at("takeover"));
    }
    whole(daemon.may_change()?, async move {
        let new = daemon.disks.put_claiming(wanted, wish).await?;
        put(new, daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}

pub async fn change(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: ChangeForm = form(body)?;
    let (limits, reserved, on_timeout) = (form.limits(), form.reserved(), form.on_timeout());
    let backing = form.backing();
    let ChangeForm { size, shrink, group, .. } = form;
    let none = LimitsSpec::default();
    let waits = on_timeout != TimeoutSpec::default();
    if limits != none || reserved != none || group.is_some() || waits {
        if size.is_some() || shrink || backing != BackingForm::default() {
            return Err(Refusal::invalid("neither one change nor another", one_change()));
        }
        return whole(daemon.may_change()?, async move {
            daemon.disks.served(&name)?.set(limits, reserved, group.clone(), on_timeout).await?;
            let report = daemon.report_of(&daemon.disks, &name).await?;
            let words = report.limits().words("requests").unwrap_or("none".to_owned());
            let limits = (limits != none).then(|| format!("limits: {words}"));
            let rates = report.backing.remote.as_ref().and_then(|remote| remote.reserved().rates("requests"));
            let reserved =
                (reserved != none).then(|| format!("reserved: {}", rates.as_deref().unwrap_or("nothing")));
            let group = group.map(|_| format!("group: {}", report.group.as_deref().unwrap_or("none")));
            let remote = report.backing.remote.as_ref().filter(|_| waits);
            let waits = remote.map(|remote| format!("without its server: {}", remote.timeout_words()));
            let changed =
                [limits, reserved, group, waits].into_iter().flatten().collect::<Vec<_>>().join(", ");
            tracing::info!(disk = name, changed, "set");
            daemon.disks.tell(EventWord::Changed, &name, &changed);
            json(report)
        })
        .await;
    }
    if let Some(size) = size.filter(|_| backing == BackingForm::default()) {
        return whole(daemon.may_change()?, async move {
            daemon.disks.served(&name)?.resize(size, shrink).await?;
            tracing::info!(disk = name, %size, "resized");
            daemon.disks.tell(EventWord::Changed, &name, &format!("resized to {size}"));
            json(daemon.report_of(&daemon.disks, &name).await?)
        })
        .await;
    }
    let mut flaws = Vec::new();
    let backing = if size.is_none() && !shrink { backing.spec(&mut flaws) } else { None };
    let Some(backing) = backing.filter(|_| flaws.is_empty()) else {
        return Err(Refusal::invalid("neither one change nor another", one_change()));
    };
    whole(daemon.may_change()?, async move {
        let text = backing.name();
        daemon.disks.served(&name)?.replace(backing, daemon.disks.context()).await?;
        tracing::info!(disk = name, backing = text, "backing replaced");
        daemon.disks.tell(EventWord::Changed, &name, &format!("backing replaced: {text}"));
        json(daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}

pub async fn remove(State(daemon): Own, Path(name): Path<String>, query: Removal) -> Answer {
    let force = removal(query)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.remove(&name, force, true).await?;
        json(DoneReport { done: vec![format!("disk {name} removed")] })
    })
    .await
}

pub async fn accept(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        daemon.disks.served(&name)?.accept()?;
        tracing::info!(disk = name, "accepted as it is");
        daemon.disks.tell(EventWord::Changed, &name, "accepted as it is");
        json(daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}

pub async fn start_swap(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: SwapForm = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.served(&name)?.begin_swap(form, daemon.disks.context()).await?;
        let report = daemon.report_of(&daemon.disks, &name).await?;
        let to = report.swap.as_ref().map_or("", |swap| &swap.to);
        tracing::info!(disk = name, to, "being swapped");
        daemon.disks.tell(EventWord::Changed, &name, &format!("being swapped to {to}"));
        json(report)
    })
    .await
}

pub async fn cancel_swap(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        daemon.disks.served(&name)?.cancel_swap().await?;
        json(daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}

pub async fn start_verify(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: VerifyForm = form_or_usual(body)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.served(&name)?.begin_verify(form, daemon.disks.context()).await?;
        let report = daemon.report_of(&daemon.disks, &name).await?;
        let with = report.verify.as_ref().map_or("", |verify| &verify.with);
        tracing::info!(disk = name, with, "being compared");
        json(report)
    })
    .await
}

pub async fn cancel_verify(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        daemon.disks.served(&name)?.cancel_verify().await?;
        json(daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}

pub async fn open_migration_socket(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: MigrationSocketForm = form_or_usual(body)?;
    whole(daemon.may_change()?, async move {
        let new = daemon.disks.open_migration_socket(&name, form.socket).await?;
        if new {
            tracing::info!(disk = name, "has a migration socket");
            daemon.disks.tell(EventWord::Changed, &name, "has a migration socket");
        }
        put(new, daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}

pub async fn close_migration_socket(State(daemon): Own, Path(name): Path<String>, query: Removal) -> Answer {
    let force = removal(query)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.close_migration_socket(&name, force).await?;
        tracing::info!(disk = name, "has no migration socket any more");
        daemon.disks.tell(EventWord::Changed, &name, "has no migration socket any more");
        json(daemon.report_of(&daemon.disks, &name).await?)
    })
    .await
}
