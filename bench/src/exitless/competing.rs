//! Guests that compete for one adaptive core: what the scheduler costs when all of it is in use.
//!
//! Each guest is in a group of its own with a weight, and has limits that it never reaches, of its disk and of its group. All keep equally
//! many requests in flight, so each poll asks whose turn it is, and each request asks two limits.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hdrhistogram::Histogram;
use ioplane_figures::machine::{Account, Books};

use super::check;
use super::load::{BLOCK, Outcome};
use super::session::FORM;
use crate::core::drive::{Flow, drive};
use crate::core::offered::Offered;
use crate::daemon::Configuration;
use crate::guest::{self, Guest};
use crate::mode::Mode;
use crate::served::{Place, Served};

/// The contender's name.
pub const NAME: &str = "scheduled";

/// Of each guest's group.
const WEIGHTS: [u32; 4] = [1, 1, 2, 4];
/// Far above what one core can do, of each disk and of each group.
const LIMITS: &str = "iops_limit = 50000000\nbandwidth_limit = \"500G\"";
/// Size of each disk, bytes.
const DISK: u64 = 16 << 20;

/// One daemon and its guests, thawed only while it is its turn.
pub struct Competition {
    served: Served,
    guests: Vec<Guest>,
}

fn name(number: usize) -> String {
    format!("guest{number}")
}

fn socket(folder: &Path, number: usize) -> std::path::PathBuf {
    folder.join(name(number)).with_extension("sock")
}

/// What the daemon is configured with, if `folder` is its own.
pub fn configuration(folder: &Path) -> Configuration {
    WEIGHTS.iter().enumerate().fold(Configuration::new(Mode::Adaptive), |all, (number, weight)| {
        let group = name(number);
        let disk = format!("queue_size = 256\nmemory = \"{DISK}\"\ngroup = {group:?}\n{LIMITS}");
        all.group(&group, &format!("weight = {weight}\n{LIMITS}")).disk(
            &group,
            &socket(folder, number),
            &disk,
        )
    })
}

impl Competition {
    /// Starts `binary`, connects all guests, checks every block of their disks, and freezes it.
    pub fn open(binary: &Path, folder: &Path, place: &Place) -> Result<Self> {
        let mut served = configuration(folder).start(binary, folder, place)?;
        let mut guests = Vec::new();
        for number in 0..WEIGHTS.len() {
            served.await_socket(&socket(folder, number))?;
            let connect = || -> Result<Guest> {
                let mut guest = Guest::connect(&socket(folder, number), FORM)?;
                ensure!(guest.capacity == DISK, "the disk has {} bytes, not {DISK}", guest.capacity);
                let blocks = DISK / u64::from(BLOCK);
                check::stamp_and_read(&mut guest, blocks, blocks, number as u64 + 1)?;
                Ok(guest)
            };
            let connected = connect();
            guests
                .push(connected.with_context(|| format!("{NAME}: {}\n{}", name(number), served.log_tail()))?);
        }
        served.freeze();
        Ok(Competition { served, guests })
    }

    /// One round of reads, `depth` in flight of each guest.
    pub fn round(&mut self, depth: u16, warm: Duration, time: Duration) -> Result<Outcome> {
        self.served.thaw();
        let outcome = self.run(depth, warm, time);
        let outcome =
            outcome.with_context(|| format!("{NAME} at depth {depth}\n{}", self.served.log_tail()))?;
        self.served.freeze();
        Ok(outcome)
    }

    fn run(&mut self, depth: u16, warm: Duration, time: Duration) -> Result<Outcome> {
        let pids = self.served.pids();
        drive(&mut flows(&mut self.guests, depth), warm, |_| {})?;
        let (mut latency, mut requests) = (Histogram::new_with_bounds(1, 100_000_000_000, 2)?, 0u64);
        let before = self.notifications();
        let books = Books::open(&pids);
        drive(&mut flows(&mut self.guests, depth), time, |done| {
            requests += 1;
            latency.saturating_record(done.at.saturating_sub(done.due));
        })?;
        // Processor time is also of what was in flight at the end and is not counted: at most 512 requests.
        let Account { cpu_ns, kernel_ns, foreign, .. } = books.close(&pids);
        let [kicks, interrupts] = self.notifications();
        Ok(Outcome {
            requests,
            seconds: time.as_secs_f64(),
            latency,
            kicks: kicks - before[0],
            interrupts: interrupts - before[1],
            cpu_ns,
            kernel_ns,
            foreign,
        })
    }

    /// Kicks and interrupts so far, of all guests.
    fn notifications(&mut self) -> [u64; 2] {
        let mut sums = [0; 2];
        for guest in &mut self.guests {
            if let Some((kick, call)) = guest.front.events(0) {
                call.take();
                sums[0] += kick.sum();
                sums[1] += call.sum();
            }
        }
        sums
    }

    /// A sample of each guest's blocks once more.
    pub fn close(mut self) -> Result<()> {
        self.served.thaw();
        for (number, guest) in self.guests.iter_mut().enumerate() {
            check::stamp_and_read(guest, DISK / u64::from(BLOCK), 512, number as u64 + 101)
                .with_context(|| format!("{NAME}: {}\n{}", name(number), self.served.log_tail()))?;
            guest::drain(&mut guest.queues[0])?;
            guest.front.stop(0)?;
        }
        Ok(())
    }
}

fn flows(guests: &mut [Guest], depth: u16) -> Vec<Flow<'_>> {
    let flow = |(number, guest)| Flow::new(guest, 0, Offered::Backlog(depth), BLOCK, number as u64 + 1);
    guests.iter_mut().enumerate().map(flow).collect()
}
