//! Several hosts on one machine, each a daemon: one publishes images, others have them as disks, and one of these at a time holds the claims.

use crate::assets::host_version;
use crate::daemon::Daemon;
use crate::stage::Stage;
use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// What the guest of [`three`] has: what it boots, and what it works on.
pub const DISKS: [&str; 2] = ["root", "data"];
/// The same as reports have them: by name.
pub const DISKS_BY_NAME: [&str; 2] = ["data", "root"];
/// Of the latter.
const DATA_BYTES: u64 = 64 << 20;

/// A host that publishes [`DISKS`], and another one beside the stage's own; both of the latter have them as disks.
pub fn three(stage: &Stage, config: &str) -> Result<(Daemon, Daemon)> {
    stage.guest.copy_to(&stage.image(DISKS[0]))?;
    stage.blank(DISKS[1], DATA_BYTES)?;
    let exporter = publish(stage, config, &DISKS)?;
    let other = Daemon::start(config)?;
    for host in [&stage.daemon, &other] {
        import(host, &exporter, &DISKS)?;
    }
    Ok((exporter, other))
}

/// How two hosts are called that know each other.
pub const NAMES: [&str; 2] = ["host-a", "host-b"];

/// Gives two hosts certificates of one authority, whose configuration says `identity = "{folder}/identity"`.
pub fn know_each_other(one: &Daemon, other: &Daemon) -> Result<()> {
    let identity = |of: &Daemon, args: &[&str]| {
        let output = std::process::Command::new(crate::daemon::binary()?)
            .args(["identity", "--dir"])
            .arg(of.folder().join("identity"))
            .args(args)
            .output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "ioplane identity {}: {said}", args.join(" "));
        Ok(())
    };
    let file = one.folder().join("other.pem").display().to_string();
    identity(one, &["create", NAMES[0]])?;
    identity(one, &["issue", NAMES[1], "--out", &file])?;
    identity(other, &["import", &file])
}

/// The machine of this host's own QEMU by its full name, so that both ends of a migration have the same.
pub fn machine() -> Result<String> {
    let (major, minor) = host_version()?;
    Ok(format!("pc-q35-{major}.{minor}"))
}

/// A host that publishes these images of the stage, for programs of this machine.
fn publish(stage: &Stage, config: &str, disks: &[&str]) -> Result<Daemon> {
    let exporter = Daemon::start(config)?;
    for disk in disks {
        let path = stage.image(disk).display().to_string();
        exporter.cli(&["publish", "disk", disk, "--path", &path])?;
    }
    Ok(exporter)
}

/// Gives `host` what `exporter` publishes as these disks.
fn import(host: &Daemon, exporter: &Daemon, disks: &[&str]) -> Result<()> {
    for disk in disks {
        let export = exporter.cli(&["publish", "show", disk])?;
        let socket = export["socket"].as_str().context("an export without a socket")?;
        host.cli(&["disk", "add", disk, "--remote", &format!("nbd+unix:///{disk}?socket={socket}")])?;
    }
    Ok(())
}

/// What `host` says of a disk of another host: how it stands with the server, and who holds it.
pub fn remote(host: &Daemon, disk: &str) -> Result<Value> {
    let disks = host.cli(&["disk", "list"])?;
    let disk = disks.as_array().and_then(|disks| disks.iter().find(|found| found["name"] == disk));
    Ok(disk.context("no such disk")?["backing"]["remote"].clone())
}

fn all_are(host: &Daemon, disks: &[&str], word: &str) -> Result<bool> {
    disks.iter().try_fold(true, |so, disk| Ok(so && remote(host, disk)?["claim"] == word))
}

/// Whether `host` has the claims of all these disks.
pub fn holds(host: &Daemon, disks: &[&str]) -> Result<bool> {
    all_are(host, disks, "held")
}

/// Whether it has none of them.
pub fn holds_none(host: &Daemon, disks: &[&str]) -> Result<bool> {
    all_are(host, disks, "free")
}
