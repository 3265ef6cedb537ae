//! An 82574L of L1, mediated: Debian's stock e1000e drives it in L2, by INTA#. Frames of all sizes, a stream, large sends and sums by the card,
//! the interface down and up, the driver removed and loaded; saved and brought back under traffic; a guest that means harm; moved to another one.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::l2::L2;
use ioplane_e2e::nics::Pings;
use ioplane_e2e::sides::{Side, moves, nothing_of_the_guest_is_lost};
use ioplane_e2e::{Inner, L1, Nic, Traffic, Version};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const NIC: Nic = Nic::I82574;
const NAME: &str = "card";

fn watch(daemon: &Inner<'_>, name: &str) -> Result<Value> {
    Ok(daemon.json(&format!("pci show {name}"))?["watch"].clone())
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is a number"))
}

/// Bytes of descriptors that were checked: they move if frames do.
fn bytes(daemon: &Inner<'_>) -> Result<u64> {
    number(&watch(daemon, NAME)?["dma_bytes"])
}

fn without_fault(daemon: &Inner<'_>, name: &str) -> Result<()> {
    let watch = watch(daemon, name)?;
    ensure!(watch["faults"] == json!([]) && watch["denied"] == 0, "{watch:#}");
    Ok(())
}

/// The shell's `$name` is the interface.
fn interface() -> String {
    ioplane_e2e::nics::find(&NIC.mac())
}

fn frames_of_all_sizes(guest: &L2<'_>, daemon: &Inner<'_>) -> Result<()> {
    guest.raise(NIC)?;
    for size in [18, 64, 500, 1000, 1472] {
        guest.ping_all(NIC, 60, size)?;
    }
    let said = guest.run(&format!(
        "{} grep $name /proc/interrupts; readlink /sys/class/net/$name/device/driver; dmesg | grep -i e1000e",
        interface()
    ))?;
    eprintln!("{}", said.trim());
    ensure!(
        said.contains("drivers/e1000e") && said.contains("IO-APIC"),
        "the stock driver, by INTA#: {said}"
    );
    guest.writes_high(NIC)?;
    without_fault(daemon, NAME)?;
    let watch = watch(daemon, NAME)?;
    ensure!(number(&watch["dma_vetted"])? >= 600, "both ways: {watch:#}");
    eprintln!(
        "{} accesses, {} hooked, {} descriptors",
        watch["accesses"], watch["hooked"], watch["dma_vetted"]
    );
    Ok(())
}

/// A file there and back by TCP, whose sum is right; the card has summed up and cut what was sent.
fn a_file_goes_there_and_back(l1: &L1, guest: &L2<'_>) -> Result<()> {
    let (peer, far) = (NIC.peer(), NIC.peer_ip());
    let server = l1.start("busybox nc -ll -p 9999 -e busybox cat")?;
    let script = format!(
        "set -e; {} bb=/folder/busybox; $bb dd if=/dev/urandom of=/tmp/sent bs=4096 count=512 2>/dev/null
         for try in 1 2 3 4 5 6 7 8 9 10; do
             $bb timeout 120 $bb nc -w 30 {far} 9999 </tmp/sent >/tmp/back && break; $bb sleep 1
         done
         $bb cmp /tmp/sent /tmp/back && echo the same
         ethtool -k $name 2>/dev/null | grep -E '^(tx-checksumming|tcp-segmentation)' || true",
        interface()
    );
    let said = guest.run(&script).with_context(|| format!("{peer}: {}", server.output()))?;
    ensure!(said.contains("the same"), "{said}");
    let _ = server.kill();
    Ok(())
}

/// Down and up, off and on; and counters that go on.
fn the_driver_comes_and_goes(guest: &L2<'_>, daemon: &Inner<'_>) -> Result<()> {
    let sent = || -> Result<u64> {
        let said = guest.run(&format!("{} cat /sys/class/net/$name/statistics/tx_packets", interface()))?;
        Ok(said.trim().parse()?)
    };
    let before = sent()?;
    for _ in 0..2 {
        guest.lower(NIC)?;
        guest.raise(NIC)?;
    }
    guest.ping_all(NIC, 30, 1000)?;
    ensure!(sent()? >= before + 30, "the driver's counters go on");
    guest.run("rmmod e1000e")?;
    guest.raise(NIC)?;
    guest.ping_all(NIC, 30, 1000)?;
    without_fault(daemon, NAME)
}

/// Saved, wiped, loaded and resumed while the guest pings.
fn round_trips(guest: &L2<'_>, daemon: &Inner<'_>, trips: u32) -> Result<()> {
    let (peer, count) = (NIC.peer_ip(), 40);
    let job = guest.start(&format!("/folder/busybox ping -q -i 0.3 -s 1000 -c {count} -W 30 {peer}"))?;
    let file = format!("/tmp/{NAME}.state");
    for _ in 0..trips {
        let rest = daemon.json(&format!("pci quiesce {NAME} --deadline 2s"))?;
        daemon.text(&format!("pci save {NAME} {file}"))?;
        daemon.text(&format!("pci load {NAME} {file}"))?;
        eprintln!("at rest after {} us, drained {}", rest["waited_us"], rest["drained"]);
    }
    guest.wait_for(&format!("{job}.status"), 2 * MINUTE)?;
    let said = std::fs::read_to_string(guest.folder().join(format!("{job}.out")))?;
    let got = Pings::of(&said)?;
    eprintln!("{} of {} pings answered over {trips} round trips", got.received, got.sent);
    // What comes while the card is off the wire is lost: a reply a trip at most.
    ensure!(got.sent == count && got.received + trips >= count, "{said}\nioplane said:\n{}", daemon.said());
    guest.ping_all(NIC, 3, 1000)
}

fn a_stream_goes_on(l1: &L1, guest: &L2<'_>, daemon: &Inner<'_>) -> Result<()> {
    let peer = NIC.peer_ip();
    let server = l1.start(&format!("exec iperf3 -s -1 --forceflush -f k -B {peer}"))?;
    server.expect("listening", MINUTE)?;
    let job = guest.start(&format!("exec iperf3 -c {peer} -t 300"))?;
    let goes_on = |before: u64| -> Result<()> {
        let end = Instant::now() + 2 * MINUTE;
        while bytes(daemon)? < before + 1_000_000 {
            std::thread::sleep(Duration::from_millis(50));
            ensure!(!server.has_ended() && Instant::now() < end, "the stream: {}", server.output());
        }
        Ok(())
    };
    goes_on(bytes(daemon)?)?;
    for _ in 0..3 {
        daemon.text(&format!("pci quiesce {NAME} --deadline 500ms"))?;
        daemon.text(&format!("pci save {NAME} /tmp/{NAME}.state"))?;
        daemon.text(&format!("pci load {NAME} /tmp/{NAME}.state"))?;
        goes_on(bytes(daemon)?)?;
    }
    guest.run("/folder/busybox killall -TERM iperf3")?;
    guest.wait_for(&format!("{job}.status"), 2 * MINUTE)?;
    let said = server.wait(MINUTE)?.output;
    let line = said.lines().find(|line| line.ends_with("receiver")).with_context(|| said.clone())?;
    eprintln!("a stream over three round trips: {line}");
    let size = l1.run(&format!("stat -c %s /tmp/{NAME}.state"), MINUTE)?;
    eprintln!("a state of {} bytes in its file", size.trim());
    without_fault(daemon, NAME)
}

#[test]
fn a_stock_e1000e_drives_a_mediated_card() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_nics(2048, &[NIC], &news)?;
    let daemon = l1.serve("watching", "")?;
    daemon.text(&format!("pci add {NAME} --host {} --mode virtual --on-fault dma=stop", NIC.address()))?;
    let args = daemon.guest_args(&[NAME], 256)?;
    let guest = l1.debian_by(Version::Newer, "watched", &args, "")?;
    let said = || format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said());
    news("the guest is up");
    frames_of_all_sizes(&guest, &daemon).with_context(said)?;
    news("a file");
    a_file_goes_there_and_back(&l1, &guest).with_context(said)?;
    news("the driver comes and goes");
    the_driver_comes_and_goes(&guest, &daemon).with_context(said)?;
    news("round trips");
    round_trips(&guest, &daemon, 3).with_context(said)?;
    news("a stream");
    a_stream_goes_on(&l1, &guest, &daemon).with_context(said)?;
    guest.lower(NIC)?;
    guest.kill()?;
    daemon.text(&format!("pci remove {NAME} --force"))?;
    news("done");
    daemon.stop()
}

/// Echoes that have to come before and after a move.
const BETWEEN: u64 = 60;
/// Datagrams and bytes of TCP a second, each way.
const RATE: u32 = 50;
const BYTES: u32 = 8192;

/// What the guest's kernel says that would differ if the driver had noticed.
fn noticed(l1: &L1, qemu: &str) -> Result<String> {
    l1.ask(
        qemu,
        "cat /sys/class/net/eth*/carrier_changes /sys/class/net/eth*/statistics/tx_errors; \
         dmesg | grep -ciE 'NETDEV WATCHDOG|Detected Hardware Unit Hang|irq .*nobody|link is'; true",
    )
}

#[test]
fn a_guest_moves_there_and_back_under_traffic() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_twins(2048, &[NIC], &news)?;
    let [here, there] = Side::both(&l1, vec![vec![NIC.address()], vec![NIC.second_address()]], "virtual")?;
    let said = |guest: Option<&L2<'_>>| {
        let qemu = guest.map(L2::said).unwrap_or_default();
        format!("QEMU said:\n{qemu}\nioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said())
    };
    let mut guest = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    guest.raise(NIC).with_context(|| said(Some(&guest)))?;
    guest.depart()?;
    let before = noticed(&l1, "first")?;
    news("moves under traffic");
    let traffic = Traffic::start(&l1, &NIC.guest_ip(), RATE, BYTES)?;
    traffic.goes_on(BETWEEN)?;
    for (from, to, names) in [(&here, &there, ["first", "second"]), (&there, &here, ["second", "third"])] {
        let (next, report) = moves(&l1, from, guest, names, to).with_context(|| said(None))?;
        guest = next;
        eprintln!("{report}");
        ensure!(report["functions"][0]["mode"] == "virtual", "{report:#}");
        traffic.goes_on(BETWEEN).with_context(|| {
            let kernel =
                l1.ask(names[1], "cat /proc/interrupts; dmesg | tail -n 20; ip -s link").unwrap_or_default();
            format!("{kernel}\n{}", said(Some(&guest)))
        })?;
        news(&format!("{} is in {}", names[1], to.name));
    }
    let driven = traffic.end().with_context(|| said(Some(&guest)))?;
    eprintln!("{}", serde_json::to_string(&driven)?);
    nothing_of_the_guest_is_lost(&driven)?;
    let after = noticed(&l1, "third")?;
    ensure!(before == after, "the guest has noticed something: {before:?}, then {after:?}");
    for side in [&here, &there] {
        without_fault(&side.daemon, "nic0")?;
    }
    guest.kill()
}
