//! The pollers of one device that are attached to I/O cores.

use std::sync::Arc;

use ioplane_scheduler::QueuePolling;

use crate::device::{Activation, Device, DeviceError, QueueSet};
use crate::inbox::ParkedInbox;
use crate::parked::{Parked, PollerId};
use crate::poller::{Poller, Stop};
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
        while let Some(parked) = self.next_parked() {
            if stop != Some(Stop::Suspended) {
                stop = Some(parked.stop());
            }
            device.deactivate(parked);
        }
        stop
    }

    /// As [`AttachedPollers::collect_parked`], but gives back the poller of `leaving` if it has parked and may go on as it is.
    pub(super) fn collect_leaving<D: Device>(&mut self, device: &mut D, leaving: u16) -> Option<Parked> {
        let mut left = None;
        while let Some(parked) = self.next_parked() {
            if parked.queue() == leaving && parked.goes_on() {
                left = Some(parked);
            } else {
                device.deactivate(parked);
            }
        }
        left
    }

    fn next_parked(&mut self) -> Option<Parked> {
        let (id, parked) = self.inbox.pop()?;
        self.pollers.retain(|p| p.id != id);
        Some(parked)
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
        let mut put = Ok(());
        for (queue, poller) in activation.made {
            put = self.put(device, queue, poller, None, placement).and(put);
        }
        self.collect_parked(device);
        put
    }

    /// Attaches a parked poller to a core, as it is. One that no core takes is the device's.
    pub(super) fn attach_again<D: Device>(
        &mut self,
        device: &mut D,
        parked: Parked,
        placement: &dyn Placement,
    ) -> Result<(), DeviceError> {
        let Parked { mut poller, queue, polling, .. } = parked;
        poller.undrain();
        let put = self.put(device, queue, poller, polling, placement);
        self.collect_parked(device);
        put
    }

    /// Attaches a poller to a core. If none takes it, it parks into the inbox.
    fn put<D: Device>(
        &mut self,
        device: &D,
        queue: u16,
        poller: Box<dyn Poller>,
        polling: Option<Box<QueuePolling>>,
        placement: &dyn Placement,
    ) -> Result<(), DeviceError> {
        let sender = placement.place(&device.info().name, queue);
        let limits = device.queue_limits(queue);
        let (inbox, share, block_device) = (self.inbox.clone(), device.share(), device.block_device());
        let slot = PollerSlot::new(poller, device.info(), queue, inbox, share, block_device, limits)
            .with_polling(polling);
        let attached = AttachedPoller { queue, id: slot.id(), sender };
        match attached.sender.send(CoreMessage::Attach(slot)) {
            Ok(()) => {
                self.pollers.push(attached);
                Ok(())
            }
            Err(CoreEnded(message)) => {
                if let CoreMessage::Attach(slot) = message {
                    slot.park_unattached();
                }
                Err(DeviceError::CoreGone(attached.sender.core().0))
            }
        }
    }
}

impl Drop for AttachedPollers {
    fn drop(&mut self) {
        self.pollers.iter().for_each(|p| p.send(PollerCommand::Suspend));
    }
}
