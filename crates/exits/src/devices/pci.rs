//! The VM's own PCI functions and where their registers lie: the answer of QMP's `query-pci`, live or in a file.

use serde_json::Value;

use super::place::RegisterRole::{InterruptCause, InterruptMask, Other, QueueNotification, Transmit};
use super::place::{DeviceModel, DevicePlace, RegisterRole};
use crate::queues::QueuePorts;

/// So many regions are remembered.
const REGIONS: usize = 4096;

/// A legacy virtio device's register of queue notifications (Virtio 1.3, 4.1.4.10).
const LEGACY_NOTIFY: u64 = 16;

/// The regions of a VM's PCI functions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    regions: Vec<Region>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    start: u64,
    size: u64,
    io: bool,
    bar: u64,
    device: String,
    model: DeviceModel,
    vendor: u64,
    id: u64,
}

impl Region {
    fn is_legacy_virtio(&self) -> bool {
        self.io && self.vendor == 0x1af4 && (0x1000..=0x103f).contains(&self.id)
    }
}

impl Layout {
    /// From what `query-pci` returns (with or without the `return` around it). Nothing if it is something else.
    pub fn from_query_pci(answer: &Value) -> Option<Layout> {
        let mut layout = Layout::default();
        let buses = answer.get("return").unwrap_or(answer).as_array()?;
        for bus in buses {
            layout.bus(bus, 0);
        }
        Some(layout)
    }

    /// Whether it names anything.
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// The functions, each once.
    pub fn functions(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.regions.iter().map(|region| region.device.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn bus(&mut self, bus: &Value, depth: u32) {
        for device in bus["devices"].as_array().into_iter().flatten() {
            self.device(device);
            if depth < 8 {
                // A bridge has the functions behind it.
                self.bus(&device["pci_bridge"], depth + 1);
            }
        }
    }

    fn device(&mut self, device: &Value) {
        let number = |value: &Value| value.as_u64().unwrap_or(0);
        let (vendor, id) = (number(&device["id"]["vendor"]), number(&device["id"]["device"]));
        let place = format!(
            "{:02x}:{:02x}.{:x}",
            number(&device["bus"]),
            number(&device["slot"]),
            number(&device["function"])
        );
        let own = device["qdev_id"].as_str().unwrap_or_default();
        let own: String = own.chars().filter(|c| !c.is_control()).take(40).collect();
        let own = if own.is_empty() { String::new() } else { format!(" {own:?}") };
        let (model, name) = model(vendor, id);
        let name = format!("{name}{own} at {place}");
        for region in device["regions"].as_array().into_iter().flatten() {
            let start = region["address"].as_i64().unwrap_or(-1) as u64;
            let size = number(&region["size"]);
            // Not mapped yet: all ones, or zero.
            if size == 0 || start == 0 || start == u64::MAX || self.regions.len() >= REGIONS {
                continue;
            }
            self.regions.push(Region {
                start,
                size,
                io: region["type"].as_str() == Some("io"),
                bar: number(&region["bar"]),
                device: name.clone(),
                model,
                vendor,
                id,
            });
        }
    }

    /// Where legacy virtio devices are told of queues.
    pub fn queue_ports(&self) -> QueuePorts {
        let legacy = self.regions.iter().filter(|region| region.is_legacy_virtio());
        QueuePorts::new(
            legacy.filter_map(|region| u16::try_from(region.start.checked_add(LEGACY_NOTIFY)?).ok()),
        )
    }

    fn find(&self, address: u64, io: bool) -> Option<DevicePlace> {
        let inside = |region: &&Region| {
            region.io == io && address >= region.start && address - region.start < region.size
        };
        let region = self.regions.iter().find(inside)?;
        Some(register(region, address - region.start).of(region.model))
    }

    /// The register behind a port.
    pub(super) fn port(&self, port: u16) -> Option<DevicePlace> {
        self.find(port.into(), true)
    }

    /// The register at an address.
    pub(super) fn memory(&self, address: u64) -> Option<DevicePlace> {
        self.find(address, false)
    }
}

/// What VMs usually have, by vendor and device: what rules know it as, and its name.
fn model(vendor: u64, id: u64) -> (DeviceModel, String) {
    use DeviceModel::*;
    let (model, name) = match (vendor, id) {
        (0x1af4, 0x1000 | 0x1041) => (VirtioNet, "virtio-net"),
        (0x1af4, 0x1001 | 0x1042) => (VirtioBlk, "virtio-blk"),
        (0x1af4, 0x1002 | 0x1045) => (VirtioBalloon, "virtio-balloon"),
        (0x1af4, 0x1003 | 0x1043) => (Virtio, "virtio-console"),
        (0x1af4, 0x1004 | 0x1048) => (Virtio, "virtio-scsi"),
        (0x1af4, 0x1005 | 0x1044) => (Virtio, "virtio-rng"),
        (0x1af4, 0x1009 | 0x1049) => (Virtio, "virtio-9p"),
        (0x1af4, 0x1050) => (Virtio, "virtio-gpu"),
        (0x1af4, 0x1052) => (Virtio, "virtio-input"),
        (0x1af4, 0x1053) => (Virtio, "virtio-vsock"),
        (0x1af4, 0x105a) => (Virtio, "virtio-fs"),
        (0x1af4, 0x1110) => (Other, "ivshmem"),
        (0x8086, 0x100e | 0x100f) => (E1000, "e1000"),
        (0x8086, 0x10d3) => (E1000e, "e1000e"),
        (0x8086, 0x10c9) => (Other, "igb"),
        (0x10ec, 0x8139) => (Rtl8139, "rtl8139"),
        (0x10ec, 0x8029) => (Ne2000, "ne2k_pci"),
        (0x1022, 0x2000) => (Pcnet, "pcnet"),
        (0x15ad, 0x07b0) => (Other, "vmxnet3"),
        (0x8086, 0x7010) => (Ide, "IDE (PIIX3)"),
        (0x8086, 0x7111) => (Ide, "IDE (PIIX4)"),
        (0x8086, 0x2922) => (Ahci, "AHCI (ICH9)"),
        (0x8086, 0x2930) => (Other, "SMBus (ICH9)"),
        (0x8086, 0x7113) => (Other, "power management (PIIX4)"),
        (0x1234, 0x1111) => (Other, "VGA"),
        (0x1b36, 0x0100) => (Other, "QXL"),
        (0x1b36, 0x000d) => (Other, "xHCI"),
        (0x1b36, 0x0010) => (Other, "NVMe"),
        (0x1b36, 0x000c) => (Other, "PCIe root port"),
        (0x1000, 0x0012) => (Lsi53c895a, "lsi53c895a"),
        (0x8086, 0x2415) => (Other, "AC97"),
        (0x8086, 0x2668) => (Other, "HD audio"),
        _ => return (Other, format!("PCI {vendor:04x}:{id:04x}")),
    };
    (model, name.into())
}

fn register(region: &Region, offset: u64) -> DevicePlace {
    let bar = region.bar;
    let known = match (region.vendor, region.id) {
        _ if region.is_legacy_virtio() => legacy_virtio(offset),
        // QEMU's layout of BAR 4: four parts of a page each.
        (0x1af4, 0x1000..=0x107f) if bar == 4 => modern_virtio(offset),
        (0x8086, 0x100e | 0x100f | 0x10d3) if bar == 0 => e1000(offset),
        (0x10ec, 0x8139) => rtl8139(offset),
        (0x10ec, 0x8029) => ne2000(offset),
        (0x8086, 0x7010 | 0x7111) if bar == 4 => bus_master(offset),
        _ => None,
    };
    match known {
        Some((role, name)) => {
            let queue = (role == QueueNotification).then(|| queue(region, offset)).flatten();
            DevicePlace::named(&region.device, name, offset).role(role).of_queue(queue)
        }
        None => DevicePlace::unnamed(&region.device, format!("BAR {bar} + {offset:#x}"), offset),
    }
}

fn legacy_virtio(offset: u64) -> Option<(RegisterRole, &'static str)> {
    Some(match offset {
        0..=3 => (Other, "device features"),
        4..=7 => (Other, "driver features"),
        8..=11 => (Other, "queue address"),
        12..=13 => (Other, "queue size"),
        14..=15 => (Other, "queue selector"),
        LEGACY_NOTIFY..=17 => (QueueNotification, "queue notification"),
        18 => (Other, "device status"),
        19 => (InterruptCause, "interrupt status"),
        _ => (Other, "configuration"),
    })
}

fn modern_virtio(offset: u64) -> Option<(RegisterRole, &'static str)> {
    Some(match offset {
        0..=0xfff => (Other, "common configuration"),
        0x1000..=0x1fff => (InterruptCause, "interrupt status"),
        0x2000..=0x2fff => (Other, "device configuration"),
        _ => (QueueNotification, "queue notification"),
    })
}

/// Where QEMU's notification registers begin in BAR 4.
const NOTIFY: u64 = 0x3000;
/// So many queues has each device room for.
const QUEUES: u64 = 1024;

/// Which queue a modern virtio device is notified of. QEMU gives each queue 4 bytes, or with `page-per-vq=on` a page; the size of the BAR,
/// which is rounded up to a power of two, tells which. A BAR of another size is another VMM's, and nothing is said of it. A legacy device has
/// one register for all queues, and what is written tells the queue: [`DevicePlace::of_queue`].
fn queue(region: &Region, offset: u64) -> Option<u64> {
    let each =
        [4, 0x1000].into_iter().find(|each| (NOTIFY + each * QUEUES).next_power_of_two() == region.size)?;
    let queue = (!region.io && region.bar == 4).then(|| offset.checked_sub(NOTIFY)).flatten()? / each;
    (queue < QUEUES).then_some(queue)
}

fn e1000(offset: u64) -> Option<(RegisterRole, &'static str)> {
    Some(match offset {
        0x0 => (Other, "CTRL"),
        0x8 => (Other, "STATUS"),
        0x14 => (Other, "EERD"),
        0x20 => (Other, "MDIC"),
        0x28 | 0x2c | 0x30 | 0x170 => (Other, "flow control"),
        0x38 => (Other, "VET (VLAN Ethernet type)"),
        0xc0 => (InterruptCause, "ICR (interrupt cause)"),
        0xc4 => (Other, "ITR (interrupt throttle)"),
        0xc8 => (Other, "ICS"),
        0xd0 => (InterruptMask, "IMS (interrupt mask set)"),
        0xd8 => (InterruptMask, "IMC (interrupt mask clear)"),
        0x100 => (Other, "RCTL"),
        0x400 => (Other, "TCTL"),
        0x410 => (Other, "TIPG"),
        0xe00 => (Other, "LEDCTL"),
        0x1000 => (Other, "PBA (packet buffer allocation)"),
        0x2160 | 0x2168 => (Other, "flow control"),
        0x2800 | 0x2804 => (Other, "receive ring address"),
        0x2808 => (Other, "RDLEN"),
        0x2810 => (Other, "RDH"),
        0x2818 => (Other, "RDT (receive tail)"),
        0x2820 | 0x282c => (Other, "receive interrupt delay"),
        0x2828 => (Other, "RXDCTL"),
        0x3800 | 0x3804 => (Other, "transmit ring address"),
        0x3808 => (Other, "TDLEN"),
        0x3810 => (Other, "TDH"),
        0x3818 => (Transmit, "TDT (transmit tail)"),
        0x3820 | 0x382c => (Other, "transmit interrupt delay"),
        0x3828 => (Other, "TXDCTL"),
        0x4000..=0x40ff => (Other, "statistics"),
        0x5000 => (Other, "RXCSUM"),
        0x5200..=0x53ff => (Other, "multicast table"),
        0x5400..=0x54ff => (Other, "receive address"),
        0x5600..=0x57ff => (Other, "VLAN filter"),
        0x5800 => (Other, "WUC (wake-up control)"),
        0x5808 => (Other, "WUFC (wake-up filter)"),
        0x5820 => (Other, "MANC (management control)"),
        _ => return None,
    })
}

fn rtl8139(offset: u64) -> Option<(RegisterRole, &'static str)> {
    Some(match offset {
        0x00..=0x05 => (Other, "MAC address"),
        0x10..=0x1f => (Transmit, "transmit status, or 8139C+ counters"),
        0x20..=0x2f => (Transmit, "transmit address"),
        0x30..=0x33 => (Other, "receive buffer"),
        0x08..=0x0f => (Other, "multicast filter"),
        0x37 => (Other, "command"),
        0x38..=0x39 => (Other, "CAPR (receive read pointer)"),
        0x3c..=0x3d => (InterruptMask, "IMR (interrupt mask)"),
        0x3e..=0x3f => (InterruptCause, "ISR (interrupt status)"),
        0x40..=0x43 => (Other, "TCR"),
        0x44..=0x47 => (Other, "RCR"),
        0x3a..=0x3b => (Other, "CBR (receive write pointer)"),
        0x48..=0x4b => (Other, "timer"),
        0x4c..=0x4f => (Other, "missed packets"),
        0x50 => (Other, "9346CR (EEPROM)"),
        0x51..=0x57 | 0x59..=0x5a => (Other, "configuration"),
        0x58 => (Other, "media status"),
        0x5c..=0x5d => (Other, "multiple interrupts"),
        0x62..=0x6d => (Other, "PHY"),
        0xd8 => (Other, "configuration"),
        0xd9 => (Transmit, "TPPoll (transmit poll, C+)"),
        0xe0..=0xe1 => (Other, "command (C+)"),
        0xe2..=0xe3 => (Other, "interrupt mitigation (C+)"),
        0xe4..=0xeb => (Other, "receive ring address (C+)"),
        0xec => (Other, "early transmit threshold (C+)"),
        _ => return None,
    })
}

/// What most registers are depends on the page that the command has chosen, which no exit tells: the names are of page 0.
fn ne2000(offset: u64) -> Option<(RegisterRole, &'static str)> {
    Some(match offset {
        0x00 => (Other, "command"),
        0x01..=0x02 => (Other, "ends of the receive ring"),
        0x03 => (Other, "BNRY (receive read pointer)"),
        0x04 => (Transmit, "TSR (transmit status), or start of a frame"),
        0x05..=0x06 => (Other, "length of a frame"),
        0x07 => (InterruptCause, "ISR (interrupt status), or CURR (receive write pointer) of page 1"),
        0x08..=0x09 => (Other, "address of remote DMA"),
        0x0a..=0x0b => (Other, "count of remote DMA"),
        0x0c => (Other, "RCR"),
        0x0d => (Other, "TCR"),
        0x0e => (Other, "DCR"),
        0x0f => (InterruptMask, "IMR (interrupt mask)"),
        0x10..=0x17 => (Other, "data"),
        0x18..=0x1f => (Other, "reset"),
        _ => return None,
    })
}

fn bus_master(offset: u64) -> Option<(RegisterRole, &'static str)> {
    Some(match offset {
        0 => (Other, "bus master command, channel 1"),
        2 => (Other, "bus master status, channel 1"),
        4..=7 => (Other, "descriptor table, channel 1"),
        8 => (Other, "bus master command, channel 2"),
        10 => (Other, "bus master status, channel 2"),
        12..=15 => (Other, "descriptor table, channel 2"),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::devices::Devices;
    use crate::event::Detail;

    #[test]
    fn regions_are_found_behind_bridges_too() {
        let net = json!({"bus": 1, "slot": 2, "function": 0, "qdev_id": "net0",
            "id": {"vendor": 0x1af4, "device": 0x1041},
            "regions": [{"bar": 4, "type": "memory", "address": 0xfe00_0000_u64, "size": 16384},
                        {"bar": 1, "type": "memory", "address": -1, "size": 4096}]});
        let ide = json!({"bus": 0, "slot": 1, "function": 1, "qdev_id": "",
            "id": {"vendor": 0x8086, "device": 0x7010},
            "regions": [{"bar": 4, "type": "io", "address": 0xc040, "size": 16}]});
        let bridge = json!({"bus": 0, "slot": 3, "function": 0, "id": {"vendor": 0x1b36, "device": 12},
            "regions": [], "pci_bridge": {"bus": {}, "devices": [net]}});
        let answer = json!({"return": [{"bus": 0, "devices": [ide, bridge]}]});
        let layout = Layout::from_query_pci(&answer).unwrap();
        let place = layout.memory(0xfe00_3004).unwrap();
        assert_eq!(place.device, "virtio-net \"net0\" at 01:02.0");
        assert_eq!(place.register, "queue notification, queue 1");
        assert_eq!((place.model, place.role), (DeviceModel::VirtioNet, RegisterRole::QueueNotification));
        assert_eq!(place.offset, 0x3004);
        assert_eq!(layout.port(0xc042).unwrap().register, "bus master status, channel 1");
        assert_eq!(layout.port(0xc050), None);
        assert_eq!(layout.memory(0xc042), None);
        assert_eq!(layout.functions().len(), 2);
    }

    /// As QEMU 7.2 and 10 lay it out, with `page-per-vq` off and on; other sizes and legacy registers tell no queue.
    #[test]
    fn the_queue_of_a_notification() {
        let layout = |bar: u64, kind: &str, size: u64| {
            let answer = json!([{"devices": [{"bus": 0, "slot": 2, "function": 0, "qdev_id": "",
                "id": {"vendor": 0x1af4, "device": 0x1000},
                "regions": [{"bar": bar, "type": kind, "address": 0x800_0000, "size": size}]}]}]);
            Layout::from_query_pci(&answer).unwrap()
        };
        let register = |size: u64, offset: u64| {
            let place = layout(4, "memory", size).memory(0x800_0000 + offset).unwrap();
            assert_eq!(place.role, RegisterRole::QueueNotification);
            place.register
        };
        for (size, offset, queue) in [
            (0x4000, 0x3000, 0),
            (0x4000, 0x3004, 1),
            (0x4000, 0x3006, 1),
            (0x4000, 0x3ffc, 1023),
            (0x80_0000, 0x3000, 0),
            (0x80_0000, 0x5ffc, 2),
            (0x80_0000, 0x40_2000, 1023),
        ] {
            assert_eq!(
                register(size, offset),
                format!("queue notification, queue {queue}"),
                "{size:#x} {offset:#x}"
            );
        }
        // Behind the last queue, and a BAR as QEMU makes none.
        assert_eq!(register(0x80_0000, 0x40_3000), "queue notification");
        assert_eq!(register(0x2_0000, 0x3004), "queue notification");
        let legacy = json!([{"devices": [{"bus": 0, "slot": 2, "function": 0, "qdev_id": "",
            "id": {"vendor": 0x1af4, "device": 0x1000},
            "regions": [{"bar": 0, "type": "io", "address": 0xc000, "size": 0x20}]}]}]);
        let pci = Layout::from_query_pci(&legacy).unwrap();
        assert_eq!(pci.port(0xc010).unwrap().register, "queue notification");
        assert_eq!(pci.queue_ports(), QueuePorts::new([0xc010]));
        let devices = Devices { pci, ..Devices::default() };
        let register = |port: u16, queue: Option<u16>| {
            devices.name(Detail::Port { port, width: 2, write: true, queue }).unwrap().register
        };
        assert_eq!(register(0xc010, Some(1)), "queue notification, queue 1");
        assert_eq!(
            (register(0xc010, None), register(0xc00e, Some(1))),
            ("queue notification".into(), "queue selector".into())
        );
    }

    #[test]
    fn registers_of_old_nics_have_names() {
        let nic = |id: u64, start: u64| {
            json!({"bus": 0, "slot": 3, "function": 0, "qdev_id": "", "id": {"vendor": 0x10ec, "device": id},
                   "regions": [{"bar": 0, "type": "io", "address": start, "size": 256}]})
        };
        let answer = json!([{"bus": 0, "devices": [nic(0x8029, 0xc000), nic(0x8139, 0xc100)]}]);
        let layout = Layout::from_query_pci(&answer).unwrap();
        let place = |port| layout.port(port).unwrap();
        assert_eq!(
            (place(0xc010).device.as_str(), place(0xc010).register.as_str()),
            ("ne2k_pci at 00:03.0", "data")
        );
        assert!((0..0x20).all(|offset| place(0xc000 + offset).is_named()));
        assert!(!place(0xc0ff).is_named() && !place(0xc1ff).is_named());
        assert_eq!(place(0xc150).register, "9346CR (EEPROM)");
    }

    #[test]
    fn other_answers_are_no_layout() {
        assert_eq!(Layout::from_query_pci(&json!({"error": {}})), None);
        assert!(Layout::from_query_pci(&json!([{"devices": [3, {"regions": 4}]}])).unwrap().is_empty());
    }
}
