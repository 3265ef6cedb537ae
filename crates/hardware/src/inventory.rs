//! The PCI functions of this host, and which of them can be handed to a guest.

use std::fs;
use std::path::Path;

use ioplane_api::spec::PciAddress;
use ioplane_pci::Identity;
use serde::Serialize;

use crate::error::LeaseError;
use crate::sysfs::{Sysfs, VFIO, link, number, parse, text};

pub use crate::error::Obstacle;
pub use crate::sysfs::Remapping;

/// How deep below a function its interfaces and disks are looked for (`virtio0/host0/target.../block/sda`).
const DEPTH: u32 = 8;
/// Most entries that are looked at there.
const ENTRIES: u32 = 4096;

/// Bits of a resource's flags in the file `resource` (Linux, `include/linux/ioport.h`).
const RESOURCE_PORT: u64 = 0x100;
const RESOURCE_MEMORY: u64 = 0x200;
const RESOURCE_PREFETCH: u64 = 0x2000;
const RESOURCE_64: u64 = 0x10_0000;
/// Of an interface's flags: it is up.
const IFF_UP: u64 = 1;

/// A BAR, as the host's kernel has placed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FoundBar {
    /// Its number.
    pub index: u8,
    /// Bytes.
    pub size: u64,
    /// `ports`, `memory` or `memory64`.
    pub space: &'static str,
    /// Whether reading has no effect and writes may be merged.
    pub prefetchable: bool,
}

/// Another function of the same IOMMU group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Neighbour {
    /// Where.
    pub address: PciAddress,
    /// Who drives it.
    pub driver: Option<String>,
}

/// A network interface that the host has on a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Interface {
    /// As `ip link` shows it.
    pub name: String,
    /// Whether it is up.
    pub up: bool,
    /// The bridge or bond that it belongs to.
    pub master: Option<String>,
}

/// One function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Found {
    /// Where.
    pub address: PciAddress,
    /// Who it is.
    pub identity: Identity,
    /// Its class in words.
    pub class: &'static str,
    /// Who drives it.
    pub driver: Option<String>,
    /// Its IOMMU group.
    pub group: Option<u32>,
    /// Who else is in that group.
    pub neighbours: Vec<Neighbour>,
    /// Its BARs.
    pub bars: Vec<FoundBar>,
    /// Network interfaces that the host has on it.
    pub interfaces: Vec<Interface>,
    /// Disks that the host has on it.
    pub disks: Vec<String>,
    /// What stands in the way of handing it to a guest; nothing: it can be passed.
    pub obstacles: Vec<Obstacle>,
    /// The state model that fits it.
    pub model: Option<String>,
}

impl Found {
    /// Whether it can be handed to a guest as it is now.
    pub fn passable(&self) -> bool {
        self.obstacles.is_empty()
    }
}

/// All functions of the host whose sysfs is mounted at `root` (`/sys`), by rising address. `model` names the state model that fits a
/// function. Functions that go away while they are looked at are left out.
pub fn list(root: &Path, model: impl Fn(&Identity) -> Option<String>) -> Result<Vec<Found>, LeaseError> {
    let sysfs = Sysfs::new(root);
    let folder = sysfs.functions();
    let all = sysfs.addresses(&folder).map_err(|source| LeaseError::NoPci { folder, source })?;
    Ok(all.into_iter().filter_map(|address| look(&sysfs, address, &model)).collect())
}

/// What to do where interrupts are not remapped.
pub const REMAP: &str = "switch interrupt remapping on, which comes with VT-d or AMD-Vi in the firmware's set-up, and boot without intremap=off and \
     nointremap on the kernel's command line (QEMU: -device intel-iommu,intremap=on -machine kernel-irqchip=split)";

/// Whether interrupts are remapped on the host whose sysfs is mounted at `root`.
pub fn remapping(root: &Path) -> Remapping {
    Sysfs::new(root).remapping()
}

/// One function.
pub fn find(
    root: &Path,
    address: PciAddress,
    model: impl Fn(&Identity) -> Option<String>,
) -> Result<Found, LeaseError> {
    look(&Sysfs::new(root), address, &model).ok_or(LeaseError::NoSuchFunction(address))
}

pub(crate) fn look(
    sysfs: &Sysfs<'_>,
    address: PciAddress,
    model: &dyn Fn(&Identity) -> Option<String>,
) -> Option<Found> {
    let folder = sysfs.function(address);
    let short = |name: &str| Some(number(&folder.join(name))? as u16);
    let class = (number(&folder.join("class"))? & 0xff_ffff) as u32;
    let identity = Identity {
        vendor: short("vendor")?,
        device: short("device")?,
        revision: short("revision").unwrap_or(0) as u8,
        class,
        subsystem: (short("subsystem_vendor").unwrap_or(0), short("subsystem_device").unwrap_or(0)),
    };
    let group = sysfs.iommu_group(address);
    let mut below = Below { left: ENTRIES, ..Below::default() };
    below.walk(&folder, DEPTH);
    let mut found = Found {
        address,
        identity,
        class: class_in_words(class),
        driver: sysfs.bound_to(address),
        group,
        neighbours: group.map(|group| neighbours(sysfs, group, address)).unwrap_or_default(),
        bars: bars(&text(&folder.join("resource")).unwrap_or_default()),
        interfaces: below.interfaces,
        disks: below.disks,
        obstacles: Vec::new(),
        model: model(&identity),
    };
    found.obstacles = obstacles(sysfs, &folder, &found);
    Some(found)
}

fn neighbours(sysfs: &Sysfs<'_>, group: u32, but: PciAddress) -> Vec<Neighbour> {
    let all = sysfs.addresses(&sysfs.group(group).join("devices")).unwrap_or_default();
    let others = all.into_iter().filter(|address| *address != but);
    others.map(|address| Neighbour { address, driver: sysfs.bound_to(address) }).collect()
}

/// The first six lines are the BARs: first and last address, flags.
fn bars(resource: &str) -> Vec<FoundBar> {
    let line = |(index, line): (u8, &str)| {
        let mut words = line.split_whitespace().map_while(parse);
        let (start, end, flags) = (words.next()?, words.next()?, words.next()?);
        let space = match flags {
            flags if flags & RESOURCE_PORT != 0 => "ports",
            flags if flags & RESOURCE_MEMORY == 0 => return None,
            flags if flags & RESOURCE_64 != 0 => "memory64",
            _ => "memory",
        };
        let size = end.checked_sub(start)?.checked_add(1)?;
        Some(FoundBar { index, size, space, prefetchable: flags & RESOURCE_PREFETCH != 0 })
    };
    (0u8..6).zip(resource.lines()).filter_map(line).collect()
}

/// What hangs below a function.
#[derive(Default)]
struct Below {
    interfaces: Vec<Interface>,
    disks: Vec<String>,
    left: u32,
}

impl Below {
    /// Folders only, no links: those lead elsewhere.
    fn walk(&mut self, folder: &Path, depth: u32) {
        let Ok(entries) = fs::read_dir(folder) else { return };
        for entry in entries.flatten() {
            if self.left == 0 {
                return;
            }
            self.left -= 1;
            let name = entry.file_name().to_string_lossy().into_owned();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            // A bridge's functions are not its own.
            if !is_folder || name.parse::<PciAddress>().is_ok() {
                continue;
            }
            match name.as_str() {
                "net" => self.interfaces.extend(names(&entry.path()).into_iter().map(|name| {
                    let folder = entry.path().join(&name);
                    let up = number(&folder.join("flags")).is_some_and(|flags| flags & IFF_UP != 0);
                    Interface { name, up, master: link(&folder.join("master")) }
                })),
                "block" => self.disks.extend(names(&entry.path())),
                _ if depth > 0 => self.walk(&entry.path(), depth - 1),
                _ => {}
            }
        }
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn obstacles(sysfs: &Sysfs<'_>, folder: &Path, found: &Found) -> Vec<Obstacle> {
    let address = found.address;
    let mut all = Vec::new();
    let mut add = |forcible, why: String, advice: String| {
        all.push(Obstacle { why, advice, forcible, unsafe_interrupts: false });
    };
    if found.identity.class >> 16 == 0x06 {
        add(false, "it is a bridge".into(), "choose a function behind it".into());
    }
    match found.group {
        None if sysfs.has_iommu() => add(
            false,
            "it is in no IOMMU group: nothing would keep it from the host's memory".into(),
            "choose a function that `ioplane pci list` shows with a group".into(),
        ),
        None => add(
            false,
            "this host has no IOMMU switched on: nothing would keep the function from the host's memory".into(),
            "switch VT-d or AMD-Vi on in the firmware's set-up and boot with intel_iommu=on (Intel) on the kernel's \
             command line"
                .into(),
        ),
        Some(_) => {}
    }
    let told = match sysfs.remapping() {
        _ if found.group.is_none() => None,
        Remapping::On | Remapping::Unknown => None,
        Remapping::Allowed => Some("or accept that: --unsafe-interrupts"),
        Remapping::Off => Some(
            "or accept that: `echo Y > /sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts` (`modprobe vfio_iommu_type1` \
             first), then --unsafe-interrupts",
        ),
    };
    if let Some(told) = told {
        all.push(Obstacle {
            why: "this host has no interrupt remapping: whoever has the function can raise any interrupt of the host".into(),
            advice: format!("{REMAP}; {told}"),
            forcible: false,
            unsafe_interrupts: sysfs.remapping() == Remapping::Allowed,
        });
    }
    let mut add = |forcible, why: String, advice: String| {
        all.push(Obstacle { why, advice, forcible, unsafe_interrupts: false });
    };
    for other in &found.neighbours {
        let driver = other.driver.as_deref().filter(|driver| !harmless(driver));
        if let (Some(driver), Some(group)) = (driver, found.group) {
            let other = other.address;
            add(
                false,
                format!("it shares IOMMU group {group} with {other}, which {driver} drives"),
                format!(
                    "take {other} away from {driver} (`echo {other} > /sys/bus/pci/drivers/{driver}/unbind`) or move \
                     the card to another slot"
                ),
            );
        }
    }
    if let Some(functions) = number(&folder.join("sriov_numvfs")).filter(|count| *count > 0) {
        add(
            false,
            format!("it has {functions} virtual functions, which would go with it"),
            format!("pass one of those instead, or `echo 0 > /sys/bus/pci/devices/{address}/sriov_numvfs`"),
        );
    }
    for interface in &found.interfaces {
        let Interface { name, up, master } = interface;
        if let Some(master) = master {
            add(
                true,
                format!("its interface {name} belongs to {master}"),
                format!("`ip link set {name} nomaster`"),
            );
        }
        if *up {
            add(
                true,
                format!("its interface {name} is up: this host uses it"),
                format!("`ip link set {name} down`"),
            );
        }
    }
    if !found.disks.is_empty() {
        add(
            true,
            format!("this host has disks on it: {}", found.disks.join(", ")),
            "unmount them first; whatever still uses them loses them".into(),
        );
    }
    if number(&folder.join("boot_vga")) == Some(1) {
        add(true, "it is this host's console".into(), "give the host another display, or none".into());
    }
    all
}

/// Drivers that do not make a group unusable (Linux, `vfio_dev_driver_allowed`).
fn harmless(driver: &str) -> bool {
    driver == VFIO || driver == "pci-stub" || driver == "pcieport"
}

/// Base class and subclass (PCI Code and ID Assignment 1.11, section 1).
fn class_in_words(class: u32) -> &'static str {
    match (class >> 16, class >> 8 & 0xff) {
        (0x01, 0x06) => "SATA controller",
        (0x01, 0x08) => "NVMe controller",
        (0x01, _) => "storage controller",
        (0x02, 0x00) => "Ethernet controller",
        (0x02, _) => "network controller",
        (0x03, _) => "display controller",
        (0x04, _) => "multimedia device",
        (0x05, _) => "memory controller",
        (0x06, 0x00) => "host bridge",
        (0x06, 0x01) => "ISA bridge",
        (0x06, 0x04) => "PCI bridge",
        (0x06, _) => "bridge",
        (0x07, _) => "communication controller",
        (0x08, _) => "system peripheral",
        (0x09, _) => "input device",
        (0x0c, 0x03) => "USB controller",
        (0x0c, 0x05) => "SMBus",
        (0x0c, _) => "serial bus controller",
        (0x0d, _) => "wireless controller",
        (0x10, _) => "encryption controller",
        (0x12, _) => "processing accelerator",
        _ => "device",
    }
}

#[cfg(test)]
#[path = "inventory_tests.rs"]
mod tests;
