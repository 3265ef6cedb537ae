//! A disk's second socket, over HTTP.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use ioplane_api::request::TwinForm;

use super::{Answer, Body, Own, RemoveQuery, created, force, form, json, whole};

pub async fn open(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: TwinForm = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.open_twin(&name, form.socket).await?;
        tracing::info!(disk = name, "has a second socket");
        created(daemon.disks.report_of(&name).await?)
    })
    .await
}

pub async fn close(
    State(daemon): Own,
    Path(name): Path<String>,
    query: Result<Query<RemoveQuery>, QueryRejection>,
) -> Answer {
    let force = force(query)?;
    whole(daemon.may_change()?, async move {
        daemon.disks.close_twin(&name, force).await?;
        tracing::info!(disk = name, "has no second socket any more");
        json(daemon.disks.report_of(&name).await?)
    })
    .await
}
