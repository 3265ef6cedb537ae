//! Which processes of this host are VMs: those that have a VM of KVM open, whatever their program.

use std::fs;
use std::path::Path;

use ioplane_plain::{file_bytes, file_text, plain};
use ioplane_qemu::Endpoint;

use crate::error::{KvmStatError, Result};

/// A command line longer than this is cut.
const COMMAND_LIMIT: u64 = 1 << 21;
/// More threads than this are not looked at.
const THREAD_LIMIT: usize = 8192;

/// A running VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vm {
    /// The process.
    pub pid: u32,
    /// What its VMM calls it, else the program's name. Plain: whoever made the process chose it.
    pub name: String,
    /// The program. Plain, likewise.
    pub program: String,
    /// How many vCPUs it has open.
    pub vcpus: usize,
    /// Its descriptors of the VM itself.
    pub vm_fds: Vec<i32>,
    /// The command line, as it is. Not to be shown: it may have anything in it.
    pub command: Vec<String>,
}

impl Vm {
    /// All VMs that we may see. Processes that end meanwhile are passed over.
    pub fn all() -> Vec<Vm> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let mut found: Vec<Vm> = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter_map(Vm::of)
            .collect();
        found.sort_by_key(|vm| vm.pid);
        found
    }

    /// The VM of a process, if it is one.
    pub fn of(pid: u32) -> Option<Vm> {
        Vm::of_tree(Path::new("/proc"), pid)
    }

    /// The same of a tree that looks like `/proc`.
    pub(crate) fn of_tree(proc: &Path, pid: u32) -> Option<Vm> {
        let proc = proc.join(pid.to_string());
        let (mut vm_fds, mut vcpus) = (Vec::new(), 0);
        for entry in fs::read_dir(proc.join("fd")).ok()?.flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy().into_owned();
            if target == "anon_inode:kvm-vm" {
                vm_fds.extend(entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()));
            } else if target.strip_prefix("anon_inode:kvm-vcpu:").is_some_and(is_number) {
                vcpus += 1;
            }
        }
        if vm_fds.is_empty() {
            return None;
        }
        vm_fds.sort_unstable();
        let command = command(&proc);
        let comm = comm(&proc);
        let name = name(&command).unwrap_or_else(|| comm.clone());
        Some(Vm { pid, name, program: comm, vcpus, vm_fds, command })
    }

    /// The VM that is wanted: `pid:N` and digits alone are a process number, `name:X` and anything else a name; the only one if
    /// nothing is wanted.
    pub fn choose(wanted: Option<&str>) -> Result<Vm> {
        choose(Vm::all(), wanted)
    }

    /// A socket that the process calls so.
    pub fn socket(&self, path: &Path) -> Endpoint {
        Endpoint::of(self.pid, path)
    }

    /// The threads of the process. Empty when it has ended.
    pub fn threads(&self) -> Vec<VmThread> {
        let Ok(entries) = fs::read_dir(format!("/proc/{}/task", self.pid)) else { return Vec::new() };
        let ids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let thread =
            |id: u32| VmThread { id, name: comm(Path::new(&format!("/proc/{}/task/{id}", self.pid))) };
        ids.take(THREAD_LIMIT).map(thread).collect()
    }
}

/// A thread of a VM's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmThread {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
}

impl VmThread {
    /// Whether the kernel calls a thread so that it has made itself, and that never is in user space: KVM's since Linux 6.14, vhost's, io_uring's.
    pub fn is_kernels_by_name(&self) -> bool {
        ["kvm-nx-lpage", "vhost-", "iou-"].iter().any(|start| self.name.starts_with(start))
    }

    /// Whether a VMM that we know calls its vCPU threads so.
    pub fn is_vcpu_by_name(&self) -> bool {
        // QEMU, Firecracker, Cloud Hypervisor and our own, crosvm.
        let qemu = self.name.strip_prefix("CPU ").is_some_and(|rest| rest.ends_with("/KVM"));
        qemu || ["fc_vcpu", "vcpu", "crosvm_vcpu"].iter().any(|start| self.name.starts_with(start))
    }
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn choose(mut all: Vec<Vm>, wanted: Option<&str>) -> Result<Vm> {
    let list = |all: &[Vm]| {
        let names: Vec<String> = all.iter().map(|vm| format!("{} ({})", vm.name, vm.pid)).collect();
        names.join(", ")
    };
    if all.is_empty() {
        return Err(KvmStatError::NoVm);
    }
    let Some(wanted) = wanted else {
        return if all.len() == 1 { Ok(all.remove(0)) } else { Err(KvmStatError::SeveralVms(list(&all))) };
    };
    let running = list(&all);
    let unknown = || KvmStatError::UnknownVm { wanted: wanted.into(), running: running.clone() };
    // Whoever names a VM chooses its name: a name can be a number, and that of another VM's process.
    let number = wanted.strip_prefix("pid:").or_else(|| Some(wanted).filter(|wanted| is_number(wanted)));
    let name = wanted.strip_prefix("name:").unwrap_or(wanted);
    if let Some(number) = number {
        let found = number.parse().ok().and_then(|pid: u32| all.iter().position(|vm| vm.pid == pid));
        return match found {
            Some(at) => Ok(all.swap_remove(at)),
            None if all.iter().any(|vm| vm.name == number) => {
                Err(KvmStatError::NumberIsName { wanted: number.into(), running })
            }
            None => Err(unknown()),
        };
    }
    all.retain(|vm| vm.name == name);
    match all.len() {
        0 => Err(unknown()),
        1 => Ok(all.remove(0)),
        _ => Err(KvmStatError::SeveralVms(list(&all))),
    }
}

/// A process may give itself any name of 15 bytes.
fn comm(proc: &Path) -> String {
    plain(file_text(&proc.join("comm"), 4096).unwrap_or_default().trim())
}

/// The command line of a process, VM or not; empty when it has ended. Not to be shown: it may have anything in it.
pub fn command_line(pid: u32) -> Vec<String> {
    command(&Path::new("/proc").join(pid.to_string()))
}

fn command(proc: &Path) -> Vec<String> {
    let bytes = file_bytes(&proc.join("cmdline"), COMMAND_LIMIT).unwrap_or_default();
    let words = bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    words.filter(|word| !word.is_empty()).collect()
}

/// QEMU's `-name [guest=]NAME,...`, Firecracker's `--id NAME`, Cloud Hypervisor's `--api-socket [path=]/run/NAME.sock`.
fn name(command: &[String]) -> Option<String> {
    let after = |flag: &str| {
        let at = command.iter().position(|word| word == flag)?;
        command.get(at + 1).cloned()
    };
    let clean = |name: &str| {
        let name = plain(&name.chars().take(64).collect::<String>());
        (!name.is_empty()).then_some(name)
    };
    if let Some(value) = after("-name").or_else(|| after("--name")) {
        let first =
            value.split(',').map(|part| part.strip_prefix("guest=").unwrap_or(part)).next()?.to_owned();
        return clean(&first);
    }
    if let Some(id) = after("--id") {
        return clean(&id);
    }
    let socket = after("--api-socket")?;
    let socket = socket.strip_prefix("path=").unwrap_or(&socket);
    clean(&Path::new(socket).file_stem()?.to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(pid: u32, name: &str) -> Vm {
        Vm { pid, name: name.into(), program: "p".into(), vcpus: 1, vm_fds: vec![3], command: Vec::new() }
    }

    #[test]
    fn names_of_three_vmms() {
        let words = |line: &str| line.split(' ').map(String::from).collect::<Vec<_>>();
        assert_eq!(name(&words("qemu -name guest=web,debug-threads=on -m 1")), Some("web".into()));
        assert_eq!(name(&words("qemu -m 1 -name db")), Some("db".into()));
        assert_eq!(name(&words("firecracker --id f1 --api-sock x")), Some("f1".into()));
        assert_eq!(name(&words("cloud-hypervisor --api-socket path=/run/ch7.sock")), Some("ch7".into()));
        assert_eq!(name(&words("qemu -name")), None);
    }

    #[test]
    fn names_are_plain() {
        let proc = tempfile::tempdir().unwrap();
        // Prctl takes any bytes, and one that is not UTF-8 too.
        std::fs::write(proc.path().join("comm"), b"\x1b[2J\x9b\n\x7fqemu\n").unwrap();
        assert_eq!(comm(proc.path()), "?[2J\u{fffd}??qemu");
        let words = ["-name", "a\x1b]0;x\x07\u{9b}2J"].map(String::from);
        assert_eq!(name(&words), Some("a?]0;x??2J".into()));
    }

    #[test]
    fn one_is_chosen() {
        let all = vec![vm(5, "a"), vm(6, "b"), vm(7, "b")];
        assert_eq!(choose(all.clone(), Some("a")).unwrap().pid, 5);
        assert_eq!(choose(all.clone(), Some("7")).unwrap().pid, 7);
        assert!(matches!(choose(all.clone(), Some("b")), Err(KvmStatError::SeveralVms(_))));
        assert!(matches!(choose(all.clone(), None), Err(KvmStatError::SeveralVms(_))));
        assert!(matches!(choose(all, Some("c")), Err(KvmStatError::UnknownVm { .. })));
        assert!(matches!(choose(Vec::new(), None), Err(KvmStatError::NoVm)));
        assert_eq!(choose(vec![vm(9, "x")], None).unwrap().pid, 9);
    }

    /// Who makes a VM names it, and may name it as another's process is numbered.
    #[test]
    fn hole_21_digits_are_a_process_and_never_a_name() {
        let all = vec![vm(5, "7"), vm(7, "a"), vm(8, "name:a"), vm(9, "12")];
        let pid = |wanted: &str| choose(all.clone(), Some(wanted)).map(|vm| vm.pid);
        assert_eq!((pid("7").unwrap(), pid("pid:7").unwrap(), pid("name:7").unwrap()), (7, 7, 5));
        assert_eq!((pid("name:a").unwrap(), pid("name:name:a").unwrap()), (7, 8));
        // No process of a VM has that number, and one has that name: which was meant is not guessed.
        for wanted in ["12", "pid:12"] {
            let error = pid(wanted).unwrap_err();
            assert!(error.to_string().contains("--vm name:12"), "{error}");
        }
        assert!(matches!(pid("99999999999999999999"), Err(KvmStatError::UnknownVm { .. })));
        assert!(matches!(pid("pid:a"), Err(KvmStatError::NumberIsName { .. })), "a name, not a number");
        let twice = vec![vm(1, "3"), vm(2, "3")];
        assert!(matches!(choose(twice, Some("name:3")), Err(KvmStatError::SeveralVms(_))));
    }

    #[test]
    fn vcpu_threads_by_name() {
        let thread = |name: &str| VmThread { id: 1, name: name.into() };
        for name in ["CPU 0/KVM", "fc_vcpu 0", "vcpu3"] {
            assert!(thread(name).is_vcpu_by_name(), "{name}");
        }
        assert!(!thread("qemu-system-x86").is_vcpu_by_name());
    }
}
