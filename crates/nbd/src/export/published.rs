//! What handshakes are told of an export, while its owner has the export itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ioplane_storage::BackingInfo;

use super::ExportOptions;
use super::accept::Exports;
use crate::handshake::server::ExportRefusal;
use crate::handshake::{BlockSizes, ExportInfo};
use crate::spec::*;

#[derive(Debug)]
struct Shared {
    info: ExportInfo,
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
            // What is left over could not be addressed.
            bytes: below.bytes - below.bytes % u64::from(minimum),
            flags,
            blocks: Some(blocks),
        };
        let (most, connections) = (usize::from(options.connections), AtomicUsize::new(0));
        PublishedExport(Arc::new(Shared { info, most, connections, withdrawn: AtomicBool::new(false) }))
    }

    /// What clients are told.
    pub fn info(&self) -> &ExportInfo {
        &self.0.info
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

impl Exports for PublishedExport {
    async fn find(&self, name: &str, enters: bool) -> Result<ExportInfo, ExportRefusal> {
        let info = self.info();
        if !name.is_empty() && name != info.name {
            return Err(ExportRefusal::Unknown);
        }
        if enters {
            self.enter()?;
        }
        Ok(info.clone())
    }

    async fn list(&self) -> Vec<(String, String)> {
        let info = self.info();
        vec![(info.name.clone(), info.description.clone())]
    }
}
