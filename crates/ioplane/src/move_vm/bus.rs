//! The PCI bus of a guest that stands still, by its QEMU's monitor: which functions there are, and their configuration space.
//!
//! Configuration space is reached as by the guest, by the ports of configuration mechanism #1 (PCI Local Bus Specification 3.0, 3.2.2.3.2), with
//! HMP's `i` and `o`. What the guest has left in the address port is put back.

use anyhow::Result;
use ioplane_plain::plain;
use serde_json::{Value, json};

use super::failed;
use super::monitor::Monitor;

/// The address port, and the first data port.
const ADDRESS: u16 = 0xcf8;
const DATA: u16 = 0xcfc;
/// Registers of configuration space (the same specification, 6.1).
pub(super) const COMMAND: u8 = 0x04;
const BAR0: u8 = 0x10;
/// Of the capability of MSI-X (6.8.2): where its message control is.
pub(super) const MSIX_CONTROL: u8 = 2;
/// Class and subclass of the bridge that routes the wires of PCI to the interrupt controllers, and its first registers for that, one byte a wire (PIIX3
/// data sheet, 2.2.10; ICH9 data sheet, 13.1.11).
const ISA_BRIDGE: u64 = 0x0601;
const PIRQ_ROUTES: u8 = 0x60;

/// Where a function is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub bus: u8,
    pub slot: u8,
    pub function: u8,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x}:{:02x}.{}", self.bus, self.slot, self.function)
    }
}

/// A function of a guest, as QEMU lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub place: Place,
    /// Its `id`; empty without one.
    pub id: String,
    /// Vendor and device, as `10ec:8139`.
    pub kind: String,
    /// Class and subclass.
    pub class: u64,
}

/// All functions of a guest, those behind bridges too.
pub(super) fn functions(monitor: &mut Monitor) -> Result<Vec<Found>> {
    let buses = monitor.execute("query-pci", &json!({}))?;
    let mut found = Vec::new();
    for bus in buses.as_array().into_iter().flatten() {
        list(&bus["devices"], &mut found);
    }
    Ok(found)
}

fn list(devices: &Value, found: &mut Vec<Found>) {
    for device in devices.as_array().into_iter().flatten() {
        found.extend(one(device));
        list(&device["pci_bridge"]["devices"], found);
    }
}

fn one(device: &Value) -> Option<Found> {
    let number = |field: &str| u8::try_from(device[field].as_u64()?).ok();
    let place = Place { bus: number("bus")?, slot: number("slot")?, function: number("function")? };
    let part = |field: &str| device["id"][field].as_u64();
    Some(Found {
        place,
        id: device["qdev_id"].as_str().unwrap_or_default().to_owned(),
        kind: format!("{:04x}:{:04x}", part("vendor")?, part("device")?),
        class: device["class_info"]["class"].as_u64().unwrap_or_default(),
    })
}

/// What the guest has in its address port. Looking does nothing to it.
pub(super) fn latch(monitor: &mut Monitor) -> Result<u32> {
    Ports { monitor, address: None }.input(ADDRESS, Size::Long)
}

/// Whether the guest's machine has the ports. Looking does nothing to a guest that runs.
pub(super) fn has_ports(monitor: &mut Monitor) -> Result<bool> {
    Ok(latch(monitor)? != u32::MAX)
}

/// Bytes of an access.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    Word,
    Long,
}

impl Size {
    /// What HMP calls it. It keeps the last one, so each command says it.
    fn letter(self) -> char {
        match self {
            Size::Word => 'h',
            Size::Long => 'w',
        }
    }
}

/// The ports, while somebody uses them.
pub(super) struct Ports<'a> {
    monitor: &'a mut Monitor,
    /// What was written to the address port last: each command of HMP's takes time in which a guest stands still.
    address: Option<u32>,
}

/// Does `work` with the ports of a guest that stands still. What it had in the address port is there again afterwards, also after an error; `latch` is
/// that, once it is known.
pub(super) fn with_ports<R>(
    monitor: &mut Monitor,
    latch: &mut Option<u32>,
    work: impl FnOnce(&mut Ports<'_>) -> Result<R>,
) -> Result<R> {
    let mut ports = Ports { monitor, address: None };
    let before = match *latch {
        Some(before) => before,
        None => *latch.insert(ports.input(ADDRESS, Size::Long)?),
    };
    let done = work(&mut ports);
    let put_back = ports.output(ADDRESS, Size::Long, before);
    done.and_then(|done| put_back.map(|()| done))
}

impl Ports<'_> {
    fn input(&mut self, port: u16, size: Size) -> Result<u32> {
        let said = self.monitor.human(&format!("i/{} {port:#x}", size.letter()))?;
        let number =
            said.rsplit_once("= 0x").and_then(|(_, digits)| u32::from_str_radix(digits.trim(), 16).ok());
        number.ok_or_else(|| unreadable(&said))
    }

    fn output(&mut self, port: u16, size: Size, value: u32) -> Result<()> {
        let said = self.monitor.human(&format!("o/{} {port:#x} {value:#x}", size.letter()))?;
        if said.is_empty() { Ok(()) } else { Err(unreadable(&said)) }
    }

    /// Points the data ports at a register; says which of them it is at.
    fn select(&mut self, place: Place, register: u8) -> Result<u16> {
        let Place { bus, slot, function } = place;
        let address = (1 << 31)
            | u32::from(bus) << 16
            | u32::from(slot) << 11
            | u32::from(function) << 8
            | u32::from(register & 0xfc);
        if self.address != Some(address) {
            self.output(ADDRESS, Size::Long, address)?;
            self.address = Some(address);
        }
        Ok(DATA + u16::from(register & 3))
    }

    /// Reads a register, which does not reach over a multiple of four bytes.
    pub fn read(&mut self, place: Place, register: u8, size: Size) -> Result<u32> {
        let port = self.select(place, register)?;
        self.input(port, size)
    }

    /// Writes one.
    pub fn write(&mut self, place: Place, register: u8, size: Size, value: u32) -> Result<()> {
        let port = self.select(place, register)?;
        self.output(port, size, value)
    }

    /// Has QEMU find out by which wires of the interrupt controller those of the bus go: one that has just loaded a guest knows it for nobody who has the
    /// kernel signal by itself (vfio with KVM). Writing what is there to the registers of the bridge that routes them does so.
    pub fn route_again(&mut self, all: &[Found]) -> Result<()> {
        for bridge in all.iter().filter(|found| found.class == ISA_BRIDGE) {
            let routes = self.read(bridge.place, PIRQ_ROUTES, Size::Long)?;
            self.write(bridge.place, PIRQ_ROUTES, Size::Long, routes)?;
        }
        Ok(())
    }
}

/// Where a BAR is in configuration space.
pub(super) fn bar_at(number: u8) -> u8 {
    BAR0 + 4 * number
}

fn unreadable(said: &str) -> anyhow::Error {
    let said: String = said.chars().take(200).collect();
    failed(format!("HMP of the monitor answers: {}", plain(&said)), "see that its QEMU is 10.1 or later")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_behind_bridges_are_found() {
        let device = |slot: u8, id: &str, more: Value| {
            let mut device = json!({"bus": 0, "slot": slot, "function": 0, "qdev_id": id, "id": {"vendor": 0x10ec, "device": 0x8139}});
            device["pci_bridge"] = more;
            device
        };
        let mut behind = device(0, "ioplane-nic0", Value::Null);
        behind["bus"] = 1.into();
        let bridge = json!({"bus": {"number": 0}, "devices": [behind]});
        let mut found = Vec::new();
        list(&json!([device(2, "", Value::Null), device(3, "slot1", bridge), {"bus": 300}]), &mut found);
        let found: Vec<_> =
            found.iter().map(|one| (one.place.to_string(), one.id.as_str(), one.kind.as_str())).collect();
        let kind = "10ec:8139";
        assert_eq!(
            found,
            [
                ("00:02.0".into(), "", kind),
                ("00:03.0".into(), "slot1", kind),
                ("01:00.0".into(), "ioplane-nic0", kind)
            ]
        );
    }
}
