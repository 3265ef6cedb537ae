//! What a migration copies is what there is: pages are copied once, then those that the dirty log names, and then source and
//! destination are equal page by page. The log is switched on while reads are in flight; without its marks (invariant 6) pages
//! differ.
//!
//! One test, since the invariant is taken out of the whole process.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_device::mutation::{self, Invariant};
use ioplane_host::vhost_user::{ServerOptions, serve};
use ioplane_memory::{DirtyLog, PAGE};
use ioplane_storage::filter::Stall;
use ioplane_storage::{Backing, MemoryBacking};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{F_LOG_ALL, FrontEnd, FrontEndRequest, Wants, protocol};
use ioplane_virtio::blk::{Blk, BlkOptions};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const MIB: u64 = 1 << 20;
const SIZE: u16 = 128;
const READS: u16 = 16;
const LIMIT: Duration = Duration::from_secs(120);

/// When the front end switches the log on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// Before the reads are asked for.
    Before,
    /// While they are in flight.
    Meanwhile,
}

/// All of a guest's memory.
fn image(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = Vec::new();
    for region in memory.regions() {
        let mut part = vec![0; region.len as usize];
        let read = rustix::io::pread(region.file(), &mut part, region.offset).unwrap();
        assert_eq!(read as u64, region.len);
        bytes.extend(part);
    }
    bytes
}

fn until(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !so() {
        assert!(Instant::now() < deadline, "it does not come about that {what}");
        std::thread::yield_now();
    }
}

/// Migrates memory under a device that reads into it; says how many pages differ in the end, and how many the log named.
fn migrate(shape: Shape, when: When) -> (usize, usize) {
    let backing = MemoryBacking::new(MIB).unwrap();
    let stalled = Stall::new(backing as Arc<dyn Backing>);
    let pool =
        Arc::new(Pool::with([CoreSettings { notify: Notify::Polled, ..CoreSettings::default() }]).unwrap());
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let options = BlkOptions {
        name: "disk".into(),
        serial: "serial".into(),
        queues: 1,
        queue_size: 128,
        read_only: false,
        logical_block: None,
    };
    let server =
        ServerOptions { dirty_log: true, ..ServerOptions::new(directory.path().join("disk.sock"), pool) };
    let handle = {
        let _inside = runtime.enter();
        serve(Blk::new(options, stalled.clone()), server).unwrap()
    };
    let wants = Wants::default();
    let wants = Wants { protocol: wants.protocol | protocol::LOG_SHMFD, ..wants };
    let mut front = FrontEnd::connect(handle.socket(), wants).unwrap();
    let mut memory = GuestMemory::new(2 * MIB).unwrap();
    front.track_inflight(1, SIZE).unwrap();
    front.share(&memory).unwrap();
    let plan = DiskPlan { slots: READS, max_bytes: 16384, segments: 4, shape };
    let mut disk = Disk::new(&mut memory, SIZE, RingMode::of(front.features()), plan).unwrap();
    front.start(0, &memory, disk.place(), 0).unwrap();

    // Something to read that no fresh page has.
    let token = disk.next().unwrap();
    disk.write_data(token, &[0xa5; 16384]).unwrap();
    disk.submit(DiskOp::Write, 0, 16384).unwrap();
    front.kick(0);
    until("the write is answered", || disk.reap().unwrap().is_some());
    disk.write_data(token, &[0; 16384]).unwrap();

    let len = (memory.view().map().limit() / PAGE / 8).next_multiple_of(PAGE);
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    let marks = DirtyLog::of_file(file.try_clone().unwrap(), 0, len).unwrap();
    let switch_on = |front: &FrontEnd| {
        let body = [len.to_ne_bytes(), [0; 8]].concat();
        front.wire().send(FrontEndRequest::SET_LOG_BASE as u32, 0, &body, &[file.as_fd()]).unwrap();
        front.wire().reply(FrontEndRequest::SET_LOG_BASE).unwrap();
        let features = front.features() | F_LOG_ALL;
        front.tell(FrontEndRequest::SET_FEATURES, &features.to_ne_bytes(), &[]).unwrap();
    };
    if when == When::Before {
        switch_on(&front);
    }
    stalled.stall();
    for _ in 0..READS {
        disk.submit(DiskOp::Read, 0, 16384).unwrap();
    }
    front.kick(0);
    until("all reads are in flight", || front.marked(0) == Some(usize::from(READS)));
    if when == When::Meanwhile {
        switch_on(&front);
    }

    // The first pass copies everything; what the guest itself writes is the VMM's to know, and it writes nothing now.
    marks.take();
    let mut copy = image(&memory);
    stalled.release();
    until("all reads are answered", || front.marked(0) == Some(0));
    front.stop(0).unwrap();
    let source = image(&memory);
    let dirty = marks.take();
    for page in &dirty {
        let at = (page - memory.regions()[0].gpa) as usize;
        let range = at..at + PAGE as usize;
        copy[range.clone()].copy_from_slice(&source[range]);
    }
    assert!(source.chunks(16384).any(|part| part.contains(&0xa5)), "nothing was read");
    let pages = source.chunks(PAGE as usize).zip(copy.chunks(PAGE as usize));
    (pages.filter(|(here, there)| here != there).count(), dirty.len())
}

#[test]
fn memory_is_equal_after_a_migration_and_is_not_without_the_marks() {
    for shape in [Shape::Direct, Shape::Indirect] {
        for when in [When::Before, When::Meanwhile] {
            let (differ, dirty) = migrate(shape, when);
            assert_eq!(differ, 0, "{shape:?} {when:?}: pages that the log does not name");
            assert!(
                dirty >= 4 * usize::from(READS),
                "{shape:?} {when:?}: {dirty} pages for 64 that were read into"
            );
        }
    }
    mutation::remove(Some(Invariant::MarksStores));
    let (differ, dirty) = migrate(Shape::Indirect, When::Meanwhile);
    mutation::remove(None);
    assert!(
        differ >= 4 * usize::from(READS) && dirty == 0,
        "{differ} pages differ without marks, {dirty} named"
    );
}
