//! The pollers of one device that are attached to I/O cores.

use std::sync::Arc;

use crate::device::{Activation, Device, DeviceError, QueueSet};
use crate::inbox::ParkedInbox;
use crate::parked::PollerId;
use crate::poller::Stop;
use crate::slot::{CoreEnded, CoreMessage, CoreSender, Placement, PollerCommand, PollerSlot};

/// A poller on some core.
#[derive(Debug)]
pub(super) struct AttachedPoller {
    pub(super) queue: u16,
    id: PollerId,
    pub(super) sender: Arc<dyn CoreSender>,
}

impl AttachedPoller {
    /// Sends a command to the poller. A core that has ended has no pollers: the command is dropped.
    pub(super) fn send(&self, command: PollerCommand) {
        let _ = self.sender.send(CoreMessage::Poller(self.id, command));
    }
}

/// The pollers of one device that are attached to cores. Dropped while some still are, it suspends them, so that no poller
/// outlives its device's owner.
#[derive(Debug, Default)]
pub(super) struct AttachedPollers {
    pub(super) pollers: Vec<AttachedPoller>,
    pub(super) inbox: Arc<ParkedInbox>,
}

impl AttachedPollers {
    pub(super) fn send(&self, queues: &QueueSet, command: impl Fn() -> PollerCommand) {
        self.pollers.iter().filter(|p| queues.contains(&p.queue)).for_each(|p| p.send(command()));
    }

    /// Hands the pollers in the inbox to the device.
    pub(super) fn collect_parked<D: Device>(&mut self, device: &mut D) -> Option<Stop> {
        let mut stop = None;
        while let Some((id, parked)) = self.inbox.pop() {
            self.pollers.retain(|p| p.id != id);
            if stop != Some(Stop::Suspended) {
                stop = Some(parked.stop());
            }
            device.deactivate(parked);
        }
        stop
    }

    pub(super) fn queues(&self) -> QueueSet {
        self.pollers.iter().map(|p| p.queue).collect()
    }

    /// Makes pollers for `queues` that have none and attaches them to cores. A poller that no core takes is parked at once,
    /// so that what it carries (requests recorded in flight) stays the device's.
    pub(super) fn attach<D: Device>(
        &mut self,
        device: &mut D,
        queues: &QueueSet,
        placement: &dyn Placement,
    ) -> Result<(), DeviceError> {
        let attached = self.queues();
        let wanted: QueueSet = queues.difference(&attached).copied().collect();
        let mut activation = Activation { queues: &wanted, made: Vec::new() };
        device.activate(&mut activation)?;
        let mut gone = None;
        for (queue, poller) in activation.made {
            let sender = placement.place(&device.info().name, queue);
            let limits = device.queue_limits(queue);
            let (inbox, share, block_device) = (self.inbox.clone(), device.share(), device.block_device());
            let slot = PollerSlot::new(poller, device.info(), queue, inbox, share, block_device, limits);
            let attached = AttachedPoller { queue, id: slot.id(), sender };
            match attached.sender.send(CoreMessage::Attach(slot)) {
                Ok(()) => self.pollers.push(attached),
                Err(CoreEnded(message)) => {
                    gone = Some(DeviceError::CoreGone(attached.sender.core().0));
                    if let CoreMessage::Attach(slot) = message {
                        slot.park_unattached();
                    }
                }
            }
        }
        self.collect_parked(device);
        gone.map_or(Ok(()), Err)
    }
}

impl Drop for AttachedPollers {
    fn drop(&mut self) {
        self.pollers.iter().for_each(|p| p.send(PollerCommand::Suspend));
    }
}
