//! The ring of a core: completions wake their slot, whatever the core does meanwhile, and what a poller leaves behind is seen to its end.
//!
//! A pipe is the disk: it is silent until something is written.

#![allow(unsafe_code)]
// UNSAFETY: reads into memory that is never given back.

mod counter;

use std::collections::VecDeque;
use std::io::{PipeReader, PipeWriter, Write, pipe};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use counter::{Counter, Line, eventually, soon};
use ioplane_cores::{Core, CoreSettings, Notify, PoolError, RingChoice, context_with_ring};
use ioplane_device::{CoreId, CoreIo, FileOp, IoHandle, QueueSet, Running};

/// The best, and the one of older kernels. Where io_uring is forbidden both are none, and these tests say so.
const RINGS: [RingChoice; 2] = [RingChoice::Best, RingChoice::Plain];

fn core(ring: RingChoice, notify: Notify, spin: Duration) -> Core {
    Core::start(CoreId(0), CoreSettings { ring, notify, spin, ..CoreSettings::default() }).unwrap()
}

/// A queue that reads from a pipe, once it has begun to.
fn reading(core: &Core) -> (Running<Counter>, Arc<Line>, PipeWriter) {
    let (from, to) = pipe().unwrap();
    let (running, line) = Counter::run_reading(from.into(), core);
    eventually("is not polled", || line.polls.load(Ordering::Relaxed) > 0);
    (running, line, to)
}

/// Has its queue leave the core at once.
fn suspend(mut running: Running<Counter>) {
    running.suspend(&QueueSet::from([0]));
    running.quiesce(soon()).unwrap();
}

fn read(line: &Line) -> u64 {
    line.read.load(Ordering::Relaxed)
}

#[test]
fn a_completion_wakes_a_slot_that_rests_one_that_is_polled_and_one_that_waits() {
    for ring in RINGS {
        let spins = [Duration::ZERO, Duration::from_secs(3600)];
        let ways = [(Notify::Notified, spins[0]), (Notify::Polled, spins[0]), (Notify::Polled, spins[1])];
        for (notify, spin) in ways {
            let core = core(ring, notify, spin);
            let (running, line, mut pipe) = reading(&core);
            if spin.is_zero() {
                eventually("does not sleep", || core.read().awake == 0 && core.read().sleeps > 0);
            } else {
                eventually("does not sleep", || core.read().waits > 0);
            }
            pipe.write_all(&[7; 8]).unwrap();
            eventually("hears nothing of a completion", || read(&line) == 1);
            // Of kicks it hears as well.
            for _ in 0..100 {
                line.publish();
                line.wait();
            }
            running.quiesce(soon()).unwrap();
            core.retire(soon()).unwrap();
        }
    }
}

#[test]
fn what_a_suspended_poller_leaves_in_flight_is_kept_until_it_has_ended() {
    for ring in RINGS {
        let core = core(ring, Notify::Polled, Duration::from_millis(1));
        let (running, line, mut pipe) = reading(&core);
        suspend(running);
        // Its neighbour notices nothing.
        let (neighbour, lines) = Counter::run(1, &core);
        for _ in 0..100 {
            lines[0].publish();
            lines[0].wait();
        }
        neighbour.quiesce(soon()).unwrap();
        // The core stays for what is in flight, though nobody has a queue there.
        let stays = core.retire(Instant::now() + Duration::from_millis(50));
        assert!(matches!(stays, Err(PoolError::Occupied { .. })), "{stays:?}");
        assert_eq!(line.given_up.load(Ordering::SeqCst), 0, "given up while the kernel may write there");
        pipe.write_all(&[7; 8]).unwrap();
        eventually("is never given up", || line.given_up.load(Ordering::SeqCst) == 1);
        assert_eq!(read(&line), 0, "nobody is told how it ended");
        core.retire(soon()).unwrap();
    }
}

#[test]
fn a_core_that_is_dropped_ends_when_the_last_orphan_has() {
    for ring in RINGS {
        let settings = CoreSettings { ring, notify: Notify::Notified, ..CoreSettings::default() };
        let core = Core::start(CoreId(47), settings).unwrap();
        let (running, line, mut pipe) = reading(&core);
        suspend(running);
        drop(core);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(line.given_up.load(Ordering::SeqCst), 0);
        pipe.write_all(&[7; 8]).unwrap();
        eventually("is never given up", || line.given_up.load(Ordering::SeqCst) == 1);
        let lives = || {
            let threads = std::fs::read_dir("/proc/self/task").unwrap();
            let name = |thread: std::io::Result<std::fs::DirEntry>| {
                std::fs::read_to_string(thread.ok()?.path().join("comm")).ok()
            };
            threads.filter_map(name).any(|name| name.trim() == "ioplane-core-47")
        };
        eventually("the core does not end", || !lives());
    }
}

#[test]
fn a_thousand_queues_come_and_go_and_each_hears_only_of_its_own() {
    for ring in RINGS {
        let core = core(ring, Notify::Polled, Duration::from_millis(1));
        for round in 0..200 {
            let mut queues: Vec<_> = (0..5).map(|_| reading(&core)).collect();
            // One of them leaves with its read in flight, which ends when another has its place on the ring.
            let (running, left, mut late) = queues.swap_remove(round % 5);
            suspend(running);
            let (running, line, mut pipe) = reading(&core);
            late.write_all(&[7; 8]).unwrap();
            eventually("is never given up", || left.given_up.load(Ordering::SeqCst) == 1);
            assert_eq!(read(&line), 0, "told of the end of another's");
            pipe.write_all(&[7; 8]).unwrap();
            eventually("hears nothing", || read(&line) == 1);
            running.quiesce(soon()).unwrap();
            for (running, line, mut pipe) in queues {
                pipe.write_all(&[7; 8]).unwrap();
                eventually("hears nothing", || read(&line) == 1);
                running.quiesce(soon()).unwrap();
            }
        }
    }
}

/// Submits reads until one is refused, or so many. Says how many were taken.
fn take(io: &mut dyn CoreIo, handle: IoHandle, from: &PipeReader, most: u16) -> u16 {
    let into: &'static mut u8 = Box::leak(Box::new(0));
    let op = FileOp::Read { file: from.as_raw_fd(), into, len: 1, offset: 0 };
    // SAFETY: the memory is never given back.
    (0..most).take_while(|tag| unsafe { io.submit(handle, *tag, op) }).count() as u16
}

#[test]
fn a_silent_disk_of_many_queues_leaves_others_their_share_of_the_ring() {
    const QUEUES: usize = 64;
    const RING: u16 = 1024;
    for ring in RINGS {
        let mut context = context_with_ring(ring).unwrap();
        let Some(io) = context.io() else { return eprintln!("SKIPPED (cannot be had here): io_uring") };
        let (silent, _to) = pipe().unwrap();
        let attach = |io: &mut dyn CoreIo| io.attach(0, VecDeque::with_capacity(RING.into()));
        let neighbour = attach(io);
        let disk: Vec<_> = (0..QUEUES).map(|_| attach(io)).collect();
        let taken = disk.iter().map(|queue| u32::from(take(io, *queue, &silent, RING))).sum::<u32>();
        assert!(taken > 12_000, "{ring:?}: {taken} are few for so many queues");
        let share = take(io, neighbour, &silent, RING);
        assert!(share > 100, "{ring:?}: {share} are left to a neighbour");
        // Not even what comes later takes all of it.
        for _ in 0..QUEUES {
            let queue = attach(io);
            assert!(take(io, queue, &silent, RING) >= 8);
        }
        let newcomer = attach(io);
        assert_eq!(take(io, newcomer, &silent, RING), 8, "{ring:?}: nothing is left to who comes late");
    }
}
