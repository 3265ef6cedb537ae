//! The timer clamp with a real guest: stock QEMU in L1, a Debian kernel that ticks by the PIT. What its ticks, its jiffies and its clocks make of
//! fewer interrupts.

use anyhow::{Result, ensure};
use ioplane_e2e::clamped::{MACHINE, TICKS_BY_PIT, clamp, clamp_on};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::{L1, L2, Version};
use serde_json::Value;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// How long the guest is watched. What asking it costs is small against it.
const WATCHED: Duration = Duration::from_secs(12);
const HZ: f64 = 50.0;
/// The guest's clock in seconds, its jiffies and its timer's interrupts.
const STAMP: &str = "read up idle </proc/uptime
    jiffies=$(sed -n 's/^jiffies: //p' /proc/timer_list | head -n 1)
    echo \"$up $jiffies $(sed -n 's/^ *0: *\\([0-9]*\\).*/\\1/p' /proc/interrupts)\"";
/// The clock source of the guest that migrates.
const TRAVELS_BY: &str = "kvm-clock";
/// Stamps by the serial port: a shared folder is nothing that can migrate. Seconds of the guest's clock, and jiffies.
const TRAVELLER: &str = "set -e
    cat >/tmp/work <<'END'
cd /tmp
until umount /folder; do sleep 0.1; done
until chroot /proc/1/root /bin/busybox umount /folder; do sleep 0.1; done
while :; do
    read up idle </proc/uptime
    echo \"stamp $up $(sed -n 's/^jiffies: //p' /proc/timer_list | head -n 1) .\"
    sleep 2
done
END
    setsid sh /tmp/work </dev/null >/dev/ttyS0 2>&1 &";
const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0";

/// What the guest has counted, and between which times by this machine's clock that was.
#[derive(Clone, Copy, Debug)]
struct Counted {
    clock: f64,
    jiffies: f64,
    interrupts: f64,
    shortest: f64,
    longest: f64,
}

fn stamp(guest: &L2<'_>) -> Result<[f64; 3]> {
    let said = guest.run(STAMP)?;
    let numbers: Vec<f64> = said.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers.try_into().map_err(|_| anyhow::anyhow!("{said}"))
}

fn watch(guest: &L2<'_>) -> Result<Counted> {
    let (outer, before, inner) = (Instant::now(), stamp(guest)?, Instant::now());
    std::thread::sleep(WATCHED);
    let shortest = inner.elapsed().as_secs_f64();
    let after = stamp(guest)?;
    let longest = outer.elapsed().as_secs_f64();
    let [clock, jiffies, interrupts] = std::array::from_fn(|at| after[at] - before[at]);
    Ok(Counted { clock, jiffies, interrupts, shortest, longest })
}

fn hz(status: &Value, which: &str) -> f64 {
    status[which].as_f64().unwrap_or(0.0)
}

/// All VMs of L1, by KVM's parameter.
fn host_wide(l1: &L1) -> Result<()> {
    let parameter = || l1.run("mkdir -p /run; cat /sys/module/kvm/parameters/min_timer_period_us", MINUTE);
    let before = parameter()?;
    let status = clamp(l1, "100 --host")?;
    ensure!(status["period_us"] == 10_000 && parameter()?.trim() == "10000", "{status:#}");
    let hit = status["vms"].as_array().is_some_and(|vms| vms.iter().any(|vm| vm["name"] == "ticks"));
    ensure!(hit && status["before_us"].as_u64() == before.trim().parse().ok(), "{before}: {status:#}");
    clamp(l1, "off --host")?;
    ensure!(parameter()? == before, "undone");
    Ok(())
}

#[test]
fn a_guest_ticks_less_often_and_keeps_its_time_if_it_does_not_count_ticks() -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {what}", begun.elapsed().as_secs_f64());
    let l1 = L1::boot(1024, "", &|line| eprintln!("{line}"))?;
    let before = l1.interposed()?;
    let guest = l1.debian_after(&before, Version::Host, "ticks", MACHINE, TICKS_BY_PIT)?;
    let sources = guest.run(&format!("cat {SOURCE}/current_clocksource {SOURCE}/available_clocksource"))?;
    step(&format!("up; clocks: {sources}"));

    for clock in ["", "--clock jiffies", "--clock pit", "--clock hpet"] {
        ensure!(clamp(&l1, &format!("50 --vm ticks {clock}")).is_err(), "{clock} is to be refused");
    }
    let status = clamp(&l1, "--vm ticks")?;
    ensure!(status["hz"].is_null() && status["clamped"] == false && status["changes"] == 0, "{status:#}");
    ensure!((hz(&status, "guest_hz") - 250.0).abs() < 1.0, "the PIT does not tick: {status:#}");
    let own = watch(&guest)?;
    step(&format!("its own rate: {own:?}"));

    let status = clamp_on(&l1, "ticks", HZ, "kvm-clock")?;
    ensure!((hz(&status, "guest_hz") - 250.0).abs() < 1.0 && hz(&status, "timer_hz") <= HZ, "{status:#}");
    for source in ["kvm-clock", "tsc", "acpi_pm", "jiffies"] {
        if !sources.split_whitespace().any(|one| one == source) {
            // KVM gives every guest of L1 these two. The others depend on the VMM and on what the guest's kernel was built with.
            ensure!(!["kvm-clock", "tsc"].contains(&source), "the guest does not offer {source}: {sources}");
            eprintln!("SKIPPED (cannot be had here): a clamped guest by {source}: it offers {sources}");
            continue;
        }
        guest.run(&format!("echo {source} >{SOURCE}/current_clocksource; sleep 1"))?;
        let counted = watch(&guest)?;
        step(&format!("clamped, {source}: {counted:?}"));
        let most = HZ * counted.longest + 5.0;
        ensure!(counted.interrupts <= most && counted.jiffies <= most, "{counted:?}: at most {most}");
        if source == "jiffies" {
            ensure!(counted.clock < counted.shortest * 0.7, "it counts ticks: {counted:?}");
        } else {
            // L1 may have measured its own clock badly while it booted; a clock that counts ticks would be at a fifth.
            let right = counted.shortest * 0.8..=counted.longest * 1.2;
            ensure!(right.contains(&counted.clock), "{counted:?}");
        }
    }
    let text = l1.run(&format!("{} exits clamp --vm ticks", binary()?.display()), MINUTE)?;
    eprintln!("{text}");

    let status = clamp(&l1, "off --vm ticks")?;
    ensure!(status["clamped"] == false && hz(&status, "timer_hz") == hz(&status, "guest_hz"), "{status:#}");
    // A machine that is busy with other things may not let it have all of its ticks at once.
    for attempt in 1.. {
        let again = watch(&guest)?;
        step(&format!("its own rate again: {again:?}"));
        if again.interrupts > HZ * 1.5 * again.longest {
            break;
        }
        ensure!(attempt < 10, "{again:?}");
    }
    host_wide(&l1)?;
    guest.kill()?;
    step("with two vCPUs, to another QEMU");
    two_vcpus_leave_while_clamped(&l1, &before, &step)
}

/// The stamps that a guest has told of by now: seconds of its clock, jiffies.
fn stamps(guest: &L2<'_>) -> Vec<[f64; 2]> {
    let console = guest.console();
    let stamp = |line: &str| -> Option<[f64; 2]> {
        let (clock, jiffies) = line.trim().strip_prefix("stamp ")?.strip_suffix(" .")?.split_once(' ')?;
        Some([clock.parse().ok()?, jiffies.parse().ok()?])
    };
    // The last line may be half of one, and the first after a migration the second half.
    console.lines().filter_map(stamp).collect()
}

/// The jiffies per second of the guest's clock, between its next stamp and the one so many after it.
fn rate(l1: &L1, guest: &L2<'_>, more: usize) -> Result<f64> {
    let begun = stamps(guest).len();
    let end = Instant::now() + 3 * MINUTE;
    loop {
        let told = stamps(guest);
        if let (Some(first), Some(last)) = (told.get(begun), told.get(begun + more)) {
            return Ok((last[1] - first[1]) / (last[0] - first[0]));
        }
        l1.still_runs()?;
        ensure!(Instant::now() < end, "{told:?}; QEMU said {}", guest.said());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// A clamped guest with two vCPUs migrates to a QEMU whose library clamps nothing. The timer of the source is the clamp's, and what arrives is
/// the guest's own.
fn two_vcpus_leave_while_clamped(l1: &L1, before: &str, step: &impl Fn(&str)) -> Result<()> {
    let (machine, append) = (format!("{MACHINE} -smp 2"), format!("{TICKS_BY_PIT} clocksource={TRAVELS_BY}"));
    let source = l1.debian_after(before, Version::Host, "source", &machine, &append)?;
    let said = source.run(&format!("grep -c ^processor /proc/cpuinfo; cat {SOURCE}/current_clocksource"))?;
    ensure!(said.split_whitespace().eq(["2", TRAVELS_BY]), "{said}");
    source.run(TRAVELLER)?;
    let status = clamp_on(l1, "source", HZ, TRAVELS_BY)?;
    ensure!((hz(&status, "guest_hz") - 250.0).abs() < 1.0 && hz(&status, "timer_hz") <= HZ, "{status:#}");
    let clamped = rate(l1, &source, 3)?;
    step(&format!("two vCPUs, clamped: {clamped:.1} jiffies per second"));
    ensure!(clamped > 0.0 && clamped <= HZ * 1.2, "{clamped} jiffies per second");

    let incoming = format!("{machine} -incoming unix:/tmp/destination.in");
    let there = l1.start_debian(before, Version::Host, "destination", &incoming, &append)?;
    there.takes_guests()?;
    source.migrate_to(&there)?;
    let status = clamp(l1, "--vm source")?;
    ensure!(status["clamped"] == true && hz(&status, "timer_hz") <= HZ, "the source has: {status:#}");
    source.kill()?;
    // A machine that is busy with other things may not let it have all of its ticks at once.
    for attempt in 1.. {
        let own = rate(l1, &there, 3)?;
        step(&format!("at the destination: {own:.1} jiffies per second"));
        if own > HZ * 1.5 {
            break;
        }
        ensure!(attempt < 10, "{own} jiffies per second");
    }
    let status = clamp(l1, "--vm destination")?;
    ensure!(status["hz"].is_null() && status["clamped"] == false, "{status:#}");
    for which in ["guest_hz", "timer_hz"] {
        ensure!((hz(&status, which) - 250.0).abs() < 1.0, "{which} at the destination: {status:#}");
    }
    there.kill()
}
