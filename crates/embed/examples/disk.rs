//! A disk in the process of its VMM: two vCPU threads use it through virtio-mmio registers, an I/O core serves it, and the main thread
//! saves it while they do.
//!
//! ```text
//! cargo run -p ioplane-embed --example disk [IMAGE]     without an image: a disk in memory. The first sectors of an image are overwritten.
//! ```
//!
//! The guest is made up of two Rust threads, so that this runs anywhere. In a VMM the thread of a vCPU calls [`SharedDevice::access`] at each
//! `KVM_EXIT_MMIO`, and the device's interrupt is an irqfd.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ioplane_cores::{CoreSettings, Pool};
use ioplane_device::{Access, Interrupt, RegisterAddress};
use ioplane_embed::SharedDevice;
use ioplane_memory::{GuestMap, GuestView, Window};
use ioplane_storage::{Backing, FileBacking, FileOptions, MemoryBacking};
use ioplane_virtio::blk::spec::{SECTOR, VIRTIO_BLK_S_OK, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::spec::feature::VIRTIO_F_VERSION_1;
use ioplane_virtio::spec::mmio::*;
use ioplane_virtio::spec::split::*;
use ioplane_virtio::{Vdev, VirtioMmio};
use rustix::event::{EventfdFlags, eventfd};

type Failure = Box<dyn Error + Send + Sync>;
type Disk = SharedDevice<VirtioMmio<Blk>>;

const VCPUS: u16 = 2;
const REQUESTS: u64 = 1000;
const PATIENCE: Duration = Duration::from_secs(20);

fn main() -> Result<(), Failure> {
    let backing: Arc<dyn Backing> = match std::env::args().nth(1) {
        Some(image) => FileBacking::open(FileOptions::new(image))?,
        None => MemoryBacking::new(1 << 20)?,
    };
    println!("{}", serve(backing)?);
    Ok(())
}

/// The interrupt of the device. A VMM raises the guest's line here.
#[derive(Debug, Default)]
struct Irq(AtomicU64);

impl Interrupt for Irq {
    fn signal(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Has a guest use the disk, and says what happened.
fn serve(backing: Arc<dyn Backing>) -> Result<String, Failure> {
    // The VMM's guest memory. `MemoryRegion::map` takes what a VMM has already.
    let memory = Arc::new(GuestMap::anonymous(1 << 20)?);
    let options = BlkOptions {
        name: "disk".to_owned(),
        serial: "embedded".to_owned(),
        queues: VCPUS,
        queue_size: Queue::SIZE,
        read_only: false,
        logical_block: None,
    };
    let mut vdev = Vdev::new(Blk::new(options, backing), memory.clone());
    for queue in 0..VCPUS {
        // With KVM: an ioeventfd at QueueNotify, so that a kick does not reach the VMM at all.
        let kick = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        vdev.queue_mut(queue).ok_or("a queue for each vCPU")?.kick = Some(Arc::new(kick));
    }
    let irq = Arc::new(Irq::default());
    let registers = VirtioMmio::new(vdev, irq.clone());
    // One I/O core, which polls. The pool also decides which core a queue goes to.
    let pool = Arc::new(Pool::with([CoreSettings::default()])?);
    let disk: Disk = SharedDevice::new(registers, pool).map_err(|refused| refused.error)?;

    let queues: Vec<Queue> =
        (0..VCPUS).map(|queue| Queue::new(&memory, queue)).collect::<Result<_, Failure>>()?;
    set_up(&disk, &queues)?;
    let saved = std::thread::scope(|scope| {
        let vcpus: Vec<_> = queues.into_iter().map(|queue| scope.spawn(|| run(&disk, queue))).collect();
        let saved = save(&disk);
        for vcpu in vcpus {
            vcpu.join().map_err(|_| "a vCPU panicked")??;
        }
        saved
    })?;
    let (requests, interrupts) = (u64::from(VCPUS) * REQUESTS * 2, irq.0.load(Ordering::Relaxed));
    Ok(format!("{requests} requests, {interrupts} interrupts; saved meanwhile: {saved} bytes"))
}

/// Brings the disk to a quiescent point under its guest, saves it, and goes on. The guest's accesses wait meanwhile.
fn save(disk: &Disk) -> Result<usize, Failure> {
    if let Err(late) = disk.quiesce(Instant::now() + PATIENCE)? {
        let reason = late.reason.clone();
        late.undrain()?;
        return Err(reason.into());
    }
    let state = disk.save()?;
    disk.resume()?;
    Ok(state.body.len())
}

/// A guest's driver starts the device (virtio 1.3, 3.1.1 and 4.2.3.1).
fn set_up(disk: &Disk, queues: &[Queue]) -> Result<(), Failure> {
    if read(disk, MAGIC_VALUE)? != MAGIC {
        return Err("no virtio device".into());
    }
    write(disk, STATUS, ACKNOWLEDGE | DRIVER)?;
    for half in [0, 1] {
        write(disk, DRIVER_FEATURES_SEL, half)?;
        write(disk, DRIVER_FEATURES, (VIRTIO_F_VERSION_1 >> (32 * half)) as u32)?;
    }
    write(disk, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK)?;
    for queue in queues {
        write(disk, QUEUE_SEL, queue.number.into())?;
        write(disk, QUEUE_NUM, Queue::SIZE.into())?;
        for (register, part) in [
            (QUEUE_DESC_LOW, &queue.descriptors),
            (QUEUE_DRIVER_LOW, &queue.available),
            (QUEUE_DEVICE_LOW, &queue.used),
        ] {
            write(disk, register, part.gpa() as u32)?;
        }
        write(disk, QUEUE_READY, 1)?;
    }
    write(disk, STATUS, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK)
}

fn read(disk: &Disk, register: u64) -> Result<u32, Failure> {
    let mut value = [0; 4];
    disk.access(RegisterAddress::Bar(0, register), Access::Read(&mut value))?;
    Ok(u32::from_le_bytes(value))
}

fn write(disk: &Disk, register: u64, value: u32) -> Result<(), Failure> {
    Ok(disk.access(RegisterAddress::Bar(0, register), Access::Write(&value.to_le_bytes()))?)
}

/// What one vCPU does: writes to a sector of its own and reads it back, again and again.
fn run(disk: &Disk, mut queue: Queue) -> Result<(), Failure> {
    let sector = u64::from(queue.number);
    for round in 0..REQUESTS {
        let bytes = [round as u8; SECTOR as usize];
        queue.view.write(queue.at(Queue::DATA), &bytes)?;
        queue.request(disk, VIRTIO_BLK_T_OUT, sector)?;
        queue.view.write(queue.at(Queue::DATA), &[0; SECTOR as usize])?;
        queue.request(disk, VIRTIO_BLK_T_IN, sector)?;
        if queue.view.bytes(queue.at(Queue::DATA))? != bytes {
            return Err(format!("vCPU {sector}, round {round}: another sector came back").into());
        }
    }
    Ok(())
}

/// A vCPU's queue: a split ring (2.7), and room for one request.
struct Queue {
    number: u16,
    view: GuestView,
    descriptors: Window,
    available: Window,
    used: Window,
    /// Requests so far.
    index: u16,
}

impl Queue {
    const SIZE: u16 = 8;
    /// Where its parts lie.
    const BYTES: u64 = 0x4000;
    const AVAILABLE: u64 = 0x1000;
    const USED: u64 = 0x2000;
    const HEADER: u64 = 0x3000;
    const ANSWER: u64 = 0x3100;
    const DATA: u64 = 0x3200;

    fn new(memory: &Arc<GuestMap>, number: u16) -> Result<Queue, Failure> {
        let (view, base) = (GuestView::new(memory.clone()), u64::from(number) * Self::BYTES);
        Ok(Queue {
            number,
            descriptors: view.window(base, DESC_SIZE * u64::from(Self::SIZE), 16)?,
            available: view.window(base + Self::AVAILABLE, avail_bytes(Self::SIZE), 2)?,
            used: view.window(base + Self::USED, used_bytes(Self::SIZE), 4)?,
            view,
            index: 0,
        })
    }

    fn at(&self, part: u64) -> u64 {
        u64::from(self.number) * Self::BYTES + part
    }

    fn describe(&self, id: u16, part: u64, len: u32, flags: u16) {
        let at = usize::from(id) * DESC_SIZE as usize;
        self.view.store_u64(&self.descriptors, at, self.at(part));
        self.view.store_u32(&self.descriptors, at + 8, len);
        self.view.store_u16(&self.descriptors, at + 12, flags);
        self.view.store_u16(&self.descriptors, at + 14, id + 1);
    }

    /// One request (5.2.6): header, sector, status. Waits for its end.
    fn request(&mut self, disk: &Disk, kind: u32, sector: u64) -> Result<(), Failure> {
        let header = [u64::from(kind).to_le_bytes(), sector.to_le_bytes()].concat();
        self.view.write(self.at(Self::HEADER), &header)?;
        self.view.write(self.at(Self::ANSWER), &[0xff])?;
        let into_memory = if kind == VIRTIO_BLK_T_IN { VIRTQ_DESC_F_WRITE } else { 0 };
        self.describe(0, Self::HEADER, header.len() as u32, VIRTQ_DESC_F_NEXT);
        self.describe(1, Self::DATA, SECTOR as u32, VIRTQ_DESC_F_NEXT | into_memory);
        self.describe(2, Self::ANSWER, 1, VIRTQ_DESC_F_WRITE);
        self.view.store_u16(&self.available, 4 + 2 * usize::from(self.index % Self::SIZE), 0);
        self.index = self.index.wrapping_add(1);
        self.view.store_u16(&self.available, 2, self.index);
        // A real driver leaves this out while the device says that it polls (2.7.10).
        write(disk, QUEUE_NOTIFY, self.number.into())?;
        let deadline = Instant::now() + PATIENCE;
        while self.used.load_u16(2) != self.index {
            if Instant::now() > deadline {
                return Err("no answer".into());
            }
            std::thread::yield_now();
        }
        match self.view.bytes(self.at(Self::ANSWER))? {
            [VIRTIO_BLK_S_OK] => Ok(()),
            [status] => Err(format!("the disk answers with status {status}").into()),
        }
    }
}

#[test]
fn a_disk_is_served() -> Result<(), Failure> {
    let said = serve(MemoryBacking::new(1 << 20)?)?;
    assert!(said.starts_with("4000 requests, "), "{said}");
    Ok(())
}
