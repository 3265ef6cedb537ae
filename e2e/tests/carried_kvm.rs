//! A guest of KVM moves with an emulated NIC, whose interrupt is a wire that the kernel keeps up by itself, and back, under a flood of pings. All of it is in
//! one L1.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::travel::VM;
use ioplane_e2e::{Inner, L1, L2};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 256;
const MAC: &str = "02:00:00:00:00:39";
/// Replies that have to come between two moves.
const BETWEEN: usize = 100;
/// Interrupts of the NIC in a second in which nothing comes: a wire that stays up makes as many as the processor can take.
const QUIET: u64 = 200;

/// A host with a switch whose uplink is on the bridge.
fn host<'a>(l1: &'a L1, name: &str, tap: &str) -> Result<Inner<'a>> {
    let daemon = l1.serve(name, "[[core]]\nnotify = \"notified\"\n")?;
    daemon.text(&format!("switch add lan --uplink {tap}"))?;
    daemon.text(&format!("pci add nic0 --emulate rtl8139 --switch lan --mac {MAC}"))?;
    l1.run(&format!("ip link set dev {tap} master bridge up"), MINUTE)?;
    Ok(daemon)
}

fn raise(guest: &L2<'_>) -> Result<()> {
    let script = "set -e; modprobe 8139cp; bb=/folder/busybox; name=$(ls /sys/bus/pci/drivers/8139cp/*/net)
        $bb ip addr replace 10.0.9.2/24 dev $name; $bb ip link set $name up
        for try in 1 2 3 4 5 6 7 8 9 10; do $bb ping -q -c 1 -W 2 10.0.9.1 >/dev/null && exit 0; done
        $bb ip addr; dmesg | tail -n 20; exit 1";
    guest.run(script).map(drop).context("raise the NIC in the guest")
}

/// Interrupts of the NIC in a second.
fn interrupts(l1: &L1, qemu: &str) -> Result<u64> {
    let count = "set -- $(grep -E 'eth|enp|8139' /proc/interrupts | head -n 1); echo $2";
    let said = l1.ask(qemu, &format!("{count}; /tmp/busybox sleep 1; {count}"))?;
    let numbers: Vec<u64> = said.lines().filter_map(|line| line.trim().parse().ok()).collect();
    ensure!(numbers.len() == 2, "{said}");
    Ok(numbers[1] - numbers[0])
}

#[test]
fn a_wired_interrupt_goes_along_under_kvm() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_modules(1536, ",tun,bridge", &news)?;
    l1.run(
        "set -e; ip link add name bridge type bridge forward_delay 0 mcast_snooping 0; ip addr add 10.0.9.1/24 dev bridge; ip link set dev bridge up",
        MINUTE,
    )?;
    let (here, there) = (host(&l1, "here", "tapa")?, host(&l1, "there", "tapb")?);
    let mut guest = l1.traveller("first", &here.guest_args(&["nic0"], MEMORY)?)?;
    news("the guest is up");
    raise(&guest)?;
    guest.depart()?;
    let flood = l1.start("exec busybox ping -A -q -s 1000 -w 240 10.0.9.2")?;
    let replies = || -> Result<u64> {
        let said = l1.run("cat /sys/class/net/bridge/statistics/rx_packets", MINUTE)?;
        Ok(said.trim().parse()?)
    };
    let names = ["first", "second", "third", "fourth", "fifth"];
    for (at, pair) in names.windows(2).enumerate() {
        let (from, to) = if at % 2 == 0 { (&here, &there) } else { (&there, &here) };
        let (before, end) = (replies()?, Instant::now() + MINUTE);
        while replies()? < before + BETWEEN as u64 {
            if Instant::now() > end {
                let qemu = pair[0];
                let shown = |host: &Inner<'_>| {
                    host.json("pci show nic0").map_or_else(|e| format!("{e:#}"), |v| v.to_string())
                };
                eprintln!("here: {}\nthere: {}", shown(&here), shown(&there));
                let built = ioplane_e2e::process::built("ioplane-qmp")?;
                for hmp in ["info irq", "info pic", "info registers", "info status"] {
                    let said = l1.run(
                        &format!(
                            "{} /tmp/{qemu}.watch human-monitor-command '{{\"command-line\":\"{hmp}\"}}'",
                            built.display()
                        ),
                        MINUTE,
                    );
                    eprintln!("{hmp}: {said:?}");
                }
                let said = l1.ask(qemu, "cat /proc/interrupts; dmesg | tail -n 8");
                eprintln!("{said:?}");
                anyhow::bail!("no replies come any more before move {at}");
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let name = if at % 2 == 0 { "there" } else { "here" };
        let next = l1.awaits_traveller(pair[1], &to.guest_args(&["nic0"], MEMORY)?)?;
        let report = from.json(&format!(
            "move vm {VM} --to unix:/tmp/{0}.in --there /tmp/{name}/control.sock --qmp-there /tmp/{0}.qmp --qmp /tmp/{1}.qmp",
            pair[1], pair[0]
        ))?;
        news(&format!("moved: {report}"));
        guest.kill()?;
        guest = next;
    }
    flood.kill()?;
    std::thread::sleep(Duration::from_secs(1));
    let storm = interrupts(&l1, names[4])?;
    let said = l1.ask(
        names[4],
        "dmesg | grep -ciE 'nobody cared|watchdog|tx timeout'; grep -E 'eth|enp|8139' /proc/interrupts; true",
    )?;
    news(&format!("{storm} interrupts a second, at rest; {said}"));
    ensure!(storm < QUIET && said.starts_with('0'), "{storm} interrupts a second; {said}");
    guest.kill()?;
    Ok(())
}
