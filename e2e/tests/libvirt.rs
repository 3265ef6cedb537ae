//! libvirt migrates a VM whose disks are on a third host, knowing nothing of ioplane: the claims to its disks go along.

use anyhow::{Context, Result, anyhow, ensure};
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::libvirt::{LibvirtHost, free_port, is_installed};
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};

const CONFIG: &str = "[[core]]\nspin_us = 200\n";
const DISKS: [&str; 2] = ["root", "data"];
const BYTES: u64 = 16 << 20;
/// Two translated processors and a boot from the disk.
const BOOT: std::time::Duration = std::time::Duration::from_secs(240);

/// Publishes the images of the stage over TCP.
fn exporter(stage: &Stage) -> Result<(Daemon, u16)> {
    stage.guest.copy_to(&stage.image("root"))?;
    stage.blank("data", 64 << 20)?;
    let exporter = Daemon::start(CONFIG)?;
    let port = free_port()?;
    for disk in DISKS {
        let path = stage.image(disk).display().to_string();
        exporter.cli(&[
            "publish",
            "disk",
            disk,
            "--path",
            &path,
            "--listen",
            &format!("127.0.0.1:{port}"),
            "--plain",
        ])?;
    }
    Ok((exporter, port))
}

fn claims(host: &Daemon) -> Result<Vec<String>> {
    let disks = host.cli(&["disk", "list"])?;
    let disks = disks.as_array().context("no list of disks")?;
    Ok(disks
        .iter()
        .map(|disk| disk["backing"]["remote"]["claim"].as_str().unwrap_or("none").to_owned())
        .collect())
}

fn all(host: &Daemon, claim: &str) -> Result<bool> {
    let claims = claims(host)?;
    Ok(claims.len() == DISKS.len() && claims.iter().all(|found| found == claim))
}

#[test]
fn libvirt_migrates_a_guest_there_and_back_under_load() -> Result<()> {
    if !is_installed() {
        let why = "SKIPPED: migration by libvirt was NOT tested: no libvirtd here (packages libvirt-daemon, libvirt-daemon-driver-qemu)";
        eprintln!("*** {why} ***");
        return Ok(());
    }
    play(CONFIG, |stage| {
        let (_exporter, port) = exporter(stage)?;
        let other = Daemon::start(CONFIG)?;
        for host in [&stage.daemon, &other] {
            for disk in DISKS {
                host.cli(&["disk", "add", disk, "--remote", &format!("nbd://127.0.0.1:{port}/{disk}")])?;
            }
        }
        let (b, c) = (LibvirtHost::start("host-b", &stage.daemon)?, LibvirtHost::start("host-c", &other)?);
        b.create(&stage.daemon, "web", &DISKS)?;
        let explain =
            |error: anyhow::Error| error.context(format!("consoles:\n{}\n---\n{}", b.console(), c.console()));
        let agent = b.agent()?;
        agent.hello(BOOT, || Ok(())).map_err(explain)?;
        stage.say("the guest is up at host-b");
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = agent.load(LoadSpec { mix, ..mixed("data", BYTES) })?;
        load.progress(MINUTE)?;

        // One that is given up leaves guest and disks where they are.
        let through = format!("tcp:127.0.0.1:{}", free_port()?);
        let there = c.uri();
        let words = ["migrate", "--live", "--bandwidth", "1", "web", &there, "--migrateuri", &through];
        std::thread::scope(|scope| {
            let migration = scope.spawn(|| b.virsh(&words));
            stage.until("the migration is given up", || {
                Ok(migration.is_finished() || b.virsh(&["domjobabort", "web"]).is_ok())
            })?;
            let ended = migration.join().map_err(|_| anyhow!("the thread of virsh died"))?;
            ensure!(
                ended.is_err(),
                "a migration of 256 MiB at 1 MiB a second that was given up has ended well"
            );
            Ok(())
        })?;
        load.progress(MINUTE).map_err(explain)?;
        ensure!(all(&stage.daemon, "held")? && !all(&other, "held")?, "after a migration that failed");

        for (from, to, here, there) in [(&b, &c, &stage.daemon, &other), (&c, &b, &other, &stage.daemon)] {
            ensure!(all(here, "held")?, "before it migrates");
            from.migrate("web", to, &agent, free_port()?).map_err(explain)?;
            stage.until("the other host holds the disks", || all(there, "held"))?;
            stage.until("this one does not", || all(here, "free"))?;
            stage.say("migrated");
            load.progress(MINUTE).map_err(explain)?;
            load.progress(MINUTE).map_err(explain)?;
            expect_right(&load.mark().map_err(explain)?)?;
            ensure!(
                !from.virsh(&["list", "--name"])?.contains("web")
                    && to.virsh(&["list", "--name"])?.contains("web")
            );
        }
        let (report, verified) = finish(&agent, load).map_err(explain)?;
        expect_quiet(&agent)?;
        stage.say(format!("{} requests, {} blocks are right", report.requests, verified.blocks));
        agent.poweroff()?;
        stage.until("nobody holds the disks", || all(&stage.daemon, "free"))?;
        stage.expect_clean()
    })
}
