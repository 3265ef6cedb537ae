//! Code of a real guest, recorded while its drivers work: the interpreter and the processor of L1 (KVM, by single steps) make the same of it.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::preload::long_form;
use ioplane_e2e::process::built;
use ioplane_e2e::{L1, OldMachine, Version};
use serde_json::json;
use std::fs;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Reads the disk without DMA, configuration spaces and the RTC, and writes to a serial port, until it is told to end.
const WORK: &str = "stty -F /dev/ttyS1 38400 raw
    while [ ! -e /folder/enough ]; do
        dd if=/dev/sda of=/dev/null bs=4k count=2 iflag=direct 2>/dev/null
        for function in /sys/bus/pci/devices/*; do od -An -v -tx1 $function/config >/dev/null; done
        cat /sys/bus/nvmem/devices/cmos_nvram*/nvmem >/dev/null
        echo a line >/dev/ttyS1
        : >/folder/begun
    done";

/// What `compared N accesses N` of a replay says.
fn counts(said: &str) -> Result<[u64; 2]> {
    let line =
        said.lines().find_map(|line| line.strip_prefix("compared ")).with_context(|| said.to_owned())?;
    let (compared, accesses) = line.split_once(" accesses ").with_context(|| line.to_owned())?;
    Ok([compared.trim().parse()?, accesses.trim().parse()?])
}

#[test]
fn the_processor_does_what_the_interpreter_does_with_code_of_a_real_guest() -> Result<()> {
    let (stops, steps, enough) = if long_form() { (40, 6000, 200) } else { (6, 800, 20) };
    let begun = Instant::now();
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    let program =
        built("examples/replay").context("build it: cargo build -p ioplane-vcpu --example replay")?;
    // Not where L1 has a folder of its own.
    let (replay, registers) = (l1.folder().join("replay"), l1.folder().join("registers"));
    fs::copy(&program, &replay).with_context(|| program.display().to_string())?;
    let disk = l1.old_disk()?;
    let args = "-serial null -machine memory-backend=ram \
        -object memory-backend-file,id=ram,size=256M,mem-path=/tmp/recorded.ram,share=on";
    let machine =
        OldMachine { name: "recorded", version: Version::Host, before: "", args, append: "libata.dma=0" };
    let (guest, _) = l1.old_machine(&machine, &disk, &|line| eprintln!("{line}"))?;
    guest.find_ide()?;
    guest.start(WORK)?;
    guest.wait_for("begun", 2 * MINUTE)?;
    let nothing = json!({});
    let look = json!({"command-line": "info registers"});
    let mut all = [0, 0];
    // Where it is stopped is chance, and so is how much of what follows is accesses.
    for stop in 1..=stops * 5 {
        let said = guest.qmp_each(&[("stop", &nothing), ("human-monitor-command", &look)])?;
        fs::write(&registers, said.get(1).and_then(|said| said.as_str()).context("registers")?)?;
        let script = format!("{} /tmp/recorded.ram {} {steps} 2>&1", replay.display(), registers.display());
        let said = l1.run(&script, 3 * MINUTE).with_context(|| format!("replay {stop}"))?;
        let counted = counts(&said)?;
        (0..2).for_each(|which| all[which] += counted[which]);
        eprintln!("[{:5.1} s] {stop}: {}", begun.elapsed().as_secs_f64(), said.trim());
        if stop >= stops && all[1] >= enough {
            break;
        }
        guest.qmp("cont", &nothing)?;
        // Elsewhere in its work by the next time.
        std::thread::sleep(Duration::from_millis(300 + 70 * stop));
    }
    let [compared, accesses] = all;
    eprintln!("{compared} instructions are the same, {accesses} accesses among them");
    ensure!(compared > stops * steps / 10 && accesses >= enough, "{all:?} prove nothing");
    guest.kill()
}
