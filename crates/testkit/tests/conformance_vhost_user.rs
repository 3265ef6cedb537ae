//! What vhost-user alone has beside the suite: the dirty log switched on and off, bad logs, and a reset under the same
//! features.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_host::vhost_user::{Handle, ServerOptions, serve};
use ioplane_memory::{DirtyLog, PAGE};
use ioplane_storage::MemoryBacking;
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::{F_LOG_ALL, FrontEnd, FrontEndRequest, Wants, protocol};
use ioplane_virtio::blk::{Blk, BlkOptions};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const MIB: u64 = 1 << 20;

struct Served {
    runtime: tokio::runtime::Runtime,
    handle: Handle<Blk>,
    _directory: tempfile::TempDir,
}

impl Served {
    fn new() -> Self {
        // One that asks for kicks when it will would mark the log as well.
        let settings = CoreSettings { notify: Notify::Polled, ..CoreSettings::default() };
        let pool = Arc::new(Pool::with([settings]).unwrap());
        let directory = tempfile::tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
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
            serve(Blk::new(options, MemoryBacking::new(MIB).unwrap()), server).unwrap()
        };
        Served { runtime, handle, _directory: directory }
    }

    fn front(&self, protocol: u64) -> FrontEnd {
        let wants = Wants::default();
        FrontEnd::connect(self.handle.socket(), Wants { protocol: wants.protocol | protocol, ..wants })
            .unwrap()
    }

    /// Waits until a fault of that name has been counted and the connection is gone.
    fn until_faulted(&self, name: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let status = self.runtime.block_on(self.handle.status()).unwrap();
            if status.faults.contains_key(name) && !status.connected {
                return;
            }
            assert!(Instant::now() < deadline, "{name}: {status:?}");
            std::thread::yield_now();
        }
    }
}

fn file(len: u64) -> OwnedFd {
    let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, len).unwrap();
    file
}

fn set_log_base(front: &FrontEnd, file: &OwnedFd, len: u64) -> bool {
    let body = [len.to_ne_bytes(), [0; 8]].concat();
    front.wire().send(FrontEndRequest::SET_LOG_BASE as u32, 0, &body, &[file.as_fd()]).unwrap();
    front.wire().reply(FrontEndRequest::SET_LOG_BASE).is_ok()
}

fn boot(front: &mut FrontEnd) -> (GuestMemory, Disk) {
    let mut memory = GuestMemory::new(MIB).unwrap();
    front.share(&memory).unwrap();
    let plan = DiskPlan::new(8, 4096, Shape::Indirect);
    let disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan).unwrap();
    front.start(0, &memory, disk.place(), 0).unwrap();
    (memory, disk)
}

fn read(front: &mut FrontEnd, disk: &mut Disk) {
    disk.submit(DiskOp::Read, 0, 4096).unwrap();
    if disk.ring().kick_needed() {
        front.kick(0);
    }
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(done) = disk.reap().unwrap() {
            return assert!(done.ok());
        }
        assert!(Instant::now() < deadline, "no answer");
        std::thread::yield_now();
    }
}

#[test]
fn the_log_is_on_from_the_acknowledgement_to_the_next() {
    let served = Served::new();
    let mut front = served.front(protocol::LOG_SHMFD);
    let (memory, mut disk) = boot(&mut front);
    let len = (memory.view().map().limit() / PAGE / 8).next_multiple_of(PAGE);
    let (first, second) = (file(len), file(len));
    let log = |file: &OwnedFd| DirtyLog::of_file(file.try_clone().unwrap(), 0, len).unwrap();
    let (marks, later) = (log(&first), log(&second));
    assert!(set_log_base(&front, &first, len));
    read(&mut front, &mut disk);
    assert_eq!(marks.take(), [0u64; 0], "a log that is not switched on");
    let switch = |front: &FrontEnd, features: u64| {
        front.tell(FrontEndRequest::SET_FEATURES, &features.to_ne_bytes(), &[]).unwrap();
    };
    switch(&front, front.features() | F_LOG_ALL);
    read(&mut front, &mut disk);
    assert!(marks.is_marked(disk.place().used) && !marks.take().is_empty());
    assert!(set_log_base(&front, &second, len), "a larger log in the place of the first");
    read(&mut front, &mut disk);
    assert!(marks.take().is_empty() && later.is_marked(disk.place().used));
    switch(&front, front.features());
    later.take();
    read(&mut front, &mut disk);
    assert_eq!(later.take(), [0u64; 0], "switched off");
    // Other features are not changed under rings that run.
    assert!(
        front
            .tell(FrontEndRequest::SET_FEATURES, &(front.features() ^ (1 << 29)).to_ne_bytes(), &[])
            .is_err()
    );
    served.until_faulted("bad_features");
}

#[test]
fn bad_logs_end_their_connection() {
    let served = Served::new();
    assert!(!set_log_base(&served.front(0), &file(PAGE), PAGE));
    served.until_faulted("not_negotiated");
    for len in [0, u64::MAX, 1 << 40] {
        assert!(!set_log_base(&served.front(protocol::LOG_SHMFD), &file(PAGE), len), "{len:#x}");
        served.until_faulted("bad_memory");
    }
    let mut front = served.front(protocol::LOG_SHMFD);
    let (_memory, mut disk) = boot(&mut front);
    read(&mut front, &mut disk);
}

#[test]
fn after_a_reset_the_same_features_hold() {
    let served = Served::new();
    let mut front = served.front(0);
    let (memory, mut disk) = boot(&mut front);
    read(&mut front, &mut disk);
    front.reset().unwrap();
    // As QEMU does: the same features once more, then the ring. Its requests lie in indirect tables.
    front.tell(FrontEndRequest::SET_FEATURES, &front.features().to_ne_bytes(), &[]).unwrap();
    disk.reset().unwrap();
    front.start(0, &memory, disk.place(), 0).unwrap();
    read(&mut front, &mut disk);
}
