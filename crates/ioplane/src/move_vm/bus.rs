//! The PCI bus of a guest that stands still, by its QEMU's monitor: which functions there are, their configuration space, their MSI-X table.
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
const BARS: u8 = 6;
const CAPABILITIES: u8 = 0x34;
/// Of the status register: there is a list of capabilities.
const HAS_CAPABILITIES: u32 = 1 << 4;
/// MSI-X (6.8.2): its number, and where its control, and where its table is, lie.
const MSIX: u32 = 0x11;
pub(super) const MSIX_CONTROL: u8 = 2;
const MSIX_TABLE: u8 = 4;
/// Class and subclass of the bridge that routes the wires of PCI to the interrupt controllers, and its first registers for that, one byte a wire (PIIX3
/// data sheet, 2.2.10; ICH9 data sheet, 13.1.11).
const ISA_BRIDGE: u64 = 0x0601;
const PIRQ_ROUTES: u8 = 0x60;
/// Capabilities begin behind the header, and there is room for so many.
const HEADER: u8 = 0x40;
/// The last place at which there is room for that of MSI-X.
const LAST: u8 = 0xf4;
const MOST_CAPABILITIES: usize = 48;
/// Words of an entry of an MSI-X table.
pub(super) const ENTRY: usize = 4;

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
    Byte,
    Word,
    Long,
}

impl Size {
    /// What HMP calls it. It keeps the last one, so each command says it.
    fn letter(self) -> char {
        match self {
            Size::Byte => 'b',
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

    /// Where the capability of MSI-X is, if there is one, of a function with this in its status register.
    pub fn msix(&mut self, place: Place, status: u32) -> Result<Option<u8>> {
        if status & HAS_CAPABILITIES == 0 {
            return Ok(None);
        }
        let mut at = self.read(place, CAPABILITIES, Size::Byte)? as u8 & !3;
        for _ in 0..MOST_CAPABILITIES {
            if at < HEADER {
                return Ok(None);
            }
            let head = self.read(place, at, Size::Word)?;
            if head & 0xff == MSIX {
                return Ok(Some(at).filter(|at| *at <= LAST));
            }
            at = (head >> 8) as u8 & !3;
        }
        Ok(None)
    }

    /// Guest-physical address of the MSI-X table whose capability is at `at`; `None` if it is in no BAR of memory.
    pub fn msix_table(&mut self, place: Place, at: u8) -> Result<Option<u64>> {
        let table = self.read(place, at + MSIX_TABLE, Size::Long)?;
        let number = (table & 7) as u8;
        if number >= BARS {
            return Ok(None);
        }
        let low = self.read(place, bar_at(number), Size::Long)?;
        let high = match has_high(low) && number + 1 < BARS {
            true => self.read(place, bar_at(number + 1), Size::Long)?,
            false => 0,
        };
        Ok(memory_at(low, high).and_then(|bar| bar.checked_add(u64::from(table & !7))))
    }

    /// Words of memory, or of what is there in its place, as the guest sees it.
    pub fn memory(&mut self, address: u64, count: usize) -> Result<Vec<u32>> {
        let said = self.monitor.human(&format!("xp /{count}xw {address:#x}"))?;
        let words = words(&said).filter(|words| words.len() == count);
        words.ok_or_else(|| unreadable(&said))
    }
}

/// What `xp /NUMBERxw ADDRESS` prints.
fn words(said: &str) -> Option<Vec<u32>> {
    let lines = said.lines().filter_map(|line| line.split_once(':'));
    let all = lines.flat_map(|(_, words)| words.split_whitespace());
    all.map(|word| u32::from_str_radix(word.strip_prefix("0x")?, 16).ok()).collect()
}

/// Where a BAR is in configuration space.
pub(super) fn bar_at(number: u8) -> u8 {
    BAR0 + 4 * number
}

/// Whether a BAR has 64 bits (PCI Local Bus Specification 3.0, 6.2.5.1).
fn has_high(low: u32) -> bool {
    low & 7 == 4
}

/// Address of a BAR of memory, whose next word is `high` if it has 64 bits.
fn memory_at(low: u32, high: u32) -> Option<u64> {
    let address = u64::from(high) << 32 | u64::from(low & !0xf);
    (low & 1 == 0 && address != 0).then_some(address)
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

    #[test]
    fn bars_of_memory_have_an_address() {
        assert_eq!(memory_at(0xfebf_0008, 0), Some(0xfebf_0000));
        assert_eq!((memory_at(0xc001, 0), memory_at(4, 0)), (None, None));
        assert_eq!(memory_at(0xe000_000c, 0x12), Some(0x12_e000_0000));
        assert_eq!([4, 0xc, 0, 8, 1, 5].map(has_high), [true, true, false, false, false, false]);
    }

    #[test]
    fn words_of_memory_are_read() {
        let said = "00000000fea00000: 0xfee01004 0x00000000 0x00000021 0x00000000\r\n00000000fea00010: 0x1";
        assert_eq!(words(said), Some(vec![0xfee0_1004, 0, 0x21, 0, 1]));
        assert_eq!(words("0: Cannot access memory"), None);
    }
}
