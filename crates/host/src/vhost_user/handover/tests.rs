//! Devices on their way to another process, byte by byte: the other process is perhaps of another version.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Notify, Pool};
use ioplane_device::MeterReading;
use ioplane_storage::MemoryBacking;
use ioplane_storage::filter::Stall;
use ioplane_testkit::driver::net::{NetHeader, Pair, PairPlan};
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape};
use ioplane_testkit::front::protocol::LOG_SHMFD;
use ioplane_testkit::front::wire::FrontEndRequest;
use ioplane_testkit::front::{FrontEnd, Wants};
use ioplane_testkit::golden;
use ioplane_testkit::golden::Golden;
use ioplane_testkit::nic::Lan;
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::net::{Net, NetOptions};
use ioplane_virtio::spec::feature::{VHOST_F_LOG_ALL, VIRTIO_F_RING_PACKED};

use super::*;
use crate::vhost_user::{STOP_PATIENCE, serve};

const MIB: u64 = 1 << 20;
const SIZE: u16 = 16;
const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];
const OTHER: [u8; 6] = [2, 0, 0, 0, 0, 2];

/// Waits, but not for ever.
fn until<T>(mut met: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(met) = met() {
            return met;
        }
        assert!(Instant::now() < end, "it does not come");
        std::thread::yield_now();
    }
}

struct Host {
    runtime: tokio::runtime::Runtime,
    pool: Arc<Pool>,
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Host {
        let settings = CoreSettings {
            notify: Notify::Polled,
            spin: Duration::from_millis(1),
            ..CoreSettings::default()
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Host {
            runtime: runtime.unwrap(),
            pool: Arc::new(Pool::with([settings]).unwrap()),
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn options(&self) -> ServerOptions {
        let options = ServerOptions::new(self.folder.path().join("device.sock"), self.pool.clone());
        ServerOptions { dirty_log: true, ..options }
    }

    fn serve<V: VirtioDevice>(&self, model: V) -> Handle<V> {
        let _inside = self.runtime.enter();
        serve(model, self.options()).unwrap()
    }

    /// Brings a device to rest where `met` what is packed of it, and holds it.
    fn hold<V: VirtioDevice>(&self, handle: &Handle<V>, met: impl Fn(&Held) -> bool) -> Held {
        until(|| {
            let held = self.runtime.block_on(handle.hand_over(Duration::from_millis(20))).unwrap();
            if met(&held) {
                return Some(held);
            }
            self.runtime.block_on(held.take_back());
            None
        })
    }

    /// What is packed is what `golden` holds; the device goes on in a server for `model` from what `golden` holds.
    fn passes_by<V: VirtioDevice>(&self, held: Held, golden: &Golden, model: V) -> Handle<V> {
        let files = held.parcel.files.len();
        golden.check_parts(&[(format!("{files} descriptors"), regular(&held.parcel.bytes))]);
        let files = held.parcel.files.iter().map(|file| file.try_clone().unwrap()).collect();
        let parcel = Parcel { bytes: golden.part(""), files };
        held.give_away();
        let _inside = self.runtime.enter();
        let adopted = adopt(model, self.options(), STOP_PATIENCE, RingLease::default(), parcel).unwrap();
        let (handle, waited) = adopted.start();
        self.runtime.block_on(waited).unwrap();
        handle
    }
}

/// The counts of the golden files. They go by name, and a name that one side does not know is left out: a new one is no change of the format, but
/// one of these that is gone is.
const COUNTS: [&str; 13] = [
    "requests",
    "bytes_read",
    "bytes_written",
    "kicks",
    "kicks_avoided",
    "interrupts",
    "interrupts_avoided",
    "errors_io",
    "errors_space",
    "errors_request",
    "unsupported",
    "faults",
    "replayed",
];

/// Without what differs from run to run: the moment, the process, the counts, of which each has a number of its own here.
fn regular(bytes: &[u8]) -> Vec<u8> {
    let mut packed: ServerV1 = postcard::from_bytes(bytes).unwrap();
    packed.parked = 1_234_567_890_123;
    packed.connection.as_mut().unwrap().process = Some(4321);
    packed.faults = vec![("an-example".to_owned(), 2)];
    packed.last_fault = Some("an example in words".to_owned());
    for counts in &mut packed.session.counts {
        *counts = COUNTS.iter().zip(1..).map(|(name, n)| ((*name).to_owned(), n)).collect();
    }
    postcard::to_stdvec(&packed).unwrap()
}

fn blk(stall: &Arc<Stall>) -> Blk {
    let options = BlkOptions {
        name: "disk".to_owned(),
        serial: "serial".to_owned(),
        queues: 2,
        queue_size: 64,
        read_only: false,
        logical_block: None,
    };
    Blk::new(options, stall.clone())
}

/// Whether the journal of queue 0, of entries so long behind a header of the same length, has a request.
fn in_flight(front: &FrontEnd, entry: usize) -> bool {
    let region = front.inflight().unwrap();
    let mut bytes = vec![0; entry * (usize::from(SIZE) + 1)];
    rustix::io::pread(&region.file, &mut bytes, region.offset).unwrap();
    bytes.chunks(entry).skip(1).any(|entry| entry[0] == 1)
}

/// A disk with a write in flight, its journal and a dirty log, in two regions of memory.
fn disk(features: u64, golden: &Golden) {
    let (host, stall) = (Host::new(), Stall::new(MemoryBacking::new(MIB).unwrap()));
    let handle = host.serve(blk(&stall));
    let wants = Wants::default();
    let wants = Wants {
        features: wants.features | features | VHOST_F_LOG_ALL,
        protocol: wants.protocol | LOG_SHMFD,
        ..wants
    };
    let mut front = FrontEnd::connect(handle.socket(), wants).unwrap();
    let mut memory = GuestMemory::of(&[(0, MIB), (1 << 32, MIB)]).unwrap();
    front.track_inflight(2, SIZE).unwrap();
    front.share(&memory).unwrap();
    let log = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&log, 1 << 20).unwrap();
    let body = [(1u64 << 20).to_ne_bytes(), 0u64.to_ne_bytes()].concat();
    front.wire().send(FrontEndRequest::SET_LOG_BASE as u32, 0, &body, &[log.as_fd()]).unwrap();
    front.wire().reply(FrontEndRequest::SET_LOG_BASE).unwrap();
    let mode = RingMode::of(front.features());
    let plan = DiskPlan::new(4, 4096, Shape::Direct);
    let mut disks = [(); 2].map(|()| Disk::new(&mut memory, SIZE, mode, plan).unwrap());
    for (index, disk) in (0..).zip(&mut disks) {
        let (place, base) = (disk.place(), disk.ring().base());
        front.start(index, &memory, place, base).unwrap();
    }
    stall.stall();
    disks[0].write_data(disks[0].next().unwrap(), &[7; 4096]).unwrap();
    disks[0].submit(DiskOp::Write, 8, 4096).unwrap();
    front.kick(0);
    let entry = if features & VIRTIO_F_RING_PACKED != 0 { 32 } else { 16 };
    until(|| in_flight(&front, entry).then_some(()));
    let held = host.hold(&handle, |held| held.suspended);
    stall.release();
    let _next = host.passes_by(held, golden, blk(&stall));
    assert!(until(|| disks[0].reap().unwrap()).ok());
    assert_eq!(front.capacity().unwrap(), MIB / 512);
}

#[test]
fn each_count_of_the_golden_files_is_still_known() {
    let known: Vec<_> = MeterReading::default().each().map(|(name, _)| name).collect();
    assert_eq!(COUNTS.iter().find(|name| !known.contains(name)), None);
}

#[test]
fn a_disk_with_split_rings() {
    disk(0, &golden!("disk-split.parcel"));
}

#[test]
fn a_disk_with_packed_rings() {
    disk(VIRTIO_F_RING_PACKED, &golden!("disk-packed.parcel"));
}

#[test]
fn a_nic() {
    let host = Host::new();
    let Lan { port, mut neighbour } = Lan::new(OWN, OTHER);
    let options =
        NetOptions { name: "nic".to_owned(), mac: OWN, pairs: 1, queue_size: 256, mtu: 1500, control: false };
    let handle = host.serve(Net::new(options.clone(), port.clone()));
    let mut front =
        FrontEnd::connect(handle.socket(), Wants { features: !VIRTIO_F_RING_PACKED, ..Wants::default() })
            .unwrap();
    let mut memory = GuestMemory::new(4 * MIB).unwrap();
    front.share(&memory).unwrap();
    let plan = PairPlan { slots: 4, ..PairPlan::mergeable(RingMode::of(front.features())) };
    let mut pair = Pair::new(&mut memory, plan).unwrap();
    pair.fill_some(0, 64);
    for (index, place) in (0..).zip(pair.places()) {
        front.start(index, &memory, place, 0).unwrap();
    }
    let mut through = |front: &mut FrontEnd, n: u8| {
        let frame = ioplane_testkit::nic::frame(OTHER, OWN, &[n; 100]);
        assert!(pair.send(NetHeader::default(), &frame).unwrap());
        front.kick(1);
        until(|| (pair.reap().unwrap() > 0).then_some(()));
        assert_eq!(until(|| neighbour.take()), frame);
    };
    through(&mut front, 1);
    let held = host.hold(&handle, |held| !held.suspended);
    let _next = host.passes_by(held, &golden!("nic.parcel"), Net::new(options, port));
    through(&mut front, 2);
}
