//! What is written down of moves of VMs with PCI functions.

use axum::extract::{Path, State};
use ioplane_api::report::DoneReport;
use ioplane_api::request::MoveNoteForm;

use super::form::{Body, form};
use super::{Answer, Own, json, whole};
use crate::refusal::Refusal;

/// Most moves at a time, and functions of one: a VM has some.
const MOST: usize = 256;
/// Longest name and path.
const LONGEST: usize = 4096;

fn done(line: String) -> Answer {
    json(DoneReport { done: vec![line] })
}

fn missing(vm: &str) -> Refusal {
    Refusal::missing(
        format!("nothing is written down of a move of VM {vm}"),
        "it has come to its end, or was not begun; `ioplane status` shows the VMs",
    )
}

/// Whether it is one that somebody could mean.
fn doubt(vm: &str, note: &MoveNoteForm) -> Result<(), Refusal> {
    let MoveNoteForm { to, qmp, there, qmp_there, guards, functions, .. } = note;
    let mut texts = vec![vm, to, qmp];
    texts.extend(guards.iter().flat_map(|guard| [guard.node.as_str(), &guard.file]));
    texts.extend(functions.iter().flat_map(|one| [one.name.as_str(), &one.id, &one.kind]));
    let paths = [there, qmp_there].map(|path| path.as_os_str().len());
    let longest = texts.into_iter().map(str::len).chain(paths).max().unwrap_or(0);
    if longest > LONGEST || guards.len() > MOST || functions.len() > MOST {
        let text =
            format!("a name of {longest} bytes, {} guards or {} functions", guards.len(), functions.len());
        return Err(Refusal::invalid(text, format!("at most {LONGEST} bytes, and {MOST} of either")));
    }
    Ok(())
}

pub async fn show(State(daemon): Own, Path(vm): Path<String>) -> Answer {
    json(daemon.state_file.look(|entries| entries.moves.get(&vm).cloned()).ok_or_else(|| missing(&vm))?)
}

pub async fn note(State(daemon): Own, Path(vm): Path<String>, body: Body) -> Answer {
    let note: MoveNoteForm = form(body)?;
    doubt(&vm, &note)?;
    whole(daemon.may_change()?, async move {
        let (pid, gone) = (note.pid, note.gone);
        let mut refused = None;
        daemon.state_file.change(|entries| {
            let known = entries.moves.get(&vm);
            refused = match known {
                // What was given away is not taken back. Another VMM of that name is another guest.
                Some(known) if known.gone && !gone && known.pid == pid => Some(Refusal::conflict(
                    format!("the guest of VM {vm} is the other host's by what is written down"),
                    format!("ioplane move recover {vm}"),
                )),
                None if entries.moves.len() >= MOST => {
                    Some(Refusal::conflict(format!("{MOST} moves are under way"), "bring some to their end"))
                }
                _ => None,
            };
            if refused.is_none() {
                entries.moves.insert(vm.clone(), note);
            }
        })?;
        match refused {
            Some(refused) => Err(refused),
            None if gone => {
                tracing::info!(vm, "its guest is the other host's");
                done(format!("the guest of {vm} is the other host's"))
            }
            None => done(format!("the move of {vm} is written down")),
        }
    })
    .await
}

pub async fn end(State(daemon): Own, Path(vm): Path<String>) -> Answer {
    whole(daemon.may_change()?, async move {
        let mut known = false;
        daemon.state_file.change(|entries| known = entries.moves.remove(&vm).is_some())?;
        match known {
            true => done(format!("the move of {vm} has come to its end")),
            false => Err(missing(&vm)),
        }
    })
    .await
}
