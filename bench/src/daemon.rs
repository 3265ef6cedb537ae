//! A daemon to be measured: its configuration, and its start on the backend's processor.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;

use crate::mode::Mode;
use crate::served::{Place, Served};

/// What a daemon is configured with.
#[derive(Debug, Clone)]
pub struct Configuration {
    mode: Mode,
    cores: u32,
    devices: String,
    identity: Option<PathBuf>,
    /// The network namespace that it runs in, if not this one.
    space: Option<String>,
    /// Its other threads run on the front end's processor.
    core_alone: bool,
}

impl Configuration {
    /// One I/O core in `mode`, without devices.
    pub fn new(mode: Mode) -> Self {
        Configuration {
            mode,
            cores: 1,
            devices: String::new(),
            identity: None,
            space: None,
            core_alone: false,
        }
    }

    /// As many I/O cores, all on the backend's processor, with the numbers 0, 1, ...
    pub fn cores(mut self, cores: u32) -> Self {
        self.cores = cores;
        self
    }

    /// The backend's processor is the cores' alone, as on a host that gives them processors of their own: the daemon's other threads run on the front end's.
    pub fn core_alone(mut self) -> Self {
        self.core_alone = true;
        self
    }

    /// Who this host is, for TLS.
    pub fn identity(mut self, directory: &Path) -> Self {
        self.identity = Some(directory.to_path_buf());
        self
    }

    /// It runs in this network namespace, as on another host.
    pub fn within(mut self, space: Option<&str>) -> Self {
        self.space = space.map(str::to_owned);
        self
    }

    /// A disk at `socket`. `keys` are the lines of its table that say what it is, at least `memory` or `path`.
    pub fn disk(mut self, name: &str, socket: &Path, keys: &str) -> Self {
        let _ = writeln!(self.devices, "\n[[disk]]\nname = {name:?}\nsocket = {socket:?}\n{keys}");
        self
    }

    /// An export, for clients of this host at `socket`. `keys` are the lines of its table that say what it is, at least `memory` or `path`.
    pub fn export(mut self, name: &str, socket: &Path, keys: &str) -> Self {
        let _ = writeln!(self.devices, "\n[[export]]\nname = {name:?}\nsocket = {socket:?}\n{keys}");
        self
    }

    /// A group of devices. `keys` are the lines of its table, weight and limits.
    pub fn group(mut self, name: &str, keys: &str) -> Self {
        let _ = writeln!(self.devices, "\n[[group]]\nname = {name:?}\n{keys}");
        self
    }

    /// Writes the file into `folder`, which is the daemon's run directory.
    pub fn write(&self, folder: &Path, cpu: usize) -> Result<PathBuf> {
        std::fs::create_dir_all(folder)?;
        let file = folder.join("ioplane.toml");
        std::fs::write(&file, self.text(folder, cpu))?;
        Ok(file)
    }

    fn text(&self, folder: &Path, cpu: usize) -> String {
        let mut text = format!("[daemon]\nsocket = {:?}\nrun_dir = {folder:?}\n", folder.join("control"));
        if let Some(identity) = &self.identity {
            let _ = writeln!(text, "identity = {identity:?}");
        }
        for id in 0..self.cores {
            let _ = writeln!(text, "\n[[core]]\nid = {id}\ncpu = {cpu}\nnotify = \"{}\"", self.mode.word());
        }
        text + &self.devices
    }

    /// Whether `binary` starts with it; one that is older than what is asked for does not. `folder` is for this alone.
    pub fn is_known_to(&self, binary: &Path, folder: &Path, place: &Place) -> Result<bool> {
        Ok(self.start(binary, folder, place)?.await_socket(&folder.join("control")).is_ok())
    }

    /// Starts `binary` with it. It need not listen yet when this returns.
    pub fn start(&self, binary: &Path, folder: &Path, place: &Place) -> Result<Served> {
        let file = self.write(folder, place.cpus.back)?;
        let mut command = within(self.space.as_deref(), binary);
        command.arg("serve").arg("--config").arg(file);
        let cpu = if self.core_alone { place.cpus.front } else { place.cpus.back };
        place.spawn_on(cpu, &command, &folder.join("log"))
    }
}

/// A command that runs `program` in a network namespace, if there is one; it becomes the program.
pub fn within(space: Option<&str>, program: impl AsRef<OsStr>) -> Command {
    match space {
        None => Command::new(program),
        Some(space) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", space]).arg(program);
            command
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_table_is_written() {
        let configuration = Configuration::new(Mode::Notified).cores(2).group("gold", "weight = 4").disk(
            "web",
            Path::new("/run/web.sock"),
            "memory = \"1M\"\ngroup = \"gold\"",
        );
        let text = configuration.text(Path::new("/run"), 1);
        for line in [
            "socket = \"/run/control\"",
            "id = 0\ncpu = 1\nnotify = \"notified\"",
            "id = 1\ncpu = 1\nnotify = \"notified\"",
            "[[group]]\nname = \"gold\"\nweight = 4",
            "[[disk]]\nname = \"web\"\nsocket = \"/run/web.sock\"\nmemory = \"1M\"\ngroup = \"gold\"",
        ] {
            assert!(text.contains(line), "{line:?} is not in {text}");
        }
    }
}
