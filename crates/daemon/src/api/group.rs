//! Groups.

use axum::extract::{Path, State};
use ioplane_api::report::DoneReport;
use ioplane_api::spec::{GroupChangeForm, GroupForm};

use super::{Answer, Body, Own, form, form_or_usual, json, put, send_one, whole};
use crate::refusal::Refusal;

pub async fn groups(State(daemon): Own) -> Answer {
    json(daemon.group_reports())
}

pub async fn group(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.group_report(&name)?)
}

pub async fn add(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: GroupForm = form_or_usual(body)?;
    let wanted = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    whole(
        daemon.may_change()?,
        async move { put(daemon.put_group(wanted).await?, daemon.group_report(&name)?) },
    )
    .await
}

pub async fn change(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let change: GroupChangeForm = form(body)?;
    if change == GroupChangeForm::default() {
        return Err(Refusal::invalid("no change", send_one::<GroupChangeForm>()));
    }
    whole(daemon.may_change()?, async move {
        daemon.change_group(&name, &change).await?;
        json(daemon.group_report(&name)?)
    })
    .await
}

pub async fn remove(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        daemon.remove_group(&name).await?;
        json(DoneReport { done: vec![format!("group {name} removed")] })
    })
    .await
}
