//! What a front end says of the network behind a device: after a migration it asks for the guest to be announced.

use ioplane_virtio::VirtioDevice;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::VhostUserU64;

use super::fault::PeerFault;
use super::message::Message;
use super::session::{Answer, Session};

/// Smallest MTU of Ethernet that a guest may be given (virtio 1.3, 5.1.4.1).
const MIN_MTU: u64 = 68;

impl<V: VirtioDevice> Session<V> {
    /// SEND_RARP: the guest with this address is here now, and cannot say so itself. The address is the first six bytes of the
    /// body.
    pub(super) fn send_rarp(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::RARP, message.header.request as u32)?;
        let [a, b, c, d, e, f, ..] = message.body::<VhostUserU64>()?.value.to_le_bytes();
        self.vdev()?.model_mut().announce([a, b, c, d, e, f]);
        Ok(Answer::None)
    }

    /// NET_SET_MTU: the MTU that the guest has been told.
    pub(super) fn net_set_mtu(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::MTU, message.header.request as u32)?;
        let value = message.body::<VhostUserU64>()?.value;
        let mtu = u16::try_from(value)
            .ok()
            .filter(|_| value >= MIN_MTU)
            .ok_or(PeerFault::BadValue("NET_SET_MTU: not from 68 to 65535"))?;
        self.vdev()?.model_mut().set_mtu(mtu);
        Ok(Answer::None)
    }
}
