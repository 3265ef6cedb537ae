//! What a server task is asked when its device goes to another process, and what its owner holds meanwhile.

use std::time::Duration;

use tokio::sync::oneshot;

use super::parcel::Parcel;
use crate::vhost_user::handle_error::HandleError;

/// A device that is still, and packed. Dropped, or taken back, it goes on where it was.
#[derive(Debug)]
pub struct Held {
    /// The device, for another process.
    pub parcel: Parcel,
    /// Requests are recorded in flight: what their I/O does until it has ended is nobody's any more.
    pub suspended: bool,
    verdict: oneshot::Sender<()>,
    resumed: oneshot::Receiver<()>,
}

impl Held {
    /// The device goes on here. Returns when it does.
    pub async fn take_back(self) {
        drop(self.verdict);
        let _ = self.resumed.await;
    }

    /// The other process has it: nothing here touches it any more. What is left of it ends with this process, which is to be
    /// soon.
    pub fn give_away(self) {
        std::mem::forget(self.verdict);
    }
}

/// What a server task is asked for and waits for, beside the time it may take to drain.
pub(in crate::vhost_user) struct Offer {
    pub patience: Duration,
    pub reply: oneshot::Sender<Result<(Parcel, bool), HandleError>>,
    pub verdict: oneshot::Receiver<()>,
    pub resumed: oneshot::Sender<()>,
}

impl Offer {
    /// An offer, and what makes a [`Held`] of its reply.
    pub fn new(
        patience: Duration,
        reply: oneshot::Sender<Result<(Parcel, bool), HandleError>>,
    ) -> (Self, impl FnOnce((Parcel, bool)) -> Held) {
        let ((say, verdict), (resumed, hear)) = (oneshot::channel(), oneshot::channel());
        let held = |(parcel, suspended)| Held { parcel, suspended, verdict: say, resumed: hear };
        (Offer { patience, reply, verdict, resumed }, held)
    }
}
