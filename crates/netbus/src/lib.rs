//! The devices that hosts publish for each other: who has what, by name.
//!
//! ```text
//!   host-a: DirectorySession --report: all that it publishes--> DirectoryServer -- Directory (pure) -- DirectoryStore (redb)
//!   host-b: DirectorySession --list-------------------------->       |  one session for each host
//!                            <--- ListedDevice: device, host, seen ---'
//!
//!   or, without a daemon that serves it:
//!   host-a, host-b: DirectorySession --compare-and-swap on a key for each name--> etcd
//! ```
//!
//! Beside that, two hosts of which one uses what the other one publishes have a session of their own ([`control`]), by which the one is told how its devices are. A host that expects something of another one
//! is reached by a [`channel`].
//!
//! - **A name is one host's** from its first report until the host reports without it, or a person forgets it. That is kept in a file and
//!   synced before the host is answered, or in etcd under a key without a lease. A second host that publishes the same name is told whose it is.
//! - **Whether a host is there** is a lease: each report renews it. Leases are in memory only, or leases of etcd, since a name does not change hands when one ends.
//! - **What a device is** the directory does not know: kind and location are text of those who publish and use it.
//!
//! Must not know: what kinds of devices there are, how their data travel, daemons, I/O cores.
#![forbid(unsafe_code)]

mod address;
pub mod channel;
pub mod control;
mod device;
mod directory;
mod error;
mod etcd;
mod limits;
mod names;
mod served;
mod server;
mod session;
mod store;
mod stream;
mod wire;

pub use address::DirectoryAddress;
pub use device::{DeviceFlaw, DeviceRate, DeviceRecord, HostPresence, ListedDevice};
pub use directory::{Directory, Forgotten, NameChange, Taken};
pub use error::NetbusError;
pub use etcd::{ETCD_PORT, EtcdEndpoint};
pub use limits::{LEASE, LONGEST_MESSAGE, MOST_DEVICES, MOST_HOSTS, MOST_NAMES};
pub use server::{DirectoryServer, ServerSecurity};
pub use session::DirectorySession;
pub use store::DirectoryStore;
pub use stream::Security;

/// The port of a directory if nothing else is said.
pub const DEFAULT_PORT: u16 = 10808;
