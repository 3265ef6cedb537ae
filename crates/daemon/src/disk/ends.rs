//! What the two ends of a swap may lose while it goes on, where they are on other machines.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ioplane_api::report::RemoteWord;
use ioplane_nbd::import::Import;
use ioplane_storage::mirror::Mirror;
use rustix::io::Errno;

use super::swap_rule::{DaemonSwapRule, removed};
use super::{Opened, remote};
use crate::refusal::Refusal;

/// How long the server of the new backing may be unreachable.
const UNREACHABLE: Duration = Duration::from_secs(10);
/// How often that is looked at.
const LOOK: Duration = Duration::from_secs(1);

/// The backing that a disk is swapped from.
///
/// An export that is another instance has everything again before it answers, or answers nothing until a person accepts what it has lost; one of a server that
/// says no instance may have lost something whenever its connection was lost. Then the copy has what the disk has not, where nothing is marked.
#[derive(Debug)]
pub struct SwapSource {
    /// If it is another machine's.
    import: Option<Arc<Import>>,
    /// Of those that the copy has been begun anew for.
    doubts: AtomicU64,
}

impl SwapSource {
    /// Before anything is copied from it.
    pub fn new(import: Option<Arc<Import>>) -> SwapSource {
        let doubts = AtomicU64::new(import.as_ref().map_or(0, |import| import.doubts()));
        SwapSource { import, doubts }
    }

    /// Has all of it copied again if it may have lost something since this was last asked; says whether that is so. Asked all the time, and for the last time
    /// at the quiescent point: what it loses later nobody reads there.
    pub fn restarts(&self, mirror: &Mirror) -> bool {
        let Some(import) = &self.import else { return false };
        let now = import.doubts();
        let restarts =
            self.doubts.swap(now, Ordering::AcqRel) != now && !removed(DaemonSwapRule::CopyRestarts);
        if restarts {
            mirror.restart();
            tracing::warn!(
                address = import.status().address,
                "the old backing of a swap may have lost what was copied from it: all of it is copied again"
            );
        }
        restarts
    }
}

/// Ends the copy when the server of the new backing has been unreachable for [`UNREACHABLE`]: the guest would wait for it as long as that
/// takes. Watches for ever.
pub async fn fail_when_unreachable(import: Option<Arc<Import>>, mirror: &Mirror) -> Infallible {
    let Some(import) = import else { return std::future::pending().await };
    loop {
        tokio::time::sleep(LOOK).await;
        let seen = remote::report(&import);
        let unreachable = seen.for_ms.unwrap_or(0) > UNREACHABLE.as_millis() as u64;
        if seen.state != RemoteWord::Connected && unreachable {
            mirror.fail(Errno::TIMEDOUT.raw_os_error());
        }
    }
}

/// Asked after a flush. A server that cannot say that it is another instance may have lost what it had not yet flushed, and nobody has copies.
pub fn has_kept_all(opened: &Opened) -> Result<(), Refusal> {
    let doubts = opened.import.as_ref().map_or(0, |import| import.doubts());
    match doubts == 0 || removed(DaemonSwapRule::KeptAll) {
        true => Ok(()),
        false => Err(Refusal::failed(
            "the connection to the server was lost, and it cannot say whether it has kept everything",
            "see to the network, then swap again",
        )),
    }
}
