//! A driver that cooperates (CompSC): Debian's igbvf with our patch, in a guest of L1, on a virtual function of QEMU's igb. Its function goes
//! to another one under traffic, while the guest runs; nothing on our side knows what the function is.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{CoopDriver, Host};
use ioplane_e2e::coop::{LOAD_IGBVF, STATISTICS, moves_inside_operations};
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::l2::L2;
use ioplane_e2e::nics::Pings;
use ioplane_e2e::{Inner, L1, PERIODIC, Version};
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const GUEST: &str = "cooperates";
/// Pings that are under way while functions change, and how often they do.
const PINGS: u32 = 150;
const MOVES: u32 = 4;
/// Moves inside of operations, at night.
const INSIDE: &str = "IOPLANE_MOVES_INSIDE";

/// What the guest's kernel and interface say that would differ if the link had changed: carrier, errors, complaints.
fn noticed(guest: &L2<'_>) -> Result<String> {
    guest.run(
        "cd /sys/bus/pci/drivers/igbvf/*/net/*; cat carrier_changes statistics/tx_errors statistics/rx_errors
         dmesg | grep -ciE 'igbvf.*(hang|link is down|not brought back|refuse)|NETDEV WATCHDOG|transmit queue|DMAR|AER:|Call Trace|BUG' || true",
    )
}

fn pinged(guest: &L2<'_>, count: u32) -> Result<()> {
    let got = guest.ping(PEER_IP, count, 1000)?;
    ensure!(got == Pings { sent: count, received: count }, "{got:?}");
    Ok(())
}

/// Numbers of the replies that came, in order.
fn replies(said: &str) -> Vec<u32> {
    let number = |line: &str| line.split_once("seq=")?.1.split_whitespace().next()?.parse().ok();
    said.lines().filter_map(number).collect()
}

fn shown(daemon: &Inner<'_>) -> Result<Value> {
    let end = Instant::now() + MINUTE;
    loop {
        let shown = daemon.json("pci show nic0")?;
        if shown["state"] != "busy" || Instant::now() > end {
            return Ok(shown);
        }
    }
}

struct Moves<'a> {
    daemon: &'a Inner<'a>,
    functions: &'a [String],
    done: u32,
}

impl Moves<'_> {
    /// To the other function, while the guest runs; and until its driver has brought that one back.
    fn one(&mut self) -> Result<()> {
        let to = &self.functions[(self.done as usize + 1) % self.functions.len()];
        let report = self.daemon.json(&format!("pci move nic0 --to {to} --deadline 20s"))?;
        eprintln!("moved: {report}");
        self.done += 1;
        ensure!(report["state_bytes"].as_u64().is_some_and(|bytes| bytes <= 64), "{report}");
        ensure!(report.get("complaint").is_none_or(Value::is_null), "{report}");
        ensure!(self.daemon.brought_back("nic0")? == u64::from(self.done), "{report}");
        let shown = self.daemon.json("pci show nic0")?;
        ensure!(shown["host"] == **to, "{shown:#}");
        Ok(())
    }
}

fn under_pings(guest: &L2<'_>, moves: &mut Moves<'_>) -> Result<()> {
    let job = guest.start(&format!("exec /folder/busybox ping -i 0.2 -s 1000 -c {PINGS} -W 30 {PEER_IP}"))?;
    let output = guest.folder().join(format!("{job}.out"));
    let so_far = || replies(&std::fs::read_to_string(&output).unwrap_or_default()).len();
    for at in 0..MOVES {
        // Some replies since the last one, so that each function has carried traffic.
        let (before, end) = (so_far(), Instant::now() + 2 * MINUTE);
        while so_far() < before + 3 {
            ensure!(Instant::now() < end, "no replies come any more, after {at} moves");
            std::thread::sleep(Duration::from_millis(50));
        }
        moves.one()?;
    }
    guest.wait_for(&format!("{job}.status"), 4 * MINUTE)?;
    let said = std::fs::read_to_string(&output)?;
    let (got, numbers) = (Pings::of(&said)?, replies(&said));
    let once = numbers.windows(2).all(|pair| pair[0] < pair[1]);
    eprintln!("{got:?} over {MOVES} moves, each once and in order: {once}");
    ensure!(once && !said.contains("DUP"), "a reply came twice, or late:\n{said}");
    ensure!(got.sent == PINGS && got.received + MOVES >= got.sent, "{said}");
    Ok(())
}

fn stats(guest: &L2<'_>) -> Result<Vec<u64>> {
    let said = guest.run(
        "name=$(ls /sys/bus/pci/drivers/igbvf/*/net); sleep 3; perl /folder/ethtool.pl $name 1 | head -n 1",
    )?;
    said.split_whitespace().map(|word| word.parse().with_context(|| said.clone())).collect()
}

/// The original driver announces nothing: it is not moved, and nothing has happened to it.
fn the_original_is_refused(guest: &L2<'_>, daemon: &Inner<'_>, other: &str) -> Result<()> {
    guest.raise_igbvf()?;
    pinged(guest, 20)?;
    let before = noticed(guest)?;
    let shown = shown(daemon)?;
    ensure!(shown["cooperation"]["announced"] == false, "{shown:#}");
    let said = daemon.refused(&format!("pci move nic0 --to {other}"))?;
    ensure!(said.contains("has not announced a page"), "{said}");
    pinged(guest, 20)?;
    ensure!(noticed(guest)? == before, "it has noticed something");
    guest.run("modprobe -r igbvf").map(drop)
}

#[test]
fn a_driver_that_cooperates_goes_on_with_another_function() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let module = Host::prepare(&news)?.cooperating(CoopDriver::Igbvf, &news)?;
    let (l1, functions) = L1::boot_with_igb(1536, 2, &news)?;
    let daemon = l1.serve("cooperating", "")?;
    daemon.text(&format!("pci add nic0 --host {} --mode cooperating", functions[0]))?;
    let args = daemon.guest_args(&["nic0"], 256)?;
    let guest = l1.debian_by(Version::Newer, GUEST, &args, PERIODIC)?;
    news("the guest is up");
    let context = || {
        let kernel = guest.run("dmesg | tail -n 40").unwrap_or_default();
        format!("QEMU said:\n{}\nioplane said:\n{}\nthe guest:\n{kernel}", guest.said(), daemon.said())
    };
    std::fs::write(guest.folder().join("ethtool.pl"), STATISTICS)?;
    std::fs::copy(module, guest.folder().join("igbvf.ko"))?;
    the_original_is_refused(&guest, &daemon, &functions[1]).with_context(context)?;
    news("the driver that cooperates");
    guest.run(LOAD_IGBVF).with_context(context)?;
    guest.raise_igbvf().and_then(|()| pinged(&guest, 50)).with_context(context)?;
    let mut moves = Moves { daemon: &daemon, functions: &functions, done: 0 };
    let (before, counted) = (noticed(&guest)?, stats(&guest)?);
    news("moves under pings");
    under_pings(&guest, &mut moves).with_context(context)?;
    pinged(&guest, 50).with_context(context)?;
    let (after, now) = (noticed(&guest)?, stats(&guest)?);
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}\n{}", context());
    eprintln!("the driver's counters: {counted:?}, then {now:?}");
    let more = |at: usize| now[at].wrapping_sub(counted[at]);
    ensure!(
        (100..100_000).contains(&more(0)) && (100..100_000).contains(&more(1)),
        "counters fell, or stand still"
    );
    let inside = std::env::var(INSIDE).ok().map(|count| count.parse()).transpose().context(INSIDE)?;
    if let Some(count) = inside {
        news("moves inside of what the driver does");
        let both = [functions[0].as_str(), functions[1].as_str()];
        let rounds = moves_inside_operations(&guest, &daemon, both, "igbvf", count).with_context(context)?;
        eprintln!("{count} moves in {rounds} rounds of operations");
    }
    guest.kill()?;
    daemon.text("pci remove nic0 --force")?;
    daemon.stop()?;
    news("done");
    Ok(())
}
