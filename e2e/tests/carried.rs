//! A VM moves to another host while it runs, with an emulated NIC that its stock driver (8139cp) drives by vfio-user, and with disks of a third host: by
//! `ioplane move vm`, on stock QEMU, there and back, under TCP both ways and pings. Then moves that fail: the guest goes on here, with its NIC.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::assets::Kernel;
use ioplane_e2e::daemon::Daemon;
use ioplane_e2e::exchange::{End, Passage};
use ioplane_e2e::hosts::{DISKS, holds, holds_none, three};
use ioplane_e2e::migration::{BANDWIDTH, DOWNTIME, Move};
use ioplane_e2e::nics::Pings;
use ioplane_e2e::protocol::{Command as Net, LoadSpec, Mix};
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, Stage, expect_quiet, expect_right, finish, mixed, play};
use ioplane_e2e::uplink::{HOST_MAC, Host};
use ioplane_e2e::{Qemu, Version, Vm, network};
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};
use std::process::Output;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const CONFIG: &str = "[[core]]\nspin_us = 200\n";
const BYTES: u64 = 8 << 20;
const NAME: &str = "web";
const NIC: &str = "nic0";
const MAC: &str = "02:00:00:00:00:39";
/// How long traffic goes on before and after what happens under it.
const BESIDE: Duration = Duration::from_secs(2);

/// Both hosts, and the network that they are on.
struct Hosts {
    other: Daemon,
    _exporter: Daemon,
    network: Host,
}

fn hosts(stage: &Stage) -> Result<Hosts> {
    let (exporter, other) = three(stage, CONFIG)?;
    let taps = ["a", "b"].map(|at| format!("ic{at}{}", std::process::id() % 100_000));
    for (host, tap) in [&stage.daemon, &other].into_iter().zip(&taps) {
        host.cli(&["switch", "add", "lan", "--uplink", tap])?;
        host.cli(&["pci", "add", NIC, "--emulate", "rtl8139", "--switch", "lan", "--mac", MAC])?;
    }
    let network = Host::behind_a_bridge(&[&taps[0], &taps[1]])?;
    Ok(Hosts { other, _exporter: exporter, network })
}

fn qemu<'a>(host: &Daemon) -> Result<Qemu<'a>> {
    let devices = [&DISKS[..], &[NIC]].concat();
    let args = host.qemu_args(Version::Newer, MEMORY_MIB, &devices)?;
    Ok(Qemu::new(NAME).version(Version::Newer).memory_mib(MEMORY_MIB).args(&args))
}

/// A QEMU of `host` that waits for the guest, and where it does.
fn waiting(stage: &Stage, host: &Daemon) -> Result<(Vm, String)> {
    let socket = stage.image("incoming");
    let _ = std::fs::remove_file(&socket);
    let uri = format!("unix:{}", socket.display());
    let vm = qemu(host)?.incoming_at(&uri).launch(&stage.guest)?;
    stage.until("it listens", || Ok(socket.exists()))?;
    Ok((vm, uri))
}

fn nic(host: &Daemon) -> Result<Value> {
    host.cli(&["pci", "show", NIC])
}

/// Moves the guest to a QEMU of the other host.
fn travel(stage: &Stage, mut vm: Vm, (here, there): (&Daemon, &Daemon)) -> Result<Vm> {
    let (mut next, uri) = waiting(stage, there)?;
    vm.pace(BANDWIDTH, DOWNTIME)?;
    let moved = Move::of(&vm, here, &uri, there, &next)?.done();
    let moved = moved.map_err(|error| next.explain(vm.explain(error)))?;
    next.go_on_from(vm)?;
    let function = &moved["functions"][0];
    ensure!(function["name"] == NIC && function["mode"] == "emulated", "{moved}");
    ensure!(function["pages_sent"].as_u64() > Some(0), "it has written while memory was copied: {moved}");
    ensure!(nic(here)?["stage"] == "running" && nic(there)?["stage"] == "running", "nobody holds one");
    stage.until("the other host holds the disks", || holds(there, &DISKS))?;
    stage.until("this one does not", || holds_none(here, &DISKS))?;
    stage.say(format!("it has moved: {moved}"));
    Ok(next)
}

fn start_pings(network: &Host) -> Result<std::process::Child> {
    let address = network::link_local(MAC)?.to_string();
    let mut ping = network.command("busybox");
    ping.args(["ping6", "-i", "0.1", "-s", "1000"]).arg(format!("{address}%bridge"));
    ping.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    ping.spawn().context("busybox of the package busybox-static")
}

/// Numbers of the replies, in the order in which they came.
fn replies(said: &str) -> Vec<u32> {
    let number = |line: &str| line.split_once("seq=")?.1.split_whitespace().next()?.parse().ok();
    said.lines().filter_map(number).collect()
}

fn pinged(output: &Output) -> Result<Pings> {
    let said = String::from_utf8_lossy(&output.stdout);
    let numbers = replies(&said);
    ensure!(numbers.windows(2).all(|pair| pair[0] < pair[1]), "a reply came twice, or late:\n{said}");
    Pings::of(&said)
}

/// TCP both ways and pings, as long as `act` does something with the guest; every byte is checked.
fn under_traffic<R>(
    stage: &Stage,
    hosts: &Hosts,
    vm: Vm,
    port: u16,
    act: impl FnOnce(Vm) -> Result<R>,
) -> Result<R> {
    let agent = vm.share_agent();
    let index = End::up(&agent, MAC)?.interface.index;
    let to = HOST_MAC.to_owned();
    let sending = agent.begin(Net::NetSend { index, to, port, seconds: None, seed: 1, write: 0 })?;
    let receiving = agent.begin(Net::NetReceive { index, port: port + 1 })?;
    let network = &hosts.network;
    let pings = start_pings(network)?;
    let enough = AtomicBool::new(false);
    let more = |_: &_| Ok(!enough.load(Ordering::Acquire));
    let (done, received, sent) = std::thread::scope(|scope| {
        let received = scope.spawn(|| network.within(|index| network::receive_enough(index, port, &enough)));
        let sent =
            scope.spawn(|| network.within(|index| network::send_while(index, MAC, port + 1, (2, 0), more)));
        std::thread::sleep(BESIDE);
        let done = act(vm).inspect_err(|error| stage.say(format!("{error:#}")));
        std::thread::sleep(BESIDE);
        let broken = received.is_finished() || sent.is_finished();
        enough.store(true, Ordering::Release);
        let joined = |_| anyhow::anyhow!("the host's end panicked");
        let ends = (received.join().map_err(joined), sent.join().map_err(joined));
        ensure!(done.is_err() || !broken, "a transfer has ended by itself: {ends:?}");
        Ok((done, ends.0, ends.1))
    })?;
    let done = done?;
    let out = Passage { sent: serde_json::from_value(sending.end(MINUTE, |_| {})?)?, received: received?? }
        .right()?;
    let back = serde_json::from_value(receiving.end(MINUTE, |_| {})?)?;
    let back = Passage { sent: sent??, received: back }.right()?;
    let pid = Pid::from_child(&pings);
    rustix::process::kill_process(pid, Signal::INT)?;
    let pings = pinged(&pings.wait_with_output()?)?;
    stage.say(format!("{} and {} KiB, every byte checked; {pings:?}", out.bytes >> 10, back.bytes >> 10));
    Ok(done)
}

#[test]
fn a_guest_moves_with_its_nic_and_disks_under_load() -> Result<()> {
    play(CONFIG, |stage| {
        stage.guest = stage.guest.clone().with(Kernel::Generic, &|line| eprintln!("{line}"))?;
        let hosts = hosts(stage)?;
        let mut vm = stage.boot(qemu(&stage.daemon)?)?;
        let agent = vm.share_agent();
        let mix = Mix { read: 40, write: 50, sync: 4, discard: 3, zero: 3 };
        let load = agent.load(LoadSpec { mix, ..mixed("data", BYTES) })?;
        load.progress(MINUTE)?;
        let ways = [(&stage.daemon, &hosts.other), (&hosts.other, &stage.daemon)];
        for (port, (here, there)) in [4000, 4010].into_iter().zip(ways) {
            vm = under_traffic(stage, &hosts, vm, port, |vm| travel(stage, vm, (here, there)))?;
            load.progress(MINUTE).map_err(|error| vm.explain(error))?;
            expect_right(&load.mark()?).map_err(|error| vm.explain(error))?;
        }
        let (report, verified) = finish(&agent, load).map_err(|error| vm.explain(error))?;
        expect_quiet(&agent).map_err(|error| vm.explain(error))?;
        stage.say(format!("{} requests, {} blocks are right", report.requests, verified.blocks));
        vm.poweroff()?;
        stage.expect_clean()
    })
}

/// What happens while a move is held up just before the switch-over.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    /// The other QEMU is killed.
    Killed,
    /// Ctrl-C.
    Cancelled,
    /// The other daemon answers nothing any more: QEMU sends all of the guest, and its NIC does not get its state there.
    Hung,
}

/// Has a move wait at the switch-over, and then get into trouble. What it says.
fn troubled(
    stage: &Stage,
    vm: &mut Vm,
    trouble: Trouble,
    (here, there): (&Daemon, &Daemon),
) -> Result<String> {
    let (mut next, uri) = waiting(stage, there)?;
    // Slow enough to be stopped on the way.
    vm.pace(24 << 20, DOWNTIME)?;
    let moving = Move::of(vm, here, &uri, there, &next)?.begin()?;
    // The one before may have been cancelled.
    stage.until("memory is copied", || {
        Ok(vm.qmp().execute("query-migrate", json!({}))?["status"] == "active")
    })?;
    moving.stop()?;
    vm.pace(BANDWIDTH, DOWNTIME)?;
    vm.wait_migration(&["pre-switchover"])?;
    match trouble {
        Trouble::Killed => next.kill(),
        Trouble::Cancelled => moving.interrupt()?,
        Trouble::Hung => there.signal(Signal::STOP)?,
    }
    moving.go_on()?;
    let said = moving.refused();
    if let Trouble::Hung = trouble {
        there.signal(Signal::CONT)?;
        // Told to end if it could hear it; it does not run in any case.
        let state = next.qmp().execute("query-status", json!({}));
        ensure!(state.as_ref().map_or(true, |state| state["running"] == false), "{state:?}");
    }
    said
}

#[test]
fn a_move_that_fails_or_is_cancelled_leaves_the_guest_its_nic() -> Result<()> {
    play(CONFIG, |stage| {
        stage.guest = stage.guest.clone().with(Kernel::Generic, &|line| eprintln!("{line}"))?;
        let hosts = hosts(stage)?;
        let mut vm = stage.boot(qemu(&stage.daemon)?)?;
        let ways = (&stage.daemon, &hosts.other);
        let troubles = [Trouble::Killed, Trouble::Cancelled, Trouble::Hung];
        for (port, trouble) in (4000..).step_by(10).zip(troubles) {
            vm = under_traffic(stage, &hosts, vm, port, |mut vm| {
                let said = troubled(stage, &mut vm, trouble, ways).map_err(|error| vm.explain(error))?;
                stage.say(format!("{trouble:?}: {said}"));
                ensure!(said.contains("it runs here as before") && !said.contains("not as it was"), "{said}");
                Ok(vm)
            })?;
            ensure!(
                nic(&stage.daemon)?["stage"] == "running" && holds(&stage.daemon, &DISKS)?,
                "{trouble:?}"
            );
        }
        // And then it moves.
        vm = under_traffic(stage, &hosts, vm, 4100, |vm| travel(stage, vm, ways))?;
        expect_quiet(vm.agent()).map_err(|error| vm.explain(error))?;
        vm.poweroff()?;
        stage.expect_clean()
    })
}

#[test]
fn what_cannot_go_along_is_found_before_anything_stops() -> Result<()> {
    play(CONFIG, |stage| {
        stage.guest = stage.guest.clone().with(Kernel::Generic, &|line| eprintln!("{line}"))?;
        let hosts = hosts(stage)?;
        let mut vm = stage.boot(qemu(&stage.daemon)?)?;
        let (here, there) = (&stage.daemon, &hosts.other);
        let (next, uri) = waiting(stage, there)?;
        let monitor = vm.monitor().display().to_string();
        let said = stage.refused(&["move", "vm", NAME, "--qmp", &monitor, "--to", &uri])?;
        ensure!(said.contains("--there SOCKET") && said.contains("--qmp-there"), "{said}");
        // Without `ioplane move` it cannot leave: it would have a dead NIC there.
        let said = vm.qmp().execute("migrate", json!({ "uri": uri }));
        ensure!(format!("{said:?}").contains("unmovable-nic0"), "{said:?}");
        let set = |vm: &mut Vm, capability: &str, state: bool| {
            let one = json!({ "capability": capability, "state": state });
            vm.qmp().execute("migrate-set-capabilities", json!({ "capabilities": [one] }))
        };
        set(&mut vm, "postcopy-ram", true)?;
        let said = Move::of(&vm, here, &uri, there, &next)?.begin()?.refused()?;
        ensure!(said.contains("migrate with postcopy-ram"), "{said}");
        set(&mut vm, "postcopy-ram", false)?;
        ensure!(vm.qmp().execute("query-status", json!({}))?["status"] == "running", "it runs");
        drop(next);
        vm.poweroff()?;
        stage.expect_clean()
    })
}
