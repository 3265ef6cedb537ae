//! A backend that does nothing, in this process: what is left is the generator, and how fast it could go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use ioplane_memory::GuestView;
use ioplane_testkit::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, RingPlace, Token};

use super::load::{BLOCK, Load, Outcome, Scatter, Target, Waiting, run};
use super::{RING, SHAPE, SLOTS};
use ioplane_figures::machine::{self, Cpus};

/// Runs the generator at each of `depths` against a thread that answers every request at once without looking at it.
pub fn ceiling(cpus: Cpus, depths: &[u16], time: Duration) -> Result<Vec<Outcome>> {
    let mut memory = GuestMemory::new(16 << 20)?;
    memory.populate();
    let plan = DiskPlan::new(SLOTS, BLOCK, SHAPE);
    let mut disk = Disk::new(&mut memory, RING, RingMode { event_idx: true, packed: false }, plan)?;
    let (view, place) = (memory.view().clone(), disk.place());
    let mut status_of = vec![0; usize::from(RING)];
    for slot in 0..SLOTS {
        status_of[usize::from(disk.head(Token(slot)))] = disk.header_gpa(Token(slot)) + 16;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let seen = stop.clone();
    // A thread inherits its affinity: it must not need a turn on the generator's processor to leave it.
    machine::pin(cpus.back)?;
    let answering = std::thread::spawn(move || answer(&view, place, &status_of, &seen));
    machine::pin(cpus.front)?;
    let mut scatter = Scatter::new(1);
    let measured = depths.iter().map(|&depth| {
        let load = Load {
            op: DiskOp::Read,
            depth,
            blocks: 1 << 17,
            waiting: Waiting::Polling,
            warm: time / 4,
            time,
        };
        run(&mut Target { front: None, disk: &mut disk, pids: Vec::new() }, &load, &mut scatter)
    });
    let measured = measured.collect();
    stop.store(true, Ordering::Relaxed);
    answering.join().map_err(|_| anyhow!("the null backend panicked"))??;
    measured
}

/// The device's side of the ring and nothing of a device: head in, status and head out, the index after each batch.
fn answer(view: &GuestView, place: RingPlace, status_of: &[u64], stop: &AtomicBool) -> Result<()> {
    let avail = view.window(place.avail, RingPlace::avail_bytes(place.size), 2)?;
    let used = view.window(place.used, RingPlace::used_bytes(place.size), 4)?;
    let first = *status_of.iter().filter(|gpa| **gpa != 0).min().unwrap_or(&0);
    let last = *status_of.iter().max().unwrap_or(&0);
    let statuses = view.window(first, last - first + 1, 1)?;
    let (mut next, mask) = (0u16, place.size - 1);
    while !stop.load(Ordering::Relaxed) {
        let until = avail.load_u16(2);
        if until == next {
            std::hint::spin_loop();
            continue;
        }
        while next != until {
            let slot = usize::from(next & mask);
            let head = avail.load_u16(4 + 2 * slot);
            statuses.put_u8((status_of[usize::from(head)] - first) as usize, 0);
            used.put_u32(4 + 8 * slot, head.into());
            used.put_u32(8 + 8 * slot, 1);
            next = next.wrapping_add(1);
        }
        used.put_u16(2, next);
    }
    Ok(())
}
