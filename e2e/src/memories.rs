//! Whether all of a guest's memory comes along: both QEMUs' memories compared before anything is written at the destination, with the log of what the
//! function writes and without it. The steps are those of `ioplane move vm` (docs/decisions/0078-a-vm-moves-with-its-functions.md), one by one;
//! then the guest goes on where it was.

use crate::igb::GUEST_IP;
use crate::l1::L1;
use crate::l2::L2;
use crate::migration::guest_memory;
use crate::process::built;
use crate::traffic::Traffic;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

const MINUTE: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;
/// KVM's wall clock in the guest's memory: version, seconds, nanoseconds.
const CLOCK: usize = 12;
/// Pages that are told of a stop.
const MOST: usize = 32;
/// What the traffic does before memory is copied.
const BEFORE: u64 = 50;
/// So that there is some traffic while memory is copied, on a stage where little comes through: bytes a second, and echoes.
const SLOWLY: u64 = 16 << 20;

/// A page that is another one there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Differs {
    pub page: u64,
    /// Offset of the first byte that differs.
    pub at: usize,
    /// From the first byte that differs to the last.
    pub bytes: usize,
    /// Nothing but checksums of frames that the guest has sent ([`only_sums`]).
    pub sums: bool,
}

/// Two memories.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Compared {
    pub pages: u64,
    pub differ: Vec<Differs>,
}

/// One stop.
#[derive(Clone, Debug, Serialize)]
pub struct Stop {
    pub log: bool,
    pub pages: u64,
    /// Pages that differ, but for the clock and for checksums.
    pub missed: u64,
    /// KVM's wall clock: a page of which at most 12 bytes differ.
    pub clocks: u64,
    /// Pages of frames that the guest has sent, whose checksums alone differ: QEMU's igb writes them into the guest's buffer
    /// (`net_tx_pkt_do_sw_csum`), which silicon does not, and nobody reads them there.
    pub sums: u64,
    /// Pages that were sent once more since the function had written them.
    pub sent: Option<u64>,
    /// Which ones differ: the first of them.
    pub differ: Vec<Differs>,
}

impl Stop {
    fn of(compared: &Compared, rested: &Value) -> Stop {
        let clocks =
            compared.differ.iter().filter(|page| page.bytes <= CLOCK && !page.sums).count().min(1) as u64;
        let sent = rested["pages_sent"].as_u64();
        let sums = compared.differ.iter().filter(|page| page.sums).count() as u64;
        let missed = compared.differ.len() as u64 - clocks - sums;
        let differ = compared.differ.iter().take(MOST).cloned().collect();
        Stop { log: sent.is_some(), pages: compared.pages, missed, clocks, sums, sent, differ }
    }
}

/// Asks a daemon by its control socket, from L1: what it answers.
pub fn step(socket: &Path, method: &str, path: &str, body: &str) -> Result<()> {
    let mut daemon =
        UnixStream::connect(socket).with_context(|| format!("connect to {}", socket.display()))?;
    daemon.set_read_timeout(Some(MINUTE))?;
    let length = body.len();
    write!(
        daemon,
        "{method} {path} HTTP/1.1\r\nHost: ioplane\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )?;
    let mut said = String::new();
    daemon.read_to_string(&mut said)?;
    let (head, body) = said.split_once("\r\n\r\n").with_context(|| said.clone())?;
    ensure!(head.starts_with("HTTP/1.1 2"), "{method} {path}: {said}");
    println!("{body}");
    Ok(())
}

/// The memory of the guest in this QEMU, found by its monitor's socket.
fn memory(qemu: &str) -> Result<File> {
    let monitor = format!("unix:/tmp/{qemu}.qmp,");
    for entry in fs::read_dir("/proc")? {
        let folder = entry?.path();
        let line = fs::read(folder.join("cmdline")).unwrap_or_default();
        // The shells that start it have its arguments, too.
        if String::from_utf8_lossy(&line).contains(&monitor)
            && let Ok(memory) = guest_memory(&folder)
        {
            return Ok(memory);
        }
    }
    bail!("no QEMU {qemu} with a memory-backend-memfd")
}

/// Compares the memories of the guests in two QEMUs, in L1.
pub fn compare(here: &str, there: &str) -> Result<()> {
    println!("{}", serde_json::to_string(&compared(&memory(here)?, &memory(there)?)?)?);
    Ok(())
}

/// Copies the memory of the guest in a QEMU, in L1, to a file with holes for what is zero. Says how large it is.
pub fn copy(qemu: &str, to: &Path) -> Result<()> {
    let (memory, copy) = (memory(qemu)?, File::create(to)?);
    let size = memory.metadata()?.size();
    copy.set_len(size)?;
    let mut piece = vec![0; 128 * PAGE];
    for at in (0..size).step_by(piece.len()) {
        let len = piece.len().min((size - at) as usize);
        memory.read_exact_at(&mut piece[..len], at)?;
        if piece[..len].iter().any(|byte| *byte != 0) {
            copy.write_all_at(&piece[..len], at)?;
        }
    }
    println!("{size}");
    Ok(())
}

fn compared(ours: &File, theirs: &File) -> Result<Compared> {
    let size = ours.metadata()?.size();
    ensure!(size == theirs.metadata()?.size() && size > 0, "memories of different sizes");
    let (mut a, mut b) = (vec![0; 256 * PAGE], vec![0; 256 * PAGE]);
    let mut compared = Compared { pages: size / PAGE as u64, differ: Vec::new() };
    for at in (0..size).step_by(a.len()) {
        let len = a.len().min((size - at) as usize);
        ours.read_exact_at(&mut a[..len], at)?;
        theirs.read_exact_at(&mut b[..len], at)?;
        for (number, (a, b)) in a[..len].chunks(PAGE).zip(b[..len].chunks(PAGE)).enumerate() {
            if a != b {
                let others = || (0..a.len()).filter(|byte| a[*byte] != b[*byte]);
                let (first, last) = (others().next().unwrap_or(0), others().next_back().unwrap_or(0));
                let page = at / PAGE as u64 + number as u64;
                let (bytes, sums) = (last + 1 - first, only_sums(a, b));
                compared.differ.push(Differs { page, at: first, bytes, sums });
            }
        }
    }
    Ok(compared)
}

/// Whether two pages differ in nothing but checksums of UDP and TCP in frames of the guest's, IPv4 without options.
fn only_sums(ours: &[u8], theirs: &[u8]) -> bool {
    let Ok(guest) = GUEST_IP.parse::<std::net::Ipv4Addr>() else { return false };
    // Protocol, and where in its header the sum is.
    let is_sum = |at: usize| {
        [(17, 6), (6, 16)].iter().any(|(protocol, sum)| {
            let Some(frame) = at.checked_sub(sum + 20 + 14) else { return false };
            let header = &ours[frame + 12..];
            header.starts_with(&[8, 0, 0x45]) && header[11] == *protocol && header[14..18] == guest.octets()
        })
    };
    let mut at = 0;
    while at < ours.len() {
        if ours[at] == theirs[at] {
            at += 1;
        } else if is_sum(at) {
            at += 2;
        } else if at > 0 && is_sum(at - 1) {
            at += 1;
        } else {
            return false;
        }
    }
    true
}

/// The memories of two guests: in L1 if both are in the same one, else here by copies of them.
fn of_both(guests: [Named<'_>; 2]) -> Result<Compared> {
    let [(one, here), (other, there)] = guests;
    if std::ptr::eq(one.l1(), other.l1()) {
        let said = in_l1(one.l1(), &format!("compare {here} {there}"))?;
        return Ok(serde_json::from_value(said)?);
    }
    let copies = guests.map(|(guest, name)| -> Result<File> {
        let path = guest.l1().folder().join(format!("{name}.memory"));
        in_l1(guest.l1(), &format!("copy {name} {}", path.display()))?;
        Ok(File::open(&path)?)
    });
    let [ours, theirs] = copies;
    compared(&ours?, &theirs?)
}

/// Has the benchmark's program do a [`step`], [`compare`] or [`copy`] in L1.
fn in_l1(l1: &L1, words: &str) -> Result<Value> {
    let program = built("ioplane-migrate-bench")?;
    let said = l1.run(&format!("exec {} {words}", program.display()), 2 * MINUTE)?;
    serde_json::from_str(said.trim()).with_context(|| said)
}

fn state(qemu: &L2<'_>, wanted: &str) -> Result<()> {
    let end = Instant::now() + 3 * MINUTE;
    loop {
        let now = qemu.qmp("query-migrate", &json!({}))?;
        match now["status"].as_str() {
            Some(status) if status == wanted => return Ok(()),
            Some("failed" | "cancelled" | "completed") => bail!("{now}"),
            _ => ensure!(Instant::now() < end, "{now}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A guest and its QEMU's name in L1.
pub type Named<'g> = (&'g L2<'g>, &'g str);

/// Copies `guest` to `there`, which waits for it at `uri`, under that traffic; compares; and has it go on where it was. Its function is `nic0` of the
/// daemon at `control`. With `log` the daemon says which pages the function has written.
pub fn stop(
    (guest, name): Named<'_>,
    control: &str,
    (there, next, uri): (L2<'_>, &str, &str),
    log: bool,
    traffic: &Traffic<'_>,
) -> Result<Stop> {
    let l1 = guest.l1();
    let none = json!({});
    there.qmp("stop", &none)?;
    let post =
        |what: &str, body: &str| in_l1(l1, &format!("step {control} POST /v1/pci/nic0/{what} '{body}'"));
    let held = json!({ "deadline_ms": 4000, "guest_stopped": true }).to_string();
    let pause = json!({ "capabilities": [{ "capability": "pause-before-switchover", "state": true }] });
    let before = guest.qmp("query-named-block-nodes", &json!({ "flat": true }))?;
    let guard = before.as_array().into_iter().flatten().find(|node| node["node-name"] == "unmovable-nic0");
    if guard.is_some() {
        guest.qmp("blockdev-del", &json!({ "node-name": "unmovable-nic0" }))?;
    }
    let parameters = guest.qmp("query-migrate-parameters", &none)?;
    guest.qmp("migrate-set-capabilities", &pause)?;
    guest.qmp("migrate-set-parameters", &json!({ "max-bandwidth": SLOWLY }))?;
    if log {
        post("log", "")?;
    }
    traffic.goes_on(BEFORE)?;
    guest.qmp("migrate", &json!({ "uri": uri }))?;
    state(guest, "pre-switchover")?;
    let rested = post("rest", &held)?;
    guest.qmp("migrate-continue", &json!({ "state": "pre-switchover" }))?;
    state(guest, "completed")?;
    let end = Instant::now() + MINUTE;
    while there.qmp("query-status", &none)?["status"] == "inmigrate" {
        ensure!(Instant::now() < end, "it does not arrive");
    }
    let compared = of_both([(guest, name), (&there, next)])?;
    there.kill()?;
    post("replay", &held)?;
    guest.qmp("cont", &none)?;
    traffic.goes_on(BEFORE).context("the guest goes on where it was")?;
    guest.qmp("migrate-set-parameters", &json!({ "max-bandwidth": parameters["max-bandwidth"] }))?;
    Ok(Stop::of(&compared, &rested))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_no_missed_page() {
        let page = |bytes| Differs { page: 7, at: 0, bytes, sums: false };
        let stop = |differ| Stop::of(&Compared { pages: 10, differ }, &json!({ "pages_sent": 3 }));
        let counts = |stop: Stop| (stop.missed, stop.clocks);
        assert_eq!(counts(stop(vec![])), (0, 0));
        assert_eq!(counts(stop(vec![page(12)])), (0, 1));
        // There is one.
        assert_eq!(counts(stop(vec![page(12), page(2), page(60)])), (2, 1));
        assert!(!Stop::of(&Compared { pages: 1, differ: vec![] }, &json!({})).log);
        let sums = stop(vec![page(12), Differs { sums: true, ..page(2) }]);
        assert_eq!((sums.missed, sums.clocks, sums.sums), (0, 1, 1));
    }

    #[test]
    fn a_checksum_in_a_frame_that_was_sent_is_told_from_other_bytes() {
        let mut ours = [0; PAGE];
        for (frame, protocol) in [(0x42, 17), (0x842, 6)] {
            ours[frame + 12..frame + 15].copy_from_slice(&[8, 0, 0x45]);
            ours[frame + 23] = protocol;
            ours[frame + 26..frame + 30].copy_from_slice(&[10, 0, 20, 2]);
        }
        let with = |changes: &[(usize, u8)]| {
            let mut theirs = ours;
            changes.iter().for_each(|(at, byte)| theirs[*at] ^= byte);
            only_sums(&ours, &theirs)
        };
        let (udp, tcp) = (0x42 + 14 + 20 + 6, 0x842 + 14 + 20 + 16);
        assert!(with(&[(udp, 1), (udp + 1, 1), (tcp, 9)]));
        assert!(with(&[(tcp + 1, 9)]), "half of one");
        assert!(!with(&[(udp, 1), (udp + 2, 1)]), "the data behind it");
        assert!(!with(&[(tcp - 10, 1)]) && !with(&[(0, 1)]) && !with(&[(PAGE - 1, 1)]));
        // A frame of somebody else's, which the device has written.
        ours[0x42 + 29] = 1;
        let mut theirs = ours;
        theirs[udp] ^= 1;
        assert!(!only_sums(&ours, &theirs));
    }
}
