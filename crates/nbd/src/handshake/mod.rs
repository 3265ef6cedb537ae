//! The handshake of fixed newstyle (section "Handshake"), for both sides: bytes in, bytes out, bounded memory. No I/O is done here.
//!
//! ```text
//!   server                      client
//!     greeting ------------------>
//!     <------------------- client flags
//!     <------------------- option, reply, option, reply ...    STARTTLS: both go on over TLS, and forget what was said
//!     <------------------- GO (or EXPORT_NAME)
//!     transmission phase
//! ```

pub mod client;
mod option;
mod reply;
pub mod server;
#[cfg(test)]
mod tests;

use crate::error::Violation;
use crate::spec::{DEFAULT_MAX_PAYLOAD, DEFAULT_PREFERRED_BLOCK, LARGEST_MINIMUM_BLOCK, NBD_FLAG_READ_ONLY};

/// What a client learns of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportInfo {
    /// The server's own name of it; empty where the server has not said.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// Size of the disk.
    pub bytes: u64,
    /// Transmission flags, `NBD_FLAG_*`.
    pub flags: u16,
    /// Sizes of requests; `None` where the server has not said: see [`BlockSizes::default`].
    pub blocks: Option<BlockSizes>,
}

impl ExportInfo {
    /// Whether a transmission flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Whether it cannot be written.
    pub fn read_only(&self) -> bool {
        self.has(NBD_FLAG_READ_ONLY)
    }
}

/// Sizes of requests, in bytes (section "Size constraints").
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSizes {
    /// Unit of offsets and lengths; a power of two.
    pub minimum: u32,
    /// Unit in which requests are cheap; a power of two.
    pub preferred: u32,
    /// Most data of one request.
    pub maximum: u32,
}

/// What holds where a server has not said.
impl Default for BlockSizes {
    fn default() -> Self {
        BlockSizes { minimum: 1, preferred: DEFAULT_PREFERRED_BLOCK, maximum: DEFAULT_MAX_PAYLOAD }
    }
}

impl BlockSizes {
    /// The same, if the specification allows them.
    pub fn checked(self) -> Result<BlockSizes, Violation> {
        let BlockSizes { minimum, preferred, maximum } = self;
        let powers = minimum.is_power_of_two() && preferred.is_power_of_two();
        if powers && minimum <= LARGEST_MINIMUM_BLOCK && preferred >= minimum.max(512) && maximum >= preferred
        {
            Ok(self)
        } else {
            Err(Violation::BlockSizes { minimum, preferred, maximum })
        }
    }
}

/// A metadata context that was selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetaContext {
    /// Number in block status chunks.
    pub id: u32,
    /// Name, with its namespace.
    pub name: String,
}

/// Whether these bytes are a string as the specification has it.
pub(crate) fn is_string(bytes: &[u8]) -> bool {
    option::string(bytes).is_ok()
}
