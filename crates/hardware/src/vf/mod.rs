//! What the administrator has set for a virtual function at its physical function: read, set for a guest that moves here, and put back.
//!
//! ```text
//!   PF's interface (sysfs: physfn/net, physfn/virtfnN) -- rtnetlink --> Keeper: what is to be put back, in FOLDER/0000:01:10.0.json too
//! ```

mod keeper;
mod netlink;

use std::fs;
use std::io;
use std::path::Path;

use ioplane_api::spec::{PciAddress, VfSetting};

use self::netlink::Said;
use crate::physical::Net;
use crate::sysfs::Sysfs;

pub use keeper::{Keeper, VfError, VfShown, recover_settings};

/// Most virtual functions that a physical one can have (PCI Express, SR-IOV: bus numbers and functions).
const MOST: u32 = 65536;

/// Where the settings of a virtual function are.
trait Place {
    /// What is set.
    fn said(&self) -> io::Result<Said>;
    /// Sets one.
    fn set(&self, setting: VfSetting) -> io::Result<()>;
    /// The interface, the function's number there, and what else is known that could explain a failure.
    fn named(&self) -> Named;
}

/// How an administrator finds a virtual function.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Named {
    /// The physical function's interface.
    interface: String,
    /// Which of its virtual functions.
    number: u32,
    /// Of its link, Mbit/s, if that is up.
    speed: Option<u32>,
}

impl Named {
    /// What an administrator types.
    fn command(&self, setting: VfSetting) -> String {
        format!("ip link set {} vf {} {setting}", self.interface, self.number)
    }
}

/// That of a function of this host.
#[derive(Debug)]
struct Netlink {
    index: u32,
    named: Named,
}

impl Netlink {
    /// Of the virtual function at `of`, on the host whose sysfs is mounted at `root`.
    fn of(root: &Path, of: PciAddress) -> io::Result<Netlink> {
        let net = Net::found(root, of)?;
        let physical = Sysfs::new(root).function(of).join("physfn");
        let is_it = |number: &u32| {
            let link = fs::read_link(physical.join(format!("virtfn{number}"))).ok();
            link.is_some_and(|link| link.file_name().is_some_and(|name| *name == *of.to_string()))
        };
        let exists = |number: &u32| physical.join(format!("virtfn{number}")).is_symlink();
        let number = (0..MOST).take_while(exists).find(is_it).ok_or_else(|| {
            let text = format!("{of} is not among the virtual functions of {}", net.name);
            io::Error::new(io::ErrorKind::NotFound, text)
        })?;
        // -1 without a link.
        let speed = net.attribute("speed").ok().and_then(|speed| speed.parse().ok());
        let index = net.index()?;
        Ok(Netlink { index, named: Named { interface: net.name, number, speed } })
    }
}

impl Place for Netlink {
    fn said(&self) -> io::Result<Said> {
        netlink::read(self.index, self.named.number)
    }

    fn set(&self, setting: VfSetting) -> io::Result<()> {
        netlink::set(self.index, self.named.number, setting)
    }

    fn named(&self) -> Named {
        self.named.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_virtual_function_is_found_by_its_physical_one() {
        let root = tempfile::tempdir().expect("a folder");
        let of: PciAddress = "0000:01:10.2".parse().expect("an address");
        let error = |root: &Path| Netlink::of(root, of).expect_err("it is not there").to_string();
        assert_eq!(
            error(root.path()),
            "0000:01:10.2 is not a virtual function of a card whose interface this host has"
        );
        let devices = root.path().join("bus/pci/devices");
        let (own, physical) = (devices.join(of.to_string()), devices.join("0000:01:00.0"));
        fs::create_dir_all(physical.join("net/pf0")).expect("a folder");
        fs::create_dir_all(&own).expect("a folder");
        symlink(&physical, own.join("physfn")).expect("a link");
        fs::write(physical.join("net/pf0/ifindex"), "7\n").expect("a file");
        symlink("../0000:01:10.0", physical.join("virtfn0")).expect("a link");
        assert_eq!(error(root.path()), "0000:01:10.2 is not among the virtual functions of pf0");
        symlink("../0000:01:10.2", physical.join("virtfn1")).expect("a link");
        fs::write(physical.join("net/pf0/speed"), "-1\n").expect("a file");
        let named = |speed| Named { interface: "pf0".into(), number: 1, speed };
        let found = Netlink::of(root.path(), of).expect("it is there");
        assert_eq!((found.index, found.named), (7, named(None)));
        fs::write(physical.join("net/pf0/speed"), "1000\n").expect("a file");
        let found = Netlink::of(root.path(), of).expect("it is there");
        assert_eq!(found.named, named(Some(1000)));
        assert_eq!(found.named.command(VfSetting::Trust(true)), "ip link set pf0 vf 1 trust on");
    }
}
