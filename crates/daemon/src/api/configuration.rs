//! `/v1/config`.

use super::{Answer, Own, State, json, whole};
use crate::served::blocking;

/// What saving would append.
pub async fn preview(State(daemon): Own) -> Answer {
    json(blocking(move || daemon.unsaved()).await?)
}

/// Appends what was added at run time.
pub async fn save(State(daemon): Own) -> Answer {
    let saved = whole(daemon.may_change()?, async move {
        // Not while a reload reads it.
        let _one = daemon.reloading.lock().await;
        let daemon = daemon.clone();
        blocking(move || daemon.save()).await
    });
    json(saved.await?)
}
