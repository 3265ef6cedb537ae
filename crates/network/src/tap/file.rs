//! Opening a TAP device, and its vnet header.

#![allow(unsafe_code)]
// UNSAFETY: ioctls of the TUN driver, which rustix does not have.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::error::NetworkError;
use crate::offload::{Offload, RxOffloads};

/// `virtio_net_hdr_mrg_rxbuf` / `_v1`: what the other side of the switch speaks, so that nothing has to be moved.
pub(super) const VNET: usize = 12;

const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUNSETVNETLE: libc::c_ulong = 0x4004_54dc;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;

const IFF_PERSIST: u32 = 0x0800;

const TUN_F_CSUM: u32 = 0x01;
const TUN_F_TSO4: u32 = 0x02;
const TUN_F_TSO6: u32 = 0x04;
const TUN_F_TSO_ECN: u32 = 0x08;
const TUN_F_USO4: u32 = 0x20;
const TUN_F_USO6: u32 = 0x40;

/// The number of the host's interface of that name, in the network namespace of this thread. Another one gets another number.
pub fn interface(name: &str) -> Option<u32> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    netdevice::name_to_index(socket.ok()?, name).ok()
}

/// Opens the TAP device called `name`, or makes it, without vnet headers: frames are read and written one by one, as on a wire, with whole checksums and no
/// large segments. Does not block.
pub fn tap_of_frames(name: &str) -> Result<OwnedFd, NetworkError> {
    attach(name, 0)
}

/// Opens the device called `name`; says what it takes, and whether it was made by that.
pub(super) fn open(name: &str) -> Result<(OwnedFd, RxOffloads, bool), NetworkError> {
    let os = |doing| os_error(name, doing);
    let file = attach(name, libc::IFF_VNET_HDR)?;
    set(&file, TUNSETVNETHDRSZ, VNET as libc::c_int).map_err(os("setting the size of its header"))?;
    // The header in little-endian whatever the host is; only needed, and only there, where that is a choice.
    let little = set(&file, TUNSETVNETLE, 1);
    if cfg!(target_endian = "big") {
        little.map_err(os("setting the byte order of its header"))?;
    }
    let takes = offloads(&file).map_err(os("setting its offloads"))?;
    // One that does not outlive its last descriptor was not there before this one: nobody else has it open.
    let made = flags_of(&file).map_err(os("asking what it is"))?.0 & IFF_PERSIST == 0;
    Ok((file, takes, made))
}

/// What the system says while something is done with the device called `name`.
fn os_error(name: &str, doing: &'static str) -> impl Fn(std::io::Error) -> NetworkError {
    move |source| NetworkError::Os { what: format!("tap {name}"), doing, source }
}

/// Opens the device called `name` with `flags` beside those of every TAP device.
fn attach(name: &str, flags: libc::c_int) -> Result<OwnedFd, NetworkError> {
    let os = |doing| os_error(name, doing);
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(['/', '%', '\0']) {
        let wrong = std::io::Error::other("a name has 1 to 15 bytes, without '/' and '%'");
        return Err(os("naming it")(wrong));
    }
    let access = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open("/dev/net/tun", access, Mode::empty())
        .map_err(|errno| os("opening /dev/net/tun (is the module tun there?)")(errno.into()))?;
    // SAFETY: an ifreq is plain bytes, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | flags) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which is ours.
    let attached = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &mut request) };
    if attached < 0 {
        let error = std::io::Error::last_os_error();
        return Err(os(
            "attaching to it (is it in use, or not a TAP device with vnet headers, or CAP_NET_ADMIN missing?)",
        )(error));
    }
    Ok(file)
}

/// Whether an open device outlives its last descriptor.
pub(super) fn persist(file: &OwnedFd, lasting: bool) -> std::io::Result<()> {
    // SAFETY: TUNSETPERSIST takes its argument by value.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETPERSIST as _, libc::c_ulong::from(lasting)) };
    if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Flags and name of an open device.
fn flags_of(file: &OwnedFd) -> std::io::Result<(u32, [libc::c_char; libc::IFNAMSIZ])> {
    // SAFETY: an ifreq is plain bytes, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: TUNGETIFF writes one ifreq, which is ours.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNGETIFF as _, &mut request) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: TUNGETIFF has stored the flags, as a short.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    Ok((u32::from(flags as u16), request.ifr_name))
}

/// What an open device takes, if it is the one called `name`.
pub(super) fn check(name: &str, file: &OwnedFd) -> Result<RxOffloads, NetworkError> {
    let os = |doing| os_error(name, doing);
    let (_, of) = flags_of(file).map_err(os("asking what it is"))?;
    let found = of.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0);
    if !found.eq(name.bytes()) {
        return Err(os("asking for its name")(std::io::Error::other("it is another device")));
    }
    offloads(file).map_err(os("setting its offloads"))
}

fn set(file: &OwnedFd, request: libc::c_ulong, value: libc::c_int) -> std::io::Result<()> {
    // SAFETY: both requests read one int, which is ours.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), request as _, &value) };
    if done < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Asks for as much as this kernel has: the frames that it sends may be large then.
fn offloads(file: &OwnedFd) -> std::io::Result<RxOffloads> {
    let tso = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6;
    let choices = [
        (tso | TUN_F_TSO_ECN | TUN_F_USO4 | TUN_F_USO6, RxOffloads::ALL),
        (tso | TUN_F_TSO_ECN, RxOffloads { uso4: false, uso6: false, ..RxOffloads::ALL }),
        (tso, RxOffloads { ecn: false, uso4: false, uso6: false, ..RxOffloads::ALL }),
        (TUN_F_CSUM, RxOffloads { checksum: true, ..RxOffloads::default() }),
        (0, RxOffloads::default()),
    ];
    let mut refused = std::io::Error::from_raw_os_error(libc::EINVAL);
    for (flags, takes) in choices {
        // SAFETY: TUNSETOFFLOAD takes its flags by value.
        let done = unsafe { libc::ioctl(file.as_raw_fd(), TUNSETOFFLOAD as _, libc::c_ulong::from(flags)) };
        if done == 0 {
            return Ok(takes);
        }
        refused = std::io::Error::last_os_error();
    }
    Err(refused)
}

/// Writes a header as the kernel reads it.
pub(super) fn encode(offload: &Offload) -> [u8; VNET] {
    let mut header = [0; VNET];
    (header[0], header[1]) = (offload.flags, offload.gso);
    let words = [offload.hdr_len, offload.gso_size, offload.csum_start, offload.csum_offset];
    for (to, word) in header[2..10].as_chunks_mut::<2>().0.iter_mut().zip(words) {
        *to = word.to_le_bytes();
    }
    header
}

/// Reads a header that the kernel wrote.
pub(super) fn decode(header: &[u8; VNET]) -> Offload {
    let word = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    Offload {
        flags: header[0],
        gso: header[1],
        hdr_len: word(2),
        gso_size: word(4),
        csum_start: word(6),
        csum_offset: word(8),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_read_as_written() {
        let offload =
            Offload { flags: 1, gso: 4, hdr_len: 66, gso_size: 1448, csum_start: 34, csum_offset: 16 };
        assert_eq!(decode(&encode(&offload)), offload);
    }

    #[test]
    fn impossible_names_are_refused() {
        for name in ["", "a name of sixteen", "a/b", "tap%d"] {
            assert!(open(name).is_err(), "{name:?}");
        }
    }
}
