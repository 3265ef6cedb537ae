//! Stock Cloud Hypervisor in L1 boots a guest with two disks and a NIC of ioplane: what `docs/guide/clients.md` says of it is what
//! this test finds.
//!
//! Debian does not package it: `IOPLANE_CLOUD_HYPERVISOR` names the program, else `cloud-hypervisor` is looked for in `PATH`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::{Guest, busybox_initrd};
use ioplane_e2e::clustering::saved;
use ioplane_e2e::preload::{UserExits, fewer};
use ioplane_e2e::{L1, Status};
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);
/// The blank disk.
const BYTES: u64 = 64 << 20;
/// What the guest writes of it.
const WRITTEN: u64 = 32 << 20;
/// What the host serves to the guest.
const SERVED: u64 = 4 << 20;
const MAC: &str = "52:54:00:17:00:01";

fn program() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("IOPLANE_CLOUD_HYPERVISOR") {
        return Some(path.into());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join("cloud-hypervisor")).find(|path| path.is_file())
}

/// What follows `start` on the first line that has it.
fn told<'a>(console: &'a str, start: &str) -> Result<&'a str> {
    let line = console.lines().find_map(|line| line.split_once(start));
    let (_, rest) = line.with_context(|| format!("the guest does not say {start:?}:\n{console}"))?;
    Ok(rest.trim())
}

fn no_faults(status: &Status) -> Result<()> {
    for disk in &status.disks {
        let errors = disk.totals.errors;
        ensure!(disk.front_end_faults.is_empty() && disk.totals.faults == 0, "{disk:?}");
        ensure!(errors.io + errors.space + errors.request + errors.unsupported == 0, "{disk:?}");
    }
    for nic in &status.nics {
        ensure!(nic.front_end_faults.is_empty(), "{nic:?}");
        ensure!(nic.sent.faults + nic.received.faults == 0, "{nic:?}");
    }
    Ok(())
}

#[test]
fn a_guest_of_cloud_hypervisor_has_disks_and_a_nic() -> Result<()> {
    let Some(program) = program() else {
        eprintln!(
            "SKIPPED (cannot be had here): Cloud Hypervisor was NOT tried: Debian does not package it; set \
             IOPLANE_CLOUD_HYPERVISOR=/path/to/cloud-hypervisor"
        );
        return Ok(());
    };
    let guest = Guest::prepare(&|line| eprintln!("{line}"))?;
    let l1 = L1::boot(2200, "", &|line| eprintln!("{line}"))?;
    let folder = l1.folder().to_owned();
    // Where these lie may be hidden in L1 by a folder of its own, such as /tmp.
    fs::copy(&program, folder.join("cloud-hypervisor")).with_context(|| program.display().to_string())?;
    fs::copy(&guest.kernel, folder.join("vmlinux"))?;
    fs::write(folder.join("initrd"), guest.initrd_with(include_str!("cloud_hypervisor.sh"))?)?;
    guest.copy_to(&folder.join("root.img"))?;
    let (modules, folder) = (l1.host.modules.display(), folder.display());
    l1.run(
        &format!(
            "set -e; /usr/sbin/modprobe -d {modules} tun; cd {folder}; mkdir -p /tmp/www
             cp --sparse=always root.img /tmp/root.img; cp cloud-hypervisor vmlinux initrd /tmp
             truncate -s {BYTES} /tmp/data.img; head -c {SERVED} /dev/urandom >/tmp/www/file"
        ),
        2 * MINUTE,
    )?;
    let version = l1.run("/tmp/cloud-hypervisor --version", MINUTE)?;

    let daemon = l1.serve(
        "ioplane",
        &format!(
            "[[core]]\nnotify = \"notified\"\n[[switch]]\nname = \"lan\"\nuplink = \"tap0\"\n\
             [[nic]]\nname = \"nic\"\nswitch = \"lan\"\nmac = \"{MAC}\"\npairs = 2\n\
             [[disk]]\nname = \"root\"\nserial = \"root\"\npath = \"/tmp/root.img\"\n\
             [[disk]]\nname = \"data\"\nserial = \"data\"\npath = \"/tmp/data.img\"\nqueues = 2\n"
        ),
    )?;
    let status = daemon.json("status")?;
    let nic = status["nics"][0]["socket"].as_str().context("the NIC's socket")?.to_owned();
    let status: Status = serde_json::from_value(status)?;
    let (root, data) = (status.disk("root")?.socket, status.disk("data")?.socket);
    l1.run(
        "set -e; ip addr add 10.7.0.1/24 dev tap0; ip link set tap0 up; /bin/busybox httpd -p 8080 -h /tmp/www",
        MINUTE,
    )?;
    let ended = l1
        .start(&format!(
            "cd /tmp; timeout 300 ./cloud-hypervisor -v --log-file /tmp/log --cpus boot=2 --memory size=256M,shared=on \
             --kernel /tmp/vmlinux --initramfs /tmp/initrd --cmdline 'console=ttyS0 quiet mitigations=off audit=0 apparmor=0' \
             --disk vhost_user=true,socket={root} vhost_user=true,socket={data},num_queues=2 \
             --net vhost_user=true,socket={nic},num_queues=4,mac={MAC} --console off --serial file=/tmp/serial; \
             status=$?; tail -n 60 /tmp/log; cat /tmp/serial; exit $status",
            root = root.display(),
            data = data.display(),
        ))?
        .wait(6 * MINUTE)?;
    let console = &ended.output;
    let context = || format!("Cloud Hypervisor said:\n{console}\nthe daemon:\n{}", daemon.said());
    let status: Status = serde_json::from_value(daemon.json("status")?)?;
    ensure!(ended.status == 0 && !console.contains("TRIAL FAILS"), "{}", context());
    told(console, "TRIAL ENDS").with_context(context)?;
    let found = told(console, "TRIAL FINDS data=")?;
    ensure!(found == format!("{} queues=2 cache=write back discard=yes", BYTES / 512), "{found}");
    ensure!(told(console, "TRIAL FINDS mac=")? == format!("{MAC} pairs=2"), "{}", context());

    // What the guest has written is in the image, and what the host has is what the guest has fetched.
    let sums =
        l1.run(&format!("head -c {WRITTEN} /tmp/data.img | sha256sum; sha256sum </tmp/www/file"), MINUTE)?;
    let sums: Vec<&str> = sums.lines().map(str::trim).collect();
    ensure!(
        sums == [told(console, "TRIAL SUM")?, told(console, "TRIAL FETCHED")?],
        "{sums:?}\n{}",
        context()
    );

    no_faults(&status).with_context(context)?;
    let (root, data, nic) = (status.disk("root")?, status.disk("data")?, status.nic("nic")?);
    for disk in [&root, &data] {
        ensure!(disk.totals.requests > 100 && disk.totals.interrupts > 0 && !disk.connected, "{disk:?}");
    }
    ensure!(nic.sent.frames > 5 && nic.received.bytes > SERVED, "{nic:?}");
    eprintln!(
        "{}: {} and {} requests of the disks, {} frames sent and {} received, no fault",
        version.lines().next().unwrap_or_default(),
        root.totals.requests,
        data.totals.requests,
        nic.sent.frames,
        nic.received.frames
    );
    daemon.stop()
}

/// First program of a guest that looks at its functions and writes a lot to its serial port.
const LOOKS: &str = "#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
for round in 1 2 3 4 5; do
    for function in /sys/bus/pci/devices/*; do
        echo \"FOUND ${function##*/} $(od -An -v -tx1 $function/config | cksum)\"
    done
    seq -s ' ' 1 400 | sed 's/^/FOUND /'
done
echo LOOKED
while :; do sleep 1000; done
";

/// What a guest has found, the exits until then, and the exits that clusters have saved.
fn looked(l1: &L1, name: &str, before: &str, options: &str) -> Result<(String, UserExits, Option<u64>)> {
    let exits = l1.count_user_exits()?;
    let vmm = l1.start(&format!(
        "exec env {before} /tmp/cloud-hypervisor {options} --cpus boot=1 --memory size=256M --kernel /tmp/vmlinux \\
         --initramfs /tmp/looks --cmdline 'console=ttyS0 quiet mitigations=off audit=0 apparmor=0' \\
         --console off --serial file=/tmp/{name}"
    ))?;
    let ended = l1.run(
        &format!("until grep -q LOOKED /tmp/{name} 2>/dev/null; do sleep 0.2; done; grep FOUND /tmp/{name}"),
        2 * MINUTE,
    );
    let found = ended.with_context(|| vmm.output())?;
    let exits = exits.read()?;
    let saved = l1.clustering("").ok().map(|status| saved(&status));
    vmm.kill()?;
    eprintln!("{name}: {exits:?}, saved: {saved:?}");
    Ok((found, exits, saved))
}

/// Its filter ends a thread of a vCPU that makes a system call of a cluster's. So the library leaves it alone unless it is asked.
#[test]
fn clusters_only_when_they_are_asked_for() -> Result<()> {
    let Some(program) = program() else {
        eprintln!(
            "SKIPPED (cannot be had here): Cloud Hypervisor was NOT tried with the interposer: Debian does not package it"
        );
        return Ok(());
    };
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let folder = l1.folder();
    fs::copy(&program, folder.join("cloud-hypervisor")).with_context(|| program.display().to_string())?;
    fs::copy(&l1.host.kernel, folder.join("vmlinux"))?;
    fs::write(folder.join("looks"), busybox_initrd(LOOKS)?)?;
    let script = format!("cd {} && cp cloud-hypervisor vmlinux looks /tmp", folder.display());
    l1.run(&script, MINUTE)?;
    let command = l1.interposed()?;
    let plain = looked(&l1, "plain", "", "")?;
    let inert = looked(&l1, "inert", &command, "")?;
    ensure!(inert.0 == plain.0 && inert.2.is_none_or(|saved| saved == 0), "{inert:?}, without: {plain:?}");
    let asked = looked(&l1, "asked", &format!("IOPLANE_EXITS_CLUSTER=on {command}"), "--seccomp false")?;
    ensure!(asked.0 == plain.0, "{asked:?}, without: {plain:?}");
    ensure!(asked.2.is_some_and(|saved| saved > 2000), "{asked:?}");
    fewer(&asked.1, &plain.1, 50)
}
