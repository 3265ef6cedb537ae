//! A guest without a VM: a vhost-user front end, its memory, and a driver for each queue of a disk.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ioplane_testkit::driver::{Disk, DiskPlan, GuestMemory, RingMode};
use ioplane_testkit::front::{FrontEnd, Wants, protocol};

/// Give up when nothing completes for this long.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What a guest has.
#[derive(Debug, Clone, Copy)]
pub struct Form {
    /// Entries of each ring, split.
    pub ring: u16,
    pub queues: u16,
    /// Of each queue.
    pub plan: DiskPlan,
}

impl Form {
    /// Memory for rings and buffers, bytes; each part begins on a page.
    fn memory(&self) -> u64 {
        let slot = u64::from(self.plan.max_bytes) + 64 + 64 * u64::from(self.plan.segments);
        u64::from(self.queues) * (u64::from(self.plan.slots) * slot + u64::from(self.ring) * 32 + (16 << 10))
    }
}

/// A connection with its own memory and rings. Dropped: the VMM died.
pub struct Guest {
    pub front: FrontEnd,
    /// By number of queue.
    pub queues: Vec<Disk>,
    /// Size of the disk, bytes.
    pub capacity: u64,
    memory: GuestMemory,
}

impl Guest {
    /// Connects as QEMU does, with an in-flight region where that is offered, and starts every queue.
    pub fn connect(socket: &Path, form: Form) -> Result<Self> {
        let mut front = FrontEnd::connect(socket, Wants::default())?;
        let capacity = front.capacity()? * 512;
        let mut memory = GuestMemory::new(form.memory())?;
        memory.populate();
        let mode = RingMode::of(front.features());
        let queues: Result<Vec<_>, _> =
            (0..form.queues).map(|_| Disk::new(&mut memory, form.ring, mode, form.plan)).collect();
        let queues = queues?;
        if front.has(protocol::INFLIGHT_SHMFD) {
            front.track_inflight(form.queues, form.ring)?;
        }
        front.share(&memory)?;
        for (index, disk) in queues.iter().enumerate() {
            front.start(index as u16, &memory, disk.place(), 0)?;
        }
        Ok(Guest { front, queues, capacity, memory })
    }

    /// A front end of another VMM, which waits at `socket` for this guest: with the same memory, and no ring started.
    pub fn expected_at(&self, socket: &Path) -> Result<FrontEnd> {
        let mut front = FrontEnd::connect(socket, Wants::default())?;
        if front.has(protocol::INFLIGHT_SHMFD)
            && let Some(disk) = self.queues.first()
        {
            front.track_inflight(self.queues.len() as u16, disk.place().size)?;
        }
        front.share(&self.memory)?;
        Ok(front)
    }

    /// Goes on behind `next`, at the places where the rings have stopped; returns the front end that it has left.
    pub fn go_on(&mut self, mut next: FrontEnd, bases: &[u32]) -> Result<FrontEnd> {
        for ((index, disk), base) in self.queues.iter().enumerate().zip(bases) {
            next.start(index as u16, &self.memory, disk.place(), *base)?;
        }
        Ok(std::mem::replace(&mut self.front, next))
    }

    /// Tells the device of what was pushed into queue `index`, if it wants to be told.
    #[inline]
    pub fn kick_if_needed(&mut self, index: u16) {
        if self.queues[usize::from(index)].ring().kick_needed() {
            self.front.kick(index);
        }
    }
}

/// Takes everything that is in flight, without interrupts.
pub fn drain(disk: &mut Disk) -> Result<()> {
    let begin = Instant::now();
    disk.ring().disable_interrupts();
    while disk.in_flight() > 0 {
        if let Some(done) = disk.reap()? {
            ensure!(done.ok(), "a request ended with status {:#x}", done.status);
        }
        ensure!(begin.elapsed() < PATIENCE, "{} requests were never completed", disk.in_flight());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ioplane_testkit::driver::Shape;

    use super::*;

    #[test]
    fn the_memory_has_room_for_what_is_carved() {
        for (ring, queues, plan) in [
            (256, 1, DiskPlan::new(128, 4096, Shape::Indirect)),
            (128, 8, DiskPlan::new(4, 4096, Shape::Indirect)),
            (128, 1, DiskPlan::new(32, 1 << 20, Shape::Direct)),
            (8, 3, DiskPlan { slots: 2, max_bytes: 2048, segments: 4, shape: Shape::Indirect }),
        ] {
            let form = Form { ring, queues, plan };
            let mut memory = GuestMemory::new(form.memory()).unwrap();
            for _ in 0..queues {
                Disk::new(&mut memory, ring, RingMode::default(), plan).unwrap();
            }
        }
    }
}
