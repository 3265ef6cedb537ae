//! The vfio-user host under test: any [`Function`] served on a socket, its guest behind a client.
//!
//! ```text
//!   vCPU --access--> Client --REGION_READ, REGION_WRITE--> service, which owns the device <-- Handle (quiesce, save, ...)
//!     ^--- INTA#: eventfd <------------------------------------'
//!     '--- acknowledged: the resample eventfd ---------------->'
//!   transplant   a fresh instance with the state behind another server; the client connects anew, maps its memory again and wires
//!                its interrupt again; the old instance is taken out of the old server, which ends with its connection
//! ```
//!
//! One client serves all vCPUs, as a VMM does: while one waits in an access the others wait behind it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use ioplane_cores::Pool;
use ioplane_device::{
    Access, Change, CoreId, Lifecycle, OnMiss, QueueSet, QuiescePolicy, Quiescent, RegisterAddress,
    SavedState,
};
use ioplane_host::vfio_user::{Handle, Options, serve};
use ioplane_memory::{DirtyLog, GuestMap};
use ioplane_pci::Function;
use vfio_bindings::bindings::vfio;

use super::in_process::{Spread, two_cores};
use super::line::Line;
use super::{DeviceHost, Plan, Registers};
use crate::vfio_user::VfioUserClient;

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The client's ends of INTA#.
struct Wires {
    /// Raised by the server.
    call: OwnedFd,
    /// Raised by the guest when it has acknowledged the interrupt, as KVM's resample descriptor.
    resume: OwnedFd,
    /// What `call` has held so far.
    rung: AtomicU64,
}

/// Longer than any check.
const LEASE: Duration = Duration::from_secs(3600);

/// The device that is held goes on.
fn let_go<F: Function>(handle: &Handle<F>) -> Result<(), String> {
    match handle.resume().wait().map_err(said)?.map_err(said)? {
        true => Ok(()),
        false => Err("nobody holds the device".into()),
    }
}

/// One server with one connection.
struct Served<F: Function> {
    /// The daemon's side.
    handle: Handle<F>,
    pool: Arc<Pool>,
    client: Arc<Mutex<VfioUserClient>>,
    /// Counts servers.
    nth: u64,
}

struct Inner<F: Function> {
    served: Served<F>,
    closed: bool,
}

/// A function, served; see the module.
pub struct VfioUser<F: Function> {
    inner: Mutex<Inner<F>>,
    /// Another server serves, or none ever will.
    moved: Condvar,
    wires: Wires,
    memory: Arc<GuestMap>,
    fresh: Arc<dyn Fn() -> F + Send + Sync>,
    plan: Plan,
    directory: PathBuf,
}

impl<F: Function> VfioUser<F> {
    /// Starts one. `fresh` makes instances at power-on, without memory and wires: these come from the client.
    pub fn start(
        plan: &Plan,
        memory: Arc<GuestMap>,
        fresh: impl Fn() -> F + Send + Sync + 'static,
    ) -> Result<Arc<Self>, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory =
            std::env::temp_dir().join(format!("ioplane-conformance-vfu-{}-{next}", std::process::id()));
        std::fs::create_dir_all(&directory).map_err(said)?;
        let eventfd = || {
            use rustix::event::{EventfdFlags, eventfd};
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(said)
        };
        let wires = Wires { call: eventfd()?, resume: eventfd()?, rung: AtomicU64::new(0) };
        let fresh: Arc<dyn Fn() -> F + Send + Sync> = Arc::new(fresh);
        let works = Works { wires: &wires, memory: &memory, plan, directory: &directory };
        let served = works.serve(0, Quiescent::new(fresh()))?;
        let_go(&served.handle)?;
        let inner = Mutex::new(Inner { served, closed: false });
        Ok(Arc::new(VfioUser { inner, moved: Condvar::new(), wires, memory, fresh, plan: *plan, directory }))
    }

    fn works(&self) -> Works<'_> {
        let VfioUser { wires, memory, plan, directory, .. } = self;
        Works { wires, memory, plan, directory }
    }

    fn handle(&self) -> Handle<F> {
        lock(&self.inner).served.handle.clone()
    }

    fn hold(&self, deadline: Instant, on_miss: OnMiss) -> Result<(), String> {
        let held = self.handle().hold(QuiescePolicy { deadline, on_miss }, LEASE);
        held.wait().map_err(said)?.map(drop).map_err(said)
    }
}

/// What a server is made of.
struct Works<'a> {
    wires: &'a Wires,
    memory: &'a GuestMap,
    plan: &'a Plan,
    directory: &'a std::path::Path,
}

impl Works<'_> {
    /// A server of a device that is held, and a client that has mapped its memory and wired its interrupt. The device stays held.
    fn serve<F: Function>(&self, nth: u64, device: Quiescent<F>) -> Result<Served<F>, String> {
        let pool = two_cores(self.plan);
        let options = Options::new(self.directory.join(nth.to_string()));
        let handle = serve(device, Arc::new(Spread(pool.clone())), options).map_err(said)?;
        // It is quiescent: so it stays, whatever the client asks for.
        let policy = QuiescePolicy { deadline: Instant::now(), on_miss: OnMiss::Undrain };
        handle.hold(policy, LEASE).wait().map_err(said)?.map_err(said)?;
        let mut client = VfioUserClient::greet(handle.socket()).map_err(said)?;
        // An access waits for as long as the device is held.
        client.stream().set_read_timeout(Some(2 * self.plan.patience)).map_err(said)?;
        for region in self.memory.regions() {
            let spec = region.spec().map_err(said)?;
            client.map(spec.gpa, spec.len, spec.offset, Some(spec.file.as_fd())).map_err(said)?;
        }
        let eventfd = vfio::VFIO_IRQ_SET_DATA_EVENTFD;
        for (action, file) in [
            (vfio::VFIO_IRQ_SET_ACTION_TRIGGER, &self.wires.call),
            (vfio::VFIO_IRQ_SET_ACTION_UNMASK, &self.wires.resume),
        ] {
            let index = vfio::VFIO_PCI_INTX_IRQ_INDEX;
            client.set_irqs(eventfd | action, index, 0..1, &[], &[file]).map_err(said)?;
        }
        Ok(Served { handle, pool, client: Arc::new(Mutex::new(client)), nth })
    }
}

impl<F: Function> Drop for VfioUser<F> {
    fn drop(&mut self) {
        let _ = lock(&self.inner).served.handle.stop(true);
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// One access, as a command.
fn ask(client: &mut VfioUserClient, at: RegisterAddress, op: &mut Access<'_>) -> std::io::Result<()> {
    let (region, offset) = match at {
        RegisterAddress::Config(offset) => (vfio::VFIO_PCI_CONFIG_REGION_INDEX, offset),
        RegisterAddress::Bar(bar, offset) => (bar.into(), offset),
    };
    match op {
        Access::Read(bytes) => bytes.copy_from_slice(&client.read(region, offset, bytes.len() as u32)?),
        Access::Write(bytes) => client.write(region, offset, bytes)?,
    }
    Ok(())
}

/// Whether the server has gone: what it had not answered it had not done either, since the device was held.
fn gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

impl<F: Function> Registers for VfioUser<F> {
    fn access(&self, at: RegisterAddress, mut op: Access<'_>) -> Result<(), String> {
        loop {
            let (nth, client) = {
                let Inner { served, closed } = &*lock(&self.inner);
                if *closed {
                    return Err("closed".into());
                }
                (served.nth, served.client.clone())
            };
            let Err(error) = ask(&mut lock(&client), at, &mut op) else { return Ok(()) };
            if !gone(&error) {
                return Err(error.to_string());
            }
            let same = |inner: &mut Inner<F>| inner.served.nth == nth && !inner.closed;
            let waited = self.moved.wait_timeout_while(lock(&self.inner), self.plan.patience, same);
            if waited.unwrap_or_else(PoisonError::into_inner).1.timed_out() {
                return Err("the server has gone, and no other has come".into());
            }
        }
    }
}

impl<F: Function> Line for Arc<VfioUser<F>> {
    fn count(&self) -> u64 {
        let mut count = [0; 8];
        let fresh = rustix::io::read(&self.wires.call, &mut count).map_or(0, |_| u64::from_ne_bytes(count));
        self.wires.rung.fetch_add(fresh, Ordering::Relaxed) + fresh
    }

    fn unmask(&self) -> bool {
        rustix::io::write(&self.wires.resume, &1u64.to_ne_bytes()).is_ok()
    }
}

impl<F: Function> DeviceHost for VfioUser<F> {
    fn quiesce(&self, deadline: Instant) -> Result<(), String> {
        self.hold(deadline, OnMiss::Undrain)
    }

    fn begin_and_drop(&self) -> Result<bool, String> {
        let deadline = Instant::now() + self.plan.patience;
        let mut held =
            Box::pin(self.handle().hold(QuiescePolicy { deadline, on_miss: OnMiss::Undrain }, LEASE));
        Ok(held.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending())
    }

    fn undrain(&self) -> Result<(), String> {
        // Held already, it goes on; the server gives one back by itself that has missed its deadline, or that nobody waits for.
        let handle = self.handle();
        handle.resume().wait().map_err(said)?.map_err(said)?;
        handle.with(|_| ()).wait().map_err(said)
    }

    fn suspend(&self, deadline: Instant) -> Result<(), String> {
        let now = Instant::now();
        self.hold(now, OnMiss::Suspend { timeout: deadline.saturating_duration_since(now) })
    }

    fn resume(&self) -> Result<(), String> {
        let_go(&self.handle())
    }

    fn save(&self) -> Result<SavedState, String> {
        let saved = self.handle().with(|device| device.quiescent().map(|quiescent| quiescent.save()));
        saved.wait().map_err(said)?.map_err(said)?.map_err(said)
    }

    fn transplant(&self, state: &SavedState) -> Result<(), String> {
        let (old, nth) = {
            let inner = lock(&self.inner);
            (inner.served.handle.clone(), inner.served.nth + 1)
        };
        let loaded = Quiescent::new((self.fresh)()).load(state).map_err(|refused| said(refused.error))?;
        // Taken, not reset: what it was must not be ended by the end of its connection.
        let before = old.with(Lifecycle::take).wait().map_err(said)?.map_err(said)?;
        let begun = self.works().serve(nth, loaded.into_quiescent()).and_then(|served| {
            match let_go(&served.handle) {
                Ok(()) => Ok(served),
                Err(error) => {
                    let _ = served.handle.stop(true);
                    Err(error)
                }
            }
        });
        let fresh = match begun {
            Ok(fresh) => fresh,
            Err(error) => {
                old.with(|device| *device = before.into()).wait().map_err(said)?;
                return Err(error);
            }
        };
        drop(std::mem::replace(&mut lock(&self.inner).served, fresh));
        // Whoever waits in an access of the old server's hears that it has gone.
        let stopped = old.stop(true).map_err(said);
        drop(before);
        self.moved.notify_all();
        stopped
    }

    fn queues(&self) -> Vec<u16> {
        let queues = self.handle().with(|device| {
            device.running().map_or_else(|_| Vec::new(), |running| running.queues().into_iter().collect())
        });
        queues.wait().unwrap_or_default()
    }

    fn move_queue(&self, queue: u16, core: usize, deadline: Instant) -> Result<(), String> {
        let (handle, pool) = {
            let inner = lock(&self.inner);
            (inner.served.handle.clone(), inner.served.pool.clone())
        };
        let to = pool.on(CoreId(core as u32)).map_err(said)?;
        let moved = handle
            .with(move |device| device.running().map(|running| running.move_queue(queue, &to, deadline)));
        moved.wait().map_err(said)?.map_err(said)?.map_err(said)
    }

    fn log(&self, memory: &GuestMap, deadline: Instant) -> Result<Arc<DirtyLog>, String> {
        let log = Arc::new(DirtyLog::new(memory.limit()).map_err(said)?);
        let change = Change::Log(Some(log.clone()));
        let heard = self.handle().with(move |device| match device {
            Lifecycle::Running(running) => {
                let all = running.queues();
                running.apply(&all, &change).wait(deadline)
            }
            Lifecycle::Quiescing(quiescing) => quiescing.apply(&change).wait(deadline),
            Lifecycle::Quiescent(quiescent) => {
                quiescent.with(|device, _| device.apply(&QueueSet::new(), &change));
                true
            }
            Lifecycle::Absent => false,
        });
        match heard.wait().map_err(said)? {
            true => Ok(log),
            false => Err("invariant 6: not every poller acknowledged the log".into()),
        }
    }

    fn close(&self) {
        let handle = {
            let mut inner = lock(&self.inner);
            inner.closed = true;
            inner.served.handle.clone()
        };
        let _ = handle.stop(true);
        self.moved.notify_all();
    }
}
