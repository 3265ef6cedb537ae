//! `qemu-args` and `libvirt-xml`: what a VMM has to be told of a device.

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_api::report::StatusReport;
use serde::Serialize;

use super::{get, kvm, libvirt, qemu};
use crate::args::{Accel, LibvirtArgs, QemuArgs};
use crate::client::Client;
use crate::output::{CommandError, hint, print, quiet};

/// The QEMU whose version is asked if nobody names one.
const QEMU: &str = "qemu-system-x86_64";

/// A QEMU's version: what was said, or what it says itself.
fn version(said: Option<&str>, program: &str) -> Result<qemu::Version> {
    match said {
        Some(text) => qemu::Version::of(text).ok_or_else(|| {
            CommandError::new(Code::Usage, format!("{text:?} is no version"), "write 7.2").into()
        }),
        None => qemu::Version::ask(program),
    }
}

/// What runs the VM: what was said, or KVM where it is usable.
fn accel(said: Option<Accel>) -> Accel {
    said.unwrap_or_else(|| if kvm::Kvm::look().usable() { Accel::Kvm } else { Accel::Tcg })
}

/// The absolute path of a program, which a shell would look for in `PATH`: libvirt takes no other for a domain's `<emulator>`.
fn emulator(program: &str) -> Result<PathBuf> {
    if program.contains('/') {
        return Ok(std::path::absolute(program)?);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file());
    found.filter(|file| file.is_absolute()).ok_or_else(|| {
        let error = format!("there is no program {program} in PATH");
        CommandError::new(Code::CommandFailed, error, "give its path: --qemu /usr/bin/qemu-system-x86_64")
            .into()
    })
}

pub fn qemu_args(client: &Client, wanted: &QemuArgs, json: bool) -> Result<()> {
    let device = device(client, &wanted.name)?;
    let version = version(wanted.qemu_version.as_deref(), &wanted.qemu)?;
    let accel = accel(wanted.accel);
    let memory = (!wanted.device_only).then_some(wanted.memory);
    let mut args = memory.map(|memory| qemu::memory(memory, wanted.hugetlb)).transpose()?.unwrap_or_default();
    args.extend(match &device {
        libvirt::ServedDevice::Disk(disk) => {
            let socket = match (wanted.migration_socket, &disk.migration_socket) {
                (false, _) => &disk.socket,
                (true, Some(socket)) => socket,
                (true, None) => {
                    let error = format!("disk {} has no migration socket", disk.name);
                    let remedy = format!("give it one: ioplane disk migration-socket {}", disk.name);
                    return Err(CommandError::new(Code::Conflict, error, remedy).into());
                }
            };
            qemu::disk(disk, socket, version, wanted.bootindex)
        }
        libvirt::ServedDevice::Nic(nic) if wanted.migration_socket => {
            let error = format!("{} is a NIC: only disks have a migration socket", nic.name);
            let remedy = "see docs/guide/migration.md";
            return Err(CommandError::new(Code::Unsupported, error, remedy).into());
        }
        libvirt::ServedDevice::Nic(nic) => qemu::nic(nic, version, accel, wanted.bootindex),
        libvirt::ServedDevice::Function(function) if wanted.migration_socket => {
            let error = format!("{} is a PCI function, and cannot migrate yet", function.name);
            return Err(CommandError::new(Code::Unsupported, error, "see docs/guide/pci.md").into());
        }
        libvirt::ServedDevice::Function(function) => qemu::function(function, version, wanted.bootindex)?,
    });
    let terminal = std::io::stdout().is_terminal();
    if terminal && !json && memory.is_some() && !quiet() {
        eprintln!(
            "# paste behind: {} -accel {} -nographic ...; -m, if given, must be {}",
            wanted.qemu,
            accel.name(),
            wanted.memory
        );
    }
    #[derive(Serialize)]
    struct QemuReport {
        args: Vec<String>,
    }
    let line = match (json, terminal || wanted.quoted) {
        (true, _) => String::new(),
        (false, true) => qemu::quoted(&args),
        (false, false) => qemu::words(&args, &wanted.name)?,
    };
    print(json, &QemuReport { args }, |_| line + "\n")
}

/// A disk, a NIC or a PCI function, by its name.
fn device(client: &Client, name: &str) -> Result<libvirt::ServedDevice> {
    let status: StatusReport = get(client, "/v1/status")?;
    let disk = status
        .disks
        .into_iter()
        .find(|disk| disk.name == name)
        .map(|disk| libvirt::ServedDevice::Disk(Box::new(disk)));
    let nic = || {
        status
            .nics
            .into_iter()
            .find(|nic| nic.name == name)
            .map(|nic| libvirt::ServedDevice::Nic(Box::new(nic)))
    };
    let function = || {
        let function = status.functions.into_iter().find(|function| function.name == name)?;
        Some(libvirt::ServedDevice::Function(Box::new(function)))
    };
    disk.or_else(nic).or_else(function).ok_or_else(|| {
        let error = format!("there is no disk, no nic and no PCI function {name}");
        let remedy = "see `ioplane disk list`, `ioplane nic list` and `ioplane pci list`";
        CommandError::new(Code::NotFound, error, remedy).into()
    })
}

pub fn libvirt_xml(client: &Client, wanted: &LibvirtArgs, json: bool) -> Result<()> {
    let devices: Vec<libvirt::ServedDevice> =
        wanted.names.iter().map(|name| device(client, name)).collect::<Result<_>>()?;
    let mut arguments = Vec::new();
    for device in &devices {
        let libvirt::ServedDevice::Function(function) = device else { continue };
        if wanted.device_only {
            let error = format!(
                "{} is a PCI function: libvirt has no element for it, and it cannot be attached to a domain that is there",
                function.name
            );
            let remedy =
                "leave --device-only out, and put <qemu:commandline> of what is printed into the domain";
            return Err(CommandError::new(Code::Unsupported, error, remedy).into());
        }
        arguments.extend(qemu::function(
            function,
            version(wanted.qemu_version.as_deref(), wanted.qemu.as_deref().unwrap_or(QEMU))?,
            None,
        )?);
    }
    let accel = accel(wanted.accel);
    let xml = if wanted.device_only {
        let nics = devices.iter().any(|device| matches!(device, libvirt::ServedDevice::Nic(_)));
        if nics && accel == Accel::Tcg {
            hint(
                "without KVM a NIC must have no MSI-X: docs/guide/nics.md#libvirt has what the domain needs for that",
            );
        }
        libvirt::device_xml(&devices)
    } else {
        let emulator = wanted.qemu.as_deref().map(emulator).transpose()?;
        let host = libvirt::Host { accel, emulator: emulator.as_deref() };
        libvirt::domain_xml(&devices, &arguments, wanted.memory, &host)
    };
    #[derive(Serialize)]
    struct XmlReport {
        xml: String,
    }
    print(json, &XmlReport { xml }, |report| report.xml.clone())
}
