//! `ioplane move prepare`: makes on the other host what a VM uses here, before its QEMU is started there.
//!
//! ```text
//!   look: this VM's disks are of other machines, or can be published; what the other daemon has by these names is the same; what it lacks can be made
//!     -> publish here -> add NICs and disks there -> each disk there is an importer of the same image
//! ```
//!
//! A disk of this host is published before the other one has it, since that has to be able to open it (docs/decisions/0069-publishing-a-disk-in-use.md).
//!
//! It may be run again: what is there is left as it is.

use std::net::IpAddr;

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::{
    ClaimWord, DiskReport, DoneReport, ExportReport, NicReport, RemoteWord, StatusReport,
};
use ioplane_api::size::Size;
use ioplane_api::spec::{
    DiskForm, DoubtWord, ExportForm, ListenAddress, NbdUri, NicForm, RemoteSpec, TimeoutWord, name_flaw,
};
use ioplane_cli::args::{MIGRATION_PORT, MovePrepare};
use ioplane_cli::client::{Client, Method};
use ioplane_cli::output::{CommandError, hint, print_done};
use serde::Serialize;

use crate::move_vm::{VmDevices, devices_of, is_same, is_settled, may_go, refused, remote, until};

/// What the other host has for the VM.
#[derive(Debug, Serialize)]
struct PrepareReport {
    /// Name of the VM.
    vm: String,
    /// Its disks and NICs there.
    devices: Vec<PreparedDevice>,
}

#[derive(Debug, Serialize)]
struct PreparedDevice {
    /// `disk` or `nic`.
    kind: &'static str,
    name: String,
    /// It was not there before.
    added: bool,
    /// Of a disk that has been published for this: the export here.
    export: Option<String>,
}

/// What has to be made for a device of the VM.
struct Plan<'a, Report, Form> {
    report: &'a Report,
    /// Nothing if it is there.
    form: Option<Form>,
}

/// Makes what is missing, or says what cannot be.
pub fn run(client: &Client, args: &MovePrepare, json: bool) -> Result<()> {
    let here: StatusReport = client.get("/v1/status")?;
    let exports = here.exports.clone();
    let VmDevices { disks, nics, functions } = devices_of(here, &args.name)?;
    let there = Client::new(&args.there)?;
    let other: StatusReport = there.get("/v1/status")?;
    let mut place = Place { exports, via: args.via.as_deref(), other: &other };
    // Everything is looked at before the first thing is made.
    let (local, remote): (Vec<_>, Vec<_>) =
        disks.iter().partition(|disk| args.publish.is_some() && disk.backing.kind == "file");
    let publications =
        local.into_iter().map(|disk| place.publication(disk, args)).collect::<Result<Vec<_>>>()?;
    let mut disks = remote.into_iter().map(|disk| place.disk(disk)).collect::<Result<Vec<_>>>()?;
    let nics = nics.iter().map(|nic| place.nic(nic)).collect::<Result<Vec<_>>>()?;
    let mut published = Vec::new();
    if !publications.is_empty() {
        publications.iter().try_for_each(|publication| publication.make(client))?;
        let here: StatusReport = client.get("/v1/status")?;
        place.exports.clone_from(&here.exports);
        let now = devices_of(here, &args.name)?.disks;
        let is_one = |disk: &DiskReport| publications.iter().any(|one| one.disk.name == disk.name);
        published.extend(now.into_iter().filter(is_one));
    }
    for disk in &published {
        disks.push(place.disk(disk)?);
    }
    let mut devices = Vec::new();
    for Plan { report, form } in nics {
        if let Some(form) = &form {
            let _: NicReport = there.ask(Method::PUT, &format!("/v1/nics/{}", report.name), Some(form))?;
        }
        let name = report.name.clone();
        devices.push(PreparedDevice { kind: "nic", name, added: form.is_some(), export: None });
    }
    for Plan { report, form } in disks {
        if let Some(form) = &form {
            add_disk(&there, report, form)?;
        }
        let published = publications.iter().find(|one| one.disk.name == report.name);
        let (name, export) = (report.name.clone(), published.map(|one| one.export.clone()));
        devices.push(PreparedDevice { kind: "disk", name, added: form.is_some(), export });
    }
    for function in functions {
        let name = &function.name;
        if !other.functions.iter().any(|other| other.name == *name) {
            hint(format!(
                "the VM's PCI function {name} is not made there by this: ioplane pci add {name}, as here"
            ));
        }
    }
    if !json {
        hint(format!(
            "start the QEMU of {name} there with the same devices, what `ioplane qemu-args` prints there, and -incoming tcp:ITS-ADDRESS:{MIGRATION_PORT} (IPv6 as [ADDRESS]); then here: ioplane \
             move vm {name} --to ITS-ADDRESS. Memory goes there in plain text, and whoever reaches that port first is taken for this host: in a network of your own",
            name = args.name
        ));
    }
    print_done(json, &PrepareReport { vm: args.name.clone(), devices }, |report| {
        let line = |device: &PreparedDevice| {
            let word = if device.added { "added" } else { "was there" };
            let export = device.export.as_ref();
            let published = export.map_or(String::new(), |export| format!("published here as {export}, "));
            format!("{} {} {published}{word}\n", device.kind, device.name)
        };
        report.devices.iter().map(line).collect()
    })
}

/// Adds a disk there; removes it again if that is another image, as when both hosts call different machines by one name.
fn add_disk(there: &Client, disk: &DiskReport, form: &DiskForm) -> Result<()> {
    let address = format!("/v1/disks/{}", disk.name);
    let added: DiskReport = there.ask(Method::PUT, &address, Some(form))?;
    is_same(disk, &added).inspect_err(|_| {
        // A failure of this is the smaller one: the disk there is idle.
        let _ = there.ask::<DoneReport>(Method::DELETE, &address, None::<&()>);
    })
}

/// A disk of this host that is going to be published.
struct Publication<'a> {
    disk: &'a DiskReport,
    export: String,
    form: ExportForm,
}

impl Publication<'_> {
    /// Publishes it; ends when the disk goes on as a client of the export.
    fn make(&self, client: &Client) -> Result<()> {
        let Publication { disk, export, form } = self;
        let _: ExportReport = client.ask(Method::PUT, &format!("/v1/exports/{export}"), Some(form))?;
        hint(format!(
            "disk {0} is published as {export}, and stays so: to make it local again, ioplane swap {0} --to OTHER.img",
            disk.name
        ));
        let disks = std::slice::from_ref(*disk);
        until(client, disks, |now| now.state == RemoteWord::Connected && now.claim == ClaimWord::Held)
            .map_err(|(disk, why)| {
                refused(
                    format!("disk {disk} is published, and does not use its export: {why}"),
                    format!("see `ioplane disk show {disk}`"),
                )
            })
    }
}

/// What devices there are made of.
struct Place<'a> {
    /// What this host publishes.
    exports: Vec<ExportReport>,
    via: Option<&'a str>,
    /// The other daemon, as it was.
    other: &'a StatusReport,
}

impl Place<'_> {
    /// How a disk on an image of this host is published, if it can be, and the other host would find it.
    fn publication<'d>(&self, disk: &'d DiskReport, args: &MovePrepare) -> Result<Publication<'d>> {
        is_settled(disk)?;
        let name = &disk.name;
        let by_hand = || {
            format!(
                "publish it yourself, then run this again: ioplane publish disk EXPORT --disk {name} --allow HOST"
            )
        };
        let export = format!("{}-{name}", args.name);
        if let Some(flaw) = name_flaw(&export) {
            return Err(refused(format!("{export} is no name for an export: {}", flaw.reason), by_hand()));
        }
        if disk.read_only {
            return Err(refused(
                format!(
                    "disk {name} is read-only, so others may read its image as well: it is not published as that of this VM"
                ),
                format!(
                    "publish the image, ioplane publish disk EXPORT --path IMAGE --read-only, put the disk on that, ioplane disk replace {name}, and run this again"
                ),
            ));
        }
        if self.exports.iter().any(|other| other.name == export) {
            return Err(refused(format!("there is an export {export} already"), by_hand()));
        }
        if self.other.disks.iter().any(|other| other.name == *name) {
            return Err(refused(
                format!("disk {name} of the other host is another one"),
                format!("compare `ioplane disk show {name}` on both hosts"),
            ));
        }
        let listen = args.publish.unwrap_or_else(ListenAddress::usual);
        self.published_uri(&export, &listen.to_string(), !args.plain)?;
        let form = ExportForm {
            disk: Some(name.clone()),
            listen: Some(listen),
            plain: args.plain.then_some(true),
            tls: (!args.plain).then_some(true),
            allow: args.allow.clone(),
            ..ExportForm::default()
        };
        Ok(Publication { disk, export, form })
    }

    /// The group of the same name, if there is one.
    fn group(&self, device: &str, group: Option<&String>) -> Option<String> {
        let group = group?;
        if self.other.groups.iter().any(|other| other.name == *group) {
            return Some(group.clone());
        }
        hint(format!("the other host has no group {group}: {device} is in none there"));
        None
    }

    fn disk<'d>(&self, disk: &'d DiskReport) -> Result<Plan<'d, DiskReport, DiskForm>> {
        may_go(disk)?;
        if let Some(other) = self.other.disks.iter().find(|other| other.name == disk.name) {
            is_same(disk, other)?;
            return Ok(Plan { report: disk, form: None });
        }
        let remote = remote(disk)?;
        let given = |rate: u64| (rate > 0).then_some(rate);
        let pauses = remote.on_timeout == TimeoutWord::Pause;
        if pauses {
            let name = &disk.name;
            hint(format!(
                "disk {name} pauses the VM by a monitor here; there its requests wait until you name one: ioplane disk set {name} --timeout-s N \
                 --on-timeout pause --qmp SOCKET"
            ));
        }
        let form = DiskForm {
            remote: Some(self.address(&disk.name, &remote.uri)?),
            timeout_s: remote.timeout_s.filter(|_| !pauses),
            on_timeout: (remote.on_timeout == TimeoutWord::Error).then_some(TimeoutWord::Error),
            reserve_iops: given(remote.reserved_iops),
            reserve_bandwidth: given(remote.reserved_bandwidth).map(Size),
            retain: Some(Size(remote.retain)).filter(|now| ![0, RemoteSpec::RETAIN].contains(&now.0)),
            silence_s: Some(remote.silence_s).filter(|now| ![0, RemoteSpec::SILENCE_S].contains(now)),
            in_doubt: Some(remote.in_doubt)
                .filter(|word| remote.instance.is_none() && *word == DoubtWord::Resend),
            read_only: Some(disk.read_only),
            serial: Some(disk.serial.clone()),
            queues: Some(disk.queues.len() as u64),
            queue_size: Some(disk.queue_size.into()),
            iops_limit: disk.iops_limit,
            iops_burst: disk.iops_burst,
            bandwidth_limit: disk.bandwidth_limit,
            bandwidth_burst: disk.bandwidth_burst,
            group: self.group(&disk.name, disk.group.as_ref()),
            ..DiskForm::default()
        };
        Ok(Plan { report: disk, form: Some(form) })
    }

    fn nic<'d>(&self, nic: &'d NicReport) -> Result<Plan<'d, NicReport, NicForm>> {
        let name = &nic.name;
        if let Some(other) = self.other.nics.iter().find(|other| other.name == *name) {
            let same = other.mac == nic.mac
                && (other.pairs, other.queue_size, other.mtu) == (nic.pairs, nic.queue_size, nic.mtu);
            if same {
                return Ok(Plan { report: nic, form: None });
            }
            return Err(refused(
                format!("NIC {name} of the other host has another address or other options"),
                format!("compare `ioplane nic show {name}` on both hosts"),
            ));
        }
        let switch = &nic.switch;
        if !self.other.switches.iter().any(|other| other.name == *switch) {
            return Err(refused(
                format!("the other host has no switch {switch}, which NIC {name} is plugged into"),
                format!("add it there: ioplane switch add {switch} ..."),
            ));
        }
        let broken = |what: &str| {
            CommandError::new(
                Code::Conflict,
                format!("the daemon here reports NIC {name} with {what}, which this version does not know"),
                "is the daemon another version?",
            )
        };
        let form = NicForm {
            switch: Some(switch.clone()),
            mac: Some(nic.mac.parse().map_err(|_| broken("that address"))?),
            isolated: Some(nic.isolated),
            vlan: Some(nic.vlan.parse().map_err(|_| broken("these VLANs"))?),
            pairs: Some(nic.pairs.into()),
            queue_size: Some(nic.queue_size.into()),
            mtu: Some(nic.mtu.into()),
            tx_frame_limit: nic.tx_frame_limit,
            tx_frame_burst: nic.tx_frame_burst,
            tx_bandwidth_limit: nic.tx_bandwidth_limit,
            tx_bandwidth_burst: nic.tx_bandwidth_burst,
            rx_frame_limit: nic.rx_frame_limit,
            rx_frame_burst: nic.rx_frame_burst,
            rx_bandwidth_limit: nic.rx_bandwidth_limit,
            rx_bandwidth_burst: nic.rx_bandwidth_burst,
            group: self.group(name, nic.group.as_ref()),
            ..NicForm::default()
        };
        Ok(Plan { report: nic, form: Some(form) })
    }

    /// Where the other host finds the export: where this one does, unless that is a socket of this host.
    fn address(&self, disk: &str, uri: &str) -> Result<NbdUri> {
        let nonsense = |uri: &str| {
            refused(
                format!("disk {disk} is at {uri}, which this version does not understand"),
                "is the daemon here another version?",
            )
        };
        let Some((_, of_socket)) = uri.split_once("+unix:///") else {
            return uri.parse().map_err(|_| nonsense(uri));
        };
        let export = of_socket.split_once('?').map_or(of_socket, |(export, _)| export);
        let own = self
            .exports
            .iter()
            .find(|own| own.name == export && uri.contains(&format!("socket={}", own.socket.display())));
        let Some(own) = own else {
            return Err(refused(
                format!("disk {disk} is behind a socket of this host: {uri}"),
                format!(
                    "the other host has to reach it: ioplane disk replace {disk} --remote nbds://HOST/EXPORT"
                ),
            ));
        };
        let Some(listen) = &own.listen else {
            return Err(refused(
                format!("export {export}, which disk {disk} uses, listens at a socket of this host only"),
                format!("publish it with --listen ADDRESS:PORT: see `ioplane publish show {export}`"),
            ));
        };
        self.published_uri(export, listen, own.tls)
    }

    /// Where the other host finds an export of this one.
    fn published_uri(&self, export: &str, listen: &str, tls: bool) -> Result<NbdUri> {
        let certified = match (tls, self.via) {
            (false, _) => None,
            (true, Some(host)) if host.trim_matches(['[', ']']).parse::<IpAddr>().is_err() => Some(host),
            (true, _) => {
                return Err(refused(
                    format!(
                        "export {export} has TLS, and the other host knows this one by the name in its certificate only"
                    ),
                    "say that name: --via HOST; `ioplane identity show` has it",
                ));
            }
        };
        // A name that is in the certificate need not be in the DNS.
        let by_address = certified.and_then(|_| published_at(listen, None));
        let published = by_address.or_else(|| published_at(listen, self.via)).ok_or_else(|| {
            refused(
                format!("export {export} listens at all addresses of this host ({listen})"),
                "say by which one the other host reaches it: --via HOST; with TLS the name in the certificate of this host",
            )
        })?;
        let wrong = "give a name or an address of this host: --via HOST";
        match NbdUri::of_export(export, [published], certified) {
            Some(Ok(uri)) => Ok(uri),
            Some(Err(error)) => Err(refused(format!("{error}"), wrong)),
            None => Err(refused(format!("export {export} is nowhere"), wrong)),
        }
    }
}

/// `HOST:PORT` by which others reach a listening address; nothing if that is every address, and none was given.
fn published_at(listen: &str, via: Option<&str>) -> Option<String> {
    let (address, port) = listen.rsplit_once(':')?;
    match via {
        Some(host) if host.contains(':') && !host.starts_with('[') => Some(format!("[{host}]:{port}")),
        Some(host) => Some(format!("{host}:{port}")),
        None if matches!(address, "0.0.0.0" | "[::]" | "*" | "") => None,
        None => Some(listen.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::published_at;

    #[test]
    fn an_export_is_reached_by_a_name_where_it_listens_everywhere() {
        assert_eq!(published_at("10.0.0.1:10809", None).as_deref(), Some("10.0.0.1:10809"));
        assert_eq!(published_at("10.0.0.1:10809", Some("host-b")).as_deref(), Some("host-b:10809"));
        assert_eq!(published_at("0.0.0.0:10809", None), None);
        assert_eq!(published_at("[::]:10809", None), None);
        assert_eq!(published_at("[::]:10809", Some("fd00::1")).as_deref(), Some("[fd00::1]:10809"));
        assert_eq!(published_at("0.0.0.0:10809", Some("host-b")).as_deref(), Some("host-b:10809"));
    }
}
