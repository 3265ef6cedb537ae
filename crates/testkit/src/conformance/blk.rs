//! Virtio-blk under test: on memory, and on a file.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ioplane_device::{Access, RegisterAddress};
use ioplane_storage::filter::Stall;
use ioplane_storage::{Backing, EngineChoice, FileBacking, FileOptions, MemoryBacking};
use ioplane_virtio::blk::spec::config::WRITEBACK;
use ioplane_virtio::blk::spec::*;
use ioplane_virtio::blk::{Blk, BlkOptions};
use ioplane_virtio::spec::mmio::CONFIG;

use super::virtio::{ConfigTouch, DeviceUnderTest, Fixture, Program, QUEUES, Request};
use super::{Bus, Dice, Plan};
use crate::toy::mix;

/// Bytes of each vCPU's part of the disk.
const PART: u64 = 1 << 20;
/// Bytes of one read or write: four sectors.
const DATA: u32 = 2048;
/// Places in a part that requests go to. Those of one slot are never another's: what is in flight does not overlap.
const PLACES: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disks {
    /// On memory: requests end where they are submitted.
    Memory,
    /// On an image file, by io_uring: they end later, in any order.
    IoUring,
    /// On an image file, by threads.
    Threads,
}

/// An image that goes with its last user.
#[derive(Debug)]
struct Image(PathBuf);

impl Drop for Image {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Disks {
    fn backing(self) -> (Arc<dyn Backing>, Option<Image>) {
        let bytes = PART * u64::from(QUEUES);
        let engine = match self {
            Disks::Memory => return (MemoryBacking::new(bytes).expect("a memory disk"), None),
            Disks::IoUring => EngineChoice::IoUring,
            Disks::Threads => EngineChoice::Threads,
        };
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("ioplane-conformance-{}-{next}.raw", std::process::id());
        let image = Image(std::env::temp_dir().join(name));
        std::fs::File::create(&image.0).and_then(|f| f.set_len(bytes)).expect("an image file");
        let options = FileOptions { engine, ..FileOptions::new(&image.0) };
        (FileBacking::open(options).expect("an image that opens"), Some(image))
    }
}

impl DeviceUnderTest for Disks {
    type Model = Blk;

    fn fixture(&self) -> Fixture<Blk> {
        let (backing, image) = self.backing();
        let disk = Stall::new(backing);
        let valve = disk.clone();
        let options = BlkOptions {
            name: "disk0".into(),
            serial: "conformance".into(),
            queues: QUEUES,
            queue_size: 256,
            read_only: false,
            logical_block: None,
        };
        let model = move || {
            let _kept = &image;
            Blk::new(options.clone(), disk.clone())
        };
        let program =
            |queue: u16| Box::new(Sectors { from: PART * u64::from(queue) / SECTOR }) as Box<dyn Program>;
        Fixture { model: Box::new(model), valve: Some(valve), program: Box::new(program) }
    }

    fn features(&self) -> u64 {
        VIRTIO_BLK_F_SEG_MAX
            | VIRTIO_BLK_F_FLUSH
            | VIRTIO_BLK_F_CONFIG_WCE
            | VIRTIO_BLK_F_MQ
            | VIRTIO_BLK_F_WRITE_ZEROES
            | VIRTIO_BLK_F_DISCARD
    }

    /// A flush of a file takes milliseconds.
    fn bursts(&self, plan: &Plan) -> u32 {
        if *self == Disks::Memory { plan.rounds / 2 } else { plan.rounds / 6 }
    }

    fn touch(&self) -> ConfigTouch {
        switch_cache
    }
}

/// The first vCPU turns the write cache on and off and sees it so; the other looks at the capacity.
fn switch_cache(bus: &Bus, vcpu: usize, dice: &mut Dice) -> Result<u64, String> {
    if vcpu > 0 {
        return bus.read(CONFIG);
    }
    let at = RegisterAddress::Bar(0, CONFIG + WRITEBACK as u64);
    bus.access(at, Access::Write(&[dice.below(2) as u8]))?;
    let mut byte = [0];
    bus.access(at, Access::Read(&mut byte))?;
    Ok(byte[0].into())
}

/// Reads and writes of one vCPU's part of the disk.
struct Sectors {
    from: u64,
}

impl Program for Sectors {
    fn ask(&mut self, slot: u16, dice: &mut Dice) -> Result<Request, String> {
        let place = u64::from(slot) * PLACES + dice.below(PLACES);
        let sector = self.from + place * u64::from(DATA) / SECTOR;
        // As many buffers as a driver may send, now and then.
        let data = if dice.below(4) == 0 { pieces(DATA, SEG_MAX) } else { vec![DATA] };
        let (kind, bytes, mut readable, mut writable) = match dice.below(16) {
            0..6 => {
                let words = (0..DATA / 8).flat_map(|_| dice.roll().to_le_bytes()).collect();
                (VIRTIO_BLK_T_OUT, words, data, vec![])
            }
            6..13 => (VIRTIO_BLK_T_IN, vec![], vec![], data),
            13 => (VIRTIO_BLK_T_FLUSH, vec![], vec![], vec![]),
            14 => {
                let mut range = sector.to_le_bytes().to_vec();
                range.extend((DATA / SECTOR as u32).to_le_bytes());
                range.extend([0; 4]);
                (VIRTIO_BLK_T_WRITE_ZEROES, range, vec![16], vec![])
            }
            _ => (VIRTIO_BLK_T_GET_ID, vec![], vec![], vec![VIRTIO_BLK_ID_BYTES as u32]),
        };
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        readable.insert(0, 16);
        writable.push(1);
        Ok(Request { bytes: [&header[..], &bytes].concat(), readable, writable })
    }

    fn answer(&mut self, bytes: &[u8], written: u32) -> Result<u64, String> {
        let (status, data) = bytes.split_last().ok_or("a request without a status")?;
        if *status != VIRTIO_BLK_S_OK {
            return Err(format!("transcript: a request ended with status {status}"));
        }
        Ok(data.iter().fold(u64::from(written), |sum, byte| mix(sum, u64::from(*byte))))
    }
}

/// `bytes` in `count` buffers.
fn pieces(bytes: u32, count: u32) -> Vec<u32> {
    let mut pieces = vec![bytes / count; count as usize];
    pieces[0] += bytes % count;
    pieces
}
