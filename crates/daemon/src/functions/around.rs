//! What happens around a function of this host while another takes its state, or while it comes to rest.

use std::path::Path;
use std::time::{Duration, Instant};

use ioplane_api::spec::PciAddress;
use ioplane_hardware::PhysicalFunction;
use ioplane_moving::{FillFrames, Surroundings};

use super::SYSFS;
use crate::refusal::Refusal;

/// Between two looks at the hardware.
const LOOK: Duration = Duration::from_micros(100);
/// Frames that have not come for so long are sent once more.
const AGAIN: Duration = Duration::from_millis(20);

/// A host with time that passes, and the physical function that frames come from.
pub(super) struct Here {
    /// Who sends frames; nobody where the driver brings its rings back itself.
    physical: Option<PhysicalFunction>,
    patience: Duration,
    deadline: Option<Instant>,
    sent: Option<SentFrames>,
    /// Frames sent so far, lost ones too.
    frames: u64,
}

/// Frames that were sent and may still come.
#[derive(Debug, Clone, Copy)]
struct SentFrames {
    /// So many have not come.
    out: u32,
    /// How many were missing at the last look.
    missing: u32,
    /// When they were sent, or the last one came.
    at: Instant,
}

/// How many frames to send now: not before those that were sent had their time to come. No more are sent than are needed: one too many
/// would reach the guest.
fn due(sent: &mut Option<SentFrames>, frames: &FillFrames, now: Instant) -> u32 {
    if frames.first {
        *sent = None;
    }
    if let Some(sent) = sent {
        let come = sent.missing.saturating_sub(frames.missing);
        if come > 0 {
            (sent.out, sent.missing, sent.at) = (sent.out.saturating_sub(come), frames.missing, now);
        }
        if sent.out > 0 && now < sent.at + AGAIN {
            return 0;
        }
    }
    *sent = Some(SentFrames { out: frames.count, missing: frames.missing, at: now });
    frames.count
}

impl Here {
    pub(super) fn new(physical: Option<PhysicalFunction>, patience: Duration) -> Self {
        Here { physical, patience, deadline: None, sent: None, frames: 0 }
    }

    /// How many frames it has sent.
    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// Who has sent frames.
    pub(super) fn physical(self) -> Option<PhysicalFunction> {
        self.physical
    }
}

impl Surroundings for Here {
    fn wait(&mut self) -> bool {
        let patience = self.patience;
        let deadline = *self.deadline.get_or_insert_with(|| Instant::now() + patience);
        std::thread::sleep(LOOK);
        Instant::now() < deadline
    }

    fn fill(&mut self, frames: &FillFrames) -> std::io::Result<bool> {
        let count = due(&mut self.sent, frames, Instant::now());
        if count > 0 {
            let nobody = || std::io::Error::other("no physical function is asked");
            self.physical.as_mut().ok_or_else(nobody)?.send(frames.address, frames.flow, count)?;
            self.frames += u64::from(count);
        }
        Ok(count > 0)
    }
}

/// A virtual function, and who sends frames to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FramesFrom {
    pub(super) address: PciAddress,
    /// The interface that stands in for that of its physical function.
    pub(super) uplink: Option<String>,
}

impl FramesFrom {
    /// The same for another function of the host.
    pub(super) fn of(&self, address: PciAddress) -> FramesFrom {
        FramesFrom { address, uplink: self.uplink.clone() }
    }

    /// Who sends them. Blocks.
    pub(super) fn physical(&self) -> Result<PhysicalFunction, Refusal> {
        let FramesFrom { address, uplink } = self;
        PhysicalFunction::of(Path::new(SYSFS), *address, uplink.as_deref())
            .map_err(|error| self.refuse(&error))
    }

    /// Whether the function could be brought to a state now. Blocks.
    pub(super) fn is_ready(&self) -> Result<(), Refusal> {
        self.readiness().map_err(|error| self.refuse(&error))
    }

    /// Why not. Blocks.
    pub(super) fn obstacle(&self) -> Option<String> {
        self.readiness().err().map(|error| error.to_string())
    }

    fn readiness(&self) -> std::io::Result<()> {
        PhysicalFunction::is_ready(Path::new(SYSFS), self.address, self.uplink.as_deref())
    }

    fn refuse(&self, error: &std::io::Error) -> Refusal {
        let of = self.address;
        match &self.uplink {
            None => Refusal::conflict(
                format!("frames to {of} cannot be sent from its physical function: {error}"),
                "the card's physical function has to be driven by this host, with its interface up and its cable plugged in",
            ),
            Some(uplink) => Refusal::conflict(
                format!("frames to {of} cannot be sent from {uplink}: {error}"),
                "its --uplink has to be an interface of this host on the function's network, up and with its cable plugged in",
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(flow: u32, missing: u32, count: u32, first: bool) -> FillFrames {
        FillFrames { address: [2; 6], flow, missing, count, first }
    }

    #[test]
    fn no_more_frames_are_sent_than_are_needed() {
        let (mut sent, start) = (None, Instant::now());
        let ms = |ms| start + Duration::from_millis(ms);
        let mut at = |now, missing, count, first| due(&mut sent, &frames(0, missing, count, first), now);
        assert_eq!(at(start, 25, 1, true), 1, "one tells whether they come");
        assert_eq!(at(ms(1), 25, 1, false), 0, "it is on its way");
        assert_eq!(at(ms(2), 24, 24, false), 24, "it came, and so will the others");
        assert_eq!(at(ms(3), 24, 1, false), 0);
        assert_eq!(at(ms(15), 10, 10, false), 0, "some have come");
        assert_eq!(at(ms(34), 10, 10, false), 0, "others may still come");
        assert_eq!(at(ms(35), 10, 10, false), 10, "they were lost");
        assert_eq!(at(ms(36), 4, 4, true), 4, "of another ring");
    }

    #[test]
    fn a_flow_that_does_not_come_is_given_up_after_its_time() {
        let (mut sent, start) = (None, Instant::now());
        assert_eq!(due(&mut sent, &frames(0, 5, 1, true), start), 1);
        assert_eq!(due(&mut sent, &frames(1, 5, 1, false), start + AGAIN / 2), 0);
        assert_eq!(due(&mut sent, &frames(1, 5, 1, false), start + AGAIN), 1);
    }
}
