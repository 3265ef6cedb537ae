//! A relay of Ethernet frames between two TAP devices: what netem does on kernels that have it. Delay, loss, a bounded buffer and cuts, each way by
//! itself, changed while frames go through. Connections are never closed: who is cut off hears nothing.
//!
//! ```text
//!   namespace of one host                 this process                namespace of the other
//!      10.x.y.1, TAP  <---frames--->  Relay: a DelayLine each way  <---frames--->  TAP, 10.x.y.2
//! ```
//!
//! One thread, which sleeps until a frame comes in or is due. Frames come out up to 1 ms late on a machine that has a processor to spare. Before the thread
//! takes them they wait in the queue of their device, [`QUEUE`] frames at most, which the bound of the buffer does not count.

mod line;

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::space::{NetworkSpace, ip, own_name};
pub use line::{Conditions, DelayLine, RelayCounts};

/// Frames that are taken from a device before the other one is looked at.
const TURN: usize = 64;
/// Frames that wait in a device for the thread; more are dropped by the kernel, and counted there.
const QUEUE: u32 = 10_000;
/// More than a frame has.
const LARGEST: usize = 64 << 10;

/// A direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayDirection {
    /// From the first host to the second.
    There = 0,
    /// From the second to the first.
    Back = 1,
}

pub const BOTH: [RelayDirection; 2] = [RelayDirection::There, RelayDirection::Back];

/// See the module. Dropped: both devices go. A device that goes before it, with its namespace, ends the relay, which every call from then on says by a panic,
/// dropping it too: a relay that has ended would look like a network that is cut.
#[derive(Debug)]
pub struct Relay {
    names: [String; 2],
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    wake: OwnedFd,
    stop: AtomicBool,
}

#[derive(Debug)]
struct State {
    lines: [DelayLine; 2],
    /// Why the thread has ended, if it was not to end.
    ended: Option<Errno>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a caller gets, who must not take a relay that has ended for a network.
    fn running(&self) -> MutexGuard<'_, State> {
        let state = self.state();
        assert!(state.ended.is_none(), "the relay has ended: {:?}", state.ended);
        state
    }

    fn wake(&self) {
        // Full: it is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

impl Relay {
    /// Joins two hosts. Each gets a device with its address, in a network of 30 bits: two addresses that differ in their last two bits, which are 01 and
    /// 10. `seed` decides which frames are lost. The thread runs on the processors of the caller's.
    pub fn join(hosts: [(&NetworkSpace, Ipv4Addr); 2], seed: u64) -> io::Result<Relay> {
        let names = hosts.map(|_| own_name("io"));
        let plug = |at: usize| -> io::Result<OwnedFd> {
            let (name, (space, address)) = (&names[at], hosts[at]);
            let device = ioplane_network::tap_of_frames(name).map_err(io::Error::other)?;
            // Nothing but what the test sends: no IPv6. As many frames as come while this thread waits for a processor.
            ip(&format!("link set {name} addrgenmode none txqueuelen {QUEUE}"))?;
            ip(&format!("link set {name} netns {}", space.name()))?;
            space.ip(&format!("address add {address}/30 dev {name}"))?;
            space.ip(&format!("link set {name} up"))?;
            Ok(device)
        };
        let devices = [plug(0)?, plug(1)?];
        let lines = BOTH.map(|way| DelayLine::new(seed ^ ((way as u64) << 63), Conditions::default()));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let state = Mutex::new(State { lines, ended: None });
        let shared = Arc::new(Shared { state, wake, stop: AtomicBool::new(false) });
        let of_thread = shared.clone();
        let body = move || {
            if let Err(why) = carry(&of_thread, &devices) {
                of_thread.state().ended = Some(why);
            }
        };
        let thread = std::thread::Builder::new().name("relay".into()).spawn(body)?;
        Ok(Relay { names, shared, thread: Some(thread) })
    }

    /// The device of the host that sends this way.
    pub fn device(&self, way: RelayDirection) -> &str {
        &self.names[way as usize]
    }

    /// Changes what a direction does. When this returns it is so: after a cut, no frame comes out any more.
    pub fn set(&self, way: RelayDirection, change: impl FnOnce(&mut Conditions)) {
        let mut state = self.shared.running();
        let line = &mut state.lines[way as usize];
        let mut conditions = line.conditions();
        change(&mut conditions);
        line.set(conditions);
        drop(state);
        self.shared.wake();
    }

    /// The same in both directions.
    pub fn set_both(&self, change: impl Fn(&mut Conditions)) {
        BOTH.into_iter().for_each(|way| self.set(way, &change));
    }

    /// Drops all frames of these directions from now on.
    pub fn cut(&self, ways: &[RelayDirection]) {
        ways.iter().for_each(|way| self.set(*way, |conditions| conditions.cut = true));
    }

    /// Frames go through again.
    pub fn heal(&self) {
        self.set_both(|conditions| conditions.cut = false);
    }

    pub fn counts(&self, way: RelayDirection) -> RelayCounts {
        self.shared.running().lines[way as usize].counts()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let joined = thread.join();
            if !std::thread::panicking() {
                assert!(joined.is_ok(), "the thread of the relay has panicked");
                drop(self.shared.running());
            }
        }
    }
}

/// Whether a device that does not read or write is still there: it has nothing, or is down.
fn passing(error: Errno) -> bool {
    matches!(error, Errno::AGAIN | Errno::INTR | Errno::IO | Errno::NETDOWN | Errno::NOBUFS)
}

/// The thread. An error is one of a device that is gone, with its namespace, or is no more what it was.
fn carry(shared: &Shared, devices: &[OwnedFd; 2]) -> Result<(), Errno> {
    let mut frame = vec![0; LARGEST];
    while !shared.stop.load(Ordering::Acquire) {
        let mut state = shared.state();
        for way in BOTH {
            let (line, from) = (&mut state.lines[way as usize], &devices[way as usize]);
            for _ in 0..TURN {
                match rustix::io::read(from, &mut frame) {
                    Ok(count) => line.offer(Instant::now(), &frame[..count]),
                    Err(error) if passing(error) => break,
                    Err(error) => return Err(error),
                }
            }
        }
        let mut due = None;
        for way in BOTH {
            let (line, to) = (&mut state.lines[way as usize], &devices[1 - way as usize]);
            let now = Instant::now();
            while let Some(frame) = line.take(now) {
                match rustix::io::write(to, &frame) {
                    Ok(_) => {}
                    // Lost, as on a wire.
                    Err(error) if passing(error) => line.refused(&frame),
                    Err(error) => return Err(error),
                }
            }
            due = due.into_iter().chain(line.due()).min();
        }
        drop(state);
        let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
        sleep(shared, devices, wait);
    }
    Ok(())
}

/// Until a frame comes in, somebody has changed something, or so much time has passed.
fn sleep(shared: &Shared, devices: &[OwnedFd; 2], time: Option<Duration>) {
    let time = time.map(|time| Timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    });
    let mut watched = [
        PollFd::new(&devices[0], PollFlags::IN),
        PollFd::new(&devices[1], PollFlags::IN),
        PollFd::new(&shared.wake, PollFlags::IN),
    ];
    // A signal: it is looked at everything once more.
    let _ = poll(&mut watched, time.as_ref());
    let _ = rustix::io::read(&shared.wake, &mut [0; 8]);
}
