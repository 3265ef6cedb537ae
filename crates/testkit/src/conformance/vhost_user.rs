//! The vhost-user host under test: any [`VirtioDevice`] served on a socket, its rings started and stopped by a front end.
//!
//! ```text
//!   quiesce     the daemon's own wish (`Handle::at_quiescence`), given back when missed; then GET_VRING_BASE of every ring
//!   suspend     GET_VRING_BASE of rings whose requests do not end: fenced off, kept in the in-flight region
//!   resume      SET_VRING_* and the kicks again
//!   transplant  another server, another connection: the bases and a copy of the in-flight region are all that it gets
//!   log         SET_LOG_BASE and VHOST_F_LOG_ALL, while the rings run
//! ```
//!
//! The guest reaches no registers here (`buses` is empty): what it does while the device is held is kick.

use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use ioplane_cores::Pool;
use ioplane_device::{CoreId, SavedState};
use ioplane_host::vhost_user::{Handle, ServerOptions, Status, serve_within};
use ioplane_memory::{DirtyLog, GuestMap, PAGE};
use ioplane_virtio::VirtioDevice;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use tokio::runtime::Runtime;

use super::in_process::{Spread, two_cores};
use super::virtio::{
    Asker, DeviceUnderTest, Fixture, Layout, QUEUES, Reach, RequestProbe, SIZE, features, ring,
};
use super::{DeviceHost, Dice, Kit, Plan, Probe, TestMachine, Vcpu};
use crate::driver::{GuestMemory, RingPlace};
use crate::front::{F_LOG_ALL, FrontEnd, FrontEndRequest, InFlight, Wants, protocol, vring_state};

/// How long the server waits for requests to end when a ring is to stop, before it suspends them.
const STUCK: Duration = Duration::from_millis(20);

/// How long it tries by itself to become quiescent when nobody waits for that any more.
const SOON: Duration = Duration::from_millis(2);

const KIND: &str = "vhost-user";
const VERSION: u32 = 1;

/// One server with one connection.
struct Instance<V: VirtioDevice> {
    handle: Handle<V>,
    front: FrontEnd,
}

struct Inner<V: VirtioDevice> {
    instance: Instance<V>,
    /// Where each ring goes on; `None` while they run.
    bases: Option<Vec<u32>>,
    /// Servers so far, to name sockets by.
    servers: u64,
}

/// What a front end knows of the machine: everything but its connection.
struct Wiring {
    memory: GuestMemory,
    places: Vec<RingPlace>,
    kicks: Vec<Arc<OwnedFd>>,
    calls: Vec<Arc<OwnedFd>>,
    features: u64,
    /// Where rings begin.
    start: u32,
}

/// A device, served; see the module.
pub struct VhostUser<V: VirtioDevice> {
    inner: Mutex<Inner<V>>,
    wiring: Wiring,
    works: Works<V>,
    /// `None` only while this is dropped.
    runtime: Option<Runtime>,
}

fn said(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// What new servers are made of.
struct Works<V> {
    model: Box<dyn Fn() -> V + Send + Sync>,
    pool: Arc<Pool>,
    patience: Duration,
    directory: PathBuf,
}

impl<V: VirtioDevice> Works<V> {
    /// A server that has not run yet, and a connection that has shared the guest's memory.
    fn instance(&self, nth: u64, runtime: &Runtime, wiring: &Wiring) -> Result<Instance<V>, String> {
        let socket = self.directory.join(nth.to_string());
        let options = ServerOptions {
            dirty_log: true,
            ..ServerOptions::new(socket, Arc::new(Spread(self.pool.clone())))
        };
        let handle = {
            let _inside = runtime.enter();
            serve_within((self.model)(), options, STUCK).map_err(said)?
        };
        let mut wants = Wants { features: wiring.features, ..Wants::default() };
        wants.protocol |= protocol::LOG_SHMFD;
        let front = FrontEnd::connect(handle.socket(), wants).map_err(said)?;
        front.wire().patience(self.patience).map_err(said)?;
        front.share(&wiring.memory).map_err(said)?;
        Ok(Instance { handle, front })
    }
}

impl<V: VirtioDevice> VhostUser<V> {
    fn start(
        plan: &Plan,
        model: Box<dyn Fn() -> V + Send + Sync>,
        wiring: Wiring,
    ) -> Result<Arc<Self>, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory =
            std::env::temp_dir().join(format!("ioplane-conformance-{}-{next}", std::process::id()));
        std::fs::create_dir_all(&directory).map_err(said)?;
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(2).enable_all().build().map_err(said)?;
        let works = Works { model, pool: two_cores(plan), patience: plan.patience, directory };
        let mut instance = works.instance(0, &runtime, &wiring)?;
        instance.front.track_inflight(QUEUES, SIZE).map_err(said)?;
        let inner =
            Mutex::new(Inner { instance, bases: Some(vec![wiring.start; QUEUES.into()]), servers: 1 });
        let host = VhostUser { inner, wiring, works, runtime: Some(runtime) };
        host.resume()?;
        Ok(Arc::new(host))
    }

    fn lock(&self) -> MutexGuard<'_, Inner<V>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for something that a server does; at most as long as anything may take.
    fn wait<T>(&self, what: impl Future<Output = T>) -> Result<T, String> {
        let runtime = self.runtime.as_ref().ok_or("closed")?;
        let patience = self.works.patience;
        runtime.block_on(async { tokio::time::timeout(patience, what).await }).map_err(said)
    }

    fn status(&self, instance: &Instance<V>) -> Result<Status, String> {
        self.wait(instance.handle.status())?.map_err(said)
    }

    /// How many kicks the device says it took on `queue`.
    fn kicks(&self, queue: u16) -> Option<u64> {
        let inner = self.lock();
        let status = self.status(&inner.instance).ok()?;
        status.queues.get(usize::from(queue)).map(|queue| queue.counts.kicks)
    }

    /// Starts `queue` at `base`; a ring that the server does not take is an error.
    fn start_ring(&self, instance: &Instance<V>, queue: u16, base: u32) -> Result<(), String> {
        let (front, at) = (&instance.front, usize::from(queue));
        front.describe(queue, &self.wiring.memory, self.wiring.places[at], base).map_err(said)?;
        let index = u64::from(queue).to_ne_bytes();
        front
            .tell(FrontEndRequest::SET_VRING_CALL, &index, &[self.wiring.calls[at].as_fd()])
            .map_err(said)?;
        front
            .tell(FrontEndRequest::SET_VRING_KICK, &index, &[self.wiring.kicks[at].as_fd()])
            .map_err(said)?;
        front.enable(queue, true).map_err(said)?;
        match self.status(instance)?.queues.get(at).and_then(|queue| queue.fault.clone()) {
            Some((_, fault)) => Err(fault),
            None => Ok(()),
        }
    }

    /// GET_VRING_BASE of every ring: drained, or suspended where that takes too long.
    fn stop_rings(&self, inner: &mut Inner<V>) -> Result<(), String> {
        let bases = (0..QUEUES).map(|queue| inner.instance.front.stop(queue).map_err(said));
        inner.bases = Some(bases.collect::<Result<_, _>>()?);
        // Invariant 1: while rings stand still the device answers what it is asked.
        inner.instance.front.config(0, 8).map(drop).map_err(|error| format!("invariant 1: {error}"))
    }

    /// Another server goes on from `bases` and an in-flight region of these bytes.
    fn begin(&self, nth: u64, bases: &[u32], region: &[u8]) -> Result<Instance<V>, String> {
        let runtime = self.runtime.as_ref().ok_or("closed")?;
        let mut instance = self.works.instance(nth, runtime, &self.wiring)?;
        let file = memfd_create("conformance-inflight", MemfdFlags::CLOEXEC).map_err(said)?;
        rustix::io::pwrite(&file, region, 0).map_err(said)?;
        let len = region.len() as u64;
        let inflight = InFlight { file, len, offset: 0, queues: QUEUES, size: SIZE };
        instance.front.give_inflight(inflight).map_err(said)?;
        for (queue, base) in (0..).zip(bases) {
            self.start_ring(&instance, queue, *base)?;
        }
        Ok(instance)
    }
}

impl<V: VirtioDevice> Drop for VhostUser<V> {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            let handle = self.lock().instance.handle.clone();
            // Before its timers do.
            let ended = async { tokio::time::timeout(2 * SOON + STUCK, handle.stop(true)).await };
            let _ = runtime.block_on(ended);
            // Servers that have not end where they are; their pollers leave the cores by themselves.
            runtime.shutdown_background();
        }
        let _ = std::fs::remove_dir_all(&self.works.directory);
    }
}

/// A state is the bases of the rings, then the in-flight region.
fn encode(bases: &[u32], region: &[u8]) -> SavedState {
    let mut body: Vec<u8> = bases.iter().flat_map(|base| base.to_le_bytes()).collect();
    body.extend_from_slice(region);
    SavedState { kind: KIND.to_owned(), version: VERSION, body }
}

const BASES: usize = 4 * QUEUES as usize;

impl<V: VirtioDevice> DeviceHost for VhostUser<V> {
    fn quiesce(&self, deadline: Instant) -> Result<(), String> {
        let mut inner = self.lock();
        let patience = deadline.saturating_duration_since(Instant::now());
        let handle = inner.instance.handle.clone().with_patience(patience);
        self.wait(handle.at_quiescence(|_, _| ((), false)))?.map_err(said)?;
        self.stop_rings(&mut inner)
    }

    fn begin_and_drop(&self) -> Result<bool, String> {
        let inner = self.lock();
        // Nobody hears that it was missed: the server gives the device back by itself, and soon.
        let handle = inner.instance.handle.clone().with_patience(SOON);
        let mut quiescing = Box::pin(handle.at_quiescence(|_, _| ((), false)));
        Ok(quiescing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending())
    }

    fn undrain(&self) -> Result<(), String> {
        // The server has given the device back by itself, before it hears this.
        let inner = self.lock();
        self.status(&inner.instance).map(drop)
    }

    fn suspend(&self, _deadline: Instant) -> Result<(), String> {
        let mut inner = self.lock();
        self.stop_rings(&mut inner)
    }

    fn resume(&self) -> Result<(), String> {
        let mut inner = self.lock();
        let bases = inner.bases.take().ok_or("the rings run")?;
        (0..).zip(bases).try_for_each(|(queue, base)| self.start_ring(&inner.instance, queue, base))
    }

    fn save(&self) -> Result<SavedState, String> {
        let inner = self.lock();
        let bases = inner.bases.as_ref().ok_or("the rings run")?;
        let inflight = inner.instance.front.inflight().ok_or("no in-flight region")?;
        let mut region = vec![0; inflight.len as usize];
        rustix::io::pread(&inflight.file, &mut region, inflight.offset).map_err(said)?;
        Ok(encode(bases, &region))
    }

    fn transplant(&self, state: &SavedState) -> Result<(), String> {
        let mut inner = self.lock();
        if inner.bases.is_none() {
            return Err("the rings run".into());
        }
        let (bases, region) =
            state.expect(KIND, VERSION).map_err(said)?.split_at_checked(BASES).ok_or("no bases")?;
        let bases: Vec<u32> = bases.as_chunks::<4>().0.iter().map(|base| u32::from_le_bytes(*base)).collect();
        inner.servers += 1;
        // Refused, it ends with its connection, and the old one has not been touched.
        let fresh = self.begin(inner.servers, &bases, region)?;
        let old = std::mem::replace(&mut inner.instance, fresh);
        inner.bases = None;
        drop(old.front);
        self.wait(old.handle.stop(true))?.map_err(said)
    }

    fn queues(&self) -> Vec<u16> {
        (0..QUEUES).collect()
    }

    fn move_queue(&self, queue: u16, core: usize, deadline: Instant) -> Result<(), String> {
        let inner = self.lock();
        let to = self.works.pool.on(CoreId(core as u32)).map_err(said)?;
        let patience = deadline.saturating_duration_since(Instant::now());
        let handle = inner.instance.handle.clone().with_patience(patience);
        self.wait(handle.move_queue(queue, Arc::new(to)))?.map_err(said)
    }

    fn log(&self, memory: &GuestMap, _deadline: Instant) -> Result<Arc<DirtyLog>, String> {
        let inner = self.lock();
        let front = &inner.instance.front;
        let len = memory.limit().div_ceil(PAGE).div_ceil(8).next_multiple_of(PAGE);
        let file = memfd_create("conformance-log", MemfdFlags::CLOEXEC).map_err(said)?;
        ftruncate(&file, len).map_err(said)?;
        let body = [len.to_ne_bytes(), [0; 8]].concat();
        front.wire().send(FrontEndRequest::SET_LOG_BASE as u32, 0, &body, &[file.as_fd()]).map_err(said)?;
        front.wire().reply(FrontEndRequest::SET_LOG_BASE).map_err(said)?;
        // As QEMU switches a log on: the feature, then every ring's address once more with the log's flag.
        let features = front.features() | F_LOG_ALL;
        front.tell(FrontEndRequest::SET_FEATURES, &features.to_ne_bytes(), &[]).map_err(said)?;
        for (queue, place) in (0..).zip(&self.wiring.places) {
            let user = |gpa| self.wiring.memory.user_of(gpa).ok_or("a ring outside memory");
            let mut body = vring_state(queue, 1).to_vec();
            for address in [user(place.desc)?, user(place.used)?, user(place.avail)?, place.used] {
                body.extend_from_slice(&address.to_ne_bytes());
            }
            front.tell(FrontEndRequest::SET_VRING_ADDR, &body, &[]).map_err(said)?;
        }
        DirtyLog::of_file(file, 0, len).map(Arc::new).map_err(said)
    }

    fn close(&self) {
        self.lock().instance.front.hang_up();
    }
}

/// The kit of a subject that is served on a socket.
pub struct OverSocket<S>(pub S);

impl<S: DeviceUnderTest> Kit for OverSocket<S> {
    fn boot(&self, plan: &Plan) -> TestMachine {
        let fixture = self.0.fixture();
        let Layout { memory, drivers, kicks, device_pages } = Layout::of(&self.0, &fixture);
        let Fixture { model, valve, .. } = fixture;
        let map = memory.view().map().clone();
        let places = drivers.iter().map(|[driver, _]| driver.ring.place()).collect();
        let calls: Vec<_> =
            (0..QUEUES).map(|_| ioplane_host::eventfd::fresh().expect("an eventfd")).collect();
        let (features, start) = (features(&self.0), drivers[0][0].ring.base());
        let wiring = Wiring { memory, places, kicks: kicks.clone(), calls: calls.clone(), features, start };
        let host = VhostUser::start(plan, model, wiring).expect("a device that is served");
        let mut vcpus: Vec<Box<dyn Vcpu>> = Vec::new();
        let mut probes: Vec<Box<dyn Probe>> = Vec::new();
        for (queue, [driver, probe]) in (0..).zip(drivers) {
            let (kick, call) = (kicks[usize::from(queue)].clone(), calls[usize::from(queue)].clone());
            let dice = Dice::new(plan.seed << 8 | u64::from(queue));
            let (reach, left) = (Kick(kick.clone()), self.0.bursts(plan));
            vcpus.push(Box::new(Asker { driver, reach, dice, left, seen: Vec::new() }));
            let (served, rung) = (host.clone(), AtomicU64::new(0));
            probes.push(Box::new(RequestProbe {
                driver: probe,
                dice: Dice::new(plan.seed),
                kick,
                interrupts: Box::new(move || {
                    let mut count = [0; 8];
                    let fresh = rustix::io::read(&call, &mut count).map_or(0, |_| u64::from_ne_bytes(count));
                    rung.fetch_add(fresh, Ordering::Relaxed) + fresh
                }),
                kicks: Box::new(move || served.kicks(queue)),
                signals: 1,
            }));
        }
        TestMachine { host, vcpus, buses: Vec::new(), probes, gate: valve, memory: map, device_pages }
    }

    fn hostile(&self, good: &SavedState) -> Vec<(String, SavedState)> {
        if self.0.packed() {
            super::spoilt::of_packed_regions(good, BASES)
        } else {
            super::spoilt::of_regions(good, BASES)
        }
    }
}

/// A vCPU whose kicks are KVM's ioeventfds.
struct Kick(Arc<OwnedFd>);

impl Reach for Kick {
    fn kick(&mut self) -> Result<(), String> {
        ring(&self.0);
        Ok(())
    }

    fn linger(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn touch(&mut self, dice: &mut Dice) -> Result<u64, String> {
        Ok(dice.roll())
    }
}
