//! A hostile neighbour's front end: broken rings, broken conversations, honest requests as fast as they come.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::driver::raw::RawDesc;
use crate::driver::spec::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use crate::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RawRing, RingMode, Shape};
use crate::front::{FrontEnd, FrontEndRequest, Wants};

const MIB: u64 = 1 << 20;
/// How long a device may take to be done with an honest request, or to end a conversation.
const PATIENCE: Duration = Duration::from_secs(10);

/// Acts of a round: [`SPOILS`], then one spoilt conversation, then greed.
pub const ROUND: u64 = SPOILS.len() as u64 + 2;

/// One request in the available ring that is none.
type Spoil = fn(RawRing<'_>);

/// Each is one fault of its ring.
pub const SPOILS: [Spoil; 6] = [
    // A chain without an end.
    |ring| ring.set_desc(0, RawDesc { addr: 0, len: 16, flags: VIRTQ_DESC_F_NEXT, next: 0 }),
    // Outside memory.
    |ring| ring.set_desc(0, RawDesc { addr: 1 << 50, len: 16, flags: 0, next: 0 }),
    // A length that wraps around.
    |ring| {
        ring.set_desc(0, RawDesc { addr: u64::MAX - 8, len: u32::MAX, flags: VIRTQ_DESC_F_WRITE, next: 0 })
    },
    // A successor outside the table.
    |ring| ring.set_desc(0, RawDesc { addr: 0, len: 16, flags: VIRTQ_DESC_F_NEXT, next: 60_000 }),
    // A table of an odd length.
    |ring| ring.set_desc(0, RawDesc { addr: 0, len: 17, flags: VIRTQ_DESC_F_INDIRECT, next: 0 }),
    // More requests than the ring has room for.
    |ring| ring.set_avail_idx(ring.avail_idx().wrapping_add(30_000)),
];

/// Does the act with this number to the disk at `socket`, and leaves it `time` to notice.
pub fn act(socket: &Path, number: u64, time: Duration) -> Result<(), String> {
    match number % ROUND {
        6 => spoil_a_conversation(socket, number / ROUND),
        7 => be_greedy(socket),
        which => spoil_a_ring(socket, SPOILS[which as usize], time),
    }
}

fn spoil_a_ring(socket: &Path, spoil: Spoil, time: Duration) -> Result<(), String> {
    let mut front = FrontEnd::connect(socket, Wants::default()).map_err(text)?;
    let mut memory = GuestMemory::new(4 * MIB).map_err(text)?;
    let plan = DiskPlan::new(4, 4096, Shape::Direct);
    let mut disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan).map_err(text)?;
    front.share(&memory).map_err(text)?;
    front.start(0, &memory, disk.place(), 0).map_err(text)?;
    let ring = disk.ring().raw();
    spoil(ring);
    if ring.avail_idx() == 0 {
        ring.offer(0);
    }
    front.kick(0);
    std::thread::sleep(time);
    // Whatever became of the queue, the connection is there for who wants to reset it.
    front.stop(0).map_err(text)?;
    Ok(())
}

fn spoil_a_conversation(socket: &Path, round: u64) -> Result<(), String> {
    let front = FrontEnd::connect(socket, Wants::default()).map_err(text)?;
    let garbage: Vec<u8> = (0..4096u64).map(|at| (at.wrapping_mul(round | 1) >> 3) as u8).collect();
    let _ = match round % 3 {
        0 => front.wire().send_raw(FrontEndRequest::SET_MEM_TABLE as u32, 1, u32::MAX, &garbage[..64], &[]),
        1 => front.wire().send_raw(4711, 1, 64, &garbage[..64], &[]),
        _ => front.wire().send_bytes(&garbage, &[]),
    };
    if front.wire().closed_within(PATIENCE) {
        return Ok(());
    }
    Err("garbage did not end the conversation".into())
}

/// Honest requests as fast as they come, all at once: greedy, and within its rights.
fn be_greedy(socket: &Path) -> Result<(), String> {
    let mut front = FrontEnd::connect(socket, Wants::default()).map_err(text)?;
    let mut memory = GuestMemory::new(16 * MIB).map_err(text)?;
    let plan = DiskPlan::new(32, 65536, Shape::Indirect);
    let mut disk = Disk::new(&mut memory, 64, RingMode::of(front.features()), plan).map_err(text)?;
    front.share(&memory).map_err(text)?;
    front.start(0, &memory, disk.place(), 0).map_err(text)?;
    // What a guest writes it has filled before. Memory that it has never touched would have to be made by the kernel while the core copies.
    let data = [0x5a; 65536];
    while let Some(token) = disk.next() {
        disk.write_data(token, &data).map_err(text)?;
        disk.submit(DiskOp::Write, 0, 65536);
    }
    front.kick(0);
    let end = Instant::now() + PATIENCE;
    while disk.in_flight() > 0 && Instant::now() < end {
        if disk.reap().map_err(text)?.is_none() {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    if disk.in_flight() > 0 {
        return Err("honest requests of the neighbour are not answered".into());
    }
    front.stop(0).map_err(text)?;
    Ok(())
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
