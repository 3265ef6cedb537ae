//! A KVM host inside a VM (L1): its guests (L2) are real KVM guests, whose exits, tracepoints and counters are what hardware would
//! give. Times are not.
//!
//! Under TCG the processor has AMD's SVM; on a host with nested virtualization it has what that host has. L1 sees the
//! root of the machine that runs the test, read-only and by the same paths, so that whatever was built there runs in L1. One folder
//! can be written by both, again by the same path: [`L1::folder`].

use crate::accelerator::Accelerator;
use crate::assets::{Host, News};
use crate::process::{Process, scratch, tail};
use crate::version::{Version, newer_beside, program};
use crate::vmrun;
use anyhow::{Context, Result, bail};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How often a file that L1 writes is looked for.
const LOOK: Duration = Duration::from_millis(30);

/// A running L1. It dies with this value.
#[derive(Debug)]
pub struct L1 {
    /// What it was made of; its guests can be made of the same.
    pub host: Host,
    folder: tempfile::TempDir,
    process: Mutex<Process>,
    jobs: Mutex<u32>,
    patience: u32,
    /// Memory of its guests is made of huge pages.
    pub(crate) huge: bool,
}

/// What an L1 has beside the usual.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape<'a> {
    pub(crate) memory_mib: u64,
    /// How much of it is huge pages of 2 MiB, for guests.
    pub(crate) huge_mib: u64,
    /// More arguments for QEMU.
    pub(crate) args: &'a str,
    /// More words for the kernel.
    pub(crate) append: &'a str,
    /// More modules, each after a comma.
    pub(crate) load: &'a str,
    /// It runs in a QEMU that has vfio-user and the 82576, in place of the host's own.
    pub(crate) newer: bool,
    /// See [`L1::boot_by_instructions`].
    pub(crate) by_instructions: bool,
}

/// What a script has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    pub status: i32,
    /// Its output and error, together.
    pub output: String,
}

/// A script that runs in L1.
#[derive(Debug)]
pub struct Job<'a> {
    l1: &'a L1,
    number: u32,
}

impl L1 {
    /// Boots one with `memory_mib`, more arguments for QEMU, and the module of KVM loaded.
    pub fn boot(memory_mib: u64, args: &str, news: News<'_>) -> Result<L1> {
        Self::boot_as(&Shape { memory_mib, args, ..Shape::default() }, news)
    }

    /// The same in the newer QEMU, whose SVM translates guests of 32 bits.
    pub fn boot_in_newer(memory_mib: u64, news: News<'_>) -> Result<L1> {
        Self::boot_as(&Shape { memory_mib, newer: true, ..Shape::default() }, news)
    }

    /// Boots one whose clock goes on by two nanoseconds with each instruction where it is translated, so that times in it are numbers of instructions, whatever
    /// else this machine does. When it has nothing to do its clock goes on to the next timer at once. For guests without timers: QEMU 7.2 lets others stand still.
    pub fn boot_by_instructions(memory_mib: u64, news: News<'_>) -> Result<L1> {
        Self::boot_as(&Shape { memory_mib, by_instructions: true, ..Shape::default() }, news)
    }

    /// Boots one of that shape.
    pub(crate) fn boot_as(shape: &Shape<'_>, news: News<'_>) -> Result<L1> {
        let host = Host::prepare(news)?;
        let folder = scratch("l1")?;
        let accelerator = Accelerator::detect();
        news(&format!("l1: booting on {accelerator}"));
        let (program, args) = command(&host, folder.path(), &accelerator, shape, news)?;
        let process = Process::start(&program, &args, &folder.path().join("qemu.log"))?;
        if accelerator != Accelerator::Kvm
            && let Err(error) = vmrun::mend(process.id())
        {
            news(&format!("l1: a guest may get an interrupt twice: {error:#}"));
        }
        let patience = accelerator.patience();
        let (process, jobs, huge) = (Mutex::new(process), Mutex::new(0), shape.huge_mib > 0);
        let l1 = L1 { host, folder, process, jobs, patience, huge };
        l1.wait_for("up", Duration::from_secs(40)).context("boot L1")?;
        Ok(l1)
    }

    /// A folder that L1 and we can write.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// An error with what QEMU said, if it has ended.
    pub fn still_runs(&self) -> Result<()> {
        self.process.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).still_runs()
    }

    /// Whether its processor, and so the virtualization of its guests, is QEMU's.
    pub fn is_translated(&self) -> bool {
        self.patience > 1
    }

    /// How much longer to wait than on real hardware.
    pub(crate) fn patience(&self) -> u32 {
        self.patience
    }

    /// Starts a script for `/bin/sh`.
    pub fn start(&self, script: &str) -> Result<Job<'_>> {
        let mut jobs = self.jobs.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *jobs += 1;
        let number = *jobs;
        // L1 must not see half of it.
        let half = self.folder().join(format!("{number}.half"));
        fs::write(&half, script)?;
        fs::rename(&half, self.folder().join(format!("{number}.sh")))?;
        Ok(Job { l1: self, number })
    }

    /// Runs a script to its end; an error unless it ends well. Returns its output.
    pub fn run(&self, script: &str, limit: Duration) -> Result<String> {
        let ended = self.start(script)?.wait(limit)?;
        if ended.status != 0 {
            bail!("in L1 a script ended with {}:\n{script}\nIt said:\n{}", ended.status, ended.output);
        }
        Ok(ended.output)
    }

    fn wait_for(&self, name: &str, limit: Duration) -> Result<String> {
        let path = self.folder().join(name);
        let end = Instant::now() + limit * self.patience();
        loop {
            if let Ok(text) = fs::read_to_string(&path) {
                return Ok(text);
            }
            self.still_runs()?;
            if Instant::now() >= end {
                let console = tail(&self.folder().join("console.log"), 20);
                bail!("{name} has not come within {limit:?}; L1's console ends with:\n{console}");
            }
            std::thread::sleep(LOOK);
        }
    }
}

impl Job<'_> {
    /// What it has written so far.
    pub fn output(&self) -> String {
        let bytes = fs::read(self.file("out")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until its output contains `text`, or until it has ended.
    pub fn expect(&self, text: &str, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit * self.l1.patience;
        while !self.output().contains(text) {
            if Instant::now() >= end || self.file("status").exists() {
                bail!("a script in L1 does not say {text:?}; it said:\n{}", self.output());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    pub fn has_ended(&self) -> bool {
        self.file("status").exists()
    }

    /// Kills it and everything that it has started.
    pub fn kill(&self) -> Result<()> {
        self.signal("KILL")
    }

    /// Sends it SIGINT, as Ctrl-C does.
    pub fn interrupt(&self) -> Result<()> {
        self.signal("INT")
    }

    /// Sends it and everything that it has started this signal.
    pub fn signal(&self, signal: &str) -> Result<()> {
        let pid = self.file("pid").display().to_string();
        self.l1.run(&format!("kill -{signal} -$(cat {pid})"), Duration::from_secs(10)).map(drop)
    }

    pub fn wait(&self, limit: Duration) -> Result<Ended> {
        let status = self.l1.wait_for(&format!("{}.status", self.number), limit);
        let status = status.with_context(|| format!("the script has said:\n{}", self.output()))?;
        let status = status.trim().parse().with_context(|| format!("{status:?} is a status"))?;
        Ok(Ended { status, output: self.output() })
    }

    fn file(&self, ending: &str) -> std::path::PathBuf {
        self.l1.folder().join(format!("{}.{ending}", self.number))
    }
}

/// The host's own QEMU or the newer one, with one processor: with two, QEMU 11.1's translated SVM has left a busy guest of L1 in a loop of interrupt
/// windows at one instruction. The old one's translation of `cmpxchg16b` is wrong: see [`Accelerator::args`].
fn command(
    host: &Host,
    folder: &Path,
    accelerator: &Accelerator,
    shape: &Shape<'_>,
    news: News<'_>,
) -> Result<(String, Vec<OsString>)> {
    let Shape { memory_mib, huge_mib, args: more, append, load, newer, by_instructions } = shape;
    let huge = huge_mib / 2;
    let qemu = "qemu-system-x86_64";
    let (root, program, mut args) = if *newer {
        newer_beside(&folder.join("root"), qemu, news)?
    } else {
        let (program, args) = program(Version::Host, qemu, Vec::new(), news)?;
        ("/".into(), program, args)
    };
    let mut add = |line: String| args.extend(line.split_whitespace().map(OsString::from));
    // Room for a second one has TCG keep the guest's barriers: without them L1 misses now and then that a queue of virtio wants a kick, and its network
    // stands still (docs/measurements/tcg-barrier.md).
    let cpus = match accelerator {
        Accelerator::Kvm => "2",
        Accelerator::Tcg { .. } if *by_instructions => "1",
        Accelerator::Tcg { .. } => "1,maxcpus=2",
    };
    let (machine, kvm) = match accelerator {
        Accelerator::Kvm => ("-accel kvm -cpu host", "kvm-amd,kvm-intel"),
        Accelerator::Tcg { .. } if *by_instructions => {
            ("-accel tcg,thread=single -icount shift=1,sleep=off -cpu max,+svm,-cx16", "kvm-amd")
        }
        Accelerator::Tcg { .. } => ("-accel tcg,thread=multi -cpu max,+svm,-cx16", "kvm-amd"),
    };
    add(format!(
        "-nodefaults -no-user-config -no-reboot -display none -smp {cpus} -m {memory_mib} {machine}"
    ));
    add("-machine q35,kernel-irqchip=split".into());
    // An IOMMU has to come before what sits behind it.
    add((*more).into());
    let path = folder.display();
    add(format!("-chardev file,id=console,path={path}/console.log -serial chardev:console"));
    let root = root.display();
    add(format!("-fsdev local,id=host,path={root},security_model=none,readonly=on,multidevs=remap"));
    add("-device virtio-9p-pci,fsdev=host,mount_tag=host".into());
    add(format!("-fsdev local,id=folder,path={path},security_model=none"));
    add("-device virtio-9p-pci,fsdev=folder,mount_tag=folder".into());
    let modules = host.modules.display();
    // The assets, and where programs were built, may lie below a folder that L1 has of its own, such as /tmp.
    let (own, ioplane) = (std::env::current_exe()?, crate::daemon::binary()?);
    let built = own.ancestors().nth(2).into_iter().chain(ioplane.parent());
    let mut see: Vec<String> = built.map(|place| place.display().to_string()).collect();
    see.push(modules.to_string());
    see.sort();
    see.dedup();
    let see = see.join(",");
    // A tick that comes again and again: one that is set for once each time is lost now and then under a translated
    // guest of L1 that never halts, and L1 stands still for ever.
    let line = format!(
        "console=ttyS0 quiet panic=-1 nokaslr mitigations=off audit=0 apparmor=0 tsc=reliable no_timer_check nohz=off highres=off \
         cryptomgr.notests initcall_blacklist=jent_mod_init,load_system_certificate_list \
         hugepages={huge} l1.folder={path} l1.modules={modules} l1.see={see} l1.load={kvm}{load} {append}"
    );
    for (flag, value) in [
        ("-kernel", host.kernel.clone().into()),
        ("-initrd", host.initrd.clone().into()),
        ("-append", line.into()),
    ] {
        args.extend([flag.into(), value]);
    }
    Ok((program, args))
}
