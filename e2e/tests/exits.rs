//! `ioplane exits` in L1, on guests whose exits are known exactly.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::{L1, Planted};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);

/// An example of ioplane-exits; cargo builds examples with the tests of their crate, next to this test's folder.
fn example(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("examples").join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no example {name}; build it: cargo build -p ioplane-exits --examples"))
}

/// Runs the tiny guest under observation, which ends while the guest is still there: what it says it did, and what was seen.
fn watched(l1: &L1, times: u32, options: &str) -> Result<(Value, Value)> {
    let (ioplane, guest) = (binary()?, example("tiny-guest")?);
    let (ioplane, guest) = (ioplane.display(), guest.display());
    let script = format!(
        "set -e; cd $(mktemp -d); mkfifo in
         {guest} {times} <in >truth 2>born & guest=$!
         exec 4>in; while ! grep -q ready born; do kill -0 $guest || {{ cat born; exit 1; }}; sleep 0.05; done
         {ioplane} exits --vm $guest --for 1h --json {options} >report 2>said & watch=$!
         while ! grep -q watching said; do kill -0 $watch 2>/dev/null || {{ cat said; exit 1; }}; sleep 0.05; done
         echo go >&4; while ! grep -q sites truth; do kill -0 $guest; sleep 0.05; done
         kill -INT $watch; wait $watch; echo end >&4; wait $guest
         cat truth; echo ----; cat report"
    );
    let output = l1.run(&script, MINUTE)?;
    let (truth, report) = output.split_once("----").with_context(|| format!("two parts: {output}"))?;
    let truth = serde_json::from_str(truth.trim()).with_context(|| truth.to_owned())?;
    Ok((truth, serde_json::from_str(report).with_context(|| report.to_owned())?))
}

/// The sum over the sites at one instruction that `detail` accepts.
fn exits_at(report: &Value, address: u64, accept: impl Fn(&Value) -> bool) -> u64 {
    let sites = report["sites"].as_array().into_iter().flatten();
    let there = sites.filter(|site| site["rip"].as_u64() == Some(address) && accept(site));
    there.filter_map(|site| site["count"].as_u64()).sum()
}

/// It tells of no switches.
const TRACEFS: &str = "--source tracefs";

/// By programs in the kernel, by perf events and, as where both are forbidden, by tracefs.
fn every_exit_is_found(l1: &L1) -> Result<()> {
    found(l1, "--source bpf").context("by programs in the kernel")?;
    found(l1, "--source perf").context("by perf events")?;
    found(l1, TRACEFS).context("by tracefs")
}

/// Every site's count is exact, in reason, width, direction and place, and the whole is what KVM itself has counted.
fn found(l1: &L1, options: &str) -> Result<()> {
    let (truth, report) = watched(l1, 500, options)?;
    ensure!(report["lost"] == 0 && report["exits"] == report["recorded"], "{:#}", report["notes"]);
    let hole = truth["hole"].as_u64().context("hole")?;
    let port = |port: u64, width: u64, write: bool| {
        move |site: &Value| {
            let detail = &site["detail"]["port"];
            site["kind"] == "port"
                && detail["port"] == port
                && detail["width"] == width
                && detail["write"] == write
        }
    };
    let memory = |address: u64, width: u64, write: bool| {
        move |site: &Value| {
            let detail = &site["detail"]["memory"];
            site["kind"] == "memory"
                && detail["address"] == address
                && detail["width"] == width
                && detail["write"] == write
        }
    };
    let msr = |write: bool| {
        move |site: &Value| {
            site["kind"] == "msr"
                && site["detail"] == serde_json::json!({"msr": {"index": 0x1b, "write": write}})
        }
    };
    type Accept = Box<dyn Fn(&Value) -> bool>;
    let wanted: [(&str, Accept); 19] = [
        ("out8", Box::new(port(0x3f8, 1, true))),
        ("out16", Box::new(port(0xeee0, 2, true))),
        ("out32", Box::new(port(0xcf8, 4, true))),
        ("in8", Box::new(port(0x3fd, 1, false))),
        ("in16", Box::new(port(0xeee2, 2, false))),
        ("in32", Box::new(port(0x608, 4, false))),
        ("outs8", Box::new(port(0x3f8, 1, true))),
        ("write8", Box::new(memory(hole + 0x10, 1, true))),
        ("write16", Box::new(memory(hole + 0x12, 2, true))),
        ("write32", Box::new(memory(hole + 0x14, 4, true))),
        ("read8", Box::new(memory(hole + 0x21, 1, false))),
        ("read16", Box::new(memory(hole + 0x22, 2, false))),
        ("read32", Box::new(memory(hole + 0x20, 4, false))),
        ("rdmsr", Box::new(msr(false))),
        ("wrmsr", Box::new(msr(true))),
        ("hypercall", Box::new(|site| site["detail"]["hypercall"]["number"] == 77)),
        ("cpuid", Box::new(|site| site["detail"]["cpuid"]["leaf"] == 0)),
        ("hlt", Box::new(|site| site["kind"] == "halt")),
        ("end", Box::new(port(0xf4, 1, true))),
    ];
    for (name, accept) in wanted {
        let sites = truth["sites"].as_array().context("sites")?;
        let site = sites.iter().find(|site| site["name"] == name).context(name)?;
        let found = exits_at(&report, site["address"].as_u64().context("address")?, accept);
        ensure!(Some(found) == site["exits"].as_u64(), "{name}: found {found} of {site}\n{report:#}");
    }
    let names: Vec<&str> =
        report["registers"].as_array().into_iter().flatten().filter_map(|row| row["name"].as_str()).collect();
    for name in
        ["serial port 1: data, out 8", "MSR: IA32_APIC_BASE, read", "PCI configuration: address, out 32"]
    {
        ensure!(names.contains(&name), "{name} in {names:?}");
    }
    // Where the time went is told by switches of the thread; their parts are the whole.
    let sites = report["sites"].as_array().context("sites")?;
    for site in sites {
        let (parts, times) = (&site["parts"], &site["times"]);
        ensure!(parts.is_object() == (options != TRACEFS && site["ns_each"].is_u64()), "{site:#}");
        if parts.is_object() {
            let sum = ["kvm_ns", "vmm_ns", "preempted_ns", "blocked_ns"]
                .map(|part| parts[part].as_u64().unwrap_or(0));
            ensure!(Some(sum.iter().sum::<u64>()) == site["host_ns"].as_u64(), "{site:#}");
            ensure!((site["user"] == 0) == (sum[1] == 0), "time of the VMM: {site:#}");
        }
        if site["ns_each"].is_u64() {
            let [median, p99, max] = ["median_ns", "p99_ns", "max_ns"].map(|time| times[time].as_u64());
            ensure!(median.is_some() && median <= p99 && p99 <= max, "{site:#}");
        }
    }
    if options != TRACEFS {
        // L1 has one processor: the guest loses it to the watcher.
        let lost = |site: &Value| site["parts"]["preempted_ns"].as_u64() > Some(0);
        ensure!(sites.iter().any(lost), "no exit was preempted: {report:#}");
    }
    // What KVM has counted itself from the beginning to the end of the watch is what was seen.
    let counted = &report["kernel"]["counters"];
    ensure!(report["exits"] == counted["exits"] && counted["halt_exits"] == 510, "{:#}", report["kernel"]);
    eprintln!(
        "{} exits, all of them where they were caused, and as many as KVM has counted",
        report["exits"]
    );
    Ok(())
}

/// A sample of a tenth of the time: the total is KVM's, the rest says about the same, and what is seen has all its names.
fn a_sample_is_close(l1: &L1) -> Result<()> {
    let (truth, report) = watched(l1, 1000, "--sample 10")?;
    let all: u64 = truth["sites"].as_array().into_iter().flatten().filter_map(|s| s["exits"].as_u64()).sum();
    let (exits, recorded) = (report["exits"].as_u64().unwrap_or(0), report["recorded"].as_u64().unwrap_or(0));
    let whole = || format!("{exits} exits, {recorded} recorded, {all} caused; {:#}", report["notes"]);
    ensure!(
        exits >= all && exits < all + all / 10 && report["kernel"]["counters"]["exits"] == exits,
        "{}",
        whole()
    );
    // A tenth of the time at most; less on a busy machine, where slices come late.
    ensure!((exits / 200..exits / 4).contains(&recorded), "{}", whole());
    let sites = report["sites"].as_array().context("sites")?;
    let about =
        |kind: &str| sites.iter().any(|site| site["detail"][kind].is_object() && site["ns_each"].is_u64());
    ensure!(about("memory") && about("port") && sites.len() > 9, "{report:#}");
    Ok(())
}

/// One that is killed leaves its instance of tracefs, which goes on recording: the next watch removes it, and none that lives.
fn nothing_is_left_behind(l1: &L1) -> Result<()> {
    let (ioplane, guest) = (binary()?, example("tiny-guest")?);
    let (ioplane, guest) = (ioplane.display(), guest.display());
    let said = l1.run(
        &format!(
            "set -e; cd $(mktemp -d); mkfifo idle; {guest} <>idle >born 2>&1 & guest=$!
             watch() {{ while ! grep -qs watching $1; do kill -0 $2; sleep 0.05; done; }}
             {ioplane} exits --vm $guest --for 1h --source tracefs >/dev/null 2>killed & killed=$!; watch killed $killed
             {ioplane} exits --vm $guest --for 1h --source tracefs >/dev/null 2>lives & lives=$!; watch lives $lives
             cd /sys/kernel/tracing/instances; ls; kill -9 $killed; wait $killed || true; echo one is killed; ls
             {ioplane} exits --vm $guest --for 100ms >/dev/null 2>&1; echo one is swept; ls
             kill -HUP $lives; wait $lives; echo none is left; ls; kill $guest"
        ),
        MINUTE,
    )?;
    let ours = |part: &str| part.lines().filter(|line| line.starts_with("ioplane-exits-")).count();
    let counts: Vec<usize> = said.split(" is ").map(ours).collect();
    ensure!(counts == [2, 2, 1, 0], "{said}");
    Ok(())
}

/// What cannot be done is said clearly, and harms nobody. One script does it all: each starting of a shell in L1 takes its time.
fn it_refuses_clearly(l1: &L1) -> Result<()> {
    let (ioplane, guest) = (binary()?, example("tiny-guest")?);
    let (ioplane, guest) = (ioplane.display(), guest.display());
    let without = |capabilities: &str, options: &str| {
        format!(
            "setpriv --bounding-set={capabilities} --inh-caps={capabilities} {ioplane} exits --vm tiny-guest --for 1s {options}"
        )
    };
    let no_perf = "-sys_admin,-perfmon";
    let neither = without(no_perf, "");
    let neither = format!(
        "unshare -m sh -c 'umount -R /sys/kernel/debug; mount -o remount,ro,bind /sys/kernel/tracing; exec {neither}'"
    );
    let hidden = format!(
        "unshare -m sh -c 'umount -R /sys/kernel/tracing; umount -R /sys/kernel/debug; exec {ioplane} exits --for 1s'"
    );
    let cases = [
        (format!("{ioplane} exits --vm nobody --for 1s"), "no VM is called \"nobody\""),
        (hidden, "tracefs is not mounted"),
        (without("-all", ""), "root sees all VMs"),
        (without(no_perf, "--source perf"), "perf_event_paranoid"),
        (neither, "tracefs in their place"),
        (format!("{ioplane} exits --symbols /dev/zero --for 1s"), "/dev/zero"),
        (format!("{ioplane} exits --devices /etc/passwd --for 1s"), "query-pci"),
        (format!("{ioplane} exits apply ide --via sh --for 1s"), "ide is nothing that can be applied"),
    ];
    let mut script = format!(
        "{ioplane} exits --for 1s; echo \"=\"; sleep 9 & {ioplane} exits --vm $! --for 1s; echo \"=\"; cd $(mktemp -d); mkfifo idle
         {guest} <>idle >said 2>&1 & guest=$!; while ! grep -q ready said; do kill -0 $guest || exit 1; sleep 0.05; done\n"
    );
    for (command, _) in &cases {
        script += &format!("timeout 60 {command} && echo it has not failed; echo \"=\"\n");
    }
    // Harm would be that it does not run any more.
    script += "echo >idle; while ! grep -q sites said; do kill -0 $guest || exit 1; sleep 0.05; done; echo unharmed; kill $guest";
    let output = l1.run(&script, MINUTE)?;
    let said: Vec<&str> = output.split("=\n").collect();
    let wanted =
        ["no KVM VM is running"; 2].into_iter().chain(cases.iter().map(|case| case.1)).chain(["unharmed"]);
    for (number, wanted) in wanted.enumerate() {
        let said = said.get(number).copied().unwrap_or_default();
        ensure!(said.contains(wanted) && !said.contains("not failed"), "{wanted:?} in {said:?}\n{output}");
    }
    Ok(())
}

/// A planted hot site in a guest of stock QEMU: its name and address are random, and the kernel is moved.
fn the_planted_site_is_found(l1: &L1) -> Result<()> {
    let (planted, other) = (Planted::new(), Planted::new());
    let cut = &planted.elf[..planted.elf.len() / 2];
    let files: [(&str, &[u8]); 4] = [
        ("planted.elf", &planted.elf),
        ("planted.kallsyms", planted.kallsyms.as_bytes()),
        ("other.elf", &other.elf),
        ("cut.elf", cut),
    ];
    for (name, bytes) in files {
        fs::write(l1.folder().join(name), bytes)?;
    }
    let (ioplane, folder) = (binary()?, l1.folder().display().to_string());
    let ioplane = ioplane.display();
    let guest = l1.start(&format!(
        "mkfifo /tmp/monitor.in /tmp/monitor.out; \
         exec qemu-system-x86_64 -accel kvm -cpu host -machine q35 -m 128 -nodefaults -no-user-config -display none \
         -name planted,debug-threads=on -kernel {folder}/planted.elf -qmp unix:/tmp/planted.qmp,server=on,wait=off \
         -chardev file,id=begun,path={folder}/begun -device isa-debugcon,iobase=0xe9,chardev=begun \
         -chardev pipe,id=monitor,path=/tmp/monitor -mon chardev=monitor"
    ))?;
    let watch = |symbols: &str| -> Result<Value> {
        let script =
            format!("{ioplane} exits --vm planted --for 2s --json --symbols {folder}/{symbols} 2>/dev/null");
        let output = l1.run(&script, MINUTE)?;
        serde_json::from_str(&output).with_context(|| output)
    };
    // Firmware first.
    let begun = format!("for i in $(seq 600); do [ -s {folder}/begun ] && exit 0; sleep 0.1; done; exit 1");
    l1.run(&begun, MINUTE).with_context(|| guest.output())?;
    for symbols in ["planted.elf", "planted.kallsyms"] {
        let report = watch(symbols)?;
        let first = &report["sites"][0];
        let explain = || format!("{symbols}: {} moved by {:#x}\n{report:#}", planted.hot, planted.slide);
        ensure!(report["functions"][0]["name"] == planted.hot.as_str(), "{}", explain());
        ensure!(
            first["rip"] == planted.address && first["function"] == format!("{}+0x5", planted.hot),
            "{}",
            explain()
        );
        ensure!(
            report["registers"][0]["name"] == "ACPI power management: PM timer (q35, i440fx), in 32",
            "{}",
            explain()
        );
        ensure!(report["functions_percent"].as_f64() > Some(99.0), "{}", explain());
        let notes = report["notes"].to_string();
        let moved = if symbols == "planted.elf" { planted.slide } else { 0 };
        ensure!(notes.contains(&format!("moved by {moved:#x}, ")), "{}", explain());
        eprintln!(
            "{symbols}: {} at {:#x} causes {} exits a second; {notes}",
            planted.hot, planted.address, first["rate"]
        );
    }
    // Its loop causes 68 exits, four of them alone at their places.
    let report = watch("planted.elf --sample 4")?;
    let (exits, sites) =
        (report["exits"].as_f64().unwrap_or(0.0), report["sites"].as_array().context("sites")?);
    let cold = sites.iter().filter(|site| {
        let share = site["count"].as_f64().unwrap_or(0.0) * 68.0 / exits;
        site["function"].is_string() && site["kind"] != "host-interrupt" && (0.4..2.5).contains(&share)
    });
    ensure!(cold.count() == 4, "{report:#}");
    let report = watch("other.elf")?;
    ensure!(report["functions"] == serde_json::json!([]), "another kernel's names: {report:#}");
    ensure!(report["notes"].to_string().contains("do not fit"), "{report:#}");
    let ended = l1
        .start(&format!("{ioplane} exits --vm planted --for 1s --symbols {folder}/cut.elf"))?
        .wait(MINUTE)?;
    ensure!(ended.status != 0 && ended.output.contains("damaged ELF"), "{ended:?}");
    // As it grows, on a terminal of 20 lines, until Ctrl-C.
    let typed = l1.run(
        &format!(
            "cd /tmp; (while ! grep -qs 'I/O instruction' typed; do sleep 0.1; done; printf '\\003'; sleep 1) |
             timeout 60 script -qefc 'stty rows 20 cols 90; exec {ioplane} exits --vm planted --live --html /tmp/live.html' typed \
             >/dev/null && grep -q '</html>' live.html && cat typed"
        ),
        MINUTE,
    )?;
    let screens: Vec<&str> = typed.split("\x1b[H").collect();
    let fits = |screen: &&str| screen.lines().count() <= 21 && !screen.contains("Error");
    ensure!(screens.len() > 1 && screens.iter().all(fits), "{typed:?}");
    it_is_compared_and_counted(l1, &ioplane.to_string(), &folder)?;
    // It migrates while it is watched, then ends while it is watched.
    let meanwhile = |order: &str, then: &str| {
        format!(
            "{ioplane} exits --vm planted --for 1h >/tmp/report 2>/tmp/said & watch=$!
             while ! grep -q watching /tmp/said; do kill -0 $watch || exit 1; sleep 0.05; done
             echo '{order}' >/tmp/monitor.in; {then}; wait $watch && cat /tmp/report"
        )
    };
    let interrupt = "while [ ! -e /tmp/moved ]; do sleep 0.1; done; kill -INT $watch";
    let said = l1.run(&meanwhile("migrate \"exec:cat >/dev/null; echo >/tmp/moved\"", interrupt), MINUTE)?;
    ensure!(said.contains("it has migrated"), "{said}");
    let said = l1.run(&meanwhile("quit", "true"), MINUTE)?;
    ensure!(said.contains("the VM has ended"), "{said}");
    ensure!(guest.wait(MINUTE)?.status == 0, "{}", guest.output());
    Ok(())
}

/// Recordings are compared, limits decide the exit code, and KVM's own counters say about the same of the VM among all of the host.
fn it_is_compared_and_counted(l1: &L1, ioplane: &str, folder: &str) -> Result<()> {
    let output = l1.run(
        &format!(
            "set -e; cd $(mktemp -d); symbols='--symbols {folder}/planted.elf'
             {ioplane} exits record a -q --vm planted --for 1s $symbols 2>/dev/null
             {ioplane} exits record b -q --vm planted --for 2s $symbols 2>/dev/null
             {ioplane} exits diff a b --json; echo =
             fails() {{ {ioplane} exits diff a b --fail-if \"$@\" >said 2>&1 && echo passed || echo \"code $?: $(tail -n 1 said)\"; }}
             fails 'exits/s>+900%'; fails 'exits/s>1'; fails 'exits/s[I/O instruction]<=0'; fails 'exits/s>10%'
             head -c 2000 a >c; fails 1 2>&1; {ioplane} exits diff a c 2>&1 || true; {ioplane} exits --vm planted --for 1s --json >c 2>/dev/null
             {ioplane} exits diff c a 2>&1 || true; {ioplane} exits record /nowhere/a --vm planted 2>&1 || true; echo =
             {ioplane} exits top --once --interval 2s --json; echo =
             {ioplane} exits top --json --interval 500ms | head -n 2; echo =
             unshare -m sh -c 'umount -R /sys/kernel/debug; {ioplane} exits top --once' 2>&1 || true; echo =
             {ioplane} exits diff a b --fail-if 'exits/s>+10%' || true; {ioplane} exits top --once
             {ioplane} exits --vm planted --for 1s $symbols 2>/dev/null | grep -A 6 'host time of'"
        ),
        MINUTE,
    )?;
    let parts: Vec<&str> = output.split("=\n").collect();
    let [compared, limits, counted, lines, without, shown] = parts[..] else { anyhow::bail!("{output}") };
    let compared: Value = serde_json::from_str(compared).with_context(|| output.clone())?;
    let site = compared["sites"]
        .as_array()
        .context("sites")?
        .iter()
        .find(|site| site["reason"] == "I/O instruction");
    let site = site.with_context(|| output.clone())?;
    // The same loop twice: neither is gone nor new.
    ensure!(site["before"].as_f64() > Some(20.0) && site["after"].as_f64() > Some(20.0), "{output}");
    ensure!(compared["before"]["kernel"].as_str().is_some_and(|kernel| !kernel.is_empty()), "{output}");
    let wanted = [
        "passed",
        "code 1: FAILED  exits/s>1",
        "passed",
        "is not a limit",
        "is not a limit",
        "is not a recording",
        "is a report of `ioplane exits --json`",
        "cannot be written",
    ];
    for (wanted, line) in wanted.into_iter().zip(limits.lines()) {
        ensure!(line.contains(wanted), "{wanted:?} in {line:?}\n{output}");
    }
    let counted: Value = serde_json::from_str(counted).with_context(|| output.clone())?;
    let vm = &counted["vms"][0];
    ensure!(vm["name"] == "planted" && vm["vcpus"] == 1, "{output}");
    // What the tracepoints say and what KVM has counted at another time are of the same order.
    let (traced, counts) = (compared["all"]["after"].as_f64(), vm["exits"].as_f64());
    let ratio = counts.unwrap_or(0.0) / traced.unwrap_or(0.0).max(1e-9);
    ensure!((0.2..20.0).contains(&ratio) && vm["io"].as_f64() > Some(20.0), "{ratio}: {output}");
    let each = lines.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
    ensure!(each.len() == 2 && each.iter().all(|rates| rates["vms"][0]["name"] == "planted"), "{output}");
    ensure!(without.contains("mount -t debugfs debugfs /sys/kernel/debug"), "{output}");
    ensure!(shown.contains("ioplane exits --vm pid:"), "{output}");
    eprintln!("traced {traced:?} exits a second, counted {counts:?}\n{shown}");
    Ok(())
}

#[test]
fn exits_are_seen_as_they_are() -> Result<()> {
    let begun = Instant::now();
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    type Stage = fn(&L1) -> Result<()>;
    let stages: [(&str, Stage); 5] = [
        ("every exit is found", every_exit_is_found),
        ("a sample is close", a_sample_is_close),
        ("it refuses clearly", it_refuses_clearly),
        ("nothing is left behind", nothing_is_left_behind),
        ("the planted site is found", the_planted_site_is_found),
    ];
    eprintln!("[{:5.1} s] L1 is up", begun.elapsed().as_secs_f64());
    for (name, stage) in stages {
        stage(&l1).context(name)?;
        eprintln!("[{:5.1} s] {name}", begun.elapsed().as_secs_f64());
    }
    Ok(())
}
