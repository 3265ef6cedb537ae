//! The client's memory: ranges that come, and go at a quiescent point.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ioplane_device::mutation::{Invariant, bound};
use ioplane_device::{Change, QueueSet};
use ioplane_memory::{GuestMap, MAX_REGIONS, MapError, MemoryRegion, PAGE, RegionSpec};
use ioplane_pci::Function;
use vfio_bindings::bindings::vfio;
use zerocopy::IntoBytes;

use super::connection::{Connection, Message, Reply};
use super::dma::Range;
use super::fault::ClientFault;
use super::session::Session;
use super::spec::{DmaMap, DmaUnmap};
use super::write_log::{WriteLog, WriteLogError};

impl<F: Function> Session<F> {
    fn show_dma(&self) {
        let ranges = || self.dma.ranges.values();
        let board = &self.board;
        board.dma_maps.store(self.dma.ranges.len() as u64, Relaxed);
        board.dma_bytes.store(ranges().fold(0, |sum, r| sum.saturating_add(r.len)), Relaxed);
        board.mappings.store(self.account.mappings() as u64, Relaxed);
        board.pinned_bytes.store(self.account.pinned(), Relaxed);
        let shared = || ranges().filter(|r| r.shared);
        board.dma_shared.store(shared().count() as u64, Relaxed);
        board.dma_shared_bytes.store(shared().fold(0, |sum, r| sum.saturating_add(r.len)), Relaxed);
    }

    pub(super) fn dma_map(
        &mut self,
        message: &mut Message,
        connection: &Connection,
    ) -> Result<Reply, ClientFault> {
        let asked: DmaMap = message.body()?;
        let DmaMap { flags, offset, address, size, .. } = asked;
        if flags & !(vfio::VFIO_DMA_MAP_FLAG_READ | vfio::VFIO_DMA_MAP_FLAG_WRITE) != 0 || flags == 0 {
            return Err(ClientFault::BadValue("DMA_MAP is for reading, for writing or for both"));
        }
        if size == 0 || [address, size].iter().any(|n| !n.is_multiple_of(PAGE)) {
            return Err(ClientFault::BadValue("DMA_MAP of bytes that are not whole pages"));
        }
        let last = address
            .checked_add(size - 1)
            .filter(|last| *last < u64::MAX)
            .ok_or(ClientFault::BadValue("DMA_MAP beyond the end of the address space"))?;
        if self.dma.touching(address, last).next().is_some() {
            return Err(ClientFault::Exists(address, size));
        }
        if self.dma.ranges.len() as u64 >= bound(Invariant::KeepsQuotas, MAX_REGIONS as u64) {
            return Err(ClientFault::TooManyMaps);
        }
        let file = message.files.pop();
        let shared = file.is_some();
        if let Some(file) = file {
            if !offset.is_multiple_of(PAGE) {
                return Err(ClientFault::BadValue("DMA_MAP of a file from the middle of a page"));
            }
            let spec = RegionSpec { gpa: address, len: size, user: address, offset, file };
            // A map for writing alone may be read as well: x86 processors have no such pages, and it is the client's own.
            let writable = flags & vfio::VFIO_DMA_MAP_FLAG_WRITE != 0;
            let region = self.account.region(spec, writable)?;
            let map = Arc::new(self.dma.map.with(region)?);
            self.log_up_to(map.limit(), connection)?;
            // Growing needs no quiescent point.
            self.with(Some(connection), |function| function.grow_memory(map.clone()))??;
            self.dma.map = map;
        }
        self.dma.ranges.insert(address, Range { len: size, shared });
        self.show_dma();
        Ok(Reply::default())
    }

    pub(super) fn dma_unmap(
        &mut self,
        message: &Message,
        connection: &Connection,
    ) -> Result<Reply, ClientFault> {
        let asked: DmaUnmap = message.body()?;
        let DmaUnmap { flags, address, size, .. } = asked;
        let (first, last) = match flags {
            vfio::VFIO_DMA_UNMAP_FLAG_ALL => (0, u64::MAX),
            0 if size == 0 => return Err(ClientFault::BadValue("DMA_UNMAP of nothing")),
            0 => {
                let last = address.checked_add(size - 1);
                (address, last.ok_or(ClientFault::BadValue("DMA_UNMAP beyond the end of the address space"))?)
            }
            _ => return Err(ClientFault::NotSupported("DMA_UNMAP with these flags")),
        };
        let gone: Vec<(u64, Range)> = self.dma.touching(first, last).collect();
        if gone.iter().any(|(at, range)| *at < first || at + (range.len - 1) > last) {
            return Err(ClientFault::BadValue("DMA_UNMAP of a part of a range"));
        }
        // As VFIO's: ranges inside go, however many; none is no error.
        self.drop_ranges(&gone, Some(connection))?;
        Ok(Reply { body: asked.as_bytes().to_vec(), files: Vec::new() })
    }

    /// The device lets go of these ranges before this returns `Ok`. On an error, either all of them are there, or none.
    fn drop_ranges(
        &mut self,
        gone: &[(u64, Range)],
        connection: Option<&Connection>,
    ) -> Result<(), ClientFault> {
        let mut outcome = Ok(Ok(()));
        if gone.iter().any(|(_, range)| range.shared) {
            let stays = |region: &&MemoryRegion| !gone.iter().any(|(at, _)| *at == region.gpa());
            let left = self.dma.map.regions().iter().filter(stays).cloned().collect();
            let map = Arc::new(GuestMap::new(left)?);
            let mut replaced = false;
            let done = self.at_quiescence(connection, |function, proof| {
                replaced = true;
                function.replace_memory(proof, map.clone())
            });
            if !replaced {
                return done.map(|_| ());
            }
            // Also after an error of the device's nothing is mapped that is not in this map, and if it does not go on either.
            self.dma.map = map;
            outcome = done;
        }
        for (at, _) in gone {
            self.dma.ranges.remove(at);
        }
        self.show_dma();
        Ok(outcome??)
    }

    /// All of it goes.
    pub(super) fn forget_memory(&mut self) -> Result<(), ClientFault> {
        let all: Vec<_> = self.dma.touching(0, u64::MAX).collect();
        self.drop_ranges(&all, None)
    }

    /// Begins to log which of its pages the device writes, anew if that is logged already, or ends it. Says whether it was.
    pub(super) fn log(&mut self, yes: bool) -> Result<bool, WriteLogError> {
        let log = if yes { Some(WriteLog::new(self.dma.map.limit())?) } else { None };
        let change = Change::Log(log.as_ref().map(|log| log.now.clone()));
        self.device.with(|device| device.apply(&QueueSet::new(), &change))?;
        Ok(std::mem::replace(&mut self.written, log).is_some())
    }

    /// The log, if there is one, reaches up to `limit`, before the device does.
    fn log_up_to(&mut self, limit: u64, connection: &Connection) -> Result<(), ClientFault> {
        if self.written.as_ref().is_none_or(|log| log.limit >= limit) {
            return Ok(());
        }
        let mut log = WriteLog::new(limit).map_err(MapError::Mapping)?;
        let change = Change::Log(Some(log.now.clone()));
        self.with(Some(connection), |device| device.apply(&QueueSet::new(), &change))?;
        if let Some(earlier) = self.written.take() {
            log.follow(earlier);
        }
        self.written = Some(log);
        Ok(())
    }

    /// Guest addresses of the pages that were written since this was asked last; `None` without a log.
    pub(super) fn written(&mut self) -> Option<Vec<u64>> {
        self.written.as_mut().map(WriteLog::take)
    }
}
