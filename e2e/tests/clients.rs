//! Other people's front ends, without a VM: what `docs/guide/clients.md` says of them is what these tests find.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::newer_qemu;
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::process::{Process, run, scratch};
use ioplane_e2e::version::{Version, program};
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Two spinning peers leave no processor for a third.
const CONFIG: &str = "[[core]]\nid = 0\nnotify = \"notified\"\n";
const LIMIT: Duration = Duration::from_secs(60);
const MACS: [&str; 2] = ["52:54:00:13:00:01", "52:54:00:13:00:02"];
/// Frames that each NIC must have sent and received.
const ENOUGH: u64 = 20_000;

/// The version of a package of the Debian below `root`, without epoch and revision.
fn package(name: &str, root: &Path) -> Result<String> {
    let admindir = format!("--admindir={}", root.join("var/lib/dpkg").display());
    let text = run("dpkg-query", &[&admindir, "-W", "-f", "${Version}", name])?;
    let text = text.split_once(':').map_or(text.as_str(), |(_, rest)| rest);
    Ok(text.split(['-', '+', '~']).next().unwrap_or(text).to_owned())
}

/// The page has this client with this result. A version that it does not have yet is told, not a failure.
fn documented(client: &str, version: &str, result: &str) -> Result<()> {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guide/clients.md"))?;
    let mut rows = page.lines().filter(|line| line.starts_with(&format!("| {client} |"))).peekable();
    ensure!(rows.peek().is_some(), "docs/guide/clients.md does not have {client}");
    let rows: Vec<&str> = rows.collect();
    ensure!(rows.iter().any(|row| row.contains(result)), "docs/guide/clients.md says otherwise: {rows:?}");
    if !rows.iter().any(|row| row.contains(&format!("| {version} |"))) {
        eprintln!("NEW: {client} {version}: {result}; docs/guide/clients.md has other versions: {rows:?}");
    }
    Ok(())
}

/// Two virtio-user ports of one testpmd exchange frames over our switch.
fn testpmd(packed: bool) -> Result<()> {
    if Command::new("dpdk-testpmd").arg("--version").output().is_err() {
        eprintln!(
            "SKIPPED: DPDK's front end was NOT tried: dpdk-testpmd is missing (script/bootstrap --bench)"
        );
        return Ok(());
    }
    let daemon = Daemon::start(CONFIG)?;
    daemon.cli(&["switch", "add", "lan"])?;
    let folder = scratch("testpmd")?;
    let mut args: Vec<OsString> = Vec::new();
    let prefix = format!("--file-prefix=ioplane-{}-{packed}", std::process::id());
    let head = ["--lcores", "0@0,1@1", "--no-huge", "-m", "256", "--no-pci", "--no-telemetry", &prefix];
    args.extend(head.map(OsString::from));
    for (index, mac) in MACS.iter().enumerate() {
        let name = format!("port{index}");
        daemon.cli(&["nic", "add", &name, "--switch", "lan", "--mac", mac])?;
        let line = daemon.cli(&["nic", "list"])?;
        let nics = line["nics"].as_array().or(line.as_array()).context("nic list")?.clone();
        let nic = nics.iter().find(|nic| nic["name"] == name.as_str()).context("the NIC that was added")?;
        let socket = nic["socket"].as_str().context("its socket")?;
        let packed = u8::from(packed);
        let vdev = format!("net_virtio_user{index},path={socket},queues=1,packed_vq={packed},mac={mac}");
        args.extend(["--vdev".into(), vdev.into()]);
    }
    args.extend(
        ["--", "--forward-mode=mac", "--tx-first", "--nb-cores=1", "--total-num-mbufs=4096"].map(Into::into),
    );
    args.extend([format!("--eth-peer=0,{}", MACS[1]).into(), format!("--eth-peer=1,{}", MACS[0]).into()]);
    args.push("--stats-period=1000".into());
    let mut process = Process::start("dpdk-testpmd", &args, &folder.path().join("log"))?;
    let end = Instant::now() + LIMIT;
    let nics = loop {
        process.still_runs()?;
        let nics = daemon.status()?.nics;
        if nics.iter().all(|nic| nic.sent.frames >= ENOUGH && nic.received.frames >= ENOUGH) {
            break nics;
        }
        ensure!(
            Instant::now() < end,
            "testpmd's frames do not cross: {nics:?}\n{}\nthe daemon: {}",
            process.said(),
            daemon.log()
        );
        std::thread::sleep(Duration::from_millis(100));
    };
    for nic in &nics {
        ensure!(nic.front_end_faults.is_empty(), "faults: {nic:?}");
        ensure!(nic.sent.faults == 0 && nic.received.faults == 0, "faults: {nic:?}");
    }
    process.kill();
    let rings = if packed { "packed" } else { "split" };
    documented(&format!("DPDK virtio-user, {rings} rings"), &package("dpdk-dev", Path::new("/"))?, "works")
}

#[test]
fn dpdk_virtio_user_with_split_rings() -> Result<()> {
    testpmd(false)
}

#[test]
fn hole_23_dpdk_virtio_user_with_packed_rings() -> Result<()> {
    testpmd(true)
}

/// libblkio's vhost-user front end, by the benchmark of qemu-img: reads and writes of 4 KiB at depth 32.
#[test]
fn libblkio_by_qemu_img() -> Result<()> {
    let daemon = Daemon::start(CONFIG)?;
    let image = daemon.folder().join("disk.img");
    File::create(&image)?.set_len(64 << 20)?;
    daemon.cli(&["disk", "add", "disk", "--path", image.to_str().context("path")?])?;
    let socket = daemon.disk("disk")?.socket;
    let options = format!("driver=virtio-blk-vhost-user,path={},cache.direct=on", socket.display());
    for write in [false, true] {
        let mut args = vec!["bench", "-c", "20000", "-d", "32", "-s", "4096", "-n"];
        if write {
            args.push("-w");
        }
        args.extend(["--image-opts", &options]);
        let args = args.into_iter().map(OsString::from).collect();
        let (name, args) = program(Version::Newer, "qemu-img", args, &|line| eprintln!("{line}"))?;
        let output = Command::new(name).args(args).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "qemu-img bench: {said}\nthe daemon: {}", daemon.log());
        ensure!(String::from_utf8_lossy(&output.stdout).contains("Run completed"), "{output:?}");
    }
    let disk = daemon.disk("disk")?;
    ensure!(disk.front_end_faults.is_empty(), "faults: {disk:?}");
    let root = newer_qemu(&|line| eprintln!("{line}"))?.unwrap_or_else(|| "/".into());
    documented("libblkio, by qemu-img bench", &package("libblkio1", &root)?, "works")
}
