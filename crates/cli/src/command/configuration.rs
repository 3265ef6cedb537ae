//! `config`.

use anyhow::Result;
use hyper::Method;
use ioplane_api::report::SavedReport;

use super::{ask, get};
use crate::args::ConfigCommand;
use crate::client::Client;
use crate::output::{hint, print, print_done};

/// Where the daemon offers it.
const ADDRESS: &str = "/v1/config/save";

/// Does what was typed.
pub fn run(client: &Client, command: &ConfigCommand, json: bool) -> Result<()> {
    let report: SavedReport = match command {
        ConfigCommand::Save { print: true } => get(client, ADDRESS)?,
        ConfigCommand::Save { print: false } => ask(client, Method::POST, ADDRESS, None::<&()>)?,
    };
    if !json {
        report.unsaved.iter().for_each(|line| hint(format_args!("not saved: {line}")));
    }
    match command {
        ConfigCommand::Save { print: true } => print(json, &report, |report| report.text.clone()),
        ConfigCommand::Save { print: false } => {
            print_done(json, &report, |report| match report.saved.as_slice() {
                [] => "nothing was added at run time that the configuration does not have\n".to_owned(),
                saved => format!("{}\nsaved in {}\n", saved.join("\n"), report.file.display()),
            })
        }
    }
}
