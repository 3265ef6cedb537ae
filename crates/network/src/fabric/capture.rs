//! Copies of a port's frames: where cores put them, and a capture ([`crate::Capture`]) takes them from.
//!
//! The ring is bounded and made of buffers that are there before the first frame: a poller copies into an empty one, or
//! counts that there was none. It is part of the switch's snapshot, so that a port that nobody looks at pays one branch.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crossbeam_queue::ArrayQueue;

use crate::error::NetworkError;
use crate::offload::Offload;

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
    /// To the port, as it was put into its buffers: after tagging and segmentation.
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

    /// The oldest frame that waits to be read. Control side.
    pub fn take(&self) -> Option<Captured> {
        let snap = self.full.pop()?;
        let captured = Captured {
            at: snap.at,
            direction: snap.direction,
            len: snap.len,
            offload: snap.offload,
            bytes: snap.bytes[..snap.kept].to_vec(),
        };
        let _ = self.empty.push(snap);
        Some(captured)
    }

    /// Frames for which no buffer was empty.
    pub fn overflow(&self) -> u64 {
        self.overflow.load(Ordering::Relaxed)
    }
}
