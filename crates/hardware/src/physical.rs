//! Frames from the physical function that a virtual one belongs to: the card hands what its physical function sends to one of its virtual
//! functions to that one, without the cable.
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

/// A frame with nothing in it. Hardware that shares frames out to queues by their addresses keeps those of a flow together. Flow 0 is no
/// IPv4: it goes to the first queue.
pub fn flow_frame(to: [u8; 6], from: [u8; 6], flow: u32) -> [u8; SHORTEST] {
    let mut frame = [0; SHORTEST];
    frame[..6].copy_from_slice(&to);
    frame[6..12].copy_from_slice(&from);
    if flow == 0 {
        frame[12..14].copy_from_slice(&ETHERTYPE);
        return frame;
    }
    // 198.18.0.0/15 is for tests of network devices (RFC 2544), and protocol 253 for experiments (RFC 3692).
    let host = flow.wrapping_mul(0x9e37_79b1);
    let source = 198 << 24 | 18 << 16 | host >> 15;
    let target = 198 << 24 | 18 << 16 | host & 0x1_ffff;
    let header = &mut frame[14..34];
    (header[0], header[3], header[8], header[9]) = (0x45, 46, 1, 253);
    header[12..16].copy_from_slice(&source.to_be_bytes());
    header[16..20].copy_from_slice(&target.to_be_bytes());
    let sum = header.as_chunks().0.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum::<u32>();
    let sum = (sum & 0xffff) + (sum >> 16);
    header[10..12].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
    frame[12..14].copy_from_slice(&[8, 0]);
    frame
}

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

    /// Sends so many frames of a flow with nothing in them. Some may be lost where its queue is full.
    pub fn send(&self, to: [u8; 6], flow: u32, count: u32) -> io::Result<()> {
        let frame = flow_frame(to, self.address, flow);
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
    fn flows_differ_in_their_addresses() {
        let plain = flow_frame([2; 6], [4; 6], 0);
        assert_eq!(plain[..14], [2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 4, 4, 0x88, 0xb5]);
        let mut seen = std::collections::BTreeSet::new();
        for flow in 1..64 {
            let frame = flow_frame([2; 6], [4; 6], flow);
            assert_eq!((&frame[12..15], frame[17], frame[23]), (&[8, 0, 0x45][..], 46, 253), "flow {flow}");
            for address in [&frame[26..30], &frame[30..34]] {
                assert_eq!((address[0], address[1] & 0xfe), (198, 18), "flow {flow}");
            }
            let words = frame[14..34].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1]));
            assert_eq!(words.sum::<u32>() % 0xffff, 0, "the check sum of flow {flow}");
            assert!(seen.insert(frame[26..34].to_vec()), "flow {flow} is another's");
        }
    }

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
