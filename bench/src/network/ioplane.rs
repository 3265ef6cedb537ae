//! ioplane itself, from the binary that was built beside this one: one I/O core, one switch, NICs with sockets.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::Result;

use super::backend::{Backend, mac, socket};
use super::nic::{RING, Shape};
use crate::served::{Place, Served, ioplane};

/// One daemon.
pub struct Ioplane {
    /// Whether its core polls; if not, it waits for kicks.
    pub polled: bool,
}

impl Ioplane {
    fn config(&self, nics: usize, shape: Shape, folder: &Path, place: &Place) -> String {
        let mode = if self.polled { "polled" } else { "notified" };
        let mut config = format!(
            "[daemon]\nsocket = {control:?}\nrun_dir = {folder:?}\n\n\
             [[core]]\nid = 0\ncpu = {cpu}\nnotify = \"{mode}\"\n\n\
             [[switch]]\nname = \"bench\"\n",
            control = folder.join("control"),
            cpu = place.cpus.back,
        );
        for index in 0..nics {
            let [a, b, c, d, e, f] = mac(index);
            let _ = write!(
                config,
                "\n[[nic]]\nname = \"nic{index}\"\nswitch = \"bench\"\nmac = \"{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}\"\n\
                 pairs = {pairs}\nqueue_size = {RING}\nsocket = {socket:?}\n",
                pairs = shape.pairs,
                socket = socket(folder, index),
            );
        }
        config
    }
}

impl Backend for Ioplane {
    fn name(&self) -> &'static str {
        if self.polled { "ioplane" } else { "notified" }
    }

    fn start(&self, nics: usize, shape: Shape, folder: &Path, place: &Place) -> Result<Served> {
        let config = folder.join("ioplane.toml");
        std::fs::write(&config, self.config(nics, shape, folder, place))?;
        let mut command = Command::new(ioplane()?);
        command.arg("serve").arg("--config").arg(&config);
        place.spawn(&command, &folder.join("log"))
    }

    fn describe(&self) -> String {
        format!("a switch, one {} core", if self.polled { "polled" } else { "notified" })
    }
}
