//! The vfio-user host under test: any [`Function`] served on a socket, its guest behind a client.
//!
//! ```text
//!   vCPU --access--> Client --REGION_READ, REGION_WRITE--> service --> Front <-- InProcess (the daemon's hold: quiesce, save, ...)
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
use std::time::Instant;

use ioplane_device::{Access, At, Quiescent, State};
use ioplane_embed::Front;
use ioplane_host::vfio_user::{Handle, Options, serve};
use ioplane_memory::{DirtyLog, GuestMap};
use ioplane_pci::Function;
use vfio_bindings::bindings::vfio;

use super::in_process::{InProcess, Spread, two_cores};
use super::line::Line;
use super::{Host, Plan, Registers};
use crate::vfio_user::Client;

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

/// One server with one connection.
struct Served<F: Function> {
    /// The daemon's side.
    host: Arc<InProcess<F>>,
    handle: Handle,
    client: Arc<Mutex<Client>>,
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
        let works = Works { wires: &wires, memory: &memory, fresh: &fresh, plan, directory: &directory };
        let served = works.serve(0, Quiescent::new(fresh()))?;
        served.host.front().resume().map_err(said)?;
        let inner = Mutex::new(Inner { served, closed: false });
        Ok(Arc::new(VfioUser { inner, moved: Condvar::new(), wires, memory, fresh, plan: *plan, directory }))
    }

    fn works(&self) -> Works<'_, F> {
        let VfioUser { wires, memory, fresh, plan, directory, .. } = self;
        Works { wires, memory, fresh, plan, directory }
    }

    fn host(&self) -> Arc<InProcess<F>> {
        lock(&self.inner).served.host.clone()
    }
}

/// What a server is made of.
struct Works<'a, F: Function> {
    wires: &'a Wires,
    memory: &'a GuestMap,
    fresh: &'a Arc<dyn Fn() -> F + Send + Sync>,
    plan: &'a Plan,
    directory: &'a std::path::Path,
}

impl<F: Function> Works<'_, F> {
    /// A server of a device that is held, and a client that has mapped its memory and wired its interrupt. The device stays held.
    fn serve(&self, nth: u64, device: Quiescent<F>) -> Result<Served<F>, String> {
        let pool = two_cores(self.plan);
        let front = Arc::new(Front::empty(Arc::new(Spread(pool.clone()))));
        front.hold(device).map_err(said)?;
        let options = Options::new(self.directory.join(nth.to_string()));
        let handle = serve(front.clone(), options).map_err(said)?;
        let mut client = Client::greet(handle.socket()).map_err(said)?;
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
        let fresh = self.fresh.clone();
        let host = InProcess::around(front, pool, move || fresh());
        Ok(Served { host, handle, client: Arc::new(Mutex::new(client)), nth })
    }
}

impl<F: Function> Drop for VfioUser<F> {
    fn drop(&mut self) {
        let _ = lock(&self.inner).served.handle.stop(true);
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// One access, as a command.
fn ask(client: &mut Client, at: At, op: &mut Access<'_>) -> std::io::Result<()> {
    let (region, offset) = match at {
        At::Config(offset) => (vfio::VFIO_PCI_CONFIG_REGION_INDEX, offset),
        At::Bar(bar, offset) => (bar.into(), offset),
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
    fn access(&self, at: At, mut op: Access<'_>) -> Result<(), String> {
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

impl<F: Function> Host for VfioUser<F> {
    fn quiesce(&self, deadline: Instant) -> Result<(), String> {
        self.host().quiesce(deadline)
    }

    fn begin_and_drop(&self) -> Result<bool, String> {
        self.host().begin_and_drop()
    }

    fn undrain(&self) -> Result<(), String> {
        self.host().undrain()
    }

    fn suspend(&self, deadline: Instant) -> Result<(), String> {
        self.host().suspend(deadline)
    }

    fn resume(&self) -> Result<(), String> {
        self.host().resume()
    }

    fn save(&self) -> Result<State, String> {
        self.host().save()
    }

    fn transplant(&self, state: &State) -> Result<(), String> {
        let (old, nth) = {
            let inner = lock(&self.inner);
            (inner.served.host.clone(), inner.served.nth + 1)
        };
        let loaded = Quiescent::new((self.fresh)()).load(state).map_err(|refused| said(refused.error))?;
        // Taken, not reset: what it was must not be ended by the end of its connection.
        let before = old.front().take().map_err(said)?;
        let begun = self.works().serve(nth, loaded.into_quiescent()).and_then(|served| {
            match served.host.front().resume() {
                Ok(()) => Ok(served),
                Err(error) => {
                    let _ = served.handle.stop(true);
                    Err(said(error))
                }
            }
        });
        let fresh = match begun {
            Ok(fresh) => fresh,
            Err(error) => {
                old.front().hold(before).map_err(said)?;
                return Err(error);
            }
        };
        let old = std::mem::replace(&mut lock(&self.inner).served, fresh);
        // Whoever waits in an access of the old server's hears that it has gone.
        old.host.front().close();
        let stopped = old.handle.stop(true).map_err(said);
        drop(before);
        self.moved.notify_all();
        stopped
    }

    fn queues(&self) -> Vec<u16> {
        self.host().queues()
    }

    fn move_queue(&self, queue: u16, core: usize, deadline: Instant) -> Result<(), String> {
        self.host().move_queue(queue, core, deadline)
    }

    fn log(&self, memory: &GuestMap, deadline: Instant) -> Result<Arc<DirtyLog>, String> {
        self.host().log(memory, deadline)
    }

    fn close(&self) {
        let mut inner = lock(&self.inner);
        inner.closed = true;
        inner.served.host.close();
        self.moved.notify_all();
    }
}
