//! Linux's own ixgbevf on the model of the 82599's virtual function: the model is L1's hardware, and records whatever the silicon does not allow.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::igb::{GUEST_IP, PEER_IP};
use ioplane_e2e::nics::Pings;
use ioplane_e2e::process::built;
use ioplane_e2e::sides::{compares, moves, right as one_stretch_each, told, trapped_per_echo};
use ioplane_e2e::silicon::{FUNCTIONS, MAC, NOTICED, Reading, Silicon};
use ioplane_e2e::streams::Driven;
use ioplane_e2e::travel::PORT;
use ioplane_e2e::uplink::UPLINK;
use ioplane_e2e::{Inner, L1, PERIODIC, Traffic, Version};
use ioplane_figures::report::median;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Echoes that have to come between two things that are done to the interface.
const BETWEEN: u64 = 100;
/// Datagrams a second, and bytes of TCP a second each way.
const RATE: u32 = 300;
const STREAM: u32 = 262_144;
/// Pages of registers that are mapped before the first move and after the driver's next reset, and in between, where counters go on by an offset: page 3.
const ALL: u64 = 3;
const MOVED: u64 = 1;
/// Echoes that are counted.
const COUNTED: u64 = 300;
/// With all pages mapped an echo costs at most so much of what it costs with page 3 alone: VTEIMS, once per interrupt, is on page 0.
const LESS: f64 = 0.8;

/// Waits until the other end answers a ping of that size.
fn answers(size: u32) -> String {
    format!(
        "for try in $(seq 20); do busybox ping -q -c 1 -s {size} -W 2 {PEER_IP} >/dev/null && exit 0; done
         echo no answer; ip -s addr; dmesg | tail -n 30; ethtool -S vf0; exit 1"
    )
}

/// The driver binds both functions in L1 itself; the first one is `vf0`, and the other end answers.
fn bind(l1: &L1) -> Result<()> {
    let ([function, _], modules) = (FUNCTIONS, l1.host.modules.display());
    let said = l1.run(
        &format!(
            "set -e; modprobe -d {modules} ixgbevf
             ip link set $(ls /sys/bus/pci/devices/{function}/net) name vf0
             echo 1 >/proc/sys/net/ipv6/conf/vf0/disable_ipv6; cat /sys/class/net/vf0/address
             # On the same network: L1 would answer for either by the other.
             ip link set {UPLINK} down
             ip addr add {GUEST_IP}/24 dev vf0; ip link set vf0 up; {}",
            answers(56)
        ),
        2 * MINUTE,
    )?;
    ensure!(said.trim() == MAC, "{said}");
    Ok(())
}

fn pinged(l1: &L1, count: u32, size: u32) -> Result<()> {
    let got = l1.ping(PEER_IP, count, size)?;
    ensure!(got == Pings { sent: count, received: count }, "{size} bytes: {got:?}");
    Ok(())
}

/// The driver's counters.
fn statistics(l1: &L1) -> Result<BTreeMap<String, u64>> {
    let said = l1.run("ethtool -S vf0", MINUTE)?;
    let entry = |line: &str| {
        let (name, value) = line.trim().split_once(": ")?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    Ok(said.lines().filter_map(entry).collect())
}

/// What the driver has counted is what the port has. Nothing is under way.
fn counted_alike(l1: &L1, before: &Reading, silicon: &Silicon) -> Result<()> {
    let statistics = statistics(l1)?;
    let now = &silicon.is_unbroken()?[0];
    let driver =
        |name: &str| statistics.get(name).copied().with_context(|| format!("{name} in {statistics:?}"));
    let (received, sent) = (now.received - before.received, now.sent - before.sent);
    ensure!(
        (driver("rx_packets")?, driver("tx_packets")?) == (received, sent),
        "the port has {received} and {sent}; {statistics:?}"
    );
    for name in ["tx_timeout_count", "rx_csum_offload_errors", "alloc_rx_page_failed"] {
        ensure!(driver(name)? == 0, "{name}: {statistics:?}");
    }
    Ok(())
}

/// Long frames, rings of other lengths, filters: each while traffic goes on.
fn changes(l1: &L1, traffic: &Traffic<'_>) -> Result<()> {
    for what in [
        "ip link set vf0 mtu 3000",
        "ethtool -G vf0 rx 256 tx 128",
        "ip link set vf0 promisc on",
        "ip link set vf0 mtu 9000",
        "ethtool -G vf0 rx 4096 tx 4096",
        "ip link set vf0 promisc off",
        "ip link set vf0 allmulticast on",
        "ip maddr add 33:33:00:00:00:99 dev vf0",
        "ethtool -K vf0 tso off",
        "ethtool -K vf0 tso on",
        "ip link set vf0 mtu 1500",
        "ethtool -G vf0 rx 512 tx 512",
        // What a driver does when a queue hangs, or a user asks: all of it anew.
        "ethtool -K vf0 rxvlan off; ethtool -K vf0 rxvlan on",
    ] {
        let ended = l1.start(what)?.wait(MINUTE)?;
        ensure!(ended.status == 0, "{what}: {}", ended.output);
        traffic.goes_on(BETWEEN).with_context(|| format!("after {what}"))?;
    }
    Ok(())
}

/// Every byte of TCP was right, and no datagram came twice. Some are lost while the driver resets.
fn right(driven: &Driven) -> Result<()> {
    let (there, back) = (&driven.there, &driven.back);
    ensure!(there.duplicated + back.duplicated + there.reordered + back.reordered == 0, "{driven:#?}");
    ensure!(driven.bytes_there > 0 && driven.bytes_back > 0, "{driven:#?}");
    Ok(())
}

/// Whoever breaks a rule is seen: a head other than zero is written to the second function, which has no driver.
fn a_broken_rule_is_seen(silicon: &Silicon) -> Result<()> {
    let [_, other] = FUNCTIONS;
    silicon.l1.run(
        &format!(
            "set -e; cd /sys/bus/pci/devices/{other}; echo {other} >driver/unbind; echo 1 >enable
             read begin rest <resource; busybox devmem $((begin + 0x1010)) 32 5"
        ),
        MINUTE,
    )?;
    let read = silicon.read()?;
    ensure!(read[0].violations.is_empty(), "{read:?}");
    let said = &read[1].violations;
    ensure!(said.len() == 1 && said[0].contains("Head { offset: 1010, value: 5 }"), "{said:?}");
    Ok(())
}

#[test]
fn the_driver_of_linux_breaks_no_rule_of_the_silicon() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let silicon = Silicon::boot(2048, &news)?;
    let l1 = &silicon.l1;
    let said = || silicon.said(&[]);
    bind(l1).with_context(said)?;
    news("the driver has its link");
    pinged(l1, 100, 1000).with_context(said)?;
    let link = l1.run("cat /sys/class/net/vf0/speed", MINUTE)?;
    ensure!(link.trim() == "10000", "{link}");
    l1.run(&format!("cp {} /tmp/ioplane-stream; setsid /tmp/ioplane-stream answer {PORT} </dev/null >/tmp/answer 2>&1 &", built("ioplane-stream")?.display()), MINUTE)?;
    news("datagrams and TCP");
    let before = Reading { received: 0, sent: 0, ..silicon.read()?[0].clone() };
    let traffic = silicon.traffic(RATE, STREAM)?;
    traffic.goes_on(5 * BETWEEN).with_context(said)?;
    let driven = traffic.end().with_context(said)?;
    right(&driven)?;
    ensure!(driven.there.lost + driven.back.lost == 0, "{driven:#?}");
    counted_alike(l1, &before, &silicon).with_context(said)?;
    news("changes under traffic");
    silicon.long_frames()?;
    let traffic = silicon.traffic(RATE, STREAM)?;
    changes(l1, &traffic).with_context(said)?;
    right(&traffic.end().with_context(said)?)?;
    eprintln!("{:#x?}", silicon.is_unbroken()?);
    news("long frames, down and up, resets, the driver anew");
    l1.run(&format!("set -e; ip link set vf0 mtu 9000; {}", answers(8900)), MINUTE).with_context(said)?;
    pinged(l1, 50, 8900).with_context(said)?;
    for round in 0..3 {
        l1.run(&format!("set -e; ip link set vf0 down; ip link set vf0 up; {}", answers(56)), MINUTE)
            .with_context(|| format!("round {round}: {}", said()))?;
    }
    let [function, _] = FUNCTIONS;
    l1.run(
        &format!("set -e; ip link set vf0 down; echo 1 >/sys/bus/pci/devices/{function}/reset; ip link set vf0 up; {}", answers(56)),
        MINUTE,
    )
    .with_context(said)?;
    l1.run(
        &format!(
            "set -e; cd /sys/bus/pci/drivers/ixgbevf; echo {function} >unbind; echo {function} >bind
             ip link set $(ls /sys/bus/pci/devices/{function}/net) name vf0
             ip addr add {GUEST_IP}/24 dev vf0; ip link set vf0 up; {}",
            answers(56)
        ),
        MINUTE,
    )
    .with_context(said)?;
    pinged(l1, 100, 1400).with_context(said)?;
    let read = silicon.is_unbroken()?;
    eprintln!("{read:?}");
    ensure!(read[0].accesses > 0 && read[0].received > 0 && read[0].sent > 0, "{read:?}");
    let complaints = l1.run("dmesg | grep -E 'ixgbevf.*(hang|not cleared|not set|error|failed)|NETDEV WATCHDOG|DMAR.*[Ff]ault' || true", MINUTE)?;
    ensure!(complaints.is_empty(), "{complaints}");
    a_broken_rule_is_seen(&silicon)?;
    news("done");
    Ok(())
}

/// Without a physical function on this host somebody has to be named who sends frames.
fn refused(daemon: &Inner<'_>) -> Result<()> {
    let add = format!("pci add nic0 --host {} --mode migratable", FUNCTIONS[0]);
    for (words, why) in [
        (add.clone(), "is not a virtual function of a card whose interface this host has"),
        (add.clone(), "--uplink INTERFACE"),
        (format!("{add} --uplink nobody"), "this host has no interface nobody"),
    ] {
        let said = daemon.refused(&words)?;
        ensure!(said.contains(why), "{words}: {said}");
    }
    Ok(())
}

/// What a guest's registers cost, which the library maps into it, and how many pages are.
struct Mapped<'a> {
    daemon: &'a Inner<'a>,
    /// How many pages were mapped, and trapped accesses per echo, as it went on.
    costs: Vec<(u64, f64)>,
}

impl Mapped<'_> {
    /// So many pages are mapped.
    fn counts(&mut self, traffic: &Traffic<'_>, pages: u64) -> Result<()> {
        self.daemon.until_mapped("nic0", pages)?;
        traffic.goes_on(BETWEEN)?;
        self.costs.push((pages, trapped_per_echo(self.daemon, traffic, COUNTED)?));
        Ok(())
    }

    /// The median of those with so many pages. How many frames one interrupt is for depends on what else this machine does.
    fn median(&self, pages: u64) -> f64 {
        median(self.costs.iter().filter(|(own, _)| *own == pages).map(|(_, cost)| *cost))
    }
}

/// One daemon: the other function takes the place of the guest's, again and again. With `mapped` registers the library in the guest's QEMU maps them.
fn changes_functions(silicon: &Silicon, mapped: bool, news: &dyn Fn(&str)) -> Result<()> {
    let l1 = &silicon.l1;
    let daemon = l1.serve("nested", "")?;
    refused(&daemon)?;
    let [one, other] = FUNCTIONS;
    let option = if mapped { " --mapped" } else { "" };
    daemon.text(&format!("pci add nic0 --host {one} --mode migratable{option} --uplink {UPLINK}"))?;
    let context = || silicon.said(&[&daemon]);
    // Two processors: two queues each way, and frames that are shared out to them.
    let args = format!("-smp 2 {}", daemon.guest_args(&["nic0"], 256)?);
    let library = if mapped { l1.interposed()? } else { String::new() };
    let guest = l1.debian_after(&library, Version::Newer, "nested", &args, PERIODIC).with_context(context)?;
    news("the guest is up");
    guest.raise_vf("ixgbevf", "modprobe ixgbevf").with_context(context)?;
    let got = guest.ping(PEER_IP, 50, 1000)?;
    ensure!(got == Pings { sent: 50, received: 50 }, "{got:?}");
    let queues = guest.run("ls -d /sys/bus/pci/drivers/ixgbevf/*/net/*/queues/rx-* | wc -l")?;
    ensure!(queues.trim() == "2", "{queues}");
    std::fs::copy(built("ioplane-stream")?, guest.folder().join("ioplane-stream"))?;
    guest.run(&format!(
        "cp /folder/ioplane-stream /tmp/; echo 8388608 >/proc/sys/net/core/rmem_max; echo 8388608 >/proc/sys/net/core/rmem_default
         setsid /tmp/ioplane-stream answer {PORT} </dev/null >/tmp/answer 2>&1 &"
    ))?;
    let before = guest.run(NOTICED)?;
    let move_to = |to: &str| format!("pci move nic0 --to {to} --qmp /tmp/nested.qmp --deadline 30s");
    l1.run(&format!("ip link set {UPLINK} down"), MINUTE)?;
    let why = daemon.refused(&move_to(other))?;
    ensure!(why.contains(&format!("{UPLINK} is down")) && why.contains("--uplink"), "{why}");
    l1.run(&format!("ip link set {UPLINK} up"), MINUTE)?;
    news("moves under traffic");
    let traffic = silicon.traffic(RATE, 65536)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    let mut costs = mapped.then(|| Mapped { daemon: &daemon, costs: Vec::new() });
    if let Some(costs) = &mut costs {
        costs.counts(&traffic, ALL).with_context(context)?;
    }
    for to in [other, one, other, one] {
        let report = daemon.json(&move_to(to)).with_context(context)?;
        eprintln!("{report}");
        ensure!(report["state_bytes"].as_u64().is_some_and(|bytes| bytes <= 1024), "{report}");
        ensure!(report.get("complaint").is_none(), "{report}");
        traffic.goes_on(BETWEEN).with_context(context)?;
        if let Some(costs) = &mut costs {
            costs.counts(&traffic, MOVED).with_context(context)?;
        }
    }
    let driven = traffic.end().with_context(context)?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    // What the driver has sent has left, once.
    let sent: u64 =
        guest.run("cat /sys/bus/pci/drivers/ixgbevf/*/net/*/statistics/tx_packets")?.trim().parse()?;
    let read = silicon.is_unbroken()?;
    ensure!(read[0].sent + read[1].sent == sent && read[1].sent > 0, "the driver has sent {sent}: {read:?}");
    one_stretch_each(&driven, 4).with_context(context)?;
    let after = guest.run(NOTICED)?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    daemon.breaks_no_rule("nic0")?;
    if let Some(costs) = &mut costs {
        news("the driver resets: its counters begin anew");
        let down = "/folder/busybox ip link set $(ls /sys/bus/pci/drivers/ixgbevf/*/net) down";
        guest.raise_vf("ixgbevf", down).with_context(context)?;
        let traffic = silicon.traffic(RATE, 65536)?;
        costs.counts(&traffic, ALL).with_context(context)?;
        one_stretch_each(&traffic.end().with_context(context)?, 0).with_context(context)?;
        eprintln!("pages mapped, trapped accesses per echo: {:?}", costs.costs);
        ensure!(costs.median(ALL) < LESS * costs.median(MOVED), "{:?}", costs.costs);
    }
    guest.kill()?;
    daemon.text("pci remove nic0 --force")?;
    daemon.stop()
}

/// Two daemons, as two hosts have them: the guest moves there and back with its memory, and no page of that is missed.
fn moves_between_daemons(silicon: &Silicon, news: &dyn Fn(&str)) -> Result<()> {
    let l1 = &silicon.l1;
    let [here, there] = silicon.sides("migratable")?;
    let context = || silicon.said(&[&here.daemon, &there.daemon]);
    let first = l1.traveller("first", &here.args()?).with_context(context)?;
    first.raise_vf("ixgbevf", "modprobe ixgbevf").and_then(|()| first.depart()).with_context(context)?;
    let before = l1.ask("first", NOTICED)?;
    news("to another daemon under traffic");
    let traffic = silicon.traffic(RATE, 65536)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    let (second, out) = moves(l1, &here, first, ["first", "second"], &there).with_context(context)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    news("and back");
    let (third, back) = moves(l1, &there, second, ["second", "third"], &here).with_context(context)?;
    traffic.goes_on(BETWEEN).with_context(context)?;
    let driven = traffic.end().with_context(context)?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    told("vf82599", &driven, &[&out, &back]);
    one_stretch_each(&driven, 2).with_context(context)?;
    let after = l1.ask("third", NOTICED)?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    news("memories are compared");
    compares(l1, (&third, "third"), &here, "compared", &there, || silicon.traffic(RATE, 65536))
        .with_context(context)?;
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    silicon.is_unbroken()?;
    third.kill()
}

#[test]
fn a_stock_guest_changes_its_function_where_the_host_is_a_vm() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let silicon = Silicon::boot(3072, &news)?;
    changes_functions(&silicon, false, &news)?;
    moves_between_daemons(&silicon, &news)?;
    eprintln!("{:?}", silicon.is_unbroken()?);
    news("done");
    Ok(())
}

#[test]
fn registers_are_mapped_until_the_first_move_and_from_the_drivers_next_reset_on() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let silicon = Silicon::boot(2048, &news)?;
    changes_functions(&silicon, true, &news)?;
    eprintln!("{:?}", silicon.is_unbroken()?);
    news("done");
    Ok(())
}
