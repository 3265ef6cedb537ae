//! I/O cores, and which queue is on which.

use axum::extract::rejection::QueryRejection;
use axum::extract::{Path, Query, State};
use ioplane_api::report::{CoreReport, DoneReport, EventWord, MovedReport};
use ioplane_api::request::{CoreChangeForm, CoreForm, MoveForm, NotifyForm, UnpinForm};
use ioplane_api::spec::{CoreSpec, Form};
use serde::Deserialize;

use super::{Answer, Body, Own, created, form, form_or_usual, json, send_one, whole};
use crate::Daemon;
use crate::refusal::Refusal;
use crate::served::blocking;

fn core_id(id: &str) -> Result<u32, Refusal> {
    id.parse().map_err(|_| Refusal::missing(format!("there is no I/O core {id:?}"), "cores have numbers"))
}

fn one_core(daemon: &Daemon, id: u32) -> Result<CoreReport, Refusal> {
    daemon.cores.check(id)?;
    let found = daemon.core_reports().into_iter().find(|core| core.id == id);
    found.ok_or_else(|| Refusal::busy(format!("I/O core {id} is only starting"), "ask again"))
}

pub async fn cores(State(daemon): Own) -> Answer {
    json(daemon.core_reports())
}

pub async fn core(State(daemon): Own, Path(id): Path<String>) -> Answer {
    json(one_core(&daemon, core_id(&id)?)?)
}

pub async fn add(State(daemon): Own, body: Body) -> Answer {
    let form: CoreForm = form_or_usual(body)?;
    check_reserve(&daemon, form.reserve.as_deref())?;
    whole(
        daemon.may_change()?,
        blocking(move || {
            let id = daemon.cores.start(form.spec(0), false, None)?;
            daemon.pool.look_soon();
            daemon.tell(EventWord::Served, "core", &id.to_string(), "started");
            created(one_core(&daemon, id)?)
        }),
    )
    .await
}

/// Whether there is the group for which a core is to be reserved; an empty name is none.
fn check_reserve(daemon: &Daemon, group: Option<&str>) -> Result<(), Refusal> {
    let group = group.filter(|group| !group.is_empty());
    group.map_or(Ok(()), |group| daemon.groups.check(group)).map_err(|refused| refused.at("reserve"))
}

/// Changes one core or all. `F`: the form by which somebody asks for it.
fn set<F: Form>(daemon: &Daemon, id: Option<u32>, change: &CoreChangeForm) -> Result<(), Refusal> {
    if *change == CoreChangeForm::default() {
        return Err(Refusal::invalid("nothing to change", send_one::<F>()));
    }
    let flaws = CoreSpec::new(0).changed(change).flaws();
    if !flaws.is_empty() {
        return Err(Refusal::flaws(&flaws));
    }
    check_reserve(daemon, change.reserve.as_deref())?;
    daemon.cores.set(id, |core| *core = core.changed(change))?;
    daemon.pool.look_soon();
    for core in daemon.cores.all().into_iter().filter(|core| id.is_none_or(|id| id == core.id)) {
        let drain = if core.drain { ", drained" } else { "" };
        let reserve = core.reserve.as_ref().map_or(String::new(), |group| format!(", reserved for {group}"));
        let asked = [("p99_us", core.p99_us), ("cpu_percent", core.cpu_percent.map(u64::from))];
        let asked: String =
            asked.into_iter().filter_map(|(name, value)| Some(format!(", {name} {}", value?))).collect();
        let text = format!("{}, spin_us {}{asked}{drain}{reserve}", core.notify.word(), core.spin_us);
        daemon.tell(EventWord::Changed, "core", &core.id.to_string(), &text);
    }
    Ok(())
}

pub async fn change(State(daemon): Own, Path(id): Path<String>, body: Body) -> Answer {
    let (id, form): (u32, CoreChangeForm) = (core_id(&id)?, form(body)?);
    whole(
        daemon.may_change()?,
        blocking(move || {
            set::<CoreChangeForm>(&daemon, Some(id), &form)?;
            json(one_core(&daemon, id)?)
        }),
    )
    .await
}

pub async fn notify(State(daemon): Own, body: Body) -> Answer {
    let NotifyForm { notify, spin_us } = form(body)?;
    let form = CoreChangeForm { notify, spin_us, ..CoreChangeForm::default() };
    whole(
        daemon.may_change()?,
        blocking(move || {
            set::<NotifyForm>(&daemon, None, &form)?;
            json(daemon.core_reports())
        }),
    )
    .await
}

pub async fn retire(State(daemon): Own, Path(id): Path<String>) -> Answer {
    let id = core_id(&id)?;
    whole(
        daemon.may_change()?,
        blocking(move || {
            daemon.cores.retire(id)?;
            daemon.tell(EventWord::Removed, "core", &id.to_string(), "retired");
            json(DoneReport { done: vec![format!("I/O core {id} retired")] })
        }),
    )
    .await
}

/// Whose queue somebody names.
enum Owner {
    Disk,
    Nic,
    Switch,
}

impl Owner {
    fn of(daemon: &Daemon, name: &str) -> Owner {
        if daemon.nics.records().contains_key(name) {
            Owner::Nic
        } else if daemon.switches.switch(name).is_ok() && !daemon.disks.records().contains_key(name) {
            Owner::Switch
        } else {
            Owner::Disk
        }
    }

    /// Says what has changed, and how the device is.
    async fn changed(self, daemon: &Daemon, name: &str, text: &str) -> Answer {
        daemon.pool.look_soon();
        match self {
            Owner::Disk => {
                daemon.disks.tell(EventWord::Changed, name, text);
                json(MovedReport::Disk(Box::new(daemon.report_of(&daemon.disks, name).await?)))
            }
            Owner::Nic => {
                daemon.nics.tell(EventWord::Changed, name, text);
                json(MovedReport::Nic(Box::new(daemon.report_of(&daemon.nics, name).await?)))
            }
            Owner::Switch => {
                daemon.tell(EventWord::Changed, "switch", name, text);
                let (switches, name) = (daemon.switches.clone(), name.to_owned());
                let report = blocking(move || switches.report_of(&name)).await?;
                json(MovedReport::Switch(Box::new(report)))
            }
        }
    }
}

pub async fn move_queue(State(daemon): Own, body: Body) -> Answer {
    let MoveForm { disk: name, queue, core } = form(body)?;
    let text = format!("queue {queue} is on core {core}");
    whole(daemon.may_change()?, async move {
        let owner = Owner::of(&daemon, &name);
        match owner {
            Owner::Disk => daemon.disks.move_queue(&name, queue, core).await?,
            Owner::Nic => daemon.nics.move_queue(&name, queue, core).await?,
            Owner::Switch => {
                let (switches, name) = (daemon.switches.clone(), name.clone());
                blocking(move || switches.move_uplink(&name, queue, core)).await?;
            }
        }
        owner.changed(&daemon, &name, &text).await
    })
    .await
}

pub async fn unpin(State(daemon): Own, body: Body) -> Answer {
    let UnpinForm { device: name, queue } = form(body)?;
    let text = format!("queue {queue} may be on any core");
    whole(daemon.may_change()?, async move {
        let owner = Owner::of(&daemon, &name);
        match owner {
            Owner::Disk => daemon.disks.unpin(&name, queue).await?,
            Owner::Nic => daemon.nics.unpin(&name, queue).await?,
            Owner::Switch => {
                let (switches, name) = (daemon.switches.clone(), name.clone());
                blocking(move || switches.pin_uplink(&name, queue, None)).await?;
            }
        }
        owner.changed(&daemon, &name, &text).await
    })
    .await
}

pub async fn pool(State(daemon): Own) -> Answer {
    json(daemon.pool.report(&daemon.cores))
}

/// `?from=N`.
#[derive(Deserialize)]
pub struct FromQuery {
    from: Option<u64>,
}

pub async fn decisions(State(daemon): Own, query: Result<Query<FromQuery>, QueryRejection>) -> Answer {
    let refused = |bad: QueryRejection| Refusal::invalid(bad.body_text(), "write ?from=NUMBER").at("from");
    let Query(FromQuery { from }) = query.map_err(refused)?;
    json(daemon.pool.decisions(from.unwrap_or(0)))
}
