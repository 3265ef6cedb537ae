//! The arguments that give a disk to a QEMU.

use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::report::DiskReport;
use crate::size::Size;

/// Major and minor number of a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl Version {
    /// From `7.2`, `11.1.3`, or all of what `--version` prints.
    pub fn of(text: &str) -> Option<Version> {
        let word = text.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
        let mut numbers = word.split('.').map(|part| part.parse::<u32>().ok());
        Some(Version(numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }

    /// Asks a QEMU.
    pub fn ask(program: &str) -> Result<Version> {
        let output = Command::new(program)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("run {program} --version: install it, or say --qemu-version 7.2"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version = text.lines().next().and_then(|line| line.split("version").nth(1)).and_then(Version::of);
        version.with_context(|| format!("{program} --version does not tell: say --qemu-version 7.2"))
    }

    /// `reconnect-ms` came with 9.2; `reconnect` (seconds) went with 11.
    fn reconnect(self) -> &'static str {
        if self >= Version(9, 2) { "reconnect-ms=100" } else { "reconnect=1" }
    }
}

/// A value inside an option: QEMU reads two commas as one.
fn value(text: &str) -> String {
    text.replace(',', ",,")
}

/// The arguments for one disk; with `memory`, those for the guest's memory before them.
pub fn args(
    disk: &DiskReport,
    memory: Option<Size>,
    version: Version,
    bootindex: Option<u32>,
) -> Vec<String> {
    let mut args = Vec::new();
    if let Some(Size(bytes)) = memory {
        let size =
            if bytes.is_multiple_of(1 << 20) { format!("{}M", bytes >> 20) } else { bytes.to_string() };
        args.extend([
            "-object".to_owned(),
            format!("memory-backend-memfd,id=ioplane-memory,size={size},share=on"),
            "-machine".to_owned(),
            "memory-backend=ioplane-memory".to_owned(),
        ]);
    }
    let id = format!("ioplane-{}", disk.name);
    // The size is said always: what QEMU takes without being told has changed with its versions (128, 1024).
    let mut device = format!(
        "vhost-user-blk-pci,chardev={id}-socket,id={id},num-queues={},queue-size={}",
        disk.queues.len(),
        disk.queue_size
    );
    if let Some(index) = bootindex {
        device.push_str(&format!(",bootindex={index}"));
    }
    let path = value(&disk.socket.display().to_string());
    let chardev = format!("socket,id={id}-socket,path={path},{}", version.reconnect());
    args.extend(["-chardev".to_owned(), chardev, "-device".to_owned(), device]);
    args
}

/// One line for a shell.
pub fn line(args: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    let quote = |arg: &String| {
        if arg.chars().all(plain) { arg.clone() } else { format!("'{}'", arg.replace('\'', r"'\''")) }
    };
    args.iter().map(quote).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_decide() {
        assert_eq!(Version::of("7.2"), Some(Version(7, 2)));
        assert_eq!(Version::of(" 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)"), Some(Version(11, 1)));
        assert_eq!(Version::of("10"), Some(Version(10, 0)));
        assert_eq!(Version::of("new"), None);
        assert_eq!(Version(9, 1).reconnect(), "reconnect=1");
        assert_eq!(Version(9, 2).reconnect(), "reconnect-ms=100");
    }

    #[test]
    fn a_line_can_be_pasted() {
        let args = ["-chardev".to_owned(), "socket,path=/a b/it's,,x".to_owned()];
        assert_eq!(line(&args), r"-chardev 'socket,path=/a b/it'\''s,,x'");
    }
}
