//! A Debian guest in L1: stock QEMU with KVM, Debian's generic kernel, a Debian that is mounted read-only, and a shared folder by which
//! scripts are run in it. Three kernels see that folder: the guest's, L1's and ours.

use crate::l1::{Job, L1};
use crate::process::{built, tail};
use crate::version::{Version, program};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How often a file that the guest writes is looked for.
const LOOK: Duration = Duration::from_millis(30);
const MINUTE: Duration = Duration::from_secs(60);
/// Words for a guest's kernel. fq_codel, Debian's default, drops what has waited for long, and on this stage everything does. A test may use registers of
/// a device that has a driver (`iomem`).
pub(crate) const KERNEL_WORDS: &str = "console=ttyS0 quiet panic=-1 mitigations=off audit=0 apparmor=0 iomem=relaxed \
     sysctl.net.core.default_qdisc=pfifo_fast";
/// More of them: fewer timer interrupts, each of which takes a translated guest long. They also hid what `vmrun.rs` mends.
pub const PERIODIC: &str = "highres=off nohz=off";

/// What a guest is booted from.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    pub kernel: &'a Path,
    /// With `guest/l1/guest.sh` as its first program.
    pub initrd: &'a Path,
    /// The Debian that scripts run in; without one they run in the initial RAM disk.
    pub root: Option<&'a Path>,
}

/// A running guest of L1. [`L2::kill`] ends it, or L1's end.
#[derive(Debug)]
pub struct L2<'a> {
    l1: &'a L1,
    qemu: Job<'a>,
    folder: PathBuf,
    jobs: AtomicU32,
}

impl L1 {
    /// Boots one in the host's QEMU: its name, more arguments for QEMU (the machine at least, and `-name` if the VM has another), more words for the
    /// kernel. Its monitor is `/tmp/NAME.qmp` in L1, and its root is the first virtio disk.
    pub fn debian(&self, name: &str, args: &str, append: &str) -> Result<L2<'_>> {
        self.debian_by(Version::Host, name, args, append)
    }

    /// The same in another QEMU. The shell of L1 sees `args`: what has quotes keeps them.
    pub fn debian_by(&self, version: Version, name: &str, args: &str, append: &str) -> Result<L2<'_>> {
        self.debian_after("", version, name, args, append)
    }

    /// The same with words before the command: `NAME=VALUE` for its environment, then a program that starts it.
    pub fn debian_after(
        &self,
        before: &str,
        version: Version,
        name: &str,
        args: &str,
        append: &str,
    ) -> Result<L2<'_>> {
        self.guest_of(&self.debian_parts(), before, version, name, args, append)
    }

    /// The same from other parts.
    pub fn guest_of(
        &self,
        parts: &Parts<'_>,
        before: &str,
        version: Version,
        name: &str,
        args: &str,
        append: &str,
    ) -> Result<L2<'_>> {
        let guest = self.start_guest(parts, before, version, name, args, append)?;
        guest.wait_for("up", 2 * MINUTE).with_context(|| format!("boot {name}"))?;
        Ok(guest)
    }

    /// Debian 13 with its generic kernel.
    pub fn debian_parts(&self) -> Parts<'_> {
        Parts { kernel: &self.host.packed, initrd: &self.host.guest, root: Some(&self.host.debian) }
    }

    /// A Debian without waiting for it to boot: with `-incoming` it does not.
    pub fn start_debian(
        &self,
        before: &str,
        version: Version,
        name: &str,
        args: &str,
        append: &str,
    ) -> Result<L2<'_>> {
        self.start_guest(&self.debian_parts(), before, version, name, args, append)
    }

    fn start_guest(
        &self,
        parts: &Parts<'_>,
        before: &str,
        version: Version,
        name: &str,
        args: &str,
        append: &str,
    ) -> Result<L2<'_>> {
        let folder = self.shared(name)?;
        let path = folder.display();
        let (kernel, initrd) = (parts.kernel.display(), parts.initrd.display());
        let disk = |root: &Path| {
            let root = root.display();
            format!(
                "-drive if=none,id=root,file={root},format=raw,readonly=on -device virtio-blk-pci,drive=root"
            )
        };
        let root = parts.root.map(disk).unwrap_or_default();
        let (program, words) = program(version, "qemu-system-x86_64", Vec::new(), &|_| {})?;
        let named = if args.contains("-name ") { String::new() } else { format!("-name {name}") };
        let quoted = words.iter().map(|word| format!(" '{}'", word.to_string_lossy().replace('\'', "'\\''")));
        let words: String = quoted.collect();
        let qemu = self.start(&format!(
            "exec env {before} {program}{words} -accel kvm -cpu host -nodefaults -no-user-config -display none -no-reboot \
             {named} -serial file:{path}.log -kernel {kernel} -initrd {initrd} \
             -append '{KERNEL_WORDS} {append}' \
             -fsdev local,id=folder,path={path},security_model=none \
             -qmp unix:/tmp/{name}.qmp,server=on,wait=off \
             {root} -device virtio-9p-pci,fsdev=folder,mount_tag=folder {args}",
        ))?;
        Ok(L2 { l1: self, qemu, folder, jobs: AtomicU32::new(0) })
    }

    /// The folder of a guest that somebody else starts. It boots Debian from these [parts](L1::debian_parts), and has the folder by 9p as `folder`.
    pub(crate) fn shared(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder().join(name);
        fs::create_dir(&folder)?;
        fs::copy("/bin/busybox", folder.join("busybox")).context("busybox of the package busybox-static")?;
        Ok(folder)
    }

    /// That guest, once it has booted; `host` is what has its QEMU.
    pub(crate) fn started<'l>(&'l self, folder: PathBuf, host: Job<'l>) -> Result<L2<'l>> {
        let guest = L2 { l1: self, qemu: host, folder, jobs: AtomicU32::new(0) };
        guest.wait_for("up", 2 * MINUTE).context("boot the guest")?;
        Ok(guest)
    }
}

impl<'a> L2<'a> {
    /// The host that it runs on.
    pub(crate) fn l1(&self) -> &'a L1 {
        self.l1
    }

    /// What it was booted as.
    pub(crate) fn name(&self) -> String {
        self.folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
}

impl L2<'_> {
    /// The folder that the guest sees as `/folder`. There is a `busybox` in it.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Runs a script in the guest to its end; an error unless it ends well. Returns its output.
    pub fn run(&self, script: &str) -> Result<String> {
        let number = self.start(script)?;
        self.finish(number, script)
    }

    /// Waits for one that was started; see [`L2::run`].
    pub fn finish(&self, number: u32, script: &str) -> Result<String> {
        let status = self.wait_for(&format!("{number}.status"), 2 * MINUTE);
        let output = fs::read(self.folder.join(format!("{number}.out"))).unwrap_or_default();
        let output = String::from_utf8_lossy(&output).into_owned();
        let status = status.with_context(|| format!("the script has said:\n{output}"))?;
        if status.trim() != "0" {
            bail!("in the guest a script ended with {}:\n{script}\nIt said:\n{output}", status.trim());
        }
        Ok(output)
    }

    /// Starts one and leaves it alone; its number.
    pub fn start(&self, script: &str) -> Result<u32> {
        let number = self.jobs.fetch_add(1, Ordering::Relaxed) + 1;
        let half = self.folder.join(format!("{number}.half"));
        fs::write(&half, script)?;
        fs::rename(&half, self.folder.join(format!("{number}.sh")))?;
        Ok(number)
    }

    /// Waits for a file in the folder.
    pub fn wait_for(&self, name: &str, limit: Duration) -> Result<String> {
        let end = Instant::now() + limit * self.l1.patience();
        loop {
            if let Ok(text) = fs::read_to_string(self.folder.join(name)) {
                return Ok(text);
            }
            self.l1.still_runs()?;
            if Instant::now() >= end || self.qemu.has_ended() {
                let console = tail(&self.folder.with_extension("log"), 20);
                bail!(
                    "{name} has not come from the guest; QEMU said:\n{}\nthe console:\n{console}",
                    self.qemu.output()
                );
            }
            std::thread::sleep(LOOK);
        }
    }

    /// A command of QEMU's monitor for programs; what it returns. Its socket is in L1, and so is the client.
    pub fn qmp(&self, command: &str, arguments: &Value) -> Result<Value> {
        let said = self.qmp_each(&[(command, arguments)])?;
        said.into_iter().next().context("QEMU has said nothing")
    }

    /// The thread of its first vCPU, in L1.
    pub fn vcpu_thread(&self) -> Result<u64> {
        let vcpus = self.qmp("query-cpus-fast", &json!({}))?;
        vcpus[0]["thread-id"].as_u64().with_context(|| format!("a thread: {vcpus}"))
    }

    /// Several of them one after the other, without leaving L1 in between.
    pub fn qmp_each(&self, commands: &[(&str, &Value)]) -> Result<Vec<Value>> {
        let client = built("ioplane-qmp")?;
        let mut script = "set -e".to_owned();
        for (command, arguments) in commands {
            let words = serde_json::to_string(arguments)?.replace('\'', "'\\''");
            script += &format!("\n{} /tmp/{}.qmp {command} '{words}'", client.display(), self.name());
        }
        let said = self.l1.run(&script, MINUTE)?;
        said.lines().map(|line| serde_json::from_str(line).with_context(|| said.clone())).collect()
    }

    /// What its serial port has said.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.folder.with_extension("log")).unwrap_or_default()).into_owned()
    }

    /// What QEMU has said.
    pub fn said(&self) -> String {
        self.qemu.output()
    }

    /// Has QEMU reset the machine, and waits until the guest has booted again. No script may run in the guest.
    pub fn reset(&self) -> Result<()> {
        // The guest begins anew with the first script in its folder.
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            let script = path.file_stem().is_some_and(|stem| stem.to_string_lossy().parse::<u32>().is_ok());
            if script || path.ends_with("up") {
                fs::remove_file(path)?;
            }
        }
        self.jobs.store(0, Ordering::Relaxed);
        // With -no-reboot QEMU ends in place of a reset.
        let reboot = |action: &str| json!({"reboot": action});
        let nothing = json!({});
        self.qmp_each(&[("set-action", &reboot("reset")), ("system_reset", &nothing)])?;
        self.wait_for("up", 2 * MINUTE).with_context(|| format!("boot {} again", self.name()))?;
        self.qmp("set-action", &reboot("shutdown")).map(drop)
    }

    /// Waits until its QEMU, started with `-incoming unix:/tmp/NAME.in`, takes a guest.
    pub fn takes_guests(&self) -> Result<()> {
        self.takes_guests_at(&format!("unix:/tmp/{}.in", self.name()))
    }

    /// The same where its `-incoming` says.
    pub(crate) fn takes_guests_at(&self, at: &str) -> Result<()> {
        let (kind, place) = at.split_once(':').context("unix:PATH or tcp:ADDRESS:PORT")?;
        let listens = match kind {
            "unix" => format!("[ -S {place} ]"),
            _ => format!("ss -Hltn | grep -q ' {place} '"),
        };
        self.l1.run(&format!("until {listens}; do sleep 0.1; done"), MINUTE).map(drop).with_context(|| {
            format!("{} waits for a migration at {at}; QEMU said {}", self.name(), self.said())
        })
    }

    /// Migrates it to one that [takes guests](L2::takes_guests), and waits until QEMU has sent all of it.
    pub fn migrate_to(&self, there: &L2<'_>) -> Result<()> {
        self.qmp("migrate", &json!({"uri": format!("unix:/tmp/{}.in", there.name())}))?;
        let end = Instant::now() + 3 * MINUTE;
        loop {
            let status = self.qmp("query-migrate", &json!({}))?;
            match status["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    bail!("{status:#}; the destination said {}", there.said())
                }
                _ => ensure!(Instant::now() < end, "{status:#}"),
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Ends it, as if the power had gone.
    pub fn kill(self) -> Result<()> {
        self.qemu.kill()
    }
}
