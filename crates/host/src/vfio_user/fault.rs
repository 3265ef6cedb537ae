//! What a client can do wrong. Most is answered with an error; what leaves no sense in the stream ends the connection. All is counted
//! by name.

use ioplane_device::DeviceError;
use ioplane_memory::{MapError, MappingError};
use ioplane_pci::{NotReady, WireError};
use rustix::io::Errno;

/// A violation of the vfio-user protocol, or a failure to do what a message asks.
#[derive(Debug, thiserror::Error)]
pub enum ClientFault {
    /// The other side closed the connection: not a fault, and the usual end.
    #[error("the client closed the connection")]
    Closed,
    /// It does not read what it asked for.
    #[error("the client does not read its replies")]
    Deaf,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(std::io::Error),
    /// A header that says less than a header has, or more than a message can have.
    #[error("a message of {0} bytes: smaller than its header or larger than any of the protocol")]
    BadLength(u32),
    /// Not a command.
    #[error("a message with flags {0:#x}: not a command")]
    NotACommand(u32),
    /// An answer to nothing that this side has asked.
    #[error("an answer to a command {0} that was not sent")]
    UnaskedAnswer(u16),
    /// It sends on while it owes an answer.
    #[error("more commands than can be kept while the client owes an answer")]
    TooManyCommands,
    /// The first message must be VERSION.
    #[error("command {0} before a version was negotiated")]
    NoVersion(u16),
    /// Another protocol.
    #[error("version {0}.{1} is not served: this is version 0.0")]
    BadVersion(u16, u16),
    /// Capabilities that cannot be read.
    #[error("the version's capabilities cannot be read: {0}")]
    BadCapabilities(String),
    /// The device has been closed, or the service ends.
    #[error("the device is gone")]
    Gone,
    /// A second client while one is connected.
    #[error("a second client was turned away")]
    SecondClient,

    /// The device takes no client.
    #[error(transparent)]
    NotReady(#[from] NotReady),

    /// A command that the protocol does not have.
    #[error("command {0} is not one of the protocol")]
    UnknownCommand(u16),
    /// Known, and not served.
    #[error("{0} is not supported")]
    NotSupported(&'static str),
    /// Not the size that the command has.
    #[error("command {command} with {size} bytes: it has {wanted}")]
    BadSize {
        /// Which command.
        command: u16,
        /// Bytes found, without the header.
        size: usize,
        /// Bytes that it should have.
        wanted: usize,
    },
    /// Too few or too many file descriptors.
    #[error("command {command} with {found} file descriptors: it has {wanted}")]
    BadFiles {
        /// Which command.
        command: u16,
        /// Descriptors that came; those beyond the most of a message are not counted.
        found: usize,
        /// Descriptors that it should have.
        wanted: usize,
    },
    /// A field that contradicts the protocol or the other fields.
    #[error("{0}")]
    BadValue(&'static str),
    /// A region that the device does not have, or bytes beyond its end.
    #[error("region {region} has no bytes {offset:#x}+{count:#x}")]
    NoSuchBytes {
        /// Which region.
        region: u32,
        /// First byte.
        offset: u64,
        /// How many.
        count: u32,
    },
    /// Interrupts that the device does not have.
    #[error("the device has no interrupts {start}+{count} of index {index}")]
    NoSuchIrq {
        /// Index, as VFIO counts.
        index: u32,
        /// First.
        start: u32,
        /// How many.
        count: u32,
    },
    /// A descriptor that is not an eventfd: nobody may block on it.
    #[error("the descriptor of an interrupt is not an eventfd")]
    NotAnEventfd,
    /// This system cannot raise eventfds without waiting for who has them.
    #[error(
        "interrupts cannot be sent: the kernel gives neither Linux AIO (fs.aio-max-nr is used up?) nor io_uring: {0}"
    )]
    NoInterrupts(std::io::Error),
    /// Part of the range is mapped.
    #[error("DMA range {0:#x}+{1:#x} is mapped already")]
    Exists(u64, u64),
    /// More than [`ioplane_memory::MAX_REGIONS`].
    #[error("more DMA ranges than were agreed on")]
    TooManyMaps,
    /// Memory that cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// The device would not become quiescent, not by force either.
    #[error("the device did not become quiescent: {0}")]
    NotQuiescent(String),
    /// The device could not do it.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A reset that the client asked for has not happened.
    #[error("{0}")]
    Failed(String),
    /// The device could not take an interrupt's wire.
    #[error(transparent)]
    Wire(#[from] WireError),
}

impl ClientFault {
    /// A short name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            ClientFault::Closed => "closed",
            ClientFault::Deaf => "deaf",
            ClientFault::Broken(_) => "broken",
            ClientFault::BadLength(_) => "bad_length",
            ClientFault::NotACommand(_) => "not_a_command",
            ClientFault::UnaskedAnswer(_) => "unasked_answer",
            ClientFault::TooManyCommands => "too_many_commands",
            ClientFault::NoVersion(_) => "no_version",
            ClientFault::BadVersion(..) => "bad_version",
            ClientFault::BadCapabilities(_) => "bad_capabilities",
            ClientFault::Gone => "gone",
            ClientFault::SecondClient => "second_client",
            ClientFault::NotReady(NotReady::Kept(_)) => "kept",
            ClientFault::NotReady(NotReady::Unusable(_)) => "unusable",
            ClientFault::UnknownCommand(_) => "unknown_command",
            ClientFault::NotSupported(_) => "not_supported",
            ClientFault::BadSize { .. } => "bad_size",
            ClientFault::BadFiles { .. } => "bad_descriptors",
            ClientFault::BadValue(_) => "bad_value",
            ClientFault::NoSuchBytes { .. } => "no_such_bytes",
            ClientFault::NoSuchIrq { .. } => "no_such_irq",
            ClientFault::NotAnEventfd => "not_an_eventfd",
            ClientFault::NoInterrupts(_) => "no_interrupts",
            ClientFault::Exists(..) => "dma_overlap",
            ClientFault::TooManyMaps => "too_many_maps",
            ClientFault::Memory(error) => error.name(),
            ClientFault::NotQuiescent(_) => "not_quiescent",
            ClientFault::Device(_) => "device",
            ClientFault::Failed(_) => "not_reset",
            ClientFault::Wire(_) => "wire",
        }
    }

    /// The error number that the client is told, or none if the connection ends.
    pub fn errno(&self) -> Option<Errno> {
        Some(match self {
            ClientFault::Closed
            | ClientFault::Deaf
            | ClientFault::Broken(_)
            | ClientFault::BadLength(_)
            | ClientFault::NotACommand(_)
            | ClientFault::UnaskedAnswer(_)
            | ClientFault::TooManyCommands
            | ClientFault::NoVersion(_)
            | ClientFault::BadVersion(..)
            | ClientFault::BadCapabilities(_)
            | ClientFault::Gone
            | ClientFault::SecondClient
            | ClientFault::NotReady(_) => return None,
            ClientFault::UnknownCommand(_) => Errno::NOSYS,
            ClientFault::NotSupported(_) => Errno::NOTSUP,
            ClientFault::Exists(..) => Errno::EXIST,
            ClientFault::TooManyMaps => Errno::NOSPC,
            ClientFault::Memory(MapError::TooMany) => Errno::NOSPC,
            ClientFault::Memory(error) if matches!(error.name(), "too_many_mappings" | "too_much_pinned") => {
                Errno::NOSPC
            }
            ClientFault::Memory(MapError::Mapping(MappingError::Os(errno))) => *errno,
            ClientFault::NotQuiescent(_) => Errno::BUSY,
            ClientFault::NoInterrupts(_)
            | ClientFault::Device(_)
            | ClientFault::Failed(_)
            | ClientFault::Wire(WireError::Below { .. }) => Errno::IO,
            _ => Errno::INVAL,
        })
    }
}
