//! Cards of L1, mediated, with stock drivers in a stock guest: traffic, a card that is saved, wiped and brought back under it,
//! drivers that mean harm. And the same cards in software.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::l2::L2;
use ioplane_e2e::nics::Pings;
use ioplane_e2e::{Inner, L1, Nic, Version};
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const HOSTILE: &str = include_str!("watched.pl");
const CARDS: [(Nic, &str); 2] = [(Nic::Rtl8139, "rtl"), (Nic::Ne2000, "ne")];

fn shown(daemon: &Inner<'_>, name: &str) -> Result<Value> {
    daemon.json(&format!("pci show {name}"))
}

fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is a number"))
}

/// Pings of 1,000 bytes; each access of an NE2000 is a message, so it gets fewer.
fn pings(nic: Nic) -> u32 {
    if nic == Nic::Ne2000 { 15 } else { 300 }
}

fn traffic(guest: &L2<'_>, daemon: &Inner<'_>, nic: Nic) -> Result<()> {
    // The NE2000 reads and writes no memory.
    let high = |()| if nic == Nic::Rtl8139 { guest.writes_high(nic) } else { Ok(()) };
    let passed = guest.raise(nic).and_then(high);
    let passed = passed.and_then(|()| guest.ping_all(nic, pings(nic), 1000));
    passed.with_context(|| format!("QEMU said:\n{}\nioplane said:\n{}", guest.said(), daemon.said()))
}

/// What the monitor has seen of it: no fault, and no more of the NE2000's accesses hooked than a tenth.
fn is_watched(daemon: &Inner<'_>, nic: Nic, name: &str) -> Result<()> {
    let watch = &shown(daemon, name)?["watch"];
    let (accesses, hooked) = (number(&watch["accesses"])?, number(&watch["hooked"])?);
    eprintln!("{nic:?}: {accesses} accesses, {hooked} hooked");
    ensure!(watch["faults"] == serde_json::json!([]), "{watch:#}");
    ensure!(accesses > hooked && hooked > 0, "{watch:#}");
    match nic {
        // Opening it is mostly control; a ping is mostly the data port.
        Nic::Ne2000 => ensure!(hooked * 100 <= accesses * 12, "{hooked} of {accesses}"),
        _ => ensure!(number(&watch["dma_vetted"])? >= 600, "both ways: {watch:#}"),
    }
    Ok(())
}

/// Saved, wiped, loaded and resumed while the guest pings: it notices a longer round trip at most.
fn round_trips(guest: &L2<'_>, daemon: &Inner<'_>, nic: Nic, name: &str, trips: u32) -> Result<()> {
    let (peer, count) = (nic.peer_ip(), if nic == Nic::Ne2000 { 12 } else { 40 });
    let job = guest.start(&format!("/folder/busybox ping -q -i 0.3 -s 1000 -c {count} -W 30 {peer}"))?;
    let file = format!("/tmp/{name}.state");
    for trip in 0..trips {
        let rest = daemon.json(&format!("pci quiesce {name} --deadline 2s"))?;
        daemon.text(&format!("pci save {name} {file}"))?;
        if trip == 0 {
            daemon.refused(&format!("pci load {name} /etc/passwd"))?;
        }
        daemon.text(&format!("pci load {name} {file}"))?;
        eprintln!("{nic:?}: at rest after {} us, drained {}", rest["waited_us"], rest["drained"]);
    }
    guest.wait_for(&format!("{job}.status"), 2 * MINUTE)?;
    let said = std::fs::read_to_string(guest.folder().join(format!("{job}.out")))?;
    let got = Pings::of(&said)?;
    // A card that is off the wire hears nothing: a reply that comes in that moment is lost, once a trip at most.
    eprintln!("{nic:?}: {} of {} pings answered over {trips} round trips", got.received, got.sent);
    let enough = got.sent == count && got.received + trips >= count;
    ensure!(enough, "{said}\nioplane said:\n{}", daemon.said());
    guest.ping_all(nic, 3, 1000)
}

/// A TCP stream goes on over it as well, for as long as the trips take.
fn a_stream_goes_on(l1: &L1, guest: &L2<'_>, daemon: &Inner<'_>, nic: Nic, name: &str) -> Result<()> {
    let peer = nic.peer_ip();
    let server = l1.start(&format!("exec iperf3 -s -1 --forceflush -f k -B {peer}"))?;
    server.expect("listening", MINUTE)?;
    let job = guest.start(&format!("exec iperf3 -c {peer} -t 300"))?;
    let moved = || number(&shown(daemon, name)?["watch"]["dma_bytes"]);
    // It has begun, or gone on, when bytes move.
    let goes_on = |before: u64| -> Result<()> {
        let end = Instant::now() + 2 * MINUTE;
        while moved()? < before + 100_000 {
            std::thread::sleep(Duration::from_millis(50));
            ensure!(!server.has_ended() && Instant::now() < end, "the stream: {}", server.output());
        }
        Ok(())
    };
    goes_on(moved()?)?;
    for _ in 0..3 {
        daemon.text(&format!("pci quiesce {name} --deadline 500ms"))?;
        daemon.text(&format!("pci save {name} /tmp/{name}.state"))?;
        daemon.text(&format!("pci load {name} /tmp/{name}.state"))?;
        goes_on(moved()?)?;
    }
    guest.run("/folder/busybox killall -TERM iperf3")?;
    guest.wait_for(&format!("{job}.status"), 2 * MINUTE)?;
    let said = server.wait(MINUTE)?.output;
    // The server counts what has come through: "[  5]   0.00-7.45   sec   840 KBytes   924 Kbits/sec   receiver".
    let line = said.lines().find(|line| line.ends_with("receiver")).with_context(|| said.clone())?;
    let words: Vec<&str> = line.split_whitespace().collect();
    let rate =
        words.iter().position(|word| *word == "Kbits/sec").and_then(|at| words.get(at.checked_sub(1)?));
    let rate: f64 = rate.with_context(|| said.clone())?.parse()?;
    eprintln!("{nic:?}: a stream of {:.1} Mbit/s over three round trips", rate / 1e3);
    ensure!(rate > 1e2, "{said}");
    ensure!(shown(daemon, name)?["watch"]["denied"] == 0);
    Ok(())
}

/// On L1's KVM: with a VMM that maps the page of registers for reading, a ping of 8139cp has 5 exits in place of 9.
fn reads_from_the_page_do_not_exit(l1: &L1) -> Result<()> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("examples/shadow")).find(|path| path.is_file());
    let example = found.context("no example shadow; build it: cargo build -p ioplane-host --examples")?;
    let said = l1.run(&format!("{} 20", example.display()), MINUTE)?;
    eprintln!("{}", said.trim());
    let counted: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
    let exits = |way: &str| counted[way]["exits_per_ping"].as_f64();
    ensure!(exits("trapped") == Some(9.0) && exits("shadow") == Some(5.0), "{counted}");
    Ok(())
}

fn harm(guest: &L2<'_>, chip: &str, id: &str) -> Result<String> {
    std::fs::write(guest.folder().join("watched.pl"), HOSTILE)?;
    let (vendor, device) = id.split_once(':').context("an id")?;
    Ok(format!(
        "for d in /sys/bus/pci/devices/*; do
             [ $(cat $d/vendor) = 0x{vendor} ] && [ $(cat $d/device) = 0x{device} ] &&
                 exec perl /folder/watched.pl {chip} $(basename $d); done
         echo no {id}; exit 1"
    ))
}

/// DMA to memory that is not the guest's is denied, counted and named: by the card's own error interrupt here, by stopping the guest there.
fn harm_is_denied(guest: &L2<'_>, daemon: &Inner<'_>) -> Result<()> {
    let said = guest.run(&harm(guest, "rtl8139", Nic::Rtl8139.id())?)?;
    ensure!(said.contains("status 8000"), "the status says system error: {said}");
    let watch = &shown(daemon, "rtl")?["watch"];
    let fault = &watch["faults"][0];
    ensure!(fault["cause"] == "dma" && fault["name"] == "buffer-outside" && fault["count"] == 1, "{watch:#}");
    ensure!(watch["stopped"] == false, "{watch:#}");
    eprintln!("denied: {}", fault["last"]);
    // The other card knows nothing of it, nor does the host.
    guest.ping_all(Nic::Ne2000, 3, 1000)?;

    guest.start(&harm(guest, "ne2000", Nic::Ne2000.id())?)?;
    let end = Instant::now() + 2 * MINUTE;
    while guest.qmp("query-status", &serde_json::json!({}))?["running"] != false {
        ensure!(Instant::now() < end, "the guest is not stopped");
    }
    let watch = &shown(daemon, "ne")?["watch"];
    ensure!(watch["stopped"] == true && watch["faults"][0]["cause"] == "dma", "{watch:#}");
    eprintln!("stopped: {}", watch["faults"][0]["last"]);
    Ok(())
}

fn mediated(l1: &L1) -> Result<()> {
    let daemon = l1.serve("watching", "")?;
    for ((nic, name), policy) in CARDS.into_iter().zip(["dma=error", "dma=stop,register=ignore"]) {
        let address = nic.address();
        daemon.text(&format!("pci add {name} --host {address} --mode virtual --on-fault {policy}"))?;
    }
    let args = daemon.guest_args(&["rtl", "ne"], 256)?;
    let guest = l1.debian_by(Version::Newer, "watched", &args, "")?;
    for (nic, name) in CARDS {
        traffic(&guest, &daemon, nic)?;
        is_watched(&daemon, nic, name)?;
        round_trips(&guest, &daemon, nic, name, 3)?;
    }
    a_stream_goes_on(l1, &guest, &daemon, Nic::Rtl8139, "rtl")?;
    harm_is_denied(&guest, &daemon)?;
    guest.kill()?;
    for (_, name) in CARDS {
        daemon.text(&format!("pci remove {name} --force"))?;
    }
    daemon.stop()
}

/// The same chips in software: one on a TAP, one on a switch with an uplink.
fn emulated(l1: &L1) -> Result<()> {
    let daemon = l1.serve("emulating", "")?;
    daemon.text("switch add lan --uplink up11")?;
    let mac = |nic: Nic| nic.mac();
    daemon.text(&format!("pci add rtl --emulate rtl8139 --tap up10 --mac {}", mac(Nic::Rtl8139)))?;
    daemon.text(&format!("pci add ne --emulate ne2000 --switch lan --mac {}", mac(Nic::Ne2000)))?;
    for (nic, _) in CARDS {
        let (peer, ip) = (nic.peer(), nic.peer_ip());
        let up = peer.replace("peer", "up");
        let script =
            format!("ip addr del {ip}/24 dev {peer}; ip addr add {ip}/24 dev {up} && ip link set {up} up");
        l1.run(&script, MINUTE)?;
    }
    let guest = l1.debian_by(Version::Newer, "emulated", &daemon.guest_args(&["rtl", "ne"], 256)?, "")?;
    for (nic, name) in CARDS {
        traffic(&guest, &daemon, nic)?;
        round_trips(&guest, &daemon, nic, name, 1)?;
        let port = &shown(&daemon, name)?["port"];
        ensure!(port.is_object(), "{port}");
    }
    guest.kill()?;
    for (_, name) in CARDS {
        daemon.text(&format!("pci remove {name} --force"))?;
    }
    daemon.stop()
}

#[test]
fn cards_work_mediated_and_in_software() -> Result<()> {
    let begun = std::time::Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot_with_nics(2048, &[Nic::Rtl8139, Nic::Ne2000], &news)?;
    reads_from_the_page_do_not_exit(&l1)?;
    news("mediated");
    mediated(&l1)?;
    news("in software");
    emulated(&l1)?;
    news("done");
    Ok(())
}
