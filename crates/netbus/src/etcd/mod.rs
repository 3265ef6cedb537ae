//! A directory in etcd: each host changes the names itself, by compare-and-swap, and no daemon serves them.
//!
//! ```text
//!   EtcdSession --report--> Directory (pure) decides what to change, from what has just been read
//!        |                       '--> one transaction for each name: the key is as it was read, and this session is in place
//!        '-- Gateway: JSON over HTTP/1.1, plain or TLS 1.3 --> a member of etcd
//! ```
//!
//! - **A name is a key without a lease.** It is taken if it is not there, and changed or removed if it is as it was read.
//! - **A session is a key with a lease**, which each report renews. All that a session writes is written only while that key is its own.
//! - **Nothing is assumed to have happened.** After an error the session is of no use, and the next one reads what is.

mod endpoint;
mod gateway;
mod records;
mod session;

pub use endpoint::{ETCD_PORT, EtcdEndpoint};
pub(crate) use session::EtcdSession;
