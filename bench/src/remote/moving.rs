//! A guest that moves between two importers of one export: what a move costs by itself, without a VM.
//!
//! The test kit plays both VMMs: their memory is one, so none is copied, and nothing but the disk takes time. The order is QEMU's: the guest stands still,
//! GET_VRING_BASE, the other front end starts the ring, the guest goes on. A real pair of QEMUs is `vm.rs`.
//!
//! ```text
//!   last completion | guest stands still | GET_VRING_BASE answered | ring starts there, claim, first request | first completion
//!                   |---------------------------------------- still -----------------------------------------|
//!                                                          |--------------------- device --------------------|
//! ```

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ioplane_figures::report::median;
use ioplane_testkit::driver::{Disk, DiskOp, Token};
use ioplane_testkit::front::FrontEnd;

use super::Bench;
use super::contender::Listener;
use super::swap::p99;
use crate::core::stage::FORM;
use crate::daemon::Configuration;
use crate::exitless::load::{BLOCK, SECTORS, Scatter};
use crate::gaps::DEPTH;
use crate::guest::{Guest, PATIENCE, drain};
use crate::measured::Figure;
use crate::served::{Served, ioplane};

/// Of the image.
const BYTES: u64 = 64 << 20;
/// How long the guest is on a host before it moves on.
const STAY: Duration = Duration::from_millis(50);

/// Moves with a guest that reads and writes, and with one that only reads.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    let moves = bench.pace.moves;
    eprintln!("{moves} moves of a guest that writes");
    let written = Hosts::start(bench, "moving-writes")?.moves(bench, moves, true)?;
    eprintln!("{moves} moves of a guest that reads");
    let read = Hosts::start(bench, "moving-reads")?.moves(bench, moves, false)?;
    let of = |all: &[Moved], part: fn(&Moved) -> f64| all.iter().map(part).collect::<Vec<f64>>();
    let device = of(&written, |moved| moved.device);
    let (still, drained) = (of(&written, |moved| moved.still), of(&written, |moved| moved.drain));
    let reads = of(&read, |moved| moved.device);
    let figure = Figure::median(&device)
        .beside("p99_ms", p99(&device))
        .beside("longest_ms", device.iter().copied().fold(0.0, f64::max))
        .beside("reads_only_ms", median(reads.iter().copied()))
        .beside("reads_only_p99_ms", p99(&reads))
        .beside("without_a_completion_ms", median(still.iter().copied()))
        .beside("without_a_completion_p99_ms", p99(&still))
        .beside("requests_in_flight_end_ms", median(drained))
        .beside("longest_gap_without_a_move_p99_ms", p99(&of(&written, |moved| moved.quiet)))
        .beside("depth", DEPTH)
        .beside("vmm", "the test kit's front ends: no memory is copied");
    Ok(vec![("move_device_ms", figure)])
}

/// One move; ms.
#[derive(Debug, Clone, Copy)]
struct Moved {
    /// From the last completion that the guest saw on the source to the first one on the destination.
    still: f64,
    /// From GET_VRING_BASE to its answer: what is in flight ends.
    drain: f64,
    /// From that answer to the first completion on the destination.
    device: f64,
    /// The longest time without a completion while it did not move.
    quiet: f64,
}

/// An exporter with an image on a disk, and two importers.
struct Hosts {
    sockets: [PathBuf; 2],
    importers: [Served; 2],
    _exporter: Served,
}

impl Hosts {
    fn start(bench: &Bench, name: &str) -> Result<Self> {
        let folder = bench.folders.run(name);
        std::fs::create_dir_all(&folder)?;
        let image = folder.join("data.img");
        std::fs::File::create(&image)?.set_len(BYTES)?;
        let listener = Listener::tcp()?;
        let address = listener.address().context("an address")?;
        let keys = format!("path = {image:?}\nlisten = \"{address}\"\nplain = true");
        let configuration = Configuration::new(bench.mode).export("data", &folder.join("nbd.sock"), &keys);
        let mut exporter = configuration.start(&ioplane()?, &folder.join("exporter"), &bench.place)?;
        listener.wait(&mut exporter)?;
        let start = |host: &str| -> Result<(PathBuf, Served)> {
            let folder = folder.join(host);
            let socket = folder.join("disk.sock");
            let keys = format!("remote = \"{}\"", listener.uri());
            let configuration = Configuration::new(bench.mode).disk("data", &socket, &keys);
            let mut importer = configuration.start(&ioplane()?, &folder, &bench.place)?;
            importer.await_socket(&socket)?;
            Ok((socket, importer))
        };
        let ((one, first), (other, second)) = (start("one")?, start("other")?);
        Ok(Hosts { sockets: [one, other], importers: [first, second], _exporter: exporter })
    }

    /// A guest that moves so often.
    fn moves(self, bench: &Bench, moves: usize, writes: bool) -> Result<Vec<Moved>> {
        let mut traveller = Traveller::begin(&self.sockets[0], writes)?;
        let moved = (1..=moves).map(|number| {
            // The destination's VMM is there before the guest stops, as with QEMU.
            let next = traveller.guest.expected_at(&self.sockets[number % 2])?;
            traveller.stay(STAY.max(bench.pace.warm))?;
            traveller.go(next)
        });
        let moved: Result<Vec<Moved>> = moved.collect();
        let moved = moved.and_then(|moved| traveller.check().map(|()| moved));
        moved.with_context(|| self.importers.iter().map(Served::log_tail).collect::<Vec<_>>().join("\n"))
    }
}

/// What a request in flight asks for: which block, and what is to be in it.
#[derive(Debug, Clone, Copy, Default)]
struct Asked {
    block: u64,
    /// Of a write; a read finds what the block is known to hold.
    version: Option<u64>,
}

/// A guest with [`DEPTH`] requests in flight, every one of which it checks. Each slot has blocks of its own, so no two requests meet.
struct Traveller {
    guest: Guest,
    writes: bool,
    scatter: Scatter,
    asked: Vec<Asked>,
    /// What each block holds.
    known: Vec<u64>,
    version: u64,
    last: Instant,
    quiet: Duration,
}

impl Traveller {
    fn begin(socket: &Path, writes: bool) -> Result<Self> {
        let mut guest = Guest::connect(socket, FORM)?;
        guest.queues[0].ring().disable_interrupts();
        let known = vec![0; (guest.capacity / u64::from(BLOCK)) as usize];
        Ok(Traveller {
            guest,
            writes,
            scatter: Scatter::new(1),
            asked: vec![Asked::default(); usize::from(FORM.plan.slots)],
            known,
            version: 0,
            last: Instant::now(),
            quiet: Duration::ZERO,
        })
    }

    /// Takes what is done; how many.
    fn reap(&mut self) -> Result<usize> {
        let disk = &mut self.guest.queues[0];
        let mut count = 0;
        while let Some(done) = disk.reap()? {
            ensure!(done.ok(), "a request ended with status {:#x}", done.status);
            let Asked { block, version } = self.asked[done.token.slot()];
            match version {
                Some(version) => self.known[block as usize] = version,
                None => expect(disk, done.token, self.known[block as usize])
                    .with_context(|| format!("block {block}"))?,
            }
            count += 1;
        }
        Ok(count)
    }

    /// Has [`DEPTH`] in flight again.
    fn fill(&mut self) -> Result<()> {
        let disk = &mut self.guest.queues[0];
        let slots = u64::from(FORM.plan.slots);
        let mut submitted = false;
        while disk.in_flight() < DEPTH
            && let Some(token) = disk.next()
        {
            let own = self.known.len() as u64 / slots;
            let block = self.scatter.below(own) * slots + token.slot() as u64;
            let write = self.writes && self.scatter.below(2) == 0;
            let op = if write { DiskOp::Write } else { DiskOp::Read };
            self.asked[token.slot()] = Asked { block, version: None };
            if write {
                self.version += 1;
                self.asked[token.slot()].version = Some(self.version);
                disk.write_data(token, &self.version.to_le_bytes().repeat(BLOCK as usize / 8))?;
            }
            disk.submit(op, block * SECTORS, BLOCK);
            submitted = true;
        }
        if submitted {
            self.guest.kick_if_needed(0);
        }
        Ok(())
    }

    /// Goes on where it is.
    fn stay(&mut self, time: Duration) -> Result<()> {
        let begin = Instant::now();
        (self.last, self.quiet) = (begin, Duration::ZERO);
        while begin.elapsed() < time {
            self.fill()?;
            if self.reap()? > 0 {
                let now = Instant::now();
                self.quiet = self.quiet.max(now - self.last);
                self.last = now;
            }
            ensure!(self.last.elapsed() < PATIENCE, "nothing completed for {PATIENCE:?}");
        }
        Ok(())
    }

    /// Moves to the host whose VMM `next` is.
    fn go(&mut self, next: FrontEnd) -> Result<Moved> {
        if self.reap()? > 0 {
            self.last = Instant::now();
        }
        self.fill()?;
        ensure!(self.guest.queues[0].in_flight() == DEPTH, "the guest has nothing to stop for");
        let (last, stopping) = (self.last, Instant::now());
        let base = self.guest.front.stop(0)?;
        let stopped = Instant::now();
        // The source has answered all that it had taken, so what comes from now on comes from the destination.
        self.reap()?;
        let left = self.guest.go_on(next, &[base])?;
        self.guest.queues[0].ring().disable_interrupts();
        self.fill()?;
        while self.reap()? == 0 {
            ensure!(stopped.elapsed() < PATIENCE, "nothing completed for {PATIENCE:?} after the move");
        }
        let first = Instant::now();
        drop(left);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(Moved {
            still: ms(first - last),
            drain: ms(stopped - stopping),
            device: ms(first - stopped),
            quiet: ms(self.quiet),
        })
    }

    /// Reads every block that it has written.
    fn check(&mut self) -> Result<()> {
        let begin = Instant::now();
        while self.guest.queues[0].in_flight() > 0 {
            self.reap()?;
            ensure!(begin.elapsed() < PATIENCE, "requests were never completed");
        }
        for block in 0..self.known.len() as u64 {
            if self.known[block as usize] == 0 {
                continue;
            }
            let disk = &mut self.guest.queues[0];
            let token = disk.submit(DiskOp::Read, block * SECTORS, BLOCK).context("a free slot")?;
            self.guest.kick_if_needed(0);
            drain(&mut self.guest.queues[0])?;
            expect(&self.guest.queues[0], token, self.known[block as usize])
                .with_context(|| format!("block {block}, at the end"))?;
        }
        self.guest.front.stop(0)?;
        Ok(())
    }
}

/// The data of a read are those of this version.
fn expect(disk: &Disk, token: Token, version: u64) -> Result<()> {
    let mut bytes = [0u8; BLOCK as usize];
    disk.read_data(token, &mut bytes)?;
    let right = bytes.chunks_exact(8).all(|word| word == version.to_le_bytes());
    ensure!(right, "it does not hold version {version}, but {:x?}", &bytes[..16]);
    Ok(())
}
