//! Copies of a port's frames, for somebody who looks on.
//!
//! The ring is bounded and made of buffers that are there before the first frame: a poller copies into an empty one, or
//! counts that there was none. It is part of the switch's plan, so that a port that nobody looks at pays one branch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;

use crate::error::NetworkError;
use crate::offload::Offload;
use crate::switch::Switch;

/// Most memory of one capture.
const MOST: usize = 64 << 20;

/// How much to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureOptions {
    /// First bytes of each frame.
    pub snaplen: usize,
    /// Frames that wait to be read, at most.
    pub frames: usize,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        CaptureOptions { snaplen: 262, frames: 8192 }
    }
}

/// Which way a captured frame went, seen from the port's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the port, whatever the switch made of it.
    Sent,
    /// To the port, as it was put into its trays: after tagging and segmentation.
    Received,
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// Since 1970.
    pub at: Duration,
    /// Which way.
    pub direction: Direction,
    /// Its length; `bytes` may be fewer: [`CaptureOptions::snaplen`], and of a frame that was dropped by its first bytes
    /// only [`crate::HEAD`].
    pub len: usize,
    /// What was left to do for it. With a checksum to complete, the one in `bytes` is not the one on a wire.
    pub offload: Offload,
    /// Its first bytes.
    pub bytes: Vec<u8>,
}

#[derive(Debug)]
struct Snap {
    at: Duration,
    direction: Direction,
    len: usize,
    offload: Offload,
    kept: usize,
    bytes: Box<[u8]>,
}

/// What pollers copy into and a capture reads.
#[derive(Debug)]
pub(crate) struct Ring {
    empty: ArrayQueue<Box<Snap>>,
    full: ArrayQueue<Box<Snap>>,
    overflow: AtomicU64,
}

impl Ring {
    pub fn new(options: CaptureOptions) -> Result<Self, NetworkError> {
        let CaptureOptions { snaplen, frames } = options;
        let bytes = snaplen.saturating_add(size_of::<Snap>()).saturating_mul(frames);
        if snaplen == 0 || frames == 0 || bytes > MOST {
            return Err(NetworkError::CaptureSize { frames, snaplen });
        }
        let ring = Ring {
            empty: ArrayQueue::new(frames),
            full: ArrayQueue::new(frames),
            overflow: AtomicU64::new(0),
        };
        for _ in 0..frames {
            let snap = Snap {
                at: Duration::ZERO,
                direction: Direction::Sent,
                len: 0,
                offload: Offload::NONE,
                kept: 0,
                bytes: vec![0; snaplen].into(),
            };
            let _ = ring.empty.push(Box::new(snap));
        }
        Ok(ring)
    }

    /// Copies a frame of `len` bytes, of which `bytes` are here. On an I/O core.
    #[cold]
    pub fn put(&self, direction: Direction, bytes: &[u8], len: usize, offload: Offload) {
        let Some(mut snap) = self.empty.pop() else {
            self.overflow.fetch_add(1, Ordering::Relaxed);
            return;
        };
        snap.at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (snap.direction, snap.len, snap.offload) = (direction, len, offload);
        snap.kept = bytes.len().min(snap.bytes.len());
        let kept = snap.kept;
        snap.bytes[..kept].copy_from_slice(&bytes[..kept]);
        let _ = self.full.push(snap);
    }
}

/// A capture of one port, both directions; made by [`Switch::capture`], ended by dropping it.
///
/// As an iterator it gives what has been captured so far, and `None` when there is nothing *yet*. Control side.
#[derive(Debug)]
pub struct Capture {
    pub(crate) switch: Arc<Switch>,
    pub(crate) port: String,
    pub(crate) ring: Arc<Ring>,
}

impl Capture {
    /// The port's name.
    pub fn port(&self) -> &str {
        &self.port
    }

    /// Frames that were not captured, because as many as were asked for waited to be read.
    pub fn overflow(&self) -> u64 {
        self.ring.overflow.load(Ordering::Relaxed)
    }
}

impl Iterator for Capture {
    type Item = Captured;

    fn next(&mut self) -> Option<Captured> {
        let snap = self.ring.full.pop()?;
        let captured = Captured {
            at: snap.at,
            direction: snap.direction,
            len: snap.len,
            offload: snap.offload,
            bytes: snap.bytes[..snap.kept].to_vec(),
        };
        let _ = self.ring.empty.push(snap);
        Some(captured)
    }
}

impl std::ops::Drop for Capture {
    fn drop(&mut self) {
        self.switch.end_capture(&self.ring);
    }
}
