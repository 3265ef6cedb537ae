//! Machines whose firmware or interrupt controllers are others than usual, in L1 with the interposer: OVMF, and PIC and PIT in the VMM.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::clamped::clamp;
use ioplane_e2e::clustering::{counted, saved, vcpus};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::preload::{UserExits, access_trace, fewer, long_form};
use ioplane_e2e::traces::{INVENTORY, REGIONS, TRACED, device_trace, on_and_off, same_devices, same_trace};
use ioplane_e2e::{L1, L2, OldMachine, Version};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.fd";
const VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";
/// What `ioplane exits clamp` says of such a VM.
const NO_PIT: &str = "KVM has no PIT of this VM";
/// Tones by the speaker's driver, each a command for channel 2 of the PIT, its count, and the port that opens its gate.
const TONES: &str = "set -e; modprobe -a pcspkr evdev
    for place in /sys/class/input/input*; do [ \"$(cat $place/name)\" = 'PC Speaker' ] && break; done
    perl -e 'for my $tone ((1000, 0, 440, 0) x 8) { print pack(\"q q S S l\", 0, 0, 18, 2, $tone) }' \
        >/tmp/tones
    dd if=/tmp/tones of=/dev/input/$(basename $place/event*) bs=24 2>&1";
/// Of the port of the gate the driver writes back what it has read, and that has two bits that depend on time.
const TONE_REGIONS: [(&str, usize); 1] = [("pit", 48)];

fn machine<'a>(name: &'a str, before: &'a str, args: &'a str, append: &'a str) -> OldMachine<'a> {
    OldMachine { name, version: Version::Host, before, args, append }
}

fn boot<'a>(l1: &'a L1, machine: &OldMachine<'_>, disk: &Path) -> Result<(L2<'a>, UserExits)> {
    let (guest, boot) = l1.old_machine(machine, disk, &|line| eprintln!("{line}"))?;
    eprintln!("{}: {boot:?}", machine.name);
    guest.find_ide()?;
    fs::copy(disk, guest.folder().join("copy"))?;
    Ok((guest, boot))
}

/// With clustering on and off, IDE and configuration spaces get the same accesses.
fn same_on_and_off(l1: &L1, guest: &L2<'_>, name: &str) -> Result<()> {
    let [with, without] = on_and_off(l1, name, 500, || access_trace(l1, guest, name, &REGIONS, TRACED))?;
    same_trace(&with, &without)
}

/// The clamp sets the PIT by calls of KVM's, so it has nothing to set here, and says so.
fn not_clamped(l1: &L1, name: &str) -> Result<()> {
    let refused = clamp(l1, &format!("50 --vm {name} --clock kvm-clock"));
    let said = refused.err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(said.contains("has no timer in KVM that could be clamped"), "{said}");
    let status = clamp(l1, &format!("--vm {name}"))?;
    let state = status["state"].as_str().unwrap_or_default();
    ensure!(status["clamped"] == false && state.contains(NO_PIT), "{status:#}");
    Ok(())
}

/// All of the PIC, the PIT and the IOAPIC is QEMU's, and the local APIC is KVM's.
#[test]
fn clusters_reach_a_pic_and_a_pit_in_the_vmm() -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {what}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let disk = l1.old_disk()?;
    let command = l1.interposed_with("--clamp 50")?;
    let machines = [
        // Linux has nothing but the local APIC's timer then, once SeaBIOS is done.
        "-serial null -machine kernel-irqchip=split,hpet=off",
        // By an HPET it ticks from the beginning, by the PIC. On a slow machine it has time for little else.
        "-serial null -machine kernel-irqchip=split",
    ];
    for args in machines.iter().take(if long_form() { 2 } else { 1 }) {
        let (guest, with) = boot(&l1, &machine("split", &command, args, "libata.dma=0"), &disk)?;
        same_on_and_off(&l1, &guest, "split")?;
        guest.run(TONES)?;
        let [on, off] =
            on_and_off(&l1, "split", 40, || device_trace(&l1, &guest, "split", &TONE_REGIONS, TONES))?;
        same_devices(&on, &off, &TONE_REGIONS)?;
        not_clamped(&l1, "split")?;
        step("traces are the same");
        guest.kill()?;
        if long_form() {
            let (guest, without) = boot(&l1, &machine("plain", "", args, "libata.dma=0"), &disk)?;
            step("without the library");
            guest.kill()?;
            fewer(&with, &without, 70)?;
        }
    }
    // A local APIC in the VMM is refused: task priority and interrupts are exchanged at every exit.
    let args =
        "-serial null -machine kernel-irqchip=off,hpet=off -cpu host,kvm-asyncpf=off,kvm-asyncpf-int=off";
    let off = machine("userspace", &command, args, "libata.dma=0");
    let (guest, _) = boot(&l1, &off, &disk)?;
    guest.read_ide(&l1, &disk, 4)?;
    let status = l1.clustering("--vm userspace")?;
    let [vcpu] = vcpus(&status) else { anyhow::bail!("one vCPU: {status:#}") };
    let declined = counted(&vcpu["not_begun"], &["refused: local APIC in the VMM"]);
    ensure!(saved(&status) == 0 && declined > 1000, "{status:#}");
    not_clamped(&l1, "userspace")?;
    step(&format!("{declined} clusters were refused with the local APIC in the VMM"));
    guest.kill()
}

/// OVMF, with its variables in a second flash chip, starts Linux. Each boot takes two minutes where L1 is translated, so only the long form has them.
#[test]
fn a_guest_boots_by_ovmf_with_a_fraction_of_the_exits() -> Result<()> {
    if !long_form() {
        eprintln!(
            "SKIPPED (cannot be had here): OVMF boots in the long form only: script/test nightly:clusters"
        );
        return Ok(());
    }
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {what}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_in_newer(1536, &|line| eprintln!("{line}"))?;
    let disk = l1.old_disk()?;
    let command = l1.interposed()?;
    if l1.is_translated() {
        // Within two minutes L1's QEMU (7.2, 11.1) ends at an assertion, `cpu_interrupt`: bql_locked. It does not if OVMF's timer, which is all that
        // interrupts OVMF, ticks five times a second.
        l1.run("echo 200000 >/sys/module/kvm/parameters/min_timer_period_us", MINUTE)?;
    }
    let variables = l1.folder().join("variables");
    let args = format!(
        "-serial null -drive if=pflash,format=raw,unit=0,readonly=on,file={CODE} -drive if=pflash,format=raw,unit=1,file={}",
        variables.display()
    );
    let start = |name: &str, before: &str| -> Result<(L2<'_>, UserExits, String)> {
        fs::copy(VARIABLES, &variables)?;
        let started = machine(name, before, &args, "libata.dma=0 no_timer_check");
        let (guest, exits) = l1.old_machine(&started, &disk, &|line| eprintln!("{line}"))?;
        guest.run("ls /sys/firmware/efi/runtime").context("it was booted by OVMF")?;
        let inventory = guest.run(INVENTORY)?;
        step(&format!("{name}: {exits:?}"));
        Ok((guest, exits, inventory))
    };
    let (guest, with, inventory) = start("ovmf", &command)?;
    let status = l1.clustering("--vm ovmf")?;
    eprintln!("{}", l1.run(&format!("{} exits cluster --vm ovmf --sites 12", binary()?.display()), MINUTE)?);
    ensure!(status["clustering"] == "on" && saved(&status) > 4 * with.accesses(), "{with:?}: {status:#}");
    guest.kill()?;
    let (guest, without, plain) = start("plain", "")?;
    guest.kill()?;
    ensure!(inventory == plain, "with the interposer it sees:\n{inventory}\nwithout:\n{plain}");
    fewer(&with, &without, 20)
}
