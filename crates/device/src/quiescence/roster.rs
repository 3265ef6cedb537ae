//! The pollers of one device that are on duty.

use std::sync::Arc;

use crate::device::{Activation, Device, DeviceError, QueueSet};
use crate::inbox::ParkedInbox;
use crate::parked::PollerId;
use crate::poller::Stop;
use crate::slot::{CoreEnded, CoreMessage, CoreSender, Placement, PollerCommand, PollerSlot};

/// A poller of ours on some core.
#[derive(Debug)]
pub(super) struct AttachedPoller {
    pub(super) queue: u16,
    seat: PollerId,
    pub(super) post: Arc<dyn CoreSender>,
}

impl AttachedPoller {
    /// Says something to the seat. An ended core has no seats left to hear it.
    pub(super) fn tell(&self, tell: PollerCommand) {
        let _ = self.post.send(CoreMessage::Poller(self.seat, tell));
    }
}

/// The pollers of one device that are on duty. Dropped with some still on duty, it suspends them: they leave their cores
/// and end, rather than poll for nobody.
#[derive(Debug, Default)]
pub(super) struct AttachedPollers {
    pub(super) posted: Vec<AttachedPoller>,
    pub(super) home: Arc<ParkedInbox>,
}

impl AttachedPollers {
    pub(super) fn tell(&self, queues: &QueueSet, tell: impl Fn() -> PollerCommand) {
        self.posted.iter().filter(|p| queues.contains(&p.queue)).for_each(|p| p.tell(tell()));
    }

    /// Hands whoever has come home to the device.
    pub(super) fn take_in<D: Device>(&mut self, device: &mut D) -> Option<Stop> {
        let mut stop = None;
        while let Some((seat, parked)) = self.home.take() {
            self.posted.retain(|p| p.seat != seat);
            if stop != Some(Stop::Suspended) {
                stop = Some(parked.stop());
            }
            device.deactivate(parked);
        }
        stop
    }

    pub(super) fn queues(&self) -> QueueSet {
        self.posted.iter().map(|p| p.queue).collect()
    }

    /// Makes pollers for `queues` that have none and seats them. A poller that no core takes goes straight home, so that
    /// what it carries (requests recorded in flight) stays the device's.
    pub(super) fn seat<D: Device>(
        &mut self,
        device: &mut D,
        queues: &QueueSet,
        placement: &dyn Placement,
    ) -> Result<(), DeviceError> {
        let on_duty = self.queues();
        let wanted: QueueSet = queues.difference(&on_duty).copied().collect();
        let mut seating = Activation { queues: &wanted, made: Vec::new() };
        device.activate(&mut seating)?;
        let mut gone = None;
        for (queue, poller) in seating.made {
            let post = placement.place(&device.info().name, queue);
            let seat = PollerSlot::new(poller, queue, self.home.clone());
            let posted = AttachedPoller { queue, seat: seat.id(), post };
            match posted.post.send(CoreMessage::Attach(seat)) {
                Ok(()) => self.posted.push(posted),
                Err(CoreEnded(order)) => {
                    gone = Some(DeviceError::CoreGone(posted.post.core().0));
                    if let CoreMessage::Attach(seat) = order {
                        seat.turn_back();
                    }
                }
            }
        }
        self.take_in(device);
        gone.map_or(Ok(()), Err)
    }
}

impl Drop for AttachedPollers {
    fn drop(&mut self) {
        self.posted.iter().for_each(|p| p.tell(PollerCommand::Suspend));
    }
}
