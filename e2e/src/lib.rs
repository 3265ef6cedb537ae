//! Real Linux guests in real VMMs, from a test: `cargo test -p ioplane-e2e`.
//!
//! ```text
//!   assets (built once, cached) --> Qemu (builder) --start--> Vm --agent()--> Agent --JSON lines--> guest/load in the guest
//!   Daemon (the ioplane binary) --qemu-args--^                 `--qmp()--> Qmp (hot-plug, query, quit)
//!   L1 (a KVM host in a VM) --run(script)--> whatever was built outside, on a real KVM with real tracepoints
//!    |   `--boot_with_nics(...): with physical NICs, an IOMMU, and somebody at the other end of each cable
//!    |   `--boot_with_igbs(...): with 82576s and virtual functions of them; a guest of those goes from one to another (`travel`, `streams`)
//!   Lan: two L1s, each with an 82576, on networks of this machine; a guest goes from one to the other
//!    `--debian(...)--> L2, a Debian guest on that KVM
//!   StorageDaemon (qemu-storage-daemon, the peer) --^
//! ```
//!
//! Everything started here dies with the value that stands for it, and with the test process should that be killed.
//! It must not know: the inside of any other crate; ioplane is met as a binary and a socket, like a user's. Of `ioplane-qemu` it has the QMP
//! client, which is the only one here.
#![allow(missing_docs, reason = "only tests use it: a comment says what a name does not")]

pub mod accelerator;
pub mod agent;
pub mod assets;
pub mod batching;
pub mod clamped;
pub mod clustering;
pub mod coop;
pub mod daemon;
pub mod exchange;
pub mod high;
pub mod hosts;
pub mod igb;
pub mod inner;
pub mod l1;
pub mod l2;
pub mod lan;
pub mod libvirt;
pub mod logwrites;
pub mod memories;
pub mod migration;
pub mod module;
pub mod nics;
pub mod pairs;
pub mod peer;
pub mod place;
pub mod planted;
pub mod preload;
pub mod process;
pub mod qemu;
pub mod qmp;
pub mod sides;
pub mod silicon;
pub mod stage;
pub mod status;
pub mod streams;
pub mod traces;
pub mod traffic;
pub mod travel;
pub mod uplink;
pub mod version;
pub mod virsh;
pub mod vm;
mod vmrun;

pub use accelerator::Accelerator;
pub use agent::{Agent, RunningLoad};
pub use clustering::{ClusteringFigures, GuestWork, OldMachine, OldWork};
pub use daemon::Daemon;
pub use igb::VirtualFunctions;
pub use inner::Inner;
pub use ioplane_guest_load::{network, protocol};
pub use l1::{Job, L1};
pub use l2::{L2, PERIODIC, Parts};
pub use lan::Lan;
pub use migration::Travelled;
pub use module::HotModule;
pub use nics::Nic;
pub use peer::StorageDaemon;
pub use place::HostPlace;
pub use planted::Planted;
pub use qemu::{Firmware, Qemu};
pub use qmp::Qmp;
pub use silicon::Silicon;
pub use stage::Stage;
pub use status::Status;
pub use traffic::Traffic;
pub use version::Version;
pub use vm::Vm;
