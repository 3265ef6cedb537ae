//! Stock guests on a switch: TCP both ways with large frames, every byte checked, and the way out by a TAP interface.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::exchange::{End, Passage, exchange};
use ioplane_e2e::protocol::Command as Net;
use ioplane_e2e::stage::{MINUTE, Stage, expect_quiet, play};
use ioplane_e2e::{Version, Vm, network};
use std::os::fd::AsFd;
use std::process::Command;

/// Seconds of each exchange.
const STRETCH: f64 = 5.0;

/// A guest with a root disk and a NIC on the switch `lan`, one vCPU.
fn guest(stage: &Stage, name: &str) -> Result<Vm> {
    let root = format!("{name}-root");
    stage.add_root(&root)?;
    stage.daemon.cli(&["nic", "add", name, "--switch", "lan"])?;
    stage.boot(stage.qemu(name, Version::Host, &[&root, name])?)
}

fn end<'a>(stage: &Stage, vm: &'a Vm) -> Result<End<'a>> {
    let mac = stage.daemon.status()?.nic(vm.name())?.mac.clone();
    End::up(vm.agent(), &mac).map_err(|error| vm.explain(error))
}

#[test]
fn guests_exchange_tcp_over_the_switch() -> Result<()> {
    play("", |stage| {
        stage.daemon.cli(&["switch", "add", "lan"])?;
        let (left, right) = (guest(stage, "left")?, guest(stage, "right")?);
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
        stage.expect_clean()?;
        left.poweroff()?;
        right.poweroff()
    })
}

/// Runs `ip` with these words.
fn ip(words: &str) -> Result<()> {
    let output = Command::new("ip").args(words.split(' ')).output().context("run ip")?;
    ensure!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// The address of the host's end.
const HOST_MAC: &str = "02:00:00:00:aa:01";

/// A TAP interface in a namespace of its own, as a host's network behind the switch; the namespace goes with the value.
struct Host {
    space: String,
    index: u32,
}

impl Host {
    fn new(tap: &str) -> Result<Host> {
        let space = format!("{tap}-ns");
        ip(&format!("netns add {space}"))?;
        let mut host = Host { space, index: 0 };
        let space = &host.space;
        ip(&format!("link set {tap} netns {space}"))?;
        ip(&format!("-n {space} link set {tap} address {HOST_MAC} up"))?;
        let show = Command::new("ip").args(["-n", space, "-o", "link", "show", tap]).output()?;
        let text = String::from_utf8_lossy(&show.stdout).into_owned();
        host.index = text.split(':').next().and_then(|index| index.trim().parse().ok()).context(text)?;
        Ok(host)
    }

    /// Does `work` on a thread of the namespace.
    fn within<R: Send>(&self, work: impl FnOnce(u32) -> Result<R> + Send) -> Result<R> {
        let space = std::fs::File::open(format!("/run/netns/{}", self.space))?;
        std::thread::scope(|scope| {
            let inside = scope.spawn(move || {
                let network = Some(rustix::thread::LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(space.as_fd(), network)?;
                work(self.index)
            });
            inside.join().map_err(|_| anyhow::anyhow!("the host's end panicked"))?
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = ip(&format!("netns delete {}", self.space));
    }
}

#[test]
fn a_guest_reaches_the_host_by_its_uplink() -> Result<()> {
    play("", |stage| {
        let tap = format!("iop{}", std::process::id() % 100_000);
        stage.daemon.cli(&["switch", "add", "lan", "--uplink", &tap])?;
        let vm = guest(stage, "out")?;
        let host = Host::new(&tap)?;
        let a = end(stage, &vm)?;
        let (index, mac) = (a.interface.index, a.interface.mac.clone());

        let to = HOST_MAC.to_owned();
        let out = vm.agent().begin(Net::NetSend { index, to, port: 4100, seconds: STRETCH, seed: 1 })?;
        let received = host.within(|index| network::receive(index, 4100))?;
        let sent = serde_json::from_value(out.end(MINUTE, |_| {})?)?;
        Passage { sent, received }.right()?;

        let back = vm.agent().begin(Net::NetReceive { index, port: 4101 })?;
        let sent = host.within(|index| network::send(index, &mac, 4101, STRETCH, 2))?;
        let received = serde_json::from_value(back.end(MINUTE, |_| {})?)?;
        let sent = Passage { sent, received }.right()?;
        stage.say(format!("{} MB from the host", sent.bytes >> 20));
        expect_quiet(vm.agent())?;
        vm.poweroff()?;
        stage.expect_clean()
    })
}
