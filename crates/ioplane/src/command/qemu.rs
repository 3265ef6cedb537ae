//! The arguments that give a disk or a NIC to a QEMU.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use crate::cli::Accel;
use crate::report::{DiskReport, NicReport};
use crate::size::Size;
use crate::spec::MTU;

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

/// The guest's memory: vhost-user needs it shared.
pub fn memory(Size(bytes): Size) -> Vec<String> {
    let size = if bytes.is_multiple_of(1 << 20) { format!("{}M", bytes >> 20) } else { bytes.to_string() };
    vec![
        "-object".to_owned(),
        format!("memory-backend-memfd,id=ioplane-memory,size={size},share=on"),
        "-machine".to_owned(),
        "memory-backend=ioplane-memory".to_owned(),
    ]
}

fn chardev(id: &str, socket: &Path, version: Version) -> [String; 2] {
    let path = value(&socket.display().to_string());
    ["-chardev".to_owned(), format!("socket,id={id}-socket,path={path},{}", version.reconnect())]
}

fn device(mut device: String, bootindex: Option<u32>) -> [String; 2] {
    if let Some(index) = bootindex {
        device.push_str(&format!(",bootindex={index}"));
    }
    ["-device".to_owned(), device]
}

/// The arguments for one disk behind one of its sockets.
pub fn disk(disk: &DiskReport, socket: &Path, version: Version, bootindex: Option<u32>) -> Vec<String> {
    let id = format!("ioplane-{}", disk.name);
    // The size is said always: what QEMU takes without being told has changed with its versions (128, 1024).
    let blk = format!(
        "vhost-user-blk-pci,chardev={id}-socket,id={id},num-queues={},queue-size={}",
        disk.queues.len(),
        disk.queue_size
    );
    [chardev(&id, socket, version), device(blk, bootindex)].concat()
}

/// The arguments for one NIC. Under TCG its interrupts are a wire instead of messages: a QEMU that emulates the processor
/// has no irqfd, and its vhost-user NIC looks for one when the guest unmasks a message (virtio_pci_one_vector_unmask),
/// which ends QEMU with a segmentation fault.
pub fn nic(nic: &NicReport, version: Version, accel: Accel, bootindex: Option<u32>) -> Vec<String> {
    let id = format!("ioplane-{}", nic.name);
    let pairs = nic.pairs;
    let mut netdev = format!("vhost-user,id={id}-netdev,chardev={id}-socket");
    let mut net = format!(
        "virtio-net-pci,netdev={id}-netdev,id={id},mac={},rx_queue_size={size},tx_queue_size={size}",
        nic.mac,
        size = nic.queue_size
    );
    if nic.mtu != MTU {
        net.push_str(&format!(",host_mtu={}", nic.mtu));
    }
    if pairs > 1 {
        netdev.push_str(&format!(",queues={pairs}"));
        net.push_str(",mq=on");
    }
    match (accel, pairs) {
        (Accel::Tcg, _) => net.push_str(",vectors=0"),
        (Accel::Kvm, 1) => {}
        // A vector for each queue, one for changes of the configuration, one for the control queue.
        (Accel::Kvm, _) => net.push_str(&format!(",vectors={}", 2 * pairs + 2)),
    }
    let netdev = ["-netdev".to_owned(), netdev];
    [chardev(&id, &nic.socket, version), netdev, device(net, bootindex)].concat()
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
