//! The guest's kernel: who it is, what it complains of, and switching off.

use crate::protocol::{Hello, VERSION};
use anyhow::{Context, Result, bail};
use rustix::fs::OFlags;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

const MOST_LINES: usize = 100;

/// Parts of kernel messages that no test may cause unawares.
const BAD: [&str; 16] = [
    "I/O error",
    "critical ",
    "blocked for more than",
    "hung_task",
    "soft lockup",
    "hard LOCKUP",
    "rcu_sched",
    "rcu_preempt",
    "BUG:",
    "Oops",
    "Call Trace",
    "EXT4-fs error",
    "EXT4-fs warning",
    "JBD2: ",
    "lost async page write",
    "Buffer I/O",
];

/// Who this guest is.
pub fn hello() -> Result<Hello> {
    let text =
        |path: &str| fs::read_to_string(path).with_context(|| format!("read {path}; is /proc mounted?"));
    let uptime = text("/proc/uptime")?;
    Ok(Hello {
        version: VERSION,
        kernel: text("/proc/sys/kernel/osrelease")?.trim().into(),
        uptime: uptime
            .split_whitespace()
            .next()
            .and_then(|w| w.parse().ok())
            .context("parse /proc/uptime")?,
        cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
        firmware: if Path::new("/sys/firmware/efi").exists() { "efi" } else { "bios" }.into(),
        cmdline: text("/proc/cmdline")?.trim().into(),
    })
}

/// Kernel log lines that tell of I/O errors, stuck tasks or kernel bugs; at most 100.
pub fn errors() -> Result<Vec<String>> {
    let mut log = OpenOptions::new()
        .read(true)
        .custom_flags(OFlags::NONBLOCK.bits() as i32)
        .open("/dev/kmsg")
        .context("open /dev/kmsg")?;
    let mut found = Vec::new();
    let mut record = [0; 8192];
    while found.len() < MOST_LINES {
        match log.read(&mut record) {
            Ok(0) => break,
            Ok(length) => found.extend(bad(&String::from_utf8_lossy(&record[..length]))),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // The record was overwritten while it was read: the next read finds the oldest that is left.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error).context("read /dev/kmsg"),
        }
    }
    Ok(found)
}

/// A record of `/dev/kmsg` (`priority,sequence,time,flags;text`), if it tells of something bad.
fn bad(record: &str) -> Option<String> {
    let line = record.lines().next()?;
    let (head, text) = line.split_once(';')?;
    let priority: u32 = head.split(',').next()?.parse().ok()?;
    // Facility 0 is the kernel; level 0 to 2 is emergency, alert, critical.
    let kernel = priority >> 3 == 0;
    (kernel && (priority & 7 <= 2 || BAD.iter().any(|part| text.contains(part)))).then(|| text.to_string())
}

/// Makes what was written durable and the root file system clean, before [`poweroff`].
pub fn settle() {
    rustix::fs::sync();
    // Emergency remount read-only, which the kernel does in a worker; give it a moment.
    if fs::write("/proc/sysrq-trigger", "u").is_ok() {
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Switches the machine off; returns only if it cannot.
pub fn poweroff() -> Result<()> {
    rustix::system::reboot(rustix::system::RebootCommand::PowerOff).context("switch off")?;
    bail!("the machine did not switch off")
}

#[cfg(test)]
mod tests {
    use super::bad;

    #[test]
    fn tells_bad_lines_from_others() {
        let error = "3,512,99;I/O error, dev vdb, sector 8 op 0x1:(WRITE)\n SUBSYSTEM=block\n";
        assert!(bad(error).is_some_and(|line| line.starts_with("I/O error")));
        assert!(bad("6,1,0,-;Linux version 6.12").is_none());
        assert!(bad("0,1,0,-;Kernel panic").is_some());
        assert!(bad("12,1,0,-;init: I/O error").is_none(), "user space");
        assert!(bad("nonsense").is_none());
    }
}
