//! Whoever looks on at a port: the control side of a capture.

use std::sync::Arc;

use super::Switch;
use crate::fabric::capture::{Captured, Ring};

/// A capture of one port, both directions; made by [`Switch::capture`], ended by dropping it.
///
/// As an iterator it gives what has been captured so far, and `None` when there is nothing *yet*. Control side.
#[derive(Debug)]
pub struct Capture {
    pub(super) switch: Arc<Switch>,
    pub(super) port: String,
    pub(super) ring: Arc<Ring>,
}

impl Capture {
    /// The port's name.
    pub fn port(&self) -> &str {
        &self.port
    }

    /// Frames that were not captured, because as many as were asked for waited to be read.
    pub fn overflow(&self) -> u64 {
        self.ring.overflow()
    }
}

impl Iterator for Capture {
    type Item = Captured;

    fn next(&mut self) -> Option<Captured> {
        self.ring.take()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.switch.end_capture(&self.ring);
    }
}
