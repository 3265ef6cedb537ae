//! Virtio-net (virtio 1.3, section 5.1): the model.
//!
//! ```text
//!   Net: VirtioDevice -- configuration space, features, what the driver wants (RxControl)
//!     |  shares MAC, status and offloads (atomics only)                        Port (crate network)
//!   NetPoller<Receive>   2n       PortRx -> room in the ring -> used             ^
//!   NetPoller<Transmit>  2n + 1   chain -> PortTx, used in the same poll         |
//!   NetPoller<Control>   the last one, where we serve it: commands -> RxControl -+
//! ```
//!
//! Where a VMM keeps the configuration and the control queue itself (QEMU, Cloud Hypervisor with vhost-user), the device has its data
//! queues only, and the pairs in use are those whose receive queue runs.

mod control;
pub mod header;
mod lent;
mod poller;
mod receive;
mod rx_control;
pub mod spec;
mod state;
mod transmit;

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use ioplane_device::{DeviceError, Parked, Poller, QuiescenceProof, Share};
use ioplane_network::{Mac, Port};
use ioplane_scheduler::LimitSet;

use self::control::Control;
use self::poller::NetPoller;
use self::receive::Receive;
use self::rx_control::RxControl;
use self::spec::*;
use self::transmit::Transmit;
use crate::device::{QueueStart, RingState, VirtioDevice, VirtioInfo};
use crate::limits::DeviceLimits;
use crate::ring::RingFault;
use crate::spec::feature::*;

/// What the queues of a NIC share with its model: plain atomics, read on I/O cores.
#[derive(Debug)]
struct Shared {
    mac: AtomicU64,
    status: AtomicU16,
    offloads: AtomicU64,
}

impl Shared {
    fn mac(&self) -> Mac {
        let [.., a, b, c, d, e, f] = self.mac.load(Ordering::Acquire).to_be_bytes();
        [a, b, c, d, e, f]
    }

    fn set_mac(&self, mac: Mac) {
        let [a, b, c, d, e, f] = mac;
        self.mac.store(u64::from_be_bytes([0, 0, a, b, c, d, e, f]), Ordering::Release);
    }

    /// Which of [`GUEST_OFFLOADS`] are switched on.
    #[inline]
    fn offloads(&self) -> u64 {
        self.offloads.load(Ordering::Relaxed)
    }

    fn set_offloads(&self, port: &Port, offloads: u64) {
        self.offloads.store(offloads, Ordering::Relaxed);
        port.takes(header::taken_by_driver(offloads));
    }
}

/// How a NIC is to look to its guest.
#[derive(Debug, Clone)]
pub struct NetOptions {
    /// Name that its owner gave it.
    pub name: String,
    /// Its unicast address, until the driver sets another.
    pub mac: Mac,
    /// Queue pairs that the driver may use: at most those of its port.
    pub pairs: u16,
    /// Largest queue: a power of two, 2 to 1024.
    pub queue_size: u16,
    /// MTU that the driver is told, 68 at least.
    pub mtu: u16,
    /// Whether the control queue is served here. False where the VMM does that, and serves the configuration space too, as
    /// QEMU does for a NIC whose backend speaks vhost-user.
    pub control: bool,
}

/// What a queue is for (5.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Receive(u16),
    Transmit(u16),
    Control,
}

/// A virtual NIC.
#[derive(Debug)]
pub struct Net {
    info: VirtioInfo,
    options: NetOptions,
    port: Arc<Port>,
    shared: Arc<Shared>,
    /// What the driver wants; with the control queue's poller while that runs.
    rx_control: Box<RxControl>,
    accepted: u64,
    /// Whether its owner has the link up.
    link: bool,
    /// Which receive queues run.
    receiving: Vec<bool>,
    transmit_limits: DeviceLimits,
    receive_limits: DeviceLimits,
    share: Share,
}

impl Net {
    /// A NIC at `port`, with as many pairs as both have.
    pub fn new(options: NetOptions, port: impl Into<Arc<Port>>) -> Self {
        let port = port.into();
        let options = NetOptions { pairs: options.pairs.clamp(1, port.pairs()), ..options };
        let rx_control = Box::new(RxControl::of(options.mac, 0));
        let shared = Shared {
            mac: AtomicU64::new(0),
            status: AtomicU16::new(VIRTIO_NET_S_LINK_UP),
            offloads: AtomicU64::new(0),
        };
        let net = Net {
            info: VirtioInfo {
                name: options.name.clone(),
                kind: "virtio-net",
                device_id: VIRTIO_ID_NET,
                queues: 2 * options.pairs + u16::from(options.control),
                queue_size: options.queue_size,
            },
            receiving: vec![false; options.pairs.into()],
            options,
            port,
            shared: Arc::new(shared),
            rx_control,
            accepted: 0,
            link: true,
            transmit_limits: DeviceLimits::default(),
            receive_limits: DeviceLimits::default(),
            share: Share::default(),
        };
        net.tell_port();
        net
    }

    /// Where it is plugged in: its counts, its switch.
    pub fn port(&self) -> &Arc<Port> {
        &self.port
    }

    /// Its address now.
    pub fn mac(&self) -> Mac {
        self.shared.mac()
    }

    /// What limits its guest: what it sends, and what it receives.
    pub fn limits(&self) -> (&DeviceLimits, &DeviceLimits) {
        (&self.transmit_limits, &self.receive_limits)
    }

    /// Another group. Queues that run have the one of before until they are told ([`ioplane_device::Change::Share`]).
    pub fn set_share(&mut self, share: Share) {
        self.share = share;
    }

    /// Other limits. Queues that run have those of before until they are told ([`ioplane_device::Change::Limits`]).
    pub fn set_limits(&mut self, transmit: DeviceLimits, receive: DeviceLimits) {
        (self.transmit_limits, self.receive_limits) = (transmit, receive);
    }

    /// Takes the link up or down. True if that changed anything: the caller then sends a configuration interrupt.
    pub fn set_link(&mut self, up: bool) -> bool {
        if self.link == up {
            return false;
        }
        self.link = up;
        if up {
            self.shared.status.fetch_or(VIRTIO_NET_S_LINK_UP, Ordering::AcqRel);
        } else {
            self.shared.status.fetch_and(!VIRTIO_NET_S_LINK_UP, Ordering::AcqRel);
        }
        self.port.set_up(up && self.receiving.contains(&true));
        true
    }

    /// Asks the driver to announce its addresses, as after a migration (5.1.6.5.4). True if it can: the caller then sends
    /// a configuration interrupt. Otherwise [`VirtioDevice::announce`] does it for the guest, as far as we know its addresses.
    pub fn ask_for_announcement(&mut self) -> bool {
        let can = VIRTIO_NET_F_GUEST_ANNOUNCE | VIRTIO_NET_F_STATUS | VIRTIO_NET_F_CTRL_VQ;
        let asks = self.options.control && self.accepted & can == can;
        if asks {
            self.shared.status.fetch_or(VIRTIO_NET_S_ANNOUNCE, Ordering::AcqRel);
        }
        asks
    }

    fn role(&self, index: u16) -> Option<Role> {
        // Without MQ there is one pair, wherever the others would be (5.1.2).
        let one = self.options.control && self.accepted & VIRTIO_NET_F_MQ == 0;
        let pairs = if one { 1 } else { self.options.pairs };
        match index {
            _ if index < 2 * pairs && index.is_multiple_of(2) => Some(Role::Receive(index / 2)),
            _ if index < 2 * pairs => Some(Role::Transmit(index / 2)),
            _ if index == 2 * pairs && self.options.control && self.accepted & VIRTIO_NET_F_CTRL_VQ != 0 => {
                Some(Role::Control)
            }
            _ => None,
        }
    }

    /// Tells the port all that the driver wants.
    fn tell_port(&self) {
        self.shared.set_mac(self.rx_control.mac);
        self.shared.set_offloads(&self.port, self.rx_control.offloads);
        self.port.set_active_pairs(self.rx_control.pairs);
        self.port.filter(&self.rx_control.filter(self.accepted));
    }

    /// A receive queue has begun or ceased to run.
    fn receives(&mut self, pair: u16, now: bool) {
        self.receiving[usize::from(pair)] = now;
        if now && self.link && !self.port.is_up() {
            self.port.set_up(true);
        }
        // Where no control queue says which pairs are in use, those are that run from the first one on. Once that one has
        // stopped the device only pauses: frames wait for it where they are.
        if !self.options.control && self.receiving[0] {
            let pairs = self.receiving.iter().take_while(|runs| **runs).count() as u16;
            self.rx_control.pairs = pairs;
            self.port.set_active_pairs(pairs);
        }
    }

    fn config(&self) -> [u8; config::BYTES] {
        let mut bytes = [0; config::BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(config::MAC, &self.mac());
        put(config::STATUS, &self.shared.status.load(Ordering::Acquire).to_le_bytes());
        put(config::MAX_VIRTQUEUE_PAIRS, &self.options.pairs.to_le_bytes());
        put(config::MTU, &self.options.mtu.to_le_bytes());
        bytes
    }
}

/// Takes `parked` apart as a poller of `W`s, if it is one.
fn apart<W: poller::Work>(parked: Parked) -> Result<(RingState, W), Parked> {
    parked.into_poller::<NetPoller<W>>().map(|poller| {
        let (queue, work) = poller.into_parts();
        (queue.into_state(), work)
    })
}

impl VirtioDevice for Net {
    fn info(&self) -> &VirtioInfo {
        &self.info
    }

    fn features(&self) -> u64 {
        let mut features = VIRTIO_F_VERSION_1
            | VIRTIO_F_EVENT_IDX
            | VIRTIO_F_INDIRECT_DESC
            | VIRTIO_NET_F_CSUM
            | VIRTIO_NET_F_HOST_TSO4
            | VIRTIO_NET_F_HOST_TSO6
            | VIRTIO_NET_F_HOST_ECN
            | VIRTIO_NET_F_HOST_USO
            | VIRTIO_NET_F_MRG_RXBUF
            | VIRTIO_NET_F_MTU
            | VIRTIO_NET_F_MAC
            | VIRTIO_NET_F_STATUS
            // Also where the VMM serves the control queue: MQ and GUEST_ANNOUNCE need it (5.1.3.1), and Cloud Hypervisor gives its
            // guest one only if we offer it. QEMU gives one in any case.
            | VIRTIO_NET_F_CTRL_VQ
            // Also where the VMM asks the guest to announce itself: without it, QEMU would ask us to (SEND_RARP).
            | VIRTIO_NET_F_GUEST_ANNOUNCE
            | GUEST_OFFLOADS;
        if self.options.pairs > 1 {
            features |= VIRTIO_NET_F_MQ;
        }
        if self.options.control {
            features |= NEED_CTRL_VQ;
        }
        features
    }

    fn accept(&mut self, features: u64) {
        // What needs a control queue means nothing to a driver that has none.
        let without = features & VIRTIO_NET_F_CTRL_VQ == 0 && self.options.control;
        let meaningless =
            if without { NEED_CTRL_VQ | VIRTIO_NET_F_MQ | VIRTIO_NET_F_GUEST_ANNOUNCE } else { 0 };
        self.accepted = features & !meaningless;
        *self.rx_control = RxControl::of(self.options.mac, self.accepted);
        self.tell_port();
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) {
        let config = self.config();
        for (at, byte) in (offset as usize..).zip(out) {
            *byte = config.get(at).copied().unwrap_or(0);
        }
    }

    fn share(&self) -> Share {
        self.share
    }

    fn queue_limits(&self, queue: u16) -> LimitSet {
        match self.role(queue) {
            Some(Role::Transmit(_)) => self.transmit_limits.set(),
            Some(Role::Receive(_)) => self.receive_limits.set(),
            Some(Role::Control) | None => LimitSet::default(),
        }
    }

    /// Nothing there is the driver's to write: its address it sets by the control queue.
    fn write_config(&mut self, _offset: u32, _bytes: &[u8]) {}

    fn has_network(&self) -> bool {
        true
    }

    fn announce(&mut self, mac: Mac) {
        self.port.announce(mac);
    }

    fn set_mtu(&mut self, mtu: u16) {
        self.port.set_mtu(mtu.min(self.options.mtu));
    }

    fn start_queue(&mut self, start: QueueStart) -> Result<Box<dyn Poller>, DeviceError> {
        let role = self.role(start.index).ok_or(DeviceError::NoSuchQueue(start.index))?;
        Ok(match role {
            Role::Receive(pair) => {
                self.receives(pair, true);
                let receive = Receive::new(self.port.rx(pair), self.shared.clone(), self.accepted);
                Box::new(NetPoller::new(start, receive))
            }
            Role::Transmit(pair) => {
                Box::new(NetPoller::new(start, Transmit::new(self.port.tx(pair), self.accepted)))
            }
            Role::Control => {
                let (port, shared, rx_control) =
                    (self.port.clone(), self.shared.clone(), self.rx_control.clone());
                let control = Control::new(port, shared, rx_control, self.accepted, self.options.pairs);
                Box::new(NetPoller::new(start, control))
            }
        })
    }

    fn stop_queue(&mut self, parked: Parked) -> RingState {
        let index = parked.queue();
        let parked = match apart::<Receive>(parked) {
            Ok((state, _)) => {
                self.receives(index / 2, false);
                return state;
            }
            Err(parked) => parked,
        };
        let parked = match apart::<Control>(parked) {
            Ok((state, control)) => {
                self.rx_control = control.into_rx_control();
                return state;
            }
            Err(parked) => parked,
        };
        match apart::<Transmit>(parked) {
            Ok((state, _)) => state,
            Err(other) => {
                debug_assert!(false, "queue {} was parked with somebody else's poller", other.queue());
                RingState { fault: Some(RingFault::BadSize(0)), ..RingState::default() }
            }
        }
    }

    fn save_own(&self, _proof: &QuiescenceProof) -> Vec<u8> {
        state::save(self)
    }

    fn load_own(&mut self, _proof: &QuiescenceProof, bytes: &[u8]) -> Result<(), String> {
        state::load(self, bytes)
    }

    fn reset_own(&mut self) {
        self.accepted = 0;
        self.shared.status.fetch_and(!VIRTIO_NET_S_ANNOUNCE, Ordering::AcqRel);
        *self.rx_control = RxControl::of(self.options.mac, 0);
        self.tell_port();
        self.port.set_mtu(self.options.mtu);
        // Whoever drives it next does not want what waits for the one before.
        self.port.set_up(false);
    }
}
