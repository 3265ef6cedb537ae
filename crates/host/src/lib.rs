//! Hosts: who drives a device.
//!
//! ```text
//!   stock VMM --vhost-user--> vhost_user::Session ---- owns ----> Lifecycle<Vdev<V>>
//!   stock VMM --vfio-user---> vfio_user::Session ----- owns ----> Lifecycle<F>
//! ```
//!
//! A host owns the device's one control half and carries out what its driver asks: rings that start and stop, memory
//! that comes and goes, resets. Threads of the program itself need none of this: ioplane-embed.
//!
//! Must not know: what the device does.

pub mod eventfd;
pub mod socket;
pub mod vfio_user;
pub mod vhost_user;
