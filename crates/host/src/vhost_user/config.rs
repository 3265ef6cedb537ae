//! The configuration space, as the front end reads and writes it for its guest.

use ioplane_device::{Access, Device, RegisterAddress};
use ioplane_virtio::VirtioDevice;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::{BackendReq, VhostUserConfig};
use vm_memory::ByteValued;

use super::connection::send;
use super::fault::PeerFault;
use super::message::{Message, backend_request};
use super::session::{Answer, Session};

/// Longest configuration space that is read or written (the specification's VHOST_USER_MAX_CONFIG_SIZE).
const MAX_CONFIG: u32 = 256;

impl<V: VirtioDevice> Session<V> {
    pub(super) fn device_config(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let (config, _) = self.config_header(message)?;
        let (offset, size) = (config.offset, config.size);
        let mut bytes = vec![0; size as usize];
        self.vdev()?.access(RegisterAddress::Config(u64::from(offset)), Access::Read(&mut bytes));
        let mut body = config.as_slice().to_vec();
        body.extend_from_slice(&bytes);
        Ok(Answer::Body(body))
    }

    pub(super) fn set_config(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        let (config, bytes) = self.config_header(message)?;
        let offset = config.offset;
        self.vdev()?.access(RegisterAddress::Config(u64::from(offset)), Access::Write(bytes));
        Ok(Answer::None)
    }

    fn config_header<'m>(&self, message: &'m Message) -> Result<(VhostUserConfig, &'m [u8]), PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::CONFIG, message.header.request as u32)?;
        let (config, rest) = message.split::<VhostUserConfig>()?;
        let (offset, size) = (config.offset, config.size);
        if size as usize != rest.len() || offset.checked_add(size).is_none_or(|end| end > MAX_CONFIG) {
            return Err(PeerFault::BadValue(
                "a configuration access beyond 256 bytes, or whose size is not its payload's",
            ));
        }
        Ok((config, rest))
    }

    /// Tells the front end that the configuration has changed, if it listens.
    pub async fn config_changed(&mut self) -> Result<(), PeerFault> {
        self.vdev()?.config_changed();
        if let Some(back_channel) = &self.peer.back_channel {
            send(back_channel, &backend_request(BackendReq::CONFIG_CHANGE_MSG as u32, &[]), None).await?;
        }
        Ok(())
    }

    /// SET_BACKEND_REQ_FD: our way to say something of our own accord.
    pub(super) fn set_back_channel(&mut self, message: &mut Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::BACKEND_REQ, message.header.request as u32)?;
        let file = message.take_file()?;
        if rustix::net::sockopt::socket_domain(&file) != Ok(rustix::net::AddressFamily::UNIX) {
            return Err(PeerFault::BadValue("SET_BACKEND_REQ_FD: not a unix socket"));
        }
        let stream = std::os::unix::net::UnixStream::from(file);
        stream.set_nonblocking(true).map_err(PeerFault::Broken)?;
        self.peer.back_channel = tokio::net::UnixStream::from_std(stream).ok();
        Ok(Answer::None)
    }
}
