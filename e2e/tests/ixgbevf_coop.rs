//! ixgbevf with our patch (`guest/ixgbevf`) cooperates: its function of an 82599, which is the model of the silicon as L1's hardware, goes to another one under
//! its guest, and the guest to another QEMU and daemon and back, under TCP and UDP. Whatever the silicon does not allow is recorded.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{CoopDriver, Host};
use ioplane_e2e::coop::moves_inside_operations;
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::nics::Pings;
use ioplane_e2e::process::built;
use ioplane_e2e::sides::{moves, right, told};
use ioplane_e2e::silicon::{FUNCTIONS, NOTICED, Silicon};
use ioplane_e2e::travel::PORT;
use ioplane_e2e::{L2, PERIODIC, Version};
use serde_json::Value;
use std::path::Path;
use std::time::Instant;

/// Echoes that have to come between two moves.
const BETWEEN: u64 = 100;
/// Datagrams a second, and bytes of TCP a second each way.
const RATE: u32 = 300;
const STREAM: u32 = 65536;
/// Moves inside of operations.
const INSIDE: usize = 40;
const LOAD: &str = "insmod /folder/ixgbevf.ko";

fn sent(guest: &L2<'_>) -> Result<u64> {
    let said = guest.run("cat /sys/bus/pci/drivers/ixgbevf/*/net/*/statistics/tx_packets")?;
    said.trim().parse().with_context(|| said.clone())
}

/// One daemon: the other function takes the place of the guest's, again and again, while the guest runs.
fn changes_functions(silicon: &Silicon, module: &Path, news: &dyn Fn(&str)) -> Result<()> {
    let l1 = &silicon.l1;
    let daemon = l1.serve("nested", "")?;
    let [one, other] = FUNCTIONS;
    daemon.text(&format!("pci add nic0 --host {one} --mode cooperating"))?;
    let context = || silicon.said(&[&daemon]);
    // Two processors: two queues each way, and frames that are shared out to them.
    let args = format!("-smp 2 {}", daemon.guest_args(&["nic0"], 256)?);
    let guest = l1.debian_by(Version::Newer, "nested", &args, PERIODIC).with_context(context)?;
    news("the guest is up");
    // The original announces nothing: it is not moved.
    guest.raise_vf("ixgbevf", "modprobe ixgbevf").with_context(context)?;
    let why = daemon.refused(&format!("pci move nic0 --to {other}"))?;
    ensure!(why.contains("has not announced a page"), "{why}");
    guest.run("modprobe -r ixgbevf")?;
    std::fs::copy(module, guest.folder().join("ixgbevf.ko"))?;
    let context = || {
        format!(
            "{}\nthe guest:\n{}",
            silicon.said(&[&daemon]),
            guest.run("dmesg | tail -n 40").unwrap_or_default()
        )
    };
    guest.raise_vf("ixgbevf", LOAD).with_context(context)?;
    let got = guest.ping(PEER_IP, 50, 1000)?;
    ensure!(got == Pings { sent: 50, received: 50 }, "{got:?}");
    let queues = guest.run("ls -d /sys/bus/pci/drivers/ixgbevf/*/net/*/queues/rx-* | wc -l")?;
    ensure!(queues.trim() == "2", "{queues}");
    std::fs::copy(built("ioplane-stream")?, guest.folder().join("ioplane-stream"))?;
    guest.run(&format!(
        "cp /folder/ioplane-stream /tmp/; setsid /tmp/ioplane-stream answer {PORT} </dev/null >/tmp/answer 2>&1 &"
    ))?;
    let before = guest.run(NOTICED)?;
    let sent_before = (sent(&guest)?, silicon.is_unbroken()?);
    news("moves under traffic");
    let traffic = silicon.traffic(RATE, STREAM)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    for (number, to) in (1..).zip([other, one, other, one]) {
        let report = daemon.json(&format!("pci move nic0 --to {to} --deadline 20s")).with_context(context)?;
        eprintln!("{report}");
        ensure!(report["state_bytes"].as_u64().is_some_and(|bytes| bytes <= 64), "{report}");
        ensure!(report.get("complaint").is_none_or(Value::is_null), "{report}");
        ensure!(daemon.brought_back("nic0").with_context(context)? == number, "{report}");
        traffic.goes_on(BETWEEN).with_context(context)?;
    }
    let driven = traffic.end().with_context(context)?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    // What the driver has sent has left, once.
    let (sent, read) = (sent(&guest)?, silicon.is_unbroken()?);
    let left =
        |read: &[ioplane_e2e::silicon::Reading]| read.iter().map(|function| function.sent).sum::<u64>();
    let (sent, left) = (sent - sent_before.0, left(&read) - left(&sent_before.1));
    // It counts a frame when it cleans the ring, up to eight descriptors later.
    ensure!(
        left.abs_diff(sent) <= 8 && read[1].sent > 0,
        "the driver has sent {sent}, and {left} have left: {read:?}"
    );
    right(&driven, 4).with_context(context)?;
    let after = guest.run(NOTICED)?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    daemon.breaks_no_rule("nic0")?;
    news("moves inside of what the driver does");
    let rounds =
        moves_inside_operations(&guest, &daemon, FUNCTIONS, "ixgbevf", INSIDE).with_context(context)?;
    eprintln!("{INSIDE} moves in {rounds} rounds of operations");
    silicon.is_unbroken()?;
    guest.kill()?;
    daemon.text("pci remove nic0 --force")?;
    daemon.stop()
}

/// Two daemons, as two hosts have them: the guest moves there and back with its memory.
fn moves_between_daemons(silicon: &Silicon, module: &Path, news: &dyn Fn(&str)) -> Result<()> {
    let l1 = &silicon.l1;
    let [here, there] = silicon.sides("cooperating")?;
    let context = || silicon.said(&[&here.daemon, &there.daemon]);
    let first = l1.traveller("first", &here.args()?).with_context(context)?;
    std::fs::copy(module, first.folder().join("ixgbevf.ko"))?;
    first.raise_vf("ixgbevf", LOAD).and_then(|()| first.depart()).with_context(context)?;
    let before = l1.ask("first", NOTICED)?;
    news("to another daemon under traffic");
    let traffic = silicon.traffic(RATE, STREAM)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    let (second, out) = moves(l1, &here, first, ["first", "second"], &there).with_context(context)?;
    there.daemon.brought_back("nic0").with_context(context)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    news("and back");
    let (third, back) = moves(l1, &there, second, ["second", "third"], &here).with_context(context)?;
    here.daemon.brought_back("nic0").with_context(context)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    let driven = traffic.end().with_context(context)?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    told("vf82599_cooperating", &driven, &[&out, &back]);
    silicon.is_unbroken()?;
    right(&driven, 2).with_context(context)?;
    let after = l1.ask("third", NOTICED)?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    third.kill()
}

fn with_silicon(stage: impl FnOnce(&Silicon, &Path, &dyn Fn(&str)) -> Result<()>) -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let module = Host::prepare(&news)?.cooperating(CoopDriver::Ixgbevf, &news)?;
    let silicon = Silicon::boot(3072, &news)?;
    stage(&silicon, &module, &news)?;
    eprintln!("{:?}", silicon.is_unbroken()?);
    news("done");
    Ok(())
}

#[test]
fn a_changed_ixgbevf_goes_on_with_another_function() -> Result<()> {
    with_silicon(changes_functions)
}

#[test]
fn a_guest_with_a_changed_ixgbevf_goes_to_another_daemon_and_back() -> Result<()> {
    with_silicon(moves_between_daemons)
}
