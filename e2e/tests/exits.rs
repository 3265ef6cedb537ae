//! `ioplane exits` in L1, on guests whose exits are known exactly.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::{L1, Planted};
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

/// An example of ioplane-exits; cargo builds examples with the tests of their crate, next to this test's folder.
fn example(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let folders = test.ancestors().skip(1).take(2);
    let found = folders.map(|folder| folder.join("examples").join(name)).find(|path| path.is_file());
    found.with_context(|| format!("no example {name}; build it: cargo build -p ioplane-exits --examples"))
}

/// Runs the tiny guest under observation: what it says it did, and what was seen.
fn watched(l1: &L1, times: u32, options: &str) -> Result<(Value, Value)> {
    let (ioplane, guest) = (binary()?, example("tiny-guest")?);
    let (ioplane, guest) = (ioplane.display(), guest.display());
    let script = format!(
        "set -e; cd $(mktemp -d); mkfifo in
         {guest} {times} <in >truth 2>&1 & guest=$!
         exec 4>in; sleep 0.5
         {ioplane} exits --vm $guest --for 1h --json {options} >report 2>said & watch=$!
         while ! grep -q watching said; do kill -0 $watch 2>/dev/null || {{ cat said; exit 1; }}; sleep 0.05; done
         echo go >&4; while ! grep -q sites truth; do kill -0 $guest; sleep 0.05; done
         echo end >&4; wait $guest; wait $watch
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

/// Every site's count is exact, in reason, width, direction and place, and the whole is what KVM itself has counted.
fn every_exit_is_found(l1: &L1) -> Result<()> {
    let (truth, report) = watched(l1, 500, "")?;
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
    type Accept = Box<dyn Fn(&Value) -> bool>;
    let wanted: [(&str, Accept); 12] = [
        ("out8", Box::new(port(0x3f8, 1, true))),
        ("out16", Box::new(port(0xeee0, 2, true))),
        ("out32", Box::new(port(0xcf8, 4, true))),
        ("in8", Box::new(port(0x3fd, 1, false))),
        ("in16", Box::new(port(0xeee2, 2, false))),
        ("in32", Box::new(port(0x608, 4, false))),
        ("write8", Box::new(memory(hole + 0x10, 1, true))),
        ("read32", Box::new(memory(hole + 0x20, 4, false))),
        ("rdmsr", Box::new(|site| site["detail"]["msr"]["index"] == 0x1b)),
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
    // KVM's own count ends with the VM, whose debugfs folder is gone by then; a shorter watch sees it.
    eprintln!("{} exits, all of them where they were caused", report["exits"]);
    Ok(())
}

/// What KVM has counted itself from the beginning to the end of a watch is what was seen.
fn kvm_counts_the_same(l1: &L1) -> Result<()> {
    let (ioplane, guest) = (binary()?, example("tiny-guest")?);
    let (ioplane, guest) = (ioplane.display(), guest.display());
    let script = format!(
        "set -e; cd $(mktemp -d); mkfifo in
         {guest} 300 <in >truth 2>&1 & guest=$!
         exec 4>in; sleep 0.5
         {ioplane} exits --vm tiny-guest --for 4s --json >report 2>said & watch=$!
         while ! grep -q watching said; do kill -0 $watch 2>/dev/null || {{ cat said; exit 1; }}; sleep 0.05; done
         echo go >&4; wait $watch; echo end >&4; wait $guest; cat report"
    );
    let report: Value = serde_json::from_str(&l1.run(&script, MINUTE)?)?;
    let (exits, counted) = (report["exits"].as_u64(), report["kernel"]["counters"]["exits"].as_u64());
    ensure!(exits > Some(3300) && exits == counted, "we saw {exits:?}, KVM {counted:?}");
    ensure!(report["kernel"]["counters"]["halt_exits"] == 310, "{:#}", report["kernel"]);
    Ok(())
}

/// A sample of one in ten says about the same, and the total is exact.
fn a_sample_is_close(l1: &L1) -> Result<()> {
    let (truth, report) = watched(l1, 3000, "--sample 10")?;
    let all: u64 = truth["sites"].as_array().into_iter().flatten().filter_map(|s| s["exits"].as_u64()).sum();
    let (exits, recorded) = (report["exits"].as_u64().unwrap_or(0), report["recorded"].as_u64().unwrap_or(0));
    ensure!(
        exits >= all && recorded.abs_diff(exits / 10) < 3,
        "{exits} exits, {recorded} recorded, {all} caused"
    );
    let serial = exits_at(&report, truth["sites"][0]["address"].as_u64().unwrap_or(0), |_| true);
    ensure!(serial.abs_diff(3000) < 100, "{serial} of 3000");
    Ok(())
}

/// A watch without some of root's capabilities.
fn without(capabilities: &str) -> Result<String> {
    Ok(format!(
        "{} <>/tmp/idle & guest=$!; sleep 0.5; setpriv --bounding-set={capabilities} --inh-caps={capabilities} \
         {} exits --vm tiny-guest --for 1s; kill $guest; exit 1",
        example("tiny-guest")?.display(),
        binary()?.display()
    ))
}

/// What cannot be done is said clearly, and harms nobody.
fn it_refuses_clearly(l1: &L1) -> Result<()> {
    let ioplane = binary()?;
    let ioplane = ioplane.display();
    for (script, wanted) in [
        (format!("{ioplane} exits --for 1s"), "no KVM VM is running"),
        (format!("sleep 9 & {ioplane} exits --vm $! --for 1s"), "no KVM VM is running"),
        (
            format!(
                "mkfifo /tmp/idle; {} <>/tmp/idle & guest=$!; sleep 0.5; {ioplane} exits --vm nobody --for 1s; \
                 kill $guest; exit 1",
                example("tiny-guest")?.display()
            ),
            "no VM is called \"nobody\"",
        ),
        (
            format!(
                "{} <>/tmp/idle & guest=$!; sleep 0.5; unshare -m sh -c 'umount -R /sys/kernel/tracing; \
                 umount -R /sys/kernel/debug; {ioplane} exits --for 1s'; kill $guest; exit 1",
                example("tiny-guest")?.display()
            ),
            "tracefs is not mounted",
        ),
        (without("-all")?, "as root more is seen"),
        (without("-sys_admin,-perfmon")?, "perf_event_paranoid"),
    ] {
        let ended = l1.start(&script)?.wait(MINUTE)?;
        ensure!(ended.status != 0 && ended.output.contains(wanted), "{script}\nsaid {}", ended.output);
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
        "exec qemu-system-x86_64 -accel kvm -cpu host -machine q35 -m 128 -nodefaults -no-user-config -display none \
         -name planted,debug-threads=on -kernel {folder}/planted.elf -qmp unix:/tmp/planted.qmp,server=on,wait=off \
         -chardev file,id=begun,path={folder}/begun -device isa-debugcon,iobase=0xe9,chardev=begun"
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
    let report = watch("other.elf")?;
    ensure!(report["functions"] == serde_json::json!([]), "another kernel's names: {report:#}");
    ensure!(report["notes"].to_string().contains("do not fit"), "{report:#}");
    let ended = l1
        .start(&format!("{ioplane} exits --vm planted --for 1s --symbols {folder}/cut.elf"))?
        .wait(MINUTE)?;
    ensure!(ended.status != 0 && ended.output.contains("damaged ELF"), "{ended:?}");
    guest.kill()
}

/// Passes a command and its standard input to the guest, as ssh would: a job in the folder that it shares.
const VIA: &str = r#"#!/bin/sh
cd "$(dirname "$0")/l2" || exit 1
number=1
while [ -e $number.sh ]; do number=$((number + 1)); done
cat >$number.in
echo "$* </folder/$number.in" >half
mv half $number.sh
while [ ! -e $number.status ]; do sleep 0.1; done
cat $number.out
exit $(cat $number.status)
"#;

/// A stock Debian kernel in stock QEMU that reads the PM timer: the function is named though KASLR has moved it, the remedy ends
/// these exits, and undoing it brings them back.
fn a_remedy_is_applied_and_undone(l1: &L1) -> Result<()> {
    let folder = l1.folder().display().to_string();
    fs::create_dir(l1.folder().join("l2"))?;
    fs::write(l1.folder().join("via"), VIA)?;
    let (kernel, initrd) = (l1.host.packed.display(), l1.host.guest.display());
    let guest = l1.start(&format!(
        "exec qemu-system-x86_64 -accel kvm -cpu host -machine q35 -m 320 -nodefaults -no-user-config -display none \
         -name debian -serial file:{folder}/l2.log -kernel {kernel} -initrd {initrd} \
         -append 'console=ttyS0 quiet panic=-1 mitigations=off clocksource=acpi_pm' \
         -fsdev local,id=folder,path={folder}/l2,security_model=none \
         -device virtio-9p-pci,fsdev=folder,mount_tag=folder -qmp unix:/tmp/debian.qmp,server=on,wait=off"
    ))?;
    let up = format!("for i in $(seq 600); do [ -e {folder}/l2/up ] && exit 0; sleep 0.2; done; exit 1");
    if let Err(error) = l1.run(&up, 2 * MINUTE) {
        let console = fs::read_to_string(l1.folder().join("l2.log")).unwrap_or_default();
        return Err(error.context(format!("{}\n{console}", guest.output())));
    }
    let via = format!("sh {folder}/via");
    l1.run(
        &format!(
            "echo 'cat /proc/kallsyms >/symbols; dd if=/symbols of=/folder/kallsyms bs=256k' | {via} sh -s"
        ),
        MINUTE,
    )?;
    l1.run(
        &format!("echo 'while :; do x=$EPOCHREALTIME; done >/dev/null 2>&1 </dev/null &' | {via} sh -s"),
        MINUTE,
    )?;
    let (ioplane, symbols) = (binary()?.display().to_string(), format!("{folder}/l2/kallsyms"));
    let options = format!("--vm debian --for 3s --symbols {symbols} --json");
    let json = |command: &str| -> Result<Value> {
        let output = l1.run(&format!("{command} 2>/tmp/said || {{ cat /tmp/said; exit 1; }}"), MINUTE)?;
        serde_json::from_str(&output).with_context(|| output)
    };
    let profile =
        json(&format!("{ioplane} exits --html {folder}/report.html --svg {folder}/flame.svg {options}"))?;
    ensure!(fs::read_to_string(l1.folder().join("report.html"))?.contains("acpi_pm_read"), "{profile:#}");
    ensure!(fs::read_to_string(l1.folder().join("flame.svg"))?.starts_with("<svg"));
    if let Some(keep) = std::env::var_os("IOPLANE_KEEP_REPORT") {
        for name in ["report.html", "flame.svg"] {
            fs::copy(l1.folder().join(name), PathBuf::from(&keep).join(name))?;
        }
    }
    let advice = json(&format!("{ioplane} exits advise {options}"))?;
    let timer =
        |advice: &Value| advice.as_array().into_iter().flatten().find(|f| f["id"] == "pm-timer").cloned();
    let finding = timer(&advice).with_context(|| format!("pm-timer in {advice:#}\n{profile:#}"))?;
    ensure!(finding["certainty"] == "high" && finding["gain"].as_f64() > Some(100.0), "{finding:#}");
    ensure!(finding["evidence"].to_string().contains("acpi_pm_read"), "{finding:#}");
    let ended = l1.start(&format!("{ioplane} exits apply hpet --via '{via}' {options}"))?.wait(MINUTE)?;
    ensure!(ended.status != 0, "nobody has found an HPET: {ended:?}");
    let applied = json(&format!("{ioplane} exits apply pm-timer --via '{via}' {options}"))?;
    let outcome = &applied["outcomes"][0];
    ensure!(outcome["before"].as_f64() > Some(100.0) && outcome["after"].as_f64() < Some(1.0), "{applied:#}");
    ensure!(applied["said"].to_string().contains("acpi_pm -> kvm-clock"), "{applied:#}");
    let undone = json(&format!("{ioplane} exits apply pm-timer --undo --via '{via}' {options}"))?;
    ensure!(undone["said"].to_string().contains("back to acpi_pm"), "{undone:#}");
    let again = json(&format!("{ioplane} exits advise {options}"))?;
    ensure!(timer(&again).is_some(), "the exits are back: {again:#}");
    eprintln!("{}\napplied {applied}", finding["evidence"]);
    guest.kill()
}

#[test]
fn exits_are_seen_as_they_are() -> Result<()> {
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    every_exit_is_found(&l1).context("every exit is found")?;
    kvm_counts_the_same(&l1).context("KVM counts the same")?;
    a_sample_is_close(&l1).context("a sample is close")?;
    the_planted_site_is_found(&l1).context("the planted site is found")?;
    a_remedy_is_applied_and_undone(&l1).context("a remedy is applied and undone")?;
    it_refuses_clearly(&l1).context("it refuses clearly")
}
