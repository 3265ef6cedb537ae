//! Traffic of the other end of the cable with a guest: `ioplane-stream drive`, in L1 or on this machine.

use crate::l1::{Job, L1};
use crate::place::HostPlace;
use crate::process::{Process, built, scratch};
use crate::streams::Driven;
use crate::travel::PORT;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const END: &str = "/tmp/traffic.end";
/// Lines that are shown of a run that has gone wrong.
const LINES: usize = 12;

/// A run of it.
pub struct Traffic<'a>(Run<'a>);

enum Run<'a> {
    Inside { l1: &'a L1, job: Job<'a> },
    Here(Mutex<Process>, tempfile::TempDir),
}

impl<'a> Traffic<'a> {
    /// With the guest at that address: datagrams a second, as far as the stage is fast enough, and bytes of TCP a second each way.
    pub fn start(l1: &'a L1, guest_ip: &str, rate: u32, bytes: u32) -> Result<Self> {
        let program = built("ioplane-stream")?;
        let job = l1.start(&format!(
            "echo 8388608 >/proc/sys/net/core/rmem_max; echo 8388608 >/proc/sys/net/core/rmem_default; rm -f {END}
             exec {} drive {guest_ip}:{PORT} {rate} {bytes} {END}",
            program.display()
        ))?;
        Ok(Traffic(Run::Inside { l1, job }))
    }

    /// The same from this machine, whose clock is right.
    pub fn start_at(place: &HostPlace, guest_ip: &str, rate: u32, bytes: u32) -> Result<Traffic<'static>> {
        let folder = scratch("traffic")?;
        let words = ["drive".into(), format!("{guest_ip}:{PORT}"), rate.to_string(), bytes.to_string()];
        let mut words: Vec<OsString> = words.map(OsString::from).into();
        words.push(folder.path().join("end").into());
        let process = place.start(built("ioplane-stream")?, &words, &log(&folder))?;
        Ok(Traffic(Run::Here(Mutex::new(process), folder)))
    }

    fn output(&self) -> String {
        match &self.0 {
            Run::Inside { job, .. } => job.output(),
            Run::Here(_, folder) => std::fs::read_to_string(log(folder)).unwrap_or_default(),
        }
    }

    /// An error if it has ended.
    fn goes(&self) -> Result<()> {
        match &self.0 {
            Run::Inside { l1, job } => {
                l1.still_runs()?;
                ensure!(!job.has_ended(), "it has ended");
                Ok(())
            }
            Run::Here(process, _) => locked(process).still_runs(),
        }
    }

    /// Echoes so far.
    fn answered(&self) -> u64 {
        let said = self.output();
        let last = said.lines().rev().find_map(|line| line.strip_prefix("answered ")?.parse().ok());
        last.unwrap_or(0)
    }

    /// Waits until so many more echoes have come.
    pub fn goes_on(&self, more: u64) -> Result<()> {
        let (begun, end) = (self.answered(), Instant::now() + 3 * MINUTE);
        while self.answered() < begun + more {
            let said = self.output();
            let last: Vec<&str> = said.lines().rev().take(LINES).collect();
            self.goes().with_context(|| format!("no echoes come any more: {last:?}"))?;
            ensure!(Instant::now() < end, "no echoes come any more: {last:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Ends it; what both ends have seen.
    pub fn end(self) -> Result<Driven> {
        let ended = match &self.0 {
            Run::Inside { l1, job } => {
                l1.run(&format!("touch {END}"), MINUTE)?;
                job.wait(3 * MINUTE)?.status
            }
            Run::Here(process, folder) => {
                std::fs::write(folder.path().join("end"), "")?;
                locked(process).wait(12 * MINUTE)?.code().unwrap_or(-1)
            }
        };
        let output = self.output();
        let last = output.lines().last().unwrap_or_default();
        let said: Vec<&str> = output.lines().filter(|line| !line.starts_with("answered ")).collect();
        ensure!(ended == 0, "the traffic ended with {ended}: {}", said.join("\n"));
        serde_json::from_str(last).with_context(|| format!("a report: {last}"))
    }
}

fn log(folder: &tempfile::TempDir) -> PathBuf {
    folder.path().join("log")
}

fn locked(process: &Mutex<Process>) -> std::sync::MutexGuard<'_, Process> {
    process.lock().unwrap_or_else(PoisonError::into_inner)
}
