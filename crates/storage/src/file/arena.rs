//! What a channel owns: the memory of its jobs, and the guest maps that its jobs need to stay mapped.

#![allow(unsafe_code)]
// UNSAFETY: one anonymous mapping, cut into slices of fixed size; unmapped when the arena goes, which is after the last
// job has ended.

use std::sync::Arc;

use ioplane_memory::{GuestMap, GuestRange};
use rustix::mm::{MapFlags, ProtFlags};

use super::image::Image;
use super::job::{BOUNCE, Job, JobBuffers};
use crate::channel::MAX_RANGES;

const TABLE: usize = MAX_RANGES * size_of::<libc::iovec>();
const RANGES: usize = MAX_RANGES * size_of::<GuestRange>();

/// Tables and bounce buffers of all jobs of a channel. Pages are only taken once they are used: a channel whose guest is aligned
/// never touches a bounce buffer.
#[derive(Debug)]
pub(super) struct Arena {
    start: *mut u8,
    len: usize,
}

// SAFETY: memory of its own, reached through the jobs that it was cut into.
unsafe impl Send for Arena {}
// SAFETY: as above; an `&Arena` gives access to nothing.
unsafe impl Sync for Arena {}

impl Arena {
    /// An arena and the jobs on it.
    pub fn new(depth: u16) -> std::io::Result<(Arena, Box<[Job]>)> {
        let depth = usize::from(depth);
        // Bounce buffers first: they must be aligned for any disk, and BOUNCE is a multiple of a page.
        let len = depth * (BOUNCE + TABLE + RANGES);
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        }
        .cast::<u8>();
        let jobs = (0..depth)
            .map(|index| {
                let (tables, ranges) = (depth * BOUNCE, depth * (BOUNCE + TABLE));
                // SAFETY: all inside the mapping: the three parts are depth slices each, and index < depth.
                Job::new(unsafe {
                    JobBuffers {
                        bounce: start.add(index * BOUNCE),
                        table: start.add(tables + index * TABLE).cast(),
                        ranges: start.add(ranges + index * RANGES).cast(),
                    }
                })
            })
            .collect();
        Ok((Arena { start, len }, jobs))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: what mmap gave; the owner drops it after the jobs, when nothing is in flight.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
    }
}

/// A map, and how many jobs are in flight on it.
type Held = Option<(Arc<GuestMap>, u32)>;

/// The guest maps of a channel: the one in force, and older ones while something is in flight on them. At most `depth`
/// jobs can each hold another one, so there is always room.
#[derive(Debug)]
pub(super) struct Maps {
    held: Box<[Held]>,
    current: usize,
}

impl Maps {
    pub fn new(depth: u16) -> Self {
        Maps { held: (0..=usize::from(depth)).map(|_| None).collect(), current: 0 }
    }

    /// Keeps `map` for one job more.
    #[inline]
    pub fn hold(&mut self, map: &Arc<GuestMap>, image: &Image) -> u16 {
        match &mut self.held[self.current] {
            Some((held, jobs)) if Arc::ptr_eq(held, map) => *jobs += 1,
            _ => self.change(map, image),
        }
        self.current as u16
    }

    #[cold]
    fn change(&mut self, map: &Arc<GuestMap>, image: &Image) {
        let known = self.held.iter().position(|h| h.as_ref().is_some_and(|(held, _)| Arc::ptr_eq(held, map)));
        let before = self.current;
        let fresh = |held: &Held| held.is_none();
        let Some(at) = known.or_else(|| self.held.iter().position(fresh)) else {
            unreachable!("depth + 1 entries, and every one but the current has a job in flight");
        };
        self.current = at;
        match &mut self.held[at] {
            Some((_, jobs)) => *jobs += 1,
            empty => *empty = Some((map.clone(), 1)),
        }
        if before != at && self.held[before].as_ref().is_some_and(|(_, jobs)| *jobs == 0) {
            self.retire(before, image);
        }
    }

    /// The map of a job.
    #[inline]
    pub fn of(&self, job: u16) -> Option<&Arc<GuestMap>> {
        self.held[usize::from(job)].as_ref().map(|(map, _)| map)
    }

    /// A job has ended.
    #[inline]
    pub fn release(&mut self, at: u16, image: &Image) {
        let at = usize::from(at);
        if let Some((_, jobs)) = &mut self.held[at] {
            *jobs -= 1;
            if *jobs == 0 && at != self.current {
                self.retire(at, image);
            }
        }
    }

    fn retire(&mut self, at: usize, image: &Image) {
        if let Some((map, _)) = self.held[at].take() {
            // If the control plane has not come by for 64 changes the map is unmapped right here.
            let _ = image.retired_maps.push(map);
        }
    }
}
