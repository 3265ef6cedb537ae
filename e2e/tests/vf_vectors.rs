//! A guest moves with its virtual function while one of its MSI-X vectors is masked and pending: the driver's receive vector, masked in the table behind the
//! driver's back. It is still pending at the destination, and comes once it is unmasked. The stage is that of `vf_move`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::L1;
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::sides::{Side, moves};
use serde_json::json;
use std::time::{Duration, Instant};

/// igbvf's vectors, in their order: transmit, receive, the mailbox's.
const RECEIVE: u64 = 1;
/// Of an entry of the MSI-X table, which has 16 bytes (PCI 3.0, 6.8.2): where its mask is.
const VECTOR_CONTROL: u64 = 12;
/// The capability of MSI-X in QEMU's igbvf.
const CAPABILITY: u64 = 0x70;
const MINUTE: Duration = Duration::from_secs(60);

/// What a guest sees of the function's vectors.
struct Vectors<'a> {
    l1: &'a L1,
    /// Where the guest's system has the BAR of table and pending bits.
    table: u64,
    pending: u64,
}

impl<'a> Vectors<'a> {
    fn of(l1: &'a L1, guest: &str) -> Result<Self> {
        let words = format!("/tmp/busybox hexdump -v -s {CAPABILITY} -n 12 -e '1/4 \"%u \"' $device/config");
        let line =
            format!("device=$(ls -d /sys/bus/pci/drivers/igbvf/*:*); {words}; sed -n 4p $device/resource");
        let said = l1.ask(guest, &line)?;
        let words: Vec<&str> = said.split_whitespace().collect();
        let number = |at: usize| -> Result<u64> {
            let word = words.get(at).with_context(|| said.clone())?;
            let parsed = match word.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16),
                None => word.parse(),
            };
            parsed.with_context(|| said.clone())
        };
        ensure!(number(0)? & 0xff == 0x11, "no capability of MSI-X: {said}");
        let place = |word: u64| -> Result<u64> {
            ensure!(word & 7 == 3, "not in BAR 3: {said}");
            Ok(number(3)? + (word & !7))
        };
        Ok(Vectors { l1, table: place(number(1)?)?, pending: place(number(2)?)? })
    }

    fn mask(&self, guest: &str, masked: bool) -> Result<()> {
        let place = self.table + 16 * RECEIVE + VECTOR_CONTROL;
        self.l1.ask(guest, &format!("/tmp/busybox devmem {place:#x} 32 {}", u8::from(masked))).map(drop)
    }

    fn is_pending(&self, guest: &str) -> Result<bool> {
        let said = self.l1.ask(guest, &format!("/tmp/busybox devmem {:#x} 32", self.pending))?;
        let bits = said.trim().strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
        Ok(bits.with_context(|| said.clone())? >> RECEIVE & 1 != 0)
    }

    /// Interrupts of the receive vector so far, of all processors.
    fn taken(&self, guest: &str) -> Result<u64> {
        let said = self.l1.ask(guest, "grep -- -rx-0 /proc/interrupts")?;
        let counts = said.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok());
        Ok(counts.sum())
    }
}

fn answers(l1: &L1, guest: &str) -> Result<bool> {
    let line = format!("/tmp/busybox ping -q -c 2 -W 3 {PEER_IP} >/dev/null && echo yes || echo no");
    Ok(l1.ask(guest, &line)?.trim() == "yes")
}

#[test]
fn a_vector_that_is_masked_and_pending_comes_at_the_destination() -> Result<()> {
    let begun = Instant::now();
    let news = |line: &str| eprintln!("[{:5.1} s] {line}", begun.elapsed().as_secs_f64());
    let (l1, cards) = L1::boot_with_igbs(2048, 2, 1, &news)?;
    let [here, there] = Side::both(&l1, cards, "migratable")?;
    let said = || format!("ioplane said:\n{}\n{}", here.daemon.said(), there.daemon.said());
    let first = l1.traveller("first", &here.args()?)?;
    news("the guest is up");
    first.raise_igbvf().and_then(|()| first.depart()).with_context(said)?;
    let vectors = Vectors::of(&l1, "first")?;
    ensure!(!vectors.is_pending("first")?, "nothing is masked yet");
    vectors.mask("first", true)?;
    let taken = vectors.taken("first")?;
    ensure!(!answers(&l1, "first")?, "a driver without its interrupt has seen an answer");
    ensure!(vectors.is_pending("first")?, "the answer has not come to the function");
    news("moves");
    let (second, report) = moves(&l1, &here, first, ["first", "second"], &there).with_context(said)?;
    eprintln!("{report}");
    ensure!(vectors.is_pending("second")?, "it was, and is not any more");
    ensure!(!answers(&l1, "second")?, "it is masked");
    ensure!(vectors.taken("second")? == taken, "it is masked, and was taken");
    news("is unmasked");
    vectors.mask("second", false)?;
    let end = Instant::now() + MINUTE;
    while !answers(&l1, "second")? {
        ensure!(Instant::now() < end, "no answer: {}", said());
    }
    ensure!(vectors.taken("second")? > taken && !vectors.is_pending("second")?, "it has not come");
    for side in [&here, &there] {
        let faults = side.daemon.json("pci show nic0")?["hardware_faults"].clone();
        ensure!(faults == json!({}), "{faults}");
    }
    second.kill()?;
    news("done");
    Ok(())
}
