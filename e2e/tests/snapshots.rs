//! Stock QEMU in L1 with the interposer saves a guest's state while its device accesses are clustered, and loads it again: memory, disk and devices are those
//! of that moment, the guest goes on, and so does clustering.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::clustering::{ended_by, saved};
use ioplane_e2e::preload::long_form;
use ioplane_e2e::process::run;
use ioplane_e2e::{L1, L2, OldMachine, Version};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
/// Loads, until the VMM has stopped a guest in a cluster. The short form is content with two.
const LOADS: usize = 12;
/// Writes its turn's number to the disk, reads it and the rest of the disk back, and looks at configuration spaces; tells of it by the serial
/// port, since no guest that uses a shared folder can be saved.
const TURNS: &str = "set -e
    cat >/tmp/work <<'END'
cd /tmp
until umount /folder; do sleep 0.1; done
until chroot /proc/1/root /bin/busybox umount /folder; do sleep 0.1; done
look() { for function in /sys/bus/pci/devices/*; do od -An -v -tx1 -j 8 \"$function/config\"; done | cksum; }
first=$(look)
turn=0
while :; do
    was=$(dd if=/dev/sda bs=4k count=1 iflag=direct 2>/dev/null | tr -d '\\0 ')
    turn=$((turn + 1))
    printf '%-4096s' $turn | dd of=/dev/sda bs=4k iflag=fullblock oflag=direct conv=notrunc 2>/dev/null
    sum=$(dd if=/dev/sda bs=64k skip=1 count=1 iflag=direct 2>/dev/null | sha256sum)
    functions=other; [ \"$(look)\" = \"$first\" ] && functions=same
    echo \"turn $turn after $was rest ${sum%% *} functions $functions .\"
done
END
    printf '%-4096s' 0 | dd of=/dev/sda bs=4k iflag=fullblock oflag=direct conv=notrunc
    setsid sh /tmp/work </dev/null >/dev/ttyS0 2>&1 &";

/// A guest, and what it has told.
struct Teller<'a> {
    l1: &'a L1,
    guest: L2<'a>,
    /// The digest of the part of the disk that nobody writes to.
    rest: String,
    /// How much it had told when its state was loaded: two halves of lines meet there.
    cuts: Vec<usize>,
}

impl Teller<'_> {
    /// The numbers of its turns since a state was loaded last; an error if one has found something else than the one before it has left.
    fn turns(&self) -> Result<Vec<u64>> {
        let console = self.guest.console();
        let mut told = console.get(self.cuts.last().copied().unwrap_or_default()..).unwrap_or_default();
        if !self.cuts.is_empty() {
            told = told.split_once('\n').map_or("", |(_, whole)| whole);
        }
        // The last line may be half of one.
        let whole =
            told.lines().map(str::trim).filter(|line| line.starts_with("turn ") && line.ends_with('.'));
        whole
            .map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                let ["turn", turn, "after", before, "rest", sum, "functions", functions, "."] = words[..]
                else {
                    anyhow::bail!("{line:?} is no turn")
                };
                let (turn, before): (u64, u64) = (turn.parse()?, before.parse()?);
                ensure!(turn == before + 1 && sum == self.rest && functions == "same", "{line}");
                Ok(turn)
            })
            .collect()
    }

    /// Waits until it has told of so many more.
    fn more_turns(&self, more: usize) -> Result<Vec<u64>> {
        let end = Instant::now() + 3 * MINUTE;
        let before = self.turns()?.len();
        loop {
            let told = self.turns()?;
            if told.len() >= before + more {
                ensure!(told.windows(2).all(|two| two[1] == two[0] + 1), "{told:?}");
                return Ok(told);
            }
            self.l1.still_runs()?;
            let (said, console) = (self.guest.said(), self.guest.console());
            ensure!(Instant::now() < end, "{told:?}; QEMU said {said}; the console: {console}");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Back to the moment that was saved.
    fn load(&mut self) -> Result<()> {
        self.guest.qmp("stop", &json!({}))?;
        self.cuts.push(self.guest.console().len());
        monitor(&self.guest, "loadvm moment")?;
        self.guest.qmp("cont", &json!({})).map(drop)
    }
}

/// A line of QEMU's monitor for people, which says nothing if it has done it.
fn monitor(guest: &L2<'_>, line: &str) -> Result<()> {
    let said = guest.qmp("human-monitor-command", &json!({ "command-line": line }))?;
    ensure!(said == "", "{line}: {said}");
    Ok(())
}

/// A guest in this QEMU is saved, and loaded again and again.
fn saved_and_loaded(l1: &L1, version: Version, name: &str) -> Result<()> {
    let begun = Instant::now();
    let step = |what: &str| eprintln!("[{:5.1} s] {name}: {what}", begun.elapsed().as_secs_f64());
    let raw = l1.old_disk()?;
    let content = fs::read(&raw)?;
    let rest = content.get(1 << 16..2 << 16).context("the disk is smaller")?;
    let rest = ioplane_e2e::assets::digest(rest);
    let disk = raw.with_file_name(format!("{name}.qcow2"));
    let [from, to] = [&raw, &disk].map(|path| path.display().to_string());
    run("qemu-img", &["convert", "-O", "qcow2", &from, &to])?;
    let before = l1.interposed()?;
    // Without DMA, so that each command and each word of data is the processor's.
    let machine = OldMachine { name, version, before: &before, args: "", append: "libata.dma=0" };
    // Written in L1's own memory, as fast as it gets.
    let own = std::path::Path::new("/tmp").join(format!("{name}.qcow2"));
    l1.run(&format!("cp {to} {}", own.display()), MINUTE)?;
    let (guest, _) = l1.old_machine(&machine, &own, &|line| eprintln!("{line}"))?;
    guest.find_ide()?;
    guest.run(TURNS)?;
    let mut teller = Teller { l1, guest, rest, cuts: Vec::new() };
    step(&format!("{:?} before it is saved", teller.more_turns(2)?));

    let status = || l1.clustering(&format!("--vm {name} --sites 256"));
    let interrupted = |status: &Value| ended_by(status, &["wanted by the VMM", "other call of the VMM"]);
    let first = status()?;
    ensure!(first["clustering"] == "on" && saved(&first) > 5000, "{first:#}");
    monitor(&teller.guest, "savevm moment")?;
    let last = *teller.turns()?.last().context("turns")?;
    step(&format!("saved after {last} turns"));
    for load in 1.. {
        // It goes on, from where it was saved or from where that was loaded.
        let ahead = *teller.more_turns(2)?.last().context("turns")?;
        teller.load()?;
        let next = *teller.more_turns(1)?.first().context("a turn")?;
        // What is told while the state is saved or loaded is not known, and half a line is left out.
        step(&format!("load {load}: turn {next} after turn {ahead}"));
        ensure!((last.saturating_sub(1)..=last + 2).contains(&next) && next <= ahead, "saved after {last}");
        let count = interrupted(&status()?) - interrupted(&first);
        if load >= 2 && (count > 0 || !long_form()) {
            step(&format!("{count} clusters were interrupted"));
            break;
        }
        ensure!(load < LOADS, "no cluster was interrupted");
    }
    let before = status()?;
    teller.more_turns(2)?;
    let after = status()?;
    let more = saved(&after) - saved(&before);
    step(&format!("{more} exits saved in two turns after the last load"));
    ensure!(after["clustering"] == "on" && more > 200, "{before:#}\n{after:#}");
    teller.guest.kill()
}

#[test]
fn a_guest_goes_on_from_a_snapshot_and_so_does_clustering() -> Result<()> {
    let l1 = L1::boot(1536, "", &|line| eprintln!("{line}"))?;
    saved_and_loaded(&l1, Version::Host, "snapshot")?;
    if long_form() {
        saved_and_loaded(&l1, Version::Newer, "newer")?;
    }
    Ok(())
}
