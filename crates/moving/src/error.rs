//! What goes wrong.

use ioplane_hardware::HardwareError;
use ioplane_memory::{GuestFault, MapError};
use ioplane_pci::WireError;

/// Most bytes of a saved state.
pub const MOST: usize = 1024;
/// The version that is written, and the only one that is read.
pub const VERSION: u16 = 2;

/// Why a device was not moved. None of them leaves the guest's memory changed.
#[derive(Debug, thiserror::Error)]
pub enum MovingError {
    /// The table is not sound, or names what this function does not have.
    #[error("model {model} cannot move a device: {why}")]
    Model {
        /// Its name.
        model: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The function failed.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
    /// A vector could not be signalled.
    #[error("signalling a vector: {0}")]
    Wire(#[from] WireError),
    /// Guest memory failed.
    #[error("the guest's memory: {0}")]
    Memory(#[from] GuestFault),
    /// The memory for dummies could not be made.
    #[error("memory for dummy frames: {0}")]
    Dummies(#[from] MapError),
    /// The same, of the file behind it.
    #[error("memory for dummy frames: {0}")]
    DummyFile(std::io::Error),
    /// The device stands still: nothing is to be done to it before it was resumed or replayed.
    #[error("the device is stopped")]
    Stopped,
    /// The device has not been stopped.
    #[error("the device runs")]
    Running,
    /// It did not get there in time.
    #[error("the deadline passed while {doing}")]
    Deadline {
        /// What was waited for.
        doing: String,
    },
    /// The function that has the port refused what it had accepted on the source.
    #[error(
        "the physical function refuses message {message}: on this host its administrator has to allow it (for an address: `ip link set … \
         vf … mac`, the guest's, or trust on), or its driver is older"
    )]
    Refused {
        /// The message's name.
        message: &'static str,
    },
    /// A queue that the guest uses does not take where its ring is.
    #[error(
        "ring {ring} does not take its place: the physical function gives this function fewer queues than the guest uses"
    )]
    NoRing {
        /// Its name.
        ring: &'static str,
    },
    /// Frames for moving a head did not come.
    #[error("frames to the virtual function cannot be sent from its physical function: {0}")]
    Fill(std::io::Error),
    /// What was saved is not to be believed.
    #[error(transparent)]
    State(#[from] DirectStateError),
}

/// Why a saved state was refused. The state is a stranger's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DirectStateError {
    /// It does not begin as one.
    #[error("this is not the state of a device")]
    NotAState,
    /// Of another version.
    #[error("the state is of version {0}, and this host reads version {own}", own = VERSION)]
    Version(u16),
    /// Longer or shorter than it says.
    #[error("the state has {has} bytes and says {says}")]
    Length {
        /// Bytes.
        has: usize,
        /// What the header says.
        says: usize,
    },
    /// Above the limit.
    #[error("the state has {0} bytes, more than {most}", most = MOST)]
    TooLarge(usize),
    /// The checksum is another.
    #[error("the state's checksum is wrong: it was damaged on its way")]
    Checksum,
    /// It cannot be read.
    #[error("the state cannot be read: {0}")]
    Damaged(String),
    /// Of another model.
    #[error("the state is of model {0:?}")]
    OtherModel(String),
    /// It says what cannot be.
    #[error("the state says what cannot be: {0}")]
    Impossible(String),
}
