//! `devices`.

use anyhow::Result;
use hyper::Method;
use ioplane_api::report::{DeviceReport, DevicesReport, DoneReport, HostWord};
use ioplane_api::size::Size;

use super::table::Table;
use super::{address_of, ask, get, working};
use crate::args::{DevicesArgs, DevicesCommand};
use crate::client::Client;
use crate::output::{print, print_done};

pub fn run(client: &Client, args: DevicesArgs, json: bool) -> Result<()> {
    match args.command {
        None | Some(DevicesCommand::List) => {
            let report: DevicesReport = working("asking the directory", || get(client, "/v1/devices"))?;
            print(json, &report, text)
        }
        Some(DevicesCommand::Forget { name }) => {
            let path = address_of("devices", &name);
            let done: DoneReport =
                working("asking the directory", || ask(client, Method::DELETE, &path, None::<&()>))?;
            print_done(json, &done, |done| done.done.join("\n") + "\n")
        }
    }
}

fn text(report: &DevicesReport) -> String {
    let mut text = format!("directory at {}; this host is {}\n\n", report.directory, report.host);
    if report.devices.is_empty() {
        text.push_str("no host publishes anything: `ioplane publish disk` does that\n");
    } else {
        let mut table = Table::new(&[
            "NAME", "KIND", "SIZE", "MODE", "HOST", "USED BY", "CAPACITY", "RESERVED", "HEALTH", "LOCATION",
        ]);
        for device in &report.devices {
            table.row(vec![
                device.name.clone(),
                device.kind.clone(),
                device.size.map_or_else(|| "-".to_owned(), |size| Size(size).to_string()),
                if device.read_only { "ro" } else { "rw" }.to_owned(),
                device.host.clone(),
                used_by(device),
                rates(device.iops_limit, device.bandwidth_limit),
                rates(Some(device.reserved_iops), Some(device.reserved_bandwidth)),
                health(device),
                device.location.clone(),
            ]);
        }
        text.push_str(&table.to_string());
    }
    for taken in &report.taken {
        text.push_str(&format!(
            "\n{} of this host is not listed: {} publishes a device of that name\n",
            taken.name, taken.by
        ));
    }
    text
}

fn used_by(device: &DeviceReport) -> String {
    match (&device.holder, device.users) {
        _ if device.state != HostWord::Present => "-".to_owned(),
        (Some(holder), _) => holder.clone(),
        (None, 0) => "-".to_owned(),
        (None, users) => format!("{users} connections"),
    }
}

/// Requests and bytes per second, those that there are.
fn rates(iops: Option<u64>, bandwidth: Option<Size>) -> String {
    let iops = iops.filter(|iops| *iops > 0).map(|iops| format!("{iops} IOPS"));
    let bandwidth = bandwidth.filter(|size| size.0 > 0).map(|size| format!("{size}/s"));
    let all: Vec<String> = iops.into_iter().chain(bandwidth).collect();
    if all.is_empty() { "-".to_owned() } else { all.join(", ") }
}

fn health(device: &DeviceReport) -> String {
    match (device.state, device.lost_ms, &device.trouble) {
        (HostWord::Present, _, None) => "ok".to_owned(),
        (HostWord::Present, _, Some(trouble)) => trouble.clone(),
        (HostWord::Lost, Some(ms), _) => format!("host lost for {} s", ms / 1000),
        (HostWord::Lost | HostWord::Unseen, ..) => "host not seen".to_owned(),
    }
}
