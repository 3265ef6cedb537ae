//! What the guest's own kernel calls its ports and addresses: its `/proc/ioports` and `/proc/iomem`. For devices of which neither a monitor nor
//! a file tells: their registers have no names then, but offsets.

use std::path::Path;

use super::place::DeviceModel::AcpiPowerManagement;
use super::place::DevicePlace;
use super::place::RegisterRole::Counter;
use ioplane_plain::file_text;

use crate::error::{ExitsError, Result};

/// Either file has a few hundred lines.
const BYTES: u64 = 1 << 20;
/// So many regions of each are remembered.
const REGIONS: usize = 4096;
/// A name is cut there.
const NAME: usize = 80;
/// Regions lie within each other no deeper.
const DEPTH: usize = 16;

/// The regions of one guest.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestRegions {
    ports: Vec<Region>,
    memory: Vec<Region>,
}

/// A region lies behind those in which it lies.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Region {
    start: u64,
    end: u64,
    /// As the kernel calls it.
    name: String,
    /// Where its PCI function is, if it is of one.
    function: Option<String>,
}

impl GuestRegions {
    /// From `ioports` and `iomem` in a directory; one that is not there names nothing.
    pub fn read(directory: &Path) -> Result<GuestRegions> {
        let text = |name: &str| {
            let path = directory.join(name);
            if path.exists() { file_text(&path, BYTES) } else { Ok(String::new()) }
        };
        GuestRegions::parse(&text("ioports")?, &text("iomem")?, directory)
    }

    /// From the texts of these; `directory` is for messages.
    pub fn parse(ports: &str, memory: &str, directory: &Path) -> Result<GuestRegions> {
        let of = |text: &str, name: &str| {
            let what = "is not what /proc/ioports or /proc/iomem of a Linux has";
            let malformed = || ExitsError::malformed(directory.join(name), what);
            regions(text).ok_or_else(malformed)
        };
        Ok(GuestRegions { ports: of(ports, "ioports")?, memory: of(memory, "iomem")? })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ports.len() + self.memory.len()
    }

    /// Whether nothing is named.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device at a port.
    pub(super) fn port(&self, port: u16) -> Option<DevicePlace> {
        find(&self.ports, port.into())
    }

    /// The device at an address.
    pub(super) fn memory(&self, address: u64) -> Option<DevicePlace> {
        find(&self.memory, address)
    }
}

fn find(regions: &[Region], at: u64) -> Option<DevicePlace> {
    // The innermost is the last.
    let region = regions.iter().rev().find(|region| (region.start..=region.end).contains(&at))?;
    let offset = at - region.start;
    if region.name == "ACPI PM_TMR" {
        let place = DevicePlace::named("ACPI power management", "PM timer", offset);
        return Some(place.of(AcpiPowerManagement).role(Counter));
    }
    let device = match &region.function {
        Some(function) if region.name.ends_with(function) => format!("PCI device at {function}"),
        Some(function) => format!("{} at {function}", region.name),
        None => region.name.clone(),
    };
    Some(DevicePlace::unnamed(&device, format!("+{offset:#x}"), offset))
}

/// Lines such as `  fea40000-fea4ffff : 0000:01:00.0`, two blanks for each region in which it lies. Nothing if a line is another one.
fn regions(text: &str) -> Option<Vec<Region>> {
    let mut regions: Vec<Region> = Vec::new();
    // The PCI functions of those in which the next one lies.
    let mut outer: Vec<Option<String>> = Vec::new();
    for line in text.lines() {
        let (range, name) = line.split_once(" : ")?;
        let depth = (range.len() - range.trim_start_matches(' ').len()) / 2;
        let (start, end) = range.trim_start_matches(' ').split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let name = ioplane_plain::plain(&name.chars().take(NAME).collect::<String>());
        outer.truncate(depth.min(DEPTH));
        let function = function(&name).or_else(|| outer.last().cloned().flatten());
        if outer.len() < DEPTH {
            outer.push(function.clone());
        }
        // All zeros: Linux hides addresses from all but root.
        let hidden = end == 0;
        // No devices: memory, what firmware keeps, and the windows of bridges.
        let nameless = ["System RAM", "Reserved", "PCI Bus "].iter().any(|word| name.starts_with(word));
        if !hidden && !nameless && start <= end && regions.len() < REGIONS {
            regions.push(Region { start, end, name, function });
        }
    }
    Some(regions)
}

/// Of `0000:01:00.0` what is behind the domain, as QEMU's functions are called.
fn function(name: &str) -> Option<String> {
    let (domain, function) = name.split_once(':')?;
    let hex = |text: &str, digits: usize| text.len() == digits && text.bytes().all(|b| b.is_ascii_hexdigit());
    let (bus, rest) = function.split_once(':')?;
    let (slot, number) = rest.split_once('.')?;
    (hex(domain, 4) && hex(bus, 2) && hex(slot, 2) && hex(number, 1)).then(|| function.to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::devices::{Devices, RegisterRole};
    use crate::event::Detail;

    const PORTS: &str = "\
0000-0cf7 : PCI Bus 0000:00
  0060-0060 : keyboard
  0700-070f : odd device
0cf8-0cff : PCI conf1
0d00-ffff : PCI Bus 0000:00
  6008-600b : ACPI PM_TMR
  c000-c03f : 0000:00:03.0
    c000-c03f : e1000
";
    const MEMORY: &str = "\
00001000-0009fbff : System RAM
fea00000-feafffff : PCI Bus 0000:01
  fea40000-fea4ffff : 0000:01:00.0
    fea40000-fea4ffff : virtio-pci-modern
  fea50000-fea50fff : 0000:01:01.0
";

    fn named(detail: Detail) -> Option<(String, String, RegisterRole)> {
        let guest = GuestRegions::parse(PORTS, MEMORY, Path::new("guest")).unwrap();
        let place = Devices { guest, ..Devices::default() }.name(detail)?;
        Some((place.device, place.register, place.role))
    }

    #[test]
    fn the_innermost_region_names_the_device() {
        let port = |port| named(Detail::Port { port, width: 1, write: true, queue: None });
        let unnamed =
            |device: &str, register: &str| Some((device.into(), register.into(), RegisterRole::Unnamed));
        assert_eq!(port(0xc010), unnamed("e1000 at 00:03.0", "+0x10"));
        assert_eq!(port(0x70f), unnamed("odd device", "+0xf"));
        // A bridge's window is no device, and what every PC has is known better.
        assert_eq!(port(0xd000), None);
        assert_eq!(port(0x60).unwrap().0, "keyboard controller");
        // Where its firmware has put the PM timer.
        let timer = ("ACPI power management".into(), "PM timer".into(), RegisterRole::Counter);
        assert_eq!(port(0x6008), Some(timer));
        let memory = |address| named(Detail::Memory { address, width: 4, write: true });
        assert_eq!(memory(0xfea4_0004), unnamed("virtio-pci-modern at 01:00.0", "+0x4"));
        assert_eq!(memory(0xfea5_0fff), unnamed("PCI device at 01:01.0", "+0xfff"));
        assert_eq!((memory(0xfea6_0000), memory(0x2000)), (None, None));
    }

    #[test]
    fn files_are_bounded_and_hidden_addresses_name_nothing() {
        let parse = |text: &str| GuestRegions::parse(text, "", Path::new("guest"));
        assert!(parse("00000000-00000000 : e1000\n").unwrap().is_empty());
        let many: String = (1..10_000).map(|n| format!("{n:x}-{n:x} : d\n")).collect();
        assert_eq!(parse(&many).unwrap().len(), REGIONS);
        let deep: String = (0..1000).map(|n| format!("{}1-2 : 0000:00:01.0\n", "  ".repeat(n))).collect();
        assert_eq!(parse(&deep).unwrap().len(), 1000);
        let strange = parse(&format!("1-2 : \u{1b}[2J{}\n", "x".repeat(1000))).unwrap();
        assert!(strange.ports[0].name.len() == NAME && strange.ports[0].name.starts_with("?[2J"));
        let error = parse("hello\n").unwrap_err().to_string();
        assert!(error.starts_with("guest/ioports: is not what"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        assert!(GuestRegions::read(folder.path()).unwrap().is_empty());
        std::fs::write(folder.path().join("iomem"), vec![b' '; BYTES as usize + 1]).unwrap();
        assert!(GuestRegions::read(folder.path()).unwrap_err().to_string().contains("more than"));
    }

    proptest! {
        #[test]
        fn whatever_a_guest_writes(text in "([ 0-9a-f:.-]{0,20}( : )?[ -~]{0,12}\n){0,20}", at: u64) {
            if let Ok(regions) = GuestRegions::parse(&text, &text, Path::new("guest")) {
                let _ = (regions.memory(at), regions.port(at as u16));
            }
        }
    }
}
