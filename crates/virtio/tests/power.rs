//! A power cut: what was flushed and acknowledged is there afterwards, whatever became of the rest.

mod rig;

use ioplane_storage::MemoryBacking;
use ioplane_storage::filter::{Keep, PowerCut};
use ioplane_testkit::driver::{DiskOp, Shape};
use ioplane_virtio::VirtioDevice;
use ioplane_virtio::blk::spec::*;
use rig::{Rig, options};

const BLOCKS: u64 = 64;

/// Writes stamped blocks, flushing after some of them; cuts the power; the blocks acknowledged by a flush must be there.
fn cut_after(seed: u64, keep: Keep) {
    let below = MemoryBacking::new(BLOCKS * 4096).unwrap();
    let cut = PowerCut::new(below.clone()).unwrap();
    let mut rig = Rig::new(cut.clone());
    let (mut durable, mut newest) = ([0u8; BLOCKS as usize], [0u8; BLOCKS as usize]);
    let mut dice = seed;
    for step in 0..200u32 {
        dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let block = (dice >> 33) % BLOCKS;
        let stamp = (step % 200) as u8 + 1;
        assert_eq!(rig.write(block * 8, &[stamp; 4096]), VIRTIO_BLK_S_OK);
        newest[block as usize] = stamp;
        if dice >> 62 == 0 {
            assert_eq!(rig.request(DiskOp::Flush, 0, 0), VIRTIO_BLK_S_OK);
            durable = newest;
        }
    }
    // Always something for the cut to take.
    assert_eq!(rig.write(0, &[0xee; 4096]), VIRTIO_BLK_S_OK);
    newest[0] = 0xee;
    assert!(cut.unflushed() > 0);
    cut.cut(keep).unwrap();
    // The power comes back: what is below is what a new daemon finds.
    let mut rig = Rig::new(below);
    let mut lost = 0;
    for block in 0..BLOCKS {
        let (status, bytes) = rig.read(block * 8, 4096);
        assert_eq!(status, VIRTIO_BLK_S_OK);
        let (old, new) = (durable[block as usize], newest[block as usize]);
        if old == new {
            assert!(bytes.iter().all(|byte| *byte == old), "block {block}: a flushed write is gone");
        } else if bytes.iter().any(|byte| *byte != new) {
            lost += 1;
        }
    }
    if keep == Keep::Nothing {
        assert!(lost > 0, "seed {seed}: the cut took nothing, so this proves nothing");
    }
}

#[test]
fn acknowledged_flushes_survive() {
    for seed in 1..20 {
        cut_after(seed, Keep::Nothing);
        cut_after(seed, Keep::Some(seed));
    }
}

#[test]
fn with_the_write_cache_off_every_acknowledged_write_survives() {
    let below = MemoryBacking::new(BLOCKS * 4096).unwrap();
    let cut = PowerCut::new(below.clone()).unwrap();
    let mut rig = Rig::with(options("disk"), cut.clone(), Shape::Direct, rig::SPLIT);
    rig.running().device_mut().model_mut().write_config(32, &[0]);
    for block in 0..BLOCKS {
        assert_eq!(rig.write(block * 8, &[block as u8 + 1; 4096]), VIRTIO_BLK_S_OK);
    }
    assert_eq!(rig.request(DiskOp::WriteZeroes { unmap: false }, 0, 4096), VIRTIO_BLK_S_OK);
    cut.cut(Keep::Nothing).unwrap();
    let mut rig = Rig::new(below);
    for block in 0..BLOCKS {
        let wanted = if block == 0 { 0 } else { block as u8 + 1 };
        let (status, bytes) = rig.read(block * 8, 4096);
        assert!(status == VIRTIO_BLK_S_OK && bytes.iter().all(|byte| *byte == wanted), "block {block}");
    }
}
