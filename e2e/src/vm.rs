//! A running guest.

use crate::agent::Agent;
use crate::assets::News;
use crate::process::{Process, tail};
use crate::protocol::Hello;
use crate::qmp::Qmp;
use crate::version::Version;
use anyhow::{Context, Result, anyhow};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long QEMU may take until it has its sockets, and until it answers there (a vhost-user disk is connected between).
const START: Duration = Duration::from_secs(60);
/// How long a guest may take to release a device.
const RELEASE: Duration = Duration::from_secs(60);

/// The monitor that is left to programs which are tested: one serves one client at a time.
pub(crate) const MONITOR: &str = "monitor";

/// What the guest prints on its way up, and what that means.
const STAGES: [(&str, &str); 5] = [
    ("SeaBIOS", "firmware runs"),
    ("BdsDxe", "firmware starts the disk"),
    ("ioplane-grub:", "GRUB loads the kernel"),
    ("ioplane-initrd: root on", "kernel runs, root disk found"),
    ("ioplane-load: listening", "load program runs"),
];

/// A QEMU with a guest in it. Dropping it kills QEMU and removes its folder.
#[derive(Debug)]
pub struct Vm {
    name: String,
    version: Version,
    // The order matters: the process ends before its folder goes.
    process: Process,
    qmp: Qmp,
    agent: Arc<Agent>,
    slots: Vec<Option<String>>,
    started: Instant,
    /// What the guest said when it was up.
    pub hello: Option<Hello>,
    /// From QEMU's start to the guest's first answer.
    pub boot_time: Duration,
    folder: TempDir,
}

impl Vm {
    pub(crate) fn attach(
        name: String,
        version: Version,
        folder: TempDir,
        mut process: Process,
        slots: u32,
        incoming: bool,
    ) -> Result<Vm> {
        let started = Instant::now();
        let connect = if incoming { Agent::hold } else { Agent::connect };
        let agent = Arc::new(wait_for(&mut process, || connect(&folder.path().join("agent")))?);
        let qmp = wait_for(&mut process, || Qmp::connect(&folder.path().join("qmp")))?;
        let slots = vec![None; slots as usize];
        let boot_time = Duration::ZERO;
        Ok(Vm { name, version, process, qmp, agent, slots, started, hello: None, boot_time, folder })
    }

    /// Waits until the load program answers; the error has the tail of the console.
    pub fn wait_up(&mut self, limit: Duration, news: News<'_>) -> Result<&Hello> {
        let (name, started, console) = (&self.name, self.started, self.console_path());
        let (process, agent) = (&mut self.process, &self.agent);
        let mut told = 0;
        let hello = agent.hello(limit.saturating_sub(started.elapsed()), || {
            let console = String::from_utf8_lossy(&std::fs::read(&console).unwrap_or_default()).into_owned();
            for (at, (mark, stage)) in STAGES.iter().enumerate().skip(told) {
                if console.contains(mark) {
                    told = at + 1;
                    news(&format!("{name}: {stage} ({:.1} s)", started.elapsed().as_secs_f64()));
                }
            }
            process.still_runs()
        });
        let hello = hello.map_err(|error| self.explain(error))?;
        self.boot_time = self.started.elapsed();
        news(&format!(
            "{}: up after {:.1} s, Linux {}",
            self.name,
            self.boot_time.as_secs_f64(),
            hello.kernel
        ));
        Ok(self.hello.insert(hello))
    }

    /// The guest's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The load program in the guest.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The same to keep: for loads that run while disks are plugged.
    pub fn share_agent(&self) -> Arc<Agent> {
        Arc::clone(&self.agent)
    }

    /// Which QEMU runs it.
    pub fn version(&self) -> Version {
        self.version
    }

    /// QEMU's machine protocol.
    pub fn qmp(&mut self) -> &mut Qmp {
        &mut self.qmp
    }

    /// Another monitor, for programs that are tested.
    pub fn monitor(&self) -> PathBuf {
        self.folder.path().join(MONITOR)
    }

    /// QEMU's process number.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// The guest's folder: `console.log`, `qemu.log`, sockets. Gone with the value.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Everything the guest has printed.
    pub fn console(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.console_path()).unwrap_or_default()).into_owned()
    }

    /// Adds QEMU's messages and the tail of the console to an error.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let (said, console) = (self.process.said(), tail(&self.console_path(), 25));
        anyhow!(
            "{error:#}\n--- QEMU of {} ---\n{said}\n--- console of {} ---\n{console}",
            self.name,
            self.name
        )
    }

    /// Hot-plugs what `args` describe (`-chardev ... -device ...,id=ID`) into a free slot.
    pub fn plug(&mut self, args: &str) -> Result<()> {
        let id = args
            .split_once("-device")
            .and_then(|(_, device)| device.split([',', ' ']).find_map(|part| part.strip_prefix("id=")));
        let id = id.with_context(|| format!("{args:?} has no -device with an id"))?.to_string();
        let free =
            self.slots.iter().position(Option::is_none).context("no free slot; ask for more with slots()")?;
        self.qmp.plug(args, &format!("slot{}", free + 1))?;
        self.slots[free] = Some(id);
        Ok(())
    }

    /// Hot-plugs a vhost-user-blk disk behind `socket`.
    pub fn plug_vhost_user(&mut self, socket: &Path, id: &str, queues: u32) -> Result<()> {
        self.plug(&self.version.vhost_user(socket, id, queues)?)
    }

    /// Unplugs a device and waits until the guest has released it. Its chardev, if it is named `chardev-ID` or `ID-socket`,
    /// goes too.
    pub fn unplug(&mut self, id: &str) -> Result<()> {
        self.qmp.unplug(id, RELEASE).map_err(|error| self.explain(error))?;
        for slot in self.slots.iter_mut().filter(|slot| slot.as_deref() == Some(id)) {
            *slot = None;
        }
        let all = self.qmp.execute("query-chardev", serde_json::json!({}))?;
        for chardev in [format!("chardev-{id}"), format!("{id}-socket")] {
            if all.as_array().is_some_and(|all| all.iter().any(|c| c["label"] == chardev.as_str())) {
                self.qmp.execute("chardev-remove", serde_json::json!({ "id": chardev }))?;
            }
        }
        Ok(())
    }

    /// Switches the guest off from inside and waits for QEMU to end well.
    pub fn poweroff(mut self) -> Result<()> {
        self.agent.poweroff().map_err(|error| self.explain(error))?;
        let status = self.wait_exit(Duration::from_secs(30))?;
        if !status.success() {
            return Err(self.explain(anyhow!("QEMU ended with {status}")));
        }
        Ok(())
    }

    /// Waits for QEMU to end.
    pub fn wait_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.process.wait(limit).map_err(|error| self.explain(error))
    }

    /// Kills QEMU with signal 9: a power cut.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    pub fn signal(&self, signal: rustix::process::Signal) -> Result<()> {
        self.process.signal(signal)
    }

    /// The guest's name is that of the QEMU it is in; what it was told and answered goes with it.
    pub(crate) fn agent_of(&mut self, agent: Arc<Agent>, hello: Option<Hello>) {
        (self.agent, self.hello) = (agent, hello);
    }

    fn console_path(&self) -> PathBuf {
        self.folder.path().join("console.log")
    }
}

fn wait_for<T>(process: &mut Process, attempt: impl Fn() -> Result<T>) -> Result<T> {
    let end = Instant::now() + START;
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() >= end => return Err(error.context(process.said())),
            Err(_) => {}
        }
        process.still_runs()?;
        std::thread::sleep(Duration::from_millis(10));
    }
}
