//! Several readers of one export at once, as in section 7.4 of the paper: 1 to 7 guests of one host, each with a disk of its own that is the same read-only
//! export; beside them as many guests whose disks are the same image without a network.
//!
//! ```text
//!   1 to 7 guests, one generator --> importer: 7 disks, a connection each --TCP--> exporter: one read-only image on a tmpfs
//!                                --> local:    7 disks ---------------------------------> the same image
//! ```

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use ioplane_figures::report::{median, rounded};
use serde_json::{Value, json};

use super::Bench;
use super::contender::Listener;
use crate::core::drive::{Flow, drive, ns};
use crate::core::offered::Offered;
use crate::core::stage::FORM;
use crate::daemon::Configuration;
use crate::exitless::backend::Backing;
use crate::exitless::check::{fill, read};
use crate::exitless::load::BLOCK;
use crate::guest::Guest;
use crate::measured::Figure;
use crate::served::{Served, ioplane};

/// Guests at most: the paper has as many.
const MOST: usize = 7;
/// Requests in flight of each.
const DEPTH: u16 = 4;
/// Of its blocks each guest checks so many, before anything is timed and afterwards.
const CHECKED: u64 = 1024;
const SALT: u64 = 17;

/// Measures both in turn.
pub fn measure(bench: &Bench) -> Result<Vec<(&'static str, Figure)>> {
    eprintln!("1 to {MOST} readers of one export, {} rounds each", bench.pace.rounds);
    let backing = bench.folders.backing("readers", false, bench.pace.memory)?;
    let image = match &backing {
        Backing::Memory { file, .. } | Backing::File { file, .. } => file.clone(),
    };
    fill(&image, SALT)?;
    let mut remote = Readers::of_an_export(bench, &image)?;
    let mut local = Readers::of_the_image(bench, &image)?;
    let mut rows = Vec::new();
    for readers in 1..=MOST {
        let (mut there, mut here) = (Vec::new(), Vec::new());
        for round in 0..bench.pace.rounds {
            let seed = u64::from(round) * MOST as u64 + 1;
            // Each is first equally often.
            match round % 2 {
                0 => {
                    there.push(remote.read(bench, readers, seed)?);
                    here.push(local.read(bench, readers, seed)?);
                }
                _ => {
                    here.push(local.read(bench, readers, seed)?);
                    there.push(remote.read(bench, readers, seed)?);
                }
            }
        }
        rows.push(Row { readers, there, here });
    }
    for readers in [&mut remote, &mut local] {
        readers.check()?;
    }
    let last = rows.last().context("a row")?;
    Ok(vec![
        ("readers", Figure::table(rows.iter().map(Row::json).collect())),
        ("readers_7_vs_local", last.against_local()),
        (
            "readers_7_min_share",
            Figure::median(&last.there.iter().map(|each| least_share(each)).collect::<Vec<_>>())
                .beside("local", median(last.here.iter().map(|each| least_share(each)))),
        ),
    ])
}

/// What so many readers got, each of them, in requests per second; a list per round.
struct Row {
    readers: usize,
    there: Vec<Vec<f64>>,
    here: Vec<Vec<f64>>,
}

impl Row {
    fn against_local(&self) -> Figure {
        let pairs = self.there.iter().zip(&self.here);
        Figure::ratio(&pairs.map(|(there, here)| [together(there), together(here)]).collect::<Vec<_>>())
    }

    fn json(&self) -> Value {
        let of = |rounds: &[Vec<f64>]| {
            let part = |what: fn(&[f64]) -> f64| rounded(median(rounds.iter().map(|each| what(each))));
            json!({
                "together": part(together),
                "of_the_least": part(|each| each.iter().copied().fold(f64::INFINITY, f64::min)),
                "of_the_most": part(|each| each.iter().copied().fold(0.0, f64::max)),
            })
        };
        json!({
            "readers": self.readers,
            "remote": of(&self.there),
            "local": of(&self.here),
            "remote_vs_local": self.against_local().brief(),
        })
    }
}

fn together(each: &[f64]) -> f64 {
    each.iter().sum()
}

/// What the one that got least has of what it would have if all got the same.
fn least_share(each: &[f64]) -> f64 {
    let least = each.iter().copied().fold(f64::INFINITY, f64::min);
    least * each.len() as f64 / together(each)
}

/// A daemon with [`MOST`] read-only disks, a guest for each, and whoever serves the daemon; frozen unless it is its turn.
struct Readers {
    served: Served,
    guests: Vec<Guest>,
}

impl Readers {
    fn of_an_export(bench: &Bench, image: &Path) -> Result<Self> {
        let folder = bench.folders.run("readers-exporter");
        let listener = Listener::tcp()?;
        let keys = format!(
            "path = {image:?}\nread_only = true\nconnections = {MOST}\nlisten = \"{}\"\nplain = true",
            listener.address().context("an address")?
        );
        let configuration = Configuration::new(bench.mode).export("data", &folder.join("nbd.sock"), &keys);
        let mut exporter = configuration.start(&ioplane()?, &folder, &bench.place)?;
        listener.wait(&mut exporter)?;
        let keys = format!("remote = \"{}\"", listener.uri());
        Self::start(bench, "readers-remote", &keys, Some(exporter))
    }

    fn of_the_image(bench: &Bench, image: &Path) -> Result<Self> {
        Self::start(bench, "readers-local", &format!("path = {image:?}\nread_only = true"), None)
    }

    fn start(bench: &Bench, name: &str, keys: &str, server: Option<Served>) -> Result<Self> {
        let folder = bench.folders.run(name);
        let socket = |number: usize| -> PathBuf { folder.join(format!("disk{number}.sock")) };
        let add =
            |all: Configuration, number: usize| all.disk(&format!("disk{number}"), &socket(number), keys);
        let configuration = (0..MOST).fold(Configuration::new(bench.mode), add);
        let mut served = configuration.start(&ioplane()?, &folder, &bench.place)?;
        if let Some(server) = server {
            served = served.of(server);
        }
        let mut guests = Vec::new();
        for number in 0..MOST {
            served.await_socket(&socket(number))?;
            guests.push(Guest::connect(&socket(number), FORM).with_context(|| served.log_tail())?);
        }
        let mut readers = Readers { served, guests };
        readers.check()?;
        Ok(readers)
    }

    /// Reads of each guest are right, and nothing else runs afterwards.
    fn check(&mut self) -> Result<()> {
        self.served.thaw();
        for guest in &mut self.guests {
            let blocks = guest.capacity / u64::from(BLOCK);
            read(guest, blocks, CHECKED.min(blocks), SALT).with_context(|| self.served.log_tail())?;
        }
        self.served.freeze();
        Ok(())
    }

    /// What each of the first `readers` guests gets, requests per second.
    fn read(&mut self, bench: &Bench, readers: usize, seed: u64) -> Result<Vec<f64>> {
        self.served.thaw();
        let (warm, time) = (bench.pace.warm, bench.pace.time);
        let flows = (seed..).zip(&mut self.guests[..readers]);
        let mut flows: Vec<Flow<'_>> =
            flows.map(|(seed, guest)| Flow::new(guest, 0, Offered::Backlog(DEPTH), BLOCK, seed)).collect();
        let mut counts = vec![0u64; readers];
        let driven = drive(&mut flows, warm + time, |completion| {
            counts[completion.flow] += u64::from(completion.at >= ns(warm));
        });
        driven.with_context(|| self.served.log_tail())?;
        self.served.freeze();
        Ok(counts.into_iter().map(|count| count as f64 / time.as_secs_f64()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_what_all_got_and_who_got_least_and_most() {
        let row = Row { readers: 2, there: vec![vec![100.0, 300.0]; 6], here: vec![vec![400.0, 400.0]; 6] };
        let json = row.json();
        assert_eq!(json["remote"], json!({ "together": 400.0, "of_the_least": 100.0, "of_the_most": 300.0 }));
        assert_eq!(json["remote_vs_local"]["ratio"], 0.5);
        assert_eq!(least_share(&row.there[0]), 0.5);
        assert_eq!(least_share(&row.here[0]), 1.0);
    }
}
