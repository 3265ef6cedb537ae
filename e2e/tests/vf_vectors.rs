//! A guest moves with its virtual function while one of its MSI-X vectors is masked and pending: the driver's receive vector, masked in the table behind the
//! driver's back. It comes at the destination once it is unmasked; were it lost, it would never come again, since the function masks a vector that it has
//! signalled by itself (EIAM) until the driver has taken it. The stage is that of `vf_move`.

use anyhow::{Context, Result, ensure};
use ioplane_e2e::L1;
use ioplane_e2e::igb::PEER_IP;
use ioplane_e2e::sides::{Side, moves};
use std::time::{Duration, Instant};

/// igbvf's vectors, in their order: transmit, receive, the mailbox's.
const RECEIVE: u64 = 1;
/// Of an entry of the MSI-X table, which has 16 bytes (PCI 3.0, 6.8.2): where its mask is. The table begins its BAR (QEMU's igbvf).
const VECTOR_CONTROL: u64 = 12;
/// Which vectors the function may signal.
const EIMS: u64 = 0x1524;
const MINUTE: Duration = Duration::from_secs(60);

/// What a guest sees of the function's vectors. QEMU 11.1.3 keeps pending bits to itself: those that a guest reads of a vfio-user device stay zero.
struct Vectors<'a> {
    l1: &'a L1,
    /// Where the guest's system has the BAR of registers, and that of the table.
    registers: u64,
    table: u64,
}

impl<'a> Vectors<'a> {
    fn of(l1: &'a L1, guest: &str) -> Result<Self> {
        let said = l1.ask(guest, "cut -d' ' -f1 /sys/bus/pci/drivers/igbvf/*:*/resource")?;
        let bar = |at: usize| -> Result<u64> {
            let digits = said.lines().nth(at).and_then(|line| line.trim().strip_prefix("0x"));
            let place = u64::from_str_radix(digits.with_context(|| said.clone())?, 16)?;
            ensure!(place != 0, "no BAR {at}: {said}");
            Ok(place)
        };
        Ok(Vectors { l1, registers: bar(0)?, table: bar(3)? })
    }

    fn mask(&self, guest: &str, masked: bool) -> Result<()> {
        let place = self.table + 16 * RECEIVE + VECTOR_CONTROL;
        self.l1.ask(guest, &format!("/tmp/busybox devmem {place:#x} 32 {}", u8::from(masked))).map(drop)
    }

    /// Whether the function has signalled the receive vector, and its driver has not taken it yet.
    fn is_signalled(&self, guest: &str) -> Result<bool> {
        let said = self.l1.ask(guest, &format!("/tmp/busybox devmem {:#x} 32", self.registers + EIMS))?;
        let bits = said.trim().strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
        Ok(bits.with_context(|| said.clone())? >> RECEIVE & 1 == 0)
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
    vectors.mask("first", true)?;
    ensure!(!answers(&l1, "first")?, "a driver without its interrupt has seen an answer");
    ensure!(vectors.is_signalled("first")?, "the answer has not come to the function");
    // One may have been under way when it was masked.
    let taken = vectors.taken("first")?;
    news("moves");
    let (second, report) = moves(&l1, &here, first, ["first", "second"], &there).with_context(said)?;
    eprintln!("{report}");
    let (signalled, now) = (vectors.is_signalled("second")?, vectors.taken("second")?);
    ensure!(signalled && now == taken, "signalled: {signalled}, taken {taken} times, then {now}");
    ensure!(!answers(&l1, "second")?, "it is masked, and a driver without its interrupt has seen an answer");
    news("is unmasked");
    vectors.mask("second", false)?;
    let end = Instant::now() + MINUTE;
    while !answers(&l1, "second")? {
        ensure!(Instant::now() < end, "it has not come: {}", said());
    }
    ensure!(vectors.taken("second")? > taken, "answers, and no interrupt");
    for side in [&here, &there] {
        side.daemon.breaks_no_rule("nic0")?;
    }
    second.kill()?;
    news("done");
    Ok(())
}
