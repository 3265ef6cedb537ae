//! A tree like `/sys`, and a kernel that acts on what is written to it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ioplane_api::spec::PciAddress;

/// A tree with an IOMMU and the drivers `vfio-pci` and `8139cp`. Gone when dropped.
pub(crate) struct Tree {
    folder: tempfile::TempDir,
    sys: PathBuf,
}

impl Tree {
    pub(crate) fn new() -> Tree {
        let folder = tempfile::tempdir().expect("a folder");
        let tree = Tree { sys: folder.path().join("sys"), folder };
        for folder in ["bus/pci/devices", "kernel/iommu_groups"] {
            fs::create_dir_all(tree.root().join(folder)).expect("a folder");
        }
        for driver in ["vfio-pci", "8139cp"] {
            fs::create_dir_all(tree.driver(driver)).expect("a folder");
        }
        tree
    }

    pub(crate) fn root(&self) -> &Path {
        &self.sys
    }

    /// What `/proc/interrupts` says. At first there is none.
    pub(crate) fn interrupts(&self, table: &str) {
        let proc = self.folder.path().join("proc");
        fs::create_dir_all(&proc).expect("a folder");
        fs::write(proc.join("interrupts"), table).expect("written");
    }

    pub(crate) fn driver(&self, name: &str) -> PathBuf {
        self.root().join("bus/pci/drivers").join(name)
    }

    pub(crate) fn function(&self, address: &str) -> PathBuf {
        self.root().join("bus/pci/devices").join(address)
    }

    /// Adds an attribute to a function, or changes it.
    pub(crate) fn put(&self, address: &str, name: &str, text: &str) {
        let path = self.function(address).join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, format!("{text}\n")).expect("written");
    }

    /// Adds a network card that `driver` drives and would drive again.
    pub(crate) fn add(&self, address: &str, group: Option<u32>, driver: Option<&str>) {
        for (name, text) in [
            ("vendor", "0x10ec"),
            ("device", "0x8139"),
            ("class", "0x020000"),
            ("revision", "0x20"),
            ("subsystem_vendor", "0x1af4"),
            ("subsystem_device", "0x1100"),
            ("driver_override", "(null)"),
            (
                "resource",
                "0x000000000000c000 0x000000000000c0ff 0x0000000000040101\n\
                 0x00000000febd1000 0x00000000febd10ff 0x0000000000040200\n\
                 0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                 0x0000380000000000 0x0000380000003fff 0x000000000014220c\n",
            ),
        ] {
            self.put(address, name, text);
        }
        if let Some(driver) = driver {
            self.put(address, "natural", driver);
            symlink(self.driver(driver), self.function(address).join("driver")).expect("a link");
        }
        if let Some(group) = group {
            let group = self.root().join("kernel/iommu_groups").join(group.to_string());
            fs::create_dir_all(group.join("devices").join(address)).expect("a folder");
            symlink(group, self.function(address).join("iommu_group")).expect("a link");
        }
    }

    pub(crate) fn bound_to(&self, address: &str) -> Option<String> {
        crate::sysfs::link(&self.function(address).join("driver"))
    }

    /// What the kernel does when `text` is written to `path`.
    pub(crate) fn act(&self, path: &Path, text: &str) -> io::Result<()> {
        let missing = || io::Error::from_raw_os_error(libc::ENODEV);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name == "driver_override" {
            return fs::write(path, text);
        }
        let address = text.trim();
        address.parse::<PciAddress>().map_err(io::Error::other)?;
        let folder = self.function(address);
        if !folder.exists() {
            return Err(missing());
        }
        let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default().trim().to_owned();
        match name {
            "unbind" => {
                let driver = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
                if self.bound_to(address).as_deref() != driver {
                    return Err(missing());
                }
                fs::remove_file(folder.join("driver"))
            }
            "drivers_probe" => {
                let wanted = read("driver_override");
                let driver = if wanted.is_empty() || wanted == "(null)" { read("natural") } else { wanted };
                if !driver.is_empty() && self.driver(&driver).exists() && self.bound_to(address).is_none() {
                    symlink(self.driver(&driver), folder.join("driver"))?;
                }
                Ok(())
            }
            _ => Err(io::Error::other(format!("no such attribute: {}", path.display()))),
        }
    }
}
