//! A relay of Ethernet frames between two TAP devices: what netem does on kernels that have it. Delay, loss, a bounded buffer and cuts, each way by
//! itself, changed while frames go through. Connections are never closed: who is cut off hears nothing.
//!
//! ```text
//!   namespace of one host                 this process                namespace of the other
//!      10.x.y.1, TAP  <---frames--->  Relay: a DelayLine each way  <---frames--->  TAP, 10.x.y.2
//! ```
//!
//! One thread, which sleeps until a frame comes in or is due. Frames come out up to 1 ms late on a machine that has a processor to spare.

mod line;

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::space::{NetworkSpace, ip, own_name};
pub use line::{Conditions, DelayLine, RelayCounts};

/// Frames that are taken from a device before the other one is looked at.
const TURN: usize = 64;
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

/// See the module. Dropped: both devices go.
#[derive(Debug)]
pub struct Relay {
    names: [String; 2],
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    lines: Mutex<[DelayLine; 2]>,
    wake: OwnedFd,
    stop: AtomicBool,
}

impl Shared {
    fn lines(&self) -> MutexGuard<'_, [DelayLine; 2]> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
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
            ip(&format!("link set {name} addrgenmode none txqueuelen 10000"))?;
            ip(&format!("link set {name} netns {}", space.name()))?;
            space.ip(&format!("address add {address}/30 dev {name}"))?;
            space.ip(&format!("link set {name} up"))?;
            Ok(device)
        };
        let devices = [plug(0)?, plug(1)?];
        let lines = BOTH.map(|way| DelayLine::new(seed ^ ((way as u64) << 63), Conditions::default()));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared { lines: Mutex::new(lines), wake, stop: AtomicBool::new(false) });
        let of_thread = shared.clone();
        let body = move || carry(&of_thread, &devices);
        let thread = std::thread::Builder::new().name("relay".into()).spawn(body)?;
        Ok(Relay { names, shared, thread: Some(thread) })
    }

    /// The device of the host that sends this way.
    pub fn device(&self, way: RelayDirection) -> &str {
        &self.names[way as usize]
    }

    /// Changes what a direction does. When this returns it is so: after a cut, no frame comes out any more.
    pub fn set(&self, way: RelayDirection, change: impl FnOnce(&mut Conditions)) {
        let mut lines = self.shared.lines();
        let line = &mut lines[way as usize];
        let mut conditions = line.conditions();
        change(&mut conditions);
        line.set(conditions);
        drop(lines);
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
        self.shared.lines()[way as usize].counts()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether a device that does not read or write is still there: it has nothing, or is down.
fn passing(error: rustix::io::Errno) -> bool {
    use rustix::io::Errno;
    matches!(error, Errno::AGAIN | Errno::INTR | Errno::IO | Errno::NETDOWN | Errno::NOBUFS)
}

/// The thread.
fn carry(shared: &Shared, devices: &[OwnedFd; 2]) {
    let mut frame = vec![0; LARGEST];
    while !shared.stop.load(Ordering::Acquire) {
        let mut lines = shared.lines();
        for way in BOTH {
            let (line, from) = (&mut lines[way as usize], &devices[way as usize]);
            for _ in 0..TURN {
                match rustix::io::read(from, &mut frame) {
                    Ok(count) => line.offer(Instant::now(), &frame[..count]),
                    Err(error) if passing(error) => break,
                    // It has gone, with its namespace.
                    Err(_) => return,
                }
            }
        }
        let mut due = None;
        for way in BOTH {
            let (line, to) = (&mut lines[way as usize], &devices[1 - way as usize]);
            let now = Instant::now();
            while let Some(frame) = line.take(now) {
                match rustix::io::write(to, &frame) {
                    Err(error) if !passing(error) => return,
                    // What a device does not take is lost, as on a wire.
                    _ => {}
                }
            }
            due = due.into_iter().chain(line.due()).min();
        }
        drop(lines);
        let wait = due.map(|due| due.saturating_duration_since(Instant::now()));
        sleep(shared, devices, wait);
    }
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
