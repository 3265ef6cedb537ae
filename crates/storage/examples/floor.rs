//! What an I/O channel costs by itself: 4 KiB operations on one spinning thread, for each kind of channel.
//!
//! `cargo run --release -p ioplane-storage --example floor -- [IMAGE] [SECONDS] [read|write]`
//! prints, for each kind and depth: thousand operations a second, and processor time for each (kernel workers and
//! threads of the channel included).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_cores::{RingChoice, context_with_ring};
use ioplane_device::CoreContext;
use ioplane_memory::{GuestMap, GuestRange, GuestView};
use ioplane_storage::*;

const DISK: u64 = 256 << 20;
const BLOCK: u64 = 4096;

/// Makes a backing of one kind.
type Make = Box<dyn Fn() -> Arc<dyn Backing>>;

fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Operations a second and processor microseconds for each.
fn measure(backing: &dyn Backing, depth: u16, write: bool, time: Duration) -> (f64, f64) {
    let map = GuestMap::anonymous(u64::from(depth) * BLOCK).expect("guest memory");
    let view = GuestView::new(Arc::new(map));
    let mut channel = backing.channel(depth).expect("a channel");
    let mut context = context_with_ring(RingChoice::Best).expect("a ring, where there are rings");
    let mut free: Vec<Tag> = (0..depth).map(Tag).collect();
    let (mut state, mut count) = (0x9e37_79b9_7f4a_7c15u64, 0u64);
    let (start, cpu_before) = (Instant::now(), cpu());
    while start.elapsed() < time {
        for _ in 0..64 {
            // One poll: all that is free, at random places.
            for index in (0..free.len()).rev() {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let tag = free[index];
                let range = [GuestRange { gpa: u64::from(tag.0) * BLOCK, len: BLOCK as u32 }];
                let offset = state % (DISK / BLOCK) * BLOCK;
                let op = if write {
                    Op::Write { offset, from: &range }
                } else {
                    Op::Read { offset, into: &range }
                };
                match channel.submit(&mut context, &view, &op, tag) {
                    Submitted::Done(outcome) => {
                        outcome.expect("an operation");
                        count += 1;
                    }
                    Submitted::Pending => {
                        free.swap_remove(index);
                    }
                }
            }
            channel.push(&mut context);
            if let Some(io) = context.io() {
                io.enter();
            }
            channel.reap(&mut context, &mut |tag, outcome| {
                outcome.expect("an operation");
                free.push(tag);
                count += 1;
            });
        }
    }
    let (elapsed, cpu) = (start.elapsed(), cpu() - cpu_before);
    channel.detach(&mut context);
    (count as f64 / elapsed.as_secs_f64(), cpu.as_secs_f64() * 1e6 / count as f64)
}

/// The same copies with nothing around them: what the memory of this machine allows.
fn bare_copy(time: Duration) -> (f64, f64) {
    let mapping = |bytes| {
        let mapping = Arc::new(ioplane_memory::Mapping::anonymous("bare", bytes).expect("memory"));
        let len = mapping.len();
        ioplane_memory::Window::of_mapping(&mapping, 0, len).expect("memory")
    };
    let disk = mapping(DISK);
    for page in (0..DISK as usize).step_by(BLOCK as usize) {
        disk.put_u64(page, 1);
    }
    let view = GuestView::new(Arc::new(GuestMap::anonymous(32 * BLOCK).expect("guest memory")));
    let (mut state, mut count) = (0x9e37_79b9_7f4a_7c15u64, 0u64);
    let (start, cpu_before) = (Instant::now(), cpu());
    while start.elapsed() < time {
        for slot in 0..1024 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let offset = (state % (DISK / BLOCK) * BLOCK) as usize;
            view.copy_from(slot % 32 * BLOCK, &disk, offset, BLOCK as usize).expect("a copy");
            count += 1;
        }
    }
    let (elapsed, cpu) = (start.elapsed(), cpu() - cpu_before);
    (count as f64 / elapsed.as_secs_f64(), cpu.as_secs_f64() * 1e6 / count as f64)
}

fn fill(backing: &dyn Backing) {
    let chunk = 1 << 20;
    let view = GuestView::new(Arc::new(GuestMap::anonymous(chunk).expect("guest memory")));
    view.write(0, &vec![0x5a; chunk as usize]).expect("filling");
    let mut channel = backing.channel(1).expect("a channel");
    // Without a ring: on the spot.
    let mut context = CoreContext::default();
    for offset in (0..DISK).step_by(chunk as usize) {
        let op = Op::Write { offset, from: &[GuestRange { gpa: 0, len: chunk as u32 }] };
        if channel.submit(&mut context, &view, &op, Tag(0)) == Submitted::Pending {
            channel.push(&mut context);
            while channel.in_flight() > 0 {
                channel.reap(&mut context, &mut |_, outcome| outcome.expect("filling"));
            }
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().map_or_else(|| std::env::temp_dir().join("ioplane-floor.img"), PathBuf::from);
    let seconds: f64 = arguments.next().and_then(|word| word.parse().ok()).unwrap_or(1.0);
    let only = arguments.next();
    let time = Duration::from_secs_f64(seconds);
    std::fs::File::create(&path).and_then(|file| file.set_len(DISK)).expect("making an image");

    let mut kinds: Vec<(String, Make)> =
        vec![("memory".into(), Box::new(|| MemoryBacking::new(DISK).expect("memory")))];
    for direct in [Direct::Off, Direct::On] {
        for engine in [EngineChoice::IoUring, EngineChoice::Threads] {
            let options = FileOptions { direct, engine, ..FileOptions::new(&path) };
            let cache = if direct == Direct::On { "O_DIRECT" } else { "page cache" };
            let name = format!("file, {engine:?}, {cache}");
            kinds.push((name, Box::new(move || FileBacking::open(options.clone()).expect("an image"))));
        }
    }
    println!("{:34} {:>5} {:>6} {:>10} {:>9}", "channel", "op", "depth", "kIOPS", "cpu us/op");
    let (rate, each) = bare_copy(time);
    println!("{:34} {:>5} {:>6} {:>10.1} {each:>9.3}", "bare copy", "read", "-", rate / 1e3);
    for (name, make) in &kinds {
        let backing = make();
        fill(&*backing);
        for write in [false, true] {
            let op = if write { "write" } else { "read" };
            if only.as_deref().is_some_and(|only| only != op) {
                continue;
            }
            for depth in [1, 32, 128] {
                let (rate, each) = measure(&*backing, depth, write, time);
                println!("{name:34} {op:>5} {depth:>6} {:>10.1} {each:>9.3}", rate / 1e3);
            }
        }
    }
    let _ = std::fs::remove_file(&path);
}
