//! One backend on one backing, connected, checked, and thawed only while it is its turn.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use ioplane_testkit::driver::{DiskOp, DiskPlan};

use super::backend::{Backend, Backing};
use super::check;
use super::load::{self, BLOCK, Load, Outcome, Scatter, Target};
use super::{RING, SHAPE, SLOTS};
use crate::guest::{self, Form, Guest};
use crate::served::{Place, Served};
use ioplane_figures::machine;

/// Everybody's guest is alike.
pub const FORM: Form = Form {
    ring: RING,
    queues: 1,
    plan: DiskPlan { slots: SLOTS, max_bytes: BLOCK, segments: 1, shape: SHAPE },
};

/// A connection with its own memory and its own ring.
pub struct Session {
    pub name: &'static str,
    /// How it serves, in words.
    pub how: String,
    served: Served,
    guest: Guest,
    blocks: u64,
    salt: u64,
}

impl Session {
    /// Starts `backend`, connects, checks every block if `whole` (a sample if not), and freezes it.
    pub fn open(
        backend: &dyn Backend,
        backing: &Backing,
        folder: &Path,
        place: &Place,
        whole: bool,
    ) -> Result<Self> {
        let mut session = Self::open_unchecked(backend, backing, folder, place)?;
        session.served.thaw();
        let count = if whole { session.blocks } else { 1024.min(session.blocks) };
        session.check(count)?;
        session.served.freeze();
        Ok(session)
    }

    /// As [`Session::open`], trusting it: for a backend that is no disk.
    pub fn open_unchecked(
        backend: &dyn Backend,
        backing: &Backing,
        folder: &Path,
        place: &Place,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let socket = folder.join("disk.sock");
        let mut served = backend.start(backing, &socket, folder, place)?;
        served.await_socket(&socket)?;
        let session = Self::connect(backend, backing, &socket, served)
            .with_context(|| format!("{} on {backing:?}", backend.name()))?;
        backing.unlink();
        session.served.freeze();
        Ok(session)
    }

    fn connect(backend: &dyn Backend, backing: &Backing, socket: &Path, served: Served) -> Result<Self> {
        let guest = Guest::connect(socket, FORM)?;
        let capacity = guest.capacity;
        ensure!(capacity == backing.len(), "the disk has {capacity} bytes, not {}", backing.len());
        let how = format!(
            "{}; features {:#x}, protocol {:#x}",
            backend.describe(backing),
            guest.front.features(),
            guest.front.protocol()
        );
        let blocks = backing.len() / u64::from(BLOCK);
        Ok(Session { name: backend.name(), how, served, guest, blocks, salt: 0 })
    }

    fn check(&mut self, count: u64) -> Result<()> {
        self.salt += 1;
        let (blocks, salt) = (self.blocks, self.salt);
        check::stamp_and_read(&mut self.guest, blocks, count, salt)
            .with_context(|| format!("{}: wrong data\n{}", self.name, self.served.log_tail()))
    }

    /// One round of `load` (whose block count is set here), between thaw and freeze.
    pub fn round(&mut self, load: Load, scatter: &mut Scatter) -> Result<Outcome> {
        self.served.thaw();
        let Guest { front, queues, .. } = &mut self.guest;
        let mut target = Target { front: Some(front), disk: &mut queues[0], pids: self.served.pids() };
        let outcome = load::run(&mut target, &Load { blocks: self.blocks, ..load }, scatter);
        let outcome = outcome
            .with_context(|| format!("{} at depth {}\n{}", self.name, load.depth, self.served.log_tail()))?;
        self.served.freeze();
        Ok(outcome)
    }

    /// Lets `act` drive its guest between thaw and freeze; the numbers are those of the processes that serve it. Nothing is to be in flight afterwards.
    pub fn turn<R>(&mut self, act: impl FnOnce(&mut Guest, &[u32]) -> Result<R>) -> Result<R> {
        self.served.thaw();
        let done = act(&mut self.guest, &self.served.pids());
        let done = done.with_context(|| format!("{}\n{}", self.name, self.served.log_tail()))?;
        self.served.freeze();
        Ok(done)
    }

    /// A sample of blocks once more, and the one request that no load makes. Returns what its io_uring workers may run on.
    pub fn close(mut self) -> Result<Vec<String>> {
        self.served.thaw();
        self.check(4096.min(self.blocks))?;
        self.guest.queues[0].submit(DiskOp::Flush, 0, 0);
        self.guest.kick_if_needed(0);
        guest::drain(&mut self.guest.queues[0]).with_context(|| format!("{}: flush", self.name))?;
        let workers = self.served.pids().into_iter().flat_map(machine::io_workers).collect();
        self.guest.front.stop(0)?;
        Ok(workers)
    }
}
