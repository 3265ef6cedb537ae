//! The uplink, with real kernels' stacks on both sides: two network namespaces, each with a TAP device, and between them
//! nothing but the switch on an I/O core. What arrives has been checksummed by the kernel that sent or received it, by the
//! switch where they were not asked to, and is compared.

#![allow(unsafe_code)]
// UNSAFETY: a thread goes to a network namespace of its own, and asks for UDP segmentation; rustix has neither.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use ioplane_cores::{Core, CoreSettings, Notify};
use ioplane_device::{
    Budget, CoreContext, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, PollOutcome, PollerSlot,
    Quiescent, Running,
};
use ioplane_network::{DropReason, Port, PortOptions, RxOffloads, Sent, Switch, Tap};
use support::*;

type Work = Box<dyn FnOnce() + Send>;

/// A thread in a network namespace of its own.
struct World {
    works: Option<Sender<Work>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl World {
    fn new() -> World {
        let (works, todo) = channel::<Work>();
        let thread = std::thread::spawn(move || {
            // SAFETY: changes the namespace of this thread only.
            let left = unsafe { libc::unshare(libc::CLONE_NEWNET) };
            assert_eq!(left, 0, "unshare: {}", std::io::Error::last_os_error());
            todo.iter().for_each(|work| work());
        });
        World { works: Some(works), thread: Some(thread) }
    }

    /// Does something there; wait for it by the receiver.
    fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::sync::mpsc::Receiver<T> {
        let (done, result) = channel();
        let work: Work = Box::new(move || drop(done.send(work())));
        self.works.as_ref().unwrap().send(work).unwrap();
        result
    }

    fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        self.begin(work).recv_timeout(Duration::from_secs(60)).expect("the work has ended in its namespace")
    }
}

impl std::ops::Drop for World {
    fn drop(&mut self) {
        drop(self.works.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
            && !std::thread::panicking()
        {
            panic!("a namespace's thread has panicked");
        }
    }
}

/// Whether this process may do such things; says so if not.
fn allowed() -> bool {
    let may = rustix::process::geteuid().is_root() && std::path::Path::new("/dev/net/tun").exists();
    if !may {
        let why = "SKIPPED: the TAP uplink was NOT tested: it takes root and /dev/net/tun";
        let _ = writeln!(std::io::stderr(), "\n*** {why} ***");
    }
    may
}

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split_whitespace()).output().expect("running ip");
    assert!(done.status.success(), "ip {words}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A namespace whose only way out is a TAP device on the switch.
struct Side {
    world: World,
    port: Arc<Port>,
    running: Option<Running<Tap>>,
}

impl Side {
    fn new(switch: &Arc<Switch>, core: &Core, n: u8) -> Side {
        let world = World::new();
        let plugged = switch.clone();
        let tap = world.run(move || {
            let name = format!("ioplane{n}");
            let tap = Tap::open(&name, &plugged, PortOptions::new(&name)).unwrap();
            ip("link set lo up");
            ip(&format!("addr add 10.9.0.{n}/24 dev {name}"));
            ip(&format!("-6 addr add fd09::{n}/64 dev {name} nodad"));
            ip(&format!("link set {name} up"));
            tap
        });
        let port = tap.port().clone();
        Side { world, port, running: Some(Quiescent::new(tap).resume(core).unwrap()) }
    }
}

struct Hosts {
    switch: Arc<Switch>,
    core: Core,
    left: Side,
    right: Side,
}

fn hosts() -> Hosts {
    let switch = switch();
    // Sleeps soon, so that the descriptors have to wake it again and again.
    let settings =
        CoreSettings { notify: Notify::Polled, spin: Duration::from_micros(200), ..CoreSettings::default() };
    let core = Core::start(CoreId(0), settings).unwrap();
    let (left, right) = (Side::new(&switch, &core, 1), Side::new(&switch, &core, 2));
    Hosts { switch, core, left, right }
}

fn pattern(len: usize) -> Vec<u8> {
    let mut state = 0x1234_5678_u32;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

const TRANSFER: usize = 6 << 20;

/// Sends a few megabytes from left to right over TCP, and a word back.
fn transfer(hosts: &Hosts, address: &'static str) {
    let listener = hosts.right.world.run(move || TcpListener::bind(address).unwrap());
    let received = hosts.right.world.begin(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        stream.write_all(b"thanks").unwrap();
        bytes
    });
    let answer = hosts.left.world.run(move || {
        let target: SocketAddr = address.parse().unwrap();
        let mut stream = TcpStream::connect_timeout(&target, Duration::from_secs(20)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(&pattern(TRANSFER)).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    });
    assert_eq!(answer, b"thanks");
    let bytes = received.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(bytes == pattern(TRANSFER), "{} bytes arrived, and not the same", bytes.len());
}

#[test]
fn tcp_between_two_kernels_whole_and_segmented() {
    if !allowed() {
        return;
    }
    let hosts = hosts();
    // As the kernel takes them: large frames go through whole.
    for address in ["10.9.0.2:5001", "[fd09::2]:5002"] {
        let before = hosts.right.port.reading().received;
        transfer(&hosts, address);
        let after = hosts.right.port.reading().received;
        let average = (after.bytes - before.bytes) / (after.frames - before.frames);
        assert!(average > 3000, "{address}: frames of {average} bytes: nothing large went through");
    }
    // A receiver that takes nothing: every segment and every sum is ours, and the kernel checks them.
    hosts.right.port.takes(RxOffloads::default());
    for address in ["10.9.0.2:5003", "[fd09::2]:5004"] {
        let before = hosts.right.port.reading().received;
        transfer(&hosts, address);
        let after = hosts.right.port.reading().received;
        assert!((after.frames - before.frames) as usize > TRANSFER / 1500, "{address}");
    }
    // The receiving kernel found no sum wrong.
    let wrong = hosts.right.world.run(|| {
        let text = std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        let tcp: Vec<_> = text.lines().filter(|line| line.starts_with("Tcp:")).collect();
        let at = tcp[0].split(' ').position(|name| name == "InCsumErrors").unwrap();
        tcp[1].split(' ').nth(at).unwrap().to_owned()
    });
    assert_eq!(wrong, "0");
    for side in [&hosts.left, &hosts.right] {
        let reading = side.port.reading();
        assert_eq!(
            reading.sent.dropped(DropReason::Offload) + reading.sent.dropped(DropReason::Malformed),
            0,
            "{reading:?}"
        );
    }
    assert_eq!(hosts.switch.table().len(), 2);
}

#[test]
fn udp_by_datagrams() {
    if !allowed() {
        return;
    }
    let hosts = hosts();
    for takes in [hosts.right.port.reading().takes, RxOffloads::default()] {
        hosts.right.port.takes(takes);
        for address in ["10.9.0.2:6001", "[fd09::2]:6002"] {
            let socket = hosts.right.world.run(move || UdpSocket::bind(address).unwrap());
            let received = hosts.right.world.begin(move || {
                socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                let mut datagrams = Vec::new();
                while datagrams.len() < 20 {
                    let mut buffer = vec![0; 2000];
                    let len = socket.recv(&mut buffer).unwrap();
                    buffer.truncate(len);
                    datagrams.push(buffer);
                }
                datagrams
            });
            hosts.left.world.run(move || {
                let from = if address.starts_with('[') { "[fd09::1]:0" } else { "10.9.0.1:0" };
                let socket = UdpSocket::bind(from).unwrap();
                let size: libc::c_int = 1000;
                // SAFETY: UDP_SEGMENT reads one int, which is ours.
                let set = unsafe {
                    libc::setsockopt(
                        socket.as_raw_fd(),
                        libc::SOL_UDP,
                        103,
                        (&raw const size).cast(),
                        size_of::<libc::c_int>() as libc::socklen_t,
                    )
                };
                assert_eq!(set, 0, "UDP_SEGMENT: {}", std::io::Error::last_os_error());
                let bytes = pattern(20_000);
                socket.send_to(&bytes, address).unwrap();
            });
            let datagrams = received.recv_timeout(Duration::from_secs(30)).expect("all datagrams arrive");
            assert!(datagrams.iter().all(|datagram| datagram.len() == 1000));
            assert!(datagrams.concat() == pattern(20_000));
        }
    }
}

#[test]
fn frames_wake_a_sleeping_core_and_survive_its_pauses() {
    if !allowed() {
        return;
    }
    let mut hosts = hosts();
    hosts.core.notify(Notify::Notified);
    let mut host = Host::with(&hosts.switch, "guest", |options| options.mac = Some(mac(7)));
    // Guest to kernel: an ARP request, which the kernel answers. One at a time, with the core asleep in between.
    let mut request = frame(BROADCAST, mac(7), &[0; 28]);
    request[12..14].copy_from_slice(&0x0806u16.to_be_bytes());
    request[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
    request[22..28].copy_from_slice(&mac(7));
    request[28..32].copy_from_slice(&[10, 9, 0, 7]);
    request[38..42].copy_from_slice(&[10, 9, 0, 1]);
    let ask = |host: &mut Host| {
        host.send(&request);
        let mut answered = false;
        eventually("the kernel answers", || {
            answered |=
                host.take_all().iter().any(|frame| frame[12..14] == [8, 6] && frame[20..22] == [0, 2]);
            answered
        });
    };
    for _ in 0..50 {
        ask(&mut host);
    }
    // Both uplinks pause: what is sent meanwhile waits for them.
    for side in [&mut hosts.left, &mut hosts.right] {
        let running = side.running.take().unwrap();
        let quiescent = running.quiesce(Instant::now() + Duration::from_secs(20)).unwrap();
        let state = quiescent.save().unwrap();
        host.send(&request);
        let loaded = quiescent.load(&state).unwrap();
        side.running = Some(loaded.start(&hosts.core).unwrap());
    }
    ask(&mut host);
    // 51 asked, and two while one or the other paused.
    let port = hosts.left.port.clone();
    eventually("every request has reached the kernel", || port.reading().received.frames >= 53);
    assert_eq!(port.reading().received.dropped_in_all(), 0);
    // The host's side goes down: frames are dropped there, by name.
    hosts.left.world.run(|| ip("link set ioplane1 down"));
    host.send(&request);
    eventually("a frame to a device that is down is counted", || {
        port.reading().received.dropped(DropReason::Down) > 0
    });
}

#[test]
fn a_tap_that_is_gone_is_refused_by_name() {
    if !allowed() {
        return;
    }
    let world = World::new();
    world.run(|| {
        let switch = switch();
        let first = Tap::open("ioplane3", &switch, PortOptions::new("up")).unwrap();
        let busy = Tap::open("ioplane3", &switch, PortOptions::new("again")).unwrap_err();
        assert!(busy.to_string().contains("tap ioplane3"), "{busy}");
        let taken = Tap::open("ioplane4", &switch, PortOptions::new("up")).unwrap_err();
        assert!(taken.to_string().contains("called up"), "{taken}");
        drop(first);
        // A process that another test has just forked off has it too, until it runs its own program.
        eventually("the device is free again", || {
            Tap::open("ioplane3", &switch, PortOptions::new("again")).is_ok()
        });
    });
}

/// A deleted device is "readable" for ever. The core sleeps all the same, and the other uplink works.
#[test]
fn a_device_that_is_deleted_takes_its_link_down_and_lets_the_core_sleep() {
    if !allowed() {
        return;
    }
    let hosts = hosts();
    hosts.left.world.run(|| ip("link delete ioplane1"));
    let port = hosts.left.port.clone();
    eventually("the link is down", || !port.is_up());
    eventually("the core sleeps and nothing wakes it", || {
        let before = hosts.core.read();
        std::thread::sleep(Duration::from_millis(50));
        let after = hosts.core.read();
        after.awake == 0 && (after.wakes, after.short_sleeps) == (before.wakes, before.short_sleeps)
    });
    assert!(hosts.right.port.is_up());
}

/// A core with one slot that the test steps.
#[expect(clippy::disallowed_types, reason = "the slot of a test that has one thread")]
#[derive(Debug, Clone, Default)]
struct SteppedCore(Arc<std::sync::Mutex<(Vec<PollerSlot>, CoreContext)>>);

impl CoreSender for SteppedCore {
    fn core(&self) -> CoreId {
        CoreId(9)
    }

    fn send(&self, message: CoreMessage) -> Result<(), CoreEnded> {
        let (slots, context) = &mut *self.0.lock().unwrap();
        match message {
            CoreMessage::Attach(slot) => slots.push(slot),
            CoreMessage::Poller(_, command) => slots[0].handle(context, command),
            CoreMessage::Group(_) | CoreMessage::Device(_) => {}
        }
        Ok(())
    }
}

impl Placement for SteppedCore {
    fn place(&self, _: &str, _: u16) -> Arc<dyn CoreSender> {
        Arc::new(self.clone())
    }
}

impl SteppedCore {
    fn step(&self) -> PollOutcome {
        let (slots, context) = &mut *self.0.lock().unwrap();
        slots[0].step(context, Budget::of(64))
    }
}

/// Each frame is a system call in which the host's network does its work.
#[test]
fn hole_05_one_poll_of_a_tap_makes_a_bounded_number_of_calls_and_moves_a_bounded_number_of_bytes() {
    const CALLS: u64 = 32;
    const BYTES: u64 = (256 << 10) + (64 << 10);
    if !allowed() {
        return;
    }
    let (world, switch, desk) = (World::new(), switch(), SteppedCore::default());
    let plugged = switch.clone();
    let tap = world.run(move || {
        let tap = Tap::open("ioplane5", &plugged, PortOptions::new("ioplane5")).unwrap();
        ip("addr add 10.9.5.1/24 dev ioplane5");
        ip("link set ioplane5 up");
        tap
    });
    let port = tap.port().clone();
    let running = Quiescent::new(tap).resume(&desk).unwrap();
    let mut host = Host::with(&switch, "host", |options| options.mtu = 65_500);
    // To the host: whatever it makes of it, small ones and large ones.
    port.set_mtu(65_500);
    for (count, len) in [(64, 60), (32, 60_000)] {
        for _ in 0..count {
            assert_eq!(
                host.add(&frame(mac(77), mac(1), &vec![1; len]), ioplane_network::Offload::NONE),
                Sent::Delivered(1)
            );
        }
        host.port_tx.flush();
        let taken = || {
            let received = port.reading().received;
            received.frames + received.dropped_in_all()
        };
        let (begun, mut steps) = (taken(), 0);
        // Counts are added up when a buffer is empty: whatever is waiting at last is the poll's that took it.
        while port.reading().waiting > 0 || taken() - begun < count {
            let before = taken();
            let calls = desk.step().units();
            if calls == 0 {
                continue;
            }
            desk.0.lock().unwrap().0[0].tidy();
            let now = taken() - before;
            assert!(u64::from(calls) <= 2 * CALLS && now <= CALLS, "{calls} calls, {now} frames in one poll");
            assert!(now * len as u64 <= BYTES, "{now} frames of {len} bytes in one poll");
            steps += 1;
        }
        assert!(steps > 1);
    }
    // From the host.
    world.run(|| {
        let socket = UdpSocket::bind("10.9.5.1:0").unwrap();
        socket.set_broadcast(true).unwrap();
        for _ in 0..200 {
            socket.send_to(&[1; 1000], "10.9.5.255:9").unwrap();
        }
    });
    let mut came = 0;
    while came < 200 {
        let before = port.reading().sent;
        desk.step();
        let now = port.reading().sent;
        let frames = now.frames + now.dropped_in_all() - before.frames - before.dropped_in_all();
        assert!(frames <= CALLS, "{frames} frames in one poll");
        came += frames;
        host.take_all();
    }
    drop(running);
}
