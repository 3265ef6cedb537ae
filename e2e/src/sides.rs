//! Two hosts in one L1, each with a function of a card of its own, and traffic with a guest that goes from one to the other.
//!
//! ```text
//!   L1:  peer14 -- hub -- card A: virtual function <- daemon "here"  <- QEMU "first"
//!                    `--- card B: virtual function <- daemon "there" <- QEMU "second"
//! ```

use crate::igb::{GUEST_IP, VirtualFunctions};
use crate::inner::Inner;
use crate::l1::{Job, L1};
use crate::l2::L2;
use crate::process::built;
use crate::streams::Driven;
use crate::travel::{PORT, VM};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 256;
/// Datagrams a second, as far as the stage is fast enough, and bytes of TCP a second each way.
const RATE: u32 = 300;
const BYTES: u32 = 65536;
/// How the guest's machine has the function: behind a port, and interrupts go to two processors.
const MACHINE: &str = "-smp 2 -device pcie-root-port,id=behind,chassis=1";

/// A host: its daemon, and the function that is its `nic0`.
#[derive(Debug)]
pub struct Side<'a> {
    /// As it runs now.
    pub daemon: Inner<'a>,
    /// Of the daemon.
    pub name: &'static str,
    /// Address of the function.
    pub function: String,
    /// How it is added: `--mode`.
    pub mode: &'static str,
    /// Interface of the card.
    pub physical: &'static str,
}

impl<'a> Side<'a> {
    /// Both, on the two cards of an L1.
    pub fn both(l1: &'a L1, cards: Vec<VirtualFunctions>, mode: &'static str) -> Result<[Side<'a>; 2]> {
        let mut functions = cards.into_iter().flatten();
        let mut side = |name, physical| -> Result<Side<'a>> {
            let daemon = l1.serve(name, "")?;
            let function = functions.next().context("a function of each card")?;
            let side = Side { daemon, name, function, mode, physical };
            side.add()?;
            Ok(side)
        };
        Ok([side("here", "pf14")?, side("there", "pf15")?])
    }

    fn control(&self) -> String {
        format!("/tmp/{}/control.sock", self.name)
    }

    /// QEMU's arguments for the guest.
    pub fn args(&self) -> Result<String> {
        let args = self.daemon.args_on_bus("nic0", MEMORY, "behind")?;
        Ok(format!("{MACHINE} {args}"))
    }

    /// Takes the function from L1.
    pub fn add(&self) -> Result<()> {
        let Side { function, mode, .. } = self;
        self.daemon.text(&format!("pci add nic0 --host {function} --mode {mode}")).map(drop)
    }

    /// Sends the daemon this signal.
    pub fn signal(&self, l1: &L1, signal: &str) -> Result<()> {
        l1.run(&format!("kill -{signal} $(cat /tmp/{}/pid)", self.name), MINUTE).map(drop)
    }

    /// The command that moves the VM from `first` here to `second` at the other side.
    pub fn command(&self, there: &Side<'_>, first: &str, second: &str) -> String {
        format!(
            "move vm {VM} --to unix:/tmp/{second}.in --there {} --qmp-there /tmp/{second}.qmp --qmp /tmp/{first}.qmp",
            there.control()
        )
    }
}

/// Traffic of the peer with the guest.
#[derive(Debug)]
pub struct Traffic<'a> {
    l1: &'a L1,
    job: Job<'a>,
}

impl<'a> Traffic<'a> {
    const END: &'static str = "/tmp/traffic.end";

    /// Begins; [`Traffic::end`] ends it.
    pub fn start(l1: &'a L1) -> Result<Self> {
        let (program, end) = (built("ioplane-stream")?, Self::END);
        let job = l1.start(&format!(
            "echo 8388608 >/proc/sys/net/core/rmem_max; echo 8388608 >/proc/sys/net/core/rmem_default; rm -f {end}; exec {} drive {GUEST_IP}:{PORT} {RATE} {BYTES} {end}",
            program.display()
        ))?;
        Ok(Traffic { l1, job })
    }

    /// Echoes so far.
    pub fn answered(&self) -> u64 {
        let said = self.job.output();
        let last = said.lines().rev().find_map(|line| line.strip_prefix("answered ")?.parse().ok());
        last.unwrap_or(0)
    }

    /// Waits until so many more echoes have come.
    pub fn goes_on(&self, more: u64) -> Result<()> {
        let (begun, end) = (self.answered(), Instant::now() + 3 * MINUTE);
        while self.answered() < begun + more {
            self.l1.still_runs()?;
            let said = || {
                self.job.output().lines().rev().take(12).map(|line| format!("{line}\n")).collect::<String>()
            };
            ensure!(Instant::now() < end && !self.job.has_ended(), "no echoes come any more: {}", said());
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// What has come of it, which was whole until now.
    pub fn end(self) -> Result<Driven> {
        self.l1.run(&format!("touch {}", Self::END), MINUTE)?;
        let ended = self.job.wait(3 * MINUTE)?;
        let last = ended.output.lines().last().unwrap_or_default();
        ensure!(ended.status == 0, "the traffic ended with {}: {}", ended.status, ended.output);
        serde_json::from_str(last).with_context(|| format!("a report: {last}"))
    }
}

/// What the guest's kernel and interface say that would differ if the driver had noticed: changes of the link, resets, complaints.
pub fn noticed(l1: &L1, qemu: &str) -> Result<String> {
    l1.ask(
        qemu,
        "cd /sys/bus/pci/drivers/igbvf/*/net/*; cat carrier_changes statistics/tx_errors statistics/tx_dropped statistics/rx_errors; \
         dmesg | grep -ciE 'igbvf.*(reset|hang|link is)|NETDEV WATCHDOG|transmit queue|DMAR|AER:|irq .*nobody|do_IRQ'; true",
    )
}

/// Frames that the function has counted (VFGPRC, past its reset in moves) less those that the driver has had: what was accepted and not seen.
/// Nothing is under way.
pub fn unseen(l1: &L1, guest: &L2<'_>, qemu: &str) -> Result<i64> {
    let said = l1.ask(
        qemu,
        "cd /sys/bus/pci/drivers/igbvf/*/net/*; cat statistics/rx_packets; head -n 1 device/resource",
    )?;
    let mut words = said.split_whitespace();
    let seen: i64 = words.next().and_then(|word| word.parse().ok()).with_context(|| said.clone())?;
    let bar = words.next().and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    // 82576 data sheet, 8.30.20.
    let counter = bar.with_context(|| said.clone())? + 0xf10;
    let counted = guest.physical(counter, 1)?;
    Ok(i64::from(counted[0]) - seen)
}

/// One move under traffic. The QEMU that is left ends.
pub fn moves<'a>(
    l1: &'a L1,
    from: &Side<'_>,
    source: L2<'a>,
    names: [&str; 2],
    to: &Side<'_>,
) -> Result<(L2<'a>, Value)> {
    let destination = l1.awaits_traveller(names[1], &to.args()?)?;
    let begun = Instant::now();
    let moved = from.daemon.json(&from.command(to, names[0], names[1]));
    let context = || format!("{}\nthere QEMU said {}", to.daemon.said(), destination.said());
    let report = moved.with_context(context)?;
    eprintln!("moved in {:.1} s: {report}", begun.elapsed().as_secs_f64());
    ensure!(destination.qmp("query-status", &json!({}))?["status"] == "running", "{report}");
    let left = from.daemon.json("pci show nic0")?;
    source.kill()?;
    ensure!(left["connected"] == true, "{left:#}");
    let function = &report["functions"][0];
    ensure!(function["state_bytes"].as_u64().is_some_and(|bytes| bytes <= 1024), "{report}");
    Ok((destination, report))
}

/// Nothing twice, nothing changed, nothing lost but what was sent while the guest had no device: one stretch of datagrams for each move, none of
/// the guest's own.
pub fn right(driven: &Driven, moves: usize) -> Result<()> {
    let Driven { there, back, bytes_there, bytes_back, .. } = driven;
    ensure!(there.duplicated + there.reordered + back.duplicated + back.reordered == 0, "{driven:#?}");
    ensure!(there.missing.len() <= moves && back.lost == 0, "{driven:#?}");
    ensure!(*bytes_there > 0 && *bytes_back > 0, "{driven:#?}");
    Ok(())
}
