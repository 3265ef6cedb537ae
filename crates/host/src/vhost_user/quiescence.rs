//! Bringing the device to a quiescent point and back: for the front end, for the daemon, for a queue that moves.

use std::sync::Arc;
use std::time::Duration;

use ioplane_device::{Device, DeviceError, Missed, Placement, QueueSet, Quiescent};
use ioplane_virtio::spec::feature::VHOST_F_LOG_ALL;
use ioplane_virtio::{Vdev, VirtioDevice};
use vhost::vhost_user::VhostUserProtocolFeatures;

use super::fault::PeerFault;
use super::message::Message;
use super::session::{Answer, Session, TRANSPORT, lost};

impl<V: VirtioDevice> Session<V> {
    /// Brings the whole device to a quiescent point and leaves it there, for [`Session::resume`]: drained within `patience`, or
    /// else suspended.
    pub(super) async fn quiesce(&mut self, patience: Duration) -> Result<Quiescent<Vdev<V>>, PeerFault> {
        let mut quiescing = self.device.take().ok_or_else(lost)?.begin_quiesce();
        let _ = tokio::time::timeout(patience, quiescing.settled()).await;
        match quiescing.finish() {
            Ok(quiescent) => Ok(quiescent),
            Err(missed) => {
                tracing::warn!(
                    reason = missed.reason,
                    "the device is suspended: its requests stay in the journal"
                );
                Ok(Self::quiesce_by_force(missed).await)
            }
        }
    }

    /// Brings a device home that has missed its deadline, however long that takes: nothing else keeps it.
    async fn quiesce_by_force(missed: Missed<Vdev<V>>) -> Quiescent<Vdev<V>> {
        let mut quiescing = missed.suspend().unwrap_or_else(|refused| {
            tracing::warn!(error = %refused.error, "the device cannot be suspended: it has to drain");
            refused.kept.keep_waiting()
        });
        loop {
            quiescing.settled().await;
            match quiescing.finish() {
                Ok(quiescent) => return quiescent,
                Err(missed) => quiescing = missed.keep_waiting(),
            }
        }
    }

    /// A device that has missed its deadline goes on. A queue that cannot (its guest has spoilt it, no core takes it) does not keep
    /// the others: then the device is stopped by force and resumed with those that can.
    async fn give_back(&mut self, missed: Missed<Vdev<V>>) -> Result<(), PeerFault> {
        let seats = self.seats.clone();
        match tokio::task::block_in_place(|| missed.undrain(&seats)) {
            Ok((running, _)) => {
                self.device = Some(running);
                Ok(())
            }
            Err(refused) => {
                tracing::warn!(error = %refused.error, "a queue did not go on: the device is suspended and resumed");
                let quiescent = Self::quiesce_by_force(refused.kept).await;
                self.resume(quiescent)
            }
        }
    }

    /// Brings the whole device to a quiescent point, does `work` there, and resumes it.
    pub async fn at_quiescence<R>(
        &mut self,
        work: impl FnOnce(&mut Quiescent<Vdev<V>>) -> R,
    ) -> Result<R, PeerFault> {
        let mut quiescent = self.quiesce(self.patience).await?;
        let outcome = work(&mut quiescent);
        self.resume(quiescent)?;
        Ok(outcome)
    }

    /// As [`Session::at_quiescence`], but gives the device back as it was when it is not quiescent by `patience`.
    pub async fn at_quiescence_within<R>(
        &mut self,
        patience: Duration,
        work: impl FnOnce(&mut Quiescent<Vdev<V>>) -> R,
    ) -> Result<R, PeerFault> {
        let mut quiescing = self.device.take().ok_or_else(lost)?.begin_quiesce();
        let _ = tokio::time::timeout(patience, quiescing.settled()).await;
        match quiescing.finish() {
            Ok(mut quiescent) => {
                let outcome = work(&mut quiescent);
                self.resume(quiescent)?;
                Ok(outcome)
            }
            Err(missed) => {
                let reason = missed.reason.clone();
                self.give_back(missed).await?;
                Err(PeerFault::NotQuiescent(reason))
            }
        }
    }

    /// The device goes on.
    pub(super) fn resume(&mut self, mut quiescent: Quiescent<Vdev<V>>) -> Result<(), PeerFault> {
        // Each round either resumes or finds one queue more whose guest has spoilt it, which is left out of the next; or a core
        // that has ended; or that the backing has failed.
        let rounds = self.peer.rings.len() + 3;
        for round in 0..=rounds {
            let seats = self.seats.clone();
            match tokio::task::block_in_place(|| quiescent.resume(&seats)) {
                Ok(running) => {
                    self.device = Some(running);
                    return Ok(());
                }
                Err(refused) => {
                    tracing::warn!(error = %refused.error, "a queue did not resume");
                    quiescent = refused.kept;
                    let core_gone = matches!(refused.error, DeviceError::CoreGone(_));
                    if core_gone && !self.seats.moved.is_empty() {
                        // Queues that were moved to a core of their own go where the pool thinks best.
                        self.seats.moved.clear();
                    } else if round + 1 >= rounds || !matches!(refused.error, DeviceError::Guest { .. }) {
                        // The backing failed, or there is no core: every queue waits for the front end to start it again.
                        quiescent.with(|vdev, _| {
                            for index in 0..vdev.info().queues {
                                vdev.queue_mut(index).into_iter().for_each(|setup| setup.enabled = false);
                            }
                        });
                    }
                }
            }
        }
        Err(PeerFault::NotQuiescent("no queue would resume".to_owned()))
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
        let queues = QueueSet::from([ring]);
        let old = self.seats.clone();
        self.seats.moved.insert(ring, placement);
        let new = self.seats.clone();
        let running = self.running()?;
        let Some(here) = running.post_of(ring) else { return Ok(()) };
        running.drain(&queues);
        if tokio::time::timeout(patience, running.stopped(&queues)).await.is_err() {
            let undrained = tokio::task::block_in_place(|| running.undrain(&queues, &old));
            self.seats = old;
            undrained?;
            return Err(PeerFault::NotQuiescent(format!("queue {ring} still has requests in flight")));
        }
        // The guest may have stopped it for good meanwhile.
        let queues: QueueSet = running.device().active().intersection(&queues).copied().collect();
        let Err(error) = tokio::task::block_in_place(|| running.start(&queues, &new)) else { return Ok(()) };
        // Where it was, or if that core has ended too, where any is.
        let back = tokio::task::block_in_place(|| {
            running.start(&queues, &here).or_else(|_| running.start(&queues, &*old.pool))
        });
        if back.is_err() {
            tracing::error!(queue = ring, "a queue that was to be moved has stopped");
        }
        self.seats = old;
        Err(error.into())
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
