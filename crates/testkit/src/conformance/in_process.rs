//! The in-process host under test: any [`Device`] behind a [`SharedDevice`], with two I/O cores.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_device::{Access, Change, CoreId, CoreSender, Device, Placement, RegisterAddress, SavedState};
use ioplane_embed::{SharedDevice, SharedDeviceError};
use ioplane_memory::{DirtyLog, GuestMap};

use super::{DeviceHost, Plan, Registers};

/// Queue `n` on core `n % 2`.
pub(super) struct Spread(pub(super) Arc<Pool>);

impl Placement for Spread {
    fn place(&self, device: &str, queue: u16) -> Arc<dyn CoreSender> {
        match self.0.core(CoreId(u32::from(queue % 2))) {
            Ok(core) => core.place(device, queue),
            Err(_) => self.0.place(device, queue),
        }
    }
}

/// Core 0 polls, core 1 is notified.
pub(super) fn two_cores(plan: &Plan) -> Arc<Pool> {
    let polled = CoreSettings { notify: Notify::Polled, spin: plan.spin, ..CoreSettings::default() };
    let notified = CoreSettings { notify: Notify::Notified, ..CoreSettings::default() };
    Arc::new(Pool::with([polled, notified]).expect("two cores"))
}

/// A device behind a front, and how to make another instance of it.
pub struct InProcess<D: Device> {
    front: Arc<SharedDevice<D>>,
    pool: Arc<Pool>,
    fresh: Box<dyn Fn() -> D + Send + Sync>,
}

impl<D: Device> InProcess<D> {
    /// Starts one. `fresh` makes instances at power-on, on the same guest memory and wires.
    pub fn start(plan: &Plan, fresh: impl Fn() -> D + Send + Sync + 'static) -> Arc<Self> {
        let pool = two_cores(plan);
        let front =
            SharedDevice::new(fresh(), Arc::new(Spread(pool.clone()))).expect("a device at power-on starts");
        Self::around(Arc::new(front), pool, fresh)
    }

    /// Around a front that somebody else serves.
    pub(super) fn around(
        front: Arc<SharedDevice<D>>,
        pool: Arc<Pool>,
        fresh: impl Fn() -> D + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(InProcess { front, pool, fresh: Box::new(fresh) })
    }

    pub fn front(&self) -> &SharedDevice<D> {
        &self.front
    }
}

impl<D: Device> Registers for InProcess<D> {
    fn access(&self, at: RegisterAddress, op: Access<'_>) -> Result<(), String> {
        self.front.access(at, op).map_err(said)
    }
}

fn said(error: SharedDeviceError) -> String {
    error.to_string()
}

impl<D: Device> DeviceHost for InProcess<D> {
    fn quiesce(&self, deadline: Instant) -> Result<(), String> {
        self.front.quiesce(deadline).map_err(said)?.map_err(|late| late.reason)
    }

    fn begin_and_drop(&self) -> Result<bool, String> {
        self.front.begin_quiesce().map_err(said)?;
        let mut settled = Box::pin(self.front.settled());
        Ok(settled.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending())
    }

    fn undrain(&self) -> Result<(), String> {
        self.front.undrain().map_err(said)
    }

    fn suspend(&self, deadline: Instant) -> Result<(), String> {
        self.front.suspend(deadline).map_err(said)
    }

    fn resume(&self) -> Result<(), String> {
        self.front.resume().map_err(said)
    }

    fn save(&self) -> Result<SavedState, String> {
        self.front.save().map_err(said)
    }

    fn transplant(&self, state: &SavedState) -> Result<(), String> {
        self.front.transplant((self.fresh)(), state).map_err(said)
    }

    fn queues(&self) -> Vec<u16> {
        self.front.queues().map_or(Vec::new(), |q| q.into_iter().map(|(queue, _)| queue).collect())
    }

    fn move_queue(&self, queue: u16, core: usize, deadline: Instant) -> Result<(), String> {
        let to = self.pool.on(CoreId(core as u32)).map_err(|e| e.to_string())?;
        self.front.move_queue(queue, &to, deadline).map_err(said)?.map_err(|e| e.to_string())
    }

    fn log(&self, memory: &GuestMap, deadline: Instant) -> Result<Arc<DirtyLog>, String> {
        let log = Arc::new(DirtyLog::new(memory.limit()).map_err(|e| e.to_string())?);
        match self.front.change(&Change::Log(Some(log.clone())), deadline) {
            Ok(true) => Ok(log),
            Ok(false) => Err("invariant 6: not every poller acknowledged the log".into()),
            Err(error) => Err(said(error)),
        }
    }

    fn close(&self) {
        self.front.close();
    }
}
