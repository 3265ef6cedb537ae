//! `virsh migrate` moves a stock guest with a virtual function of an 82576: two libvirtds in L1, which know nothing of ioplane, and `ioplane move attend
//! --libvirt` beside them: there by the certificates of both hosts, and back by sockets. Under TCP and UDP; the stage is that of `vf_move`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::hosts::NAMES;
use ioplane_e2e::libvirt::is_installed;
use ioplane_e2e::process::built;
use ioplane_e2e::sides::{Side, last_words, noticed, right, start_traffic};
use ioplane_e2e::virsh::Virsh;
use ioplane_e2e::{Job, L1};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const BETWEEN: u64 = 100;

#[test]
fn virsh_migrates_a_guest_with_a_virtual_function() -> Result<()> {
    if !is_installed() {
        let why = "SKIPPED: migration by libvirt was NOT tested: no libvirtd here (packages libvirt-daemon, libvirt-daemon-driver-qemu)";
        eprintln!("*** {why} ***");
        return Ok(());
    }
    ioplane_e2e::libvirt::prepare()?;
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, there] = Side::both_known(&l1, cards, "migratable")?;
    let said = || format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said());
    let words = |qemu: &str| format!("{}\n{}", last_words(&l1, qemu, [&here, &there]), said());
    let (b, c) = (Virsh::start(&l1, &here, &news)?, Virsh::start(&l1, &there, &news)?);
    news("both libvirtds are up");
    let guest = b.create(&here)?;
    news("the guest is up");
    guest.raise_igbvf().and_then(|()| guest.depart()).with_context(said)?;
    let before = noticed(&l1, "here/web")?;
    let traffic = start_traffic(&l1)?;
    traffic.goes_on(BETWEEN).with_context(|| words("here/web"))?;

    news("nobody attends");
    let refused = b.migrates(&c, 49200, "")?.wait(3 * MINUTE)?;
    ensure!(refused.status != 0 && refused.output.contains("unmovable-nic0"), "{}", refused.output);
    ensure!(b.has_it()? && !c.has_it()?, "it was refused");

    news("it is given up while memory is copied");
    // The host there expects it once, and its QEMU is not there yet.
    let said_there = there
        .daemon
        .text(&format!("move expect web --libvirt --from {} --qmp /tmp/there/web.qmp", NAMES[0]))?;
    ensure!(said_there.contains("not there yet"), "{said_there}");
    let job = attends([&here, &there], Way::Certificates)?;
    waits_for_no_vcpu(&l1, "here/web", &job)?;
    let migration = b.migrates(&c, 49201, "--bandwidth 1")?;
    // The attendance has the monitors of both QEMUs.
    let met = "until [ $(ss -Hx | grep -c 'ESTAB.*web.qmp') -ge 2 ]; do sleep 0.1; done";
    l1.run(met, MINUTE).with_context(|| format!("{}{}", migration.output(), job.output()))?;
    b.virsh("domjobabort web")?;
    let (given_up, attended) = (migration.wait(3 * MINUTE)?, job.wait(3 * MINUTE)?);
    ensure!(given_up.status != 0 && attended.status != 0, "{}{}", given_up.output, attended.output);
    eprintln!("{}{}", given_up.output.trim(), attended.output.trim());
    traffic.goes_on(BETWEEN).with_context(|| words("here/web"))?;
    let expected = there.expected()?;
    ensure!(expected[0]["vm"] == "web" && expected[0]["state"] != "arrived", "{expected}");

    let mut reports = Vec::new();
    for (from, to, port, way) in [
        ((&b, &here), (&c, &there), 49202, Way::Certificates),
        ((&c, &there), (&b, &here), 49203, Way::Sockets),
    ] {
        news(&format!("virsh migrate, {way:?}"));
        reports.push(goes(from, to, port, way).with_context(said)?);
        ensure!(to.1.expected()? == json!([]), "it was expected once");
        let now = format!("{}/web", to.1.name);
        traffic.goes_on(BETWEEN).with_context(|| words(&now))?;
    }
    let driven = traffic.end().with_context(|| words("here/web"))?;
    eprintln!("{}\n{}", serde_json::to_string(&driven)?, json!(reports));
    right(&driven, 3).with_context(|| words("here/web"))?;
    let after = noticed(&l1, "here/web")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    b.virsh("destroy web")?;
    news("done");
    Ok(())
}

/// QEMU's main loop wants a vCPU back, which the library makes wait: it has it long before the library gives up.
fn waits_for_no_vcpu(l1: &L1, qemu: &str, job: &Job<'_>) -> Result<()> {
    let begun = Instant::now();
    let words = r#"human-monitor-command '{"command-line":"info registers"}'"#;
    let said = l1.run(&format!("{} /tmp/{qemu}.watch {words}", built("ioplane-qmp")?.display()), MINUTE)?;
    eprintln!("info registers took {:.2} s", begun.elapsed().as_secs_f64());
    ensure!(said.contains("RIP="), "{said}");
    job.expect("waited for a vCPU, as for a reset of the guest", Duration::from_secs(5))
}

/// How the other host is reached.
#[derive(Clone, Copy, Debug)]
enum Way {
    Certificates,
    Sockets,
}

/// Has the move attended, until somebody may begin. The QEMU there is not there yet.
fn attends<'a>([from, to]: [&'a Side<'_>; 2], way: Way) -> Result<Job<'a>> {
    let (here, other) = (from.name, to.name);
    let there = match way {
        Way::Certificates => format!("127.0.0.1 --tls-hostname {}", NAMES[1]),
        Way::Sockets => format!("{} --qmp-there /tmp/{other}/web.qmp", to.control()),
    };
    let job = from
        .daemon
        .start(&format!("move attend web --libvirt --there {there} --qmp /tmp/{here}/web.qmp --json"))?;
    job.expect("may be migrated now", MINUTE)?;
    Ok(job)
}

/// One `virsh migrate`; what the attendance reports.
fn goes(from: (&Virsh<'_>, &Side<'_>), to: (&Virsh<'_>, &Side<'_>), port: u16, way: Way) -> Result<Value> {
    let job = attends([from.1, to.1], way)?;
    let begun = Instant::now();
    let migrated = from.0.migrates(to.0, port, "")?.wait(5 * MINUTE)?;
    let took = begun.elapsed().as_secs_f64();
    let attended = job.wait(3 * MINUTE)?;
    ensure!(
        migrated.status == 0 && attended.status == 0,
        "virsh said {}; the attendance {}; libvirtds {}\n{}",
        migrated.output,
        attended.output,
        from.0.said(),
        to.0.said()
    );
    eprintln!("virsh migrate took {took:.1} s: {}", migrated.output.trim());
    let at = attended.output.find('{').with_context(|| attended.output.clone())?;
    let report = serde_json::Deserializer::from_str(&attended.output[at..]).into_iter::<Value>().next();
    let report = report.with_context(|| attended.output.clone())??;
    ensure!(to.0.has_it()? && !from.0.has_it()?, "{report}");
    let function = &report["functions"][0];
    ensure!(function["state_bytes"].as_u64().is_some_and(|bytes| bytes > 0 && bytes <= 1024), "{report}");
    ensure!(function["pages_sent"].as_u64().is_some_and(|pages| pages > 0), "{report}");
    Ok(report)
}
