//! The guest's memory: regions that come and go while rings run.

use std::sync::Arc;

use ioplane_device::Change;
use ioplane_memory::{GuestMap, MapError};
use ioplane_virtio::VirtioDevice;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::{VhostUserMemory, VhostUserMemoryRegion, VhostUserSingleMemoryRegion};
use vm_memory::ByteValued;

use super::fault::PeerFault;
use super::message::Message;
use super::peer::region_spec;
use super::session::{Answer, Session};

impl<V: VirtioDevice> Session<V> {
    pub(super) async fn set_mem_table(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        let (memory, mut rest) = message.split::<VhostUserMemory>()?;
        let (count, padding) = (memory.num_regions as usize, memory.padding1);
        if padding != 0
            || count > super::message::MAX_FILES
            || rest.len() != count * size_of::<VhostUserMemoryRegion>()
        {
            return Err(PeerFault::BadValue("SET_MEM_TABLE's count and size contradict each other"));
        }
        let mut described = Vec::with_capacity(count);
        for _ in 0..count {
            let (bytes, later) = rest.split_at(size_of::<VhostUserMemoryRegion>());
            let mut region = VhostUserMemoryRegion::default();
            region.as_mut_slice().copy_from_slice(bytes);
            described.push(region);
            rest = later;
        }
        let files = message.take_files(count)?;
        let regions = described
            .iter()
            .zip(files)
            .map(|(region, file)| self.account.region(region_spec(region, file), true))
            .collect::<Result<_, _>>()?;
        let map = Arc::new(GuestMap::new(regions)?);
        self.replace_memory(map).await?;
        self.start_waiting().await?;
        Ok(Answer::None)
    }

    /// All pollers are parked before memory goes away under them; they go on with the new map.
    async fn replace_memory(&mut self, map: Arc<GuestMap>) -> Result<Answer, PeerFault> {
        let rings: Vec<_> = self.peer.rings.iter().map(|ring| ring.user.layout(ring.size, &map)).collect();
        self.at_quiescence(|quiescent| {
            quiescent.with(|vdev, proof| {
                vdev.replace_memory(proof, map);
                for (index, layout) in (0..).zip(rings) {
                    // The front end's addresses mean something else now. A ring that has no place waits for memory: while a VMM
                    // splits a region it takes the old one away before it adds the new ones.
                    match (vdev.queue_mut(index), layout) {
                        (Some(setup), Some(layout)) => setup.layout = layout,
                        (Some(setup), None) => setup.enabled = false,
                        (None, _) => {}
                    }
                }
            });
        })
        .await?;
        Ok(Answer::None)
    }

    pub(super) async fn add_mem_reg(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS, message.header.request as u32)?;
        let region = message.body::<VhostUserSingleMemoryRegion>()?;
        let spec = region_spec(&region, message.take_file()?);
        if self.vdev()?.view().map().regions().iter().any(|there| there.matches(&spec)) {
            // QEMU before 8.0 adds each region once for each queue pair of a NIC.
            return Ok(Answer::None);
        }
        let region = self.account.region(spec, true)?;
        let map = Arc::new(self.vdev()?.view().map().with(region)?);
        // Growing needs no quiescent point: the pollers take the new map when they acknowledge it.
        let running = self.running()?;
        let queues = running.queues();
        let applied = running.apply(&queues, &Change::Memory(map));
        applied.done().await;
        self.start_waiting().await?;
        Ok(Answer::None)
    }

    pub(super) async fn rem_mem_reg(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS, message.header.request as u32)?;
        let region = message.body::<VhostUserSingleMemoryRegion>()?;
        // Some front ends send the descriptor along; it is of no use.
        message.files.clear();
        let map =
            self.vdev()?.view().map().without(region.guest_phys_addr, region.memory_size, region.user_addr);
        match map {
            Ok(map) => self.replace_memory(Arc::new(map)).await,
            // Removed for another queue pair before: see `add_mem_reg`.
            Err(MapError::NoSuchRegion { .. }) => Ok(Answer::None),
            Err(fault) => Err(fault.into()),
        }
    }
}
