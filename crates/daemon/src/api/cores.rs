//! I/O cores, and which queue is on which.

use axum::extract::{Path, State};
use ioplane_api::report::{CoreReport, DoneReport, EventWord, MovedReport};
use ioplane_api::request::{CoreChangeForm, CoreForm, MoveForm};
use ioplane_api::spec::{CoreSpec, Form};

use super::{Answer, Body, Own, created, form, form_or_usual, json, whole};
use crate::Daemon;
use crate::refusal::Refusal;
use crate::served::blocking;

fn core_id(id: &str) -> Result<u32, Refusal> {
    id.parse().map_err(|_| Refusal::missing(format!("there is no I/O core {id:?}"), "cores have numbers"))
}

fn one_core(daemon: &Daemon, id: u32) -> Result<CoreReport, Refusal> {
    daemon.cores.check(id)?;
    let found = daemon.cores.report().into_iter().find(|core| core.id == id);
    found.ok_or_else(|| Refusal::busy(format!("I/O core {id} is only starting"), "ask again"))
}

pub async fn cores(State(daemon): Own) -> Answer {
    json(daemon.cores.report())
}

pub async fn core(State(daemon): Own, Path(id): Path<String>) -> Answer {
    json(one_core(&daemon, core_id(&id)?)?)
}

pub async fn add(State(daemon): Own, body: Body) -> Answer {
    let form: CoreForm = form_or_usual(body)?;
    whole(
        daemon.may_change()?,
        blocking(move || {
            let id = daemon.cores.start(form.spec(0), false, None)?;
            daemon.tell(EventWord::Served, "core", &id.to_string(), "started");
            created(one_core(&daemon, id)?)
        }),
    )
    .await
}

fn set(daemon: &Daemon, id: Option<u32>, form: &CoreChangeForm) -> Result<(), Refusal> {
    if *form == CoreChangeForm::default() {
        let remedy = format!("send {}", CoreChangeForm::FIELDS.join(", or "));
        return Err(Refusal::invalid("nothing to change", remedy));
    }
    let mut probe = CoreSpec::new(0);
    probe.change(form);
    let flaws = probe.flaws();
    if !flaws.is_empty() {
        return Err(Refusal::flaws(&flaws));
    }
    daemon.cores.set(id, |core| core.change(form))?;
    for core in daemon.cores.all().into_iter().filter(|core| id.is_none_or(|id| id == core.id)) {
        let mut text = format!("{}, spin_us {}", core.notify.word(), core.spin_us);
        let asked = [("p99_us", core.p99_us), ("cpu_percent", core.cpu_percent.map(u64::from))];
        for (name, value) in asked.into_iter().filter_map(|(name, value)| Some((name, value?))) {
            text.push_str(&format!(", {name} {value}"));
        }
        daemon.tell(EventWord::Changed, "core", &core.id.to_string(), &text);
    }
    Ok(())
}

pub async fn change(State(daemon): Own, Path(id): Path<String>, body: Body) -> Answer {
    let (id, form): (u32, CoreChangeForm) = (core_id(&id)?, form(body)?);
    whole(
        daemon.may_change()?,
        blocking(move || {
            set(&daemon, Some(id), &form)?;
            json(one_core(&daemon, id)?)
        }),
    )
    .await
}

pub async fn notify(State(daemon): Own, body: Body) -> Answer {
    let form: CoreChangeForm = form(body)?;
    whole(
        daemon.may_change()?,
        blocking(move || {
            set(&daemon, None, &form)?;
            json(daemon.cores.report())
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

pub async fn move_queue(State(daemon): Own, body: Body) -> Answer {
    let MoveForm { disk: name, queue, core } = form(body)?;
    let text = format!("queue {queue} is on core {core}");
    whole(daemon.may_change()?, async move {
        if daemon.nics.records().contains_key(&name) {
            daemon.nics.move_queue(&name, queue, core).await?;
            daemon.nics.tell(EventWord::Changed, &name, &text);
            return json(MovedReport::Nic(Box::new(daemon.nics.report_of(&name).await?)));
        }
        if daemon.switches.switch(&name).is_ok() && !daemon.disks.records().contains_key(&name) {
            return blocking(move || {
                daemon.switches.move_uplink(&name, queue, core)?;
                daemon.tell(EventWord::Changed, "switch", &name, &text);
                json(MovedReport::Switch(Box::new(daemon.switches.report_of(&name)?)))
            })
            .await;
        }
        daemon.disks.move_queue(&name, queue, core).await?;
        daemon.disks.tell(EventWord::Changed, &name, &text);
        json(MovedReport::Disk(Box::new(daemon.disks.report_of(&name).await?)))
    })
    .await
}
