//! Asking QEMU for the VM's PCI functions, by its monitor (QMP).

use std::io::{Error, Result as Answer};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Layout;
use crate::bounded::excerpt;
use crate::error::{ExitsError, Result};
use crate::socket::{Chardev, Endpoint, Lines, part, values};
use crate::vm::Vm;

/// A monitor serves one client at a time: whoever has it, keeps it. So long it is waited for, and so long for its answers.
const PATIENCE: Duration = Duration::from_secs(2);
/// An answer is not longer.
const ANSWER: u64 = 1 << 22;

impl Layout {
    /// The monitor's socket, from QEMU's own command line.
    pub fn monitor(vm: &Vm) -> Option<Chardev> {
        monitor(&vm.command)
    }

    /// Asks the monitor at `socket`.
    pub fn from_qmp(socket: &Endpoint) -> Result<Layout> {
        let answer = ask(socket, "query-pci", PATIENCE).map_err(|source| {
            let what = format!("asking QEMU's monitor {socket} for its devices");
            ExitsError::Os { what, source }
        })?;
        Layout::from_query_pci(&answer).ok_or_else(|| ExitsError::Malformed {
            path: socket.path().into(),
            what: format!("does not answer query-pci with a list: {}", excerpt(&answer)),
        })
    }

    /// What the monitor at `socket` says the VM does: `running`, `paused`, `postmigrate` and so on.
    pub fn state(socket: &Endpoint) -> Result<String> {
        let answer = ask(socket, "query-status", PATIENCE).map_err(|source| {
            let what = format!("asking QEMU's monitor {socket} for the VM's state");
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
fn monitor(command: &[String]) -> Option<Chardev> {
    if let Some(path) = values(command, "-qmp").find_map(|value| value.strip_prefix("unix:")) {
        // The first word without a key is the path.
        return part(&format!("path={path}"), "path").map(|path| Chardev::Path(path.into()));
    }
    let control = values(command, "-mon").find(|value| part(value, "mode").as_deref() == Some("control"))?;
    let id = part(control, "chardev").or_else(|| control.split(',').next().map(String::from))?;
    Chardev::find(command, &id)
}

fn ask(socket: &Endpoint, command: &str, patience: Duration) -> Answer<Value> {
    let mut lines = Lines::connect(socket, ANSWER as usize, Instant::now() + patience)?;
    let line = |lines: &mut Lines| -> Answer<Value> {
        let text = lines.line()?;
        serde_json::from_slice(&text).map_err(|_| Error::other("it does not speak QMP"))
    };
    line(&mut lines)?;
    lines.until(Instant::now() + patience);
    let mut said = |command: &str| -> Answer<Value> {
        lines.send(format!("{{\"execute\": \"{command}\"}}\n").as_bytes())?;
        // Events may come in between.
        let answer = loop {
            let answer = line(&mut lines)?;
            if answer.get("event").is_none() {
                break answer;
            }
        };
        match answer.get("error") {
            Some(error) => Err(Error::other(format!("{command}: {}", excerpt(error)))),
            None => Ok(answer),
        }
    };
    said("qmp_capabilities")?;
    said(command)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;

    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split(' ').map(String::from).collect()
    }

    #[test]
    fn the_monitor_is_found() {
        let found = |line: &str| monitor(&words(line));
        let path = |path: &str| Some(Chardev::Path(path.into()));
        assert_eq!(found("qemu -qmp unix:/run/a,server=on -m 1"), path("/run/a"));
        assert_eq!(found("qemu -qmp unix:/run/a,,b,server=on -m 1"), path("/run/a,b"));
        let libvirt =
            "qemu -chardev socket,id=mon0,path=/run/b,server=on -mon chardev=mon0,id=monitor,mode=control";
        assert_eq!(found(libvirt), path("/run/b"));
        let handed = libvirt.replace("path=/run/b", "fd=24");
        assert_eq!(found(&handed), Some(Chardev::Inherited));
        assert_eq!(found("qemu -mon chardev=x,mode=readline"), None);
        assert_eq!(found("qemu -qmp"), None);
    }

    /// A monitor that gives these answers, in turn.
    fn serve(name: &str, answers: [Vec<u8>; 2]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"{\"QMP\": {}}\n").unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for answer in answers {
                lines.next();
                let _ = stream.write_all(&answer);
            }
        });
        (folder, path)
    }

    #[test]
    fn events_are_passed_over() {
        let greeting = b"{\"event\": \"STOP\"}\n{\"return\": {}}\n";
        let (_folder, path) =
            serve("qmp", [greeting.to_vec(), b"{\"return\": [{\"devices\": []}]}\n".to_vec()]);
        assert!(Layout::from_qmp(&Endpoint::here(&path)).unwrap().is_empty());
    }

    /// What is said of the path and of the answers is short, and a terminal does not obey it.
    #[test]
    fn strange_answers_are_shown_plain_and_cut() {
        let long = "\\u001b[2J\u{9b}".repeat(100_000);
        let ok = b"{\"return\": {}}\n".to_vec();
        let refused = format!("{{\"error\": {{\"desc\": \"{long}\"}}}}\n").into_bytes();
        let other = format!("{{\"return\": \"{long}\"}}\n").into_bytes();
        for answers in [[refused, ok.clone()], [ok, other]] {
            let (_folder, path) = serve("\x1b]0;x\x07\x1b[2J\n", answers);
            let error = Layout::from_qmp(&Endpoint::here(&path)).unwrap_err().to_string();
            assert!(!error.chars().any(char::is_control) && error.len() < 900, "{error:.500?}");
            assert!(error.contains("?]0;x??[2J?"), "{error}");
        }
    }

    /// Somebody else has the monitor: its queue is full, and nobody is served.
    #[test]
    fn a_monitor_that_is_held_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let begun = Instant::now();
        for _ in 0..4 {
            let error = ask(&Endpoint::here(&path), "query-pci", PATIENCE / 20).unwrap_err().to_string();
            assert!(error.contains("somebody else may be using it"), "{error}");
        }
        assert!(begun.elapsed() < 2 * PATIENCE, "{:?}", begun.elapsed());
    }

    #[test]
    fn what_is_no_monitor_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let error = Layout::from_qmp(&Endpoint::here(folder.path().join("none"))).unwrap_err();
        assert!(error.to_string().contains("asking QEMU's monitor"), "{error}");
        let file = folder.path().join("pci.json");
        std::fs::write(&file, "{}").unwrap();
        assert!(Layout::from_file(&file).unwrap_err().to_string().contains("query-pci"));
    }
}
