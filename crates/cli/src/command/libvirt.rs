//! Disks, NICs and PCI functions for libvirt.
//!
//! libvirt has no element for a vfio-user device: a function is given to QEMU past it, by `<qemu:commandline>`. The words are those of libvirt's domain schema; a test holds what is printed against the schema that libvirt ships.

use std::path::Path;

use ioplane_api::report::{DiskReport, FunctionReport, NicReport};
use ioplane_api::size::Size;
use ioplane_api::spec::{MTU, NIC_QUEUE_SIZE};

use crate::args::Accel;

/// One device of a domain.
pub enum ServedDevice {
    Disk(Box<DiskReport>),
    Nic(Box<NicReport>),
    Function(Box<FunctionReport>),
}

/// What runs a domain.
pub struct Host<'a> {
    pub accel: Accel,
    /// Absolute; libvirt takes its own if it is left out.
    pub emulator: Option<&'a Path>,
}

/// A text inside an attribute or an element.
fn attribute(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '\'' => safe.push_str("&apos;"),
            c => safe.push(c),
        }
    }
    safe
}

/// Names of virtio disks in the guest, as libvirt wants them: vda to vdz, then vdaa.
fn target(mut index: usize) -> String {
    let mut letters = Vec::new();
    loop {
        letters.push(char::from(b'a' + (index % 26) as u8));
        match (index / 26).checked_sub(1) {
            Some(next) => index = next,
            None => {
                return letters.iter().rev().fold("vd".to_owned(), |name, letter| name + &letter.to_string());
            }
        }
    }
}

/// libvirt counts whole seconds.
const RECONNECT: &str = "<reconnect enabled='yes' timeout='1'/>";

fn disk(disk: &DiskReport, index: usize) -> Vec<String> {
    vec![
        "<disk type='vhostuser' device='disk'>".to_owned(),
        format!(
            "  <driver name='qemu' type='raw' queues='{}' queue_size='{}'/>",
            disk.queues.len(),
            disk.queue_size
        ),
        format!("  <source type='unix' path='{}'>", attribute(&disk.socket.display().to_string())),
        format!("    {RECONNECT}"),
        "  </source>".to_owned(),
        format!("  <target dev='{}' bus='virtio'/>", target(index)),
        format!("  <alias name='ua-{}'/>", disk.name),
        "</disk>".to_owned(),
    ]
}

fn nic(nic: &NicReport) -> Vec<String> {
    let mut lines = vec![
        "<interface type='vhostuser'>".to_owned(),
        format!("  <mac address='{}'/>", nic.mac),
        format!(
            "  <source type='unix' path='{}' mode='client'>",
            attribute(&nic.socket.display().to_string())
        ),
        format!("    {RECONNECT}"),
        "  </source>".to_owned(),
        "  <model type='virtio'/>".to_owned(),
    ];
    let mut driver = String::new();
    if nic.pairs > 1 {
        driver.push_str(&format!(" queues='{}'", nic.pairs));
    }
    if nic.queue_size != NIC_QUEUE_SIZE {
        driver.push_str(&format!(" rx_queue_size='{0}' tx_queue_size='{0}'", nic.queue_size));
    }
    if !driver.is_empty() {
        lines.push(format!("  <driver{driver}/>"));
    }
    if nic.mtu != MTU {
        lines.push(format!("  <mtu size='{}'/>", nic.mtu));
    }
    lines.extend([format!("  <alias name='ua-{}'/>", nic.name), "</interface>".to_owned()]);
    lines
}

fn devices(all: &[ServedDevice]) -> Vec<String> {
    let mut disks = 0..;
    let lines = all.iter().flat_map(|device| match device {
        ServedDevice::Disk(report) => disk(report, disks.next().unwrap_or(0)),
        ServedDevice::Nic(report) => nic(report),
        ServedDevice::Function(_) => Vec::new(),
    });
    lines.collect()
}

/// QEMU's arguments past libvirt, as a part of a domain; nothing without arguments.
fn past(arguments: &[String]) -> String {
    if arguments.is_empty() {
        return String::new();
    }
    let lines = arguments.iter().map(|it| format!("    <qemu:arg value='{}'/>\n", attribute(it)));
    format!("  <qemu:commandline>\n{}  </qemu:commandline>\n", lines.collect::<String>())
}

/// NICs without MSI-X, which those of a QEMU without KVM must be: see [`super::qemu::nic`]. libvirt itself sets `vectors` of a NIC with
/// several pairs, and an override goes before that.
fn without_vectors(all: &[ServedDevice]) -> String {
    let nics = all.iter().filter_map(|device| match device {
        ServedDevice::Nic(nic) => Some(format!(
            "    <qemu:device alias='ua-{}'>
      <qemu:frontend>
        <qemu:property name='vectors' type='unsigned' value='0'/>
      </qemu:frontend>
    </qemu:device>\n",
            nic.name
        )),
        _ => None,
    });
    let nics: String = nics.collect();
    if nics.is_empty() { nics } else { format!("  <qemu:override>\n{nics}  </qemu:override>\n") }
}

/// Only the devices; none of them is a function.
pub fn device_xml(all: &[ServedDevice]) -> String {
    devices(all).join("\n") + "\n"
}

/// A whole domain, called as its first device is, to be defined and started as it is.
///
/// `arguments` are QEMU's, for functions. Without KVM the guest has room for a second vCPU, as QEMU leaves out memory barriers where there is
/// none (docs/measurements/tcg-barrier.md).
pub fn domain_xml(
    all: &[ServedDevice],
    arguments: &[String],
    Size(memory): Size,
    &Host { accel, emulator }: &Host<'_>,
) -> String {
    let (mut boots, mut name) = (false, "guest");
    for device in all.iter().rev() {
        match device {
            ServedDevice::Disk(disk) => (boots, name) = (true, &disk.name),
            ServedDevice::Nic(nic) => name = &nic.name,
            ServedDevice::Function(function) => name = &function.name,
        }
    }
    let boot = if boots { "hd" } else { "network" };
    let inside: String = devices(all).iter().map(|line| format!("    {line}\n")).collect();
    let (kind, vcpu, cpu, past) = match accel {
        Accel::Kvm => ("kvm", "<vcpu>1</vcpu>", "  <cpu mode='host-passthrough'/>\n", past(arguments)),
        Accel::Tcg => ("qemu", "<vcpu current='1'>2</vcpu>", "", past(arguments) + &without_vectors(all)),
    };
    let emulator = emulator.map_or(String::new(), |path| {
        format!("    <emulator>{}</emulator>\n", attribute(&path.display().to_string()))
    });
    let qemu = if past.is_empty() { "" } else { " xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'" };
    format!(
        "<domain type='{kind}'{qemu}>
  <name>{name}</name>
  <memory unit='b'>{memory}</memory>
  <memoryBacking>
    <source type='memfd'/>
    <access mode='shared'/>
  </memoryBacking>
  {vcpu}
  <os>
    <type arch='x86_64' machine='q35'>hvm</type>
    <boot dev='{boot}'/>
  </os>
  <features>
    <acpi/>
    <apic/>
  </features>
{cpu}  <devices>
{emulator}{inside}    <serial type='pty'/>
    <console type='pty'/>
  </devices>
{past}</domain>
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_have_names_of_their_own() {
        assert_eq!(
            [0, 1, 25, 26, 27, 701, 702].map(target),
            ["vda", "vdb", "vdz", "vdaa", "vdab", "vdzz", "vdaaa"]
        );
    }

    #[test]
    fn attributes_are_safe() {
        assert_eq!(attribute("/a'b<c&d"), "/a&apos;b&lt;c&amp;d");
    }
}
