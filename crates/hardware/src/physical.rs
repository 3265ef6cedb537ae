//! Frames from the physical function that a virtual one belongs to: the card hands what its physical function sends to one of its virtual
//! functions to that one, without the cable.
#![allow(unsafe_code)]
// UNSAFETY: rustix has no addresses of packet sockets: a socket is made and frames are sent by libc.

use std::fs;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use ioplane_api::spec::{MacAddress, PciAddress, TagWord, VfVlan};

use crate::sysfs::{Sysfs, text};

/// For experiments on a local network (IEEE 802, clause 9.2.3): no stack takes such a frame.
const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// IFF_UP in the flags of an interface (linux/if.h).
const UP: u32 = 1;
/// The shortest frame, without its check sum.
const SHORTEST: usize = 60;
/// The same with the tag of a VLAN.
const TAGGED: usize = SHORTEST + 4;

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

/// What tells switches on the way where an address is now: a reverse request for it (RFC 903), as hypervisors send after a guest has
/// moved; with the tag of a VLAN (IEEE 802.1Q-2018, 9.6) if there is one.
fn announcement(address: [u8; 6], vlan: Option<VfVlan>) -> [u8; TAGGED] {
    let mut frame = [0; TAGGED];
    frame[..6].fill(0xff);
    frame[6..12].copy_from_slice(&address);
    let mut at = 12;
    if let Some(VfVlan { id, qos, proto }) = vlan {
        let kind: u16 = match proto {
            TagWord::Dot1q => 0x8100,
            TagWord::Dot1ad => 0x88a8,
        };
        frame[12..14].copy_from_slice(&kind.to_be_bytes());
        frame[14..16].copy_from_slice(&(u16::from(qos & 7) << 13 | id & 0xfff).to_be_bytes());
        at = 16;
    }
    // RARP; Ethernet, IPv4, lengths of their addresses, reverse request; sender and target hardware address.
    frame[at..at + 10].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
    frame[at + 10..at + 16].copy_from_slice(&address);
    frame[at + 20..at + 26].copy_from_slice(&address);
    frame
}

/// The network interface of a physical function, or one that stands in for it.
#[derive(Debug)]
pub struct PhysicalFunction {
    interface: String,
    stands_in: bool,
    index: i32,
    address: [u8; 6],
    socket: OwnedFd,
}

/// What sysfs says of the interface of a card's physical function.
pub(crate) struct Net {
    folder: PathBuf,
    pub(crate) name: String,
}

impl Net {
    /// Of the card that the virtual function `of` belongs to.
    pub(crate) fn found(root: &Path, of: PciAddress) -> io::Result<Net> {
        let nets = Sysfs::new(root).function(of).join("physfn/net");
        let interface = fs::read_dir(&nets).ok().and_then(|mut all| all.next()?.ok());
        let interface = interface.ok_or_else(|| {
            missing(format!("{of} is not a virtual function of a card whose interface this host has"))
        })?;
        Ok(Net { folder: interface.path(), name: interface.file_name().to_string_lossy().into_owned() })
    }

    /// The interface `uplink`, if there is none of the function's card.
    fn standing_in(root: &Path, of: PciAddress, uplink: &str) -> io::Result<Net> {
        if let Ok(own) = Net::found(root, of) {
            let why =
                format!("{of} has its physical function on this host, {}: leave the uplink out", own.name);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let folder = root.join("class/net").join(uplink);
        if !folder.is_dir() {
            return Err(missing(format!("this host has no interface {uplink}")));
        }
        Ok(Net { folder, name: uplink.to_owned() })
    }

    /// Whose frames come to that function, if it is up.
    fn of(root: &Path, of: PciAddress, uplink: Option<&str>) -> io::Result<Net> {
        let net = match uplink {
            None => Net::found(root, of)?,
            Some(uplink) => Net::standing_in(root, of, uplink)?,
        };
        let flags = net.attribute("flags")?;
        let flags =
            u32::from_str_radix(flags.trim_start_matches("0x"), 16).map_err(|_| net.wrong("flags"))?;
        match flags & UP {
            0 => Err(io::Error::new(io::ErrorKind::NetworkDown, format!("{} is down", net.name))),
            _ => Ok(net),
        }
    }

    pub(crate) fn attribute(&self, what: &str) -> io::Result<String> {
        let found = text(&self.folder.join(what));
        found.ok_or_else(|| missing(format!("{} has no {what}", self.name)))
    }

    /// Its number in the kernel.
    pub(crate) fn index<T: std::str::FromStr>(&self) -> io::Result<T> {
        self.attribute("ifindex")?.parse().map_err(|_| self.wrong("index"))
    }

    fn wrong(&self, what: &str) -> io::Error {
        io::Error::other(format!("{} has no {what} that can be read", self.name))
    }
}

fn missing(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, what)
}

impl PhysicalFunction {
    /// That of the virtual function `of`, on the host whose sysfs is mounted at `root`; or the interface `uplink`, where the host has none of the
    /// card, as a VM that was handed virtual functions. It has to be up.
    pub fn of(root: &Path, of: PciAddress, uplink: Option<&str>) -> io::Result<Self> {
        let net = Net::of(root, of, uplink)?;
        let index = net.index()?;
        let address: MacAddress = net.attribute("address")?.parse().map_err(|_| net.wrong("address"))?;
        // SAFETY: no pointers; what it returns is a new descriptor or -1.
        let socket = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: nobody else has it.
        let socket = unsafe { OwnedFd::from_raw_fd(socket) };
        let stands_in = uplink.is_some();
        Ok(PhysicalFunction { interface: net.name, stands_in, index, address: address.0, socket })
    }

    /// Whether frames from it could come now to the virtual function `of`, and leave by the cable: it is driven by this host, up, and has
    /// a link. Opens nothing.
    pub fn is_ready(root: &Path, of: PciAddress, uplink: Option<&str>) -> io::Result<()> {
        let net = Net::of(root, of, uplink)?;
        match net.attribute("carrier")?.as_str() {
            "0" => Err(io::Error::new(io::ErrorKind::NetworkDown, format!("{} has no link", net.name))),
            _ => Ok(()),
        }
    }

    /// Its interface.
    pub fn interface(&self) -> &str {
        &self.interface
    }

    /// Whether it is the physical function's own: the network finds the guest behind it.
    pub fn is_at_the_function(&self) -> bool {
        !self.stands_in
    }

    /// Sends so many frames of a flow with nothing in them. Some may be lost where its queue is full.
    pub fn send(&self, to: [u8; 6], flow: u32, count: u32) -> io::Result<()> {
        let frame = flow_frame(to, self.address, flow);
        (0..count).try_for_each(|_| self.put(&frame))
    }

    /// Says to the network that an address is behind this card now, in the name of whoever has it: a broadcast, which the card hands
    /// to its other functions and sends by the cable. One that is lost where its queue is full is made up for by the next.
    pub fn announce(&self, address: [u8; 6], vlan: Option<VfVlan>) -> io::Result<()> {
        let len = if vlan.is_some() { TAGGED } else { SHORTEST };
        self.put(&announcement(address, vlan)[..len])
    }

    /// Sends a frame as it is. Does not wait.
    fn put(&self, frame: &[u8]) -> io::Result<()> {
        // SAFETY: integers and bytes, for which zero is a value.
        let mut place: libc::sockaddr_ll = unsafe { mem::zeroed() };
        place.sll_family = libc::AF_PACKET as u16;
        place.sll_ifindex = self.index;
        place.sll_halen = 6;
        place.sll_addr[..6].copy_from_slice(&frame[..6]);
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
        if sent >= 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::ENOBUFS | libc::EAGAIN | libc::EINTR) => Ok(()),
            _ => Err(io::Error::new(error.kind(), format!("{}: {error}", self.interface))),
        }
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
    fn an_announcement_is_a_reverse_request() {
        let address = [2, 0, 0, 0, 0, 7];
        let frame = announcement(address, None);
        assert_eq!((&frame[..6], &frame[6..12]), (&[0xff; 6][..], &address[..]));
        assert_eq!((&frame[12..14], &frame[20..22]), (&[0x80, 0x35][..], &[0, 3][..]));
        let tagged = announcement(address, Some(VfVlan { id: 0xffff, qos: 0, proto: TagWord::Dot1q }));
        assert_eq!(tagged[12..16], [0x81, 0, 0x0f, 0xff]);
        let provider = announcement(address, Some(VfVlan { id: 5, qos: 3, proto: TagWord::Dot1ad }));
        assert_eq!(provider[12..16], [0x88, 0xa8, 0x60, 5]);
        assert_eq!((&tagged[..12], &tagged[16..]), (&frame[..12], &frame[12..SHORTEST]));
    }

    #[test]
    fn what_has_no_physical_function_is_said() {
        let root = tempfile::tempdir().expect("a folder");
        let of = "0000:01:10.0".parse().expect("an address");
        let error = PhysicalFunction::of(root.path(), of, None).expect_err("there is nothing");
        assert_eq!(
            error.to_string(),
            "0000:01:10.0 is not a virtual function of a card whose interface this host has"
        );
        let error = PhysicalFunction::of(root.path(), of, Some("up0")).expect_err("there is nothing");
        assert_eq!(error.to_string(), "this host has no interface up0");
        let uplink = root.path().join("class/net/up0");
        fs::create_dir_all(&uplink).expect("a folder");
        fs::write(uplink.join("flags"), "0x1003\n").expect("a file");
        fs::write(uplink.join("carrier"), "0\n").expect("a file");
        let error = PhysicalFunction::is_ready(root.path(), of, Some("up0")).expect_err("its cable is out");
        assert_eq!(error.to_string(), "up0 has no link");
        fs::write(uplink.join("carrier"), "1\n").expect("a file");
        PhysicalFunction::is_ready(root.path(), of, Some("up0")).expect("it is up, and has a link");
        let net = root.path().join("bus/pci/devices/0000:01:10.0/physfn/net/pf0");
        fs::create_dir_all(&net).expect("a folder");
        fs::write(net.join("ifindex"), "7\n").expect("a file");
        fs::write(net.join("flags"), "0x1002\n").expect("a file");
        let error = PhysicalFunction::is_ready(root.path(), of, Some("up0")).expect_err("it has its own");
        assert_eq!(
            error.to_string(),
            "0000:01:10.0 has its physical function on this host, pf0: leave the uplink out"
        );
        let error = PhysicalFunction::of(root.path(), of, None).expect_err("it is down");
        assert_eq!(error.to_string(), "pf0 is down");
        assert_eq!(
            PhysicalFunction::is_ready(root.path(), of, None).expect_err("it is down").to_string(),
            "pf0 is down"
        );
        fs::write(net.join("flags"), "0x1003\n").expect("a file");
        fs::write(net.join("address"), "nothing\n").expect("a file");
        let error = PhysicalFunction::of(root.path(), of, None).expect_err("it has no address");
        assert_eq!(error.to_string(), "pf0 has no address that can be read");
        fs::write(net.join("carrier"), "0\n").expect("a file");
        let error = PhysicalFunction::is_ready(root.path(), of, None).expect_err("its cable is out");
        assert_eq!(error.to_string(), "pf0 has no link");
        fs::write(net.join("carrier"), "1\n").expect("a file");
        PhysicalFunction::is_ready(root.path(), of, None).expect("it is up, and has a link");
    }
}
