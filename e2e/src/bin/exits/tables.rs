//! The paper's tables 1 to 3 for a Debian guest, and in the same guests what the remedies are worth.

use super::exits;
use super::remedies::{self, FUNCTIONS, Remedy};
use anyhow::{Context, Result};
use ioplane_e2e::{L1, L2};
use serde_json::Value;

const LINES: usize = 8;

pub struct Tables {
    /// Share of all exits under disk and network load whose function, device and register are named.
    pub attributed: f64,
    pub text: String,
}

/// All that needs Debian guests, in three boots.
pub fn and_remedies(l1: &L1, seconds: f64, say: &dyn Fn(&str)) -> Result<(Vec<Remedy>, Tables)> {
    let old = remedies::old();
    let guest = remedies::boot(l1, &old, "")?;
    say("a guest with IDE, e1000 and rtl8139 is up");
    let disk = remedies::disk(l1, &guest, &old, seconds).context("IDE")?;
    say(&format!("IDE: {disk:.1?}"));
    let nets = remedies::NETS;
    let e1000 = remedies::network(l1, &guest, &old, "e1000", nets[0].1, seconds).context("e1000")?;
    say(&format!("e1000: {e1000:.1?}"));
    let rtl = remedies::network(l1, &guest, &old, "8139cp", nets[1].1, seconds).context("rtl8139")?;
    say(&format!("rtl8139: {rtl:.1?}"));
    let tables = papers(l1, &guest, seconds, say)?;
    guest.kill()?;

    let new = remedies::new();
    let guest = remedies::boot(l1, &new, "")?;
    say("a guest with virtio is up");
    let idle = remedies::idle(l1, &guest, new.name, seconds)?;
    let blk = remedies::disk(l1, &guest, &new, seconds).context("virtio-blk")?;
    say(&format!("virtio-blk: {blk:.1?}"));
    let net = remedies::network(l1, &guest, &new, "virtio_net", nets[2].1, seconds).context("virtio-net")?;
    say(&format!("virtio-net: {net:.1?}"));
    let scheduler = remedies::scheduler(l1, &guest, &new, seconds).context("scheduler")?;
    say(&format!("scheduler: {scheduler:.1?}"));
    let clock = remedies::clock(l1, &guest, &new, seconds).context("clock")?;
    say(&format!("clock: {clock:.1?}"));
    guest.kill()?;

    let ticking =
        remedies::Kind { name: "tick", args: "-machine pc -m 384".into(), setup: "true", disk: "vda" };
    let guest = remedies::boot(l1, &ticking, "nohz=off")?;
    let tick = remedies::idle(l1, &guest, ticking.name, seconds)?;
    say(&format!("tick: {tick:.1?}, without: {idle:.1?}"));
    guest.kill()?;
    let rows = vec![
        Remedy::new("PM timer to kvm-clock", "times asked", clock[0], clock[1]),
        Remedy::new("IDE to virtio-blk", "reads", disk, blk),
        Remedy::new("e1000 to virtio-net", "KiB sent", e1000, net),
        Remedy::new("rtl8139 to virtio-net", "KiB sent", rtl, net),
        Remedy::new("I/O scheduler mq-deadline to none", "writes", scheduler[0], scheduler[1]),
        Remedy::new("tick of 250 Hz to none when idle", "nothing", tick, idle),
    ];
    Ok((rows, tables))
}

fn papers(l1: &L1, guest: &L2<'_>, seconds: f64, say: &dyn Fn(&str)) -> Result<Tables> {
    guest.run(
        "cat /proc/kallsyms >/tmp/kallsyms; dd if=/tmp/kallsyms of=/folder/kallsyms bs=256k status=none",
    )?;
    // As the paper's guests had it.
    guest.run("echo acpi_pm >/sys/devices/system/clocksource/clocksource0/current_clocksource; mount /dev/sda /data")?;
    let symbols = guest.folder().join("kallsyms").display().to_string();
    let watch = || exits(l1, &format!("--vm old --for {} --symbols {symbols}", seconds * 2.0));
    let mut text = String::new();

    let stop = remedies::start(guest, "perl -e 'while (1) { $x = sqrt($x + 2) }'")?;
    text += &table("Table 1. Computing (the paper: SPECjbb)", &watch()?);
    guest.run(&stop)?;
    say("table 1");

    let iperf = format!("bash -c 'while :; do iperf3 -c {}.1 -t 600; sleep 0.2; done'", remedies::NETS[0].1);
    let bonnie = "bash -c 'while :; do bonnie++ -d /data -D -s 48M:4k -r 24 -n 0 -u root -q; done'";
    let stop = remedies::start(guest, &iperf)?;
    text += &table("Table 2. iperf3, TCP out of the guest through e1000 (the paper: Netperf)", &watch()?);
    guest.run(&stop)?;
    say("table 2");

    let stop = remedies::start(guest, bonnie)?;
    text += &table("Table 3. bonnie++, direct I/O on an ext2 of a PIIX3 IDE disk", &watch()?);
    say("table 3");
    let more = remedies::start(guest, &iperf)?;
    let report = watch()?;
    guest.run(&format!("{FUNCTIONS} {stop}; {more}; true"))?;
    let attributed = attributed(&report);
    text += &table("Both, iperf3 and bonnie++", &report);
    text += &format!(
        "\nOf {} exits, interrupts left out, {attributed:.2} % have a function and, if about one, a register with a name; {} lost\n",
        report["exits"], report["lost"]
    );
    text += &unnamed(&report);
    for finding in report["findings"].as_array().into_iter().flatten() {
        text += &format!(
            "\n- {}: {}; expected {:.0} fewer",
            finding["id"].as_str().unwrap_or_default(),
            finding["evidence"].as_str().unwrap_or_default(),
            finding["gain"].as_f64().unwrap_or(0.0)
        );
    }
    text.push('\n');
    Ok(Tables { attributed, text })
}

/// What the rest is: exits by reason and register, and whether the function or the register is missing. Sites beyond those that the report
/// lists are not in it.
fn unnamed(report: &Value) -> String {
    let mut kinds: Vec<(String, u64)> = Vec::new();
    for site in report["sites"].as_array().into_iter().flatten() {
        // They count in no share.
        if matches!(site["kind"].as_str(), Some("host-interrupt" | "interrupt-window" | "timer")) {
            continue;
        }
        let device = matches!(site["kind"].as_str(), Some("port" | "memory" | "msr"))
            && site["detail"]["fault"].is_null();
        let named = site["place"]["role"].as_str().is_some_and(|role| role != "unnamed");
        let missing = match (site["function"].is_null(), device && !named) {
            (false, false) => continue,
            (true, _) => "no function",
            (false, true) => "no register",
        };
        let place =
            site["place"]["register"].as_str().map_or(String::new(), |register| format!(", {register}"));
        let name = format!("{missing}: {}{place}", site["reason_name"].as_str().unwrap_or_default());
        let count = site["count"].as_u64().unwrap_or(0);
        match kinds.iter_mut().find(|(other, _)| *other == name) {
            Some((_, sum)) => *sum += count,
            None => kinds.push((name, count)),
        }
    }
    kinds.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let all = report["exits"].as_f64().unwrap_or(0.0).max(1.0);
    let line =
        |(name, count): &(String, u64)| format!("\n- {name}: {count} ({:.2} %)", *count as f64 * 100.0 / all);
    format!("\nWhat has no name:\n{}\n", kinds.iter().take(12).map(line).collect::<String>())
}

/// Of all exits but interrupts, wherever the guest was: the report's own count.
fn attributed(report: &Value) -> f64 {
    report["attributed_percent"].as_f64().unwrap_or(0.0)
}

fn table(title: &str, report: &Value) -> String {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let mut text = format!(
        "\n{title}: {:.0} exits a second\n\n| | trap address | count | host time, ms / % | trap function | reason, device and register |\n\
         |---|---|---|---|---|---|\n",
        super::rate(report)
    );
    let sites = report["sites"].as_array().into_iter().flatten().take(LINES);
    for (line, site) in sites.enumerate() {
        let place = match (&site["place"]["device"], &site["place"]["register"]) {
            (Value::String(device), Value::String(register)) => format!("; {device}: {register}"),
            _ => String::new(),
        };
        let function = site["function"].as_str().unwrap_or("(not in the kernel)");
        text += &format!(
            "| {} | {:#x} | {} | {:.1} / {:.1} | {} | {}{place} |\n",
            line + 1,
            site["rip"].as_u64().unwrap_or(0),
            site["count"],
            number(&site["host_ns"]) / 1e6,
            number(&site["host_percent"]),
            function.split('+').next().unwrap_or_default(),
            site["reason_name"].as_str().unwrap_or_default(),
        );
    }
    text
}
