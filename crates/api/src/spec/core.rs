//! What an I/O core is to be.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Flaw, MannersWord, NotifyWord, pick};

/// An I/O core.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CoreSpec {
    /// Its number.
    pub id: u32,
    /// The processor it is pinned to.
    pub cpu: Option<u32>,
    /// Polled or notified.
    pub notify: NotifyWord,
    /// Microseconds without work before a polled core sleeps.
    pub spin_us: u64,
    /// Most requests from one queue in a turn.
    pub budget: u32,
    /// Towards others.
    pub manners: MannersWord,
}

/// Most cores, and the end of their numbers.
pub const CORES: u32 = 256;

/// What holds if nobody says: the daemon's tests hold these two against the defaults of the crate `cores`.
const SPIN_US: u64 = 50_000;
const BUDGET: u32 = 64;

impl CoreSpec {
    /// A core of which nothing is said but its number.
    pub fn new(id: u32) -> Self {
        CoreSpec {
            id,
            cpu: None,
            notify: NotifyWord::default(),
            spin_us: SPIN_US,
            budget: BUDGET,
            manners: MannersWord::default(),
        }
    }

    /// Everything that is wrong with it on this host.
    pub fn flaws(&self) -> Vec<Flaw> {
        let mut flaws = Vec::new();
        if self.id >= CORES {
            flaws.push(Flaw::new(
                "id",
                format!("id = {}", self.id),
                format!("number the cores from 0 to {}", CORES - 1),
            ));
        }
        if let Some(cpu) = self.cpu
            && !Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
        {
            let online = std::fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_default();
            let remedy = format!("this host has {}; leave cpu out to run unpinned", online.trim());
            flaws.push(Flaw::new("cpu", format!("there is no CPU {cpu}"), remedy));
        }
        if self.spin_us > 60_000_000 {
            flaws.push(Flaw::new(
                "spin_us",
                format!("spin_us = {}", self.spin_us),
                "give at most a minute: 60000000",
            ));
        }
        if !(1..=4096).contains(&self.budget) {
            flaws.push(Flaw::new("budget", format!("budget = {}", self.budget), "give 1 to 4096"));
        }
        flaws
    }

    /// As [`super::ServedSpec::three_way`].
    pub fn three_way(base: &Self, configured: &Self, now: &Self) -> Self {
        CoreSpec {
            id: configured.id,
            cpu: pick(&base.cpu, &configured.cpu, &now.cpu),
            notify: pick(&base.notify, &configured.notify, &now.notify),
            spin_us: pick(&base.spin_us, &configured.spin_us, &now.spin_us),
            budget: pick(&base.budget, &configured.budget, &now.budget),
            manners: pick(&base.manners, &configured.manners, &now.manners),
        }
    }
}
