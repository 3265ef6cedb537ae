//! What handshakes are told of an export, while its owner has the export itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ioplane_storage::BackingInfo;

use super::ExportOptions;
use super::accept::Exports;
use crate::handshake::server::ExportRefusal;
use crate::handshake::{BlockSizes, ExportInfo};
use crate::spec::*;

#[derive(Debug)]
struct Shared {
    /// Its size is that of `bytes`.
    info: ExportInfo,
    bytes: AtomicU64,
    most: usize,
    connections: AtomicUsize,
    withdrawn: AtomicBool,
}

/// One export, as clients are told of it. Clones are of the same export. Answers handshakes as the only export there is.
#[derive(Debug, Clone)]
pub struct PublishedExport(Arc<Shared>);

impl PublishedExport {
    pub(super) fn new(name: &str, options: &ExportOptions, below: &BackingInfo) -> PublishedExport {
        let minimum = below.logical_block.min(LARGEST_MINIMUM_BLOCK);
        let preferred = below.physical_block.max(minimum).max(512);
        let blocks = BlockSizes { minimum, preferred, maximum: options.largest.max(preferred) };
        let read_only = options.read_only || below.read_only;
        // A flush makes durable what any channel of the backing has completed, and all connections have channels of one backing.
        let mut flags =
            NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA | NBD_FLAG_CAN_MULTI_CONN;
        flags |= match (read_only, below.discards) {
            (true, _) => NBD_FLAG_READ_ONLY,
            (false, true) => NBD_FLAG_SEND_WRITE_ZEROES | NBD_FLAG_SEND_TRIM,
            (false, false) => NBD_FLAG_SEND_WRITE_ZEROES,
        };
        let info = ExportInfo {
            name: name.to_owned(),
            description: options.description.clone(),
            bytes: whole_blocks(below.bytes, minimum),
            flags,
            blocks: Some(blocks),
        };
        let (most, connections) = (usize::from(options.connections), AtomicUsize::new(0));
        let (bytes, withdrawn) = (AtomicU64::new(info.bytes), AtomicBool::new(false));
        PublishedExport(Arc::new(Shared { info, bytes, most, connections, withdrawn }))
    }

    /// What clients are told, with the size of this moment.
    pub fn info(&self) -> ExportInfo {
        ExportInfo { bytes: self.bytes(), ..self.0.info.clone() }
    }

    /// By which name clients ask for it.
    pub fn name(&self) -> &str {
        &self.0.info.name
    }

    /// Whether clients may only read.
    pub fn read_only(&self) -> bool {
        self.0.info.read_only()
    }

    /// Its size in bytes: a whole number of blocks.
    #[inline]
    pub fn bytes(&self) -> u64 {
        self.0.bytes.load(Ordering::Acquire)
    }

    /// What is below has so many bytes from now on.
    pub(super) fn set_bytes(&self, below: u64) {
        let minimum = self.0.info.blocks.unwrap_or_default().minimum;
        self.0.bytes.store(whole_blocks(below, minimum), Ordering::Release);
    }

    /// Whether it can be entered; if not, why not.
    pub fn enter(&self) -> Result<(), ExportRefusal> {
        if self.0.withdrawn.load(Ordering::Acquire) {
            return Err(ExportRefusal::Unknown);
        }
        if self.0.connections.load(Ordering::Acquire) >= self.0.most {
            return Err(ExportRefusal::Policy(format!(
                "all {} connections of the export are in use",
                self.0.most
            )));
        }
        Ok(())
    }

    /// Connections that there are.
    pub fn connections(&self) -> usize {
        self.0.connections.load(Ordering::Acquire)
    }

    pub(super) fn count(&self, connections: usize) {
        self.0.connections.store(connections, Ordering::Release);
    }

    pub(super) fn withdraw(&self) {
        self.0.withdrawn.store(true, Ordering::Release);
    }
}

/// What is left over could not be addressed.
fn whole_blocks(bytes: u64, block: u32) -> u64 {
    bytes - bytes % u64::from(block.max(1))
}

impl Exports for PublishedExport {
    async fn find(&self, name: &str, enters: bool) -> Result<ExportInfo, ExportRefusal> {
        let info = self.info();
        if !name.is_empty() && name != info.name {
            return Err(ExportRefusal::Unknown);
        }
        if enters {
            self.enter()?;
        }
        Ok(info)
    }

    async fn list(&self) -> Vec<(String, String)> {
        let info = self.info();
        vec![(info.name, info.description)]
    }
}
