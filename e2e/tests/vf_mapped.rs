//! A virtual function of an 82576 whose registers are mapped into a stock guest by the library in stock QEMU (`--mapped`): at rest no packet costs a trapped
//! access; for a move all pages are trapped. QEMU's igb is the hardware, Debian's igbvf drives it. The stages are those of `vf_move` and `vf`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::nics::Pings;
use ioplane_e2e::sides::{
    Side, arrives, compares, last_words, noticed, right, start_traffic, told, trapped_per_echo, unseen,
};
use ioplane_e2e::{Inner, L1, L2, PERIODIC, Version};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Echoes that have to come between two moves, and that are counted.
const BETWEEN: u64 = 100;
const COUNTED: u64 = 300;
/// Pings of 1,000 bytes: counted, and while functions change.
const COUNTED_PINGS: u32 = 50;
const PINGS: u32 = 100;
const MOVES: usize = 2;
const GUEST: &str = "moved";
const QMP: &str = "/tmp/moved.qmp";
/// Trapped accesses per echo. With pages mapped they are those of igbvf's watchdog, which looks at page 0 every two seconds of the guest with ten accesses, however
/// slow the stage; without, each frame and each interrupt costs some.
const MAPPED: f64 = 0.5;
const TRAPPED: f64 = 1.0;
/// The same per ping, which takes longer; without mapped pages there are 4.7.
const MAPPED_PING: f64 = 2.0;
/// Pages 1 to 3.
const PAGES: u64 = 3;

#[test]
fn a_guest_with_mapped_registers_moves_there_and_back_under_traffic() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, there] = Side::both(&l1, cards, "migratable --mapped")?;
    let library = l1.interposed()?;
    let first = l1.traveller_by(&library, "first", &here.args()?)?;
    news("the guest is up");
    let said = || format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said());
    ensure!(here.daemon.mapped_pages("nic0")? == 0, "nobody drives it yet");
    first.raise_igbvf().and_then(|()| first.depart()).with_context(said)?;
    here.daemon.until_mapped("nic0", PAGES).with_context(|| first.said())?;
    let before = noticed(&l1, "first")?;
    let unseen_before = unseen(&l1, &first, "first")?;
    let traffic = start_traffic(&l1)?;
    let words = |qemu: &str| format!("{}\n{}", last_words(&l1, qemu, [&here, &there]), said());
    traffic.goes_on(BETWEEN).with_context(|| words("first"))?;
    let at_first = trapped_per_echo(&here.daemon, &traffic, COUNTED)?;
    ensure!(here.daemon.mapped_pages("nic0")? == PAGES, "they stay mapped");

    news("to a QEMU without the library");
    let waits = there.waits(&l1, "second")?;
    let (second, report) = arrives(&here, first, ["first", "second"], &there, waits).with_context(said)?;
    traffic.goes_on(BETWEEN).with_context(|| words("second"))?;
    let without = trapped_per_echo(&there.daemon, &traffic, COUNTED)?;
    ensure!(there.daemon.mapped_pages("nic0")? == 0, "nobody maps them");

    news("back, to one with it");
    let waits = l1.awaits_traveller_by(&library, "third", &here.args()?, &here.incoming("third"))?;
    let (third, back) = arrives(&there, second, ["second", "third"], &here, waits).with_context(said)?;
    here.daemon.until_mapped("nic0", PAGES).with_context(|| third.said())?;
    traffic.goes_on(BETWEEN).with_context(|| words("third"))?;
    let after_moves = trapped_per_echo(&here.daemon, &traffic, COUNTED)?;
    let driven = traffic.end().with_context(|| words("third"))?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    told("vf82576", &driven, &[&report, &back]);
    let figures = json!({ "mapped": at_first, "trapped": without, "mapped_after_moves": after_moves });
    eprintln!("trapped accesses per echo: {figures}");
    ensure!(at_first < MAPPED && after_moves < MAPPED && without > TRAPPED, "{figures}");
    right(&driven, 2).with_context(|| words("third"))?;
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    let unseen_after = unseen(&l1, &third, "third")?;
    ensure!(unseen_before == unseen_after, "accepted and not seen: {unseen_before}, then {unseen_after}");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    news("memories are compared");
    here.daemon.until_mapped("nic0", PAGES)?;
    compares(&l1, (&third, "third"), &here, "compared", &there, || start_traffic(&l1))?;
    third.kill()?;
    news("done");
    Ok(())
}

/// Trapped accesses per ping.
fn pinged(guest: &L2<'_>, daemon: &Inner<'_>) -> Result<f64> {
    let before = daemon.accesses("nic0")?;
    let got = guest.ping(PEER_IP, COUNTED_PINGS, 1000)?;
    ensure!(got == Pings { sent: COUNTED_PINGS, received: COUNTED_PINGS }, "{got:?}");
    Ok((daemon.accesses("nic0")? - before) as f64 / f64::from(COUNTED_PINGS))
}

fn moved(daemon: &Inner<'_>, to: &str) -> Result<Value> {
    let report = daemon.json(&format!("pci move nic0 --to {to} --qmp {QMP} --deadline 30s"))?;
    eprintln!("moved: {report}");
    ensure!(report.get("complaint").is_none(), "{report}");
    Ok(report)
}

#[test]
fn another_function_takes_the_place_of_one_whose_registers_are_mapped() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, functions) = L1::boot_with_igb(1536, 2, &news)?;
    let daemon = l1.serve("migrating", "")?;
    daemon.text(&format!("pci add nic0 --host {} --mode migratable --mapped", functions[0]))?;
    let args = daemon.guest_args(&["nic0"], 256)?;
    let library = l1.interposed()?;
    let guest = l1.debian_after(&library, Version::Newer, GUEST, &format!("{args} -sandbox on"), PERIODIC)?;
    news("the guest is up");
    let context = || format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said());
    guest.raise_igbvf().with_context(context)?;
    daemon.until_mapped("nic0", PAGES).with_context(context)?;
    let mut costs = vec![pinged(&guest, &daemon).with_context(context)?];
    news("moves under traffic");
    let job = guest.start(&format!("exec /folder/busybox ping -i 0.2 -s 1000 -c {PINGS} -W 30 {PEER_IP}"))?;
    for at in 0..MOVES {
        std::thread::sleep(Duration::from_secs(1));
        moved(&daemon, &functions[(at + 1) % functions.len()]).with_context(context)?;
        daemon.until_mapped("nic0", PAGES).with_context(context)?;
    }
    let said = guest.finish(job, "pings")?;
    let got = Pings::of(&said)?;
    ensure!(!said.contains("DUP") && got.sent == PINGS && got.received + 2 >= PINGS, "{said}\n{}", context());
    costs.push(pinged(&guest, &daemon).with_context(context)?);
    eprintln!("trapped accesses per ping: {costs:?}");
    ensure!(costs.iter().all(|cost| *cost < MAPPED_PING), "{costs:?}");
    daemon.breaks_no_rule("nic0")?;
    news("the guest resets its function, and begins anew");
    guest.run("set -e; modprobe -r igbvf; echo 1 >/sys/bus/pci/devices/$(basename $(dirname $(grep -l 0x10ca /sys/bus/pci/devices/*/device)))/reset; modprobe igbvf")?;
    guest.raise_igbvf().with_context(context)?;
    daemon.until_mapped("nic0", PAGES).with_context(context)?;
    let again = pinged(&guest, &daemon).with_context(context)?;
    ensure!(again < MAPPED_PING, "{again}");
    news("given back under a guest that has pages mapped");
    daemon.text("pci remove nic0 --force")?;
    for address in &functions {
        let driver = format!("basename $(readlink /sys/bus/pci/devices/{address}/driver || echo none)");
        let driver = l1.run(&driver, MINUTE)?;
        ensure!(driver.trim() == "none", "{address} is driven by {driver}");
    }
    guest.kill()?;
    daemon.stop()?;
    news("done");
    Ok(())
}
