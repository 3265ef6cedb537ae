//! Stock QEMU in L1 with the interposer preloaded: a guest boots and reads its IDE disk as without it, and takes a fraction of
//! the exits. The kernel of L1 counts them.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::preload::UserExits;
use ioplane_e2e::{L1, L2, Version};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// On a translated processor everything takes longer, KVM's exits included: hardware's limit, and as much longer.
const TIME_LIMIT: &str = "10ms";
const DISK: usize = 1 << 20;

/// What a guest has found: its PCI functions with their configuration spaces, ports, memory, and what the kernel complains of.
const INVENTORY: &str = "
    for function in /sys/bus/pci/devices/*; do
        echo \"${function##*/}\"; od -An -v -tx1 \"$function/config\"; cat \"$function/resource\"
    done
    cat /proc/ioports; grep -v -e Kernel -e 'System RAM' /proc/iomem
    dmesg -l err,crit,alert,emerg | sed 's/^[^]]*] //'";
/// By the processor (PIO): each command is written to registers one by one.
const READ: &str = "modprobe ata_piix && modprobe sd_mod && sleep 1
    dd if=/dev/sda of=/folder/copy bs=64k iflag=direct 2>&1; cmp /dev/sda /folder/copy";

/// What one guest did.
struct Run {
    boot: UserExits,
    read: UserExits,
    inventory: String,
    /// What `ioplane exits cluster` says, if it says anything.
    status: Option<Value>,
}

fn cluster(l1: &L1, words: &str) -> Result<Value> {
    let said = l1.run(&format!("{} exits cluster {words} --json", binary()?.display()), MINUTE)?;
    serde_json::from_str(&said).with_context(|| said)
}

/// Boots a guest on a machine full of old devices, whose QEMU is started by `before`, and has it read its disk.
fn run(l1: &L1, name: &str, before: &str, disk: &Path) -> Result<Run> {
    let exits = l1.count_user_exits()?;
    let begun = Instant::now();
    let machine =
        format!("-machine pc -m 256M -vga std -sandbox on -drive if=ide,format=raw,file={}", disk.display());
    let guest = l1.debian_after(before, Version::Host, name, &machine, "libata.dma=0")?;
    let took = begun.elapsed();
    let boot = exits.read()?;
    let inventory = guest.run(INVENTORY)?;
    let exits = l1.count_user_exits()?;
    let said = guest.run(READ)?;
    let read = exits.read()?;
    ensure!(fs::read(guest.folder().join("copy"))? == fs::read(disk)?, "other data: {said}");
    eprintln!("{name}: up after {:.1} s, {boot:?}; {read:?} to read the disk", took.as_secs_f64());
    let interposed = before.contains(" run ") && !before.contains("CLUSTER=off");
    let status = interposed.then(|| switched(l1, &guest, name)).transpose()?;
    guest.kill()?;
    Ok(Run { boot, read, inventory, status })
}

/// Switches it off and on again while the guest runs; the status before.
fn switched(l1: &L1, guest: &L2<'_>, name: &str) -> Result<Value> {
    let text = format!("{} exits cluster --vm {name} --sites 8", binary()?.display());
    eprintln!("{}", l1.run(&text, MINUTE)?);
    let saved = |status: &Value| status["vcpus"][0]["saved"].as_u64().context("saved");
    let work = "dd if=/dev/sda of=/dev/null bs=64k count=2 iflag=direct 2>&1";
    let status = cluster(l1, &format!("--vm {name}"))?;
    let off = cluster(l1, &format!("off --vm {name}"))?;
    guest.run(work)?;
    let still = cluster(l1, &format!("on --vm {name}"))?;
    // An access may have been under way.
    ensure!(saved(&still)? <= saved(&off)? + 2, "switched off, and yet:\n{off:#}\n{still:#}");
    guest.run(work)?;
    let again = cluster(l1, &format!("--vm {name}"))?;
    ensure!(saved(&again)? > saved(&still)? + 20, "switched on again:\n{still:#}\n{again:#}");
    ensure!(status["clustering"] == "on" && off["clustering"] == "off", "{off:#}");
    Ok(status)
}

#[test]
fn a_stock_guest_does_the_same_with_a_fraction_of_the_exits() -> Result<()> {
    let begun = Instant::now();
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    eprintln!("[{:5.1} s] L1 is up", begun.elapsed().as_secs_f64());
    let disk = l1.folder().join("ide");
    let content: Vec<u8> = (0..DISK).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    fs::write(&disk, content)?;
    let command = format!("{} run --time-limit {TIME_LIMIT} --", binary()?.display());
    let clustered = run(&l1, "clustered", &command, &disk).context("with the interposer")?;
    let plain = run(&l1, "plain", "", &disk)?;
    let off = run(&l1, "off", &format!("IOPLANE_EXITS_CLUSTER=off {command}"), &disk)?;
    for (name, other) in [("with the interposer", &clustered), ("switched off", &off)] {
        let same = other.inventory == plain.inventory;
        ensure!(same, "{name} it sees:\n{}\nwithout:\n{}", other.inventory, plain.inventory);
    }
    let fewer = |with: &UserExits, without: &UserExits, percent: u64| -> Result<()> {
        ensure!(without.accesses() > 2000, "{without:?}: too few to prove anything");
        let at_most = without.accesses() * percent / 100;
        ensure!(with.accesses() <= at_most, "{with:?}, without: {without:?}");
        Ok(())
    };
    fewer(&clustered.boot, &plain.boot, 35).context("boot")?;
    fewer(&clustered.read, &plain.read, 50).context("IDE")?;
    fewer(&plain.boot, &off.boot, 110).context("switched off")?;
    // What it says is what L1's kernel has counted, but for what the guest did before the status was asked.
    let counted = clustered.boot.total() + clustered.read.total();
    let status = clustered.status.context("it has a status")?;
    let returns = status["vcpus"][0]["returns"].as_u64().context("returns")?;
    ensure!(returns >= counted && returns < counted * 2, "{counted} returns were counted: {status:#}");
    eprintln!("[{:5.1} s] done", begun.elapsed().as_secs_f64());
    Ok(())
}
