//! A disk's second socket, over HTTP.

use std::path::PathBuf;

use axum::extract::{Path, Query, State};
use serde::{Deserialize, Serialize};

use super::{Answer, Body, Own, created, form, json, whole};
use crate::refusal::Refusal;

/// A second socket for a disk.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TwinForm {
    /// Where; beside the first, if nobody says.
    pub socket: Option<PathBuf>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct CloseQuery {
    force: bool,
}

pub async fn open(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: TwinForm = form(body)?;
    whole(async move {
        daemon.disks.open_twin(&name, form.socket).await?;
        tracing::info!(disk = name, "has a second socket");
        created(daemon.disks.report_of(&name).await?)
    })
    .await
}

pub async fn close(
    State(daemon): Own,
    Path(name): Path<String>,
    query: Result<Query<CloseQuery>, axum::extract::rejection::QueryRejection>,
) -> Answer {
    let Query(CloseQuery { force }) =
        query.map_err(|bad| Refusal::invalid(bad.body_text(), "there is only ?force=true"))?;
    whole(async move {
        daemon.disks.close_twin(&name, force).await?;
        tracing::info!(disk = name, "has no second socket any more");
        json(daemon.disks.report_of(&name).await?)
    })
    .await
}
