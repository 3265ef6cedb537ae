//! Features: what is offered, what the front end accepts of it.

use ioplane_virtio::VirtioDevice;
use ioplane_virtio::spec::feature::VHOST_F_LOG_ALL;
use vhost::vhost_user::VhostUserProtocolFeatures;

use super::fault::PeerFault;
use super::peer::offered;
use super::session::{Answer, Session, TRANSPORT};

impl<V: VirtioDevice> Session<V> {
    /// GET_FEATURES: the device's, the transport's, and the log's if it is offered.
    pub(super) fn offered_features(&mut self) -> Result<u64, PeerFault> {
        let log = if self.dirty_log { VHOST_F_LOG_ALL } else { 0 };
        Ok(self.vdev()?.offers() | TRANSPORT | log)
    }

    /// GET_PROTOCOL_FEATURES: what every device has, and what this one is asked about.
    pub(super) fn offered_protocol(&mut self) -> Result<VhostUserProtocolFeatures, PeerFault> {
        let network = self.vdev()?.model().has_network();
        Ok(offered(self.dirty_log, network))
    }

    /// SET_PROTOCOL_FEATURES: a subset of what was offered.
    pub(super) fn set_protocol_features(&mut self, bits: u64) -> Result<Answer, PeerFault> {
        let offered = self.offered_protocol()?;
        self.peer.protocol = VhostUserProtocolFeatures::from_bits(bits)
            .filter(|features| offered.contains(*features))
            .ok_or(PeerFault::BadFeatures(bits))?;
        Ok(Answer::None)
    }

    /// SET_FEATURES. Under rings that run only the log may be switched.
    pub(super) async fn set_features(&mut self, features: u64) -> Result<Answer, PeerFault> {
        let changed = features ^ self.peer.features;
        if features & VHOST_F_LOG_ALL != 0 && !self.dirty_log {
            return Err(PeerFault::BadFeatures(features));
        }
        // The log alone is switched while rings run.
        if changed & !VHOST_F_LOG_ALL != 0 {
            let running = !self.running()?.queues().is_empty();
            if running || !self.vdev()?.accept(features & !VHOST_F_LOG_ALL, TRANSPORT) {
                return Err(PeerFault::BadFeatures(features));
            }
        }
        self.peer.features = features;
        if changed & VHOST_F_LOG_ALL != 0 {
            self.switch_log().await?;
        }
        Ok(Answer::None)
    }
}
