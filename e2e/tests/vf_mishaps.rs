//! Moves of a guest with a virtual function that do not come about: whatever happens at the destination, the guest goes on here, with its function,
//! under the same traffic. The stage is that of `vf_move`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::sides::{Side, last_words, moves, noticed, right, start_traffic};
use ioplane_e2e::{L1, L2, Traffic};
use serde_json::json;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Echoes that have to come between two moves.
const BETWEEN: u64 = 100;

#[test]
fn a_guest_keeps_its_virtual_function_when_a_move_fails() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, mut there] = Side::both(&l1, cards, "migratable")?;
    let guest = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    guest.raise_igbvf().and_then(|()| guest.depart()).with_context(|| here.daemon.said())?;
    let before = noticed(&l1, "first")?;
    let traffic = start_traffic(&l1)?;
    traffic.goes_on(BETWEEN)?;
    const MISHAPS: [Mishap; 5] =
        [Mishap::Qemu, Mishap::Daemon, Mishap::Function, Mishap::Cancelled, Mishap::Port];
    for mishap in MISHAPS {
        news(&format!("{mishap:?}"));
        fails(&l1, &here, "first", &mut there, mishap, &traffic)
            .with_context(|| format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said()))?;
    }
    news("paused, and to the other host and back before it runs again");
    guest.qmp("stop", &json!({}))?;
    let (guest, _) = moves(&l1, &here, guest, ["first", "second"], &there)?;
    let (guest, _) = moves(&l1, &there, guest, ["second", "third"], &here)?;
    guest.qmp("cont", &json!({}))?;
    let words = || last_words(&l1, "third", [&here, &there]);
    traffic.goes_on(BETWEEN).with_context(words)?;
    let driven = traffic.end().with_context(words)?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    // One by each mishap; one by a ring that is full while the guest is paused, and by each of two moves.
    right(&driven, MISHAPS.len() + 3).with_context(words)?;
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    guest.kill()?;
    news("done");
    Ok(())
}

/// What happens while the guest's memory is copied, and makes a move impossible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mishap {
    /// The QEMU at the destination dies when the function here is at rest already.
    Qemu,
    /// The daemon at the destination does.
    Daemon,
    /// The function at the destination is taken away.
    Function,
    /// The port of its card has no link any more.
    Port,
    /// Whoever moves it thinks better of it.
    Cancelled,
}

/// What the daemon at the destination logs when its function has said what the guest's driver has said here, and when it was reset after that: for this, or
/// since the QEMU there has ended.
const TOLD: &str = "has said what another host's guest has said";
const RESET: [&str; 2] =
    ["was reset: the guest whose words it has said does not come", "the client has left"];

fn count(side: &Side<'_>, words: &str) -> usize {
    side.daemon.said().matches(words).count()
}

/// A move that does not come about: the source goes on with its device under the same traffic.
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
    let rests = here.daemon.rests();
    let told = count(there, TOLD);
    let moving = here.daemon.start(&here.command(there, name, &second))?;
    let end = Instant::now() + 3 * MINUTE;
    while l1.migration_of(name)? != "active" {
        ensure!(Instant::now() < end && !moving.has_ended(), "no memory is copied: {}", moving.output());
    }
    let mut destination = Some(destination);
    match mishap {
        Mishap::Qemu => {
            // The command waits for this daemon until the QEMU is gone.
            there.signal(l1, "STOP")?;
            here.daemon.until_rests(rests + 1, &moving)?;
            destination.take().context("it is there")?.kill()?;
            there.signal(l1, "CONT")?;
        }
        Mishap::Daemon => {
            there.signal(l1, "STOP")?;
            here.daemon.until_rests(rests + 1, &moving)?;
            there.signal(l1, "KILL")?;
        }
        Mishap::Function => {
            there.daemon.text("pci remove nic0 --force")?;
        }
        Mishap::Port => {
            there.port(l1, false)?;
        }
        Mishap::Cancelled => {
            let end = Instant::now() + MINUTE;
            while count(there, TOLD) == told {
                ensure!(
                    Instant::now() < end && !moving.has_ended(),
                    "nothing goes ahead: {}",
                    moving.output()
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            moving.interrupt()?;
        }
    }
    let ended = moving.wait(3 * MINUTE)?;
    eprintln!("{mishap:?}: {}", ended.output.trim());
    ensure!(ended.status != 0 && ended.output.contains("did not move"), "{mishap:?}: {}", ended.output);
    if mishap == Mishap::Port {
        there.port(l1, true)?;
    }
    if mishap == Mishap::Cancelled {
        let said = there.daemon.said();
        let since = said.rsplit_once(TOLD).map_or("", |(_, since)| since);
        ensure!(RESET.iter().any(|words| since.contains(words)), "the function there was not reset: {said}");
    }
    traffic.goes_on(BETWEEN).with_context(|| {
        format!("after {mishap:?}: {}\n{}", ended.output, last_words(l1, name, [here, there]))
    })?;
    let still = here.daemon.json("pci show nic0")?;
    ensure!(still["connected"] == true && still["stage"] == "running", "{still:#}");
    // One whose daemon is gone, or that was told to, has ended by itself.
    let _ = destination.map(L2::kill);
    match mishap {
        Mishap::Qemu | Mishap::Cancelled | Mishap::Port => {}
        Mishap::Daemon => there.daemon = l1.serve(there.name, "")?,
        Mishap::Function => there.add()?,
    }
    Ok(())
}
