//! Linux's own NBD client on an export: a file system, raw writes past the cache, discards, and an exporter that is killed and comes back
//! under them.
//!
//! ```text
//!   L1: Debian's kernel with nbd.ko, /dev/nbd0 ---- two connections, QEMU's user network ----> ioplane here, an image
//!       guest/nbd/client.pl connects, and again for each connection that the kernel loses
//! ```
//!
//! `docs/guide/remote.md` says that it works. The kernel of this machine may have no nbd.ko, so the client runs in L1, which starts no guest.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::{Job, L1};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const CLIENT: &str = include_str!("../../guest/nbd/client.pl");
const MINUTE: Duration = Duration::from_secs(60);
const BYTES: u64 = 64 << 20;
/// Where raw writes go; nothing else is there.
const RAW_AT: u64 = 32 << 20;
const RAW_BYTES: usize = 4 << 20;

/// Bytes that tell where they belong.
fn pattern(salt: u64) -> Vec<u8> {
    let words =
        (0..RAW_BYTES as u64 / 8).map(|word| (word ^ (salt << 40)).wrapping_mul(0x2545_f491_4f6c_dd1d));
    words.flat_map(u64::to_le_bytes).collect()
}

/// How often a job has said so.
fn said(job: &Job<'_>, what: &str) -> usize {
    job.output().matches(what).count()
}

fn until(job: &Job<'_>, what: &str, count: usize) -> Result<()> {
    let end = Instant::now() + 2 * MINUTE;
    while said(job, what) < count {
        ensure!(!job.has_ended() && Instant::now() < end, "not {count} times {what:?}: {}", job.output());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[test]
fn linux_uses_an_export_and_survives_its_exporters_death() -> Result<()> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let config = format!(
        "[[core]]\nnotify = \"notified\"\n[[export]]\nname = \"data\"\npath = \"{{folder}}/data.img\"\nlisten = \"127.0.0.1:{port}\"\nplain = true\n"
    );
    // The image has to be there before the daemon that publishes it.
    let mut exporter = Daemon::start("")?;
    let image = exporter.folder().join("data.img");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&image)?;
    file.set_len(BYTES)?;
    let config = config.replace("{folder}", &exporter.folder().display().to_string());
    std::fs::write(exporter.folder().join("ioplane.toml"), config)?;
    exporter.restart()?;

    let l1 = L1::boot(512, "-netdev user,id=n -device virtio-net-pci,netdev=n,romfile=", &|line| {
        eprintln!("{line}")
    })?;
    let folder = l1.folder().display().to_string();
    std::fs::write(l1.folder().join("client.pl"), CLIENT)?;
    let patterns: Vec<Vec<u8>> = (0..3).map(pattern).collect();
    for (salt, bytes) in patterns.iter().enumerate() {
        std::fs::write(l1.folder().join(format!("pattern{salt}")), bytes)?;
    }
    let modules = l1.host.modules.display();
    l1.run(
        &format!(
            "set -e; for module in virtio_net nbd ext4; do /usr/sbin/modprobe -d {modules} $module; done
             export PATH=$PATH:/usr/sbin:/sbin
             ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0"
        ),
        MINUTE,
    )?;
    let client = l1.start(&format!("exec perl {folder}/client.pl attach 0 10.0.2.2 {port} data 2"))?;
    client.expect("attached", MINUTE)?;
    ensure!(client.output().contains(&format!("{BYTES} bytes")), "{}", client.output());

    // What Linux has been told, raw writes each of which is durable, and what it reads of them past its cache.
    let facts = l1.run(
        &format!(
            "set -e; cd /sys/block/nbd0; echo $(cat size) $(cat queue/write_cache) / $(cat queue/fua) / $(cat queue/discard_max_bytes)
             dd if={folder}/pattern0 of=/dev/nbd0 bs=1M seek={at} oflag=direct,dsync status=none
             dd if=/dev/nbd0 bs=64k skip={by_64k} count={count} iflag=direct status=none | cmp - {folder}/pattern0",
            at = RAW_AT >> 20,
            by_64k = RAW_AT >> 16,
            count = RAW_BYTES >> 16,
        ),
        MINUTE,
    )?;
    let words: Vec<&str> = facts.trim().split(" / ").collect();
    ensure!(words.len() == 3 && words[0] == format!("{} write back", BYTES / 512), "Linux says: {facts}");
    ensure!(words[1] == "1" && words[2] != "0", "no FUA, or nothing is discarded: {facts}");
    let mut there = vec![0; RAW_BYTES];
    let mut holds = |salt: usize| -> Result<bool> {
        file.read_exact_at(&mut there, RAW_AT)?;
        Ok(there == patterns[salt])
    };
    ensure!(holds(0)?, "the image has other bytes than Linux wrote");
    l1.run(
        &format!(
            "set -e; PATH=$PATH:/usr/sbin:/sbin; blkdiscard -o {RAW_AT} -l {RAW_BYTES} /dev/nbd0
             dd if=/dev/nbd0 bs=1M skip={at} count={count} iflag=direct status=none | tr -d '\\0' | wc -c | grep -qx 0",
            at = RAW_AT >> 20,
            count = RAW_BYTES >> 20,
        ),
        MINUTE,
    )
    .context("what is discarded reads as zeros")?;

    // A file system in the first half, seen by two mounts.
    let mount = "mkdir -p /tmp/mnt; mount /dev/nbd0 /tmp/mnt";
    l1.run(
        &format!(
            "set -e; PATH=$PATH:/usr/sbin:/sbin; mke2fs -q -t ext4 /dev/nbd0 24M; {mount}
             cp {folder}/pattern1 /tmp/mnt/file; sync; fstrim /tmp/mnt; umount /tmp/mnt
             echo 3 >/proc/sys/vm/drop_caches; {mount}; cmp /tmp/mnt/file {folder}/pattern1; umount /tmp/mnt; e2fsck -fn /dev/nbd0"
        ),
        2 * MINUTE,
    )?;

    // Writers that go on while their server is killed twice; every pass ends with a flush, and reads what it has written.
    let writers = l1.start(&format!(
        "set -e; while [ ! -e {folder}/enough ]; do for salt in 1 2; do
             dd if={folder}/pattern$salt of=/dev/nbd0 bs=16k seek={by_16k} oflag=direct conv=fsync status=none
             dd if=/dev/nbd0 bs=64k skip={by_64k} count={count} iflag=direct status=none | cmp - {folder}/pattern$salt
         done; echo a pass has ended; done",
        by_16k = RAW_AT >> 14,
        by_64k = RAW_AT >> 16,
        count = RAW_BYTES >> 16,
    ))?;
    for death in 1..=2 {
        until(&writers, "a pass has ended", said(&writers, "a pass has ended") + 1)?;
        exporter.kill9();
        until(&client, "a connection is lost", 2 * death - 1)?;
        exporter.restart()?;
        until(&client, "connected again", 2 * death)?;
        until(&writers, "a pass has ended", said(&writers, "a pass has ended") + 2)?;
    }
    std::fs::write(l1.folder().join("enough"), "")?;
    let ended = writers.wait(2 * MINUTE)?;
    ensure!(ended.status == 0, "a writer saw its server die: {}", ended.output);
    ensure!(holds(2)?, "the image has other bytes than the last pass wrote");
    let kernel = l1.run("dmesg | grep -E 'I/O error|Buffer I/O' || true", MINUTE)?;
    ensure!(kernel.is_empty(), "Linux had errors: {kernel}");

    // It leaves in order, and the file system is as it was.
    client.kill()?;
    l1.run(
        &format!(
            "set -e; PATH=$PATH:/usr/sbin:/sbin; e2fsck -fn /dev/nbd0; perl {folder}/client.pl detach 0"
        ),
        MINUTE,
    )?;
    let end = Instant::now() + MINUTE;
    while exporter.cli(&["publish", "show", "data"])?["connections"] != 0 {
        ensure!(Instant::now() < end, "Linux has not left: {}", exporter.cli(&["publish", "show", "data"])?);
        std::thread::sleep(Duration::from_millis(50));
    }
    exporter.terminate(MINUTE)
}
