//! How many mappings there are, and whose.
//!
//! ```text
//!   32,768 mappings = 512 clients x 32 that are theirs   + 12,288 for whoever wants more, up to 525 each   + 4,096 of our own
//! ```

use crate::table::SLOTS;

/// Most mappings that can live at once in one process.
pub const MAX_MAPPINGS: usize = SLOTS;
/// Most regions in one map. QEMU uses at most 509 memory slots; a peer that asks for more is refused.
pub const MAX_REGIONS: usize = 509;
/// Most clients of one process.
pub const CLIENTS: usize = 512;
/// Mappings that no other client can take away from a client.
pub const OWN: usize = 32;
/// Most mappings of one client: its regions, the in-flight region, the dirty log, and what is mapped before its predecessor goes. Fewer
/// where the process may have fewer descriptors.
pub const MOST: usize = MAX_REGIONS + 16;
/// Mappings of the process itself: disks in memory, pages and rings of mediated hardware.
pub(crate) const PROCESS: usize = 4096;
/// Most mappings for clients that want more than [`OWN`]; fewer where the process may have fewer descriptors.
pub(crate) const POOL: usize = MAX_MAPPINGS - CLIENTS * OWN - PROCESS;
