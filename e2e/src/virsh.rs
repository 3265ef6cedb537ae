//! Hosts in L1 whose VMs libvirt runs: a libvirtd each, with a mount, process and name space of its own, as those of [`crate::libvirt`]. Their QEMUs are the
//! newer one, started by `ioplane run`, and their guests real KVM guests with a function of a [`Side`].

use crate::assets::{News, newer_libvirt};
use crate::l1::{Job, L1};
use crate::l2::{KERNEL_WORDS, L2, PERIODIC};
use crate::libvirt::{HERE, HOST, configuration};
use crate::sides::Side;
use crate::travel::VM;
use crate::version::Version;
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 256;
/// The guest has a folder of L1 by 9p until it has booted.
const MAY: &str = "clear_emulator_capabilities = 0\nseccomp_sandbox = 0\n";
const LAST: &str = "stdio_handler";

/// A host of L1. Its processes end with L1.
#[derive(Debug)]
pub struct Virsh<'a> {
    l1: &'a L1,
    job: Job<'a>,
    /// Where its sockets are, in L1.
    place: String,
    daemon: String,
    /// What puts the newer libvirt in the place of the host's.
    tree: String,
}

/// A word that a shell reads as it is.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// Puts a text in the place of the only other one.
fn put(domain: &mut String, old: &str, new: &str) -> Result<()> {
    ensure!(domain.matches(old).count() == 1, "the domain has not one {old}: {domain}");
    *domain = domain.replace(old, new);
    Ok(())
}

impl<'a> Virsh<'a> {
    /// Starts the libvirtd of the host that has this daemon.
    pub fn start(l1: &'a L1, side: &Side<'_>, news: News<'_>) -> Result<Virsh<'a>> {
        let (name, daemon) = (side.name, format!("/tmp/{}", side.name));
        let place = format!("/tmp/libvirt-{name}");
        let config = configuration(&format!("host-{name}"), &place);
        let emulator = format!("#!/bin/sh\nexec {} qemu-system-x86_64 \"$@\"\n", l1.interposed()?);
        let tree = match newer_libvirt(news)? {
            Some(tree) => format!("mount --bind {}/usr /usr\n", tree.display()),
            None => String::new(),
        };
        let job = l1.start(&format!(
            "set -e
             mkdir -p {place} /dev/hugepages
             mountpoint -q /dev/hugepages || mount -t hugetlbfs hugetlbfs /dev/hugepages
             printf %s {} >{place}/libvirtd.conf
             printf %s {} >{daemon}/emulator
             chmod 755 {daemon}/emulator
             exec unshare --mount --uts --pid --fork --kill-child=KILL --mount-proc --propagation private \
                 sh -c {} sh {daemon} host-{name} {place}/libvirtd.conf",
            quoted(&config),
            quoted(&emulator),
            quoted(
                &HOST.replace("set -e\n", &format!("set -e\n{tree}")).replace(LAST, &format!("{MAY}{LAST}"))
            ),
        ))?;
        let host = Virsh { l1, job, place, daemon, tree };
        let answers = format!("until {} list; do sleep 0.3; done", host.command());
        l1.run(&answers, MINUTE).with_context(|| format!("libvirtd said {}", host.job.output()))?;
        Ok(host)
    }

    fn uri(&self) -> String {
        format!("qemu+unix:///system?socket={}/libvirt-sock", self.place)
    }

    fn command(&self) -> String {
        let script = format!("{}exec virsh --connect \"$0\" \"$@\"", self.tree);
        let own = "unshare --mount --propagation private sh -c";
        format!("{own} {} {}", quoted(&script), quoted(&self.uri()))
    }

    /// Runs `virsh WORDS` with this host; what it prints.
    pub fn virsh(&self, words: &str) -> Result<String> {
        let said = self.l1.run(&format!("{} {words}", self.command()), 2 * MINUTE);
        said.with_context(|| format!("libvirtd said {}", self.job.output()))
    }

    /// Starts `virsh migrate` of the VM to the other host, over a port of loopback.
    pub fn migrates(&self, there: &Virsh<'_>, port: u16, options: &str) -> Result<Job<'a>> {
        let through = format!("--migrateuri tcp:127.0.0.1:{port}");
        let line = format!("migrate --live {options} {through} {VM} {}", quoted(&there.uri()));
        self.l1.start(&format!("exec {} {line}", self.command()))
    }

    /// Starts the guest with `nic0` of the host's daemon: what `ioplane libvirt-xml` prints, with the kernel, the folder and the serial ports of the test's
    /// guests. Its monitors are `web.qmp` and `web.watch` in the daemon's folder.
    pub fn create(&self, side: &Side<'_>) -> Result<L2<'a>> {
        let folder = self.l1.shared("libvirt")?;
        let printed = side.daemon.text(&format!(
            "libvirt-xml nic0 --memory {MEMORY}M --accel kvm --qemu {HERE}/emulator --qemu-version {}",
            Version::Newer.number()?
        ))?;
        ensure!(printed.contains(&self.daemon), "the socket is not in {}: {printed}", self.daemon);
        let mut domain = printed.replace(&format!("{}/", self.daemon), &format!("{HERE}/"));
        let parts = self.l1.debian_parts();
        let (kernel, initrd) = (parts.kernel.display(), parts.initrd.display());
        let root = parts.root.context("a Debian")?.display().to_string();
        put(&mut domain, "<name>nic0</name>", &format!("<name>{VM}</name>"))?;
        put(&mut domain, "<memoryBacking>", "<memoryBacking><hugepages/>")?;
        put(&mut domain, "<vcpu>1</vcpu>", "<vcpu>2</vcpu>")?;
        let boot = format!(
            "<kernel>{kernel}</kernel><initrd>{initrd}</initrd>\
             <cmdline>{KERNEL_WORDS} {PERIODIC}</cmdline>"
        );
        put(&mut domain, "<boot dev='network'/>", &boot)?;
        let clock = "</features><clock offset='utc'><timer name='hpet' present='no'/></clock>";
        put(&mut domain, "</features>", clock)?;
        put(&mut domain, "<serial type='pty'/>", "<controller type='usb' model='none'/>")?;
        put(&mut domain, "<console type='pty'/>", "<memballoon model='none'/>")?;
        let (device, placed) =
            (r#""driver":"vfio-user-pci","#, r#""driver":"vfio-user-pci","bus":"behind","#);
        put(&mut domain, device, placed)?;
        let log = folder.with_extension("log");
        let words = [
            "-serial".to_owned(),
            format!("file:{HERE}/web.log"),
            "-serial".to_owned(),
            format!("unix:{HERE}/web.shell,server=on,wait=off"),
            "-qmp".to_owned(),
            format!("unix:{HERE}/web.qmp,server=on,wait=off"),
            "-qmp".to_owned(),
            format!("unix:{HERE}/web.watch,server=on,wait=off"),
            "-drive".to_owned(),
            format!("if=none,id=root,file={root},format=raw,readonly=on"),
            "-device".to_owned(),
            "virtio-blk-pci,drive=root".to_owned(),
            "-fsdev".to_owned(),
            format!("local,id=folder,path={},security_model=none", folder.display()),
            "-device".to_owned(),
            "virtio-9p-pci,fsdev=folder,mount_tag=folder".to_owned(),
            "-device".to_owned(),
            "pcie-root-port,id=behind,chassis=77".to_owned(),
        ];
        let words: String = words.map(|word| format!("<qemu:arg value='{word}'/>\n")).concat();
        put(&mut domain, "<qemu:commandline>\n", &format!("<qemu:commandline>\n{words}"))?;
        std::fs::write(self.l1.folder().join("domain.xml"), &domain)?;
        let file = self.l1.folder().join("domain.xml").display().to_string();
        self.virsh(&format!("create {file}"))?;
        // What the console says is read there.
        let console = format!("tail -n +1 -F {}/web.log >{}", self.daemon, log.display());
        let console = self.l1.start(&console)?;
        self.l1.started(folder, console)
    }

    /// Whether it has the VM.
    pub fn has_it(&self) -> Result<bool> {
        Ok(self.virsh("list --name --state-running")?.lines().any(|name| name == VM))
    }

    /// What libvirtd has said.
    pub fn said(&self) -> String {
        self.job.output()
    }
}
