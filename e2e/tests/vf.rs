//! A virtual function of an 82576 in a stock guest: QEMU's igb is the hardware, Debian's igb has the physical function, Debian's igbvf the
//! virtual one, in a guest of L1. Another virtual function takes its place under traffic, and nobody in the guest notices.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::l2::L2;
use ioplane_e2e::nics::Pings;
use ioplane_e2e::{Inner, L1, PERIODIC, Version};
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Its monitor is named after it.
const GUEST: &str = "moved";
const QMP: &str = "/tmp/moved.qmp";
/// Pings of 1,000 bytes that are under way while functions change, and how often they do. On a slow machine a move and the commands around it
/// take some seconds.
const PINGS: u32 = 200;
const MOVES: u32 = 4;

/// What the guest's kernel and interface say that would differ if the driver had noticed: changes of the link, resets, complaints.
fn noticed(guest: &L2<'_>) -> Result<String> {
    guest.run(
        "cd /sys/bus/pci/drivers/igbvf/*/net/*; cat carrier_changes statistics/tx_errors statistics/tx_dropped statistics/rx_errors
         dmesg | grep -ciE 'igbvf.*(reset|hang|link is)|NETDEV WATCHDOG|transmit queue|DMAR|AER:' || true",
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

fn moved(daemon: &Inner<'_>, to: &str) -> Result<Value> {
    let report = daemon.json(&format!("pci move nic0 --to {to} --qmp {QMP} --deadline 30s"))?;
    eprintln!("moved: {report}");
    let end = Instant::now() + MINUTE;
    let shown = loop {
        let shown = daemon.json("pci show nic0")?;
        if shown["state"] != "busy" || Instant::now() > end {
            break shown;
        }
    };
    ensure!(shown["host"] == to && shown["mode"] == "migratable" && shown["connected"] == true, "{shown:#}");
    ensure!(report["state_bytes"].as_u64().is_some_and(|bytes| bytes <= 1024), "{report}");
    ensure!(report.get("complaint").is_none(), "{report}");
    Ok(report)
}

/// The functions change while the guest pings: what is lost is what was on its way in that moment, and nothing comes twice.
fn moves_under_traffic(guest: &L2<'_>, daemon: &Inner<'_>, functions: &[String]) -> Result<()> {
    let job = guest.start(&format!("exec /folder/busybox ping -i 0.2 -s 1000 -c {PINGS} -W 30 {PEER_IP}"))?;
    let output = guest.folder().join(format!("{job}.out"));
    let so_far = || replies(&std::fs::read_to_string(&output).unwrap_or_default()).len();
    for at in 0..MOVES as usize {
        // Some replies since the last one, so that each function has carried traffic.
        let (before, end) = (so_far(), Instant::now() + 2 * MINUTE);
        while so_far() < before + 3 {
            ensure!(Instant::now() < end, "no replies come any more, after {at} moves: {}", daemon.said());
            std::thread::sleep(Duration::from_millis(50));
        }
        moved(daemon, &functions[(at + 1) % functions.len()])?;
    }
    guest.wait_for(&format!("{job}.status"), 4 * MINUTE)?;
    let said = std::fs::read_to_string(&output)?;
    let got = Pings::of(&said)?;
    let numbers = replies(&said);
    let once = numbers.windows(2).all(|pair| pair[0] < pair[1]);
    eprintln!("{got:?} over {MOVES} moves, each once and in order: {once}");
    ensure!(once && !said.contains("DUP"), "a reply came twice, or late:\n{said}");
    ensure!(got.sent == PINGS && got.received + MOVES >= got.sent, "{said}\n{}", daemon.said());
    Ok(())
}

fn refused(daemon: &Inner<'_>, functions: &[String]) -> Result<()> {
    let [here, other] = functions else { anyhow::bail!("two functions") };
    let refuses = |words: &str, why: &str| -> Result<()> {
        let said = daemon.refused(words)?;
        ensure!(said.contains(why), "{words}: {said}");
        Ok(())
    };
    refuses("pci save nic0 /tmp/nic0.state", "past the daemon")?;
    refuses(&format!("pci move nic0 --to {here} --qmp {QMP}"), "already")?;
    refuses(&format!("pci move nic0 --to 0000:01:00.0 --qmp {QMP}"), "is not a virtual function")?;
    refuses(&format!("pci move nic0 --to {other} --qmp /tmp/nobody.qmp"), "the monitor at")?;
    Ok(())
}

#[test]
fn another_function_takes_the_place_of_one_that_a_stock_guest_drives() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, functions) = L1::boot_with_igb(1536, 2, &news)?;
    let daemon = l1.serve("migrating", "")?;
    daemon.text(&format!("pci add nic0 --host {} --mode migratable", functions[0]))?;
    let args = daemon.guest_args(&["nic0"], 256)?;
    let guest = l1.debian_by(Version::Newer, GUEST, &args, PERIODIC)?;
    news("the guest is up");
    let context = || format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said());
    guest.raise_igbvf().and_then(|()| pinged(&guest, 50)).with_context(context)?;
    let before = noticed(&guest)?;
    news("refusals");
    refused(&daemon, &functions)?;
    news("moves under traffic");
    moves_under_traffic(&guest, &daemon, &functions).with_context(context)?;
    pinged(&guest, 50).with_context(context)?;
    let after = noticed(&guest)?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    daemon.breaks_no_rule("nic0")?;
    news("given back");
    guest.kill()?;
    daemon.text("pci remove nic0 --force")?;
    for address in &functions {
        let driver = format!("basename $(readlink /sys/bus/pci/devices/{address}/driver || echo none)");
        let driver = l1.run(&driver, MINUTE)?;
        ensure!(driver.trim() == "none", "{address} is driven by {driver}");
    }
    daemon.stop()?;
    news("done");
    Ok(())
}
