//! The quiescent point that memory needs to go away. The device's own events go on meanwhile: they are what makes hardware still.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use ioplane_device::{DeviceError, Still};
use ioplane_embed::{FrontError, Presence};
use ioplane_pci::Function;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::connection::Connection;
use super::fault::ClientFault;
use super::session::Session;

/// Wakes a thread that polls.
struct Ring(Arc<OwnedFd>);

impl Wake for Ring {
    fn wake(self: Arc<Self>) {
        // A full counter is readable too.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

impl<F: Function> Session<F> {
    /// Does `work` at a quiescent point, then lets the device go on. One that does not become quiescent in time is suspended; if that
    /// fails too it goes on as it was, and nothing has been done. A device that somebody else holds stays held.
    pub(super) fn at_quiescence(
        &mut self,
        connection: Option<&Connection>,
        mut work: impl FnMut(&mut F, &Still) -> Result<(), DeviceError>,
    ) -> Result<Result<(), DeviceError>, ClientFault> {
        loop {
            let ours = self.front.begin_quiesce().is_ok();
            if ours {
                self.settle()?;
            }
            match self.front.while_held(|quiescent| quiescent.with(&mut work)) {
                Ok(done) if !ours => return Ok(done),
                Ok(done) => {
                    return match self.front.resume() {
                        // Somebody else has let it go on, or has it now.
                        Ok(()) | Err(FrontError::Not { .. }) => Ok(done),
                        Err(FrontError::Closed) => Err(ClientFault::Gone),
                        Err(FrontError::Device(error)) => Err(error.into()),
                        Err(FrontError::Stuck(reason)) => Err(ClientFault::NotQuiescent(reason)),
                    };
                }
                Err(FrontError::Closed) => return Err(ClientFault::Gone),
                // It runs again already; or somebody else has it, and gives it back.
                Err(_) if self.front.presence() == Presence::Running => {}
                Err(_) => self.until_moved(connection)?,
            }
        }
    }

    /// Waits for the device that is on its way, and stops it by force if it takes too long. Then it is held.
    fn settle(&mut self) -> Result<(), ClientFault> {
        // Once forced, waiting again helps nobody before the guest has had a chance to do something: QEMU moves memory in bursts.
        let patience = if self.forced { Duration::ZERO } else { self.patience };
        let deadline = Instant::now() + patience;
        let ring = crate::eventfd::fresh().map_err(|errno| ClientFault::Broken(errno.into()))?;
        let waker = Waker::from(Arc::new(Ring(ring.clone())));
        let mut context = Context::from_waker(&waker);
        while self.front.poll_settled(&mut context).is_pending() {
            let left = deadline.checked_duration_since(Instant::now());
            let Some(left) = left.and_then(|left| Timespec::try_from(left).ok()) else { break };
            let attention = self.attention();
            let mut files = vec![
                PollFd::new(&*ring, PollFlags::IN),
                PollFd::from_borrowed_fd(self.stopping(), PollFlags::IN),
            ];
            files.extend(attention.iter().map(|file| PollFd::new(file, PollFlags::IN)));
            if rustix::event::poll(&mut files, Some(&left)).is_err() {
                continue;
            }
            let ends = !files[1].revents().is_empty();
            let wanted = files.get(2).is_some_and(|file| !file.revents().is_empty());
            if ends {
                break;
            }
            let _ = rustix::io::read(&*ring, &mut [0u8; 8]);
            if wanted {
                self.attend();
            }
        }
        let Err(late) = self.front.finish() else { return Ok(()) };
        self.forced = true;
        self.board.forced.fetch_add(1, Relaxed);
        let reason = late.reason.clone();
        match late.suspend(Instant::now() + self.patience) {
            Ok(()) => Ok(()),
            Err(error) => {
                let reason = format!("{reason}; by force: {error}");
                match self.front.undrain() {
                    Ok(()) | Err(FrontError::Not { .. }) => Err(ClientFault::NotQuiescent(reason)),
                    Err(error) => Err(ClientFault::NotQuiescent(format!("{reason}; going on: {error}"))),
                }
            }
        }
    }
}
