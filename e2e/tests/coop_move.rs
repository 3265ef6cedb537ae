//! A guest whose igbvf cooperates (CompSC) goes from one QEMU and one daemon to others, onto a virtual function of another card, and back, while
//! it runs under TCP and UDP. Nothing on our side knows what the function is: the driver brings it back. The stage is that of `vf_move`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{CoopDriver, Host};
use ioplane_e2e::coop::LOAD_IGBVF;
use ioplane_e2e::sides::{Side, moves, noticed, right, start_traffic, unseen};
use ioplane_e2e::streams::Driven;
use ioplane_e2e::{L1, L2, Traffic};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Echoes that have to come between two moves.
const BETWEEN: u64 = 100;

/// What the guest tells of its driver when something has gone wrong.
const STACKS: &str = "for task in /proc/[0-9]*; do case \"$(cat $task/stack)\" in *igbvf*|*coop*) cat $task/comm $task/stack;; esac; done; \
     echo l >/proc/sysrq-trigger; dmesg | tail -n 90; cat /proc/net/snmp; grep eth /proc/interrupts";

/// When a move is made impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mishap {
    /// Whoever moves it thinks better of it, once the function here is at rest.
    Cancelled,
    /// The daemon at the destination dies, once the guest stands still.
    Daemon,
}

/// A move that does not come about: the driver goes on with the function that it had, under the same traffic.
fn fails<'a>(
    l1: &'a L1,
    here: &Side<'_>,
    name: &str,
    there: &mut Side<'a>,
    mishap: Mishap,
    traffic: &Traffic<'_>,
) -> Result<()> {
    let second = format!("after-{mishap:?}").to_lowercase();
    let destination = l1.awaits_traveller(&second, &there.args()?)?;
    let before = here.daemon.brought_back("nic0")?;
    let rests = here.daemon.rests();
    let moving = here.daemon.start(&here.command(there, name, &second))?;
    match mishap {
        Mishap::Cancelled => {
            here.daemon.until_rests(rests + 1, &moving)?;
            moving.interrupt()?;
        }
        Mishap::Daemon => {
            // It was asked already what it has. What is asked of it next does not come about until it is gone.
            while l1.migration_of(name)? != "active" {
                ensure!(!moving.has_ended(), "no memory is copied: {}", moving.output());
            }
            there.signal(l1, "STOP")?;
            here.daemon.until_rests(rests + 2, &moving)?;
            there.signal(l1, "KILL")?;
        }
    }
    let ended = moving.wait(3 * MINUTE)?;
    eprintln!("{mishap:?}: {}", ended.output.trim());
    ensure!(ended.status != 0 && ended.output.contains("did not move"), "{mishap:?}: {}", ended.output);
    traffic.goes_on(BETWEEN).with_context(|| format!("after {mishap:?}: {}", ended.output))?;
    let still = here.daemon.json("pci show nic0")?;
    ensure!(still["connected"] == true && still["stage"] == "running", "{still:#}");
    ensure!(here.daemon.brought_back("nic0")? > before, "it was not at rest");
    // One whose daemon is gone, or that was told to, has ended by itself.
    let _ = destination.kill();
    if mishap == Mishap::Daemon {
        there.daemon = l1.serve(there.name, "")?;
    }
    Ok(())
}

/// The figures, on a line of their own.
fn told(driven: &Driven, moves: &[Value], unseen: i64) {
    let all =
        |field: &str| moves.iter().map(|report| report["functions"][0][field].clone()).collect::<Vec<_>>();
    let line = json!({
        "cooperating": {
            "stop_accesses": all("stop_accesses"),
            "replay_accesses": all("replay_accesses"),
            "state_bytes": all("state_bytes"),
            "pages_sent": all("pages_sent"),
            "rested_before_ms": all("rested_before_ms"),
            "accepted_and_unseen": unseen,
            "lost_of_the_guest": driven.back.lost,
            "duplicated_frames": driven.there.duplicated + driven.back.duplicated,
            "lost_while_away": driven.there.lost,
            "stretches": driven.there.missing,
        },
        "longest_gap_ms": driven.gaps.first().map(|gap| gap.ms),
        "tcp_gap_ms": driven.tcp_gap.ms,
    });
    eprintln!("figures: {line}");
}

#[test]
fn a_guest_whose_driver_cooperates_moves_there_and_back_under_traffic() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let module = Host::prepare(&news)?.cooperating(CoopDriver::Igbvf, &news)?;
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, mut there] = Side::both(&l1, cards, "cooperating")?;
    let first = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    let said = |here: &Side<'_>, there: &Side<'_>| {
        format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said())
    };
    let context = |here: &Side<'_>, there: &Side<'_>, name: &str| {
        let kernel = l1.ask(name, STACKS).unwrap_or_default();
        format!("{}\nthe guest:\n{kernel}", said(here, there))
    };
    std::fs::copy(module, first.folder().join("igbvf.ko"))?;
    first.raise_vf("igbvf", LOAD_IGBVF).and_then(|()| first.depart()).with_context(|| said(&here, &there))?;
    ensure!(here.daemon.brought_back("nic0")? == 0, "it was not moved yet");
    let before = noticed(&l1, "first")?;
    let unseen_before = unseen(&l1, &first, "first")?;
    news("moves under traffic");
    let traffic = start_traffic(&l1)?;
    traffic.goes_on(BETWEEN)?;
    let trapped = here.daemon.accesses("nic0")?;
    traffic.goes_on(BETWEEN)?;
    let trapped = here.daemon.accesses("nic0")? - trapped;
    // Each echo takes a tail and masks of two vectors at least, but its pages are mapped.
    eprintln!("{trapped} register accesses were trapped in the time of {BETWEEN} echoes");
    ensure!(trapped < BETWEEN, "{trapped} register accesses were trapped in the time of {BETWEEN} echoes");
    let (second, there_report) = moves(&l1, &here, first, ["first", "second"], &there)
        .with_context(|| context(&here, &there, "second"))?;
    there.daemon.brought_back("nic0").with_context(|| context(&here, &there, "second"))?;
    traffic.goes_on(BETWEEN).with_context(|| context(&here, &there, "second"))?;
    news("and back");
    let (third, back_report) = moves(&l1, &there, second, ["second", "third"], &here)
        .with_context(|| context(&here, &there, "third"))?;
    here.daemon.brought_back("nic0").with_context(|| context(&here, &there, "third"))?;
    traffic.goes_on(BETWEEN).with_context(|| context(&here, &there, "third"))?;
    let driven = traffic.end().with_context(|| context(&here, &there, "third"))?;
    let unseen_after = unseen(&l1, &third, "third")?;
    told(&driven, &[there_report, back_report], unseen_after - unseen_before);
    right(&driven, 2)?;
    ensure!(
        unseen_before == unseen_after,
        "frames accepted and not seen: {unseen_before}, then {unseen_after}"
    );
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    news("moves that fail");
    let traffic = start_traffic(&l1)?;
    traffic.goes_on(BETWEEN)?;
    const MISHAPS: [Mishap; 2] = [Mishap::Cancelled, Mishap::Daemon];
    for mishap in MISHAPS {
        news(&format!("{mishap:?}"));
        fails(&l1, &here, "third", &mut there, mishap, &traffic)
            .with_context(|| context(&here, &there, "third"))?;
    }
    let driven = traffic.end().with_context(|| context(&here, &there, "third"))?;
    right(&driven, MISHAPS.len())?;
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    L2::kill(third)?;
    news("done");
    Ok(())
}
