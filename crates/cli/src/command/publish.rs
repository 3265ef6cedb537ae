//! `publish`.

use anyhow::Result;
use hyper::Method;
use ioplane_api::report::{DoneReport, ExportReport};
use ioplane_api::request::ExportSizeForm;
use ioplane_api::spec::ExportForm;

use super::{address_of, ask, get, put, seen, show, warn_of_doubt, working};
use crate::args::{PublishCommand, PublishDisk};
use crate::client::Client;
use crate::output::{hint, print, print_done};

pub fn run(client: &Client, command: PublishCommand, json: bool) -> Result<()> {
    let address = |name: &str| address_of("exports", name);
    match command {
        PublishCommand::Disk(disk) => {
            let PublishDisk { name, form } = *disk;
            let (path, socket) = (seen(form.path)?, seen(form.socket)?);
            let form = ExportForm { path, socket, ..form };
            let export: ExportReport =
                working("opening the image", || put(client, &address(&name), &form, ("publish", &name)))?;
            if export.listen.is_none() && !json {
                hint("other machines cannot reach it: name the hosts that may, --allow HOSTS");
            }
            warn_of_doubt(export.backing.remote.as_ref());
            print_done(json, &export, |export| show::exports(std::slice::from_ref(export)))
        }
        PublishCommand::Set { name, form } => {
            let export: ExportReport = ask(client, Method::PATCH, &address(&name), Some(&form))?;
            print_done(json, &export, |export| {
                show::exports(std::slice::from_ref(export)) + &show::export_limits(export, true)
            })
        }
        PublishCommand::Resize { name, size, shrink } => {
            let form = ExportSizeForm { size, shrink };
            let path = format!("{}/resize", address(&name));
            let export: ExportReport = working("resizing", || ask(client, Method::POST, &path, Some(&form)))?;
            print_done(json, &export, |export| show::exports(std::slice::from_ref(export)))
        }
        PublishCommand::Remove { name, force } => {
            let path = format!("{}?force={force}", address(&name));
            let done: DoneReport =
                working("waiting for requests to end", || ask(client, Method::DELETE, &path, None::<&()>))?;
            print_done(json, &done, |done| done.done.join("\n") + "\n")
        }
        PublishCommand::Release { name, force, reservations } => {
            let mut path = format!("{}/release?force={force}", address(&name));
            // A daemon from before there were reservations is not asked about them.
            path.push_str(if reservations { "&reservations=true" } else { "" });
            let export: ExportReport =
                working("waiting for requests to end", || ask(client, Method::POST, &path, None::<&()>))?;
            print_done(json, &export, show::export)
        }
        PublishCommand::List => {
            let exports: Vec<ExportReport> = get(client, "/v1/exports")?;
            print(json, &exports, |exports| show::exports(exports))
        }
        PublishCommand::Show { name } => {
            let export: ExportReport = get(client, &address(&name))?;
            print(json, &export, show::export)
        }
    }
}
