//! Where the programs of a host run: this machine as it is, or a host of its own on this machine.

use crate::process::{Process, scratch, scratch_in};
use anyhow::Result;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Words before those of a program, and where what it makes lies. By default neither: programs run beside the test.
#[derive(Clone, Debug, Default)]
pub struct HostPlace {
    words: Vec<OsString>,
    base: Option<PathBuf>,
}

/// What makes a host of its own: its name as a UTS namespace says it, other hosts' folders under an empty file system, its `/etc/hosts`.
const ENTER: &str = "echo \"$0\" >/proc/sys/kernel/hostname && mount --bind \"$1\" /etc/hosts && shift && \
     while [ \"$1\" != -- ]; do mount -t tmpfs hidden \"$1\" || exit; shift; done && shift && exec \"$@\"";

impl HostPlace {
    /// A network namespace, by its name; files are those of this machine.
    pub fn network(space: &str) -> HostPlace {
        HostPlace { words: ["ip", "netns", "exec", space].map(OsString::from).into(), base: None }
    }

    /// A host called `name`: a network namespace of its own, a mount namespace in which `hidden` are empty, and a UTS namespace. What its
    /// programs make lies in `base`. `hosts` is its `/etc/hosts`.
    pub fn host(space: &str, name: &str, base: &Path, hosts: &Path, hidden: &[&Path]) -> HostPlace {
        let mut place = HostPlace::network(space);
        place.words.extend(["unshare", "--uts", "sh", "-c", ENTER, name].map(OsString::from));
        place.words.push(hosts.into());
        place.words.extend(hidden.iter().map(OsString::from));
        place.words.push("--".into());
        place.base = Some(base.to_owned());
        place
    }

    /// A command that runs there, without input.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut words = self.words.iter().map(OsString::as_os_str).chain([program.as_ref()]);
        // There is one: the program itself.
        let mut command = Command::new(words.next().unwrap_or_default());
        command.args(words).stdin(Stdio::null());
        command
    }

    /// Starts a program there, as [`Process::start`] does here.
    pub fn start(&self, program: impl AsRef<OsStr>, args: &[OsString], log: &Path) -> Result<Process> {
        let command = self.command(program);
        let words: Vec<OsString> =
            command.get_args().map(OsString::from).chain(args.iter().cloned()).collect();
        Process::start(&command.get_program().to_string_lossy(), &words, log)
    }

    /// A folder for what a program of this host makes.
    pub fn scratch(&self, name: &str) -> Result<TempDir> {
        match &self.base {
            None => scratch(name),
            Some(base) => scratch_in(base, name),
        }
    }
}
