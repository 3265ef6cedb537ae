//! Batches of a real guest: stock QEMU in L1, Debian's kernel with the modules of `guest/batch`, libata's registers by one doorbell. L1's kernel
//! counts the exits of each port, QEMU traces what its IDE controller gets.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::batching::{ACCESSES, COMMANDS, DEBUG, IdeWork, READ, SELECT, WRITES, batches};
use ioplane_e2e::clustering::grown;
use ioplane_e2e::clustering::{ended_by, saved};
use ioplane_e2e::daemon::binary;
use ioplane_e2e::preload::access_trace;
use ioplane_e2e::{L1, L2, OldMachine, Version};
use std::fs;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// What the registers of the IDE controller are told while the disk is read.
fn written(l1: &L1, guest: &L2<'_>, name: &str) -> Result<Vec<String>> {
    let trace = access_trace(l1, guest, name, &["ide"], READ)?;
    let written: Vec<String> = trace.into_iter().filter(|line| line.starts_with("write ")).collect();
    let to = |ports: &[&str]| -> u64 {
        let is = |line: &&String| ports.iter().any(|port| line.contains(&format!("addr {port} ")));
        written.iter().filter(is).count() as u64
    };
    let registers = to(&["0x1f1", "0x1f2", "0x1f3", "0x1f4", "0x1f5", "0x1f6"]);
    ensure!(to(&["0x1f7"]) == COMMANDS && registers == COMMANDS * (WRITES + SELECT), "{name}: {written:#?}");
    Ok(written)
}

fn machine<'a>(name: &'a str, before: &'a str) -> OldMachine<'a> {
    OldMachine { name, version: Version::Host, before, args: "", append: "" }
}

/// Each ring is one exit, and nothing else is spared: `before` accesses were by now.
fn without_clusters(l1: &L1, guest: &L2<'_>, before: u64) -> Result<()> {
    let status = l1.clustering("--vm batched")?;
    ensure!(status["clustering"] == "off" && status["answers_batches"] == true, "{status:#}");
    let begun = batches(&status)?;
    let alone = guest.ide_commands(l1)?;
    let status = l1.clustering("--vm batched")?;
    let host = grown(&batches(&status)?, &begun);
    eprintln!("without clusters: {alone:?}; the host: {host:?}");
    ensure!(saved(&status) == before, "{before} before, and now {status:#}");
    alone.ensure_batched(&host)?;
    // Selecting the device is not the module's, so each select is an exit.
    ensure!(alone.doorbells() == host["answered"], "{alone:?}, {host:?}");
    ensure!(alone.registers_and_select() >= COMMANDS * SELECT, "{alone:?}");
    Ok(())
}

#[test]
fn a_command_of_libata_takes_a_few_exits_instead_of_one_per_register() -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {what}", begun.elapsed().as_secs_f64());
    let news = |line: &str| eprintln!("{line}");
    let l1 = L1::boot(1536, "", &news)?;
    let modules = l1.host.batch_modules(&news)?;
    let disk = l1.old_disk()?;
    let content = fs::read(&disk)?;
    step("L1 is up");

    // Nobody is there: the modules issue each access by itself.
    let (guest, _) = l1.old_machine(&machine("plain", ""), &disk, &news)?;
    let found = guest.use_batches(&modules, &disk)?;
    ensure!(found["offered"] == 0 && found["rings"] == 0 && found["single"] == 96, "{found:?}");
    let plain = guest.ide_commands(&l1)?;
    eprintln!("plain: {plain:?}");
    ensure!(plain.counts["rings"] == 0 && plain.counts["single"] == COMMANDS * ACCESSES, "{plain:?}");
    ensure!(plain.registers() == COMMANDS * WRITES && plain.doorbells() == 0, "{plain:?}");
    let plain_written = written(&l1, &guest, "plain")?;
    guest.kill()?;
    step("without the library");

    let command = l1.interposed_with("--batch-only")?;
    let (guest, _) = l1.old_machine(&machine("batched", &command), &disk, &news)?;
    let found = guest.use_batches(&modules, &disk)?;
    // A host that cuts the array short may leave one.
    ensure!(found["offered"] == 128 && found["rings"] > 0 && found["single"] <= 1, "{found:?}");
    without_clusters(&l1, &guest, 0)?;
    step("with batches and without clusters");
    let on = l1.clustering("on --vm batched")?;
    ensure!(on["clustering"] == "on" && on["answers_batches"] == true, "{on:#}");
    let before = batches(&l1.clustering("--vm batched")?)?;
    let batched = guest.ide_commands(&l1)?;
    let host = grown(&batches(&l1.clustering("--vm batched")?)?, &before);
    eprintln!("batched: {batched:?}; the host: {host:?}");
    // Where a cluster is under way, the doorbell takes no exit.
    batched.ensure_batched(&host)?;
    let all = [&plain, &batched].map(|work: &IdeWork| work.ports.all());
    ensure!(all[1] * 4 <= all[0], "{all:?} exits for ports");
    ensure!(written(&l1, &guest, "batched")? == plain_written, "the controller was told something else");
    // No access of a device comes before these, so no cluster is under way.
    let compared = guest.batch_work(&l1, &format!("for time in 1 2 3 4 5; do cat {DEBUG}/compare; done"))?;
    eprintln!("compared: {compared:?}");
    let text = l1.run(&format!("{} exits cluster --vm batched", binary()?.display()), MINUTE)?;
    ensure!(text.contains(" answered ("), "{text}");
    eprintln!("{text}");
    // Each access is issued once more by itself, to compare; what a batch that was cut short has left comes on top.
    let left = compared.counts["single"].saturating_sub(5 * 96);
    ensure!(compared.counts["batched"] + left == 5 * 96 && left <= 5, "{compared:?}");
    ensure!(compared.doorbells() > 0 && compared.doorbells() <= compared.counts["rings"], "{compared:?}");
    ensure!(compared.counts["rings"] < 96, "{compared:?}");
    step("with batches");

    let off = l1.clustering("off --vm batched")?;
    ensure!(off["clustering"] == "off" && off["answers_batches"] == false, "{off:#}");
    let single = guest.ide_commands(&l1)?;
    ensure!(single.counts["batched"] == 0 && single.counts["single"] == COMMANDS * ACCESSES, "{single:?}");
    ensure!(single.registers() == COMMANDS * WRITES, "{single:?}");
    l1.clustering("on --vm batched")?;
    let before = batches(&l1.clustering("--vm batched")?)?;
    let again = guest.ide_commands(&l1)?;
    again.ensure_batched(&grown(&batches(&l1.clustering("--vm batched")?)?, &before))?;
    l1.clustering("batch-only --vm batched")?;
    without_clusters(&l1, &guest, saved(&l1.clustering("--vm batched")?))?;
    guest.kill()?;
    step("switched off and on");
    ensure!(fs::read(&disk)? == content, "the disk has changed");
    Ok(())
}

/// Reads the disk again and again, and tells of it by the serial port: a shared folder is nothing that can migrate.
const TRAVELLER: &str = "set -e; cp /folder/disk /tmp/disk
    cat >/tmp/work <<'END'
cd /tmp
until umount /folder; do sleep 0.1; done
until chroot /proc/1/root /bin/busybox umount /folder; do sleep 0.1; done
round=0
while :; do
    round=$((round + 1)); data=other
    dd if=/dev/sda of=/tmp/again bs=256k iflag=direct 2>/dev/null; cmp /tmp/again /tmp/disk && data=same
    echo \"round $round\" $(cat DEBUG/counts) data $data .
    sleep 0.1
done
END
    setsid sh /tmp/work </dev/null >/dev/ttyS0 2>&1 &";

/// By what a migration ends clusters early: it logs the pages that the guest changes, and stops the vCPUs at its end.
const CUT: [&str; 2] = ["logged or read-only memory", "wanted by the VMM"];

/// One round of [`TRAVELLER`].
#[derive(Clone, Copy, Debug)]
struct Round {
    number: u64,
    batched: u64,
    single: u64,
}

/// The rounds that a guest has told of by now; an error if one of them has read something else.
fn rounds(guest: &L2<'_>) -> Result<Vec<Round>> {
    let console = guest.console();
    // The last line may be half of one, and the first after a migration the second half.
    let whole =
        console.lines().map(str::trim).filter(|line| line.starts_with("round ") && line.ends_with('.'));
    whole
        .map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let after =
                |name: &str| words.iter().position(|word| *word == name).and_then(|at| words.get(at + 1));
            let number = |name: &str| -> Result<u64> {
                after(name)
                    .and_then(|word| word.parse().ok())
                    .with_context(|| format!("{line:?} has no {name}"))
            };
            ensure!(after("data") == Some(&"same"), "{line}");
            Ok(Round { number: number("round")?, batched: number("batched")?, single: number("single")? })
        })
        .collect()
}

/// Waits until a guest has told of so many rounds; the last of them.
fn wait_for_rounds(l1: &L1, guest: &L2<'_>, count: usize) -> Result<Vec<Round>> {
    let end = Instant::now() + 3 * MINUTE;
    loop {
        let told = rounds(guest)?;
        if told.len() >= count {
            return Ok(told);
        }
        l1.still_runs()?;
        ensure!(
            Instant::now() < end,
            "{told:?}; QEMU said {}; the console: {}",
            guest.said(),
            guest.console()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// The destination's VMM is stock QEMU without the library, and nobody tells the guest. Clusters run at the source, and the migration ends some of them early.
#[test]
fn a_guest_that_migrates_to_a_host_without_the_library_goes_on_by_single_accesses() -> Result<()> {
    let news = |line: &str| eprintln!("{line}");
    let l1 = L1::boot(1536, "", &news)?;
    let modules = l1.host.batch_modules(&news)?;
    let disk = l1.old_disk()?;
    let command = l1.interposed_with("--batch")?;
    let (source, _) = l1.old_machine(&machine("source", &command), &disk, &news)?;
    source.use_batches(&modules, &disk)?;
    source.run(&TRAVELLER.replace("DEBUG", DEBUG))?;
    let there = wait_for_rounds(&l1, &source, 3)?;
    ensure!(
        there.windows(2).all(|two| {
            let [batched, single] = [two[1].batched - two[0].batched, two[1].single - two[0].single];
            // What a slow host cut short: at most one access of each batch.
            batched > 0 && single * 2 < batched
        }),
        "{there:?}"
    );

    let destination = l1.old_machine_incoming(&machine("destination", ""), &disk)?;
    let ended = || -> Result<Vec<u64>> {
        let status = l1.clustering("--vm source --sites 256")?;
        ensure!(status["clustering"] == "on", "{status:#}");
        Ok(CUT.map(|why| ended_by(&status, &[why])).to_vec())
    };
    let begun = ended()?;
    source.migrate_to(&destination)?;
    let cut: Vec<u64> = ended()?.iter().zip(begun).map(|(now, then)| now - then).collect();
    eprintln!("during the migration {cut:?} clusters ended by {CUT:?}");
    ensure!(cut.iter().sum::<u64>() > 0, "the migration has ended no cluster early");
    let left = batches(&l1.clustering("--vm source")?)?;
    let before = rounds(&source)?;
    let after = wait_for_rounds(&l1, &destination, 4)?;
    eprintln!("before: {:?}, {left:?}; after: {after:?}", before.last());
    let last = before.last().context("rounds before")?;
    ensure!(last.batched > 0 && last.number < after[0].number, "{last:?}, {after:?}");
    // The first round after it may have begun before.
    for two in after[1..].windows(2) {
        ensure!(two[1].batched == two[0].batched && two[1].single > two[0].single, "{after:?}");
    }
    Ok(())
}
