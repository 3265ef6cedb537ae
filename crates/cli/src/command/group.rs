//! `group`.

use anyhow::Result;
use hyper::Method;
use ioplane_api::report::{DoneReport, GroupReport};

use super::{address_of, ask, get, put, show};
use crate::args::GroupCommand;
use crate::client::Client;
use crate::output::{print, print_done};

pub fn run(client: &Client, command: GroupCommand, json: bool) -> Result<()> {
    let address = |name: &str| address_of("groups", name);
    match command {
        GroupCommand::Add { name, form } => {
            let group: GroupReport = put(client, &address(&name), &form, ("group", &name))?;
            print_done(json, &group, show::group)
        }
        GroupCommand::Remove { name } => {
            let report: DoneReport = ask(client, Method::DELETE, &address(&name), None::<&()>)?;
            print_done(json, &report, |done| done.done.join("\n") + "\n")
        }
        GroupCommand::List => {
            let groups: Vec<GroupReport> = get(client, "/v1/groups")?;
            print(json, &groups, |groups| show::groups(groups))
        }
        GroupCommand::Show { name } => {
            let group: GroupReport = get(client, &address(&name))?;
            print(json, &group, show::group)
        }
        GroupCommand::Set { name, change } => {
            let group: GroupReport = ask(client, Method::PATCH, &address(&name), Some(&change))?;
            print_done(json, &group, show::group)
        }
    }
}
