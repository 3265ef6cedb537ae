//! Reading and writing what the kernel shows of PCI functions below `/sys`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use ioplane_api::spec::PciAddress;

/// The driver that hands functions to user space.
pub const VFIO: &str = "vfio-pci";
/// Where the files of IOMMU groups are.
pub(crate) const GROUPS: &str = "/dev/vfio";
/// Most bytes of one attribute: the kernel shows a page.
const ATTRIBUTE: usize = 4096;

/// Whether the IOMMU lets a function raise only the interrupts that it was given. Without that a write of its own, which is all that a message-signalled
/// interrupt is, raises any interrupt of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remapping {
    /// It does.
    On,
    /// It does not, and VFIO hands nothing on.
    Off,
    /// It does not, and VFIO has been told not to mind.
    Allowed,
    /// Not an x86: the kernel's own check is relied on.
    Unknown,
}

/// The tree, and how it is written: the kernel acts on what is written, which a test has to do itself.
pub(crate) struct Sysfs<'a> {
    root: PathBuf,
    write: &'a dyn Fn(&Path, &str) -> io::Result<()>,
}

fn write(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write as _;
    // Not created: an attribute that is missing is an error.
    fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

impl<'a> Sysfs<'a> {
    pub(crate) fn new(root: &Path) -> Self {
        Sysfs { root: root.into(), write: &write }
    }

    #[cfg(test)]
    pub(crate) fn acting(root: &Path, write: &'a dyn Fn(&Path, &str) -> io::Result<()>) -> Self {
        Sysfs { root: root.into(), write }
    }

    pub(crate) fn functions(&self) -> PathBuf {
        self.root.join("bus/pci/devices")
    }

    pub(crate) fn function(&self, address: PciAddress) -> PathBuf {
        self.functions().join(address.to_string())
    }

    pub(crate) fn driver(&self, name: &str) -> PathBuf {
        self.root.join("bus/pci/drivers").join(name)
    }

    pub(crate) fn probe(&self) -> PathBuf {
        self.root.join("bus/pci/drivers_probe")
    }

    pub(crate) fn group(&self, number: u32) -> PathBuf {
        self.root.join("kernel/iommu_groups").join(number.to_string())
    }

    /// Asks the procfs beside this sysfs: the kernel's interrupt controllers are called otherwise where they are remapped (Linux,
    /// `arch/x86/kernel/apic/io_apic.c` and `drivers/iommu/*/irq_remapping.c`: `IR-IO-APIC`, `IR-PCI-MSI`).
    pub(crate) fn remapping(&self) -> Remapping {
        let proc = self.root.parent().unwrap_or(Path::new("/")).join("proc/interrupts");
        let table = fs::read_to_string(proc).unwrap_or_default();
        let has = |name: &str| table.split_whitespace().any(|word| word.starts_with(name));
        if has("IR-IO-APIC") || has("IR-PCI-MSI") {
            return Remapping::On;
        }
        if !has("IO-APIC") && !has("PCI-MSI") {
            return Remapping::Unknown;
        }
        let told = self.root.join("module/vfio_iommu_type1/parameters/allow_unsafe_interrupts");
        if text(&told).as_deref() == Some("Y") { Remapping::Allowed } else { Remapping::Off }
    }

    /// Whether an IOMMU is on: then there are groups.
    pub(crate) fn has_iommu(&self) -> bool {
        fs::read_dir(self.root.join("kernel/iommu_groups")).is_ok_and(|mut groups| groups.next().is_some())
    }

    pub(crate) fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        (self.write)(path, text)
    }

    /// The driver that a function is bound to.
    pub(crate) fn bound_to(&self, address: PciAddress) -> Option<String> {
        link(&self.function(address).join("driver"))
    }

    pub(crate) fn iommu_group(&self, address: PciAddress) -> Option<u32> {
        link(&self.function(address).join("iommu_group"))?.parse().ok()
    }

    /// The addresses in a folder whose entries are functions, in order.
    pub(crate) fn addresses(&self, folder: &Path) -> io::Result<Vec<PciAddress>> {
        let names = fs::read_dir(folder)?.flatten().map(|entry| entry.file_name());
        let mut found: Vec<PciAddress> = names.filter_map(|name| name.to_str()?.parse().ok()).collect();
        found.sort();
        Ok(found)
    }
}

/// The last part of where a link points to.
pub(crate) fn link(path: &Path) -> Option<String> {
    Some(fs::read_link(path).ok()?.file_name()?.to_str()?.to_owned())
}

/// The text of an attribute, without white space around it.
pub(crate) fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    (text.len() <= ATTRIBUTE).then(|| text.trim().to_owned())
}

/// The number in an attribute, `0x` or decimal.
pub(crate) fn number(path: &Path) -> Option<u64> {
    parse(&text(path)?)
}

pub(crate) fn parse(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}
