//! Registers of a mediated card that a guest of stock QEMU reads without an exit: started by `ioplane run`, with 8139cp in the guest. Exits are
//! counted by L1's kernel, accesses by the daemon. And an NE2000, which has ports only, with clustering.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::l2::L2;
use ioplane_e2e::{Inner, L1, Nic, Version};
use std::time::Instant;

const NAME: &str = "shadowed";
const RESET: &str = "reset";
const PINGS: u32 = 50;
/// KVM_EXIT_MMIO.
const MMIO: u32 = 6;
/// Exits per ping that the page alone leaves, and how many rounds have a chance: an interrupt of its own for what was sent takes one or two writes
/// more, and in which pings there is one is chance.
const BY_THE_PAGE: f64 = 5.1;
const ROUNDS: usize = 6;
/// Exits per ping of an NE2000 that clustering leaves.
const BY_CLUSTERS: f64 = 20.0;
/// Of an NE2000 each access is a message, and without clustering an exit.
const PORT_PINGS: u32 = 10;
/// So many times as many until clustering has to have learnt where an NE2000 is accessed.
const LEARNING: u32 = 10;
const CARDS: [(Nic, &str); 2] = [(Nic::Rtl8139, "rtl"), (Nic::Ne2000, "ne")];
/// Has the card's registers elsewhere in memory: its BAR is written while no driver has it, and Linux finds the function anew. `$bar` is 20 bytes into
/// the configuration space; memory decoding is off meanwhile, so that nothing is mapped at half an address.
const MOVE: &str = "set -e; modprobe -r 8139cp
    for d in /sys/bus/pci/devices/*; do [ $(cat $d/vendor) = 0x10ec ] && [ $(cat $d/device) = 0x8139 ] && break; done
    before=$(sed -n 2p $d/resource); set -- $before
    perl -e '
        my ($file, $from) = @ARGV;
        open(my $config, \"+<\", $file) or die \"$file: $!\";
        binmode $config;
        sub put { sysseek($config, $_[0], 0); syswrite($config, $_[1]) == length($_[1]) or die \"config: $!\" }
        put(4, pack(\"v\", 0));
        put(20, pack(\"V\", hex($from) ^ 0x40000));
        put(4, pack(\"v\", 7));' $d/config $1
    echo 1 >$d/remove; echo 1 >/sys/bus/pci/rescan
    echo $before to $(sed -n 2p $d/resource)";

struct Pinged {
    /// Exits to QEMU for an access to a device's memory, of all devices. Ports are the NE2000's, which hears broadcasts as well.
    exits: f64,
    /// Register accesses that reached the daemon.
    accesses: f64,
}

/// Both per ping of 1,000 bytes.
fn ping(l1: &L1, guest: &L2<'_>, daemon: &Inner<'_>) -> Result<Pinged> {
    let accesses = || -> Result<u64> {
        daemon.json("pci show rtl")?["watch"]["accesses"].as_u64().context("accesses are counted")
    };
    let (before, exits) = (accesses()?, l1.count_user_exits()?);
    guest.ping_all(Nic::Rtl8139, PINGS, 1000)?;
    let exits = exits.read()?;
    let each = |count: u64| count as f64 / f64::from(PINGS);
    let pinged =
        Pinged { exits: each(*exits.0.get(&MMIO).unwrap_or(&0)), accesses: each(accesses()? - before) };
    eprintln!("{:.2} exits and {:.2} accesses per ping; {exits:?}", pinged.exits, pinged.accesses);
    Ok(pinged)
}

/// The writes of a ping exit, the reads do not: five of nine, and an interrupt of its own for what was sent brings one or two more of each.
fn reads_do_not_exit(pinged: &Pinged) -> Result<()> {
    let few = (3.0..=7.5).contains(&pinged.accesses) && pinged.exits <= pinged.accesses + 1.0;
    ensure!(few, "{} exits, {} accesses per ping", pinged.exits, pinged.accesses);
    Ok(())
}

/// The best of some rounds takes no more exits than the page is to leave. Clustering is off.
fn the_page_leaves_the_writes(l1: &L1, guest: &L2<'_>, daemon: &Inner<'_>) -> Result<()> {
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let pinged = ping(l1, guest, daemon)?;
        reads_do_not_exit(&pinged)?;
        best = best.min(pinged.exits);
        if best <= BY_THE_PAGE {
            return Ok(());
        }
    }
    anyhow::bail!("{best} exits per ping in the best of {ROUNDS} rounds, not {BY_THE_PAGE}")
}

/// Exits of a ping by the NE2000.
fn ping_by_ports(l1: &L1, guest: &L2<'_>) -> Result<f64> {
    guest.raise(Nic::Ne2000)?;
    let exits = l1.count_user_exits()?;
    guest.ping_all(Nic::Ne2000, PORT_PINGS, 1000)?;
    let exits = exits.read()?;
    let each = exits.accesses() as f64 / f64::from(PORT_PINGS);
    eprintln!("NE2000: {each:.2} exits per ping; {exits:?}");
    Ok(each)
}

/// Both ways in which the daemon says whether a page is used.
fn in_use(daemon: &Inner<'_>) -> Result<bool> {
    let said = daemon.json("pci show rtl")?["watch"]["shadow_page"].as_bool();
    let used = said.context("whether a page is used")?;
    let text = daemon.text("pci show rtl")?;
    ensure!(text.contains("shadow page       in use") == used, "a page is used: {used}, and yet:\n{text}");
    Ok(used)
}

fn with_the_page(l1: &L1, daemon: &Inner<'_>) -> Result<()> {
    let args = format!("{} -sandbox on", daemon.guest_args(&CARDS.map(|(_, name)| name), 256)?);
    let guest = l1.debian_after(&l1.interposed_patiently()?, Version::Newer, NAME, &args, "")?;
    let explain = |error: anyhow::Error| {
        error.context(format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said()))
    };
    ensure!(!in_use(daemon)?, "no driver has read a register");
    guest.raise(Nic::Rtl8139).map_err(explain)?;
    ensure!(in_use(daemon)?, "{}", daemon.text("pci show rtl")?);
    l1.clustering(&format!("off --vm {NAME}"))?;
    the_page_leaves_the_writes(l1, &guest, daemon)?;
    l1.clustering(&format!("on --vm {NAME}"))?;
    reads_do_not_exit(&ping(l1, &guest, daemon)?)?;
    // Clusters are learnt: the first pings exit as ever.
    let mut ports = f64::MAX;
    for _ in 0..LEARNING {
        ports = ping_by_ports(l1, &guest)?;
        if ports <= BY_CLUSTERS {
            break;
        }
    }
    ensure!(ports <= BY_CLUSTERS, "{ports} exits per ping of an NE2000 with clustering");
    eprintln!("{}", daemon.text("pci show rtl")?);

    let said = guest.run(MOVE).map_err(explain)?;
    let places: Vec<&str> = said.split_whitespace().collect();
    let [from, _, _, "to", to, ..] = places[..] else { anyhow::bail!("two resources: {said}") };
    ensure!(from != to, "the BAR has not moved: {said}");
    eprintln!("moved: {}", said.trim());
    guest.raise(Nic::Rtl8139).map_err(explain)?;
    ensure!(in_use(daemon)?, "{}", daemon.text("pci show rtl")?);
    l1.clustering(&format!("off --vm {NAME}"))?;
    reads_do_not_exit(&ping(l1, &guest, daemon)?)?;
    no_faults(daemon)?;
    guest.kill()
}

fn no_faults(daemon: &Inner<'_>) -> Result<()> {
    let watch = &daemon.json("pci show rtl")?["watch"];
    ensure!(watch["faults"] == serde_json::json!([]), "{watch:#}");
    Ok(())
}

/// A guest with two vCPUs, which take turns on L1's one processor. QEMU resets it while its driver is up: the page is away until the driver of the guest
/// that has booted again reads a register.
fn after_a_reset(l1: &L1, daemon: &Inner<'_>) -> Result<()> {
    let smp = "-smp 2 -cpu host,kvm-pv-tlb-flush=off -sandbox on";
    let args = format!("{} {smp}", daemon.guest_args(&[CARDS[0].1], 256)?);
    let guest = l1.debian_after(&l1.interposed()?, Version::Newer, RESET, &args, "")?;
    let explain = |error: anyhow::Error| {
        error.context(format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said()))
    };
    l1.clustering(&format!("off --vm {RESET}"))?;
    for boot in 0..2 {
        ensure!(!in_use(daemon)?, "boot {boot}: no driver has read a register");
        let said = guest.run("grep -c ^processor /proc/cpuinfo")?;
        ensure!(said.trim() == "2", "{said} processors");
        guest.raise(Nic::Rtl8139).map_err(explain)?;
        ensure!(in_use(daemon)?, "boot {boot}: {}", daemon.text("pci show rtl")?);
        the_page_leaves_the_writes(l1, &guest, daemon)?;
        no_faults(daemon)?;
        if boot == 0 {
            guest.reset().map_err(explain)?;
            eprintln!("booted again");
        }
    }
    guest.kill()
}

/// Nobody asks for the page, and every access exits.
fn without_the_library(l1: &L1, daemon: &Inner<'_>) -> Result<()> {
    let args = daemon.guest_args(&CARDS.map(|(_, name)| name), 256)?;
    let guest = l1.debian_by(Version::Newer, "trapped", &args, "")?;
    guest.raise(Nic::Rtl8139)?;
    let pinged = ping(l1, &guest, daemon)?;
    ensure!(!in_use(daemon)?);
    ensure!(pinged.exits > 7.5 && pinged.accesses > 7.5, "{} exits per ping", pinged.exits);
    let ports = ping_by_ports(l1, &guest)?;
    ensure!(ports > 200.0, "{ports} exits per ping of an NE2000");
    guest.kill()
}

#[test]
fn registers_are_read_without_exits_in_stock_qemu() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_nics(2048, &CARDS.map(|(nic, _)| nic), &news)?;
    let daemon = l1.serve("shadow", "")?;
    for (nic, name) in CARDS {
        daemon.text(&format!("pci add {name} --host {} --mode virtual", nic.address()))?;
    }
    news("with the page");
    with_the_page(&l1, &daemon)?;
    news("with two vCPUs and a reset");
    after_a_reset(&l1, &daemon)?;
    news("without");
    without_the_library(&l1, &daemon)?;
    for (_, name) in CARDS {
        daemon.text(&format!("pci remove {name} --force"))?;
    }
    daemon.stop()
}
