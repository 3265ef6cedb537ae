//! A function of the host that a guest drives past us, and that can be moved: brought to where it was on another function.
//!
//! ```text
//!   guest --trapped pages--> Movable --> mailbox, counters: the guest's view, kept here
//!     |                        |  copying: tails of rings too, which say what the device may write (`written`)
//!     |                        |  stop -> save ... load -> replay, on another function of another host
//!     '-----mapped pages----> Hardware
//! ```
//!
//! | moment | what is done |
//! |---|---|
//! | while the guest runs | [`Movable::read`], [`Movable::write`] of trapped pages; accepted messages are kept |
//! | while its memory is copied | [`Movable::begin_copy`] traps the rings' pages; [`Movable::pages`] names what the device wrote |
//! | meanwhile, on the other function | [`Movable::said`] here, [`Movable::go_ahead`] there: its mailbox has what this one's has, but for unicast addresses |
//! | the guest's processors stand still | [`Movable::stop`] until it says yes: mailbox answered, frames sent, queues off |
//! | then | [`Movable::pages`] for the last time, [`Movable::save`] |
//! | on the other function | [`Movable::load`], [`Movable::replay`] |
//! | it was called off | [`Movable::replay`] on the first one |
//!
//! What moves it knows no device: what it does is in a [`DirectModel`](ioplane_model::DirectModel). The tables are here as well.
//!
//! Must not know: a monitor that mediates cards, sockets of VMMs, which host is the other one.
#![forbid(unsafe_code)]

mod addresses;
mod ahead;
pub mod catalog;
mod error;
mod guarded;
mod intel;
mod kept;
mod mailbox;
mod movable;
mod plan;
mod replay;
mod state;
pub mod vf82576;
pub mod vf82599;
mod written;

pub use addresses::GuestAddress;
pub use ahead::{check_said, seal_said};
pub use error::{DirectStateError, MOST, MovingError, VERSION};
pub use guarded::Guarded;
pub use movable::{Movable, Unsent};
pub use replay::{FillFrames, Surroundings};
pub use state::{check, open, seal};
pub use written::{PAGE, PageSet};
