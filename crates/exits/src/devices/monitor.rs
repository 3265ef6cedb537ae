//! Asking QEMU's monitor for the VM's PCI functions and its state.

use std::path::Path;
use std::time::Duration;

use ioplane_kvmstat::Vm;
use ioplane_plain::{excerpt, file_bytes};
use ioplane_qemu::{Chardev, Endpoint, Qmp};
use serde_json::{Value, json};

use super::Layout;
use crate::error::{ExitsError, Result};

/// So long whoever has the monitor is waited for, and so long each of its answers.
const PATIENCE: Duration = Duration::from_secs(2);
/// A file with an answer is not longer.
const ANSWER: u64 = 1 << 22;

impl Layout {
    /// The monitor's socket, from QEMU's own command line.
    pub fn monitor(vm: &Vm) -> Option<Chardev> {
        Chardev::monitor(&vm.command)
    }

    /// Asks the monitor at `socket`.
    pub fn from_qmp(socket: &Endpoint) -> Result<Layout> {
        let answer = ask(socket, "query-pci", "its devices")?;
        Layout::from_query_pci(&answer).ok_or_else(|| {
            ExitsError::malformed(
                socket.path(),
                format!("does not answer query-pci with a list: {}", excerpt(&answer)),
            )
        })
    }

    /// What the monitor at `socket` says the VM does: `running`, `paused`, `postmigrate` and so on.
    pub fn state(socket: &Endpoint) -> Result<String> {
        Ok(Layout::state_of(&ask(socket, "query-status", "the VM's state")?))
    }

    /// The same of what `query-status` returns.
    pub fn state_of(answer: &Value) -> String {
        let state = answer["status"].as_str().unwrap_or("unknown");
        state.chars().filter(|c| c.is_ascii_graphic()).take(40).collect()
    }

    /// Reads a file with what `query-pci` has answered.
    pub fn from_file(path: &Path) -> Result<Layout> {
        Layout::parse(&file_bytes(path, ANSWER)?, path)
    }

    /// The same of bytes; `path` is for messages.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Layout> {
        let answer = serde_json::from_slice(bytes).ok().and_then(|answer| Layout::from_query_pci(&answer));
        let what = "is not what QMP's query-pci answers";
        answer.ok_or_else(|| ExitsError::malformed(path, what))
    }
}

fn ask(socket: &Endpoint, command: &str, wanted: &'static str) -> Result<Value> {
    let answer = Qmp::connect(socket, PATIENCE).and_then(|mut qmp| qmp.execute(command, &json!({})));
    answer.map_err(|source| ExitsError::Monitor { monitor: socket.to_string(), wanted, source })
}

#[cfg(test)]
#[path = "../../../qemu/src/test_monitor.rs"]
mod test_monitor;

#[cfg(test)]
mod tests {
    use super::*;
    use test_monitor::serve;

    #[test]
    fn devices_and_state_are_asked_for() {
        let ok = b"{\"return\": {}}\n".to_vec();
        let (_folder, path) = serve("qmp", vec![ok.clone(), b"{\"return\": [{\"devices\": []}]}\n".to_vec()]);
        assert!(Layout::from_qmp(&Endpoint::here(&path)).unwrap().is_empty());
        let (_folder, path) = serve("qmp", vec![ok, b"{\"return\": {\"status\": \"paused\\n\"}}\n".to_vec()]);
        assert_eq!(Layout::state(&Endpoint::here(&path)).unwrap(), "paused");
    }

    /// What is said of the path and of the answers is short, and a terminal does not obey it.
    #[test]
    fn strange_answers_are_shown_plain_and_cut() {
        let long = "\\u001b[2J\u{9b}".repeat(100_000);
        let ok = b"{\"return\": {}}\n".to_vec();
        let refused = format!("{{\"error\": {{\"desc\": \"{long}\"}}}}\n").into_bytes();
        let other = format!("{{\"return\": \"{long}\"}}\n").into_bytes();
        for answers in [vec![refused, ok.clone()], vec![ok, other]] {
            let (_folder, path) = serve("\x1b]0;x\x07\x1b[2J\n", answers);
            let error = Layout::from_qmp(&Endpoint::here(&path)).unwrap_err().to_string();
            assert!(!error.chars().any(char::is_control) && error.len() < 900, "{error:.500?}");
            assert!(error.contains("?]0;x??[2J?"), "{error}");
        }
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
