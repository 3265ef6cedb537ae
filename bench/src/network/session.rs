//! One backend with two NICs, connected, checked, and thawed only while it is its turn.

use std::path::Path as FilePath;
use std::time::Duration;

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

use super::backend::{Backend, mac, socket};
use super::check;
use super::load::{Load, Outcome, Path};
use super::nic::{Nic, Shape};
use crate::served::{Place, Served};

/// Frames of ten thousand that may be lost at a rate called free of loss.
const LOST: u64 = 1;
/// Part of a trial's frames that may be late.
const OWED: f64 = 0.01;
/// Halvings of the range in which the loss-free rate lies: to less than one part in a hundred.
const HALVINGS: u32 = 7;

/// A connection with its own memory and its own rings; everybody's are alike.
pub struct Session {
    pub name: &'static str,
    served: Served,
    path: Path,
}

impl Session {
    /// Starts `backend`, connects both NICs, compares frames in both directions, and freezes it.
    pub fn open(backend: &dyn Backend, shape: Shape, folder: &FilePath, place: &Place) -> Result<Self> {
        std::fs::create_dir_all(folder)?;
        let mut served = backend.start(2, shape, folder, place)?;
        for index in 0..2 {
            served.await_socket(&socket(folder, index))?;
        }
        let connect = || -> Result<Path> {
            let mut a = Nic::connect(&socket(folder, 0), shape, mac(0), mac(1))?;
            let mut b = Nic::connect(&socket(folder, 1), shape, mac(1), mac(0))?;
            check::both_ways(&mut a, &mut b, backend.keeps_checksum())?;
            Ok(Path::new(a, b))
        };
        let path =
            connect().with_context(|| format!("{} with {shape:?}\n{}", backend.name(), served.log_tail()))?;
        let mut session = Session { name: backend.name(), served, path };
        session.path.drain()?;
        session.served.freeze();
        Ok(session)
    }

    fn thawed<R>(&mut self, act: impl FnOnce(&mut Path, &[u32]) -> Result<R>) -> Result<R> {
        self.served.thaw();
        let pids = self.served.pids();
        let outcome = act(&mut self.path, &pids);
        let outcome = outcome.with_context(|| format!("{}\n{}", self.name, self.served.log_tail()))?;
        self.served.freeze();
        Ok(outcome)
    }

    pub fn stream(&mut self, load: &Load) -> Result<Outcome> {
        self.thawed(|path, pids| path.stream(load, pids))
    }

    /// Round trips of one frame, ns.
    pub fn ping(&mut self, time: Duration) -> Result<Histogram<u64>> {
        self.thawed(|path, _| path.ping(time))
    }

    /// The highest rate, frames a second, at which what is sent arrives; `most` is what it cannot be above.
    pub fn loss_free(&mut self, most: f64, time: Duration) -> Result<f64> {
        self.thawed(|path, pids| {
            let (mut least, mut most) = (0.0, most);
            for _ in 0..HALVINGS {
                let rate = (least + most) / 2.0;
                let load = Load { rate: Some(rate), sleeps: false, warm: time / 8, time };
                // Somebody else's turn on the processor is no verdict: each rate has two chances.
                let mut fits = false;
                for _ in 0..2 {
                    let outcome = path.stream(&load, pids)?;
                    let late = outcome.owed as f64 > OWED * rate * time.as_secs_f64();
                    fits = !late && outcome.lost * 10_000 <= outcome.sent * LOST;
                    if fits {
                        break;
                    }
                }
                if fits {
                    least = rate;
                } else {
                    most = rate;
                }
            }
            Ok(least)
        })
    }
}
