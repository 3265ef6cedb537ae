//! Block status: what clients hear of holes, and that nobody else waits for it.

#![allow(clippy::disallowed_types, reason = "a gate of the test's own, off any core")]

mod support;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ioplane_cores::Notify;
use ioplane_nbd::export::{ConnectionEnd, ExportOptions};
use ioplane_nbd::spec::*;
use ioplane_storage::{
    Backing, BackingInfo, Direct, DiskExtent, FileBacking, FileOptions, IoChannel, MemoryBacking, Raw,
    StorageError,
};
use support::*;

const SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;

/// A disk whose file system says these parts, again and again, when it is let.
#[derive(Debug)]
struct Scripted {
    below: Arc<MemoryBacking>,
    parts: Vec<DiskExtent>,
    open: Mutex<bool>,
    opened: Condvar,
    asked: AtomicUsize,
}

impl Scripted {
    fn new(parts: &[(u64, bool)], open: bool) -> Arc<Scripted> {
        Arc::new(Scripted {
            below: MemoryBacking::new(SIZE).unwrap(),
            parts: parts
                .iter()
                .map(|(bytes, is_hole)| DiskExtent { bytes: *bytes, is_hole: *is_hole })
                .collect(),
            open: Mutex::new(open),
            opened: Condvar::new(),
            asked: AtomicUsize::new(0),
        })
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }

    fn wait_asked(&self, times: usize) {
        let end = Instant::now() + PATIENCE;
        while self.asked.load(Ordering::SeqCst) < times {
            assert!(Instant::now() < end, "it is not asked");
            std::thread::yield_now();
        }
    }
}

impl Backing for Scripted {
    fn info(&self) -> BackingInfo {
        self.below.info()
    }

    fn channel(&self, depth: u16) -> Result<Box<dyn IoChannel>, StorageError> {
        self.below.channel(depth)
    }

    fn resize(&self, bytes: u64) -> Result<(), StorageError> {
        self.below.resize(bytes)
    }

    fn wait_quiet(&self, deadline: Instant) -> bool {
        self.below.wait_quiet(deadline)
    }

    fn extents(&self, _offset: u64, _len: u64, each: &mut dyn FnMut(DiskExtent) -> bool) {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
        let _ = self.parts.iter().cycle().take(10_000).all(|part| each(*part));
    }
}

fn status(client: &mut Client, flags: u16, offset: u64, length: u32) -> Vec<(u32, bool)> {
    let context = client.connected.contexts[0].id;
    let reply = client.call(NBD_CMD_BLOCK_STATUS, flags, offset, length, &[]);
    assert_eq!(reply.error, 0, "{}", reply.message);
    let total: u64 = reply.extents.iter().map(|(_, extent)| u64::from(extent.length)).sum();
    assert!(total <= length.into() && !reply.extents.is_empty(), "{:?}", reply.extents);
    reply
        .extents
        .iter()
        .map(|(of, extent)| {
            assert!(*of == context && [0, NBD_STATE_HOLE | NBD_STATE_ZERO].contains(&extent.flags));
            (extent.length, extent.flags != 0)
        })
        .collect()
}

/// On memory, and on an image through the page cache and past it, each on both kinds of core.
fn each(test: impl Fn(&mut Server, &str)) {
    let folder = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let image = |name: &str, direct| -> Arc<dyn Backing> {
        let path: &Path = &folder.path().join(name);
        std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
        FileBacking::open(FileOptions { raw: Raw::Stated, direct, ..FileOptions::new(path) }).unwrap()
    };
    for notify in [Notify::Notified, Notify::Polled] {
        let disks: [(&str, Arc<dyn Backing>); 3] = [
            ("memory", MemoryBacking::new(SIZE).unwrap()),
            ("cached", image(&format!("cached-{notify:?}"), Direct::Off)),
            ("direct", image(&format!("direct-{notify:?}"), Direct::Auto)),
        ];
        for (name, disk) in disks {
            test(&mut Server::with(disk, ExportOptions::default(), notify), name);
        }
    }
}

#[test]
fn holes_are_told_and_what_was_written_is_none() {
    each(|server, name| {
        let (mut client, _) = server.connect(true);
        let (mut other, _) = server.connect(true);
        let length = SIZE as u32;
        assert_eq!(status(&mut client, 0, 0, length), [(length, true)], "{name}");
        assert_eq!(other.write(1 << 20, &pattern(0, 8192, 1)).error, 0);
        let rest = length - (1 << 20) - 8192;
        let expected = [(1 << 20, true), (8192, false), (rest, true)];
        assert_eq!(status(&mut client, 0, 0, length), expected, "{name}");
        assert_eq!(status(&mut client, NBD_CMD_FLAG_REQ_ONE, 0, length), [(1 << 20, true)]);
        assert_eq!(status(&mut client, NBD_CMD_FLAG_REQ_ONE, 1 << 20, 4096), [(4096, false)]);
        assert_eq!(status(&mut client, 0, (1 << 20) + 512, 512), [(512, false)]);
        assert_eq!(status(&mut client, 0, SIZE - 512, 512), [(512, true)]);
        // Given back, it is a hole again.
        assert_eq!(other.call(NBD_CMD_TRIM, 0, 1 << 20, 8192, &[]).error, 0);
        assert_eq!(status(&mut client, 0, 0, length), [(length, true)], "{name}");
        // Not without the context.
        let (mut plain, _) = server.connect(false);
        assert_eq!(plain.call(NBD_CMD_BLOCK_STATUS, 0, 0, 512, &[]).error, NBD_EINVAL);
        assert_eq!(client.call(NBD_CMD_BLOCK_STATUS, 0, SIZE, 512, &[]).error, NBD_EINVAL);
    });
}

/// At once after each write was answered, by a connection that knows nothing of it, and while others are written.
#[test]
fn data_that_was_answered_is_never_a_hole() {
    each(|server, name| {
        let (mut client, _) = server.connect(true);
        let (mut other, _) = server.connect(true);
        let mut dice = 0x2545_f491_4f6c_dd1du64;
        let mut written = vec![false; (SIZE / BLOCK) as usize];
        for round in 0..300 {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            let at = dice % (SIZE / BLOCK);
            assert_eq!(other.write(at * BLOCK, &pattern(at, BLOCK as usize, 3)).error, 0);
            written[at as usize] = true;
            // In flight while the question is answered.
            let beside = (at + 7) % (SIZE / BLOCK);
            let late = other.send(NBD_CMD_WRITE, 0, beside * BLOCK, 512, &[7; 512]);
            let mut from = 0;
            while from < SIZE {
                for (bytes, hole) in status(&mut client, 0, from, (SIZE - from) as u32) {
                    let blocks = (from / BLOCK) as usize..((from + u64::from(bytes)) / BLOCK) as usize;
                    let lost = hole && written[blocks.clone()].iter().any(|written| *written);
                    assert!(!lost, "{name}, round {round}: data in {blocks:?} is told as a hole");
                    from += u64::from(bytes);
                }
            }
            assert_eq!(other.reply().map(|reply| (reply.cookie, reply.error)), Some((late, 0)));
            written[beside as usize] = true;
        }
    });
}

#[test]
fn a_reply_has_so_many_extents_and_the_client_asks_on() {
    let disk = Scripted::new(&[(4096, false), (8192, true)], true);
    let mut server = Server::new(disk);
    let (mut client, _) = server.connect(true);
    let found = status(&mut client, 0, 0, SIZE as u32);
    assert_eq!(found.len(), 512);
    assert!(found.chunks(2).all(|pair| pair == [(4096, false), (8192, true)]));
    assert_eq!(status(&mut client, NBD_CMD_FLAG_REQ_ONE, 0, SIZE as u32), [(4096, false)]);
    assert_eq!(status(&mut client, 0, 0, 16384), [(4096, false), (8192, true), (4096, false)]);
    // A file system of blocks that the client does not know.
    let mut server = Server::new(Scripted::new(&[(100, false), (924, true)], true));
    let (mut client, _) = server.connect(true);
    assert_eq!(status(&mut client, 0, 0, 2048), [(512, false), (512, true), (512, false), (512, true)]);
}

/// Reads, writes and flushes of the same core, and of the same connection.
#[test]
fn a_file_system_that_takes_its_time_holds_up_nobody() {
    for notify in [Notify::Notified, Notify::Polled] {
        let disk = Scripted::new(&[(SIZE, true)], false);
        let mut server = Server::with(disk.clone(), ExportOptions::default(), notify);
        let (mut client, _) = server.connect(true);
        let (mut other, queue) = server.connect(true);
        let cookies = [0, 4096].map(|at| client.send(NBD_CMD_BLOCK_STATUS, 0, at, 4096, &[]));
        disk.wait_asked(1);
        for round in 0..50 {
            assert_eq!(client.write(round * BLOCK, &[1; 512]).error, 0);
            assert_eq!(other.call(NBD_CMD_FLUSH, 0, 0, 0, &[]).error, 0);
        }
        // One that leaves, and one that is parked and goes on, with a question that has not come to the thread.
        drop(other);
        assert_eq!(server.ended().queue, queue);
        let (mut third, third_queue) = server.connect(true);
        let last = third.send(NBD_CMD_BLOCK_STATUS, 0, 0, 512, &[]);
        assert_eq!(third.read(0, 512).error, 0);
        let queues = ioplane_device::QueueSet::from([third_queue]);
        server.running().suspend(&queues);
        assert!(server.running().wait_stopped(&queues, Instant::now() + PATIENCE));
        server.start(third_queue);
        std::thread::sleep(Duration::from_millis(20));
        disk.open();
        for cookie in cookies {
            let reply = client.reply().unwrap();
            assert_eq!((reply.cookie, reply.extents.len(), reply.error), (cookie, 1, 0));
        }
        let reply = third.reply().unwrap();
        assert_eq!((reply.cookie, reply.extents.len(), reply.error), (last, 1, 0));
        assert_eq!(status(&mut third, 0, 0, 1024), [(1024, true)]);
        third.disconnect();
        assert_eq!(server.ended().end, ConnectionEnd::Disconnected);
    }
}

/// A connection with a question under way rests when that is answered.
#[test]
fn a_drain_waits_for_the_answer() {
    let disk = Scripted::new(&[(SIZE, true)], false);
    let mut server = Server::new(disk.clone());
    let (mut client, queue) = server.connect(true);
    client.send(NBD_CMD_BLOCK_STATUS, 0, 0, 4096, &[]);
    disk.wait_asked(1);
    let queues = ioplane_device::QueueSet::from([queue]);
    server.running().drain(&queues);
    assert!(!server.running().wait_stopped(&queues, Instant::now() + Duration::from_millis(50)));
    disk.open();
    assert!(server.running().wait_stopped(&queues, Instant::now() + PATIENCE));
    assert_eq!(client.reply().unwrap().extents.len(), 1);
}
