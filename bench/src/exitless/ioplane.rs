//! ioplane itself, from the binary that was built beside this one, or from another build.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use super::backend::{Backend, Backing};
use crate::mode::Mode;
use crate::served::{Place, Served, ioplane};

/// One daemon with one I/O core and one disk.
pub struct Ioplane {
    /// How its core learns of requests.
    pub mode: Mode,
    /// Another binary than [`ioplane`].
    pub binary: Option<PathBuf>,
}

impl Ioplane {
    fn config(&self, backing: &Backing, socket: &Path, folder: &Path, place: &Place) -> String {
        let mode = self.mode.word();
        let backing = match backing {
            Backing::Memory { len, .. } => format!("memory = \"{len}\""),
            Backing::File { file, .. } => format!("path = {file:?}"),
        };
        format!(
            "[daemon]\nsocket = {control:?}\nrun_dir = {folder:?}\n\n\
             [[core]]\nid = 0\ncpu = {cpu}\nnotify = \"{mode}\"\n\n\
             [[disk]]\nname = \"bench\"\nqueue_size = 256\nsocket = {socket:?}\n{backing}\n",
            control = folder.join("control"),
            cpu = place.cpus.back,
        )
    }
}

impl Backend for Ioplane {
    fn name(&self) -> &'static str {
        self.mode.contender()
    }

    fn start(&self, backing: &Backing, socket: &Path, folder: &Path, place: &Place) -> Result<Served> {
        let config = folder.join("ioplane.toml");
        std::fs::write(&config, self.config(backing, socket, folder, place))?;
        let mut command = Command::new(self.binary.clone().map_or_else(ioplane, Ok)?);
        command.arg("serve").arg("--config").arg(&config);
        place.spawn(&command, &folder.join("log"))
    }

    fn describe(&self, backing: &Backing) -> String {
        let what = match backing {
            Backing::Memory { .. } => "memory (memfd)",
            Backing::File { .. } => "file on disk, io_uring, O_DIRECT",
        };
        format!("{what}, one {} core", self.mode.word())
    }
}
