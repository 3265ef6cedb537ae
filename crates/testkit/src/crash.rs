//! Killing a daemon under load, and finding out whether its guest could tell.
//!
//! ```text
//!   CrashLoad: queues x depth requests in flight over vhost-user, every block stamped with what it must hold
//!       |                            kill (a kill point, or kill -9)
//!   Victim: the daemon's process --------------X   new process, same image, same in-flight region
//!       |                                              |
//!   every request is answered exactly once, without error, and every read finds the last write acknowledged
//! ```
//!
//! What a crash must not do is said as an `Err` of text, not a panic: a test also wants to see it happen, without the
//! journal.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::driver::spec::VIRTIO_F_RING_PACKED;
use crate::driver::{Disk, DiskOp, DiskPlan, GuestMemory, RingMode, Shape, Token};
use crate::front::{FrontEnd, Wants};

mod campaign;

pub use campaign::Campaign;

/// Bytes of a block; each queue has its own.
pub const BLOCK: u32 = 4096;
/// Blocks of each queue.
pub const BLOCKS: usize = 256;
/// Sectors of a block.
const SECTORS: u64 = BLOCK as u64 / 512;
/// Entries of a ring.
const RING: u16 = 64;

/// How a victim ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By SIGKILL.
    Killed,
    /// In another way: a bug.
    Otherwise,
}

/// A daemon's process, to be killed. Killed at the latest when dropped.
#[derive(Debug)]
pub struct Victim {
    child: Child,
    socket: PathBuf,
}

impl Victim {
    /// Starts `command`, which will serve on `socket`.
    pub fn start(mut command: Command, socket: &Path) -> std::io::Result<Self> {
        let _ = std::fs::remove_file(socket);
        let child = command.stdout(Stdio::null()).stdin(Stdio::null()).spawn()?;
        Ok(Victim { child, socket: socket.to_owned() })
    }

    pub fn ended(&mut self) -> Option<End> {
        let status = self.child.try_wait().ok()??;
        Some(if status.signal() == Some(9) { End::Killed } else { End::Otherwise })
    }

    /// Process number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What each of its threads is doing, from /proc: to tell a daemon that has lost a request from a disk that stands still.
    fn threads(&self) -> String {
        let tasks = format!("/proc/{}/task", self.child.id());
        let mut all = String::new();
        for task in std::fs::read_dir(tasks).into_iter().flatten().flatten() {
            let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let state =
                read("stat").rsplit(')').next().unwrap_or_default().trim().chars().next().unwrap_or('?');
            let (comm, wchan, stack) = (read("comm"), read("wchan"), read("stack"));
            all += &format!("\n{} {state} in {wchan}\n{stack}", comm.trim());
        }
        all
    }

    /// Sends SIGKILL and waits for the process to go.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.kill();
    }
}

#[derive(Debug, Clone, Copy)]
struct Pending {
    op: DiskOp,
    block: usize,
    sequence: u64,
    since: Instant,
}

#[derive(Debug)]
struct LoadQueue {
    disk: Disk,
    pending: Vec<Option<Pending>>,
    /// What each block holds: the sequence number of the last write acknowledged.
    holds: Vec<u64>,
    busy: Vec<bool>,
    avoided: Option<usize>,
    /// Nothing more is submitted on it.
    quiet: bool,
}

/// The load, its expectations, and the front end that carries it.
#[derive(Debug)]
pub struct CrashLoad {
    front: Option<FrontEnd>,
    wants: Wants,
    memory: GuestMemory,
    queues: Vec<LoadQueue>,
    sequence: u64,
    random: u64,
    /// In what it writes, beside the number: two loads write the same numbers.
    owner: u64,
    /// Requests answered so far.
    pub answered: u64,
    /// Longest wait for an answer.
    pub longest: Duration,
    /// How long a request may wait for its answer, the daemon alive, before it counts as lost.
    pub lost_after: Duration,
}

impl CrashLoad {
    /// `queues` queues with `depth` requests in flight each; `seed` decides everything that is random. The requests lie in
    /// split rings and indirect tables.
    pub fn new(queues: u16, depth: u16, seed: u64) -> Result<Self, String> {
        Self::on(RingMode { event_idx: true, packed: false }, queues, depth, seed)
    }

    /// As [`CrashLoad::new`], on packed rings, in chains of descriptors that the device overwrites.
    pub fn packed(queues: u16, depth: u16, seed: u64) -> Result<Self, String> {
        Self::on(RingMode { event_idx: true, packed: true }, queues, depth, seed)
    }

    fn on(mode: RingMode, queues: u16, depth: u16, seed: u64) -> Result<Self, String> {
        let mut memory = GuestMemory::new(32 << 20).map_err(text)?;
        let shape = if mode.packed { Shape::Direct } else { Shape::Indirect };
        let plan = DiskPlan { slots: depth, max_bytes: BLOCK, segments: 1, shape };
        let mut wants = Wants::default();
        if mode.packed {
            wants.features |= VIRTIO_F_RING_PACKED;
        }
        let mut made = Vec::new();
        for _ in 0..queues {
            let disk = Disk::new(&mut memory, RING, mode, plan).map_err(text)?;
            made.push(LoadQueue {
                disk,
                pending: vec![None; depth.into()],
                holds: vec![0; BLOCKS],
                busy: vec![false; BLOCKS],
                avoided: None,
                quiet: false,
            });
        }
        Ok(CrashLoad {
            front: None,
            wants,
            memory,
            queues: made,
            sequence: 0,
            random: seed | 1,
            owner: seed,
            answered: 0,
            longest: Duration::ZERO,
            lost_after: Duration::from_secs(60),
        })
    }

    pub fn image_bytes(queues: u16) -> u64 {
        u64::from(queues) * BLOCKS as u64 * u64::from(BLOCK)
    }

    fn dice(&mut self) -> u64 {
        // xorshift64*: only has to be different each time and the same for the same seed.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number from `from` up to, not with, `to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.dice() % (to - from)
    }

    /// Connects to a victim, the first or the next one, as QEMU does: same memory, same rings, same in-flight region, and the
    /// used index as base. `None` if the victim died meanwhile.
    pub fn connect(&mut self, victim: &mut Victim, patience: Duration) -> Result<Option<()>, String> {
        let deadline = Instant::now() + patience;
        let path = victim.socket.clone();
        loop {
            let outcome = match &mut self.front {
                None => FrontEnd::connect(&path, self.wants).and_then(|mut front| {
                    front.track_inflight(self.queues.len() as u16, RING)?;
                    self.front = Some(front);
                    Ok(())
                }),
                Some(front) => front.reconnect(&path),
            };
            let outcome = outcome.and_then(|()| self.share());
            match outcome {
                Ok(()) => return Ok(Some(())),
                Err(_) if victim.ended().is_some() => return Ok(None),
                Err(error) if Instant::now() > deadline => return Err(format!("no connection: {error}")),
                Err(_) => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// Connects to whoever listens at `socket`, for a load whose daemon somebody else looks after; again if that one has died,
    /// as QEMU does.
    pub fn attach(&mut self, socket: &Path) -> Result<(), String> {
        match &mut self.front {
            Some(front) => front.reconnect(socket).map_err(text)?,
            None => {
                let mut front = FrontEnd::connect(socket, self.wants).map_err(text)?;
                front.track_inflight(self.queues.len() as u16, RING).map_err(text)?;
                self.front = Some(front);
            }
        }
        self.share().map_err(text)
    }

    /// Whether the connection is the one that was made, and still there.
    pub fn connected(&self) -> bool {
        self.front.as_ref().is_some_and(|front| !front.wire().closed_within(Duration::from_millis(1)))
    }

    fn share(&mut self) -> Result<(), crate::front::FrontError> {
        let Some(front) = &mut self.front else { return Ok(()) };
        front.share(&self.memory)?;
        for (index, queue) in (0..).zip(&mut self.queues) {
            let base = queue.disk.ring().base();
            front.start(index, &self.memory, queue.disk.place(), base)?;
            // Requests made while nobody was there: QEMU kicks too.
            front.kick(index);
        }
        let now = Instant::now();
        self.queues
            .iter_mut()
            .flat_map(|queue| queue.pending.iter_mut().flatten())
            .for_each(|p| p.since = now);
        Ok(())
    }

    fn stamp(owner: u64, queue: usize, block: usize, sequence: u64) -> [u8; 32] {
        let mut stamp = [0; 32];
        if sequence != 0 {
            for (at, word) in
                [owner << 16 | queue as u64, block as u64, sequence, !sequence].into_iter().enumerate()
            {
                stamp[8 * at..8 * at + 8].copy_from_slice(&word.to_le_bytes());
            }
        }
        stamp
    }

    /// A request on a queue, outside the load: its slot. For tests that plant something.
    pub fn plant(&mut self, queue: usize, op: DiskOp, sector: u64) -> Result<Token, String> {
        let now = Instant::now();
        self.queues[queue].quiet = true;
        while self.queues[queue].disk.next().is_none() {
            self.step()?;
        }
        let planted = &mut self.queues[queue];
        let token = planted.disk.submit(op, sector, BLOCK).ok_or("no free slot")?;
        planted.pending[token.slot()] =
            Some(Pending { op: DiskOp::Flush, block: 0, sequence: 0, since: now });
        if let Some(front) = &mut self.front {
            front.kick(queue as u16);
        }
        Ok(token)
    }

    /// The block at `sector` is left alone by the load of `queue`.
    pub fn avoid(&mut self, queue: usize, sector: u64) {
        let block = ((sector / SECTORS) as usize).checked_sub(queue * BLOCKS).filter(|block| *block < BLOCKS);
        self.queues[queue].avoided = block;
    }

    /// Nothing is submitted on that queue any more, and nothing expected of it.
    pub fn give_up(&mut self, queue: usize) {
        self.queues[queue].quiet = true;
        self.queues[queue].pending.iter_mut().for_each(|pending| *pending = None);
    }

    fn submit(&mut self, index: usize) -> Result<(), String> {
        while !self.queues[index].quiet && self.queues[index].disk.next().is_some() {
            let block = (self.dice() % BLOCKS as u64) as usize;
            let kind = self.dice() % 16;
            let op = match kind {
                0 => DiskOp::Flush,
                1..=8 => DiskOp::Write,
                _ => DiskOp::Read,
            };
            self.sequence += 1;
            let (owner, sequence) = (self.owner, self.sequence);
            let queue = &mut self.queues[index];
            if op != DiskOp::Flush {
                // One request a block at a time: then it is known what a read must find.
                if queue.busy[block] || queue.avoided == Some(block) {
                    continue;
                }
                queue.busy[block] = true;
            }
            if let (DiskOp::Write, Some(token)) = (op, queue.disk.next()) {
                let mut data = [0; BLOCK as usize];
                data.chunks_exact_mut(32)
                    .for_each(|c| c.copy_from_slice(&Self::stamp(owner, index, block, sequence)));
                queue.disk.write_data(token, &data).map_err(text)?;
            }
            let sector = (index * BLOCKS + block) as u64 * SECTORS;
            let bytes = if op == DiskOp::Flush { 0 } else { BLOCK };
            let token = queue.disk.submit(op, sector, bytes).ok_or("no free slot")?;
            queue.pending[token.slot()] = Some(Pending { op, block, sequence, since: Instant::now() });
            if queue.disk.ring().kick_needed()
                && let Some(front) = &mut self.front
            {
                front.kick(index as u16);
            }
        }
        Ok(())
    }

    fn reap(&mut self, index: usize) -> Result<(), String> {
        let owner = self.owner;
        let queue = &mut self.queues[index];
        while let Some(done) = queue.disk.reap().map_err(|error| format!("queue {index}: {error}"))? {
            let pending = queue.pending[done.token.slot()].take();
            let pending = pending.ok_or_else(|| format!("queue {index}: an answer to nothing"))?;
            if !done.ok() {
                return Err(format!(
                    "queue {index}: {:?} of block {} ended with status {}",
                    pending.op, pending.block, done.status
                ));
            }
            self.answered += 1;
            self.longest = self.longest.max(pending.since.elapsed());
            match pending.op {
                DiskOp::Write => queue.holds[pending.block] = pending.sequence,
                DiskOp::Read => {
                    let mut data = [0; BLOCK as usize];
                    queue.disk.read_data(done.token, &mut data).map_err(text)?;
                    let wanted = Self::stamp(owner, index, pending.block, queue.holds[pending.block]);
                    if let Some(at) = data.chunks_exact(32).position(|chunk| chunk != wanted) {
                        let word = |word: usize| {
                            let from = 32 * at + 8 * word;
                            u64::from_le_bytes(data[from..from + 8].try_into().unwrap_or_default())
                        };
                        return Err(format!(
                            "queue {index}: block {} holds write {} of the load of seed {} at byte {}, and {} of {owner} was acknowledged",
                            pending.block,
                            word(2),
                            word(0) >> 16,
                            32 * at,
                            queue.holds[pending.block]
                        ));
                    }
                }
                _ => {}
            }
            if pending.op != DiskOp::Flush {
                queue.busy[pending.block] = false;
            }
        }
        Ok(())
    }

    /// One turn of the load on all queues.
    pub fn step(&mut self) -> Result<(), String> {
        for index in 0..self.queues.len() {
            self.reap(index)?;
            self.submit(index)?;
        }
        let pending = self.queues.iter().flat_map(|queue| queue.pending.iter().flatten());
        let oldest = pending.map(|pending| pending.since.elapsed()).max().unwrap_or_default();
        if oldest > self.lost_after {
            return Err(format!("no answer within {oldest:?}: lost; {}", self.rings()));
        }
        std::thread::yield_now();
        Ok(())
    }

    /// Goes on until the victim has ended or `time` is over: how it ended.
    pub fn run(&mut self, victim: &mut Victim, time: Duration) -> Result<Option<End>, String> {
        let deadline = Instant::now() + time;
        while Instant::now() < deadline {
            for _ in 0..16 {
                self.step().map_err(|why| format!("{why}{}", victim.threads()))?;
            }
            if let Some(end) = victim.ended() {
                // What it used before it died is in the rings.
                for index in 0..self.queues.len() {
                    self.reap(index)?;
                }
                return Ok(Some(end));
            }
        }
        Ok(None)
    }

    /// Lets everything in flight end, then reads every block and checks it.
    pub fn settle(&mut self) -> Result<(), String> {
        let quiet: Vec<bool> = self.queues.iter().map(|queue| queue.quiet).collect();
        self.queues.iter_mut().for_each(|queue| queue.quiet = true);
        self.drain()?;
        for index in (0..self.queues.len()).filter(|index| !quiet[*index]) {
            for block in 0..BLOCKS {
                if self.queues[index].avoided == Some(block) {
                    continue;
                }
                let queue = &mut self.queues[index];
                let sector = (index * BLOCKS + block) as u64 * SECTORS;
                let token = queue.disk.submit(DiskOp::Read, sector, BLOCK).ok_or("no free slot")?;
                queue.pending[token.slot()] =
                    Some(Pending { op: DiskOp::Read, block, sequence: 0, since: Instant::now() });
                if let Some(front) = &mut self.front {
                    front.kick(index as u16);
                }
                self.drain()?;
            }
        }
        for (queue, quiet) in self.queues.iter_mut().zip(quiet) {
            queue.quiet = quiet;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), String> {
        while self.queues.iter().any(|queue| queue.pending.iter().any(Option::is_some)) {
            self.step()?;
        }
        Ok(())
    }

    /// Goes on until everything that was in flight now is answered, by a victim that lives.
    pub fn outlive(&mut self, victim: &mut Victim) -> Result<(), String> {
        let last = self.sequence;
        let old = |queue: &LoadQueue| queue.pending.iter().flatten().any(|pending| pending.sequence <= last);
        while self.queues.iter().any(old) {
            if let Some(end) = self.run(victim, Duration::from_millis(1))? {
                return Err(format!("the daemon died ({end:?}) while it replayed"));
            }
        }
        Ok(())
    }

    /// The indices of every ring, as the driver sees them.
    fn rings(&mut self) -> String {
        let text = |queue: &mut LoadQueue| {
            let ring = queue.disk.ring();
            format!("{} made available, {} taken back", ring.avail_idx(), ring.last_used())
        };
        self.queues.iter_mut().map(text).collect::<Vec<_>>().join("; ")
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
