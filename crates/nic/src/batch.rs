//! Frames from a port, a batch at a time: what both chips do with them.

use ioplane_network::{DropReason, PortRx};

use crate::BATCH;

/// What became of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RxOutcome {
    /// The guest has it.
    Received,
    /// There is no room now.
    NoRoom,
    /// It came to nothing; counted.
    Dropped(DropReason),
}

/// Gives `receive` at most a batch of frames, in order. True if one had no room: it waits at the port, with those after it.
pub(crate) fn take(port_rx: &mut PortRx, mut receive: impl FnMut(&[u8]) -> RxOutcome) -> bool {
    for _ in 0..BATCH {
        let Some(frame) = port_rx.front() else { break };
        match receive(frame.bytes()) {
            RxOutcome::Received => port_rx.pop(),
            RxOutcome::Dropped(cause) => port_rx.skip(cause),
            RxOutcome::NoRoom => return true,
        }
    }
    false
}
