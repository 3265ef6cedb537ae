//! Devices in the directory.

use axum::extract::{Path, State};
use ioplane_api::report::DoneReport;

use super::{Answer, Own, json};

pub async fn devices(State(daemon): Own) -> Answer {
    json(daemon.devices().list().await?)
}

pub async fn forget(State(daemon): Own, Path(name): Path<String>) -> Answer {
    daemon.devices().forget(&name).await?;
    json(DoneReport { done: vec![format!("{name} is forgotten: its name is free")] })
}
