//! Exports.

use axum::extract::{Path, State};
use ioplane_api::report::{DoneReport, EventWord};
use ioplane_api::request::ExportSizeForm;
use ioplane_api::spec::{ExportChangeForm, ExportForm};

use super::{Answer, Body, Own, Release, Removal, form, json, put, release_of, removal, whole};
use crate::refusal::Refusal;

pub async fn exports(State(daemon): Own) -> Answer {
    json(daemon.exports.report().await)
}

pub async fn export(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.exports.report_of(&name).await?)
}

pub async fn add(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let mut form: ExportForm = form(body)?;
    if let Some(disk) = form.disk.take() {
        return whole(daemon.may_change()?, async move {
            daemon.publish_in_use(&name, &disk, form).await?;
            tracing::info!(export = name, disk, "the image of a disk in use is published");
            put(true, daemon.exports.report_of(&name).await?)
        })
        .await;
    }
    let wanted = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    whole(daemon.may_change()?, async move {
        let new = daemon.exports.put(wanted).await?;
        put(new, daemon.exports.report_of(&name).await?)
    })
    .await
}

pub async fn change(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: ExportChangeForm = form(body)?;
    let limits = form.limits();
    if limits == Default::default() {
        let remedy = "send iops_limit, iops_burst, bandwidth_limit and bandwidth_burst, or some of them";
        return Err(Refusal::invalid("nothing is to be changed", remedy));
    }
    whole(daemon.may_change()?, async move {
        daemon.exports.served(&name)?.set_limits(limits).await?;
        let report = daemon.exports.report_of(&name).await?;
        let words = report.limits().words("requests").unwrap_or("none".to_owned());
        tracing::info!(export = name, limits = words, "set");
        daemon.exports.tell(EventWord::Changed, &name, &format!("limits: {words}"));
        json(report)
    })
    .await
}

pub async fn resize(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let ExportSizeForm { size, shrink } = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.exports.served(&name)?.resize(size, shrink).await?;
        tracing::info!(export = name, %size, "resized");
        daemon.exports.tell(EventWord::Changed, &name, &format!("resized to {size}"));
        json(daemon.exports.report_of(&name).await?)
    })
    .await
}

pub async fn remove(State(daemon): Own, Path(name): Path<String>, query: Removal) -> Answer {
    let force = removal(query)?;
    whole(daemon.may_change()?, async move {
        daemon.exports.remove(&name, force, true).await?;
        json(DoneReport { done: vec![format!("export {name} removed")] })
    })
    .await
}

pub async fn release(State(daemon): Own, Path(name): Path<String>, query: Release) -> Answer {
    let (force, reservations) = release_of(query)?;
    whole(daemon.may_change()?, async move {
        if reservations {
            let released = daemon.exports.served(&name)?.unreserve(force).await?;
            tracing::warn!(export = name, released, "reservations were taken back");
            daemon.exports.tell(
                EventWord::Changed,
                &name,
                &format!("{released} reservations were taken back"),
            );
            return json(daemon.exports.report_of(&name).await?);
        }
        daemon.exports.served(&name)?.release(force).await?;
        tracing::warn!(export = name, "its claim was released");
        daemon.exports.tell(EventWord::Changed, &name, "its claim was released");
        json(daemon.exports.report_of(&name).await?)
    })
    .await
}
