//! `ioplane exits` in L1, on a Debian guest with a hot site that nobody can know: found, changed, and changed back.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::process::run;
use ioplane_e2e::{HotModule, L1, L2};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

/// However the script of `callers` ends, and whoever else runs one: nothing of it is left in the guest.
fn nothing_is_probed_any_more(guest: &L2<'_>) -> Result<()> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/tune/callers.sh");
    fs::copy(script, guest.folder().join("callers.sh"))?;
    let said = guest.run(
        "set -e; cd /tmp; callers() { sh /folder/callers.sh ktime_get_real_ts64,iowrite16 $1; }
         mkdir trace; mount -t tracefs trace trace
         left() { cat trace/kprobe_events; ls trace/instances; }
         mkdir trace/instances/ioplane_9_9_0; echo 'p:ioplane_9_9_0/f0 ktime_get_real_ts64' >>trace/kprobe_events
         echo \"left over: $(left | wc -l)\"
         callers 1 2>/dev/null | true; echo \"nobody listened: $(left | wc -l)\"
         callers 4 >first & sleep 1; callers 1 >second; wait $!
         echo \"two at once: $(cat first second | grep -c -m6 Hits), $(left | wc -l)\"
         sh /folder/callers.sh ktime_get_real_ts64,iowrite16 60 >/dev/null & sleep 1; kill -TERM $!; wait $! || echo \"ended: $(left | wc -l)\"
         umount trace",
    )?;
    let lines: Vec<&str> = said.lines().collect();
    let wanted = ["left over: 2", "nobody listened: 0", "two at once: 6, 0", "ended: 0"];
    ensure!(lines == wanted, "{said}");
    Ok(())
}

/// What a user sees, for docs/guide/exits.md: `IOPLANE_KEEP_REPORT=FOLDER` keeps it.
fn transcript(l1: &L1) -> Result<String> {
    let way = "--ssh debian --ssh-config ssh_config";
    let lines = [
        "--for 3s --symbols kallsyms".into(),
        "--for 3s --symbols kallsyms --sample 20".into(),
        "advise --for 3s --symbols kallsyms".into(),
        format!("callers ktime_get_real_ts64 --for 2s {way}"),
        format!("apply pm-timer --for 3s {way}"),
        format!("apply pm-timer --undo --for 3s {way}"),
    ];
    let (ioplane, folder) = (binary()?, l1.folder().display().to_string());
    let mut script = format!("cd {folder}; cp debian/kallsyms kallsyms\n");
    for line in lines {
        let line = line.replacen("--for", "--vm debian --for", 1);
        script += &format!("echo '# ioplane exits {line}'; {} exits {line} 2>&1; echo\n", ioplane.display());
    }
    l1.run(&script, 2 * MINUTE)
}

/// Each remedy but the clock's, under a load that calls for it: finding, what it has set, how it is judged, what undoing it has set.
fn each_remedy_is_applied_and_undone(guest: &L2<'_>, exits: &dyn Fn(&str) -> Result<Value>) -> Result<()> {
    let shared = format!("--directory {}", guest.folder().display());
    guest.run(
        "set -e; kill $(cat /tmp/busy); echo on >/proc/sys/kernel/printk_devkmsg
         modprobe e1000; modprobe mq-deadline; echo mq-deadline >/sys/block/vda/queue/scheduler
         ip link set eth1 up; ip address add 10.7.2.15/24 dev eth1",
    )?;
    let load = |work: &str| {
        guest.run(&format!("setsid bash -c '{work}' >/dev/null 2>&1 </dev/null & echo $! >/tmp/load"))
    };
    for (finding, work, set, back, unit) in [
        (
            "scheduler",
            "while :; do dd if=/dev/vda of=/dev/null bs=4k iflag=direct; done",
            "vda/queue/scheduler: mq-deadline -> none",
            "back to mq-deadline",
            Some("disk-request"),
        ),
        (
            "serial",
            "while :; do echo \"<3>a line of the kernel\" >/dev/kmsg; done",
            "printk: ",
            "printk: back to",
            None,
        ),
        (
            "napi",
            "while :; do echo x >/dev/udp/10.7.2.2/9; done",
            "eth1/napi_defer_hard_irqs: 0 -> 2",
            "eth1/napi_defer_hard_irqs: back to 0",
            Some("packet"),
        ),
    ] {
        load(work)?;
        let applied = exits(&format!("apply {finding} {shared}")).context(finding)?;
        let outcome = &applied["outcomes"][0];
        ensure!(applied["said"].as_str().is_some_and(|said| said.contains(set)), "{applied:#}");
        ensure!(outcome["before"].as_f64() > Some(10.0), "{applied:#}");
        // What a busy host measures differs; that there was enough work to compare does not.
        ensure!(unit.is_none_or(|unit| applied["judged_by"] == unit), "{applied:#}");
        ensure!(finding != "serial" || outcome["after"].as_f64() < Some(1.0), "{applied:#}");
        eprintln!("applied: {outcome}, {}, harm {}", applied["work"], applied["harm"]);
        let undone = exits(&format!("apply {finding} --undo {shared}")).context(finding)?;
        ensure!(undone["said"].as_str().is_some_and(|said| said.contains(back)), "{undone:#}");
        guest.run("kill -- -$(cat /tmp/load)")?;
    }
    Ok(())
}

/// A guest of stock QEMU with a hot site that nobody can know: its function's name and its place are random, and the kernel is
/// moved. It is found and its register named; a remedy makes the exits go, undoing it brings them back, by every way into a guest.
#[test]
fn the_hot_site_goes_and_comes_back() -> Result<()> {
    let l1 = &L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let guest = l1.debian(
        "debian",
        "-machine q35 -m 400 -netdev user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:2222-:22 \
         -device virtio-net-pci,netdev=net -netdev user,id=old,restrict=on,net=10.7.2.0/24 -device e1000,netdev=old \
         -device virtio-serial-pci \
         -chardev socket,id=agent,path=/tmp/agent,server=on,wait=off \
         -device virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        "clocksource=acpi_pm",
    )?;
    let clock = guest.run("sed -n 's/ . clocksource_acpi_pm$//p' /proc/kallsyms")?;
    let clock = u64::from_str_radix(clock.trim(), 16).with_context(|| format!("an address: {clock:?}"))?;
    let hot = HotModule::new(&l1.host.module("dummy")?, clock)?;
    fs::write(guest.folder().join("hot.ko"), &hot.ko)?;
    let key = l1.folder().join("key");
    run("ssh-keygen", &["-q", "-t", "ed25519", "-N", "", "-f", &key.display().to_string()])?;
    fs::copy(key.with_extension("pub"), guest.folder().join("key.pub"))?;
    fs::write(
        l1.folder().join("ssh_config"),
        format!(
            "Host debian\n HostName 127.0.0.1\n Port 2222\n User root\n IdentityFile {}\n LogLevel ERROR\n \
             UserKnownHostsFile /dev/null\n StrictHostKeyChecking no\n",
            key.display()
        ),
    )?;
    let tune = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest/tune/folder.sh");
    fs::copy(tune, guest.folder().join("folder.sh"))?;
    guest.run(
        "set -e; insmod /folder/hot.ko; cat /proc/kallsyms >/tmp/kallsyms
         dd if=/tmp/kallsyms of=/folder/kallsyms bs=256k status=none
         modprobe virtio_net; modprobe virtio_console
         ip link set eth0 up; ip address add 10.0.2.15/24 dev eth0
         mkdir -m 700 /root/.ssh; cp /folder/key.pub /root/.ssh/authorized_keys; chmod 600 /root/.ssh/authorized_keys
         /usr/sbin/sshd -o UsePAM=no
         mkdir /tmp/jobs; IOPLANE_TUNE_PERIOD=0.1 setsid sh /folder/folder.sh /folder >/dev/null 2>&1 &
         # Nobody makes /dev/virtio-ports here, that is udev's.
         port=$(grep -lx org.qemu.guest_agent.0 /sys/class/virtio-ports/*/name); port=${port%/name}
         setsid /usr/sbin/qemu-ga -p /dev/${port##*/} >/folder/agent.log 2>&1 </dev/null &
         setsid bash -c 'while :; do x=$EPOCHREALTIME; done' >/dev/null 2>&1 </dev/null & echo $! >/tmp/busy",
    )?;
    let folder = l1.folder().display().to_string();
    let ioplane = binary()?.display().to_string();
    let options = format!("--vm debian --for 1500ms --symbols {folder}/debian/kallsyms --json");
    let exits = |words: &str| -> Result<Value> {
        let command =
            format!("{ioplane} exits {words} {options} 2>/tmp/said || {{ cat /tmp/said; exit 1; }}");
        let output = l1.run(&command, MINUTE)?;
        serde_json::from_str(&output).with_context(|| output)
    };
    let report = exits(&format!("--html {folder}/report.html --svg {folder}/flame.svg"))?;
    let named = format!("{} [{}]", hot.hot, hot.name);
    let first = &report["sites"][0];
    ensure!(report["functions"][0]["name"] == named.as_str(), "{named} first of all\n{report:#}");
    ensure!(first["function"] == format!("{named}+{:#x}", hot.offset), "{first:#}");
    let register = "ACPI power management: PM timer (q35, i440fx), in 32";
    ensure!(report["registers"][0]["name"] == register, "{report:#}");
    ensure!(report["functions_percent"].as_f64() > Some(95.0), "{report:#}");
    eprintln!(
        "{named} at {:#x}: {:.0} exits a second, {register}",
        first["rip"].as_u64().unwrap_or(0),
        first["rate"]
    );
    let page = fs::read_to_string(l1.folder().join("report.html"))?;
    // The name space of SVG is no address to load from.
    let links = page.replace("http://www.w3.org/2000/svg", "");
    ensure!(
        page.contains(&hot.hot) && !links.contains("http:") && !links.contains("https:"),
        "works offline"
    );
    ensure!(fs::read_to_string(l1.folder().join("flame.svg"))?.starts_with("<svg"));
    if let Some(keep) = std::env::var_os("IOPLANE_KEEP_REPORT") {
        for name in ["report.html", "flame.svg"] {
            fs::copy(l1.folder().join(name), PathBuf::from(&keep).join(name))?;
        }
        fs::write(PathBuf::from(&keep).join("transcript"), transcript(l1)?)?;
    }

    let timer = |findings: &Value| {
        findings.as_array().into_iter().flatten().find(|finding| finding["id"] == "pm-timer").cloned()
    };
    let finding = timer(&exits("advise")?).context("pm-timer is found")?;
    ensure!(finding["certainty"] == "high" && finding["gain"].as_f64() > Some(20.0), "{finding:#}");
    ensure!(finding["evidence"].to_string().contains(&hot.hot), "{finding:#}");
    eprintln!("{}", finding["evidence"]);

    let gone = |applied: &Value| -> Result<()> {
        let outcome = &applied["outcomes"][0];
        ensure!(outcome["before"].as_f64() > Some(20.0), "{applied:#}");
        ensure!(outcome["after"].as_f64() < Some(1.0), "{applied:#}");
        ensure!(applied["said"].to_string().contains("acpi_pm -> kvm-clock"), "{applied:#}");
        eprintln!("applied: {outcome}");
        Ok(())
    };
    let back = |undone: &Value| -> Result<()> {
        let (before, after) = (undone["before"].as_f64(), undone["after"].as_f64());
        ensure!(undone["said"].to_string().contains("back to acpi_pm"), "{undone:#}");
        ensure!(after > before.map(|before| before + 20.0), "the exits are back: {undone:#}");
        Ok(())
    };
    let ssh = format!("--ssh debian --ssh-config {folder}/ssh_config");
    // The guest's own names do as well as those that were brought by hand.
    let learned = l1.run(
        &format!(
            "set -e; {ioplane} exits learn /tmp/names {ssh} --json; echo =
             {ioplane} exits --vm debian --for 1500ms --symbols /tmp/names --json 2>/dev/null"
        ),
        MINUTE,
    )?;
    let (learned, report) = learned.split_once("=\n").with_context(|| learned.clone())?;
    let learned: Value = serde_json::from_str(learned).with_context(|| learned.to_owned())?;
    ensure!(
        learned["functions"].as_u64() > Some(10_000) && learned["regions"].as_u64() > Some(20),
        "{learned:#}"
    );
    let report: Value = serde_json::from_str(report).with_context(|| report.to_owned())?;
    ensure!(report["functions"][0]["name"] == named.as_str(), "{report:#}");
    ensure!(report["symbols"]["confidence"] != "none", "{report:#}");
    gone(&exits(&format!("apply pm-timer {ssh}"))?).context("by ssh")?;
    back(&exits("apply pm-timer --undo --agent")?).context("by the agent")?;
    // Who calls it: a program asks for the time by a system call. Nothing of that is left in the guest.
    let callers = exits(&format!("callers ktime_get_real_ts64 {ssh}"))?;
    let stack = &callers[0]["stacks"][0];
    ensure!(stack["frames"][0].as_str().is_some_and(|name| name.contains("sys_")), "{callers:#}");
    ensure!(callers[0]["calls"].as_u64() > Some(20) && stack["percent"].as_f64() > Some(50.0), "{callers:#}");
    let worst = exits(&format!("callers {ssh}"))?;
    ensure!(worst[0]["function"] == named.as_str() && worst[0]["exits"].as_f64() > Some(20.0), "{worst:#}");
    // What nobody has compiled for tracing takes no kprobe, but a breakpoint. Its address must be no instruction of L1: TCG would stop there for ever.
    // L2's kernel is moved, and L1's is not.
    ensure!(callers[0]["counted_by"] == "kprobe" && worst[0]["counted_by"] == "breakpoint", "{worst:#}");
    ensure!(worst[0]["calls"].as_u64() > Some(20), "{worst:#}");
    // The planted function has no table for unwinding, so its own stacks have no frames.
    let port = exits(&format!("callers iowrite16 {ssh}"))?;
    ensure!(port[0]["counted_by"] == "breakpoint" && port[0]["calls"].as_u64() > Some(0), "{port:#}");
    ensure!(port[0]["stacks"].to_string().contains("\"vp_notify\""), "{port:#}");
    let none = exits(&format!("callers no_such_function {ssh}"))?;
    ensure!(none[0]["refused"].is_string() && none[0]["stacks"] == serde_json::json!([]), "{none:#}");
    nothing_is_probed_any_more(&guest)?;
    eprintln!("the clock is read by {stack}");
    // What the guest refuses is undone, and said.
    let clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    guest.run(&format!("mount --bind {clock} {clock}; mount -o remount,bind,ro {clock}"))?;
    let shared = format!("--directory {folder}/debian");
    let refused = exits(&format!("apply pm-timer {shared}")).err().map(|error| format!("{error:#}"));
    let refused = refused.context("a clock that cannot be changed")?;
    ensure!(refused.contains("does not take kvm-clock; everything is as it was"), "{refused}");
    guest.run(&format!("umount {clock}; grep -qx acpi_pm {clock}"))?;
    gone(&exits(&format!("apply pm-timer {shared}"))?).context("by a directory")?;
    each_remedy_is_applied_and_undone(&guest, &exits)?;
    guest.kill()
}
