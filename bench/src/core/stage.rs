//! A daemon with its guests, frozen unless it is its turn.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ioplane_testkit::driver::{DiskPlan, Shape};

use super::Bench;
use crate::daemon::Configuration;
use crate::exitless::check::stamp_and_read;
use crate::exitless::load::BLOCK;
use crate::guest::{Form, Guest};
use crate::mode::Mode;
use crate::served::Served;

/// A guest with one queue of 4 KiB requests, like a Linux guest's.
pub const FORM: Form = Form {
    ring: 128,
    queues: 1,
    plan: DiskPlan { slots: 64, max_bytes: BLOCK, segments: 1, shape: Shape::Indirect },
};

/// A disk: its name, and the lines of its table that say what it is.
pub type DiskLines<'a> = (&'a str, &'a str);

pub struct Stage {
    served: Served,
    folder: PathBuf,
    /// In the order in which they connected.
    pub guests: Vec<Guest>,
}

impl Stage {
    /// Starts a daemon whose I/O cores are in `mode`, in the folder `name`.
    pub fn start(bench: &Bench, name: &str, mode: Mode, disks: &[DiskLines<'_>]) -> Result<Self> {
        Self::configured(bench, name, Configuration::new(mode), disks)
    }

    /// As [`Stage::start`], with more in its configuration than disks.
    pub fn configured(
        bench: &Bench,
        name: &str,
        configuration: Configuration,
        disks: &[DiskLines<'_>],
    ) -> Result<Self> {
        let folder = bench.folders.run(name);
        let add =
            |all: Configuration, (name, keys): &DiskLines<'_>| all.disk(name, &socket(&folder, name), keys);
        let configuration = disks.iter().fold(configuration, add);
        let mut served = configuration.start(&bench.binary, &folder, &bench.place)?;
        for (name, _) in disks {
            served.await_socket(&socket(&folder, name))?;
        }
        Ok(Stage { served, folder, guests: Vec::new() })
    }

    /// Connects a guest to disk `name` and checks a sample of its blocks, if its requests are large enough.
    pub fn connect(&mut self, name: &str, form: Form) -> Result<()> {
        self.turn(|stage| {
            let mut guest = Guest::connect(&socket(&stage.folder, name), form)?;
            let blocks = guest.capacity / u64::from(BLOCK);
            if form.plan.max_bytes >= BLOCK {
                stamp_and_read(&mut guest, blocks, blocks.min(64), 1)?;
            }
            stage.guests.push(guest);
            Ok(())
        })
        .with_context(|| format!("disk {name}"))
    }

    /// Lets the daemon run for as long as `act` does.
    pub fn turn<R>(&mut self, act: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.served.thaw();
        let done = act(self).with_context(|| self.served.log_tail())?;
        self.served.freeze();
        Ok(done)
    }

    /// Processes whose processor time is the daemon's.
    pub fn pids(&self) -> Vec<u32> {
        self.served.pids()
    }

    pub fn control(&self) -> PathBuf {
        self.folder.join("control")
    }

    /// Of disk `name`.
    pub fn socket(&self, name: &str) -> PathBuf {
        socket(&self.folder, name)
    }
}

fn socket(folder: &Path, name: &str) -> PathBuf {
    folder.join(name).with_extension("sock")
}
