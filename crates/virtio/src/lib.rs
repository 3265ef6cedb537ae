//! Virtio devices: rings, the queues of a device, virtio-blk and virtio-net.
//!
//! ```text
//!   transport (vhost-user messages, mmio registers)
//!        | sets up queues, asks for effects
//!      Vdev<V>: Device            guest memory, features, one QueueSetup a queue; save and load
//!        | start_queue / stop_queue
//!      V: VirtioDevice            the model (blk, net): configuration space, what its pollers share
//!        | makes
//!      Poller = Queue + model     on an I/O core
//!                 \-- Ring (split or packed, virtio 1.3 sections 2.7 and 2.8) + journal (what is in flight, for a crash)
//! ```
//!
//! Everything that the guest can write is read once, checked, and becomes a [`RingFault`] when it is wrong: the queue
//! stops, is counted, and nobody else notices.
//!
//! Must not know: sockets, file names, who drives the device.
#![forbid(unsafe_code)]

pub mod blk;
pub mod buffers;
mod cost;
mod device;
pub mod journal;
pub mod kill;
mod limits;
mod mmio;
pub mod net;
mod queue;
mod ring;
pub mod spec;
mod trial;
mod vdev;

pub use device::{QueueStart, RingState, VirtioDevice, VirtioInfo};
pub use limits::{DeviceLimits, SharedLimits};
pub use mmio::VirtioMmio;
pub use queue::{Phase, Queue};
pub use ring::{
    Ahead, AheadRequest, Batch, BufferAccess, Chain, Descriptor, GROUP, InFlightRequest, MOST_PLAIN, Ring,
    RingFault, RingLayout, RingRequest,
};
pub use vdev::{QueueSetup, Vdev};
