//! The vocabulary of ioplane: what a device is, who runs it, and how it is stopped.
//!
//! ```text
//!            Quiescent<D> --resume--> Running<D> --quiesce--> Quiescing<D> --all parked--> Quiescent<D>
//!                 ^  | load                ^                     |      \-- deadline --> Missed<D>
//!                 |  v                     |                     |                        | undrain, suspend
//!              Loaded<D> --start-----------+---------------------+------------------------+
//!
//!   Running<D> --CoreMessage::Attach(PollerSlot)--> I/O core: PollerSlot::step() --> Poller::poll()
//!       ^                                                         |
//!       +------------- ParkedInbox <------------ Parked ----------+      only a PollerSlot makes Parked
//! ```
//!
//! An owner keeps its device in a [`Lifecycle`], which has one of these at every moment, and brings it to a quiescent point by the policy
//! that is written once: [`QuiesceAttempt`], driven by [`at_quiescence`] or [`at_quiescence_blocking`].
//!
//! **Quiescence is ownership.** What may happen to a device only at a quiescent point (saving, loading, resetting,
//! exchanging its backing or its memory) takes a [`QuiescenceProof`], and only a [`Quiescent`], which owns the device and all of
//! its pollers, has one. A running device cannot be saved because that does not compile:
//!
//! ```compile_fail
//! # use ioplane_device::{Device, Running};
//! fn save_while_running<D: Device>(device: &Running<D>) {
//!     device.save();
//! }
//! ```
//! ```
//! # use ioplane_device::{Device, QuiescenceProof};
//! fn save<D: Device>(device: &D, proof: &QuiescenceProof) {
//!     let _ = device.save(proof);
//! }
//! ```
//! ```compile_fail
//! # use ioplane_device::{Device, QuiescenceProof};
//! fn save_with_a_proof_of_my_own<D: Device>(device: &D) {
//!     let _ = device.save(&QuiescenceProof { _minted_by_quiescent: () });
//! }
//! ```
//! Only a [`PollerSlot`] makes [`Parked`]:
//!
//! ```compile_fail
//! # use ioplane_device::{Parked, Poller, Stop};
//! fn park(poller: Box<dyn Poller>) -> Parked {
//!     Parked { poller, queue: 0, stop: Stop::Drained }
//! }
//! ```
//!
//! Must not know: rings of devices, sockets, what a file holds, threads, time-outs of any transport. It names operations on files
//! ([`FileOp`]) and does none.
#![deny(unsafe_code)]

pub mod clock;
mod context;
mod device;
mod effects;
mod inbox;
mod io;
mod lifecycle;
mod limits;
mod meter;
mod outcome;
mod parked;
mod policy;
mod poll_cost;
mod poller;
mod quiescence;
mod share;
mod slot;
mod slot_meter;
mod state;
mod watch;

pub use context::{CoreContext, SCRATCH};
pub use device::{
    Access, Activation, AfterStop, Device, DeviceError, DeviceInfo, Effect, QueueSet, Quiescence,
    RegisterAddress,
};
pub use inbox::ParkedInbox;
pub use io::{CoreIo, FileOp, IoCompletion, IoHandle};
pub use lifecycle::{Lifecycle, LifecycleError, LoadError, Presence};
pub use meter::{Histogram, Meter, MeterReading, Tally};
pub use outcome::{Cost, PollOutcome, PollState};
pub use parked::{Parked, PollerId};
pub use policy::{
    DeviceOwner, OnMiss, QuiesceAttempt, QuiesceError, QuiescePolicy, Quiesced, SimpleOwner, at_quiescence,
    at_quiescence_blocking, quiesce, quiesce_blocking, resume, work_and_resume,
};
pub use poll_cost::PollCost;
pub use poller::{Armed, Budget, Change, Interrupt, Poller, Stop, Wakers};
pub use quiescence::{
    Applied, Left, Loaded, Missed, MoveError, QuiescenceProof, Quiescent, Quiescing, Refused, Running,
};
pub use share::{BlockDevice, DevicePart, GroupId, GroupPart, Share};
pub use slot::{Ack, CoreEnded, CoreId, CoreMessage, CoreSender, Placement, PollerCommand, PollerSlot};
pub use slot_meter::SlotMeter;
pub use state::{SavedState, StateError};
#[cfg(feature = "mutations")]
pub use watch::inside_poll;

pub use ioplane_memory::mutation;
