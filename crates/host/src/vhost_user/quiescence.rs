//! Bringing the device to a quiescent point and back: for the front end, for the daemon, for a queue that moves.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ioplane_device::{
    Change, Device, DeviceError, DeviceOwner, Lifecycle, OnMiss, Placement, QueueSet, QuiesceError,
    QuiescePolicy, Quiesced, Quiescent, at_quiescence, quiesce, resume,
};
use ioplane_virtio::spec::feature::VHOST_F_LOG_ALL;
use ioplane_virtio::{Vdev, VirtioDevice};
use vhost::vhost_user::VhostUserProtocolFeatures;

use super::fault::PeerFault;
use super::message::Message;
use super::session::{Answer, Session, TRANSPORT};

impl<V: VirtioDevice> DeviceOwner for Session<V> {
    type Device = Vdev<V>;

    fn parts(&mut self) -> (&mut Lifecycle<Vdev<V>>, &dyn Placement) {
        (&mut self.device, &self.placement)
    }

    fn missed(&mut self, reason: &str) {
        tracing::warn!(reason, "the device is not quiescent in time");
    }

    /// A queue whose guest has spoilt it is left out of the next round; one that was moved to a core that has ended goes where the pool
    /// thinks best; and where the backing has failed, or there is no core, every queue waits for the front end to start it again.
    fn resume_refused(&mut self, error: &DeviceError, round: usize) -> bool {
        tracing::warn!(%error, "a queue did not resume");
        let rounds = self.peer.rings.len() + 3;
        if matches!(error, DeviceError::CoreGone(_)) && !self.placement.moved.is_empty() {
            self.placement.moved.clear();
        } else if round + 1 >= rounds || !matches!(error, DeviceError::Guest { .. }) {
            let _ = self.device.with(|vdev| {
                for index in 0..vdev.info().queues {
                    vdev.queue_mut(index).into_iter().for_each(|setup| setup.enabled = false);
                }
            });
        }
        round < rounds
    }

    fn run_blocking<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        tokio::task::block_in_place(|| work(self))
    }
}

/// The deadline of a policy on the runtime's clock.
fn sleep_until(at: Instant) -> tokio::time::Sleep {
    tokio::time::sleep_until(at.into())
}

fn within(patience: Duration, on_miss: OnMiss) -> QuiescePolicy {
    QuiescePolicy { deadline: Instant::now() + patience, on_miss }
}

impl From<QuiesceError> for PeerFault {
    fn from(error: QuiesceError) -> Self {
        match error {
            QuiesceError::NotResumed(_) => PeerFault::NotQuiescent("no queue would resume".to_owned()),
            error => PeerFault::NotQuiescent(error.to_string()),
        }
    }
}

impl<V: VirtioDevice> Session<V> {
    /// Brings the whole device to a quiescent point and leaves it there, for [`Session::resume`]: drained within `patience`, or
    /// else suspended, however long that takes: its requests stay in the journal.
    pub(super) async fn quiesce(&mut self, patience: Duration) -> Result<Quiesced, PeerFault> {
        Ok(quiesce(self, within(patience, OnMiss::Insist), sleep_until).await?)
    }

    /// Brings the whole device to a quiescent point, does `work` there, and resumes it. What is in flight for too long is suspended.
    pub async fn at_quiescence<R>(
        &mut self,
        work: impl FnOnce(&mut Quiescent<Vdev<V>>) -> R,
    ) -> Result<R, PeerFault> {
        let policy = within(self.patience, OnMiss::Insist);
        Ok(at_quiescence(self, policy, sleep_until, work).await?)
    }

    /// As [`Session::at_quiescence`], but gives the device back as it was when it is not quiescent by `patience`. A queue that cannot
    /// go on then (its guest has spoilt it, no core takes it) does not keep the others.
    pub async fn at_quiescence_within<R>(
        &mut self,
        patience: Duration,
        work: impl FnOnce(&mut Quiescent<Vdev<V>>) -> R,
    ) -> Result<R, PeerFault> {
        Ok(at_quiescence(self, within(patience, OnMiss::Undrain), sleep_until, work).await?)
    }

    /// The device goes on.
    pub(super) fn resume(&mut self) -> Result<(), PeerFault> {
        Ok(resume(self).map_err(QuiesceError::NotResumed)?)
    }

    /// Moves a queue to where `placement` says, and keeps it there from now on. On a missed deadline it stays, and when no core
    /// takes it there.
    pub async fn move_queue(
        &mut self,
        queue: u16,
        placement: Arc<dyn Placement>,
        patience: Duration,
    ) -> Result<(), PeerFault> {
        let ring = self.ring(u32::from(queue))?;
        let old = self.placement.clone();
        self.placement.moved.insert(ring, placement);
        let new = self.placement.clone();
        let running = self.running()?;
        let Some(here) = running.sender_of(ring) else { return Ok(()) };
        running.leave(ring);
        let Ok(left) = tokio::time::timeout(patience, running.left(ring)).await else {
            let undrained = tokio::task::block_in_place(|| running.undrain(&QueueSet::from([ring]), &old));
            self.placement = old;
            undrained?;
            return Err(PeerFault::NotQuiescent(format!("queue {ring} still has requests in flight")));
        };
        let Err(error) = tokio::task::block_in_place(|| running.arrive(left, &new)) else { return Ok(()) };
        // Where it was, or if that core has ended too, where any is.
        let back = tokio::task::block_in_place(|| {
            running.start_active(ring, &here).or_else(|_| running.start_active(ring, &*old.pool))
        });
        if back.is_err() {
            tracing::error!(queue = ring, "a queue that was to be moved has stopped");
        }
        self.placement = old;
        Err(error.into())
    }

    /// Changes the limits and the group of the model, and tells the queues that run.
    pub(super) async fn change_limits(&mut self, change: impl FnOnce(&mut V)) -> Result<(), PeerFault> {
        let running = self.running()?;
        change(running.device_mut().model_mut());
        for queue in running.queues() {
            let limits = running.device().queue_limits(queue);
            running.apply(&QueueSet::from([queue]), &Change::Limits(limits)).done().await;
        }
        let (queues, share) = (running.queues(), running.device().share());
        running.apply(&queues, &Change::Share(share)).done().await;
        Ok(())
    }

    /// Changes the model, and tells the queues that run what it says, and where its backing lies.
    pub(super) async fn change_queues(
        &mut self,
        change: impl FnOnce(&mut V) -> Option<Change>,
    ) -> Result<(), PeerFault> {
        let running = self.running()?;
        let Some(change) = change(running.device_mut().model_mut()) else { return Ok(()) };
        let (queues, device) = (running.queues(), running.device().block_device());
        running.apply(&queues, &change).done().await;
        running.apply(&queues, &Change::BlockDevice(device)).done().await;
        Ok(())
    }

    /// RESET_DEVICE: the device as at power-on, under the features that were negotiated.
    pub(super) async fn reset_device(&mut self, message: &Message) -> Result<Answer, PeerFault> {
        self.peer.needs(VhostUserProtocolFeatures::RESET_DEVICE, message.header.request as u32)?;
        message.empty()?;
        self.peer.rings.iter_mut().for_each(|ring| *ring = Default::default());
        let features = self.peer.features & !VHOST_F_LOG_ALL;
        self.at_quiescence(|quiescent| {
            quiescent.reset();
            // What was negotiated holds until the front end says otherwise; it may well say the same again.
            quiescent.with(|vdev, _| vdev.accept(features, TRANSPORT));
        })
        .await?;
        Ok(Answer::None)
    }
}
