//! An L1 with virtual functions of an 82599, which no QEMU emulates: the model of the silicon, served by `silicon` of the test kit to L1's QEMU, is the
//! hardware. It has no physical function in L1, as in a VM that was handed virtual functions by its host.
//!
//! ```text
//!   this machine:  silicon -- a port with two functions --TAP--.
//!                     | vfio-user                              |-- a bridge that learns: 10.0.20.1/24
//!   L1:            functions 0000:00:1a.0 and 0000:00:1b.0     |
//!                  up0, an interface of its own ----------TAP--'
//! ```

use crate::assets::News;
use crate::igb::{GUEST_IP, PEER_IP};
use crate::inner::Inner;
use crate::l1::{L1, Shape};
use crate::process::{Process, scratch, tail};
use crate::sides::Side;
use crate::traffic::Traffic;
use crate::uplink::{Host, UPLINK};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::ffi::OsString;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MINUTE: Duration = Duration::from_secs(60);
/// Where the functions are in L1.
pub const FUNCTIONS: [&str; 2] = ["0000:00:1a.0", "0000:00:1b.0"];
/// The address that the port's administrator has set for the first one. The second one's guest chooses.
pub const MAC: &str = "52:54:00:00:99:01";
const UPLINK_MAC: &str = "52:54:00:00:99:10";
const UPLINK_IP: &str = "10.0.20.3";

/// What the port tells of a function.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Reading {
    /// Rules of the silicon that were broken.
    pub violations: Vec<String>,
    /// Register accesses.
    pub accesses: u64,
    /// Messages that its physical function has taken.
    pub messages: u64,
    /// Frames that it has taken in.
    pub received: u64,
    /// Frames that it has sent.
    pub sent: u64,
    /// Those of them that the cable did not take.
    pub unsent: u64,
}

/// The port, its cable and the L1 that has its functions.
#[derive(Debug)]
pub struct Silicon {
    /// The machine.
    pub l1: L1,
    network: Host,
    ends: [String; 2],
    process: Process,
    folder: TempDir,
}

/// The program of the test kit; cargo builds it with that crate's tests.
fn program() -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let mut places = test.ancestors().skip(1).take(2).map(|folder| folder.join("silicon"));
    let found = places.find(|path| path.is_file());
    found.context("no silicon; build it: cargo build -p ioplane-testkit --bins")
}

fn socket(folder: &Path, number: usize) -> String {
    folder.join(format!("vf{number}.sock")).display().to_string()
}

impl Silicon {
    /// Starts the port and boots an L1 with both functions, behind an IOMMU that passes them through until VFIO has them. They have no driver.
    pub fn boot(memory_mib: u64, news: News<'_>) -> Result<Silicon> {
        let folder = scratch("silicon")?;
        let own = std::process::id() % 100_000;
        let [cable, uplink] = ["c", "u"].map(|end| format!("is{end}{own}"));
        let sockets = [0, 1].map(|number| socket(folder.path(), number));
        let report = folder.path().join("report");
        let words = [
            cable.clone(),
            report.display().to_string(),
            format!("{}={MAC}", sockets[0]),
            sockets[1].clone(),
        ];
        let log = folder.path().join("log");
        let process = Process::start(&program()?.to_string_lossy(), &words.map(OsString::from), &log)?;
        let end = Instant::now() + MINUTE;
        while !tail(&log, 1).contains("serving") {
            ensure!(Instant::now() < end, "the port does not serve: {}", process.said());
            std::thread::sleep(Duration::from_millis(10));
        }
        let device = |number: usize| {
            let (slot, path) = (0x1a + number, &sockets[number]);
            format!(
                r#" -device {{"driver":"vfio-user-pci","addr":"{slot:x}","socket":{{"type":"unix","path":"{path}"}}}}"#
            )
        };
        // Memory that the port shares.
        let args = format!(
            "-device intel-iommu,intremap=on,caching-mode=on -object memory-backend-memfd,id=ram,size={memory_mib}M,share=on \
             -machine memory-backend=ram -netdev tap,ifname={uplink},script=no,downscript=no,id=up \
             -device virtio-net-pci,netdev=up,mac={UPLINK_MAC},romfile={}{}",
            device(0),
            device(1)
        );
        let l1 = L1::boot_as(
            &Shape {
                memory_mib,
                huge_mib: memory_mib * 3 / 8,
                args: &args,
                append: "intel_iommu=on iommu=pt modprobe.blacklist=ixgbevf",
                load: ",vfio-pci,vfio_iommu_type1,virtio_net",
                newer: true,
                by_instructions: false,
            },
            news,
        )
        .with_context(|| format!("the port said {}", tail(&log, 20)))?;
        let network = Host::behind_a_bridge(&[&cable, &uplink])?;
        network.ip(&format!("addr add {PEER_IP}/24 dev bridge"))?;
        l1.raise_own(UPLINK_MAC, UPLINK, UPLINK_IP)?;
        Ok(Silicon { l1, network, ends: [cable, uplink], process, folder })
    }

    /// Two daemons in L1, each with one of the functions in this mode.
    pub fn sides(&self, mode: &'static str) -> Result<[Side<'_>; 2]> {
        let [one, other] = FUNCTIONS.map(|function| vec![function.to_owned()]);
        let side = |name, functions| Side::of(&self.l1, [name, UPLINK], functions, mode, None);
        Ok([side("here", one)?, side("there", other)?])
    }

    /// What the port tells of both functions.
    pub fn read(&self) -> Result<Vec<Reading>> {
        let mut said = String::new();
        let mut stream = UnixStream::connect(self.folder.path().join("report"))?;
        stream.set_read_timeout(Some(MINUTE))?;
        stream.read_to_string(&mut said)?;
        serde_json::from_str(&said).with_context(|| said.clone())
    }

    /// An error if a rule of the silicon was broken.
    pub fn is_unbroken(&self) -> Result<Vec<Reading>> {
        let read = self.read()?;
        ensure!(read.iter().all(|reading| reading.violations.is_empty()), "{read:#x?}");
        Ok(read)
    }

    /// Traffic of the peer, which is this machine, with whoever has [`GUEST_IP`].
    pub fn traffic(&self, rate: u32, bytes: u32) -> Result<Traffic<'static>> {
        Traffic::start_at(&self.network.place(), GUEST_IP, rate, bytes)
    }

    /// The network takes frames of 9,000 bytes from here on.
    pub fn long_frames(&self) -> Result<()> {
        let [cable, uplink] = &self.ends;
        for interface in [cable, uplink, "bridge"] {
            self.network.ip(&format!("link set dev {interface} mtu 9000"))?;
        }
        Ok(())
    }

    /// What both ends have to say when something has gone wrong.
    pub fn said(&self, daemons: &[&Inner<'_>]) -> String {
        let daemons: Vec<String> = daemons.iter().map(|daemon| daemon.said()).collect();
        let kernel = self.l1.run("dmesg | tail -n 20", MINUTE).unwrap_or_default();
        format!(
            "{:#x?}\n{}\nioplane said:\n{}\nL1:\n{kernel}",
            self.read(),
            self.process.said(),
            daemons.join("\n")
        )
    }
}

/// What the guest's kernel and interface say that would differ if its driver had noticed.
pub const NOTICED: &str = "cd /sys/bus/pci/drivers/ixgbevf/*/net/*; cat carrier_changes statistics/tx_errors statistics/tx_dropped statistics/rx_errors; \
     dmesg | grep -ciE 'ixgbevf.*(reset|hang|link is|not cleared|not brought back|refuse)|NETDEV WATCHDOG|transmit queue|DMAR|AER:|irq .*nobody'; true";
