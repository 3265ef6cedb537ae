//! `state_load`: a saved state that may say anything.
//!
//! Oracles: a state that is refused leaves the device as it was; one that is taken is saved again as it was loaded; and
//! a device that starts from it parks when it is told to.

use arbitrary::{Result, Unstructured};
use ioplane_device::{Quiescent, SavedState};
use ioplane_virtio::{RingLayout, Vdev, VirtioDevice};
use serde::Serialize;

use crate::Signature;
use crate::blk_request::disk;
use crate::guest::{self, Guest, descriptor};
use crate::stage::{PATIENCE, Stage};

/// The encoding of `VdevV2`, to write what no device would.
#[derive(Serialize)]
struct Device {
    features: u64,
    queues: Vec<Queue>,
    own: Vec<u8>,
}

/// The encoding of `QueueV2`.
#[derive(Serialize)]
struct Queue {
    size: u16,
    desc: u64,
    avail: u64,
    used: u64,
    base: Option<u32>,
    in_flight: Vec<Flight>,
    enabled: bool,
}

/// The encoding of `FlightV1`.
#[derive(Serialize)]
struct Flight {
    head: u16,
    descriptors: Vec<(u64, u32, u16)>,
}

/// The encoding of `BlkV1`.
#[derive(Serialize)]
struct Disk {
    bytes: u64,
    read_only: bool,
    write_through: bool,
    accepted: u64,
}

/// Runs one input.
pub fn run(data: &[u8]) -> u64 {
    let mut signature = Signature::default();
    let _ = load(&mut Unstructured::new(data), &mut signature);
    signature.value()
}

fn load(input: &mut Unstructured<'_>, signature: &mut Signature) -> Result<()> {
    let mut guest = Guest::zeroed();
    let blk = disk(input)?;
    let queues = blk.info().queues;
    let state = state(input, &mut guest, &blk)?;
    let fresh = Quiescent::new(Vdev::new(blk, guest.map.clone()));
    let before = fresh.save().expect("saving a fresh device");
    let loaded = match fresh.load(&state) {
        Ok(loaded) => loaded.into_quiescent(),
        Err(refused) => {
            let text: String = refused.error.to_string().chars().filter(|c| !c.is_ascii_digit()).collect();
            signature.saw(&text);
            assert_eq!(refused.kept.save().expect("saving"), before, "a refused state left something behind");
            return Ok(());
        }
    };
    signature.saw("loaded");
    let first = loaded.save().expect("saving what was loaded");
    assert_eq!(first.kind, state.kind);
    let again = match loaded.load(&first) {
        Ok(loaded) => loaded,
        Err(refused) => panic!("a loaded state, saved, is refused: {}", refused.error),
    };
    let again = again.into_quiescent();
    assert_eq!(again.save().expect("saving once more"), first, "loading and saving changes a state");
    let stage = Stage::patient();
    match again.resume(&*stage.placement()) {
        Ok(running) => {
            signature.count(running.queues().len() as u64);
            for _ in 0..input.int_in_range(0..=8u8).unwrap_or(0) {
                stage.turn(4);
            }
            let mut quiescing = running.begin_quiesce();
            for _ in 0..PATIENCE {
                if quiescing.is_settled() {
                    break;
                }
                stage.turn(8);
            }
            assert!(
                quiescing.is_settled(),
                "a device started from a loaded state of {queues} queues does not park"
            );
        }
        Err(refused) => panic!("a state that was taken does not start: {}", refused.error),
    }
    Ok(())
}

fn state(input: &mut Unstructured<'_>, guest: &mut Guest, blk: &impl VirtioDevice) -> Result<SavedState> {
    let kind = if input.ratio(1, 32)? { input.arbitrary()? } else { blk.info().kind.to_owned() };
    let version = if input.ratio(1, 32)? { input.arbitrary()? } else { 2 };
    if input.ratio(1, 16)? {
        let body = input.arbitrary_iter()?.take(4096).collect::<Result<_>>()?;
        return Ok(SavedState { kind, version, body });
    }
    let accepted = if input.ratio(1, 4)? { input.arbitrary()? } else { blk.features() };
    let features = if input.ratio(1, 8)? { input.arbitrary()? } else { accepted };
    let bytes = if input.ratio(1, 16)? { input.arbitrary()? } else { 64 << 10 };
    let read_only = (blk.features() & (1 << 5) != 0) ^ input.ratio(1, 16)?;
    let own = Disk { bytes, read_only, write_through: input.arbitrary()?, accepted };
    let mut own = postcard::to_stdvec(&own).expect("encoding");
    if input.ratio(1, 16)? {
        own.extend(input.arbitrary::<[u8; 3]>()?);
    }
    let count = if input.ratio(1, 16)? { input.int_in_range(0..=4)? } else { blk.info().queues };
    let queues = (0..count).map(|index| queue(input, guest, index)).collect::<Result<_>>()?;
    let mut body = postcard::to_stdvec(&Device { features, queues, own }).expect("encoding");
    if input.ratio(1, 12)? && !body.is_empty() {
        let at = input.choose_index(body.len())?;
        body[at] = input.arbitrary()?;
    }
    if input.ratio(1, 24)? {
        body.truncate(input.int_in_range(0..=body.len())?);
    }
    Ok(SavedState { kind, version, body })
}

/// A queue that is nearly right, and a ring in memory that nearly agrees.
fn queue(input: &mut Unstructured<'_>, guest: &mut Guest, index: u16) -> Result<Queue> {
    let mut layout = guest::layout(input)?;
    let shift = 0x10000 * u64::from(index.min(1));
    for part in [&mut layout.desc, &mut layout.avail, &mut layout.used] {
        *part = part.saturating_add(shift);
    }
    let used: u16 = input.arbitrary()?;
    let mut in_flight: Vec<u16> = Vec::new();
    for _ in 0..input.int_in_range(0..=5u8)? {
        let most = layout.size.saturating_sub(1);
        in_flight.push(if input.ratio(1, 12)? {
            input.arbitrary()?
        } else {
            input.int_in_range(0..=most)?
        });
    }
    let ahead = if input.ratio(1, 8)? { input.arbitrary()? } else { in_flight.len() as u16 };
    let base = used.wrapping_add(ahead);
    guest.poke(layout.used.saturating_add(2), &used.to_le_bytes());
    guest.poke(layout.avail.saturating_add(2), &base.to_le_bytes());
    for entry in 0..layout.size.min(64) {
        let bytes = if input.ratio(1, 4)? {
            input.arbitrary()?
        } else {
            descriptor(guest::address(input)?, 512, input.int_in_range(0..=3)?, entry + 1)
        };
        guest.poke(layout.desc.saturating_add(16 * u64::from(entry)), &bytes);
    }
    let enabled = input.ratio(3, 4)?;
    let base = if input.ratio(1, 32)? { None } else { Some(base.into()) };
    let in_flight = in_flight.into_iter().map(|head| Flight { head, descriptors: Vec::new() }).collect();
    let RingLayout { size, desc, avail, used } = layout;
    Ok(Queue { size, desc, avail, used, base, in_flight, enabled })
}
