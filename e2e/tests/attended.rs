//! A stock guest with a virtual function of an 82576 moves when somebody else migrates its QEMU: `migrate` of QMP, as anybody types it. `ioplane move attend`
//! brings the function along. Under TCP and UDP; the stage is that of `vf_move`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::process::built;
use ioplane_e2e::sides::{Side, last_words, noticed, right, start_traffic, unseen};
use ioplane_e2e::{Job, L1, L2};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const BETWEEN: u64 = 100;

#[test]
fn a_guest_with_a_virtual_function_moves_when_others_migrate_it() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, there] = Side::both(&l1, cards, "migratable")?;
    let said = || format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said());
    let words = |qemu: &str| format!("{}\n{}", last_words(&l1, qemu, [&here, &there]), said());
    let guest = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    guest.raise_igbvf().and_then(|()| guest.depart()).with_context(said)?;
    let before = noticed(&l1, "first")?;
    let unseen_before = unseen(&l1, &guest, "first")?;
    let traffic = start_traffic(&l1)?;
    traffic.goes_on(BETWEEN).with_context(|| words("first"))?;
    is_guarded(&l1)?;

    for mishap in [Mishap::Nobody, Mishap::Cancelled, Mishap::Qemu] {
        news(&format!("{mishap:?}"));
        stays(&l1, [&here, &there], mishap).with_context(said)?;
        traffic.goes_on(BETWEEN).with_context(|| words("first"))?;
        is_guarded(&l1)?;
    }

    news("somebody migrates it");
    let (second, there_report) =
        goes(&l1, [&here, &there], guest, ["first", "second"], Driver::Waits).with_context(said)?;
    traffic.goes_on(BETWEEN).with_context(|| words("second"))?;
    news("and back; it is paused and goes on while memory is copied, and has to run there at once");
    let (third, back_report) =
        goes(&l1, [&there, &here], second, ["second", "third"], Driver::Hurries).with_context(said)?;
    traffic.goes_on(BETWEEN).with_context(|| words("third"))?;
    news("and there by one who waits for nobody");
    let (fourth, last_report) =
        goes(&l1, [&here, &there], third, ["third", "fourth"], Driver::AtOnce).with_context(said)?;
    traffic.goes_on(BETWEEN).with_context(|| words("fourth"))?;

    let driven = traffic.end().with_context(|| words("fourth"))?;
    eprintln!("{}\n{there_report}\n{back_report}\n{last_report}", serde_json::to_string(&driven)?);
    // One more stretch may be lost while it is paused, and one where a switch-over was tried.
    right(&driven, 5).with_context(|| words("fourth"))?;
    let after = noticed(&l1, "fourth")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    let unseen_after = unseen(&l1, &fourth, "fourth")?;
    ensure!(unseen_before == unseen_after, "accepted and not seen: {unseen_before}, then {unseen_after}");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    fourth.kill()?;
    news("done");
    Ok(())
}

/// Why a migration of somebody else's does not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mishap {
    /// Nobody begins one, and Ctrl-C ends the attendance.
    Nobody,
    /// Whoever has begun it cancels it.
    Cancelled,
    /// The QEMU there ends when the function here is at rest.
    Qemu,
}

/// Whoever drives the migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Driver {
    /// Gives `migrate`, and nothing else.
    Waits,
    /// Pauses the guest meanwhile for a moment, and has it run there as soon as the migration has ended, before its function does.
    Hurries,
    /// Goes on with the switch-over at once, has the guest run there at once, and ends the QEMU here: as libvirt.
    AtOnce,
}

/// Asks the monitor that the attendance does not use.
fn asks(l1: &L1, qemu: &str, command: &str, arguments: &Value) -> Result<Value> {
    let program = built("ioplane-qmp")?;
    let said = l1.run(&format!("{} /tmp/{qemu}.watch {command} '{arguments}'", program.display()), MINUTE)?;
    serde_json::from_str(&said).with_context(|| said.clone())
}

/// Anybody else is refused again.
fn is_guarded(l1: &L1) -> Result<()> {
    let reasons = asks(l1, "first", "query-migrate", &json!({}))?["blocked-reasons"].to_string();
    ensure!(reasons.contains("unmovable-nic0"), "nothing keeps it here: {reasons}");
    Ok(())
}

/// Has the move attended, until somebody may begin.
fn attends<'a>([from, to]: [&'a Side<'_>; 2], names: [&str; 2], options: &str) -> Result<Job<'a>> {
    let [first, second] = names;
    let there = to.control();
    let job = from.daemon.start(&format!(
        "move attend web {options} --there {there} --qmp-there /tmp/{second}.qmp --qmp /tmp/{first}.qmp --json"
    ))?;
    job.expect("may be migrated now", MINUTE)?;
    Ok(job)
}

fn until(job: &Job<'_>, what: &str, mut met: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + 3 * MINUTE;
    while !met()? {
        ensure!(Instant::now() < end && !job.has_ended(), "{what}: {}", job.output());
        std::thread::sleep(Duration::from_millis(30));
    }
    Ok(())
}

/// A migration that does not come about: the guest goes on here, with its function.
fn stays(l1: &L1, sides: [&Side<'_>; 2], mishap: Mishap) -> Result<()> {
    let [here, there] = sides;
    let second = format!("after-{mishap:?}").to_lowercase();
    let destination = l1.awaits_traveller(&second, &there.args()?)?;
    let rested = || here.daemon.said().matches("stands still").count();
    let before = rested();
    let job = attends(sides, ["first", &second], "")?;
    let mut destination = Some(destination);
    let begins = || asks(l1, "first", "migrate", &json!({ "uri": there.uri(&second) }));
    match mishap {
        Mishap::Nobody => job.interrupt()?,
        Mishap::Cancelled => {
            begins()?;
            until(&job, "no memory is copied", || Ok(l1.migration_of("first")? == "active"))?;
            asks(l1, "first", "migrate_cancel", &json!({}))?;
        }
        Mishap::Qemu => {
            begins()?;
            // The attendance waits for this daemon until the QEMU is gone.
            there.signal(l1, "STOP")?;
            until(&job, "it does not come to rest", || Ok(rested() > before))?;
            destination.take().context("it is there")?.kill()?;
            there.signal(l1, "CONT")?;
        }
    }
    let ended = job.wait(3 * MINUTE)?;
    eprintln!("{mishap:?}: {}", ended.output.trim());
    ensure!(ended.status != 0 && ended.output.contains("did not move"), "{mishap:?}: {}", ended.output);
    let still = here.daemon.json("pci show nic0")?;
    ensure!(still["connected"] == true && still["stage"] == "running", "{still:#}");
    // One that was to take what was cancelled has ended by itself.
    let _ = destination.map(L2::kill);
    Ok(())
}

/// A migration by QMP as libvirt drives it.
fn drives_at_once(l1: &L1, [first, second]: [&str; 2], uri: &str) -> Result<()> {
    let qmp = built("ioplane-qmp")?.display().to_string();
    let pause = json!({"capabilities": [{"capability": "pause-before-switchover", "state": true}]});
    let migrate = json!({ "uri": uri });
    let script = format!(
        r#"set -e
        ask() {{ socket=/tmp/$1.watch; shift; {qmp} $socket "$@"; }}
        is() {{ for try in $(seq 3000); do ask {first} query-migrate '{{}}' | grep -q "\"status\":\"$1\"" && return; done; return 1; }}
        ask {first} migrate-set-capabilities '{pause}'
        ask {first} migrate '{migrate}'
        is pre-switchover
        ask {first} migrate-continue '{{"state":"pre-switchover"}}'
        is completed
        ask {second} cont '{{}}'
        ask {first} quit '{{}}'"#
    );
    l1.run(&script, 3 * MINUTE).map(drop)
}

/// Somebody migrates it, and the guest runs there with its function.
fn goes<'a>(
    l1: &'a L1,
    sides: [&Side<'_>; 2],
    source: L2<'a>,
    names: [&str; 2],
    driver: Driver,
) -> Result<(L2<'a>, Value)> {
    let [from, to] = sides;
    let destination =
        l1.awaits_traveller_by(&l1.interposed()?, names[1], &to.args()?, &to.incoming(names[1]))?;
    let job = attends(sides, names, if driver == Driver::AtOnce { "--libvirt" } else { "" })?;
    ensure!(!job.output().contains("has to leave `cont`"), "no vCPU is held there: {}", job.output());
    if driver == Driver::Hurries {
        // Slow enough for it to be seen.
        asks(l1, names[0], "migrate-set-parameters", &json!({ "max-bandwidth": 8 << 20 }))?;
    }
    if driver == Driver::AtOnce {
        drives_at_once(l1, names, &to.uri(names[1])).with_context(|| job.output())?;
    } else {
        asks(l1, names[0], "migrate", &json!({ "uri": to.uri(names[1]) }))?;
    }
    if driver == Driver::Hurries {
        until(&job, "no memory is copied", || Ok(l1.migration_of(names[0])? == "active"))?;
        asks(l1, names[0], "stop", &json!({}))?;
        asks(l1, names[0], "cont", &json!({}))?;
        asks(l1, names[0], "migrate-set-parameters", &json!({ "max-bandwidth": 1 << 30 }))?;
        until(&job, "it does not get there", || Ok(l1.migration_of(names[0])? == "completed"))?;
        asks(l1, names[1], "cont", &json!({}))?;
        eprintln!("it is to run there; its function is brought back still: {}", !job.has_ended());
    }
    let ended = job.wait(3 * MINUTE)?;
    ensure!(ended.status == 0, "{}\nthere QEMU said {}", ended.output, destination.said());
    let at = ended.output.find('{').with_context(|| ended.output.clone())?;
    let report = serde_json::Deserializer::from_str(&ended.output[at..]).into_iter::<Value>().next();
    let report = report.with_context(|| ended.output.clone())??;
    ensure!(asks(l1, names[1], "query-status", &json!({}))?["status"] == "running", "{report}");
    if driver != Driver::AtOnce {
        ensure!(asks(l1, names[0], "query-migrate", &json!({}))?["status"] == "completed", "{report}");
        ensure!(from.daemon.json("pci show nic0")?["connected"] == true, "{report}");
        source.kill()?;
    }
    let function = &report["functions"][0];
    ensure!(function["state_bytes"].as_u64().is_some_and(|bytes| bytes > 0 && bytes <= 1024), "{report}");
    Ok((destination, report))
}
