//! Building a QEMU command line, and starting it.

use crate::accelerator::Accelerator;
use crate::assets::{Guest, News, host_version, newer_qemu};
use crate::place::HostPlace;
use crate::version::{Version, program};
use crate::vm::{MONITOR, Vm};
use anyhow::{Context, Result, bail};
use ioplane_guest_load::protocol::PORT;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How the guest boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Firmware {
    /// QEMU loads kernel and initial RAM disk itself.
    Kernel,
    /// SeaBIOS boots the disk.
    SeaBios,
    /// OVMF boots the disk.
    Ovmf,
}

/// What every guest's kernel is told (`guest/root/grub.cfg` has the same): a translated guest boots in half the time
/// without self-tests, entropy measurements and side-channel mitigations.
const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 apparmor=0 tsc=reliable \
     no_timer_check cryptomgr.notests initcall_blacklist=jent_mod_init,load_system_certificate_list";

/// A guest to be. The caller gives it a root disk: [`Qemu::file`], [`Qemu::vhost_user`] or
/// [`Qemu::args`].
pub struct Qemu<'a> {
    name: String,
    version: Version,
    firmware: Firmware,
    accelerator: Accelerator,
    memory_mib: u64,
    cpus: u32,
    slots: u32,
    append: String,
    args: Vec<OsString>,
    incoming: bool,
    machine: String,
    limit: Option<Duration>,
    place: HostPlace,
    news: News<'a>,
}

fn silent(_: &str) {}

impl<'a> Qemu<'a> {
    /// A guest with one vCPU, 256 MiB and four hot-plug slots, by direct kernel boot in the host's QEMU.
    pub fn new(name: &str) -> Self {
        Qemu {
            name: name.into(),
            version: Version::Host,
            firmware: Firmware::Kernel,
            accelerator: Accelerator::detect(),
            memory_mib: 256,
            cpus: 1,
            slots: 4,
            append: String::new(),
            args: Vec::new(),
            incoming: false,
            machine: "q35".into(),
            limit: None,
            place: HostPlace::default(),
            news: &silent,
        }
    }

    pub fn version(mut self, version: Version) -> Self {
        self.version = version;
        self
    }

    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = firmware;
        self
    }

    /// Another accelerator than the detected one.
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// Guest memory, always shared (memfd), as vhost-user needs it.
    pub fn memory_mib(mut self, mib: u64) -> Self {
        self.memory_mib = mib;
        self
    }

    /// How many vCPUs.
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// How many PCI Express slots wait for hot-plugged devices; each is the bus of one [`Vm::plug`].
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = slots;
        self
    }

    /// More words for the kernel's command line; for [`Firmware::Kernel`] only.
    pub fn append(mut self, words: &str) -> Self {
        self.append = words.into();
        self
    }

    /// More arguments in one line, such as `ioplane qemu-args` prints; split at white space.
    pub fn args(mut self, line: &str) -> Self {
        self.args.extend(line.split_whitespace().map(OsString::from));
        self
    }

    /// QEMU's own virtio-blk on a raw file.
    pub fn file(self, path: &Path, serial: &str) -> Self {
        let path = path.display();
        let drive =
            format!("-drive if=none,id=drive-{serial},format=raw,cache=none,discard=unmap,file={path}");
        self.args(&format!("{drive} -device virtio-blk-pci,drive=drive-{serial},serial={serial},id={serial}"))
    }

    /// A vhost-user-blk disk behind `socket`; the back end tells the serial. Set the version first.
    pub fn vhost_user(self, socket: &Path, id: &str, queues: u32) -> Result<Self> {
        let args = self.version.vhost_user(socket, id, queues)?;
        Ok(self.args(&args))
    }

    /// Another machine than `q35`: one of a fixed version, so that its guest can move to a newer QEMU.
    pub fn machine(mut self, machine: &str) -> Self {
        self.machine = machine.into();
        self
    }

    /// No guest yet: one comes by migration ([`Vm::send_to`]) and stands still until [`Vm::go_on_from`].
    pub fn incoming(mut self) -> Self {
        self.incoming = true;
        self.args("-incoming defer -S")
    }

    /// No guest yet: one comes to `uri` (`tcp:ADDRESS:PORT`, `unix:PATH`), and goes on as soon as it is there.
    pub fn incoming_at(mut self, uri: &str) -> Self {
        self.incoming = true;
        self.args(&format!("-incoming {uri}"))
    }

    /// On another host than the test's.
    pub fn at(mut self, place: &HostPlace) -> Self {
        self.place = place.clone();
        self
    }

    /// How long until the guest must answer; by default a minute or so, more under TCG and OVMF.
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Who hears of the boot's stages.
    pub fn news(mut self, news: News<'a>) -> Self {
        self.news = news;
        self
    }

    /// Starts QEMU and waits until the load program in the guest answers.
    pub fn start(self, guest: &Guest) -> Result<Vm> {
        let (limit, news) = (self.patience(), self.news);
        let mut vm = self.launch(guest)?;
        vm.wait_up(limit, news)?;
        Ok(vm)
    }

    /// Starts QEMU and does not wait for the guest.
    pub fn launch(self, guest: &Guest) -> Result<Vm> {
        let folder = self.place.scratch(&self.name)?;
        let log = folder.path().join("qemu.log");
        let (program, args) = self.command(guest, folder.path())?;
        let process = self.place.start(program, &args, &log)?;
        Vm::attach(self.name, self.version, folder, process, self.slots, self.incoming)
    }

    fn patience(&self) -> Duration {
        let base = if self.firmware == Firmware::Ovmf { 40 } else { 20 };
        self.limit.unwrap_or(Duration::from_secs(base) * self.accelerator.patience())
    }

    /// The vCPUs. A machine that can have only one is translated by TCG without barriers (`lock` and, in 7.2, `mfence`): the
    /// guest can then miss that a queue was armed and never kick it (docs/measurements/tcg-barrier.md). Room for a second one
    /// makes TCG keep them.
    fn smp(&self) -> String {
        match self.accelerator {
            Accelerator::Tcg { .. } if self.cpus == 1 => "1,maxcpus=2".into(),
            _ => self.cpus.to_string(),
        }
    }

    /// What chooses the accelerator. QEMU 7.2's TCG now and then runs a stale translation while another vCPU patches the
    /// kernel's text (an oops on int3 at boot, with two vCPUs): there vCPUs take turns on one thread.
    fn accelerator_args(&self) -> Result<String> {
        let args = self.accelerator.args().join(" ");
        let old = self.version == Version::Host && host_version()? < (8, 0);
        Ok(if old && self.cpus > 1 { args.replace("thread=multi", "thread=single") } else { args })
    }

    /// The command line, for a guest whose sockets and logs lie in `folder`.
    pub fn command(&self, guest: &Guest, folder: &Path) -> Result<(String, Vec<OsString>)> {
        let at = |name: &str| folder.join(name).display().to_string();
        let mut args: Vec<OsString> = Vec::new();
        let mut add = |line: &str| args.extend(line.split_whitespace().map(OsString::from));
        let own_memory = self.args.iter().any(|arg| arg.to_string_lossy().contains("memory-backend-"));
        let machine = &self.machine;
        add(&format!("-nodefaults -no-user-config -no-reboot -display none -machine {machine},vmport=off"));
        let size = Version::memory_kib(self.memory_mib)?;
        if !own_memory {
            add(&format!(
                "-object memory-backend-memfd,id=memory,size={size}K,share=on -machine memory-backend=memory"
            ));
        }
        add(&self.accelerator_args()?);
        add(&format!("-m {size}K -smp {} -name {}", self.smp(), self.name));
        for monitor in ["qmp", MONITOR] {
            add(&format!("-qmp unix:{},server=on,wait=off", at(monitor)));
        }
        add(&format!("-chardev file,id=console,path={} -serial chardev:console", at("console.log")));
        add(&format!("-chardev socket,id=agent,path={},server=on,wait=off", at("agent")));
        add(&format!("-device virtio-serial-pci -device virtserialport,chardev=agent,name={PORT}"));
        for slot in 1..=self.slots {
            add(&format!("-device pcie-root-port,id=slot{slot},chassis={slot},slot={slot}"));
        }
        match self.firmware {
            Firmware::Kernel => {
                args.extend(["-kernel".into(), guest.kernel.clone().into()]);
                args.extend(["-initrd".into(), guest.initrd.clone().into()]);
                let line = format!("{COMMAND_LINE} {}", self.append);
                args.extend(["-append".into(), line.trim_end().into()]);
                // SeaBIOS would set up the rings of all disks and leave them running while the initial RAM disk is loaded over
                // the third one's: a back end that polls sees that as a fault of the guest.
                args.extend(["-boot".into(), "strict=on".into()]);
            }
            Firmware::SeaBios => {}
            Firmware::Ovmf => args.extend(self.ovmf(folder)?),
        }
        if self.firmware != Firmware::Kernel && !self.append.is_empty() {
            bail!("the kernel's command line can be added to by direct kernel boot only");
        }
        args.extend(self.args.iter().cloned());
        program(self.version, "qemu-system-x86_64", args, self.news)
    }

    fn ovmf(&self, folder: &Path) -> Result<[OsString; 4]> {
        let tree = if self.version == Version::Newer { newer_qemu(self.news)? } else { None };
        let base = tree.unwrap_or_else(|| PathBuf::from("/")).join("usr/share/OVMF");
        let vars = folder.join("vars.fd");
        std::fs::copy(base.join("OVMF_VARS_4M.fd"), &vars)
            .with_context(|| format!("copy OVMF_VARS_4M.fd of the package ovmf from {}", base.display()))?;
        let flash = |path: &Path, readonly: &str| {
            OsString::from(format!("if=pflash,format=raw,{readonly}file={}", path.display()))
        };
        let code = flash(&base.join("OVMF_CODE_4M.fd"), "readonly=on,");
        Ok(["-drive".into(), code, "-drive".into(), flash(&vars, "")])
    }
}
