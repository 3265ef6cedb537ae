//! VMs of libvirt. It gives QEMU its monitor's socket as a descriptor and keeps the other end, so the monitor is asked through `virsh`.
//!
//! ```text
//!   DOMAIN --virsh domuuid--> UUID --QEMU's -uuid--> Vm
//!          --virsh qemu-monitor-command--> query-pci, query-status
//! ```

use std::io::ErrorKind;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ioplane_exits::Layout;
use ioplane_kvmstat::Vm;
use ioplane_plain::{excerpt, plain};
use serde_json::Value;

use super::reach::talk;
use super::usage;

/// A libvirtd answers in milliseconds; one that hangs is not waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// As much as a monitor's answer may be.
const ANSWER: u64 = 1 << 22;

/// A domain of libvirt, as `virsh` knows it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Domain {
    /// Its name, UUID or number.
    name: String,
    virsh: String,
}

impl Domain {
    pub(super) fn new(name: &str) -> Result<Domain> {
        Domain::of(name, "virsh")
    }

    fn of(name: &str, virsh: &str) -> Result<Domain> {
        ensure!(
            !name.is_empty() && !name.starts_with('-'),
            usage(format!("{name:?} is no domain of libvirt"))
        );
        Ok(Domain { name: name.into(), virsh: virsh.into() })
    }

    /// The VM that runs it.
    pub(super) fn vm(&self) -> Result<Vm> {
        let uuid = self.ask("domuuid", &[])?;
        self.find(Vm::all(), uuid.trim())
    }

    /// Names are not unique, UUIDs are; but any process may have one on its command line.
    fn find(&self, all: Vec<Vm>, uuid: &str) -> Result<Vm> {
        let is_uuid = |vm: &Vm| vm.command.windows(2).any(|pair| pair[0] == "-uuid" && pair[1] == uuid);
        let mut found: Vec<Vm> = all.into_iter().filter(|vm| !uuid.is_empty() && is_uuid(vm)).collect();
        let (domain, uuid) = (plain(&self.name), plain(uuid));
        match found.len() {
            1 => Ok(found.remove(0)),
            0 => bail!(
                "no process here runs the domain {domain} (UUID {uuid}) with KVM: `virsh domstate {domain}` says whether it runs; \
                 root sees all processes; a VM of another host is watched on that host"
            ),
            _ => {
                let pids: Vec<String> = found.iter().map(|vm| format!("--vm pid:{}", vm.pid)).collect();
                bail!(
                    "several processes say that they are the domain {domain}; choose one: {}",
                    pids.join(", ")
                )
            }
        }
    }

    /// Its PCI functions.
    pub(super) fn layout(&self) -> Result<Layout> {
        let answer = self.monitor("query-pci")?;
        let malformed = || format!("virsh qemu-monitor-command answers query-pci with {}", excerpt(&answer));
        Layout::from_query_pci(&answer).with_context(malformed)
    }

    /// What QEMU calls its state.
    pub(super) fn state(&self) -> Result<String> {
        Ok(Layout::state_of(&self.monitor("query-status")?["return"]))
    }

    fn monitor(&self, command: &str) -> Result<Value> {
        let command = serde_json::json!({"execute": command}).to_string();
        let answer = self.ask("qemu-monitor-command", &["--cmd", &command])?;
        serde_json::from_str(&answer)
            .with_context(|| format!("virsh qemu-monitor-command answers no JSON: {}", excerpt(&answer)))
    }

    fn ask(&self, command: &str, more: &[&str]) -> Result<String> {
        let mut virsh = Command::new(&self.virsh);
        virsh.arg(command).args(["--domain", &self.name]).args(more);
        let pipes = virsh.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().map_err(|error| match error.kind() {
            ErrorKind::NotFound => anyhow::anyhow!(
                "--libvirt needs virsh, and there is none on PATH: install it (Debian: libvirt-clients), or use --vm NAME, and \
                 --devices FILE for the names of PCI devices"
            ),
            _ => anyhow::Error::new(error).context("start virsh"),
        })?;
        let seconds = PATIENCE.as_secs();
        let done = talk(&mut child, "", Instant::now() + PATIENCE, ANSWER).with_context(|| {
            format!("virsh {command} has not answered within {seconds} s; is libvirtd running?")
        })?;
        if done.status != 0 {
            let why = excerpt(&done.error.trim());
            bail!("virsh {command} --domain {} failed: {why}", plain(&self.name));
        }
        Ok(done.said)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A domain whose virsh is this script.
    fn domain(script: &str) -> (tempfile::TempDir, Domain) {
        let folder = tempfile::tempdir().unwrap();
        let virsh = folder.path().join("virsh");
        // By another process: what this one has open for writing, a child of another test may have as well, and then it is busy.
        let written = std::process::Command::new("sh")
            .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$1" >"$0" && chmod 755 "$0""#])
            .args([virsh.as_os_str(), script.as_ref()])
            .status();
        assert!(written.unwrap().success());
        let domain = Domain::of("web", virsh.to_str().unwrap()).unwrap();
        (folder, domain)
    }

    fn vm(pid: u32, line: &str) -> Vm {
        let (name, program) = ("web".into(), "qemu".into());
        let command = line.split(' ').map(String::from).collect();
        Vm { pid, name, program, vcpus: 1, vm_fds: vec![3], command }
    }

    #[test]
    fn its_devices_and_state_are_asked_through_virsh() {
        let (folder, domain) = domain(
            r#"echo "$@" >>"$0.asked"
               case $* in
               'domuuid --domain web') echo 0-1; echo ;;
               'qemu-monitor-command --domain web --cmd {"execute":"query-pci"}')
                   echo '{"return": [{"devices": [{"bus": 0, "slot": 2, "function": 0, "qdev_id": "net0",
                          "id": {"vendor": 6900, "device": 4161},
                          "regions": [{"bar": 4, "type": "memory", "address": 4096, "size": 16384}]}]}], "id": "libvirt-7"}' ;;
               *query-status*) echo '{"return": {"status": "paused"}}' ;;
               *) exit 9 ;;
               esac"#,
        );
        assert_eq!(domain.layout().unwrap().functions(), ["virtio-net \"net0\" at 00:02.0"]);
        assert_eq!(domain.state().unwrap(), "paused");
        // No VM of this host has that UUID.
        let error = domain.vm().unwrap_err().to_string();
        assert!(error.contains("UUID 0-1") && error.contains("virsh domstate web"), "{error}");
        let asked = fs::read_to_string(folder.path().join("virsh.asked")).unwrap();
        assert_eq!(asked.lines().count(), 3, "{asked}");
    }

    #[test]
    fn the_process_is_found_by_its_uuid() {
        let domain = Domain::new("web").unwrap();
        let all = [
            vm(5, "qemu -name guest=web -uuid 0-2"),
            vm(6, "qemu -name guest=other -uuid 0-1 -m 1"),
            vm(7, "qemu -name 0-1"),
        ];
        assert_eq!(domain.find(all.to_vec(), "0-1").unwrap().pid, 6);
        let twice = [vm(6, "qemu -uuid 0-1"), vm(8, "qemu -uuid 0-1")];
        let error = domain.find(twice.to_vec(), "0-1").unwrap_err().to_string();
        assert!(error.contains("--vm pid:6, --vm pid:8"), "{error}");
        assert!(domain.find(vec![vm(6, "qemu -uuid ")], "").is_err());
    }

    #[test]
    fn what_virsh_cannot_do_is_said() {
        let missing = Domain::of("web", "/nowhere/virsh").unwrap().vm().unwrap_err().to_string();
        assert!(missing.contains("needs virsh") && missing.contains("libvirt-clients"), "{missing}");
        let (_folder, unknown) = domain("printf 'error: failed to get domain\\033[2J' >&2; exit 1");
        let error = unknown.vm().unwrap_err().to_string();
        assert!(
            error.contains("virsh domuuid --domain web failed: error: failed to get domain?[2J"),
            "{error:?}"
        );
        let (_folder, strange) = domain("head -c 10000000 /dev/zero | tr '\\0' x");
        let error = format!("{:#}", strange.layout().unwrap_err());
        assert!(error.contains("answers no JSON: xxx") && error.len() < 600, "{error:.700}");
        let (_folder, other) = domain("echo '{\"return\": 5}'");
        assert!(format!("{:#}", other.layout().unwrap_err()).contains("answers query-pci with"));
        assert!(Domain::new("-x").is_err() && Domain::new("").is_err());
    }
}
