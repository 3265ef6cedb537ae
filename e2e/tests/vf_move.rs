//! A stock guest with a stock igbvf on a virtual function of an 82576 goes from one QEMU and one daemon to others, onto a virtual function of
//! another card, and back, while it runs under TCP and UDP. QEMU's igb is the hardware; all of it is in one L1.
//!
//! ```text
//!   L1:  peer14 -- hub -- card A: virtual function <- daemon "here"  <- QEMU "first"
//!                    `--- card B: virtual function <- daemon "there" <- QEMU "second"     and back to a QEMU "third" on card A
//! ```

use anyhow::{Context, Result, ensure};
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::sides::{
    Side, arrives, compares, last_words, moves, noticed, right, start_traffic, told, unseen,
};
use ioplane_e2e::{L1, L2};
use serde_json::{Value, json};
use std::time::Instant;

/// Addresses of the functions, but for their last digit.
const ADDRESSES: &str = "52:54:00:00:14:0";
/// Echoes that have to come between two moves.
const BETWEEN: u64 = 100;

#[test]
fn a_stock_guest_with_a_virtual_function_moves_there_and_back_under_traffic() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, there] = Side::both(&l1, cards, "migratable")?;
    here.administer(&l1, &[&format!("mac {ADDRESSES}a"), "spoofchk off", "trust on", "max_tx_rate 800"])?;
    there.administer(&l1, &[&format!("mac {ADDRESSES}b")])?;
    let guests = json!([format!("{ADDRESSES}a"), false, true, 800, null, null]);
    let own = json!([format!("{ADDRESSES}b"), true, false, 0, null, null]);
    let administered = |side: &Side<'_>, expected: &Value, when: &str| -> Result<()> {
        let now = side.administered(&l1)?;
        ensure!(now == *expected, "{} {when}: {now}, not {expected}", side.name);
        Ok(())
    };
    administered(&there, &own, "before")?;
    let first = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    let said = |here: &Side<'_>, there: &Side<'_>| {
        format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said())
    };
    first.raise_igbvf().and_then(|()| first.depart()).with_context(|| said(&here, &there))?;
    let before = noticed(&l1, "first")?;
    let unseen_before = unseen(&l1, &first, "first")?;
    news("moves under traffic");
    let traffic = start_traffic(&l1)?;
    traffic.goes_on(BETWEEN)?;
    let waits = l1.awaits_traveller("second", &there.args()?)?;
    refused_first(&l1, &here, &there)?;
    administered(&there, &own, "after a move that was refused")?;
    let (second, there_report) =
        arrives(&here, first, ["first", "second"], &there, waits).with_context(|| said(&here, &there))?;
    administered(&there, &guests, "has the guest")?;
    // The address is the other card's: nobody here is to send to this one.
    administered(&here, &json!(["00:00:00:00:00:00", false, true, 800, null, null]), "was left")?;
    traffic.goes_on(BETWEEN).with_context(|| {
        format!("{}\n{}", last_words(&l1, "second", [&here, &there]), said(&here, &there))
    })?;
    news("and back");
    let (third, back_report) =
        moves(&l1, &there, second, ["second", "third"], &here).with_context(|| said(&here, &there))?;
    administered(&here, &guests, "has the guest again")?;
    administered(&there, &own, "was left")?;
    traffic
        .goes_on(BETWEEN)
        .with_context(|| format!("{}\n{}", last_words(&l1, "third", [&here, &there]), said(&here, &there)))?;
    let driven = traffic
        .end()
        .with_context(|| format!("{}\n{}", last_words(&l1, "third", [&here, &there]), said(&here, &there)))?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    told("vf82576", &driven, &[&there_report, &back_report]);
    for report in [&there_report, &back_report] {
        let [said, ahead] =
            ["replay_messages", "messages_ahead"].map(|field| report["functions"][0][field].as_u64());
        // The address goes with the function's settings; one message tells whether the physical function listens.
        ensure!(
            said == Some(1) && ahead >= Some(3),
            "the stop says {said:?} messages, {ahead:?} were said ahead: {report}"
        );
    }
    right(&driven, 2).with_context(|| last_words(&l1, "third", [&here, &there]))?;
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    let unseen_after = unseen(&l1, &third, "third")?;
    ensure!(
        unseen_before == unseen_after,
        "frames accepted and not seen: {unseen_before}, then {unseen_after}"
    );
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    news("a move while the interface is down");
    let fourth = while_down(&l1, &here, third, &there).with_context(|| said(&here, &there))?;
    news("memories are compared");
    compares(&l1, (&fourth, "fourth"), &there, "compared", &here, || start_traffic(&l1))?;
    fourth.kill()?;
    news("done");
    Ok(())
}

/// What the administrator there does not allow is found before anything stops.
fn refused_first(l1: &L1, here: &Side<'_>, there: &Side<'_>) -> Result<()> {
    there.administer(l1, &["max_tx_rate 100"])?;
    let refused = here.daemon.refused(&here.command(there, "first", "second"))?;
    let typed = format!("`ip link set {} vf 0 max_tx_rate 800`", there.physical);
    ensure!(refused.contains(&typed) && refused.contains("--adopt rate"), "{refused}");
    there.administer(l1, &["max_tx_rate 0"])?;
    ensure!(!here.daemon.said().contains("stands still"), "{}", here.daemon.said());
    Ok(())
}

/// The driver has given its interrupts back, so all vectors are masked, with nothing in their entries; QEMU has kept them wired.
fn while_down<'a>(l1: &'a L1, here: &Side<'_>, source: L2<'a>, there: &Side<'_>) -> Result<L2<'a>> {
    let interface = "/tmp/busybox ip link set $(ls /sys/bus/pci/drivers/igbvf/*/net)";
    l1.ask("third", &format!("{interface} down"))?;
    // Nobody at the other end of the cable is in that VLAN: it is taken off again before anything is sent.
    here.administer(l1, &["vlan 5 qos 3"])?;
    let (guest, _) = moves(l1, here, source, ["third", "fourth"], there)?;
    let now = there.administered(l1)?;
    ensure!(now == json!([format!("{ADDRESSES}a"), false, true, 800, 5, 3]), "{now}");
    let shown = there.daemon.json("pci show nic0")?["physical"].clone();
    let (settings, own) = (&shown["settings"], &shown["own"]);
    ensure!(settings["vlan"]["id"] == 5 && own["vlan"] == json!(null) && own["trust"] == false, "{shown:#}");
    for side in [here, there] {
        side.administer(l1, &["vlan 0"])?;
    }
    let ping = format!("/tmp/busybox ping -q -c 1 -W 5 {PEER_IP} >/dev/null");
    l1.ask(
        "fourth",
        &format!("{interface} up; for try in $(seq 10); do {ping} && break; done; {ping} && {ping}"),
    )?;
    Ok(guest)
}
