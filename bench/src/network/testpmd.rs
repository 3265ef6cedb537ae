//! DPDK's testpmd: `io` forwarding between two vhost ports on one processor, without hugepages and without PCI.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use super::backend::{Backend, socket};
use super::frame::Size;
use super::nic::Shape;
use crate::served::{Place, Served};

pub struct Testpmd;

impl Testpmd {
    /// Bytes of an mbuf: a whole small frame, or half a large one (vhost fills a chain of them). Of 2176, 4224, 8320, 16512,
    /// 33024 and 65535 bytes what was fastest here.
    fn mbuf(size: Size) -> u32 {
        if size == Size::Large { 33_024 } else { 2176 }
    }

    /// How many of them: the fewest with which it runs are the fastest, for they stay in the cache.
    fn mbufs(pairs: u16) -> u32 {
        if pairs > 1 { 8192 } else { 2048 }
    }

    fn vdev(index: usize, socket: &Path, shape: Shape) -> String {
        // Without these its vhost ports know no offloads, and the receiver of a large frame would not be told to segment it.
        let offloads = if shape.size == Size::Large { ",tso=1,legacy-ol-flags=1" } else { "" };
        format!("net_vhost{index},iface={},queues={}{offloads}", socket.display(), shape.pairs)
    }
}

impl Backend for Testpmd {
    fn name(&self) -> &'static str {
        "testpmd"
    }

    fn start(&self, nics: usize, shape: Shape, folder: &Path, place: &Place) -> Result<Served> {
        let cpu = place.cpus.back;
        let pairs = shape.pairs;
        let path = std::env::var_os("PATH").unwrap_or_default();
        let known = std::env::split_paths(&path).any(|folder| folder.join("dpdk-testpmd").exists());
        ensure!(
            known,
            "dpdk-testpmd is not installed: 'script/bootstrap --bench' installs it (package dpdk-dev)"
        );
        let mut command = Command::new("dpdk-testpmd");
        // The main thread sleeps; the second one forwards. Both on the one processor.
        command.arg("--lcores").arg(format!("0@{cpu},1@{cpu}"));
        command.args(["--no-huge", "-m", "512", "--no-pci", "--no-telemetry"]);
        // Its runtime folder is named after this: another testpmd on the machine must not meet it there.
        command.arg(format!("--file-prefix=ioplane-bench-{}", std::process::id()));
        for index in 0..nics {
            command.arg("--vdev").arg(Self::vdev(index, &socket(folder, index), shape));
        }
        command.args(["--", "--forward-mode=io", "--auto-start", "--nb-cores=1", "--stats-period=100000"]);
        command.arg(format!("--rxq={pairs}")).arg(format!("--txq={pairs}"));
        command.arg(format!("--mbuf-size={}", Self::mbuf(shape.size)));
        command.arg(format!("--total-num-mbufs={}", Self::mbufs(pairs)));
        place.spawn(&command, &folder.join("log"))
    }

    /// It stores the sum as DPDK's drivers want it, without the length, and does not put that back.
    fn keeps_checksum(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        format!("{}, io forwarding, one core, bursts of 32", version())
    }
}

/// Its version, as the package says.
fn version() -> String {
    let output = Command::new("dpkg-query").args(["-W", "-f", "${Version}", "dpdk-dev"]).output();
    let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    if text.is_empty() { "DPDK not installed (package dpdk-dev)".into() } else { format!("DPDK {text}") }
}
