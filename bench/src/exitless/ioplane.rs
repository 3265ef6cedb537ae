//! ioplane itself, from the binary that was built beside this one, or from another build.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::backend::{Backend, Backing};
use crate::daemon::Configuration;
use crate::mode::Mode;
use crate::served::{Place, Served, ioplane};

/// One daemon with one I/O core and one disk.
pub struct Ioplane {
    /// How its core learns of requests.
    pub mode: Mode,
    /// Another binary than [`ioplane`].
    pub binary: Option<PathBuf>,
}

impl Backend for Ioplane {
    fn name(&self) -> &'static str {
        self.mode.contender()
    }

    fn start(&self, backing: &Backing, socket: &Path, folder: &Path, place: &Place) -> Result<Served> {
        let backing = match backing {
            Backing::Memory { len, .. } => format!("memory = \"{len}\""),
            Backing::File { file, .. } => format!("path = {file:?}"),
        };
        let configuration =
            Configuration::new(self.mode).disk("bench", socket, &format!("queue_size = 256\n{backing}"));
        configuration.start(&self.binary.clone().map_or_else(ioplane, Ok)?, folder, place)
    }

    fn describe(&self, backing: &Backing) -> String {
        let what = match backing {
            Backing::Memory { .. } => "memory (memfd)",
            Backing::File { .. } => "file on disk, io_uring, O_DIRECT",
        };
        format!("{what}, one {} core", self.mode.word())
    }
}
