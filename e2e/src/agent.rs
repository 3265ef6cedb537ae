//! The host's side of the load program in a guest: calls, and loads that run meanwhile.

use crate::protocol::{
    Answer, Blockdev, Body, Command, CopyCheck, Hello, LoadSpec, Progress, Report, Request, StampProgress,
    StampSpec, Stamps, VERSION, Verified,
};
use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long short commands may take; long enough for a guest whose disk waits for a restarted daemon.
const SHORT: Duration = Duration::from_secs(60);

type Waiting = Arc<Mutex<Option<HashMap<u64, Sender<Body>>>>>;

/// A connection to the program in one guest, through whichever QEMU the guest is in. Cheap to share; usable from several
/// threads.
#[derive(Debug)]
pub struct Agent {
    out: Mutex<(UnixStream, u64)>,
    waiting: Waiting,
    /// Hears the guest until its QEMU has ended, and gives back the line that was begun.
    reader: Mutex<Option<JoinHandle<Vec<u8>>>>,
    /// The end of the QEMU is not the end of the guest.
    leaving: Arc<AtomicBool>,
}

/// A request under way: its answers.
#[derive(Debug)]
pub struct Call {
    answers: Receiver<Body>,
    what: String,
}

impl Agent {
    /// Connects to the socket behind the guest's port. The guest may come up later.
    pub fn connect(socket: &Path) -> Result<Agent> {
        let agent = Agent::hold(socket)?;
        agent.listen(Vec::new())?;
        Ok(agent)
    }

    /// Connects to a port whose guest is still elsewhere; what is said there is heard by [`Agent::go_on`].
    pub fn hold(socket: &Path) -> Result<Agent> {
        let stream =
            UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
        let waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        Ok(Agent { out: Mutex::new((stream, 1)), waiting, reader: Mutex::default(), leaving: Arc::default() })
    }

    fn listen(&self, begun: Vec<u8>) -> Result<()> {
        let stream = lock(&self.out).0.try_clone()?;
        let (waiting, leaving) = (Arc::clone(&self.waiting), Arc::clone(&self.leaving));
        let reader = std::thread::spawn(move || {
            let (mut reader, mut line) = (BufReader::new(stream), begun);
            while reader.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
                if line.ends_with(b"\n") {
                    // Firmware may have written to the port too: what is no answer is passed over.
                    if let Ok(answer) = serde_json::from_slice::<Answer>(&line) {
                        deliver(&waiting, answer);
                    }
                    line.clear();
                }
            }
            if !leaving.load(Ordering::Acquire) {
                // Whoever waits learns that nothing comes any more.
                *lock(&waiting) = None;
            }
            line
        });
        *lock(&self.reader) = Some(reader);
        Ok(())
    }

    /// The guest is about to leave its QEMU: that this one's socket closes ends nothing.
    pub fn leave(&self) {
        self.leaving.store(true, Ordering::Release);
    }

    /// The guest is in another QEMU, to whose port `there` is the connection; the one that it left has ended.
    pub fn go_on(&self, there: &Agent) -> Result<()> {
        let reader = lock(&self.reader).take().context("nobody listened to the guest")?;
        let begun = reader.join().map_err(|_| anyhow!("the listening thread died"))?;
        lock(&self.out).0 = lock(&there.out).0.try_clone()?;
        self.leaving.store(false, Ordering::Release);
        self.listen(begun)
    }

    /// Sends a command; its answers are read from the call.
    pub fn begin(&self, command: Command) -> Result<Call> {
        let what = format!("{command:?}");
        let (send, answers) = channel();
        let mut out = lock(&self.out);
        let id = out.1;
        out.1 += 1;
        let Some(waiting) = &mut *lock(&self.waiting) else {
            bail!("the guest's port is closed; is QEMU still there?")
        };
        waiting.insert(id, send);
        let mut line = serde_json::to_string(&Request { id, command })?;
        line.push('\n');
        out.0.write_all(line.as_bytes()).with_context(|| format!("send {what} to the guest"))?;
        Ok(Call { answers, what })
    }

    /// Sends a command and waits for its end.
    pub fn call<T: DeserializeOwned>(&self, command: Command, limit: Duration) -> Result<T> {
        let value = self.begin(command)?.end(limit, |_| {})?;
        serde_json::from_value(value).context("understand the guest's answer")
    }

    /// Waits for the program to answer, which it does once the guest is up; `meanwhile` is called some times a second and
    /// can end the waiting by an error. The question is asked again each second: OVMF of 2025 has a driver for the port and
    /// swallows what comes before Linux listens.
    pub fn hello(&self, limit: Duration, mut meanwhile: impl FnMut() -> Result<()>) -> Result<Hello> {
        let end = Instant::now() + limit;
        loop {
            let call = self.begin(Command::Hello)?;
            let again = end.min(Instant::now() + Duration::from_secs(1));
            loop {
                meanwhile()?;
                let part = again.saturating_duration_since(Instant::now()).min(Duration::from_millis(50));
                match call.answers.recv_timeout(part) {
                    Ok(Body::Ok(value)) => return known(serde_json::from_value(value)?),
                    Ok(Body::Error(reason)) => bail!("the guest does not say hello: {reason}"),
                    Ok(Body::Progress(_)) | Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => {
                        bail!("the guest's port was closed before it was up")
                    }
                }
                if Instant::now() >= again {
                    break;
                }
            }
            if Instant::now() >= end {
                bail!("the guest is not up within {limit:?}");
            }
        }
    }

    /// All disks of the guest.
    pub fn list(&self) -> Result<Vec<Blockdev>> {
        self.call(Command::List, SHORT)
    }

    /// One disk (`vdb`, `/dev/vdb`, `serial:data0`).
    pub fn blockdev(&self, device: &str) -> Result<Blockdev> {
        self.call(Command::Blockdev { device: device.into() }, SHORT)
    }

    /// Waits until a disk pleases `wanted`: after a resize, or until a plugged one is there.
    pub fn wait_blockdev(
        &self,
        device: &str,
        limit: Duration,
        wanted: impl Fn(&Blockdev) -> bool,
    ) -> Result<Blockdev> {
        let end = Instant::now() + limit;
        loop {
            match self.blockdev(device) {
                Ok(disk) if wanted(&disk) => return Ok(disk),
                last if Instant::now() >= end => {
                    bail!("{device} is not as awaited within {limit:?}; it is {last:?}");
                }
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Waits until no disk has the serial.
    pub fn wait_gone(&self, serial: &str, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        while self.list()?.iter().any(|disk| disk.serial == serial) {
            if Instant::now() >= end {
                bail!("the disk {serial} is still there after {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Interrupts raised by the disk's queues since the guest booted.
    pub fn interrupts(&self, device: &str) -> Result<u64> {
        let answer: Value = self.call(Command::Interrupts { device: device.into() }, SHORT)?;
        answer["interrupts"].as_u64().context("a number of interrupts")
    }

    /// Starts a verified load.
    pub fn load(&self, spec: LoadSpec) -> Result<RunningLoad<'_>> {
        let name = spec.load.clone();
        Ok(RunningLoad { agent: self, call: self.begin(Command::Load(spec))?, name })
    }

    /// Reads again all that an ended load knows.
    pub fn verify(&self, load: &str, limit: Duration) -> Result<Verified> {
        self.call(Command::Verify { load: load.into() }, limit)
    }

    /// Drops what the guest remembers of an ended load.
    pub fn forget(&self, load: &str) -> Result<()> {
        self.call(Command::Forget { load: load.into() }, SHORT).map(|_: Value| ())
    }

    /// Writes a pattern, syncs, reads back, compares digests.
    pub fn copy_check(&self, device: &str, offset: u64, bytes: u64, limit: Duration) -> Result<CopyCheck> {
        self.call(Command::CopyCheck { device: device.into(), offset, bytes, seed: 1 }, limit)
    }

    /// SHA-256 of a range.
    pub fn sha256(&self, device: &str, offset: u64, bytes: u64, limit: Duration) -> Result<String> {
        let answer: Value = self.call(Command::Sha256 { device: device.into(), offset, bytes }, limit)?;
        Ok(answer["sha256"].as_str().context("a digest")?.into())
    }

    /// Writes stamped blocks; `flushed` hears of each acknowledged flush as it comes, until the end or the cut.
    pub fn write_stamp(&self, spec: StampSpec, limit: Duration, mut flushed: impl FnMut(u64)) -> Result<()> {
        let call = self.begin(Command::WriteStamp(spec))?;
        call.end(limit, |news| {
            if let Ok(progress) = serde_json::from_value::<StampProgress>(news) {
                flushed(progress.flushed);
            }
        })?;
        Ok(())
    }

    /// Reads stamped blocks back.
    pub fn read_stamp(&self, spec: StampSpec) -> Result<Stamps> {
        self.call(Command::ReadStamp(spec), SHORT)
    }

    /// Kernel log lines of I/O errors, stuck tasks, kernel bugs.
    pub fn dmesg_errors(&self) -> Result<Vec<String>> {
        self.call(Command::DmesgErrors, SHORT)
    }

    /// Asks the guest to switch off; [`crate::Vm::wait_exit`] sees it end.
    pub fn poweroff(&self) -> Result<()> {
        self.call(Command::Poweroff, SHORT).map(|_: Value| ())
    }
}

impl Call {
    /// Waits for the end of the request; `news` gets its progress lines meanwhile.
    pub fn end(&self, limit: Duration, mut news: impl FnMut(Value)) -> Result<Value> {
        let end = Instant::now() + limit;
        loop {
            match self.next(end)? {
                Body::Ok(value) => return Ok(value),
                Body::Error(reason) => bail!("the guest could not {}: {reason}", self.what),
                Body::Progress(value) => news(value),
            }
        }
    }

    fn next(&self, end: Instant) -> Result<Body> {
        let left = end.saturating_duration_since(Instant::now());
        self.answers.recv_timeout(left).map_err(|error| match error {
            RecvTimeoutError::Timeout => anyhow!("the guest does not answer {} in time", self.what),
            RecvTimeoutError::Disconnected => anyhow!("the guest's port was closed during {}", self.what),
        })
    }
}

/// A load that runs in a guest. Dropping it does not stop it.
#[derive(Debug)]
pub struct RunningLoad<'a> {
    agent: &'a Agent,
    call: Call,
    name: String,
}

impl RunningLoad<'_> {
    /// The name by which the guest knows it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The next line of progress; the guest sends one a second.
    pub fn progress(&self, limit: Duration) -> Result<Progress> {
        match self.call.next(Instant::now() + limit)? {
            Body::Progress(value) => Ok(serde_json::from_value(value)?),
            Body::Ok(_) => bail!("load {} has ended by itself", self.name),
            Body::Error(reason) => bail!("load {} failed: {reason}", self.name),
        }
    }

    /// What it did since the last mark, or since its start.
    pub fn mark(&self) -> Result<Report> {
        self.agent.call(Command::Mark { load: self.name.clone() }, SHORT)
    }

    /// Asks it to end and waits for the report of the whole.
    pub fn stop(self, limit: Duration) -> Result<Report> {
        self.agent.call(Command::Stop { load: self.name.clone() }, SHORT).map(|_: Value| ())?;
        self.wait(limit, |_| {})
    }

    /// Waits until it ends by itself; `news` gets its progress.
    pub fn wait(self, limit: Duration, mut news: impl FnMut(Progress)) -> Result<Report> {
        let value = self.call.end(limit, |value| {
            if let Ok(progress) = serde_json::from_value(value) {
                news(progress);
            }
        })?;
        Ok(serde_json::from_value(value)?)
    }
}

fn known(hello: Hello) -> Result<Hello> {
    if hello.version != VERSION {
        bail!("the guest speaks version {}, this test {VERSION}; rebuild guest/load", hello.version);
    }
    Ok(hello)
}

fn deliver(waiting: &Waiting, answer: Answer) {
    let mut waiting = lock(waiting);
    let Some(waiting) = &mut *waiting else { return };
    let last = !matches!(answer.body, Body::Progress(_));
    if let Some(sender) = waiting.get(&answer.id) {
        let _ = sender.send(answer.body);
    }
    if last {
        waiting.remove(&answer.id);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
