//! Fuzz targets: whatever a guest, a front end or a saved state can say must end in a value, never in a panic, an
//! endless loop or a store outside what the driver offered.
//!
//! ```text
//!   bytes --Unstructured--> a nearly right ring, request, message or state, with mistakes --> the crate's own code
//!                                                                                              | oracles
//!            fuzz_targets/ (cargo-fuzz, coverage-guided)  --+                                   v
//!            mutate.rs     (any cargo, bounded seconds)   --+--> run(bytes) -> signature, or a panic
//! ```
//!
//! A target answers with a signature of what it saw; the runner without coverage keeps inputs that give a new one.
#![deny(unsafe_code)]

pub mod blk_request;
pub mod directory;
pub mod frames;
pub mod guest;
pub mod incoming_monitor;
pub mod join;
pub mod late;
pub mod monitor;
pub mod moved_state;
pub mod mutate;
pub mod nbd;
pub mod net_control;
pub mod net_headers;
pub mod nic;
pub mod packed_ring;
pub mod ring_walk;
pub mod segmentation;
pub mod serve;
pub mod session;
pub mod stage;
pub mod state_load;
pub mod symbols;
pub mod tracepoints;
pub mod vfio_user;
pub mod vhost_user;
pub mod wire;

/// One target.
#[derive(Clone, Copy)]
pub struct Target {
    /// Its name, as cargo-fuzz knows it.
    pub name: &'static str,
    /// Runs one input; panics on a finding.
    pub run: fn(&[u8]) -> u64,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "ring_walk", run: ring_walk::run },
    Target { name: "packed_ring", run: packed_ring::run },
    Target { name: "blk_request", run: blk_request::run },
    Target { name: "state_load", run: state_load::run },
    Target { name: "vhost_user", run: vhost_user::run },
    Target { name: "vfio_user", run: vfio_user::run },
    Target { name: "monitor", run: monitor::run },
    Target { name: "segmentation", run: segmentation::run },
    Target { name: "frames", run: frames::run },
    Target { name: "net_headers", run: net_headers::run },
    Target { name: "net_control", run: net_control::run },
    Target { name: "symbols", run: symbols::run },
    Target { name: "tracepoints", run: tracepoints::run },
    Target { name: "nbd_server", run: nbd::server::run },
    Target { name: "nbd_client", run: nbd::client::run },
    Target { name: "nbd_requests", run: nbd::requests::run },
    Target { name: "nbd_replies", run: nbd::replies::run },
    Target { name: "nbd_sums", run: nbd::sums::run },
    Target { name: "directory", run: directory::run },
    Target { name: "join", run: join::run },
    Target { name: "session", run: session::run },
    Target { name: "incoming_monitor", run: incoming_monitor::run },
    Target { name: "moved_state", run: moved_state::run },
];

/// What a run saw, in one number (FNV-1a).
#[derive(Debug, Clone, Copy)]
pub struct Signature(u64);

impl Default for Signature {
    fn default() -> Self {
        Signature(0xcbf2_9ce4_8422_2325)
    }
}

impl Signature {
    /// Something was seen.
    pub fn saw(&mut self, what: &str) {
        for byte in what.bytes().chain([0xff]) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    /// A number was seen; only its magnitude counts.
    pub fn count(&mut self, number: u64) {
        self.0 = (self.0 ^ u64::from(64 - number.leading_zeros())).wrapping_mul(0x0100_0000_01b3);
    }

    /// The number.
    pub fn value(self) -> u64 {
        self.0
    }
}
