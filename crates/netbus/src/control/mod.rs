//! What the host of a device tells a host that uses it, without being asked: one session for each pair of hosts, whatever number of devices
//! (docs/decisions/0072-the-session-of-two-hosts.md).
//!
//! ```text
//!   host-b (uses)                                     host-a (publishes)
//!   Subscriber --hello, subscribe NAME, ping-------->  serve -- Publications: the newest state of each device
//!              <--welcome, state NAME, refused, pong-
//! ```
//!
//! - **States, not a log.** The newest state of a device is sent when it has changed. A subscriber that reads slowly gets the newest one, and no backlog is
//!   kept for it; what happened is what differs from the state that it had ([`DeviceState::since`]), also over a lost connection.
//! - **The stream is the caller's**, with whatever security it has; so is who may know of which device.
//! - **Nothing depends on it.** Whoever has no session finds out by using the device.
//!
//! Must not know: kinds of devices, what a unit of their capacity is, how they are used.

mod message;
mod publish;
mod state;
mod subscribe;

use std::time::Duration;

pub use publish::{Publications, serve};
pub use state::{DeviceEvent, DevicePresence, DeviceState};
pub use subscribe::{DeviceNews, PublisherLink, Subscriber};

/// Most devices that one session is about.
pub const MOST_SUBSCRIPTIONS: usize = 1024;

/// How long anything of a session may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionTiming {
    /// Between two questions whether the other side is there.
    pub keep_alive: Duration,
    /// A peer that says nothing for so long is gone: several times `keep_alive`.
    pub silence: Duration,
    /// For a message that has begun, for the first one, and to take one that is sent.
    pub patience: Duration,
    /// Least and most time between two attempts to connect.
    pub retry: (Duration, Duration),
}

impl Default for SessionTiming {
    /// A peer that is gone is noticed within 6 s.
    fn default() -> Self {
        SessionTiming {
            keep_alive: Duration::from_secs(2),
            silence: Duration::from_secs(6),
            patience: Duration::from_secs(5),
            retry: (Duration::from_millis(200), Duration::from_secs(10)),
        }
    }
}
