//! Hosts whose VMs libvirt runs: several on this machine, each a libvirtd with a mount, process and name space of its own.

use crate::accelerator::Accelerator;
use crate::agent::Agent;
use crate::daemon::Daemon;
use crate::process::{Process, run, scratch};
use crate::protocol::PORT;
use crate::stage::MEMORY_MIB;
use crate::version::Version;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long libvirtd may take until it answers: it asks QEMU first what that can do.
const START: Duration = Duration::from_secs(60);

/// QEMU with as much memory as [`Version::memory_kib`] says, which libvirt would round to MiB.
const EMULATOR: &str = r#"#!/bin/sh
for word in "$@"; do
    shift
    set -- "$@" "$(printf %s "$word" | sed 's/"size":ALL/"size":LESS/; s/^MIB$/KIBk/')"
done
exec qemu-system-x86_64 "$@"
"#;

/// What a host sees at the same place on each: its daemon's folder, in which the guest's port and console are as well.
pub(crate) const HERE: &str = "/run/ioplane-here";

/// The host, from its first process on. `$1` is what is at [`HERE`], `$2` its name, `$3` the configuration of libvirtd.
///
/// What the packages of libvirt leave to `libvirt-daemon-system`, which would start a libvirtd of the machine, is made here: the user. A shell is the first
/// process, since it waits for those that QEMU leaves behind, which libvirtd does not.
pub(crate) const HOST: &str = r#"set -e
hostname "$2"
mount -t tmpfs tmpfs /run
for folder in /var/lib/libvirt /var/cache/libvirt /var/log/libvirt /etc/libvirt; do
    mkdir -p "$folder"
    mount -t tmpfs tmpfs "$folder"
done
mkdir -p /run/libvirt /run/lock /var/lib/libvirt/qemu /run/ioplane-here
for file in passwd group; do
    grep -v '^libvirt-qemu:' /etc/$file >/run/$file
done
echo 'libvirt-qemu:x:64055:64055::/:/bin/false' >>/run/passwd
echo 'libvirt-qemu:x:64055:' >>/run/group
for file in passwd group; do
    mount --bind /run/$file /etc/$file
done
cat >/etc/libvirt/qemu.conf <<end
user = "root"
group = "root"
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
end
mount --bind "$1" /run/ioplane-here
libvirtd --config "$3" --pid-file /run/libvirtd.pid &
wait
"#;

/// libvirtd with everything that is its host's. Dropped, all its processes end, QEMU too.
#[derive(Debug)]
pub struct LibvirtHost {
    name: String,
    // The processes end before the folder goes.
    process: Process,
    folder: TempDir,
    daemon: PathBuf,
}

/// Whether libvirt and its QEMU driver are installed.
pub fn is_installed() -> bool {
    let asked =
        Command::new("libvirtd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    asked.is_ok_and(|status| status.success())
}

/// Makes the directories that a [`HOST`] mounts over, on this machine: L1 has its root, and may not write to it.
pub fn prepare() -> Result<()> {
    for folder in ["/var/lib/libvirt", "/var/cache/libvirt", "/var/log/libvirt", "/etc/libvirt"] {
        std::fs::create_dir_all(folder).with_context(|| format!("make {folder}"))?;
    }
    Ok(())
}

impl LibvirtHost {
    /// Starts the libvirtd of the host that has this daemon.
    pub fn start(name: &str, daemon: &Daemon) -> Result<LibvirtHost> {
        let folder = scratch("libvirt")?;
        let config = folder.path().join("libvirtd.conf");
        std::fs::write(&config, configuration(name, &folder.path().display().to_string()))?;
        let mut args: Vec<OsString> =
            ["--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
                .map(OsString::from)
                .into();
        args.extend(["--propagation", "private", "sh", "-c", HOST, "sh"].map(OsString::from));
        args.extend([daemon.folder().into(), name.into(), config.into()]);
        let process = Process::start("unshare", &args, &folder.path().join("libvirtd.log"))?;
        let daemon = daemon.folder().to_owned();
        let mut host = LibvirtHost { name: name.to_owned(), process, folder, daemon };
        let kib = Version::memory_kib(MEMORY_MIB)?;
        if kib != MEMORY_MIB << 10 {
            let numbers = [("ALL", MEMORY_MIB << 20), ("LESS", kib << 10), ("MIB", MEMORY_MIB), ("KIB", kib)];
            let script = numbers.iter().fold(EMULATOR.to_owned(), |script, (name, number)| {
                script.replace(name, &number.to_string())
            });
            std::fs::write(host.emulator(), script)?;
            std::fs::set_permissions(host.emulator(), PermissionsExt::from_mode(0o755))?;
        }
        let end = Instant::now() + START;
        while let Err(error) = host.virsh(&["list"]) {
            host.process.still_runs()?;
            ensure!(Instant::now() < end, "libvirtd does not answer: {error:#}: {}", host.process.said());
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(host)
    }

    /// How another host's libvirt names this one.
    pub fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}", self.folder.path().join("libvirt-sock").display())
    }

    /// Runs `virsh` with this host; what it prints, or what it says as the error.
    pub fn virsh(&self, args: &[&str]) -> Result<String> {
        let uri = self.uri();
        let all = [&["--connect", &uri], args].concat();
        run("virsh", &all).with_context(|| format!("host {}: {}", self.name, self.process.said()))
    }

    /// Starts a VM with these disks of the host's daemon, the first of which it boots: what `ioplane libvirt-xml` prints, with the port and the console of
    /// the test's guest.
    pub fn create(&self, daemon: &Daemon, name: &str, disks: &[&str]) -> Result<()> {
        let accelerator = Accelerator::detect();
        let memory = format!("{MEMORY_MIB}M");
        let emulator = self.emulator();
        let qemu = emulator.display().to_string();
        let mut words = vec!["libvirt-xml", "--memory", &memory, "--accel", accelerator.name()];
        if emulator.exists() {
            words.extend(["--qemu", &qemu]);
        }
        let printed = daemon.text(&[&words, disks].concat())?;
        let folder = self.daemon.display().to_string();
        ensure!(printed.contains(&folder), "the disks' sockets are not in {folder}: {printed}");
        // The same place on each host, as /run/ioplane is.
        let mut domain = printed.replace(&folder, HERE);
        let mut put = |old: &str, new: &str| {
            ensure!(domain.matches(old).count() == 1, "the domain has not one {old}: {domain}");
            domain = domain.replace(old, new);
            Ok(())
        };
        put(&format!("<name>{}</name>", disks[0]), &format!("<name>{name}</name>"))?;
        put("<console type='pty'/>", "")?;
        let port = format!(
            "<serial type='file'><source path='{HERE}/console.log'/></serial><channel type='unix'>\
             <source mode='bind' path='{HERE}/agent'/><target type='virtio' name='{PORT}'/></channel>"
        );
        put("<serial type='pty'/>", &port)?;
        if let Accelerator::Tcg { .. } = accelerator {
            // As in `Accelerator::args`.
            let cpu = "<cpu mode='custom'><model>Nehalem</model><feature policy='disable' name='cx16'/></cpu><devices>";
            put("<devices>", cpu)?;
        }
        let path = self.folder.path().join("domain.xml");
        std::fs::write(&path, domain)?;
        self.virsh(&["create", &path.display().to_string()]).map(|_| ())
    }

    /// The QEMU of this host's VMs, if it is not the one of the machine.
    fn emulator(&self) -> PathBuf {
        self.daemon.join("emulator")
    }

    /// Where the guest's port is, once a VM is here.
    fn port(&self) -> PathBuf {
        self.daemon.join("agent")
    }

    /// Connects to the guest of the VM that was started here.
    pub fn agent(&self) -> Result<Agent> {
        Agent::connect(&self.port())
    }

    /// Migrates the VM to the other host, and goes on talking to its guest there. Memory is copied over a TCP port of loopback.
    pub fn migrate(&self, name: &str, there: &LibvirtHost, agent: &Agent, port: u16) -> Result<()> {
        agent.leave();
        let moved = std::thread::scope(|scope| {
            // QEMU has the port before it has the guest, and drops what that says while nobody is there.
            let next = scope.spawn(|| there.wait_for_port());
            let through = format!("tcp:127.0.0.1:{port}");
            let words =
                ["migrate", "--live", "--migrateuri", &through, "--timeout", "60", "--timeout-suspend"];
            self.virsh(&[&words[..], &[name, &there.uri()]].concat())?;
            next.join().map_err(|_| anyhow::anyhow!("who waits for the port died"))?
        })?;
        agent.go_on(&moved)
    }

    fn wait_for_port(&self) -> Result<Agent> {
        let end = Instant::now() + START;
        loop {
            match Agent::hold(&self.port()) {
                Ok(agent) => return Ok(agent),
                Err(error) if Instant::now() >= end => return Err(error),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// The end of what the guest has printed here.
    pub fn console(&self) -> String {
        crate::process::tail(&self.daemon.join("console.log"), 25)
    }
}

/// The configuration of the libvirtd of a host, whose sockets are at `place`. Only hosts with other numbers and names migrate VMs to each other.
pub(crate) fn configuration(name: &str, place: &str) -> String {
    let uuid = format!("{:08x}-0000-4000-8000-000000000000", number_of(name));
    format!(
        "unix_sock_dir = \"{place}\"\nunix_sock_group = \"root\"\nauth_unix_rw = \"none\"\nauth_unix_ro = \"none\"\n\
         host_uuid = \"{uuid}\"\nlog_outputs = \"3:stderr\"\n"
    )
}

/// Something that differs from name to name.
fn number_of(name: &str) -> u32 {
    name.bytes().fold(1, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()))
}

/// A TCP port of loopback that nobody has at this moment.
pub fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_differ() {
        assert_ne!(number_of("host-b"), number_of("host-c"));
        assert!(HERE.starts_with("/run/") && HOST.contains(HERE));
    }
}
