//! A device shared by the threads of the program that embeds it: vCPU threads call its registers directly, one control thread brings
//! it to a quiescent point and back.
//!
//! ```text
//!   vCPU threads --access--> SharedDevice -- Running ---- accesses served, their effects carried out
//!   hardware's own --event-->  |             Quiescing -- accesses served: the guest itself brings the device to a quiescent point
//!                              |             Held ------- accesses wait (invariant 1)
//!   one control thread --------+             Away ------- accesses wait: the device is being saved, loaded, replaced
//!     quiesce, resume, take, ...             Closed ----- accesses fail
//! ```
//!
//! The lock in here is taken by vCPU threads and the control plane, never by an I/O core: parked pollers
//! come back through a lock-free inbox.
//!
//! `examples/disk.rs` is a program that serves a disk with this crate and virtio, storage and cores.
//!
//! Must not know: what the device does, sockets, asynchronous runtimes.
#![forbid(unsafe_code)]

mod control;
mod watch;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use ioplane_device::mutation::{Invariant, removed};
use ioplane_device::{
    Access, Device, DeviceError, Lifecycle, LifecycleError, Loaded, Placement, Quiescent, Refused,
    RegisterAddress,
};

pub use control::DeadlineMissed;
pub use ioplane_device::Presence;

/// Why a call of a [`SharedDevice`] failed.
#[derive(Debug, thiserror::Error)]
pub enum SharedDeviceError {
    /// The device is gone for good.
    #[error("the device has been closed")]
    Closed,
    /// Asked for something that this state does not offer.
    #[error("the device is {now}; this needs it {wanted}")]
    Not {
        /// What it is.
        now: &'static str,
        /// What it should be.
        wanted: &'static str,
    },
    /// The device said no. It is in the state that it was in.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The guest asked for a stop, and neither draining nor suspending stopped every queue in time.
    #[error("queues did not stop when the guest asked for it: {0}")]
    Stuck(String),
}

impl From<LifecycleError> for SharedDeviceError {
    fn from(error: LifecycleError) -> Self {
        match error {
            LifecycleError::Not { now, wanted } => SharedDeviceError::Not { now, wanted },
            LifecycleError::Device(error) => SharedDeviceError::Device(error),
            LifecycleError::Stuck(reason) => SharedDeviceError::Stuck(reason),
        }
    }
}

struct Inner<D: Device> {
    device: Lifecycle<D>,
    /// For good: then the device is absent.
    closed: bool,
    /// Who waits for the device to settle. A vCPU's access may be what settles it, and may have replaced this
    /// waker in the inbox while it carried out an effect.
    waiting: Option<Waker>,
    /// Eventfds of threads that wait for the stage to change without blocking in here.
    watchers: Vec<Weak<OwnedFd>>,
}

impl<D: Device> Inner<D> {
    fn nudge(&mut self) {
        if let Some(waker) = &self.waiting {
            waker.wake_by_ref();
        }
    }
}

/// One device, in front of its guest. Shared by vCPU threads (any number) and one control thread or task.
pub struct SharedDevice<D: Device> {
    inner: Mutex<Inner<D>>,
    /// The stage has changed for whoever waits to access it.
    moved: Condvar,
    placement: Arc<dyn Placement>,
    patience: Duration,
}

impl<D: Device> SharedDevice<D> {
    /// How long a queue that the guest stops may take to drain before it is suspended.
    pub const PATIENCE: Duration = Duration::from_millis(500);

    /// A front whose device comes later: see [`SharedDevice::start`] and [`SharedDevice::hold`]. Pollers that
    /// the guest starts go where `placement` wants them.
    pub fn empty(placement: Arc<dyn Placement>) -> Self {
        let inner = Inner { device: Lifecycle::Absent, closed: false, waiting: None, watchers: Vec::new() };
        SharedDevice { inner: Mutex::new(inner), moved: Condvar::new(), placement, patience: Self::PATIENCE }
    }

    /// A front for a device that has not run yet; it runs from here on.
    pub fn new(device: D, placement: Arc<dyn Placement>) -> Result<Self, Refused<Quiescent<D>>> {
        let running = Quiescent::new(device).resume(&*placement)?;
        let front = Self::empty(placement);
        front.lock().device = running.into();
        Ok(front)
    }

    /// Another patience than [`SharedDevice::PATIENCE`].
    pub fn with_patience(self, patience: Duration) -> Self {
        SharedDevice { patience, ..self }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<D>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One register access by a guest, on its vCPU's thread. Waits while the device is held or away. What it asks for
    /// (queues started, stopped, a reset) is done when it returns; an error tells that this failed, the access itself
    /// has been answered. Only [`SharedDeviceError::Closed`] means that it has not.
    pub fn access(&self, at: RegisterAddress, mut op: Access<'_>) -> Result<(), SharedDeviceError> {
        let mut inner = self.lock();
        loop {
            if let Some(done) = self.attempt(&mut inner, at, &mut op) {
                return done;
            }
            // Invariant 1: nothing that the guest does is lost; it waits until the device answers.
            if removed(Invariant::KeepsWhatArrives) {
                if let Access::Read(bytes) = op {
                    bytes.fill(0xff);
                }
                return Ok(());
            }
            inner = self.moved.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// As [`SharedDevice::access`], for a thread that has more to do than wait. False if the device is held or away: then nothing has
    /// happened, and [`SharedDevice::watch`] tells when to try again.
    pub fn try_access(&self, at: RegisterAddress, mut op: Access<'_>) -> Result<bool, SharedDeviceError> {
        self.attempt(&mut self.lock(), at, &mut op).map_or(Ok(false), |done| done.map(|()| true))
    }

    /// The device, unless it is gone for good.
    fn open(&self) -> Result<MutexGuard<'_, Inner<D>>, SharedDeviceError> {
        let inner = self.lock();
        if inner.closed { Err(SharedDeviceError::Closed) } else { Ok(inner) }
    }

    /// One try. `None`: not now.
    fn attempt(
        &self,
        inner: &mut Inner<D>,
        at: RegisterAddress,
        op: &mut Access<'_>,
    ) -> Option<Result<(), SharedDeviceError>> {
        if inner.closed {
            return Some(Err(SharedDeviceError::Closed));
        }
        let before = inner.device.presence();
        let done = inner.device.access(at, again(op), &*self.placement, self.patience)?;
        inner.nudge();
        // Whoever waits has waited since before it ran, and was told then.
        if before == Presence::Running && inner.device.presence() != before {
            self.announce(inner);
        }
        Some(done.map_err(SharedDeviceError::from))
    }

    /// Something that the device does by itself (an interrupt of the hardware, a step of its DMA). False if it is held:
    /// whoever reports it does so again later.
    pub fn event(&self, event: impl FnOnce(&mut D)) -> bool {
        let mut inner = self.lock();
        let heard = inner.device.event(event);
        inner.nudge();
        heard
    }

    /// Looks at the device, if it is here.
    pub fn look<R>(&self, look: impl FnOnce(&D) -> R) -> Option<R> {
        self.lock().device.look().map(look)
    }

    /// Goes on after a pause.
    pub fn resume(&self) -> Result<(), SharedDeviceError> {
        let mut inner = self.open()?;
        inner.device.resume(&*self.placement)?;
        self.announce(&mut inner);
        Ok(())
    }

    /// Takes the device out, held as it is. Accesses go on waiting.
    pub fn take(&self) -> Result<Quiescent<D>, SharedDeviceError> {
        let mut inner = self.open()?;
        let taken = inner.device.take()?;
        self.announce(&mut inner);
        Ok(taken)
    }

    /// Puts a device in, and holds it.
    pub fn hold(&self, quiescent: Quiescent<D>) -> Result<(), SharedDeviceError> {
        let mut inner = self.open()?;
        if let now @ (Presence::Running | Presence::Quiescing | Presence::Held) = inner.device.presence() {
            return Err(SharedDeviceError::Not { now: now.name(), wanted: "away" });
        }
        inner.device = quiescent.into();
        self.announce(&mut inner);
        Ok(())
    }

    /// Puts a device in whose state was loaded, and starts it. If it does not start, it comes back.
    pub fn start(&self, loaded: Loaded<D>) -> Result<(), Refused<Loaded<D>>> {
        let mut inner = self.lock();
        let now = inner.presence();
        if now != Presence::Away {
            let error = SharedDeviceError::Not { now: now.name(), wanted: "away" };
            return Err(Refused { kept: loaded, error: DeviceError::Below(Box::new(error)) });
        }
        inner.device = loaded.start(&*self.placement)?.into();
        self.announce(&mut inner);
        Ok(())
    }

    /// Ends it: whoever waits for an access gets [`SharedDeviceError::Closed`]. A held device comes back.
    pub fn close(&self) -> Option<Quiescent<D>> {
        let mut inner = self.lock();
        let before = std::mem::replace(&mut inner.device, Lifecycle::Absent);
        inner.closed = true;
        inner.nudge();
        self.announce(&mut inner);
        match before {
            Lifecycle::Quiescent(quiescent) => Some(quiescent),
            _ => None,
        }
    }
}

impl<D: Device> Inner<D> {
    fn presence(&self) -> Presence {
        if self.closed { Presence::Closed } else { self.device.presence() }
    }
}

/// The same access, for one more try.
fn again<'a>(op: &'a mut Access<'_>) -> Access<'a> {
    match op {
        Access::Read(bytes) => Access::Read(bytes),
        Access::Write(bytes) => Access::Write(bytes),
    }
}

impl<D: Device> std::fmt::Debug for SharedDevice<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedDevice").field("device", &self.lock().presence()).finish_non_exhaustive()
    }
}
