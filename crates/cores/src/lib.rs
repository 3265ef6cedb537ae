//! I/O cores: the threads that pollers run on.
//!
//! ```text
//!   Running<D> --CoreMessage--> Mailbox --+                   Core (one thread, ioplane-core-N)
//!                                         |   +--------------------------------------------------------+
//!   Pool: Placement  picks a core         +-->| read mailbox -> step every awake slot -> nothing? spin |
//!   Pool::read       reads meters <-----------|      ^                                        |        |
//!                                             |      +-- disarm <- sleep <- look <- fence <- arm       |
//!                                             +--------------------------------------------------------+
//! ```
//!
//! A core polls the rings of many guests, so that their kicks are waste and can be suppressed (ELVIS, section 3.1). A ring on
//! which nothing comes for a while asks to be kicked again and is not looked at any more; with all of them at rest the core
//! sleeps. See [`Notify`] for when, and `poll_loop` for why no wake-up is lost on the way.
//!
//! Each core has one io_uring, by which its pollers do I/O on files, and in which it sleeps (`ring`, `watch`).
//!
//! A poller that panics ends the process: its request may be half-done, and what every other queue of the process needs is
//! the replay that follows a crash (the in-flight journal), not a core that goes on with one queue dead and no error reported.
//!
//! Must not know: rings of devices, devices, guests, sockets, why a queue is where it is.

mod core;
mod counts;
mod error;
mod mailbox;
mod meters;
mod poll_loop;
mod pool;
mod readable;
mod registered;
mod ring;
mod settings;
mod shared;
mod shares;
mod thread;
mod watch;

pub use crate::core::Core;
pub use counts::CoreReading;
pub use error::PoolError;
pub use mailbox::{EndedCore, Mailbox};
pub use meters::GroupTime;
pub use pool::{GroupTimes, OnCore, Pool};
pub use ring::{RingChoice, context_with_ring};
pub use settings::{CoreSettings, Notify, YieldPolicy};
