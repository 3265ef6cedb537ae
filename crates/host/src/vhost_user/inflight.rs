//! The in-flight region: memory that outlives us, made here, kept by the front end, given to whoever serves it next.

use ioplane_virtio::VirtioDevice;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::ByteValued;

use super::fault::PeerFault;
use super::message::Message;
use super::peer::{fresh_inflight, open_inflight};
use super::session::{Answer, Session};

impl<V: VirtioDevice> Session<V> {
    pub(super) fn inflight_region(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::INFLIGHT_SHMFD, message.header.request as u32)?;
        let asked = message.body::<VhostUserInflight>()?;
        self.check_inflight(&asked)?;
        // QEMU 10 asks with its `queue-size` and lets the driver set up larger rings: room for the largest there can be.
        let largest = self.vdev()?.model().info().queue_size;
        let (mapping, bytes) = fresh_inflight(asked.num_queues, largest, self.peer.features)?;
        let body = VhostUserInflight::new(bytes, 0, asked.num_queues, asked.queue_size);
        Ok(Answer::BodyAndFile(body.as_slice().to_vec(), mapping))
    }

    pub(super) fn set_inflight(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::INFLIGHT_SHMFD, message.header.request as u32)?;
        let inflight = message.body::<VhostUserInflight>()?;
        self.check_inflight(&inflight)?;
        let windows = open_inflight(&self.account, &inflight, message.take_file()?, self.peer.features)?;
        if !self.running()?.queues().is_empty() {
            return Err(PeerFault::RingInUse(0));
        }
        for (index, window) in (0..).zip(windows) {
            if let Some(setup) = self.vdev()?.queue_mut(index) {
                setup.journal = Some(window);
            }
        }
        Ok(Answer::None)
    }

    fn check_inflight(&mut self, asked: &VhostUserInflight) -> Result<(), PeerFault> {
        let info = self.vdev()?.model().info();
        if asked.num_queues == 0
            || asked.num_queues > info.queues
            || asked.queue_size == 0
            || asked.queue_size > info.queue_size
        {
            return Err(PeerFault::BadValue(
                "an in-flight region for more, or larger, queues than the device has",
            ));
        }
        Ok(())
    }
}
