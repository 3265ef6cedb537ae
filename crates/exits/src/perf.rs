//! Tracepoints of one thread through `perf_event_open`: counted by the kernel, recorded into a ring that we map.
//!
//! All events of a thread are one group, switched on and off at once, and share the leader's ring, so that they are read in the
//! order in which they happened. The kernel never overwrites what has not been read: what finds no room is lost, and
//! counted by the kernel.

#![allow(unsafe_code)]
// UNSAFETY: perf_event_open, its ioctls and its mapped ring have no safe interface.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::atomic::{AtomicU64, Ordering};

use perf_event_open_sys::bindings::{
    PERF_COUNT_SW_TASK_CLOCK, PERF_FLAG_FD_CLOEXEC, PERF_RECORD_LOST, PERF_RECORD_MISC_SWITCH_OUT,
    PERF_RECORD_MISC_SWITCH_OUT_PREEMPT, PERF_RECORD_SAMPLE, PERF_RECORD_SWITCH, PERF_SAMPLE_IP,
    PERF_SAMPLE_RAW, PERF_SAMPLE_TIME, PERF_TYPE_SOFTWARE, PERF_TYPE_TRACEPOINT, perf_event_attr,
    perf_event_mmap_page,
};
use perf_event_open_sys::{ioctls, perf_event_open};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// One record of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PerfRecord<'a> {
    /// An event: when (CLOCK_MONOTONIC, ns) and the tracepoint's record.
    Event(u64, &'a [u8]),
    /// So many events found no room.
    Lost(u64),
    /// The thread has left its processor: when, and whether it would have run on.
    Out(u64, bool),
    /// It has one again: when.
    In(u64),
}

/// Of an event of that sort (`PERF_TYPE_...`) and number.
fn attributes(sort: u32, number: u64) -> perf_event_attr {
    let mut attr = perf_event_attr::default();
    attr.type_ = sort;
    attr.size = size_of::<perf_event_attr>() as u32;
    attr.config = number;
    attr
}

/// Opens an event of a thread (-1: of any) on a processor (-1: on any), in the group of that descriptor (-1: of its own).
fn open(mut attr: perf_event_attr, thread: libc::pid_t, cpu: i32, group: i32) -> io::Result<File> {
    // SAFETY: `attr` is initialised, says its size, and outlives the call; the other arguments are numbers.
    let fd = unsafe { perf_event_open(&mut attr, thread, cpu, group, PERF_FLAG_FD_CLOEXEC.into()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this descriptor, and nobody else knows it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// One tracepoint of one thread.
#[derive(Debug)]
struct Event(File);

impl Event {
    fn open(tracepoint: u64, thread: u32, wake: u32, leader: Option<&Event>) -> io::Result<Event> {
        let mut attr = attributes(PERF_TYPE_TRACEPOINT, tracepoint);
        attr.sample_period = 1;
        attr.sample_type = u64::from(PERF_SAMPLE_TIME) | u64::from(PERF_SAMPLE_RAW);
        attr.clockid = libc::CLOCK_MONOTONIC;
        attr.set_use_clockid(1);
        if leader.is_none() {
            // Switches of the thread are told once, with their time.
            attr.set_context_switch(1);
            attr.set_sample_id_all(1);
        }
        // Members follow their leader.
        attr.set_disabled(u64::from(leader.is_none()));
        attr.set_watermark(1);
        attr.wakeup_watermark = wake;
        let group = leader.map_or(-1, |leader| leader.0.as_raw_fd());
        let thread = libc::pid_t::try_from(thread).map_err(io::Error::other)?;
        open(attr, thread, -1, group).map(Event)
    }

    /// On or off, with all members of its group if it is the first of one.
    fn switch(&self, on: bool) -> io::Result<()> {
        let switch = if on { ioctls::ENABLE } else { ioctls::DISABLE };
        // SAFETY: an open perf event; the argument is a number.
        check(unsafe { switch(self.0.as_raw_fd(), 0) })
    }

    fn count(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        (&self.0).read_exact(&mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }
}

/// Has a BPF program run at each hit of a tracepoint, in any thread, until what is returned is closed. The perf event itself is off: it holds the program only.
pub(crate) fn run_program(tracepoint: u64, program: impl AsFd) -> io::Result<File> {
    let mut attr = attributes(PERF_TYPE_TRACEPOINT, tracepoint);
    attr.set_disabled(1);
    let event = open(attr, -1, 0, -1)?;
    let program = u32::try_from(program.as_fd().as_raw_fd()).map_err(io::Error::other)?;
    // SAFETY: both descriptors are open; the kernel takes a reference of its own.
    check(unsafe { ioctls::SET_BPF(event.as_raw_fd(), program) })?;
    Ok(event)
}

/// The tracepoints of one thread. Counting begins with [`ThreadEvents::enable`].
#[derive(Debug)]
pub struct ThreadEvents {
    /// The ring goes before the events whose memory it maps.
    ring: Ring,
    events: Vec<Event>,
}

impl ThreadEvents {
    /// Opens `tracepoints` (at least one) for a thread, each event recorded into a ring of `1 << order` pages.
    pub fn open(tracepoints: &[u64], thread: u32, order: u32) -> io::Result<ThreadEvents> {
        let mut events: Vec<Event> = Vec::with_capacity(tracepoints.len());
        // Waking us costs the guest's thread time; at a quarter there is still room for what comes until we are there.
        let wake = (ring_size(order) / 4) as u32;
        for tracepoint in tracepoints {
            let event = Event::open(*tracepoint, thread, wake, events.first())?;
            events.push(event);
        }
        let leader = events.first().ok_or_else(|| io::Error::other("no tracepoint was asked for"))?;
        let ring = Ring::map(leader, order)?;
        for member in &events[1..] {
            // SAFETY: both descriptors are open perf events of one thread.
            let done = unsafe { ioctls::SET_OUTPUT(member.0.as_raw_fd(), leader.0.as_raw_fd()) };
            if done < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(ThreadEvents { ring, events })
    }

    /// Begins to count and record, all events at once.
    pub fn enable(&self) -> io::Result<()> {
        self.events[0].switch(true)
    }

    /// Ends that.
    pub fn disable(&self) -> io::Result<()> {
        self.events[0].switch(false)
    }

    /// Ends one of them alone, not the first.
    pub fn drop_member(&self, index: usize) -> io::Result<()> {
        let Some(member) = self.events.get(index) else { return Ok(()) };
        member.switch(false)
    }

    /// Counts and records of one of them only what this expression says (Linux, Documentation/trace/events.rst, "Event filtering").
    pub fn filter_member(&self, index: usize, expression: &CStr) -> io::Result<()> {
        let Some(member) = self.events.get(index) else { return Ok(()) };
        // SAFETY: an open perf event; the kernel only reads the string, to its zero.
        check(unsafe { ioctls::SET_FILTER(member.0.as_raw_fd(), expression.as_ptr().cast_mut()) })
    }

    /// How often each tracepoint was hit while enabled, recorded or not, in the order of `tracepoints`.
    pub fn counts(&self) -> io::Result<Vec<u64>> {
        self.events.iter().map(Event::count).collect()
    }

    /// Gives every record that has come to `take`.
    pub fn drain(&mut self, mut take: impl FnMut(PerfRecord<'_>)) {
        self.ring.drain(|kind, flags, body| {
            if let Some(record) = parse(kind, flags, body) {
                take(record);
            }
        });
    }

    /// Becomes readable when a good part of the ring is full, or when the thread has ended.
    pub fn fd(&self) -> BorrowedFd<'_> {
        use std::os::fd::AsFd;
        self.events[0].0.as_fd()
    }
}

/// Where a thread is in user space, so often of the time that it has a processor.
#[derive(Debug)]
pub(crate) struct ThreadSamples {
    /// The ring goes before the event whose memory it maps.
    ring: Ring,
    event: Event,
}

impl ThreadSamples {
    /// Opens them for a thread; they begin with [`ThreadSamples::switch`]. Two pages are room for 500.
    pub fn open(thread: u32, interval_ns: u64) -> io::Result<ThreadSamples> {
        let mut attr = attributes(PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK.into());
        attr.sample_period = interval_ns;
        attr.sample_type = PERF_SAMPLE_IP.into();
        attr.set_disabled(1);
        attr.set_exclude_kernel(1);
        attr.set_exclude_hv(1);
        attr.set_exclude_guest(1);
        // Nobody waits for them.
        attr.set_watermark(1);
        attr.wakeup_watermark = u32::MAX;
        let thread = libc::pid_t::try_from(thread).map_err(io::Error::other)?;
        let event = open(attr, thread, -1, -1).map(Event)?;
        Ok(ThreadSamples { ring: Ring::map(&event, 1)?, event })
    }

    /// On or off.
    pub fn switch(&self, on: bool) -> io::Result<()> {
        self.event.switch(on)
    }

    /// Gives every address that has come to `take`, and how many found no room.
    pub fn drain(&mut self, mut take: impl FnMut(u64)) -> u64 {
        let mut lost = 0u64;
        self.ring.drain(|kind, flags, body| match (kind, body.first_chunk()) {
            (PERF_RECORD_SAMPLE, Some(address)) => take(u64::from_ne_bytes(*address)),
            _ => {
                if let Some(PerfRecord::Lost(count)) = parse(kind, flags, body) {
                    lost = lost.saturating_add(count);
                }
            }
        });
        lost
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Bytes of a ring of `1 << order` pages, 4096 of them at most.
fn ring_size(order: u32) -> usize {
    rustix::param::page_size() << order.min(12)
}

/// The mapped ring: one page of positions, then a power of two of pages with records.
#[derive(Debug)]
struct Ring {
    base: NonNull<u8>,
    page: usize,
    data: usize,
    /// A record that goes round the end is put together here.
    bent: Vec<u8>,
}

// SAFETY: the mapping belongs to this value alone and has no thread of its own.
unsafe impl Send for Ring {}

impl Ring {
    fn map(leader: &Event, order: u32) -> io::Result<Ring> {
        let page = rustix::param::page_size();
        let data = ring_size(order);
        // SAFETY: a new mapping at an address of the kernel's choice covers nothing that is in use.
        let base = unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(ptr::null_mut(), page + data, protection, MapFlags::SHARED, &leader.0, 0)
        };
        // Beyond the limit of locked memory the kernel says that it is not permitted; whoever may open the event may map it.
        let base = base.map_err(|error| if error == Errno::PERM { Errno::NOMEM } else { error })?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at zero"))?;
        Ok(Ring { base, page, data, bent: Vec::new() })
    }

    /// Up to where the kernel has written, and up to where we have read.
    fn positions(&self) -> (&AtomicU64, &AtomicU64) {
        let header = self.base.as_ptr().cast::<perf_event_mmap_page>();
        // SAFETY: the first page is mapped as long as this value lives, aligned, and both sides access these two words
        // atomically.
        unsafe {
            let head = AtomicU64::from_ptr(&raw mut (*header).data_head);
            (head, AtomicU64::from_ptr(&raw mut (*header).data_tail))
        }
    }

    /// Gives sort, flags and body of every record that has come to `take`.
    fn drain(&mut self, mut take: impl FnMut(u32, u16, &[u8])) {
        let head = self.positions().0.load(Ordering::Acquire);
        let mut tail = self.positions().1.load(Ordering::Relaxed);
        let mut bent = std::mem::take(&mut self.bent);
        while head.wrapping_sub(tail) >= 8 {
            let at = (tail % self.data as u64) as usize;
            // SAFETY: the records between tail and head are complete (Acquire above) and are not written again until
            // the tail has passed them; `data` bytes from the second page on are mapped.
            let ring = unsafe { slice::from_raw_parts(self.base.as_ptr().add(self.page), self.data) };
            // A header of eight bytes never goes round the end: records are multiples of eight bytes.
            let Some(header) = ring.get(at..at + 8) else { break };
            let kind = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
            let flags = u16::from_ne_bytes([header[4], header[5]]);
            let size = usize::from(u16::from_ne_bytes([header[6], header[7]]));
            if size < 8 || size as u64 > head - tail {
                // Never written by Linux; skip what cannot be understood.
                tail = head;
                break;
            }
            let whole = if at + size <= self.data {
                &ring[at..at + size]
            } else {
                bent.clear();
                bent.extend_from_slice(&ring[at..]);
                bent.extend_from_slice(&ring[..size - (self.data - at)]);
                &bent
            };
            take(kind, flags, &whole[8..]);
            tail += size as u64;
        }
        self.positions().1.store(tail, Ordering::Release);
        self.bent = bent;
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size, and no reference into it outlives this value.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.page + self.data) };
    }
}

fn parse(kind: u32, flags: u16, body: &[u8]) -> Option<PerfRecord<'_>> {
    let word = |at: usize| Some(u64::from_ne_bytes(body.get(at..at + 8)?.try_into().ok()?));
    match kind {
        // Time, then the size of the tracepoint's record in four bytes, then that.
        PERF_RECORD_SAMPLE => {
            let size = u32::from_ne_bytes(body.get(8..12)?.try_into().ok()?) as usize;
            Some(PerfRecord::Event(word(0)?, body.get(12..12usize.checked_add(size)?)?))
        }
        // The event's number, then how many.
        PERF_RECORD_LOST => Some(PerfRecord::Lost(word(8)?)),
        // The time, which `sample_id_all` puts at the end: there is nothing else.
        PERF_RECORD_SWITCH => {
            let flagged = |flag: u32| u32::from(flags) & flag != 0;
            Some(if flagged(PERF_RECORD_MISC_SWITCH_OUT) {
                PerfRecord::Out(word(0)?, flagged(PERF_RECORD_MISC_SWITCH_OUT_PREEMPT))
            } else {
                PerfRecord::In(word(0)?)
            })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_taken_apart() {
        let mut sample = 7u64.to_ne_bytes().to_vec();
        sample.extend(4u32.to_ne_bytes());
        sample.extend([1, 2, 3, 4, 0, 0, 0, 0]);
        assert_eq!(parse(PERF_RECORD_SAMPLE, 0, &sample), Some(PerfRecord::Event(7, &[1, 2, 3, 4])));
        assert_eq!(parse(PERF_RECORD_SAMPLE, 0, &sample[..14]), None);
        let lost = [9u64.to_ne_bytes(), 5u64.to_ne_bytes()].concat();
        assert_eq!(parse(PERF_RECORD_LOST, 0, &lost), Some(PerfRecord::Lost(5)));
        assert_eq!(parse(PERF_RECORD_LOST, 0, &lost[..8]), None);
        assert_eq!(parse(77, 0, &lost), None);
        let time = 8u64.to_ne_bytes();
        let switch = |flags: u32| parse(PERF_RECORD_SWITCH, flags as u16, &time);
        assert_eq!(switch(0), Some(PerfRecord::In(8)));
        assert_eq!(switch(PERF_RECORD_MISC_SWITCH_OUT), Some(PerfRecord::Out(8, false)));
        let preempted = PERF_RECORD_MISC_SWITCH_OUT | PERF_RECORD_MISC_SWITCH_OUT_PREEMPT;
        assert_eq!(switch(preempted), Some(PerfRecord::Out(8, true)));
        assert_eq!(parse(PERF_RECORD_SWITCH, 0, &time[..7]), None);
    }
}
