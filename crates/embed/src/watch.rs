//! For owners that have more to do than wait: a thread that serves a socket, say. They try, and hear when to try again.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use ioplane_device::{Device, Effect, QueueSet, Quiescent, Then};
use rustix::event::{EventfdFlags, eventfd};

use crate::{Front, FrontError, Inner, Stage};

/// What has become of the device behind a front, as far as its owners can tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// At work.
    Running,
    /// On its way to a quiescent point.
    Quiescing,
    /// At one.
    Held,
    /// Taken out.
    Away,
    /// Gone for good.
    Closed,
}

impl<D: Device> Front<D> {
    /// What has become of the device: another moment ago, perhaps.
    pub fn presence(&self) -> Presence {
        match &self.lock().stage {
            Stage::Running(_) => Presence::Running,
            Stage::Quiescing(_) => Presence::Quiescing,
            Stage::Held(_) => Presence::Held,
            Stage::Away => Presence::Away,
            Stage::Closed => Presence::Closed,
        }
    }

    /// An eventfd that is written when [`Front::presence`] may have changed. Read it empty before a try, not after: then no change
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
    pub fn with<R>(&self, change: impl FnOnce(&mut D) -> R) -> Result<R, FrontError> {
        let mut inner = self.lock();
        match &mut inner.stage {
            Stage::Running(running) => Ok(change(running.device_mut())),
            Stage::Quiescing(quiescing) => {
                let done = quiescing.with(change);
                inner.nudge();
                Ok(done)
            }
            Stage::Held(quiescent) => Ok(quiescent.with(|device, _| change(device))),
            Stage::Away => Err(FrontError::Not { now: "away", wanted: "here" }),
            Stage::Closed => Err(FrontError::Closed),
        }
    }

    /// Does to the held device what needs a quiescent point. It stays held.
    pub fn while_held<R>(&self, change: impl FnOnce(&mut Quiescent<D>) -> R) -> Result<R, FrontError> {
        match &mut self.lock().stage {
            Stage::Held(quiescent) => Ok(change(quiescent)),
            Stage::Closed => Err(FrontError::Closed),
            other => Err(FrontError::Not { now: other.name(), wanted: "held" }),
        }
    }

    /// The reset that a guest asks for other than by a register: drains or suspends as one by a register does, and goes on. A held
    /// device is reset where it is, and stays held.
    pub fn reset(&self) -> Result<(), FrontError> {
        let mut inner = self.lock();
        match &mut inner.stage {
            Stage::Running(_) => {
                let done = self.carry_out(&mut inner.stage, Effect::Deactivate(QueueSet::new(), Then::Reset));
                self.announce(&mut inner);
                done
            }
            Stage::Held(quiescent) => {
                quiescent.reset();
                Ok(())
            }
            Stage::Closed => Err(FrontError::Closed),
            other => Err(FrontError::Not { now: other.name(), wanted: "running or held" }),
        }
    }
}
