//! `move expect`, `move expected`, `move unexpect`.

use anyhow::Result;
use hyper::Method;
use ioplane_api::report::{DoneReport, ExpectedReport};
use ioplane_api::request::ExpectForm;

use super::table::Table;
use super::{absolute, address_of, ask, get};
use crate::args::MoveExpect;
use crate::client::Client;
use crate::output::{hint, print, print_done};

pub fn run(client: &Client, args: MoveExpect, json: bool) -> Result<()> {
    let MoveExpect { name, from, qmp, libvirt, valid, listen } = args;
    let valid_s = valid.map(|time| time.as_secs().max(1));
    let form = ExpectForm { from, qmp: absolute(&qmp)?, libvirt, listen, valid_s };
    let report: ExpectedReport = ask(client, Method::PUT, &address_of("expected", &name), Some(&form))?;
    if !json {
        let at = report.listen.rsplit_once(':').map_or("", |(_, port)| port);
        let there = if at == "10806" { "THIS-HOST".to_owned() } else { format!("THIS-HOST:{at}") };
        let ExpectedReport { vm, from, .. } = &report;
        hint(match at {
            _ if libvirt => {
                format!(
                    "then, on {from}: ioplane move attend {vm} --libvirt --there {there}, and virsh migrate"
                )
            }
            "10806" => format!("then, on {from}: ioplane move vm {vm} --to THIS-HOST"),
            _ => format!("then, on {from}: ioplane move vm {vm} --to THIS-HOST --there {there}"),
        });
    }
    print_done(json, &report, |report| table(std::slice::from_ref(report)))
}

pub fn list(client: &Client, json: bool) -> Result<()> {
    let all: Vec<ExpectedReport> = get(client, "/v1/expected")?;
    print(json, &all, |all| table(all))
}

pub fn end(client: &Client, name: &str, json: bool) -> Result<()> {
    let done: DoneReport = ask(client, Method::DELETE, &address_of("expected", name), None::<&()>)?;
    print_done(json, &done, |done| done.done.join("\n") + "\n")
}

fn table(all: &[ExpectedReport]) -> String {
    if all.is_empty() {
        return "no VM is expected: `ioplane move expect` does that\n".to_owned();
    }
    let mut table = Table::new(&["VM", "FROM", "STATE", "LEFT", "LISTENS", "MONITOR"]);
    for one in all {
        let left = match one.left_s {
            seconds @ 0..120 => format!("{seconds} s"),
            seconds => format!("{} min", seconds.div_ceil(60)),
        };
        table.row(vec![
            one.vm.clone(),
            one.from.clone(),
            one.state.words().to_owned(),
            left,
            one.listen.clone(),
            match one.pid {
                Some(_) => one.qmp.display().to_string(),
                None => format!("{}, not there yet", one.qmp.display()),
            },
        ]);
    }
    table.to_string()
}
