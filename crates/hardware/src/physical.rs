//! Frames from the physical function that a virtual one belongs to: an 82576 hands what its physical function sends to one of its
//! virtual functions to that one, without the cable.
#![allow(unsafe_code)]
// UNSAFETY: rustix has no addresses of packet sockets: a socket is made and frames are sent by libc.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use ioplane_api::spec::{MacAddress, PciAddress};

use crate::sysfs::{Sysfs, text};

/// For experiments on a local network (IEEE 802, clause 9.2.3): no stack takes such a frame.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// IFF_UP in the flags of an interface (linux/if.h).
const UP: u32 = 1;
/// The shortest frame, without its check sum.
const SHORTEST: usize = 60;

/// The network interface of a physical function.
#[derive(Debug)]
pub struct PhysicalFunction {
    interface: String,
    index: i32,
    address: [u8; 6],
    socket: OwnedFd,
}

impl PhysicalFunction {
    /// That of the virtual function `of`, on the host whose sysfs is mounted at `root`. It has to be up.
    pub fn of(root: &Path, of: PciAddress) -> io::Result<Self> {
        let missing = |what: String| io::Error::new(io::ErrorKind::NotFound, what);
        let nets = Sysfs::new(root).function(of).join("physfn/net");
        let interface = fs::read_dir(&nets).ok().and_then(|mut all| all.next()?.ok());
        let interface = interface.ok_or_else(|| {
            missing(format!("{of} is not a virtual function of a card whose interface this host has"))
        })?;
        let name = interface.file_name().to_string_lossy().into_owned();
        let attribute = |what: &str| {
            let found = text(&nets.join(&name).join(what));
            found.ok_or_else(|| missing(format!("{name} has no {what}")))
        };
        let wrong = |what: &str| io::Error::other(format!("{name} has no {what} that can be read"));
        let index = attribute("ifindex")?.parse().map_err(|_| wrong("index"))?;
        let address: MacAddress = attribute("address")?.parse().map_err(|_| wrong("address"))?;
        let flags = attribute("flags")?;
        let flags = u32::from_str_radix(flags.trim_start_matches("0x"), 16).map_err(|_| wrong("flags"))?;
        if flags & UP == 0 {
            return Err(io::Error::new(io::ErrorKind::NetworkDown, format!("{name} is down")));
        }
        // SAFETY: no pointers; what it returns is a new descriptor or -1.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        Ok(PhysicalFunction { interface: name, index, address: address.0, socket })
    }

    /// Its interface.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Sends so many frames with nothing in them. Some may be lost where its queue is full.
    pub fn send(&self, to: [u8; 6], count: u32) -> io::Result<()> {
        let mut frame = [0; SHORTEST];
        frame[..6].copy_from_slice(&to);
        frame[6..12].copy_from_slice(&self.address);
        frame[12..14].copy_from_slice(&ETHERTYPE);
        // SAFETY: integers and bytes, for which zero is a value.
        let mut place: libc::sockaddr_ll = unsafe { mem::zeroed() };
        place.sll_family = libc::AF_PACKET as u16;
        place.sll_ifindex = self.index;
        place.sll_halen = 6;
        place.sll_addr[..6].copy_from_slice(&to);
        for _ in 0..count {
            // SAFETY: both pointers are to what lives across the call, with its length.
            let sent = unsafe {
                libc::sendto(
                    self.socket.as_raw_fd(),
                    frame.as_ptr().cast(),
                    frame.len(),
                    libc::MSG_DONTWAIT,
                    (&raw const place).cast(),
                    size_of::<libc::sockaddr_ll>() as u32,
                )
            };
            if sent < 0 {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    Some(libc::ENOBUFS | libc::EAGAIN | libc::EINTR) => Ok(()),
                    _ => Err(io::Error::new(error.kind(), format!("{}: {error}", self.interface))),
                };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_physical_function_is_said() {
        let root = tempfile::tempdir().expect("a folder");
        let of = "0000:01:10.0".parse().expect("an address");
        let error = PhysicalFunction::of(root.path(), of).expect_err("there is nothing");
        assert_eq!(
            error.to_string(),
            "0000:01:10.0 is not a virtual function of a card whose interface this host has"
        );
        let net = root.path().join("bus/pci/devices/0000:01:10.0/physfn/net/pf0");
        fs::create_dir_all(&net).expect("a folder");
        fs::write(net.join("ifindex"), "7\n").expect("a file");
        fs::write(net.join("address"), "nothing\n").expect("a file");
        let error = PhysicalFunction::of(root.path(), of).expect_err("it has no address");
        assert_eq!(error.to_string(), "pf0 has no address that can be read");
        fs::write(net.join("address"), "02:00:00:00:00:01\n").expect("a file");
        fs::write(net.join("flags"), "0x1002\n").expect("a file");
        let error = PhysicalFunction::of(root.path(), of).expect_err("it is down");
        assert_eq!(error.to_string(), "pf0 is down");
    }
}
