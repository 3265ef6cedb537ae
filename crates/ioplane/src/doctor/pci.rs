//! What PCI functions need: see docs/guide/pci.md.

use std::path::Path;

use ioplane_api::report::FunctionReport;
use ioplane_cli::client::Client;
use ioplane_cli::command::qemu::{VFIO_USER, Version};
use ioplane_hardware::inventory::{self, Remapping};

use super::{Finding, Weight, bad, good, read};

/// Whether QEMU can be given a function at all.
pub fn vfio_user() -> Finding {
    of_qemu(Version::ask("qemu-system-x86_64").ok())
}

fn of_qemu(version: Option<Version>) -> Finding {
    let name = "vfio-user";
    let follows = "PCI functions cannot be given to guests of that QEMU; disks and NICs can";
    let todo = "install QEMU 10.1 or later (Debian 13: trixie-backports), or name it: ioplane qemu-args --qemu PROGRAM";
    match version {
        Some(version @ Version(major, minor)) if version >= VFIO_USER => {
            good(name, format!("QEMU {major}.{minor} has vfio-user-pci"))
        }
        Some(Version(major, minor)) => bad(
            name,
            Weight::Lacking,
            format!("QEMU {major}.{minor} has no vfio-user-pci, which came with 10.1"),
            follows,
            todo,
        ),
        None => bad(name, Weight::Lacking, "no qemu-system-x86_64", follows, todo),
    }
}

/// Whether anything keeps a function from the host's memory.
pub fn iommu() -> Finding {
    let groups = std::fs::read_dir("/sys/kernel/iommu_groups").map_or(0, Iterator::count);
    of_groups(groups)
}

fn of_groups(groups: usize) -> Finding {
    let name = "IOMMU";
    if groups > 0 {
        return good(name, format!("on, {groups} groups"));
    }
    bad(
        name,
        Weight::Lacking,
        "off, or there is none",
        "functions of this host cannot be handed to guests; emulated ones can",
        "switch VT-d or AMD-Vi on in the firmware's set-up and boot with intel_iommu=on (Intel) on the kernel's command line",
    )
}

/// Whether the kernel can hand functions to user space.
pub fn vfio() -> Finding {
    let name = "vfio-pci";
    if Path::new("/sys/bus/pci/drivers/vfio-pci").exists() {
        return good(name, "loaded");
    }
    let release = read("/proc/sys/kernel/osrelease").unwrap_or_default();
    let lists =
        ["modules.builtin", "modules.dep"].map(|list| Path::new("/lib/modules").join(&release).join(list));
    if lists.iter().filter_map(read).any(|list| has_driver(&list)) {
        return good(name, "there, and loaded when it is needed");
    }
    bad(
        name,
        Weight::Lacking,
        format!("the modules of this kernel ({release}) do not have it"),
        "functions of this host cannot be handed to guests; emulated ones can",
        "install the kernel's full set of modules (Debian: linux-image-amd64 in place of linux-image-cloud-amd64)",
    )
}

/// Whether a function can raise interrupts that are not its own.
pub fn remapping() -> Finding {
    let groups = std::fs::read_dir("/sys/kernel/iommu_groups").map_or(0, Iterator::count);
    of_remapping(groups, inventory::remapping(Path::new("/sys")))
}

fn of_remapping(groups: usize, remapping: Remapping) -> Finding {
    let name = "remapping";
    let found = match remapping {
        _ if groups == 0 => return good(name, "of interrupts: matters with an IOMMU only"),
        Remapping::On => return good(name, "of interrupts: on"),
        Remapping::Unknown => return good(name, "of interrupts: looked after by the kernel"),
        Remapping::Off => "of interrupts: off",
        Remapping::Allowed => {
            "of interrupts: off, and VFIO has been told not to mind (allow_unsafe_interrupts)"
        }
    };
    bad(
        name,
        Weight::Lacking,
        found,
        "a function of this host could raise any interrupt of it, so none is handed to a guest (but with --unsafe-interrupts)",
        inventory::REMAP,
    )
}

/// The functions that a daemon has and that take no guest. One good finding if all do; none if no daemon answers.
pub fn functions(client: &Client) -> Vec<Finding> {
    let all: Vec<FunctionReport> = client.get("/v1/pci").unwrap_or_default();
    of_functions(&all)
}

fn of_functions(all: &[FunctionReport]) -> Vec<Finding> {
    let name = "PCI functions";
    let unusable = all.iter().filter_map(|function| {
        let why = function.unusable.as_ref()?;
        let todo = format!("do what it says, then: ioplane pci reset {}", function.name);
        let found = format!("{}: {why}", function.name);
        Some(bad(name, Weight::Lacking, found, "no guest gets it", &todo))
    });
    let unusable: Vec<Finding> = unusable.collect();
    if unusable.is_empty() && !all.is_empty() {
        return vec![good(name, format!("{} served, all usable", all.len()))];
    }
    unusable
}

/// Whether a list of modules has the driver.
fn has_driver(list: &str) -> bool {
    list.lines().any(|line| line.split(':').next().is_some_and(|path| path.contains("/vfio-pci.ko")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lacking_is_said() {
        let weight = |finding: Finding| (finding.weight, finding.todo.is_some());
        assert_eq!(weight(of_qemu(Some(Version(10, 1)))), (Weight::Good, false));
        assert_eq!(weight(of_qemu(Some(Version(10, 0)))), (Weight::Lacking, true));
        assert_eq!(weight(of_qemu(None)), (Weight::Lacking, true));
        assert_eq!(weight(of_groups(3)), (Weight::Good, false));
        assert_eq!(weight(of_groups(0)), (Weight::Lacking, true));
        assert_eq!(weight(of_remapping(0, Remapping::Off)), (Weight::Good, false));
        for (remapping, expected) in [
            (Remapping::On, (Weight::Good, false)),
            (Remapping::Unknown, (Weight::Good, false)),
            (Remapping::Off, (Weight::Lacking, true)),
            (Remapping::Allowed, (Weight::Lacking, true)),
        ] {
            assert_eq!(weight(of_remapping(3, remapping)), expected, "{remapping:?}");
        }
        let mut function: FunctionReport = serde_json::from_value(serde_json::json!({
            "name": "nic1", "state": "served", "origin": "added", "connected": false, "connections": 0,
            "socket": "/run/ioplane/nic1.sock", "mode": "virtual", "guard": "/run/ioplane/unmovable.vdi",
            "stage": "running", "front_end_faults": {}, "hardware_faults": {},
            "traffic": {
                "reads": 0, "writes": 0, "interrupts": 0, "memory_ranges": 0, "memory_bytes": 0, "forced": 0,
            },
        }))
        .unwrap();
        assert_eq!(of_functions(&[]).len(), 0);
        assert_eq!(weight(of_functions(std::slice::from_ref(&function)).remove(0)), (Weight::Good, false));
        function.unusable = Some("it has not come out of its reset".into());
        let finding = of_functions(std::slice::from_ref(&function)).remove(0);
        let todo = finding.todo.clone().unwrap_or_default();
        assert!(finding.found.starts_with("nic1: it has not") && todo.contains("ioplane pci reset nic1"));
        assert_eq!(weight(finding), (Weight::Lacking, true));
        assert!(has_driver("kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/vfio.ko.xz\n"));
        assert!(has_driver("kernel/drivers/vfio/pci/vfio-pci.ko\n"));
        assert!(!has_driver("kernel/drivers/x.ko: kernel/drivers/vfio/pci/vfio-pci-core.ko\n"));
    }
}
