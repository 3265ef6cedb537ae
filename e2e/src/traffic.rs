//! Traffic of the other end of the cable with a guest: `ioplane-stream drive` in L1.

use crate::l1::{Job, L1};
use crate::process::built;
use crate::streams::Driven;
use crate::travel::PORT;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const END: &str = "/tmp/traffic.end";
/// Lines that are shown of a run that has gone wrong.
const LINES: usize = 12;

/// A run of it.
pub struct Traffic<'a> {
    l1: &'a L1,
    job: Job<'a>,
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
        Ok(Traffic { l1, job })
    }

    /// Echoes so far.
    fn answered(&self) -> u64 {
        let said = self.job.output();
        let last = said.lines().rev().find_map(|line| line.strip_prefix("answered ")?.parse().ok());
        last.unwrap_or(0)
    }

    /// Waits until so many more echoes have come.
    pub fn goes_on(&self, more: u64) -> Result<()> {
        let (begun, end) = (self.answered(), Instant::now() + 3 * MINUTE);
        while self.answered() < begun + more {
            self.l1.still_runs()?;
            let said = self.job.output();
            let last: Vec<&str> = said.lines().rev().take(LINES).collect();
            ensure!(Instant::now() < end && !self.job.has_ended(), "no echoes come any more: {last:?}");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Ends it; what both ends have seen.
    pub fn end(self) -> Result<Driven> {
        self.l1.run(&format!("touch {END}"), MINUTE)?;
        let ended = self.job.wait(3 * MINUTE)?;
        let last = ended.output.lines().last().unwrap_or_default();
        let said: Vec<&str> = ended.output.lines().filter(|line| !line.starts_with("answered ")).collect();
        ensure!(ended.status == 0, "the traffic ended with {}: {}", ended.status, said.join("\n"));
        serde_json::from_str(last).with_context(|| format!("a report: {last}"))
    }
}
