//! ioplane: one I/O core, one switch, NICs with sockets, in a process of their own (see [`crate::lan`]).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::backend::{Backend, mac, socket};
use super::nic::{RING, Shape};
use crate::mode::Mode;
use crate::served::{Place, Served};

/// One such process.
pub struct Ioplane {
    /// How its core learns of requests.
    pub mode: Mode,
    /// Its core never yields.
    pub dedicated: bool,
    /// Another build of this program.
    pub binary: Option<PathBuf>,
}

impl Backend for Ioplane {
    fn name(&self) -> &'static str {
        self.mode.contender()
    }

    fn start(&self, nics: usize, shape: Shape, folder: &Path, place: &Place) -> Result<Served> {
        let mut command = Command::new(self.binary.clone().map_or_else(std::env::current_exe, Ok)?);
        command.arg("lan").arg(format!("--cpu={}", place.cpus.back));
        command.arg(format!("--pairs={}", shape.pairs)).arg(format!("--ring={RING}"));
        if self.mode != Mode::Polled {
            command.arg(format!("--{}", self.mode.word()));
        }
        if self.dedicated {
            command.arg("--dedicated");
        }
        for index in 0..nics {
            let address: Vec<String> = mac(index).iter().map(|byte| format!("{byte:02x}")).collect();
            command.arg(format!("--nic={}={}", address.join(":"), socket(folder, index).display()));
        }
        place.spawn(&command, &folder.join("log"))
    }

    fn describe(&self) -> String {
        let yields = if self.dedicated { "never yields" } else { "yields when it finds nothing" };
        format!("a switch, one {} core that {yields}", self.mode.word())
    }
}
