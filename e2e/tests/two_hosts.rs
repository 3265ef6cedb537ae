//! A stock guest with a stock igbvf on a virtual function of an 82576 goes from one host to another, and back, while it runs under TCP and UDP. The hosts
//! have a kernel, a card and an identity each; the peer and its clock are on this machine. Then moves that cannot come about.
//!
//! ```text
//!   host-a: card: virtual function <- daemon "here"  <- QEMU "first"     and back to "third"
//!               |                        `--TLS, by certificates--.
//!             a switch that learns -- the peer, here               \
//!               |                                                   |
//!   host-b: card: virtual function <- daemon "there" <- QEMU "second"
//! ```

use anyhow::{Context, Result, ensure};
use ioplane_e2e::lan::Lan;
use ioplane_e2e::sides::{Side, compares, last_words, moves, noticed, right, told, unseen};
use ioplane_e2e::{L1, L2, Traffic};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// MiB of each host.
const MEMORY: u64 = 2048;
/// Address that the administrator of host-a has set for the function there.
const MAC: &str = "52:54:00:00:14:0a";
/// Echoes that have to come before and after a move.
const BETWEEN: u64 = 100;
/// Bytes of memory a second, so that a move can be met on its way.
const SLOWLY: u64 = 8 << 20;

/// Both sides, with the host of each.
struct Ends<'a> {
    lan: &'a Lan,
    here: Side<'a>,
    there: Side<'a>,
}

impl<'a> Ends<'a> {
    fn said(&self) -> String {
        format!("ioplane said:\n{}\n{}", self.here.daemon.said(), self.there.daemon.said())
    }

    /// What the guest in this QEMU and both daemons say when something has gone wrong.
    fn last_words(&self, l1: &L1, qemu: &str) -> String {
        format!("{}\n{}", last_words(l1, qemu, [&self.here, &self.there]), self.said())
    }

    /// Moves the guest under traffic; the switch learns where it is by what its card there announces, before the guest sends anything.
    fn travel(
        &self,
        (from, source, to): (usize, L2<'a>, usize),
        names: [&str; 2],
        traffic: &Traffic<'_>,
    ) -> Result<(L2<'a>, Value)> {
        let sides = [&self.here, &self.there];
        let hosts = &self.lan.hosts;
        let known = |host: usize| {
            Ok::<_, anyhow::Error>(self.lan.behind(MAC)? == Some(ioplane_e2e::hosts::NAMES[host]))
        };
        ensure!(known(from)?, "the switch has it behind {:?}", self.lan.behind(MAC)?);
        let frame = self.lan.first_frame(to, MAC)?;
        let moved = moves(&hosts[to], sides[from], source, names, sides[to]);
        let (guest, report) = moved.with_context(|| self.said())?;
        let frame = frame.seen()?;
        ensure!(frame.contains("Reverse ARP") || frame.contains("RARP"), "first it sends {frame}");
        ensure!(known(to)?, "the switch has it behind {:?}", self.lan.behind(MAC)?);
        ensure!(sides[to].expected()? == json!([]), "it was expected once");
        traffic.goes_on(BETWEEN).with_context(|| self.last_words(&hosts[to], names[1]))?;
        Ok((guest, report))
    }
}

#[test]
fn a_stock_guest_with_a_virtual_function_moves_to_another_host_and_back() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let lan = Lan::boot(MEMORY, &news)?;
    let [here, there] = lan.sides("migratable")?;
    let ends = Ends { lan: &lan, here, there };
    let Ends { here, there, .. } = &ends;
    let [a, b] = &lan.hosts;
    here.administer(a, &[&format!("mac {MAC}"), "trust on"])?;
    news("both daemons know each other");
    let first = a.traveller("first", &here.args()?)?;
    first.raise_igbvf().and_then(|()| first.depart()).with_context(|| ends.said())?;
    news("the guest is up");
    let before = noticed(a, "first")?;
    let unseen_before = unseen(a, &first, "first")?;
    let traffic = lan.traffic()?;
    traffic.goes_on(BETWEEN).with_context(|| ends.last_words(a, "first"))?;
    news("moves that are refused");
    refused(b, here, there)?;
    traffic.goes_on(BETWEEN).with_context(|| ends.last_words(a, "first"))?;
    news("to the other host");
    let (second, out) = ends.travel((0, first, 1), ["first", "second"], &traffic)?;
    let settings = there.administered(b)?;
    ensure!(settings[0] == MAC && settings[2] == true, "{settings}");
    news("and back");
    let (third, back) = ends.travel((1, second, 0), ["second", "third"], &traffic)?;
    let driven = traffic.end().with_context(|| ends.last_words(a, "third"))?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    told("vf82576", &driven, &[&out, &back]);
    right(&driven, 2).with_context(|| ends.last_words(a, "third"))?;
    let after = noticed(a, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    let unseen_after = unseen(a, &third, "third")?;
    ensure!(
        unseen_before == unseen_after,
        "frames accepted and not seen: {unseen_before}, then {unseen_after}"
    );
    news("memories of both hosts are compared");
    compares(b, (&third, "third"), here, "compared", there, || lan.traffic())
        .with_context(|| ends.last_words(a, "third"))?;
    news("the network between them is cut");
    let traffic = lan.traffic()?;
    for when in ["active", "pre-switchover"] {
        cut(&ends, &third, "third", when, &traffic).with_context(|| format!("{when}: {}", ends.said()))?;
    }
    let driven = traffic.end().with_context(|| ends.last_words(a, "third"))?;
    right(&driven, 1)?;
    for side in [here, there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    third.kill()?;
    news("done");
    Ok(())
}

/// The other host lacks the function, or what it needs: that is found before anything stops.
fn refused(b: &L1, here: &Side<'_>, there: &Side<'_>) -> Result<()> {
    let expect = |qemu: &str, words: &str| -> Result<()> {
        there.expects(here, qemu)?;
        let said = here.daemon.refused(&here.command(there, "first", qemu))?;
        ensure!(said.contains(words), "{said}");
        there.daemon.text("move unexpect web").map(drop)
    };
    // A QEMU without one: none was free for it.
    let without = b.awaits_traveller_at("without", "-m 256 -machine q35", &there.incoming("without"))?;
    expect("without", "the other host has no PCI function nic0")?;
    without.kill()?;
    let waits = there.waits(b, "linkless")?;
    there.port(b, false)?;
    expect("linkless", &format!("{} is down", there.physical))?;
    there.port(b, true)?;
    // It is not expected any more.
    let said = here.daemon.refused(&here.command(there, "first", "linkless"))?;
    ensure!(said.contains("only while a VM is expected"), "{said}");
    waits.kill()?;
    ensure!(!here.daemon.said().contains("stands still"), "{}", here.daemon.said());
    Ok(())
}

/// The cable between the hosts is pulled while memory is copied, or when the guest has stopped for the switch-over. It goes on here, and does not run
/// there.
fn cut(ends: &Ends<'_>, guest: &L2<'_>, name: &str, when: &str, traffic: &Traffic<'_>) -> Result<()> {
    let Ends { lan, here, there } = ends;
    let [a, b] = &lan.hosts;
    traffic.goes_on(BETWEEN)?;
    let qemu = format!("cut-{when}");
    let waits = there.waits(b, &qemu)?;
    there.expects(here, &qemu)?;
    guest.qmp("migrate-set-parameters", &json!({ "max-bandwidth": SLOWLY }))?;
    let moving = here.daemon.start(&here.command(there, name, &qemu))?;
    let until = |state: &str| -> Result<()> {
        let end = Instant::now() + 3 * MINUTE;
        while a.migration_of(name)? != state {
            ensure!(Instant::now() < end && !moving.has_ended(), "not {state}: {}", moving.output());
        }
        Ok(())
    };
    until("active")?;
    if when != "active" {
        moving.signal("STOP")?;
        until(when)?;
    }
    lan.cable(1, false)?;
    moving.signal("CONT")?;
    let cut = Instant::now();
    let taken_back = || there.daemon.said().matches("was reset: the guest whose words").count();
    let before = taken_back();
    let ended = moving.wait(3 * MINUTE)?;
    eprintln!("cut, {when}: {:.1} s later: {}", cut.elapsed().as_secs_f64(), ended.output.trim());
    ensure!(ended.status != 0 && ended.output.contains("it runs here as before"), "{}", ended.output);
    traffic.goes_on(BETWEEN).with_context(|| format!("{}\n{}", ended.output, ends.last_words(a, name)))?;
    let still = here.daemon.json("pci show nic0")?;
    ensure!(still["connected"] == true && still["stage"] == "running", "{still:#}");
    // There QEMU has not heard of it yet.
    let state = waits.qmp("query-status", &json!({}))?;
    ensure!(state["status"] == "inmigrate", "{state}");
    there.daemon.text("move unexpect web")?;
    // What the guest's driver had said was sent there in advance, and nobody can say any more that it does not come.
    let end = Instant::now() + MINUTE;
    while when != "active" && taken_back() == before {
        ensure!(Instant::now() < end, "nothing is taken back: {}", there.daemon.said());
        std::thread::sleep(Duration::from_millis(200));
    }
    waits.kill()?;
    lan.cable(1, true)
}
