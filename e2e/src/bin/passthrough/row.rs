//! One NIC in one mode.

use crate::MINUTE;
use anyhow::{Context, Result, ensure};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::l2::L2;
use ioplane_e2e::{Inner, L1, Nic};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

#[derive(Debug, Default, Serialize)]
pub struct Row {
    /// Exits of the guest in the card's BARs.
    pub exits_per_ping: f64,
    /// Exits of the guest, of all kinds.
    pub all_exits_per_ping: f64,
    /// Register accesses that reached us, and those that the model saw.
    pub accesses_per_ping: Option<f64>,
    pub hooked_per_ping: Option<f64>,
    pub hooked_percent: Option<f64>,
    pub updates_per_ping: Option<f64>,
    /// Interrupts that the guest took; a ping is a packet each way.
    pub interrupts_per_packet: f64,
    /// Replies that came, of the pings.
    pub replies: u32,
    /// Pings sent: what is counted a ping is divided by this.
    pub pings: u32,
    /// Each ping is sent when the one before is answered: a throughput too.
    pub pings_per_s: f64,
    /// A stream out of the guest, and one into it; nothing where it broke off.
    pub mbit_per_s_out: Option<f64>,
    pub mbit_per_s_in: Option<f64>,
}

/// Pings by one command in the guest: it may take no longer than a few minutes.
const AT_ONCE: u32 = 50;

pub struct Subject<'a> {
    pub l1: &'a L1,
    pub daemon: &'a Inner<'a>,
    pub guest: &'a L2<'a>,
    /// What the guest is called.
    pub vm: &'static str,
    pub nic: Nic,
    pub name: &'static str,
}

impl Subject<'_> {
    pub fn measure(&self, pings: u32, seconds: u32) -> Result<Row> {
        let bars = self.bars()?;
        let (interrupts, before) = (self.interrupts()?, self.shown()?);
        let (report, replies, took) = self.watched_pings(pings)?;
        let (after, taken) = (self.shown()?, self.interrupts()? - interrupts);
        let each = |count: u64| count as f64 / f64::from(pings);
        let sites = report["sites"].as_array().into_iter().flatten();
        let own = sites.filter(|site| belongs(site, &bars)).filter_map(|site| site["count"].as_u64()).sum();
        let delta = |key: &str| {
            let of = |report: &Value| report["watch"][key].as_u64();
            Some(each(of(&after)? - of(&before)?))
        };
        // Of a card in software and one passed through as it is, what came over the socket.
        let messages = |report: &Value| {
            let traffic = &report["traffic"];
            Some(traffic["reads"].as_u64()? + traffic["writes"].as_u64()?)
        };
        let over_the_socket =
            messages(&after).zip(messages(&before)).map(|(after, before)| each(after - before));
        let (accesses, hooked) = (delta("accesses").or(over_the_socket), delta("hooked"));
        Ok(Row {
            exits_per_ping: each(own),
            all_exits_per_ping: each(report["exits"].as_u64().context("exits")?),
            accesses_per_ping: accesses,
            hooked_per_ping: hooked,
            hooked_percent: hooked.zip(accesses).map(|(hooked, all)| 100.0 * hooked / all),
            updates_per_ping: delta("updates"),
            interrupts_per_packet: each(taken) / 2.0,
            replies,
            pings,
            pings_per_s: f64::from(replies) / took.as_secs_f64(),
            mbit_per_s_out: self.stream(seconds, ""),
            mbit_per_s_in: self.stream(seconds, "-R"),
        })
    }

    fn shown(&self) -> Result<Value> {
        self.daemon.json(&format!("pci show {}", self.name))
    }

    fn folder(&self) -> String {
        let (vendor, device) = self.nic.id().split_once(':').unwrap_or_default();
        format!(
            "for d in /sys/bus/pci/devices/*; do [ $(cat $d/vendor) = 0x{vendor} ] && [ $(cat $d/device) = 0x{device} ] && break; done"
        )
    }

    /// Where the guest has put its BARs: first and last address, ports and memory alike.
    fn bars(&self) -> Result<Vec<(u64, u64)>> {
        let said = self.guest.run(&format!("{}; head -n 6 $d/resource", self.folder()))?;
        let hex = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).ok();
        let line = |line: &str| {
            let mut words = line.split_whitespace();
            Some((hex(words.next()?)?, hex(words.next()?)?))
        };
        let bars: Vec<_> = said.lines().filter_map(line).filter(|(_, last)| *last > 0).collect();
        ensure!(!bars.is_empty(), "the guest shows no BARs: {said}");
        Ok(bars)
    }

    fn interrupts(&self) -> Result<u64> {
        let line = self.guest.run(&format!(
            "{}; name=$(ls $d/net); sed -n \"s/^ *[0-9]*: *\\([0-9]*\\).* $name\\$/\\1/p\" /proc/interrupts",
            self.folder()
        ))?;
        line.trim().parse().with_context(|| format!("interrupts of the card: {line:?}"))
    }

    /// Pings under `ioplane exits`: its report, and how many replies came.
    fn watched_pings(&self, pings: u32) -> Result<(Value, u32, Duration)> {
        let (ioplane, name) = (binary()?, self.vm);
        let (ioplane, report) = (ioplane.display(), format!("/tmp/{}.{}", self.name, self.vm));
        let job = self.l1.start(&format!(
            "pid=$(pgrep -f -- '-name {name} ' | while read p; do
                 grep -q qemu-system /proc/$p/comm && echo $p; done | head -n 1)
             exec {ioplane} exits --vm $pid --for 1h --json >{report} 2>{report}.said"
        ))?;
        self.l1.run(
            &format!("for try in $(seq 200); do grep -q watching {report}.said && exit 0; sleep 0.1; done; cat {report}.said; exit 1"),
            MINUTE,
        )?;
        let begun = Instant::now();
        let mut received = 0;
        let mut left = pings;
        while left > 0 {
            let some = left.min(AT_ONCE);
            received += self.guest.ping(&self.nic.peer_ip(), some, 1000)?.received;
            left -= some;
        }
        let took = begun.elapsed();
        self.l1.run("pkill -INT -f -- ' exits --vm '", MINUTE)?;
        job.wait(MINUTE)?;
        let text = self.l1.run(&format!("cat {report}"), MINUTE)?;
        let value: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        ensure!(value["lost"] == 0, "{} exits were lost", value["lost"]);
        Ok((value, received, took))
    }

    fn stream(&self, seconds: u32, way: &str) -> Option<f64> {
        if seconds == 0 {
            return None;
        }
        let rate = self.try_stream(seconds, way);
        rate.map_err(|error| eprintln!("{}, {}: no stream {way}: {}", self.name, self.vm, error.root_cause()))
            .ok()
    }

    /// What iperf3 says to its server while the stream runs, and that it has ended, goes over the same card. Behind what TCP likes to
    /// have on its way (64 KiB and more) that waits for half a minute on a card of 25 kbit/s, and either side gives up.
    fn window(&self) -> &'static str {
        if self.nic == Nic::Ne2000 { "-w 8K -l 1K" } else { "" }
    }

    fn try_stream(&self, seconds: u32, way: &str) -> Result<f64> {
        let peer = self.nic.peer_ip();
        let server = self.l1.start(&format!("exec iperf3 -s -1 --forceflush -B {peer}"))?;
        server.expect("listening", MINUTE)?;
        let said =
            self.guest.run(&format!("iperf3 -c {peer} -t {seconds} {way} {} --json", self.window()))?;
        // It has ended by itself, if all went well.
        let _ = server.kill();
        let report: Value = serde_json::from_str(&said).with_context(|| said.clone())?;
        let rate = report["end"]["sum_received"]["bits_per_second"].as_f64().with_context(|| said)?;
        Ok(rate / 1e6)
    }
}

/// Whether an exit is one in these BARs.
fn belongs(site: &Value, bars: &[(u64, u64)]) -> bool {
    let detail = &site["detail"];
    let address = detail["memory"]["address"].as_u64().or(detail["port"]["port"].as_u64());
    address.is_some_and(|address| bars.iter().any(|(first, last)| (*first..=*last).contains(&address)))
}

pub fn table(cards: &BTreeMap<&'static str, BTreeMap<&'static str, Row>>) -> String {
    let mut text = String::from(
        "| card | mode | exits a ping | all exits a ping | accesses a ping | hooked a ping | hooked % | interrupts a packet | replies | \
         pings/s | Mbit/s out | in | of emulated pings/s | out | in |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
    for (card, modes) in cards {
        let base = modes.get("emulated");
        for (mode, row) in modes {
            let ratio = |of: fn(&Row) -> Option<f64>| {
                let both = of(row).zip(base.and_then(of));
                both.map_or("-".into(), |(row, base)| format!("{:.2}", row / base))
            };
            text += &format!(
                "| {card} | {mode} | {:.2} | {:.1} | {} | {} | {} | {:.2} | {} | {:.1} | {} | {} | {} | {} | {} |\n",
                row.exits_per_ping,
                row.all_exits_per_ping,
                number(row.accesses_per_ping),
                number(row.hooked_per_ping),
                number(row.hooked_percent),
                row.interrupts_per_packet,
                row.replies,
                row.pings_per_s,
                number(row.mbit_per_s_out),
                number(row.mbit_per_s_in),
                ratio(|row| Some(row.pings_per_s)),
                ratio(|row| row.mbit_per_s_out),
                ratio(|row| row.mbit_per_s_in),
            );
        }
    }
    text
}
