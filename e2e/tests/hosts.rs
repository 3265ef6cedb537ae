//! Three hosts, each with namespaces of its own, and a guest whose disks go through everything that docs/guide/remote.md and its neighbours
//! promise, by the command line. Its load checks every byte, all the time.
//!
//! ```text
//!   host-a publishes data (TLS, by name)      host-b attaches it; the guest boots there, from an image of host-b
//!   host-a | host-b cut off from each other: requests wait, a move is refused; healed
//!   host-b publishes root while it is in use; move prepare; a move that is cancelled; move vm ------> the guest is on host-c
//!   host-c: swap data and root to images of its own, verify, devices; then nobody else is there any more
//! ```
//!
//! `IOPLANE_SOAK_SECONDS` repeats it for so long, at least twice: names in host-a's daemon, and in etcd; cables that lose packets.

mod three;

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::Guest;
use ioplane_e2e::daemon::binary;
use ioplane_e2e::hosts::{DISKS, DISKS_BY_NAME, holds, holds_none, machine, remote};
use ioplane_e2e::migration::BANDWIDTH;
use ioplane_e2e::protocol::{LoadSpec, Mix};
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, expect_quiet, expect_right, finish, mixed, until};
use ioplane_e2e::{Qemu, RunningLoad, Version, Vm};
use ioplane_testkit::relay::{BOTH, Relay};
use serde_json::json;
use three::{Forward, Host, Names, Three};

/// What QEMU and `ioplane` call the guest.
const VM: &str = "web";
const MIB: u64 = 1 << 20;
const DATA_BYTES: u64 = 64 * MIB;
/// The load has the end of the disk; before it is a pattern that nobody changes.
const LOAD_AT: u64 = 48 * MIB;
/// Where one byte of the old copy is changed, so that `verify` has something to find.
const PLANTED: u64 = 5 * MIB;
/// The guest may stand still for so many ms: its load goes on changing memory, on whatever the cables carry.
const DOWNTIME: u64 = 10_000;

fn pattern() -> Vec<u8> {
    (0..LOAD_AT / 4).flat_map(|at| (at as u32).wrapping_mul(0x9e37_79b9).to_le_bytes()).collect()
}

fn text(path: &Path) -> Result<&str> {
    path.to_str().context("a path that is not UTF-8: choose another TMPDIR")
}

/// What happens, and when.
struct Story<'a> {
    three: &'a Three,
    guest: Guest,
    begun: Instant,
}

impl Story<'_> {
    fn say(&self, line: &str) {
        eprintln!("[{:5.1} s] {line}", self.begun.elapsed().as_secs_f64());
    }

    /// The guest's QEMU on this host.
    fn qemu<'q>(&self, host: &Host) -> Result<Qemu<'q>> {
        let args = host.daemon.qemu_args(Version::Host, MEMORY_MIB, &DISKS)?;
        Ok(Qemu::new(VM)
            .version(Version::Host)
            .memory_mib(MEMORY_MIB)
            .machine(&machine()?)
            .at(&host.place)
            .args(&args))
    }

    /// The load goes on, and nothing was wrong.
    fn goes_on(&self, load: &RunningLoad<'_>) -> Result<()> {
        // There is a load, and what it did before says nothing.
        load.progress(MINUTE)?;
        load.mark()?;
        until("the load goes on", || {
            let report = load.mark()?;
            expect_right(&report)?;
            Ok(report.reads > 0 && report.writes > 0)
        })
    }

    /// Publishes on host-a, attaches on host-b, and boots there.
    fn attach(&self) -> Result<Vm> {
        let [a, b, c] = &self.three.hosts;
        let image = a.file("data.img");
        let file = File::create(&image)?;
        file.set_len(DATA_BYTES)?;
        file.write_all_at(&pattern(), 0)?;
        let listen = ["--listen", "0.0.0.0:10809", "--tls", "--allow", "host-b,host-c"];
        a.daemon.cli(&[&["publish", "disk", "data", "--path", text(&image)?], &listen[..]].concat())?;
        for host in [b, c] {
            until("the disk is listed", || Ok(host.device("data")?["state"] == "present"))?;
        }
        self.guest.copy_to(&b.file("root.img"))?;
        b.daemon.cli(&["disk", "add", "root", "--path", text(&b.file("root.img"))?])?;
        b.daemon.cli(&["disk", "add", "data", "--remote", "data"])?;
        let uri = remote(&b.daemon, "data")?["uri"].clone();
        ensure!(uri.as_str().is_some_and(|uri| uri.starts_with("nbds://")), "not by TLS: {uri}");
        let vm = self.qemu(b)?.news(&|line| eprintln!("{line}")).start(&self.guest)?;
        self.say("the guest is up on host-b");
        until("host-b holds the disk, as all see", || {
            let holder = c.device("data")?["holder"].clone();
            Ok(holder.as_str().is_some_and(|holder| holder.contains("host-b")))
        })?;
        Ok(vm)
    }

    /// The root disk, an image of host-b, is published while the guest uses it. A move is refused before.
    fn publish_root(&self, vm: &Vm) -> Result<()> {
        let b = &self.three.hosts[1].daemon;
        let monitor = vm.monitor();
        let move_vm = ["move", "vm", VM, "--qmp", text(&monitor)?, "--to", "tcp:host-c:4444"];
        let said = b.refused(&move_vm)?;
        ensure!(said.contains("disk root is an image of this host"), "{said}");
        let words = ["publish", "disk", "web-root", "--disk", "root", "--listen", "0.0.0.0:10809", "--tls"];
        b.cli(&[&words[..], &["--allow", "host-c"]].concat())?;
        until("host-b holds its disk", || holds(b, &["root"]))
    }

    /// Packets between host-a and host-b are dropped until the connections are given up.
    fn partition(&self, vm: &Vm, load: &RunningLoad<'_>) -> Result<()> {
        let b = &self.three.hosts[1].daemon;
        let cable = self.three.between((0, 1))?;
        cable.cut(&BOTH);
        until("host-b misses its disk", || Ok(remote(b, "data")?["state"] == "reconnecting"))?;
        let waits = remote(b, "data")?;
        ensure!(waits["in_flight"].as_u64() > Some(0), "nothing waits, so the load proves nothing: {waits}");
        let monitor = vm.monitor();
        let said = b.refused(&["move", "vm", VM, "--qmp", text(&monitor)?, "--to", "tcp:host-c:4444"])?;
        ensure!(said.contains("the server of disk data is"), "{said}");
        cable.heal();
        until("host-b is connected again", || Ok(remote(b, "data")?["state"] == "connected"))?;
        self.goes_on(load)?;
        let after = remote(b, "data")?;
        ensure!(after["replays"].as_u64() > Some(0) && after["device_errors"] == 0, "{after}");
        self.say(&format!("host-a was cut off and is back: {after}"));
        Ok(())
    }

    /// Ctrl-C while memory is copied: the guest stays.
    fn cancelled_move(&self, vm: &mut Vm, load: &RunningLoad<'_>, there: &Path) -> Result<()> {
        let [_, b, c] = &self.three.hosts;
        let next = self.qemu(c)?.incoming_at("tcp:0.0.0.0:4444").launch(&self.guest)?;
        // Slow enough that it is not over before somebody has looked.
        vm.pace(MIB, DOWNTIME)?;
        let (monitor, control) = (vm.monitor(), b.daemon.socket());
        let words = ["--socket", text(&control)?, "move", "vm", VM, "--qmp", text(&monitor)?];
        let words = [&words[..], &["--to", "tcp:host-c:4444", "--there", text(there)?]].concat();
        let words: Vec<OsString> = words.iter().map(Into::into).collect();
        let mut moving = b.place.start(binary()?, &words, &b.file("cancelled.log"))?;
        until("memory is copied", || {
            moving.still_runs()?;
            let info = vm.qmp().execute("query-migrate", json!({}))?;
            Ok(info["status"] == "active" && info["ram"]["transferred"].as_u64() > Some(0))
        })?;
        moving.interrupt()?;
        let status = moving.wait(MINUTE)?;
        let said = moving.said();
        let right = said.contains("was cancelled") && said.contains("it runs here as before");
        ensure!(status.code() == Some(1) && right, "{status}: {said}");
        ensure!(
            holds(&b.daemon, &DISKS)? && holds_none(&c.daemon, &DISKS)?,
            "after a move that was cancelled"
        );
        drop(next);
        self.goes_on(load)?;
        self.say("a move was cancelled");
        Ok(())
    }

    /// To host-c, through the relay.
    fn travel(&self, mut vm: Vm, load: &RunningLoad<'_>) -> Result<Vm> {
        let [a, b, c] = &self.three.hosts;
        let forward = Forward::new(b.file("host-c.sock"), c.daemon.socket())?;
        let there = forward.socket();
        for added in [true, false] {
            let words = ["move", "prepare", VM, "--there", text(there)?, "--via", "host-b"];
            let prepared = b.daemon.cli(&words)?;
            let devices = DISKS_BY_NAME
                .map(|name| json!({ "kind": "disk", "name": name, "added": added, "export": null }));
            ensure!(prepared == json!({ "vm": VM, "devices": devices }), "{prepared}");
        }
        self.cancelled_move(&mut vm, load, there)?;
        let mut next = self.qemu(c)?.incoming_at("tcp:0.0.0.0:4445").launch(&self.guest)?;
        ensure!(holds(&b.daemon, &DISKS)? && holds_none(&c.daemon, &DISKS)?, "before it moves");
        vm.pace(BANDWIDTH, DOWNTIME)?;
        let moved = vm.move_by_command(&b.daemon, "tcp:host-c:4445", there);
        let moved = moved.map_err(|error| next.explain(vm.explain(error)))?;
        ensure!(moved.vm == VM && moved.disks == DISKS_BY_NAME && moved.bytes > 0, "{moved:?}");
        ensure!(holds(&c.daemon, &DISKS)? && holds_none(&b.daemon, &DISKS)?, "after it has moved");
        next.go_on_from(vm)?;
        self.goes_on(load).map_err(|error| next.explain(error))?;
        self.say(&format!("the guest is on host-c: {moved:?}"));
        for (host, name) in [(a, "web-root"), (b, "data")] {
            until("host-c holds the disks, as all see", || {
                let holder = host.device(name)?["holder"].clone();
                Ok(holder.as_str().is_some_and(|holder| holder.contains("host-c")))
            })?;
        }
        Ok(next)
    }

    /// Both disks to images of host-c, while the guest writes; then the copies are compared.
    fn swap(&self, load: &RunningLoad<'_>) -> Result<()> {
        let [a, b, c] = &self.three.hosts;
        for disk in DISKS {
            let image = c.file(&format!("{disk}.img"));
            let swapped = c.daemon.cli(&["swap", disk, "--to", text(&image)?])?;
            ensure!(swapped["state"] == "done", "{swapped}");
            self.goes_on(load)?;
            self.say(&format!("{disk} was swapped: {swapped}"));
        }
        for (host, name) in [(b, "data"), (a, "web-root")] {
            until("nobody holds what was published", || {
                let device = host.device(name)?;
                Ok(device["state"] == "present" && device["holder"].is_null())
            })?;
        }
        let old = File::options().read(true).write(true).open(a.file("data.img"))?;
        let mut byte = [0];
        old.read_exact_at(&mut byte, PLANTED)?;
        old.write_all_at(&[!byte[0]], PLANTED)?;
        old.sync_all()?;
        // The guest goes on writing: what is different elsewhere is what it has written since the swap.
        let said = c.daemon.said(&["verify", "data", "--with", "device:data", "--json"])?;
        ensure!(said.code == Some(1), "one byte was changed: {said}");
        let found: serde_json::Value = serde_json::from_str(&said.out)?;
        let first = found["first"].as_array().context("no ranges")?;
        let all = found["compared"] == DATA_BYTES
            && first.first() == Some(&json!({ "offset": PLANTED, "len": 512 }));
        let rest = first.iter().skip(1).all(|range| range["offset"].as_u64() >= Some(LOAD_AT));
        ensure!(all && rest, "{found}");
        self.say(&format!("the copies were compared: {} ranges differ", found["ranges"]));
        Ok(())
    }

    /// The guest has all that it has written, and what it has not written is what it was.
    fn end(&self, vm: Vm, load: RunningLoad<'_>) -> Result<()> {
        let c = &self.three.hosts[2];
        let agent = vm.share_agent();
        for _ in 0..3 {
            self.goes_on(&load)?;
        }
        let (report, verified) = finish(&agent, load)?;
        expect_quiet(&agent)?;
        vm.poweroff()?;
        let complaints = c.daemon.status()?.complaints();
        ensure!(complaints.is_empty(), "the daemon of host-c complains: {complaints:?}");
        let mut rest = vec![0; LOAD_AT as usize];
        File::open(c.file("data.img"))?.read_exact_at(&mut rest, 0)?;
        ensure!(rest == pattern(), "what the guest has not written differs");
        self.say(&format!("{} requests, {} blocks are right", report.requests, verified.blocks));
        Ok(())
    }
}

/// One guest from its boot to its end.
fn play(names: Names, round: u64) -> Result<()> {
    let begun = Instant::now();
    let Some(three) = Three::new(names, round)? else { return Ok(()) };
    let guest = Guest::prepare(&|line| eprintln!("{line}"))?;
    if round > 0 {
        three.relays.iter().for_each(|relay| {
            relay.set_both(|conditions| {
                conditions.delay = Duration::from_millis(1);
                conditions.loss_percent = 0.1;
            })
        });
    }
    let outcome = (|| {
        let story = Story { three: &three, guest, begun };
        story.say(&format!("three hosts are there, names: {names:?}"));
        let vm = story.attach()?;
        let agent = vm.share_agent();
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let spec = LoadSpec { mix, offset: LOAD_AT, seed: round + 1, ..mixed("data", DATA_BYTES - LOAD_AT) };
        let load = agent.load(spec)?;
        story.goes_on(&load)?;
        story.publish_root(&vm)?;
        story.partition(&vm, &load).map_err(|error| vm.explain(error))?;
        let vm = story.travel(vm, &load)?;
        story.swap(&load).map_err(|error| vm.explain(error))?;
        let lost = |relay: &Relay| BOTH.iter().map(|way| relay.counts(*way).lost).sum::<u64>();
        ensure!(
            three.relays.iter().all(|relay| (lost(relay) > 0) == (round > 0)),
            "the cables are not as they should be"
        );
        three.cut_off(2);
        story.end(vm, load)
    })();
    outcome.map_err(|error: anyhow::Error| error.context(format!("last words:\n{}", three.last_words())))
}

#[test]
fn a_guest_goes_through_all_of_it_on_three_hosts() -> Result<()> {
    let seconds = match std::env::var("IOPLANE_SOAK_SECONDS") {
        Err(_) => return play(Names::Embedded, 0),
        Ok(text) => text.parse().with_context(|| format!("IOPLANE_SOAK_SECONDS={text}: give a number"))?,
    };
    let etcd = std::process::Command::new("etcd").arg("--version").output().is_ok();
    if !etcd {
        eprintln!("\n*** SKIPPED: three hosts with names in etcd were NOT tested: install etcd-server ***");
    }
    let begun = Instant::now();
    for round in 0.. {
        if round > 1 && begun.elapsed() >= Duration::from_secs(seconds) {
            break;
        }
        play(if round % 2 == 1 && etcd { Names::Etcd } else { Names::Embedded }, round)?;
    }
    Ok(())
}
