//! 32-bit Debian in L1 with the interposer: the same accesses of its devices with clusters and without, and a fraction of the exits.

use anyhow::{Result, ensure};
use ioplane_e2e::assets::{Linux32, Paging32};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::daemon::binary;
use ioplane_e2e::preload::{access_trace, fewer, long_form};
use ioplane_e2e::traces::{REGIONS, TRACED, device_trace, on_and_off, same_devices, same_trace};
use ioplane_e2e::{Accelerator, L1, OldMachine, Parts, Version};
use std::fs;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// A serial port that is no console is opened and written to, the RTC's memory is read.
const DEVICES: &str = "set -e; stty -F /dev/ttyS1 38400 raw
    for line in first second third; do echo \"the $line line\" >/dev/ttyS1; done
    cat /sys/bus/nvmem/devices/cmos_nvram*/nvmem | od -An -v -tx1";
const DEVICE_REGIONS: [(&str, usize); 3] = [("serial", 40), ("rtc", 100), ("rtc-index", 100)];

/// Boots one, and has it use its devices.
fn guest_of(l1: &L1, name: &str, paging: Paging32, flags: &str) -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {name}: {what}", begun.elapsed().as_secs_f64());
    let news = |line: &str| eprintln!("{line}");
    let disk = l1.old_disk()?;
    let command = l1.interposed()?;
    let linux = Linux32::prepare(paging, &news)?;
    let parts = Parts { kernel: &linux.kernel, initrd: &linux.initrd, root: None };
    let (args, append) = ("-serial null", "libata.dma=0");
    let machine = OldMachine { name, version: Version::Host, before: &command, args, append };
    let (guest, with) = l1.old_machine_of(&parts, &machine, &disk, &news)?;
    let said = guest.run(
        "uname -mr; grep -wo -e pae -e nx /proc/cpuinfo | sort -u | tr '\\n' ' '; cat /dev/sda >/folder/copy",
    )?;
    step(&format!("{with:?} to boot; {}", said.replace('\n', " ")));
    let version = said.lines().next().unwrap_or_default();
    ensure!(version.contains(flags) && version.ends_with(" i686"), "{said}");
    ensure!(fs::read(guest.folder().join("copy"))? == fs::read(&disk)?, "it has read other data");
    let [on, off] = on_and_off(l1, name, 500, || access_trace(l1, &guest, name, &REGIONS, TRACED))?;
    same_trace(&on, &off)?;
    // The first time sets the port's speed.
    guest.run(DEVICES)?;
    let [on, off] = on_and_off(l1, name, 100, || device_trace(l1, &guest, name, &DEVICE_REGIONS, DEVICES))?;
    same_devices(&on, &off, &DEVICE_REGIONS)?;
    step("traces are the same");
    let status = l1.clustering(&format!("--vm {name}"))?;
    ensure!(saved(&status) > 5000, "{status:#}");
    eprintln!("{}", l1.run(&format!("{} exits cluster --vm {name} --sites 8", binary()?.display()), MINUTE)?);
    guest.kill()?;
    if long_form() {
        let plain = OldMachine { name: "plain", before: "", ..machine };
        let (guest, without) = l1.old_machine_of(&parts, &plain, &disk, &news)?;
        guest.kill()?;
        fewer(&with, &without, 30)?;
    }
    Ok(())
}

/// On hardware.
fn kernel(name: &str, paging: Paging32, flavour: &str) -> Result<()> {
    if matches!(Accelerator::detect(), Accelerator::Tcg { .. }) {
        eprintln!(
            "SKIPPED (cannot be had here): a kernel of 32 bits ({}) was NOT tried: on the SVM that QEMU 7.2 and 11.1 translate, one with PAE \
             faults early in its boot without the library too, and one without PAE ends QEMU with its first program",
            flavour.trim()
        );
        return Ok(());
    }
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    guest_of(&l1, name, paging, flavour)
}

#[test]
fn a_kernel_without_pae() -> Result<()> {
    kernel("legacy", Paging32::Plain, "-686 ")
}

#[test]
fn a_kernel_with_pae() -> Result<()> {
    kernel("pae", Paging32::Pae, "-686-pae ")
}
