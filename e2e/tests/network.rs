//! Stock guests on a switch: TCP both ways with large frames, every byte checked, and the way out by a TAP interface.

use anyhow::{Result, ensure};
use ioplane_e2e::exchange::{End, Passage, exchange};
use ioplane_e2e::protocol::Command as Net;
use ioplane_e2e::stage::{MEMORY_MIB, MINUTE, Stage, expect_quiet, play};
use ioplane_e2e::uplink::{HOST_MAC, Host};
use ioplane_e2e::{Qemu, Version, Vm, network};

/// Feature bit 34.
const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
/// Seconds of each exchange.
const STRETCH: f64 = 5.0;

/// A guest with a root disk and a NIC on the switch `lan`; one with several vCPUs has packed rings. Each NIC has two queue pairs: the
/// host's QEMU 7.2 tells of memory once for each.
fn guest(stage: &Stage, name: &str, version: Version, cpus: u32) -> Result<Vm> {
    let root = format!("{name}-root");
    stage.add_root(&root)?;
    stage.daemon.cli(&["nic", "add", name, "--switch", "lan", "--pairs", "2"])?;
    let args = stage.daemon.qemu_args(version, MEMORY_MIB, &[&root, name])?;
    let args = if cpus > 1 { args.replace("virtio-net-pci,", "virtio-net-pci,packed=on,") } else { args };
    let qemu = Qemu::new(name).version(version).memory_mib(MEMORY_MIB).args(&args).cpus(cpus);
    stage.boot(qemu)
}

/// The guests `left` and `right` on the switch `lan`, on two VMMs; the second with so many vCPUs.
fn neighbours(stage: &Stage, cpus: u32) -> Result<[Vm; 2]> {
    stage.daemon.cli(&["switch", "add", "lan"])?;
    Ok([guest(stage, "left", Version::Host, 1)?, guest(stage, "right", Version::Newer, cpus)?])
}

fn end<'a>(stage: &Stage, vm: &'a Vm) -> Result<End<'a>> {
    let mac = stage.daemon.status()?.nic(vm.name())?.mac.clone();
    End::up(vm.agent(), &mac).map_err(|error| vm.explain(error))
}

#[test]
fn guests_exchange_tcp_over_the_switch() -> Result<()> {
    play("", |stage| {
        let [left, right] = neighbours(stage, 2)?;
        let (a, b) = (end(stage, &left)?, end(stage, &right)?);
        let names = ["left", "right"];
        for (round, mode) in ["notified", "polled"].into_iter().enumerate() {
            stage.daemon.cli(&["core", "mode", mode])?;
            let before = stage.daemon.status()?.sum_nics(&names)?;
            let port = 4000 + 10 * round as u16;
            let [there, back] = exchange(&a, &b, port, STRETCH).map_err(|error| left.explain(error))?;
            let after = stage.daemon.status()?.sum_nics(&names)?;
            let (frames, bytes) = (after.frames - before.frames, after.bytes - before.bytes);
            stage.say(format!(
                "{mode}: {} and {} MB, {frames} frames of {} bytes, {} kicks, {} interrupts",
                there.bytes >> 20,
                back.bytes >> 20,
                bytes / frames.max(1),
                after.kicks - before.kicks,
                after.interrupts - before.interrupts
            ));
            // Acknowledgements are small; without large frames the mean could not be above 1514.
            ensure!(
                bytes / frames.max(1) > 2000,
                "TSO frames do not cross whole: {bytes} bytes in {frames} frames"
            );
        }
        for vm in [&left, &right] {
            expect_quiet(vm.agent())?;
        }
        let nics = &stage.daemon.cli(&["status"])?["nics"];
        let packed =
            nics[1]["features"].as_u64().is_some_and(|features| features & VIRTIO_F_RING_PACKED != 0);
        ensure!(packed, "its rings are not packed: {}", nics[1]);
        let pairs = &nics[1]["queues"];
        let running = pairs.as_array().into_iter().flatten().filter(|queue| !queue["core"].is_null()).count();
        ensure!(running == 4, "both pairs of the guest with two vCPUs run: {pairs}");
        stage.expect_clean()?;
        left.poweroff()?;
        right.poweroff()
    })
}

/// A NIC has no journal: frames are lost or come twice, which TCP does not mind; a buffer lost or used twice it would.
#[test]
fn a_daemon_that_dies_is_a_pause_for_tcp() -> Result<()> {
    play("", |stage| {
        let [left, right] = neighbours(stage, 1)?;
        let (a, b) = (end(stage, &left)?, end(stage, &right)?);
        std::thread::scope(|scope| {
            let exchanged = scope.spawn(|| exchange(&a, &b, 4200, 3.0 * STRETCH));
            for _ in 0..3 {
                let frames = stage.daemon.status()?.sum_nics(&["left", "right"])?.frames;
                stage.until("frames flow", || {
                    Ok(stage.daemon.status()?.sum_nics(&["left", "right"])?.frames > frames + 200)
                })?;
                stage.daemon.kill9();
                stage.daemon.restart()?;
            }
            let exchanged = exchanged.join().map_err(|_| anyhow::anyhow!("the exchange panicked"))?;
            let [there, back] = exchanged.map_err(|error| left.explain(error))?;
            stage.say(format!("{} and {} MB, three deaths", there.bytes >> 20, back.bytes >> 20));
            Ok::<_, anyhow::Error>(())
        })?;
        for vm in [left, right] {
            expect_quiet(vm.agent())?;
            vm.poweroff()?;
        }
        stage.expect_clean()
    })
}

#[test]
fn a_guest_reaches_the_host_by_its_uplink() -> Result<()> {
    play("", |stage| {
        let tap = format!("iop{}", std::process::id() % 100_000);
        stage.daemon.cli(&["switch", "add", "lan", "--uplink", &tap])?;
        let vm = guest(stage, "out", Version::Host, 1)?;
        let host = Host::new(&tap)?;
        let a = end(stage, &vm)?;
        let (index, mac) = (a.interface.index, a.interface.mac.clone());

        let to = HOST_MAC.to_owned();
        let out = vm.agent().begin(Net::NetSend {
            index,
            to,
            port: 4100,
            seconds: Some(STRETCH),
            seed: 1,
            write: 0,
        })?;
        let received = host.within(|index| network::receive(index, 4100))?;
        let sent = serde_json::from_value(out.end(MINUTE, |_| {})?)?;
        Passage { sent, received }.right()?;

        let back = vm.agent().begin(Net::NetReceive { index, port: 4101 })?;
        let sent = host.within(|index| network::send(index, &mac, 4101, STRETCH, 2, 0))?;
        let received = serde_json::from_value(back.end(MINUTE, |_| {})?)?;
        let sent = Passage { sent, received }.right()?;
        stage.say(format!("{} MB from the host", sent.bytes >> 20));
        expect_quiet(vm.agent())?;
        vm.poweroff()?;
        stage.expect_clean()
    })
}
