//! Stock QEMU in L1 with the interposer preloaded: a guest boots and does the same as without it, its devices get the same accesses,
//! and it takes a fraction of the exits. The kernel of L1 counts them, and QEMU itself traces the accesses.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::clustering::{saved, vcpus};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::preload::{UserExits, access_trace};
use ioplane_e2e::{L1, L2, OldMachine, Version};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// How often a guest is stopped six times until one of its clusters is interrupted.
const ROUNDS: usize = 20;
const MINUTE: Duration = Duration::from_secs(60);
const PINGS: u32 = 20;

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
/// Reads, writes what was there, and looks at configuration spaces.
const TRACED: &str = "set -e
    dd if=/dev/sda of=/dev/null bs=4k count=4 skip=64 iflag=direct 2>&1
    dd if=/folder/copy of=/dev/sda bs=4k count=4 skip=64 seek=64 oflag=direct conv=notrunc 2>&1
    for function in /sys/bus/pci/devices/*; do od -An -v -tx1 \"$function/config\"; done";
/// Reads the disk and configuration spaces again and again until it is told to end. They stay what they were.
const AGAIN: &str = "look() { for function in /sys/bus/pci/devices/*; do od -An -v -tx1 -j 8 \"$function/config\"; done | cksum; }
    first=$(look)
    while [ ! -e /folder/enough ]; do
        dd if=/dev/sda of=/tmp/again bs=64k iflag=direct 2>&1; cmp /folder/copy /tmp/again || exit 1
        for time in 1 2 3 4 5; do [ \"$(look)\" = \"$first\" ] || exit 2; done; echo once; : >/folder/begun
    done";
const REGIONS: [&str; 3] = ["ide", "pci-conf-idx", "pci-conf-data"];

/// Without DMA, so that the processor reads the disk.
fn machine<'a>(name: &'a str, before: &'a str) -> OldMachine<'a> {
    OldMachine { name, version: Version::Host, before, args: "", append: "libata.dma=0" }
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
}

/// The guest looks at its machine, reads its disk and pings QEMU by its NE2000.
fn exercise(l1: &L1, start: &OldMachine<'_>, disk: &Path) -> Result<(Run, Option<Value>)> {
    let (guest, boot) = boot(l1, start, disk)?;
    let inventory = guest.run(INVENTORY)?;
    let read = read(l1, &guest, disk)?;
    let trace = access_trace(l1, &guest, start.name, &REGIONS, TRACED)?;
    guest.raise_ne2000()?;
    let pings = guest.ping_by_ne2000(l1, PINGS)?;
    eprintln!("{}: {read:?} to read the disk; {pings:?}", start.name);
    let status = if start.before.is_empty() { None } else { Some(switched(l1, &guest, start.name)?) };
    guest.kill()?;
    Ok((Run { boot, read, pings: pings.exits, inventory, trace }, status))
}

fn read(l1: &L1, guest: &L2<'_>, disk: &Path) -> Result<UserExits> {
    let exits = l1.count_user_exits()?;
    let said = guest.run(READ)?;
    let read = exits.read()?;
    ensure!(fs::read(guest.folder().join("copy"))? == fs::read(disk)?, "other data: {said}");
    Ok(read)
}

/// What is counted under these names in a list such as `not_begun`.
fn counted(list: &Value, whys: &[&str]) -> u64 {
    let counts = list.as_array().map_or(&[][..], Vec::as_slice);
    let named = counts.iter().filter(|count| count["why"].as_str().is_some_and(|why| whys.contains(&why)));
    named.filter_map(|count| count["count"].as_u64()).sum()
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
    ensure!(status["clustering"] == "on" && off["clustering"] == "off", "{off:#}");
    Ok(status)
}

/// Without what depends on how long something takes: a device that is asked whether it is busy yet, and asked again.
fn timeless(trace: &[String]) -> Vec<&str> {
    let busy = |line: &str| {
        let status = line.starts_with("read addr 0x1f7 ") || line.starts_with("read addr 0x3f6 ");
        let value = line.split("value 0x").nth(1).and_then(|rest| rest.split(' ').next());
        status
            && value
                .and_then(|word| u64::from_str_radix(word, 16).ok())
                .is_some_and(|value| value & 0x80 != 0)
    };
    let mut kept: Vec<&str> = trace.iter().map(String::as_str).filter(|line| !busy(line)).collect();
    kept.dedup_by(|next, before| next == before && next.starts_with("read addr 0x"));
    kept
}

fn same_trace(with: &[String], without: &[String]) -> Result<()> {
    let (with, without) = (timeless(with), timeless(without));
    for region in REGIONS {
        let of = without.iter().filter(|line| line.contains(&format!("name '{region}'"))).count();
        ensure!(of > 100, "{of} accesses of {region} prove nothing: {without:#?}");
    }
    if let Some(at) = (0..with.len().max(without.len())).find(|at| with.get(*at) != without.get(*at)) {
        let around = |trace: &[&str]| {
            trace
                .iter()
                .skip(at.saturating_sub(8))
                .take(16)
                .map(|line| format!("{line}\n"))
                .collect::<String>()
        };
        anyhow::bail!(
            "access {at} differs; with the interposer:\n{}without:\n{}",
            around(&with),
            around(&without)
        );
    }
    eprintln!("{} accesses are the same", with.len());
    Ok(())
}

/// In clusters: the VMM stops the guest, reads its registers, and has it go on, again and again.
fn interrupted(l1: &L1, guest: &L2<'_>, name: &str) -> Result<()> {
    let ends = |status: &Value| -> u64 {
        let sites = vcpus(status).iter().filter_map(|vcpu| vcpu["sites"].as_array()).flatten();
        sites.map(|site| counted(&site["ends"], &["wanted by the VMM", "other call of the VMM"])).sum()
    };
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

fn fewer(with: &UserExits, without: &UserExits, percent: u64) -> Result<()> {
    ensure!(without.accesses() > 2000, "{without:?}: too few to prove anything");
    let at_most = without.accesses() * percent / 100;
    ensure!(with.accesses() <= at_most, "{with:?}, without: {without:?}");
    Ok(())
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
    let (clustered, status) =
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
    // With Debian 13's QEMU 10.0 a boot takes 33,000 port accesses fewer than with Debian 12's 7.2. Clustering saves nearly all of those, so
    // about as many exits are left with either.
    let percent = if plain.boot.accesses() > 40_000 { 10 } else { 30 };
    fewer(&clustered.boot, &plain.boot, percent).context("boot")?;
    // Without DMA, INS reads the data, and that is KVM's.
    fewer(&clustered.read, &plain.read, 80).context("IDE")?;
    fewer(&clustered.pings, &plain.pings, 10).context("NE2000")?;
    fewer(&plain.boot, &off, 110).context("switched off")?;
    // It counts what L1's kernel has counted, and what the guest did in between. The kernel's count includes the returns that only completed an
    // access, which have a count of their own here.
    let returned = clustered.boot.total() + clustered.read.total() + clustered.pings.total();
    let status = status.context("it has a status")?;
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
    two_vcpus(&l1, &command, &l1.old_disk()?)
}
