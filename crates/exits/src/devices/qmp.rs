//! Asking QEMU for the VM's PCI functions, by its monitor (QMP).

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Layout;
use crate::error::{ExitsError, Result};
use crate::vm::Vm;

/// A monitor serves one client at a time: whoever has it, keeps it.
const PATIENCE: Duration = Duration::from_secs(2);
/// An answer is not longer.
const ANSWER: u64 = 1 << 22;

impl Layout {
    /// The monitor's socket, from QEMU's own command line.
    pub fn monitor(vm: &Vm) -> Option<PathBuf> {
        monitor(&vm.command).map(PathBuf::from)
    }

    /// Asks the monitor at `socket`.
    pub fn from_qmp(socket: &Path) -> Result<Layout> {
        let answer = ask(socket, "query-pci").map_err(|source| {
            let what = format!("asking QEMU's monitor {} for its devices", socket.display());
            ExitsError::Os { what, source }
        })?;
        Layout::from_query_pci(&answer).ok_or_else(|| ExitsError::Malformed {
            path: socket.into(),
            what: format!("does not answer query-pci with a list: {answer:.200}"),
        })
    }

    /// What the monitor at `socket` says the VM does: `running`, `paused`, `postmigrate` and so on.
    pub fn state(socket: &Path) -> Result<String> {
        let answer = ask(socket, "query-status").map_err(|source| {
            let what = format!("asking QEMU's monitor {} for the VM's state", socket.display());
            ExitsError::Os { what, source }
        })?;
        let state = answer["return"]["status"].as_str().unwrap_or("unknown");
        Ok(state.chars().filter(|c| c.is_ascii_graphic()).take(40).collect())
    }

    /// Reads a file with what `query-pci` has answered.
    pub fn from_file(path: &Path) -> Result<Layout> {
        Layout::parse(&crate::bounded::bytes(path, ANSWER)?, path)
    }

    /// The same of bytes; `path` is for messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Layout> {
        let answer = serde_json::from_slice(bytes).ok().and_then(|answer| Layout::from_query_pci(&answer));
        let what = "is not what QMP's query-pci answers";
        answer.ok_or_else(|| ExitsError::Malformed { path: path.into(), what: what.into() })
    }
}

/// Of `-qmp unix:PATH,...`, or `-chardev socket,id=ID,path=PATH` with `-mon chardev=ID,mode=control`.
fn monitor(command: &[String]) -> Option<String> {
    let values = |flag: &'static str| {
        let pairs = command.windows(2).filter(move |pair| pair[0] == flag || pair[0] == format!("-{flag}"));
        pairs.map(|pair| pair[1].as_str())
    };
    if let Some(path) = values("-qmp").find_map(|value| value.strip_prefix("unix:")) {
        return path.split(',').next().map(String::from);
    }
    let part = |value: &str, key: &str| {
        let found =
            value.split(',').find_map(|part| part.strip_prefix(key)?.strip_prefix('=').map(String::from));
        found.filter(|found| !found.is_empty())
    };
    let control = values("-mon").find(|value| value.split(',').any(|part| part == "mode=control"))?;
    let id = part(control, "chardev").or_else(|| control.split(',').next().map(String::from))?;
    let socket = values("-chardev").find(|value| part(value, "id").as_ref() == Some(&id))?;
    part(socket, "path")
}

fn ask(socket: &Path, command: &str) -> std::io::Result<Value> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut input = BufReader::new(stream.try_clone()?.take(ANSWER));
    let end = Instant::now() + 2 * PATIENCE;
    let mut line = || -> std::io::Result<Value> {
        let mut text = String::new();
        input.read_line(&mut text).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => {
                std::io::Error::other("it does not answer; somebody else may be using it")
            }
            _ => error,
        })?;
        if Instant::now() > end {
            return Err(std::io::Error::other("it talks too long"));
        }
        serde_json::from_str(&text).map_err(|_| std::io::Error::other("it does not speak QMP"))
    };
    line()?;
    for command in ["qmp_capabilities", command] {
        stream.write_all(format!("{{\"execute\": \"{command}\"}}\n").as_bytes())?;
        // Events may come in between.
        let answer = loop {
            let answer = line()?;
            if answer.get("event").is_none() {
                break answer;
            }
        };
        if let Some(error) = answer.get("error") {
            return Err(std::io::Error::other(format!("{command}: {error:.200}")));
        }
        if command != "qmp_capabilities" {
            return Ok(answer);
        }
    }
    Err(std::io::Error::other("nothing was asked"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(String::from).collect()
    }

    #[test]
    fn the_monitor_is_found() {
        let found = |line: &str| monitor(&words(line));
        assert_eq!(found("qemu -qmp unix:/run/a,server=on -m 1").as_deref(), Some("/run/a"));
        let libvirt =
            "qemu -chardev socket,id=mon0,path=/run/b,server=on -mon chardev=mon0,id=monitor,mode=control";
        assert_eq!(found(libvirt).as_deref(), Some("/run/b"));
        assert_eq!(found("qemu -mon chardev=x,mode=readline"), None);
        assert_eq!(found("qemu -qmp"), None);
    }

    #[test]
    fn events_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"QMP\": {}}\n").unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            lines.next();
            stream.write_all(b"{\"event\": \"STOP\"}\n{\"return\": {}}\n").unwrap();
            lines.next();
            stream.write_all(b"{\"return\": [{\"devices\": []}]}\n").unwrap();
        });
        assert!(Layout::from_qmp(&path).unwrap().is_empty());
        server.join().unwrap();
    }

    #[test]
    fn what_is_no_monitor_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = Layout::from_qmp(&folder.path().join("none")).unwrap_err();
        assert!(error.to_string().contains("asking QEMU's monitor"), "{error}");
        let file = folder.path().join("pci.json");
        std::fs::write(&file, "{}").unwrap();
        assert!(Layout::from_file(&file).unwrap_err().to_string().contains("query-pci"));
    }
}
