//! What a front end has told us so far: everything that ends with its connection.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_memory::{Account, DirtyLog, GuestMap, Mapping, RegionSpec, Window};
use ioplane_virtio::RingLayout;
use ioplane_virtio::journal::region_bytes;
use ioplane_virtio::spec::feature::VIRTIO_F_RING_PACKED;
use vhost::vhost_user::VhostUserProtocolFeatures;
use vhost::vhost_user::message::{VhostUserInflight, VhostUserMemoryRegion};

use super::fault::PeerFault;

/// Protocol features that we offer; with `dirty_log` a front end may migrate its VM while we serve it, with `network` it
/// may speak of the network behind the device. The configuration space of a NIC is the front end's own: QEMU warns of a
/// backend that wants to keep it.
pub fn offered(dirty_log: bool, network: bool) -> VhostUserProtocolFeatures {
    use VhostUserProtocolFeatures as F;
    let log = if dirty_log { F::LOG_SHMFD } else { F::empty() };
    let kind = if network { F::RARP | F::MTU } else { F::CONFIG };
    let always =
        F::MQ | F::REPLY_ACK | F::BACKEND_REQ | F::INFLIGHT_SHMFD | F::RESET_DEVICE | F::CONFIGURE_MEM_SLOTS;
    always | log | kind
}

/// Where a front end says that a ring is, in its own addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UserRing {
    /// Descriptor table or ring.
    pub desc: u64,
    /// Driver area: available ring or event suppression structure.
    pub avail: u64,
    /// Device area: used ring or event suppression structure.
    pub used: u64,
}

impl UserRing {
    /// The same in guest addresses.
    pub fn layout(&self, size: u16, map: &GuestMap) -> Option<RingLayout> {
        Some(RingLayout {
            size,
            desc: map.gpa_of_user(self.desc)?,
            avail: map.gpa_of_user(self.avail)?,
            used: map.gpa_of_user(self.used)?,
        })
    }
}

/// One ring as the front end has set it up.
#[derive(Debug, Default)]
pub struct Wiring {
    /// Entries.
    pub size: u16,
    /// Where it is.
    pub user: UserRing,
    /// A kick has been given: the ring is started.
    pub started: bool,
    /// The front end wants it served.
    pub enabled: bool,
}

/// All that a front end has told us.
#[derive(Debug)]
pub struct Peer {
    /// Features it accepted, its transport's included.
    pub features: u64,
    /// Protocol features it accepted.
    pub protocol: VhostUserProtocolFeatures,
    /// Rings.
    pub rings: Vec<Wiring>,
    /// Our way to send requests of our own.
    pub back_channel: Option<tokio::net::UnixStream>,
    /// Where to mark what is written, while VHOST_F_LOG_ALL is among the features.
    pub log: Option<Arc<DirtyLog>>,
}

impl Peer {
    /// A front end that has said nothing yet.
    pub fn new(queues: u16) -> Self {
        let rings = (0..queues).map(|_| Wiring::default()).collect();
        let protocol = VhostUserProtocolFeatures::empty();
        Peer { features: 0, protocol, rings, back_channel: None, log: None }
    }

    /// Whether rings are packed.
    pub fn packed(&self) -> bool {
        self.features & VIRTIO_F_RING_PACKED != 0
    }

    /// Refuses a request whose protocol feature was not negotiated.
    pub fn needs(&self, feature: VhostUserProtocolFeatures, request: u32) -> Result<(), PeerFault> {
        if self.protocol.contains(feature) { Ok(()) } else { Err(PeerFault::NotNegotiated(request)) }
    }
}

/// What the front end says of a region, with its file.
pub fn region_spec(region: &VhostUserMemoryRegion, file: OwnedFd) -> RegionSpec {
    RegionSpec {
        gpa: region.guest_phys_addr,
        len: region.memory_size,
        user: region.user_addr,
        offset: region.mmap_offset,
        file,
    }
}

/// A new in-flight region for `queues` queues of `size` entries under the `features` in force: with its size in bytes.
pub fn fresh_inflight(queues: u16, size: u16, features: u64) -> Result<(Mapping, u64), PeerFault> {
    let bytes = u64::from(queues) * region_bytes(size, features) as u64;
    let mapping = Mapping::anonymous("ioplane-inflight", bytes).map_err(ioplane_memory::MapError::from)?;
    Ok((mapping, bytes))
}

/// The journal of each queue, out of the region that the front end gives (back).
pub fn open_inflight(
    account: &Account,
    inflight: &VhostUserInflight,
    file: OwnedFd,
    features: u64,
) -> Result<Vec<Window>, PeerFault> {
    // Shared out evenly: it was made for rings of any size (see `inflight_region`), whatever the front end says of them now.
    let each = (inflight.mmap_size / u64::from(inflight.num_queues.max(1))) & !63;
    if each < region_bytes(inflight.queue_size, features) as u64 {
        return Err(PeerFault::BadValue("the in-flight region is smaller than its queues need"));
    }
    let mapping = account
        .mapping(file, inflight.mmap_offset, inflight.mmap_size)
        .map_err(ioplane_memory::MapError::from)?;
    let mapping = Arc::new(mapping);
    (0..u64::from(inflight.num_queues))
        .map(|queue| Window::of_mapping(&mapping, (queue * each) as usize, each as usize))
        .collect::<Option<_>>()
        .ok_or(PeerFault::BadValue("the in-flight region is smaller than its queues need"))
}
