//! What one interrupt by an eventfd costs, by each way that could be taken: `cargo run -p ioplane-host --example signal_cost`.
//!
//! Ways that never wait whatever the peer does to the descriptor's flags are marked `safe`. See docs/decisions/0015.
#![allow(unsafe_code)]
// UNSAFETY: system calls that no crate wraps, for a measurement.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Barrier;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};

/// `struct iocb` of linux/aio_abi.h, little-endian.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: i32,
    opcode: u16,
    reqprio: i16,
    fildes: u32,
    buf: u64,
    nbytes: u64,
    offset: i64,
    reserved2: u64,
    flags: u32,
    resfd: u32,
}

const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const POLL: u16 = 5;

struct Aio(usize);

impl Aio {
    fn new() -> Self {
        let mut id = 0usize;
        // SAFETY: the kernel writes one word.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, 1024, &mut id) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
        Aio(id)
    }

    fn submit(&self, iocbs: &[Iocb]) {
        let mut list = [std::ptr::null(); 32];
        for (slot, iocb) in list.iter_mut().zip(iocbs) {
            *slot = std::ptr::from_ref(iocb);
        }
        // SAFETY: as many as are there.
        let done = unsafe { libc::syscall(libc::SYS_io_submit, self.0, iocbs.len(), list.as_ptr()) };
        assert_eq!(done, iocbs.len() as i64, "{}", std::io::Error::last_os_error());
        let ring = self.0 as *mut u32;
        // SAFETY: the context's number is the address of its ring: id, nr, head, tail.
        unsafe { ring.add(2).write_volatile(ring.add(3).read_volatile()) };
    }
}

fn fresh() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn empty(file: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    rustix::io::read(file, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

const ROUNDS: u32 = 1000;
const TRIES: usize = 300;

/// Processor time of this thread, ns: a busy machine does not count.
fn spent() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Nanoseconds of processor time per signal: the median of many short tries, each way in turn.
fn measure(ways: &mut [(&str, &mut dyn FnMut(), u64)], call: &OwnedFd) {
    let mut times = vec![Vec::new(); ways.len()];
    for _ in 0..TRIES {
        for ((_, way, each), times) in ways.iter_mut().zip(&mut times) {
            empty(call);
            let begun = spent();
            for _ in 0..ROUNDS {
                way();
            }
            times.push((spent() - begun) as f64 / f64::from(ROUNDS) / *each as f64);
        }
    }
    let medians: Vec<f64> = times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect();
    for ((name, ..), median) in ways.iter().zip(&medians) {
        println!("{name:58} {median:8.0} ns  {:5.2}", median / medians[0]);
    }
}

fn main() {
    let call = fresh();
    let null = OwnedFd::from(std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap());
    let zero = OwnedFd::from(std::fs::File::open("/dev/zero").unwrap());
    let ready = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    let one = 1u64.to_ne_bytes();
    let aio = Aio::new();
    let iocb = |opcode, fildes: &OwnedFd, buf: u64| Iocb {
        opcode,
        fildes: fildes.as_raw_fd() as u32,
        buf,
        flags: 1,
        resfd: call.as_raw_fd() as u32,
        ..Iocb::default()
    };
    let write = iocb(PWRITE, &null, 0);
    let read = iocb(PREAD, &zero, 0);
    let poll = iocb(POLL, &ready, 1);
    let eight = [write; 8];
    let mut nops = io_uring::IoUring::new(8).unwrap();
    nops.submitter().register_eventfd(call.as_raw_fd()).unwrap();
    let mut writes = io_uring::IoUring::new(8).unwrap();
    let entry = io_uring::opcode::Write::new(io_uring::types::Fd(call.as_raw_fd()), one.as_ptr(), 8).build();
    let event = fresh();
    let mut ways: [(&str, &mut dyn FnMut(), u64); 10] = [
        ("write, trusting O_NONBLOCK", &mut || _ = rustix::io::write(&call, &one), 1),
        (
            "poll(POLLOUT), then write (the peer fills it in between)",
            &mut || {
                let files = &mut [PollFd::new(&call, PollFlags::OUT)];
                let _ = rustix::event::poll(files, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
                let _ = rustix::io::write(&call, &one);
            },
            1,
        ),
        ("safe: io_submit, write of nothing to /dev/null", &mut || aio.submit(&[write]), 1),
        ("safe: io_submit, read of nothing from /dev/zero", &mut || aio.submit(&[read]), 1),
        ("safe: io_submit, poll of a ready eventfd", &mut || aio.submit(&[poll]), 1),
        ("safe: io_submit, eight at once, each", &mut || aio.submit(&eight), 8),
        (
            "safe: io_uring of its own, no-op, registered eventfd",
            &mut || {
                // SAFETY: no memory in it.
                unsafe { nops.submission().push(&io_uring::opcode::Nop::new().build()).unwrap() };
                nops.submit().unwrap();
                nops.completion().for_each(drop);
            },
            1,
        ),
        (
            "io_uring write (kernel looks at the flag, then again)",
            &mut || {
                // SAFETY: the bytes live on.
                unsafe { writes.submission().push(&entry).unwrap() };
                writes.submit_and_wait(1).unwrap();
                writes.completion().for_each(drop);
            },
            1,
        ),
        (
            "safe: a relay, its own eventfd only (plus its wake-up)",
            &mut || _ = rustix::io::write(&event, &one),
            1,
        ),
        ("clock read, for scale", &mut || _ = std::hint::black_box(Instant::now()), 1),
    ];
    println!("{:58} {:>11}  ratio", "", "per signal");
    measure(&mut ways, &call);

    // With O_NONBLOCK off, not full: what io_uring's write costs then.
    rustix::fs::fcntl_setfl(&call, rustix::fs::OFlags::empty()).unwrap();
    for round in 0..3 {
        let begun = Instant::now();
        for _ in 0..2000 {
            // SAFETY: the bytes live on.
            unsafe { writes.submission().push(&entry).unwrap() };
            writes.submit_and_wait(1).unwrap();
            writes.completion().for_each(drop);
        }
        if round == 2 {
            let each = begun.elapsed().as_nanos() as f64 / 2000.0;
            println!("{:58} {each:8.0} ns", "io_uring write, O_NONBLOCK off");
        }
    }
    // Full and without O_NONBLOCK: it returns, and the counter saturates.
    empty(&call);
    rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    let begun = Instant::now();
    for _ in 0..1000 {
        aio.submit(&[write]);
    }
    println!(
        "{:58} {:8.0} ns",
        "io_submit, full and O_NONBLOCK off",
        begun.elapsed().as_nanos() as f64 / 1000.0
    );
    println!("counter after that: {:#x}", empty(&call));

    // Latency of a relay: from the core's write to the client's eventfd being readable.
    let (event, out) = (fresh(), fresh());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let files = &mut [PollFd::new(&event, PollFlags::IN)];
                let _ = rustix::event::poll(files, None);
                empty(&event);
                let _ = rustix::io::write(&out, &one);
            }
        });
        let mut times = Vec::new();
        for _ in 0..2000 {
            let begun = Instant::now();
            rustix::io::write(&event, &one).unwrap();
            while empty(&out) == 0 {}
            times.push(begun.elapsed().as_nanos());
        }
        times.sort();
        println!("relay: half of the signals within {} ns, 99 % within {} ns", times[1000], times[1980]);
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        rustix::io::write(&event, &one).unwrap();
    });

    // Two threads, one context or two.
    for shared in [false, true] {
        let others = Aio::new();
        let barrier = Barrier::new(2);
        let run = |aio: &Aio| {
            let call = fresh();
            let iocb = Iocb { resfd: call.as_raw_fd() as u32, ..write };
            barrier.wait();
            let begun = spent();
            for _ in 0..200_000 {
                aio.submit(&[iocb]);
            }
            (spent() - begun) as f64 / 200_000.0
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| run(if shared { &aio } else { &others }));
            let (a, b) = (run(&aio), other.join().unwrap());
            println!(
                "two threads, {}: {a:.0} and {b:.0} ns",
                if shared { "one context" } else { "a context each" }
            );
        });
    }
}
