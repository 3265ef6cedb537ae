//! Stock QEMU in L1 with the interposer preloaded: a guest boots and does the same as without it, its devices get the same accesses,
//! and it takes a fraction of the exits. The kernel of L1 counts them, and QEMU itself traces the accesses.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::clustering::{boot_percent, counted, ended_by, saved, vcpus};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::preload::{UserExits, access_trace, fewer, library};
use ioplane_e2e::traces::{
    DEVICE_REGIONS, DEVICES, INVENTORY, REGIONS, TRACED, device_trace, on_and_off, same_devices, same_trace,
};
use ioplane_e2e::{L1, L2, OldMachine, Version};
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often a guest is stopped six times until one of its clusters is interrupted.
const ROUNDS: usize = 20;
const MINUTE: Duration = Duration::from_secs(60);
const PINGS: u32 = 20;

/// By the processor (PIO): each command is written to registers one by one.
const READ: &str = "modprobe ata_piix && modprobe sd_mod && sleep 1
    dd if=/dev/sda of=/folder/copy bs=64k iflag=direct 2>&1; cmp /dev/sda /folder/copy";
/// Reads the disk and configuration spaces again and again until it is told to end. They stay what they were.
const AGAIN: &str = "look() { for function in /sys/bus/pci/devices/*; do od -An -v -tx1 -j 8 \"$function/config\"; done | cksum; }
    first=$(look)
    while [ ! -e /folder/enough ]; do
        dd if=/dev/sda of=/tmp/again bs=64k iflag=direct 2>&1; cmp /folder/copy /tmp/again || exit 1
        for time in 1 2 3 4 5; do [ \"$(look)\" = \"$first\" ] || exit 2; done; echo once; : >/folder/begun
    done";
/// The script of the guide.
const EMULATOR: &str = "exec ioplane run -- qemu-system-x86_64 \"$@\"";
const GUIDE: &str = include_str!("../../docs/guide/fewer-exits.md");
/// Brings a plugged vCPU up.
const ONLINE: &str = "set -e; cpu=/sys/devices/system/cpu/cpu1
    until [ -d $cpu ]; do sleep 0.1; done
    [ $(cat $cpu/online) = 1 ] || echo 1 >$cpu/online; grep -c ^processor /proc/cpuinfo";

/// Without DMA, so that the processor reads the disk.
fn machine<'a>(name: &'a str, before: &'a str) -> OldMachine<'a> {
    OldMachine { name, version: Version::Host, before, args: "-serial null", append: "libata.dma=0" }
}

fn boot<'a>(l1: &'a L1, machine: &OldMachine<'_>, disk: &Path) -> Result<(L2<'a>, UserExits)> {
    let (guest, boot) = l1.old_machine(machine, disk, &|line| eprintln!("{line}"))?;
    eprintln!("{}: {boot:?}", machine.name);
    Ok((guest, boot))
}

/// What one guest did.
struct Run {
    boot: UserExits,
    read: UserExits,
    pings: UserExits,
    inventory: String,
    trace: Vec<String>,
    devices: Vec<String>,
}

/// What only a guest with the library has.
struct Clustered {
    /// Before it was reset.
    status: Value,
    /// When QEMU had reset it.
    again: UserExits,
}

/// The guest looks at its machine, reads its disk and pings QEMU by its NE2000.
fn exercise(l1: &L1, start: &OldMachine<'_>, disk: &Path) -> Result<(Run, Option<Clustered>)> {
    let (guest, boot) = boot(l1, start, disk)?;
    let inventory = guest.run(INVENTORY)?;
    let read = read(l1, &guest, disk)?;
    let trace = access_trace(l1, &guest, start.name, &REGIONS, TRACED)?;
    guest.raise_ne2000()?;
    let pings = guest.ping_by_ne2000(l1, PINGS)?;
    eprintln!("{}: {read:?} to read the disk; {pings:?}", start.name);
    let mut clustered = None;
    let status = if start.before.is_empty() { None } else { Some(switched(l1, &guest, start.name)?) };
    let devices = device_trace(l1, &guest, start.name, &DEVICE_REGIONS, DEVICES)?;
    if let Some(status) = status {
        clustered = Some(Clustered { status, again: reset(l1, &guest, start.name, disk)? });
    }
    guest.kill()?;
    Ok((Run { boot, read, pings: pings.exits, inventory, trace, devices }, clustered))
}

fn read(l1: &L1, guest: &L2<'_>, disk: &Path) -> Result<UserExits> {
    let exits = l1.count_user_exits()?;
    let said = guest.run(READ)?;
    let read = exits.read()?;
    ensure!(fs::read(guest.folder().join("copy"))? == fs::read(disk)?, "other data: {said}");
    Ok(read)
}

/// QEMU resets the machine: the guest boots again in clusters and reads its disk. The exits of that boot.
fn reset(l1: &L1, guest: &L2<'_>, name: &str, disk: &Path) -> Result<UserExits> {
    let before = saved(&l1.clustering(&format!("--vm {name}"))?);
    let exits = l1.count_user_exits()?;
    guest.reset()?;
    let boot = exits.read()?;
    let status = l1.clustering(&format!("--vm {name}"))?;
    eprintln!("{name}: reset: {boot:?}, {} exits saved", saved(&status) - before);
    ensure!(status["clustering"] == "on" && saved(&status) > before + 5000, "{before} before: {status:#}");
    read(l1, guest, disk)?;
    Ok(boot)
}

/// Switches it off and on again while the guest runs; the status before.
fn switched(l1: &L1, guest: &L2<'_>, name: &str) -> Result<Value> {
    let text = format!("{} exits cluster --vm {name} --sites 8", binary()?.display());
    eprintln!("{}", l1.run(&text, MINUTE)?);
    let work = "dd if=/dev/sda of=/dev/null bs=64k count=2 iflag=direct 2>&1";
    let status = l1.clustering(&format!("--vm {name}"))?;
    let off = l1.clustering(&format!("off --vm {name}"))?;
    guest.run(work)?;
    let still = l1.clustering(&format!("on --vm {name}"))?;
    // An access may have been under way.
    ensure!(saved(&still) <= saved(&off) + 2, "switched off, and yet:\n{off:#}\n{still:#}");
    guest.run(work)?;
    let again = l1.clustering(&format!("--vm {name}"))?;
    ensure!(saved(&again) > saved(&still) + 20, "switched on again:\n{still:#}\n{again:#}");
    // A profile says that one of its exits may stand for many accesses.
    let profile = format!("{} exits --vm {name} --for 1s 2>&1", binary()?.display());
    let profile = l1.run(&profile, MINUTE)?;
    ensure!(profile.contains("clustering is on: "), "{profile}");
    ensure!(status["clustering"] == "on" && off["clustering"] == "off", "{off:#}");
    Ok(status)
}

/// In clusters: the VMM stops the guest, reads its registers, and has it go on, again and again.
fn interrupted(l1: &L1, guest: &L2<'_>, name: &str) -> Result<()> {
    let ends = |status: &Value| ended_by(status, &["wanted by the VMM", "other call of the VMM"]);
    let before = ends(&l1.clustering(&format!("--vm {name} --sites 256"))?);
    let number = guest.start(AGAIN)?;
    guest.wait_for("begun", 2 * MINUTE)?;
    let (nothing, registers) = (json!({}), json!({"command-line": "info registers"}));
    let look = ("human-monitor-command", &registers);
    // Whether it is stopped within a cluster is chance.
    let mut interrupted = 0;
    for _ in 0..ROUNDS {
        let said = guest.qmp_each(&[look, ("stop", &nothing), look, ("cont", &nothing)].repeat(6))?;
        ensure!(
            said.iter().filter(|one| one.as_str().is_some_and(|text| text.contains("RIP="))).count() == 12,
            "{said:?}"
        );
        interrupted = ends(&l1.clustering(&format!("--vm {name} --sites 256"))?) - before;
        if interrupted > 0 {
            break;
        }
    }
    fs::write(guest.folder().join("enough"), "")?;
    let status = guest.wait_for(&format!("{number}.status"), 2 * MINUTE)?;
    let output = fs::read_to_string(guest.folder().join(format!("{number}.out")))?;
    ensure!(status.trim() == "0" && output.contains("once"), "{status}: {output}");
    eprintln!("{name}: {interrupted} clusters were interrupted by the VMM");
    ensure!(interrupted > 0, "no cluster was interrupted");
    Ok(())
}

fn two_vcpus(l1: &L1, command: &str, disk: &Path) -> Result<()> {
    let refused = OldMachine { args: "-smp 2", ..machine("refused", command) };
    let (guest, _) = boot(l1, &refused, disk)?;
    read(l1, &guest, disk)?;
    let status = l1.clustering("--vm refused")?;
    let declined = |vcpu: &Value| counted(&vcpu["not_begun"], &["refused: remote TLB flush"]);
    ensure!(vcpus(&status).len() == 2 && saved(&status) == 0, "{status:#}");
    ensure!(vcpus(&status).iter().map(declined).sum::<u64>() > 1000, "{status:#}");
    guest.kill()?;

    let args = "-smp 2 -cpu host,kvm-pv-tlb-flush=off";
    let served = OldMachine { version: Version::Newer, args, ..machine("served", command) };
    let (guest, _) = boot(l1, &served, disk)?;
    let exits = read(l1, &guest, disk)?;
    interrupted(l1, &guest, "served")?;
    let complaints = "dmesg | grep -E 'BUG:|Oops|lockup|rcu.*detected|TSC warp'";
    let said = guest.run(&format!("grep -c ^processor /proc/cpuinfo; ! {complaints}"))?;
    ensure!(said.trim() == "2", "{said}");
    let status = l1.clustering("--vm served")?;
    eprintln!("served: {exits:?} to read the disk, {} exits saved", saved(&status));
    ensure!(saved(&status) > 5000, "{status:#}");
    guest.kill()
}

/// A guest with one vCPU gets a second one. Its CPUID offers KVM's PV TLB flush, so no cluster begins from then on.
fn plugged(l1: &L1, command: &str, disk: &Path) -> Result<()> {
    let plugged = OldMachine { args: "-smp 1,maxcpus=2", ..machine("plugged", command) };
    let (guest, _) = boot(l1, &plugged, disk)?;
    read(l1, &guest, disk)?;
    let alone = l1.clustering("--vm plugged")?;
    ensure!(vcpus(&alone).len() == 1 && saved(&alone) > 5000, "{alone:#}");
    let places = guest.qmp("query-hotpluggable-cpus", &json!({}))?;
    let mut free = places.as_array().into_iter().flatten().filter(|place| place["qom-path"].is_null());
    let place = free.next().with_context(|| format!("no vCPU can be plugged: {places:#}"))?;
    let mut words = place["props"].clone();
    (words["driver"], words["id"]) = (place["type"].clone(), json!("second"));
    guest.qmp("device_add", &words)?;
    let said = guest.run(ONLINE)?;
    ensure!(said.trim() == "2", "{said}");
    let before = l1.clustering("--vm plugged")?;
    read(l1, &guest, disk)?;
    let after = l1.clustering("--vm plugged")?;
    let declined = |status: &Value| -> u64 {
        vcpus(status).iter().map(|vcpu| counted(&vcpu["not_begun"], &["refused: remote TLB flush"])).sum()
    };
    eprintln!("plugged: {} exits saved alone, then {} refusals", saved(&alone), declined(&after));
    ensure!(vcpus(&after).len() == 2 && saved(&after) == saved(&before), "{before:#}\n{after:#}");
    ensure!(declined(&alone) == 0 && declined(&after) > declined(&before) + 1000, "{before:#}\n{after:#}");
    guest.kill()
}

/// The guide's script for libvirt, which drops the environment.
#[test]
fn a_wrapper_starts_it_without_an_environment() -> Result<()> {
    let l1 = L1::boot(1024, "", &|line| eprintln!("{line}"))?;
    ensure!(GUIDE.contains(EMULATOR), "the guide has another script");
    let emulator = l1.folder().join("emulator");
    fs::write(&emulator, format!("#!/bin/sh\n{EMULATOR}\n"))?;
    fs::set_permissions(&emulator, Permissions::from_mode(0o755))?;
    // Installed as the guide says.
    let place = l1.folder().join("installed");
    for (from, to) in [(binary()?, "bin/ioplane"), (library()?, "lib/ioplane/libioplane_interposer.so")] {
        let to = place.join(to);
        fs::create_dir_all(to.parent().context("a folder")?)?;
        fs::copy(from, to)?;
    }
    let place = place.join("bin").display().to_string();
    let qemu = l1.start(&format!(
        "exec env -i LC_ALL=C PATH={place}:/usr/sbin:/usr/bin:/sbin:/bin {} -accel kvm -name wrapped -nodefaults -display none -S",
        emulator.display()
    ))?;
    let end = Instant::now() + 2 * MINUTE;
    let status = loop {
        match l1.clustering("--vm wrapped") {
            Ok(status) if vcpus(&status).len() == 1 => break status,
            Ok(status) => ensure!(Instant::now() < end, "{status:#}"),
            Err(error) if qemu.has_ended() || Instant::now() >= end => {
                return Err(error.context(format!("QEMU said {}", qemu.output())));
            }
            Err(_) => {}
        }
    };
    ensure!(status["clustering"] == "on", "{status:#}");
    qemu.kill()
}

/// In a newer QEMU the devices get the same accesses with clustering on and off.
#[test]
fn a_newer_qemu_does_the_same() -> Result<()> {
    let l1 = &L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let disk = l1.old_disk()?;
    let command = l1.interposed()?;
    let newer = OldMachine { version: Version::Newer, ..machine("newer", &command) };
    let (guest, _) = boot(l1, &newer, &disk)?;
    read(l1, &guest, &disk)?;
    // The driver of the NE2000 changes the configuration space, so each work is done with both before the next.
    let [with, without] =
        on_and_off(l1, "newer", 500, || access_trace(l1, &guest, "newer", &REGIONS, TRACED))?;
    same_trace(&with, &without)?;
    // It leaves the port's speed, so the first time is another.
    guest.run(DEVICES)?;
    let [with, without] =
        on_and_off(l1, "newer", 500, || device_trace(l1, &guest, "newer", &DEVICE_REGIONS, DEVICES))?;
    same_devices(&with, &without, &DEVICE_REGIONS)?;
    guest.kill()
}

#[test]
fn a_stock_guest_does_the_same_with_a_fraction_of_the_exits() -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {what}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let disk = l1.old_disk()?;
    let content = fs::read(&disk)?;
    let command = l1.interposed()?;
    step("L1 is up");
    let (clustered, more) =
        exercise(&l1, &machine("clustered", command.as_str()), &disk).context("with it")?;
    step("with the interposer");
    let (plain, _) = exercise(&l1, &machine("plain", ""), &disk).context("without it")?;
    step("without it");
    let off = format!("IOPLANE_EXITS_CLUSTER=off {command}");
    let (guest, off) = boot(&l1, &machine("off", off.as_str()), &disk)?;
    let inventory = guest.run(INVENTORY)?;
    guest.kill()?;
    step("switched off");
    for (name, other) in [("with the interposer", &clustered.inventory), ("switched off", &inventory)] {
        ensure!(*other == plain.inventory, "{name} it sees:\n{other}\nwithout:\n{}", plain.inventory);
    }
    same_trace(&clustered.trace, &plain.trace)?;
    same_devices(&clustered.devices, &plain.devices, &DEVICE_REGIONS)?;
    let percent = boot_percent(&plain.boot);
    fewer(&clustered.boot, &plain.boot, percent).context("boot")?;
    let Clustered { status, again } = more.context("it was clustered")?;
    fewer(&again, &plain.boot, percent).context("boot after a reset")?;
    // Without DMA, INS reads the data, and that is KVM's.
    fewer(&clustered.read, &plain.read, 80).context("IDE")?;
    fewer(&clustered.pings, &plain.pings, 10).context("NE2000")?;
    fewer(&plain.boot, &off, 110).context("switched off")?;
    // It counts what L1's kernel has counted, and what the guest did in between. The kernel's count includes the returns that only completed an
    // access, which have a count of their own here.
    let returned = clustered.boot.total() + clustered.read.total() + clustered.pings.total();
    let count = |name: &str| status["vcpus"][0][name].as_u64().context("a count of returns");
    let returns = count("returns")? + count("completions")?;
    ensure!(returns >= returned && returns < returned * 2, "{returned} returns were counted: {status:#}");
    ensure!(fs::read(&disk)? == content, "the disk has changed");
    Ok(())
}

/// Several vCPUs are served only if no vCPU flushes the translations of another behind its back.
#[test]
fn two_vcpus_are_refused_or_served_and_interrupted() -> Result<()> {
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let command = l1.interposed()?;
    let disk = l1.old_disk()?;
    two_vcpus(&l1, &command, &disk)?;
    plugged(&l1, &command, &disk)
}
