//! The monitor of a VM that uses devices of this daemon, where nobody has said which it is.
//!
//! ```text
//!   `qmp` of the VM's disks  ->  the command line of the VM's process
//! ```

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::Result;
use ioplane_api::refusal::Code;
use ioplane_cli::output::CommandError;
use ioplane_kvmstat::command_line;
use ioplane_qemu::{Chardev, Endpoint};

fn refused(error: String, remedy: &str) -> anyhow::Error {
    CommandError::new(Code::Conflict, error, remedy).into()
}

/// The monitor of the VM of that name: `named` is what its disks say, `processes` are those that use its devices. Whoever connects there asks it for its
/// name: a process chooses its own command line.
pub fn monitor_of(vm: &str, named: &BTreeSet<PathBuf>, processes: &BTreeSet<u32>) -> Result<Endpoint> {
    choose(vm, named, processes, command_line)
}

fn choose(
    vm: &str,
    named: &BTreeSet<PathBuf>,
    processes: &BTreeSet<u32>,
    command: impl Fn(u32) -> Vec<String>,
) -> Result<Endpoint> {
    let mut named = named.iter();
    match (named.next(), named.next()) {
        (Some(path), None) => return Ok(Endpoint::here(path)),
        (Some(_), Some(_)) => {
            let error = format!("the disks of VM {vm} name several monitors");
            return Err(refused(error, "say by which one it is to move: --qmp SOCKET"));
        }
        (None, _) => {}
    }
    let mut processes = processes.iter().copied();
    let (Some(pid), None) = (processes.next(), processes.next()) else {
        let error = format!("several processes are called VM {vm}");
        return Err(refused(error, "say which of them is to move, by its monitor: --qmp SOCKET"));
    };
    match Chardev::monitor(&command(pid)) {
        Some(Chardev::Path(path)) => Ok(Endpoint::of(pid, path)),
        Some(Chardev::Inherited) => Err(refused(
            format!(
                "the monitor of VM {vm} is a descriptor that its QEMU was given, as by libvirt: there is no way to it"
            ),
            "have libvirt move it, virsh migrate --live; or give another monitor of it: --qmp SOCKET",
        )),
        None => Err(refused(
            format!(
                "the monitor of VM {vm} is not known: none of its disks names one, nor does its command line (process {pid})"
            ),
            "start its QEMU with -qmp unix:SOCKET,server=on,wait=off, or give --qmp SOCKET",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HANDED: &str = "qemu -chardev socket,id=m,fd=24,server=on,wait=off -mon chardev=m,mode=control";

    fn chosen(named: &[&str], pids: &[u32], line: &str) -> Result<Endpoint, String> {
        let named = named.iter().map(PathBuf::from).collect();
        let words = |_| line.split(' ').map(String::from).collect();
        choose("web", &named, &pids.iter().copied().collect(), words).map_err(|error| error.to_string())
    }

    #[test]
    fn disks_name_it_before_the_command_line_does() {
        let line = "qemu -qmp unix:/run/q,server=on,wait=off";
        assert_eq!(chosen(&["/run/d"], &[7], line), Ok(Endpoint::here("/run/d")));
        assert_eq!(chosen(&["/run/d"], &[7, 8], line), Ok(Endpoint::here("/run/d")));
        assert_eq!(chosen(&[], &[7], line), Ok(Endpoint::of(7, "/run/q")));
        for (named, pids, line, words) in [
            (&["/run/d", "/run/e"][..], &[7][..], line, "several monitors"),
            (&[], &[7, 8], line, "several processes"),
            (&[], &[7], "qemu -m 1G", "is not known"),
            (&[], &[7], HANDED, "as by libvirt"),
        ] {
            let error = chosen(named, pids, line).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
