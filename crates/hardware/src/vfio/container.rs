//! What a function can reach: an address space of its own, in which its IOMMU group sits.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use ioplane_api::spec::PciAddress;
use ioplane_memory::{MemoryRegion, Pin};

use super::ioctl;
use crate::hardware::HardwareError;
use crate::ranges::Ranges;
use crate::sysfs::GROUPS;

/// A VFIO container of type 1 with one group in it, and what is mapped there. Fields are dropped in this order: a group that is
/// closed leaves the container, which takes its mappings along.
#[derive(Debug)]
pub(super) struct Container {
    name: String,
    group: File,
    container: File,
    /// First and last byte of each range of bus addresses; empty: unknown.
    ranges: Vec<(u64, u64)>,
    /// By bus address. The memory has to live as long as it is mapped.
    mapped: BTreeMap<u64, (MemoryRegion, Pin)>,
}

impl Container {
    /// Puts `group` into a container of its own.
    pub(super) fn open(name: &str, group: u32) -> Result<Self, HardwareError> {
        let os = |doing: String| {
            move |source: io::Error| HardwareError::Os { function: name.to_owned(), doing, source }
        };
        let both = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
        let path = Path::new(GROUPS).join("vfio");
        let container = both(&path).map_err(os(format!(
            "open {} (`modprobe vfio-pci vfio_iommu_type1`, as root)",
            path.display()
        )))?;
        let known = ioctl::knows_type1(container.as_fd()).map_err(os("ask VFIO for its version".into()))?;
        let no = |why: &str| io::Error::other(why.to_owned());
        if !known {
            return Err(os("use VFIO (`modprobe vfio_iommu_type1`)".into())(no("it has no type 1 IOMMU")));
        }
        let path = Path::new(GROUPS).join(group.to_string());
        let group = match both(&path) {
            // A group is open once, as long as any of its functions is open or mapped anywhere.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                let holders = holders(Path::new("/proc"));
                return Err(HardwareError::Kept { function: name.to_owned(), holders });
            }
            opened => opened.map_err(os(format!("open {} (is it bound to vfio-pci?)", path.display())))?,
        };
        if !ioctl::is_viable(group.as_fd()).map_err(os("look at its IOMMU group".into()))? {
            let advice = "use its IOMMU group (`ioplane pci list` shows who else is in it)";
            return Err(os(advice.into())(no("drivers of the host have other functions of it")));
        }
        ioctl::set_container(group.as_fd(), container.as_fd())
            .map_err(os("put its IOMMU group into a container".into()))?;
        ioctl::set_type1(container.as_fd()).map_err(os(
            "switch its IOMMU on (see `dmesg`; without interrupt remapping VFIO refuses)".into(),
        ))?;
        let ranges = ioctl::ranges(container.as_fd()).unwrap_or_default();
        Ok(Container { name: name.into(), group, container, ranges, mapped: BTreeMap::new() })
    }

    /// Opens the function.
    pub(super) fn device(&self, address: PciAddress) -> Result<OwnedFd, HardwareError> {
        ioctl::device(self.group.as_fd(), &address.to_string())
            .map_err(|source| self.os("open the function (is it bound to vfio-pci?)".into(), source))
    }

    fn os(&self, doing: String, source: io::Error) -> HardwareError {
        HardwareError::Os { function: self.name.clone(), doing, source }
    }

    fn file(&self) -> BorrowedFd<'_> {
        self.container.as_fd()
    }

    pub(super) fn map(&mut self, iova: u64, region: &MemoryRegion) -> Result<(), HardwareError> {
        let len = region.len();
        let last = iova.checked_add(len - 1);
        let inside = last.is_some_and(|last| {
            self.ranges.is_empty() || self.ranges.iter().any(|(start, end)| *start <= iova && last <= *end)
        });
        if !inside {
            return Err(HardwareError::Unreachable {
                function: self.name.clone(),
                iova,
                len,
                ranges: Ranges(self.ranges.clone()),
            });
        }
        // Pinned memory is the host's, also where the guest has never touched it.
        let pin =
            region.pin().map_err(|source| self.os("pin guest memory".into(), io::Error::other(source)))?;
        ioctl::map(self.file(), iova, region.host_address(), len, region.writable()).map_err(|source| {
            let advice = match source.raw_os_error() {
                Some(libc::ENOMEM) => {
                    " (raise the limit of locked memory: LimitMEMLOCK=infinity, `ulimit -l`)"
                }
                Some(libc::EINVAL) => " (memory that is handed to hardware must consist of whole pages)",
                Some(libc::EEXIST) => " (something is mapped there already)",
                _ => "",
            };
            self.os(format!("map {len:#x} bytes at bus address {iova:#x}{advice}"), source)
        })?;
        self.mapped.insert(iova, (region.clone(), pin));
        Ok(())
    }

    pub(super) fn unmap(&mut self, iova: u64, len: u64) -> Result<(), HardwareError> {
        let doing = || format!("unmap {len:#x} bytes at bus address {iova:#x}");
        if self.mapped.get(&iova).is_none_or(|(region, _)| region.len() != len) {
            return Err(self.os(doing(), io::Error::other("nothing is mapped exactly there")));
        }
        match ioctl::unmap(self.file(), iova, len) {
            Ok(gone) if gone == len => {
                self.mapped.remove(&iova);
                Ok(())
            }
            // The memory stays alive: the function may reach it still.
            Ok(gone) => Err(self.os(doing(), io::Error::other(format!("only {gone:#x} bytes went")))),
            Err(source) => Err(self.os(doing(), source)),
        }
    }

    /// Unmaps what can be; the rest goes with the container.
    pub(super) fn clear(&mut self) {
        let all: Vec<(u64, u64)> =
            self.mapped.iter().map(|(iova, (region, _))| (*iova, region.len())).collect();
        for (iova, len) in all {
            let _ = self.unmap(iova, len);
        }
    }
}

/// Processes other than this one that have some function of VFIO's open or mapped: name and number. The kernel does not tell which
/// function.
fn holders(proc: &Path) -> Vec<(String, u32)> {
    const FILE: &str = "anon_inode:[vfio-device]";
    let own = std::process::id();
    let pids = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let has = |pid: &u32| {
        let folder = proc.join(pid.to_string());
        let files = std::fs::read_dir(folder.join("fd")).into_iter().flatten().flatten();
        let open =
            |file: std::fs::DirEntry| std::fs::read_link(file.path()).is_ok_and(|to| to == Path::new(FILE));
        files.into_iter().any(open)
            || std::fs::read_to_string(folder.join("maps")).is_ok_and(|maps| maps.contains(FILE))
    };
    let named = |pid: u32| {
        let name = std::fs::read_to_string(proc.join(pid.to_string()).join("comm")).unwrap_or_default();
        (name.trim().to_owned(), pid)
    };
    pids.filter(|pid| *pid != own).filter(has).map(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn who_has_a_function_is_found() {
        let folder = tempfile::tempdir().expect("a folder");
        let process = |pid: &str, name: &str, file: &str, maps: &str| {
            let own = folder.path().join(pid);
            fs::create_dir_all(own.join("fd")).expect("a folder");
            symlink(file, own.join("fd/3")).expect("a link");
            fs::write(own.join("comm"), format!("{name}\n")).expect("written");
            fs::write(own.join("maps"), maps).expect("written");
        };
        process("71", "qemu", "anon_inode:[vfio-device]", "");
        process("72", "sh", "/dev/null", "7f00-7f01 r--p 0 00:00 0 /usr/bin/sh\n");
        process("73", "keeper", "/dev/null", "7f00-7f01 rw-s 0 00:0e 9 anon_inode:[vfio-device]\n");
        process(&std::process::id().to_string(), "us", "anon_inode:[vfio-device]", "");
        let mut found = holders(folder.path());
        found.sort();
        assert_eq!(found, [("keeper".to_owned(), 73), ("qemu".to_owned(), 71)]);
        let text = HardwareError::Kept { function: "0000:00:05.0".into(), holders: found }.to_string();
        assert!(text.contains("busy") && text.contains("keeper, pid 73; qemu, pid 71"), "{text}");
    }
}
