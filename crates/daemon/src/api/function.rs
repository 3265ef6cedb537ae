//! PCI functions.

use axum::extract::{Path, State};
use ioplane_api::report::{CarriedFunctionV1, DoneReport, EventWord, SaidFunctionV1, StateFileV1};
use ioplane_api::request::{
    FunctionStepForm, HoldVcpusForm, KeepVcpusForm, MoveFunctionForm, PhysicalForm, QuiesceForm, StopWord,
    WriteVectorsForm,
};
use ioplane_api::spec::FunctionForm;

use super::{Answer, Body, Own, Removal, form, form_or_usual, form_up_to, json, put, removal, whole};
use crate::refusal::Refusal;

/// Largest saved state: in base64, and a few words around it.
pub const STATE: usize = 2 << 20;

fn done(line: String) -> Answer {
    json(DoneReport { done: vec![line] })
}

pub async fn functions(State(daemon): Own) -> Answer {
    json(daemon.functions.report().await)
}

pub async fn function(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.functions.report_of(&name).await?)
}

pub async fn add(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: FunctionForm = form(body)?;
    let wanted = form.spec(&name).map_err(|flaws| Refusal::flaws(&flaws))?;
    whole(daemon.may_change()?, async move {
        let new = daemon.functions.put(wanted).await?;
        put(new, daemon.functions.report_of(&name).await?)
    })
    .await
}

pub async fn remove(State(daemon): Own, Path(name): Path<String>, query: Removal) -> Answer {
    let force = removal(query)?;
    whole(daemon.may_change()?, async move {
        let card = daemon.functions.served(&name).ok();
        daemon.functions.remove(&name, force, true).await?;
        daemon.sweep().await;
        let mut lines = vec![format!("PCI function {name} removed")];
        lines.extend(card.and_then(|card| card.complaint()));
        json(DoneReport { done: lines })
    })
    .await
}

pub async fn quiesce(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: QuiesceForm = form_or_usual(body)?;
    whole(daemon.may_change()?, async move {
        let rest = daemon.functions.served(&name)?.quiesce(form).await?;
        daemon.functions.tell(EventWord::Changed, &name, "held");
        json(rest)
    })
    .await
}

pub async fn resume(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        let held = daemon.functions.served(&name)?.resume().await?;
        if held {
            daemon.functions.tell(EventWord::Changed, &name, "resumed");
        }
        done(if held { format!("{name} resumed") } else { format!("{name} was not held: nothing to do") })
    })
    .await
}

pub async fn exchange(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: MoveFunctionForm = form(body)?;
    whole(daemon.may_change()?, async move {
        let leases = daemon.functions.below().leases();
        let moved = daemon.functions.served(&name)?.move_to(form, leases).await?;
        daemon.functions.tell(EventWord::Changed, &name, "moved");
        json(moved)
    })
    .await
}

pub async fn check_exchange(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: MoveFunctionForm = form(body)?;
    let leases = daemon.functions.below().leases();
    let to = form.to;
    daemon.functions.served(&name)?.may_move_to(form, leases).await?;
    done(format!("{name} may become {to}"))
}

pub async fn check_take(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: PhysicalForm = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.functions.served(&name)?.may_take(form).await?;
        done(format!("{name} may have what the guest's function has at the physical function of its host"))
    })
    .await
}

pub async fn log(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        daemon.functions.served(&name)?.log().await?;
        done(format!("what {name} writes is logged"))
    })
    .await
}

pub async fn end_log(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        let logged = daemon.functions.served(&name)?.end_log().await?;
        let nothing = format!("what {name} writes was not logged: nothing to do");
        done(if logged { format!("what {name} writes is no longer logged") } else { nothing })
    })
    .await
}

pub async fn rest(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: FunctionStepForm = form(body)?;
    whole(daemon.may_change()?, async move {
        let rested = daemon.functions.served(&name)?.rest(form).await?;
        daemon.functions.tell(EventWord::Changed, &name, "stands still, to be moved");
        json(rested)
    })
    .await
}

pub async fn said(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.functions.served(&name)?.said().await?)
}

pub async fn go_ahead(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let file: SaidFunctionV1 = form(body)?;
    whole(daemon.may_change()?, async move { json(daemon.functions.served(&name)?.go_ahead(file).await?) })
        .await
}

pub async fn forget_ahead(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        let reset = daemon.functions.served(&name)?.forget_ahead().await?;
        let nothing = format!("{name} has said nothing ahead: nothing to do");
        done(if reset { format!("{name} was reset: its guest does not come") } else { nothing })
    })
    .await
}

pub async fn carried(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.functions.served(&name)?.carried().await?)
}

pub async fn take(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let file: CarriedFunctionV1 = form_up_to(body, STATE)?;
    whole(daemon.may_change()?, async move {
        let still = daemon.functions.served(&name)?.take(file).await?;
        daemon.functions.tell(EventWord::Changed, &name, "the state of another one was loaded");
        done(format!(
            "{name} has the state, and {}",
            if still { "stands still" } else { "goes on from there" }
        ))
    })
    .await
}

pub async fn write_vectors(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: WriteVectorsForm = form_up_to(body, STATE)?;
    whole(daemon.may_change()?, async move {
        let count = daemon.functions.served(&name)?.write_vectors(form).await?;
        done(format!("the VMM of {name} has {count} entries of its MSI-X table"))
    })
    .await
}

pub async fn set_up(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: FunctionStepForm = form(body)?;
    json(daemon.functions.served(&name)?.set_up(form).await?)
}

pub async fn vcpus(State(daemon): Own, Path(name): Path<String>) -> Answer {
    json(daemon.functions.served(&name)?.vcpus()?)
}

pub async fn keep_vcpus(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let KeepVcpusForm { stop } = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.functions.served(&name)?.keep_vcpus(stop).await?;
        done(match stop {
            StopWord::Ask => format!("vCPUs that the VMM of {name} wants back wait"),
            StopWord::Keep => format!("the vCPUs of the VMM of {name} are out of the guest, and wait"),
            StopWord::Free => format!("the vCPUs of the VMM of {name} come back"),
            StopWord::Pass => format!("the vCPUs that the VMM of {name} has wanted back so far come back"),
        })
    })
    .await
}

pub async fn hold_vcpus(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let HoldVcpusForm { held } = form(body)?;
    whole(daemon.may_change()?, async move {
        daemon.functions.served(&name)?.hold_vcpus(held).await?;
        done(match held {
            true => format!("the vCPUs of the VMM of {name} do not enter the guest"),
            false => format!("the vCPUs of the VMM of {name} may enter the guest"),
        })
    })
    .await
}

pub async fn replay(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: FunctionStepForm = form(body)?;
    whole(daemon.may_change()?, async move {
        let replayed = daemon.functions.served(&name)?.replay(form).await?;
        daemon.functions.tell(EventWord::Changed, &name, "goes on from its state");
        json(replayed)
    })
    .await
}

pub async fn leave(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        daemon.functions.served(&name)?.leave().await?;
        daemon.functions.tell(EventWord::Changed, &name, "its guest went on with another one");
        done(format!("{name} has no guest any more"))
    })
    .await
}

pub async fn reset(State(daemon): Own, Path(name): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        let done_so = daemon.functions.served(&name)?.mend().await?;
        done(if done_so {
            format!("{name} is usable again")
        } else {
            format!("{name} is usable: nothing to do")
        })
    })
    .await
}

pub async fn save(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let form: QuiesceForm = form_or_usual(body)?;
    whole(daemon.may_change()?, async move { json(daemon.functions.served(&name)?.save(form).await?) }).await
}

pub async fn load(State(daemon): Own, Path(name): Path<String>, body: Body) -> Answer {
    let file: StateFileV1 = form_up_to(body, STATE)?;
    whole(daemon.may_change()?, async move {
        daemon.functions.served(&name)?.load(file).await?;
        tracing::info!(function = name, "a saved state was loaded");
        daemon.functions.tell(EventWord::Changed, &name, "a saved state was loaded");
        done(format!("{name} resumed from the saved state"))
    })
    .await
}
