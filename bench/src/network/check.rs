//! Does it carry frames? Every byte of a number of frames is compared, in both directions, before anything is timed.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::frame::{HEADER, Size, TCP_CHECKSUM, flow, template};
use super::nic::{Nic, RING};

/// Frames compared in each direction, and how long each may take: a switch that has not seen the receiver yet, or a back
/// end that looks at new rings once in a while, loses the first ones.
const FRAMES: u8 = 32;
const EACH: Duration = Duration::from_millis(100);
const ALL: Duration = Duration::from_secs(10);

/// Sends frames one by one from `a` to `b` and compares header and bytes; then the same back.
/// Without `checksum`, that of a large frame may be another.
pub fn both_ways(a: &mut Nic, b: &mut Nic, checksum: bool) -> Result<()> {
    one_way(a, b, checksum)?;
    one_way(b, a, checksum)
}

fn one_way(from: &mut Nic, to: &mut Nic, checksum: bool) -> Result<()> {
    let begin = Instant::now();
    let pairs = from.shape.pairs;
    // Frames that did not come in time and were sent again: on a busy machine they may come yet.
    let mut given_up = 0;
    for round in 0..FRAMES {
        from.address(to.mac, round)?;
        let pair = u16::from(round) % pairs;
        'sending: loop {
            ensure!(from.send(pair, 1)? == 1, "checking: no room for a frame");
            let number = from.sent(pair);
            while let Some(mut bytes) = await_frame(from, to)? {
                let at = from.shape.size.stamp_at();
                if given_up > 0 && is_earlier(&bytes, at, pair, pairs, number) {
                    given_up -= 1;
                    continue;
                }
                let flow = flow(&bytes);
                ensure!(flow / RING == pair, "checking: a frame of flow {flow} was sent by pair {pair}");
                let mut expected = template(from.shape.size, from.mac, to.mac, flow, round);
                expected[at..at + 8].copy_from_slice(&(u64::from(flow) << 48 | number).to_le_bytes());
                if from.shape.size == Size::Large && !checksum && bytes.len() == expected.len() {
                    bytes[TCP_CHECKSUM].copy_from_slice(&expected[TCP_CHECKSUM]);
                }
                compare(from.shape.size, &bytes, &expected)?;
                break 'sending;
            }
            given_up += 1;
            ensure!(begin.elapsed() < ALL, "checking: {round} of {FRAMES} frames arrived in {ALL:?}");
        }
    }
    from.address(to.mac, 0)
}

/// Whether a frame with its stamp at `at` was sent before the one of `number` by `pair`.
fn is_earlier(bytes: &[u8], at: usize, pair: u16, pairs: u16, number: u64) -> bool {
    let stamp = bytes.get(at..at + 8).and_then(|stamp| stamp.try_into().ok()).map_or(0, u64::from_le_bytes);
    let (of, own) = ((stamp >> 48) as u16 / RING, stamp & 0xffff_ffff_ffff);
    // Each pair counts for itself, and they take turns.
    if of == pair { own < number } else { of < pairs }
}

/// The next frame, and all else taken back; none if none comes in time.
fn await_frame(from: &mut Nic, to: &mut Nic) -> Result<Option<Vec<u8>>> {
    let begin = Instant::now();
    loop {
        for pair in 0..to.shape.pairs {
            if let Some(bytes) = to.collect(pair)? {
                while from.reap()? > 0 {
                    ensure!(begin.elapsed() < ALL, "checking: a frame arrived and was never used");
                }
                return Ok(Some(bytes));
            }
        }
        if begin.elapsed() > EACH {
            from.reap()?;
            return Ok(None);
        }
    }
}

fn compare(size: Size, bytes: &[u8], expected: &[u8]) -> Result<()> {
    let head = HEADER as usize;
    if bytes.len() != expected.len() {
        bail!("checking: {} bytes arrived, not {}", bytes.len(), expected.len());
    }
    if let Some(at) = (head..bytes.len()).find(|at| bytes[*at] != expected[*at]) {
        bail!("checking: byte {} of the frame is {:#x}, not {:#x}", at - head, bytes[at], expected[at]);
    }
    // What the receiver is told: of a large frame, how it would be segmented.
    if size == Size::Large && (bytes[0] & 1, bytes[1], &bytes[4..10]) != (1, expected[1], &expected[4..10]) {
        bail!("checking: the header says {:?}, not {:?}", &bytes[..10], &expected[..10]);
    }
    Ok(())
}
