//! The fence against the process that had an image before, when the image was opened beside it.
//!
//! ```text
//!   old process  -- description A: byte locks, flock -----------------X  closed, its last request has ended
//!   this process    description B: byte locks at once ..... flock ----'  then the fence goes down
//! ```
//!
//! Control plane only.

#![expect(clippy::disallowed_types, reason = "control plane: one wait for each image that changes hands")]

use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::image::Image;
use crate::lock::{self, Claim};

/// How often to try whether the other description is closed.
const RECHECK_INTERVAL: Duration = Duration::from_millis(5);

/// Up while I/O of the image's former holder may be under way.
#[derive(Debug)]
pub(super) struct Fence {
    up: Mutex<bool>,
    lowered: Condvar,
}

impl Fence {
    /// Raises a fence that goes down once the rest of `claim` could be taken.
    pub fn raise(image: &Arc<Image>, claim: Claim) -> Arc<Fence> {
        let fence = Arc::new(Fence { up: Mutex::new(true), lowered: Condvar::new() });
        let (watched, weak) = (fence.clone(), Arc::downgrade(image));
        // Without a thread the fence stays up, and replays are refused: safe, and said.
        let watch =
            std::thread::Builder::new().name("fence".into()).spawn(move || watched.watch(&weak, &claim));
        if let Err(error) = watch {
            tracing::error!(image = image.name, %error, "no thread to wait for the image's former holder");
        }
        fence
    }

    fn watch(&self, image: &Weak<Image>, claim: &Claim) {
        while let Some(image) = image.upgrade() {
            match lock::inherit(image.as_fd(), claim) {
                Ok(true) => return self.lower(),
                Ok(false) => {}
                Err(error) => {
                    return tracing::error!(image = image.name, %error, "locking an image that was handed over");
                }
            }
            drop(image);
            std::thread::sleep(RECHECK_INTERVAL);
        }
    }

    fn state(&self) -> MutexGuard<'_, bool> {
        self.up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing of the former holder's is under way.
    pub fn lower(&self) {
        *self.state() = false;
        self.lowered.notify_all();
    }

    /// Blocks until the fence is down or `deadline` has passed; says whether it is.
    pub fn wait(&self, deadline: Instant) -> bool {
        let mut up = self.state();
        while *up {
            let Some(time) = deadline.checked_duration_since(Instant::now()).filter(|t| !t.is_zero()) else {
                return false;
            };
            up = self.lowered.wait_timeout(up, time).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
