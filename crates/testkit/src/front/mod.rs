//! A vhost-user front end without a VM: it negotiates, shares memory and rings, kicks, and survives its back end.
//!
//! ```text
//!   GuestMemory --SET_MEM_TABLE / ADD_MEM_REG-->  back end
//!   Disk.place() --SET_VRING_*, kick, call-->     its rings         FrontEnd = Wire + what QEMU would keep over a reconnect
//!   FrontEnd::reconnect: new socket, same memory, same rings, same eventfds, same in-flight descriptor
//! ```
//!
//! Follows the vhost-user specification and the order in which QEMU says things. [`FrontEnd::wire`] sends anything else.
//! One thread drives it. Must not know: the crate `vhost`, which the daemon is built on; the two check each other.

pub mod event;
pub mod wire;

mod session;
mod terms;
#[cfg(test)]
mod tests;

use std::path::Path;

pub use event::EventFd;
pub use session::FrontEnd;
pub use terms::{FrontError, InFlight, Wants, region_bytes, vring_state};
pub use wire::{FrontEndRequest, FrontSocket, FrontSocketError, Message};

/// Whether somebody listens at `path`. A socket's file is there a moment before that, and a connection only to find out
/// would be a client to the back end; /proc/net/unix tells without one. It knows a socket by the name that it was bound to:
/// ours are bound beside, under names of their own, listen, and are renamed, so that one that is in its place listens.
pub fn listens(path: &Path) -> bool {
    // Num RefCount Protocol Flags Type St Inode Path; of the flags, a listener has this one (net/unix: __SO_ACCEPTCON).
    const ACCEPTS: u32 = 1 << 16;
    // Of the namespace of this thread, which may be another than that of the process.
    let sockets = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    sockets.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        let flags = words.nth(3).and_then(|flags| u32::from_str_radix(flags, 16).ok());
        let name = words.nth(3).map(Path::new);
        flags.is_some_and(|flags| flags & ACCEPTS != 0)
            && name.is_some_and(|name| name == path || bound_beside(name))
    }) && path.exists()
}

/// The names of `ioplane_host::socket`.
fn bound_beside(name: &Path) -> bool {
    name.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(".ioplane-"))
}

/// Protocol features, under the names of the vhost-user specification.
pub mod protocol {
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const RARP: u64 = 1 << 2;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const MTU: u64 = 1 << 4;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const BACKEND_SEND_FD: u64 = 1 << 10;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub const STATUS: u64 = 1 << 16;
}

/// VHOST_USER_F_PROTOCOL_FEATURES among the device features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// VHOST_F_LOG_ALL among the device features.
pub const F_LOG_ALL: u64 = 1 << 26;
