//! For owners that have more to do than wait: a thread that serves a socket, say. They try, and hear when to try again.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{Device, Presence, Quiescent};
use rustix::event::{EventfdFlags, eventfd};

use crate::{Inner, SharedDevice, SharedDeviceError};

impl<D: Device> SharedDevice<D> {
    /// What has become of the device: another moment ago, perhaps.
    pub fn presence(&self) -> Presence {
        self.lock().presence()
    }

    /// An eventfd that is written when [`SharedDevice::presence`] may have changed. Read it empty before a try, not after: then no change
    /// falls between. Dropping it ends the watch.
    pub fn watch(&self) -> rustix::io::Result<Arc<OwnedFd>> {
        let file = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        self.lock().watchers.push(Arc::downgrade(&file));
        Ok(file)
    }

    /// The stage has changed.
    pub(crate) fn announce(&self, inner: &mut Inner<D>) {
        inner.watchers.retain(|watcher| match watcher.upgrade() {
            Some(file) => {
                // A full counter is readable too.
                let _ = rustix::io::write(&*file, &1u64.to_ne_bytes());
                true
            }
            None => false,
        });
        self.moved.notify_all();
    }

    /// Changes the device, whether it runs, is on its way or is held: what needs no quiescent point, and what its guest does not
    /// wait for (the host's wires, more memory).
    pub fn with<R>(&self, change: impl FnOnce(&mut D) -> R) -> Result<R, SharedDeviceError> {
        let mut inner = self.open()?;
        let done = inner.device.with(change)?;
        inner.nudge();
        Ok(done)
    }

    /// Does to the held device what needs a quiescent point. It stays held.
    pub fn while_held<R>(&self, change: impl FnOnce(&mut Quiescent<D>) -> R) -> Result<R, SharedDeviceError> {
        Ok(change(self.open()?.device.quiescent()?))
    }

    /// The reset that a guest asks for other than by a register: drains or suspends as one by a register does, and goes on. A held
    /// device is reset where it is, and stays held.
    pub fn reset(&self) -> Result<(), SharedDeviceError> {
        let mut inner = self.open()?;
        let before = inner.device.presence();
        let done = inner.device.reset(&*self.placement, self.patience);
        if before == Presence::Running {
            self.announce(&mut inner);
        }
        Ok(done?)
    }
}
