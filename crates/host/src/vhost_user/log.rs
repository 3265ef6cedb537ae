//! The dirty log of a migration: SET_LOG_BASE and VHOST_F_LOG_ALL.
//!
//! A front end gives the log, then switches it on by its features while the rings run, and may give a larger one later.
//! What it says of single rings (VHOST_VRING_F_LOG with an address of its own) adds nothing here: without an IOMMU that
//! address is the used ring's, and every store marks its own page (invariant 6).

use std::sync::Arc;

use ioplane_device::Change;
use ioplane_memory::{DirtyLog, MapError};
use ioplane_virtio::VirtioDevice;
use ioplane_virtio::spec::feature::VHOST_F_LOG_ALL;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::VhostUserLog;

use super::fault::PeerFault;
use super::message::Message;
use super::session::{Answer, Session, number};
use crate::eventfd;

impl<V: VirtioDevice> Session<V> {
    /// SET_LOG_BASE. Answered once every poller marks the new log, if the log is on.
    pub(super) async fn set_log_base(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::LOG_SHMFD, message.header.request as u32)?;
        let log = message.body::<VhostUserLog>()?;
        let file = message.take_file()?;
        let log = self.account.mapping(file, log.mmap_offset, log.mmap_size).map_err(MapError::from)?;
        // Unmapped here when no poller marks it any more, and not on a core.
        let _before = self.peer.log.replace(Arc::new(DirtyLog::of_mapping(log)));
        self.switch_log().await?;
        Ok(number(0))
    }

    /// SET_LOG_FD: an eventfd for whoever waits for the log to change. Nobody does in a migration, which asks for the log when it
    /// wants it; the descriptor is checked and let go.
    pub(super) fn set_log_fd(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::LOG_SHMFD, message.header.request as u32)?;
        if !eventfd::check(&message.take_file()?) {
            return Err(PeerFault::NotAnEventfd("changes of the log"));
        }
        Ok(Answer::None)
    }

    /// Has every poller mark the log that is in force now, or none; they all have acknowledged when this returns. Pollers
    /// made later know it too.
    pub(super) async fn switch_log(&mut self) -> Result<(), PeerFault> {
        let on = self.peer.features & VHOST_F_LOG_ALL != 0;
        let log = self.peer.log.clone().filter(|_| on);
        let running = self.running()?;
        let queues = running.queues();
        running.apply(&queues, &Change::Log(log)).done().await;
        Ok(())
    }
}
