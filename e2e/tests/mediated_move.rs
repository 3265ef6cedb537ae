//! A guest with two mediated cards, which its stock drivers drive by wires for interrupts, goes from one QEMU and one daemon to others, onto other cards
//! of the same kinds, and back, under TCP, UDP and pings. Both hosts are in one L1, whose KVM runs the guest.
//!
//! ```text
//!   L1:  peer10 -- hub -- RTL8139 here, RTL8139 there        peer11 -- hub -- NE2000 here, NE2000 there
//! ```

use anyhow::{Context, Result, ensure};
use ioplane_e2e::sides::{Side, moves, nothing_of_the_guest_is_lost};
use ioplane_e2e::{L1, L2, Nic, Traffic};
use serde_json::json;
use std::time::Instant;

const CARDS: [Nic; 2] = [Nic::Rtl8139, Nic::Ne2000];
/// Echoes that have to come before and after a move.
const BETWEEN: u64 = 60;
/// Datagrams and bytes of TCP a second, each way. 8139cp gives its card 64 buffers: a translated guest that stands still for half a second loses what does
/// not fit, whether it moves or not. So nothing is asked of what the peer sends, but of what the guest does.
const RATE: u32 = 50;
const BYTES: u32 = 8192;

/// The NE2000 of the guest in this QEMU still sends and hears.
fn pings_by_ne2000(l1: &L1, qemu: &str) -> Result<()> {
    let ip = Nic::Ne2000.peer_ip();
    let said = l1.ask(qemu, &format!("/tmp/busybox ping -q -c 3 -W 30 {ip}; cat /proc/interrupts"))?;
    ensure!(said.contains("3 packets received"), "{said}");
    Ok(())
}

/// What its kernel says that would differ if a driver had noticed.
fn noticed(l1: &L1, qemu: &str) -> Result<String> {
    l1.ask(
        qemu,
        "cat /sys/class/net/eth*/carrier_changes /sys/class/net/eth*/statistics/tx_errors; \
         dmesg | grep -ciE 'NETDEV WATCHDOG|transmit queue|irq .*nobody|link (up|down)'; true",
    )
}

#[test]
fn a_guest_with_mediated_cards_moves_there_and_back_under_traffic() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_twins(2048, &CARDS, &news)?;
    let cards = vec![CARDS.map(Nic::address).to_vec(), CARDS.map(Nic::second_address).to_vec()];
    let [here, there] = Side::both(&l1, cards, "virtual")?;
    let said = |guest: Option<&L2<'_>>| {
        let qemu = guest.map(L2::said).unwrap_or_default();
        format!("QEMU said:\n{qemu}\nioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said())
    };
    let mut guest = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    for nic in CARDS {
        guest.raise(nic).with_context(|| said(Some(&guest)))?;
    }
    guest.depart()?;
    pings_by_ne2000(&l1, "first")?;
    let before = noticed(&l1, "first")?;
    news("moves under traffic");
    let traffic = Traffic::start(&l1, &Nic::Rtl8139.guest_ip(), RATE, BYTES)?;
    traffic.goes_on(BETWEEN)?;
    for (from, to, names) in [(&here, &there, ["first", "second"]), (&there, &here, ["second", "third"])] {
        let (next, report) = moves(&l1, from, guest, names, to).with_context(|| said(None))?;
        guest = next;
        let functions = report["functions"].as_array().map_or(0, Vec::len);
        ensure!(functions == CARDS.len() && report["functions"][1]["mode"] == "virtual", "{report:#}");
        traffic.goes_on(BETWEEN).with_context(|| {
            let kernel =
                l1.ask(names[1], "cat /proc/interrupts; dmesg | tail -n 20; ip -s link").unwrap_or_default();
            format!("{kernel}\n{}", said(Some(&guest)))
        })?;
        pings_by_ne2000(&l1, names[1]).with_context(|| said(Some(&guest)))?;
        news(&format!("{} is in {}", names[1], to.name));
    }
    let driven = traffic.end().with_context(|| said(Some(&guest)))?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    nothing_of_the_guest_is_lost(&driven)?;
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    for side in [&here, &there] {
        for name in ["nic0", "nic1"] {
            let watch = side.daemon.json(&format!("pci show {name}"))?["watch"].clone();
            ensure!(
                watch["faults"] == json!([]) && watch["denied"] == 0,
                "{name} of {}: {watch:#}",
                side.name
            );
        }
    }
    guest.kill()
}
