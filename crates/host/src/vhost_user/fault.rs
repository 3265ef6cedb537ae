//! What a front end can do wrong. Each ends its connection, counted by name; nobody else notices.

use ioplane_memory::MapError;

/// A violation of the vhost-user protocol, or a failure to do what a message asks.
#[derive(Debug, thiserror::Error)]
pub enum PeerFault {
    /// The other side closed the connection: not a fault, and the usual end.
    #[error("the front end closed the connection")]
    Closed,
    /// It does not read what it asked for.
    #[error("the front end does not read its replies")]
    Deaf,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Broken(std::io::Error),
    /// Flags of another protocol version, or reserved ones.
    #[error("a message with flags {0:#x}: not vhost-user version 1")]
    BadFlags(u32),
    /// A request number that this build does not serve.
    #[error("request {0} is not one that was negotiated")]
    UnknownRequest(u32),
    /// Larger than any message.
    #[error("a message of {0} bytes: larger than any of the protocol")]
    Huge(u32),
    /// Not the size that the request has.
    #[error("request {request} with {size} bytes: it has {wanted}")]
    BadSize {
        /// Which request.
        request: u32,
        /// Size found.
        size: usize,
        /// Size that it should have.
        wanted: usize,
    },
    /// Too few or too many file descriptors.
    #[error("request {request} with {found} file descriptors: it has {wanted}")]
    BadFiles {
        /// Which request.
        request: u32,
        /// Descriptors that came.
        found: usize,
        /// Descriptors that it should have.
        wanted: usize,
    },
    /// A queue that the device does not have.
    #[error("queue {0} does not exist")]
    NoSuchQueue(u32),
    /// A ring that runs is to be moved or resized.
    #[error("queue {0} runs: its ring cannot be changed before it is stopped")]
    RingInUse(u32),
    /// Features that were not offered, or changed under running rings.
    #[error("features {0:#x} were not offered, or are changed while rings run")]
    BadFeatures(u64),
    /// A request that belongs to a protocol feature that was not negotiated.
    #[error("request {0} needs a protocol feature that was not negotiated")]
    NotNegotiated(u32),
    /// A field that contradicts the protocol or the other fields.
    #[error("{0}")]
    BadValue(&'static str),
    /// A ring is to start, and the front end has sent no region of memory: its VMM has none that can be shared.
    #[error(
        "the VMM shares no memory of its guest: start it with shared memory (QEMU: -object \
         memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem; libvirt: <memoryBacking> with memfd and shared)"
    )]
    NoSharedMemory,
    /// A descriptor that is not an eventfd: a core must never block on it.
    #[error("the descriptor for {0} is not an eventfd")]
    NotAnEventfd(&'static str),
    /// This system cannot raise eventfds without waiting for who has them.
    #[error(
        "interrupts cannot be sent: the kernel gives neither Linux AIO (fs.aio-max-nr is used up?) nor io_uring: {0}"
    )]
    NoInterrupts(std::io::Error),
    /// Memory that cannot be mapped.
    #[error(transparent)]
    Memory(#[from] MapError),
    /// The rings of the same device run behind another of its sockets, and did not stop in time.
    #[error(
        "the rings of this device run behind its other socket: end the VM there, or let its migration finish"
    )]
    NotOwner,
    /// The queues would not become quiescent.
    #[error("the device did not become quiescent in time: {0}")]
    NotQuiescent(String),
    /// The device could not do it.
    #[error(transparent)]
    Device(#[from] ioplane_device::DeviceError),
}

impl PeerFault {
    /// A short name, for counters.
    pub fn name(&self) -> &'static str {
        match self {
            PeerFault::Closed => "closed",
            PeerFault::Deaf => "deaf",
            PeerFault::Broken(_) => "broken",
            PeerFault::BadFlags(_) => "bad_flags",
            PeerFault::UnknownRequest(_) => "unknown_request",
            PeerFault::Huge(_) => "huge_message",
            PeerFault::BadSize { .. } => "bad_size",
            PeerFault::BadFiles { .. } => "bad_descriptors",
            PeerFault::NoSuchQueue(_) => "no_such_queue",
            PeerFault::RingInUse(_) => "ring_in_use",
            PeerFault::BadFeatures(_) => "bad_features",
            PeerFault::NotNegotiated(_) => "not_negotiated",
            PeerFault::BadValue(_) => "bad_value",
            PeerFault::NoSharedMemory => "no_shared_memory",
            PeerFault::NotAnEventfd(_) => "not_an_eventfd",
            PeerFault::NoInterrupts(_) => "no_interrupts",
            PeerFault::Memory(error) => error.name(),
            PeerFault::NotOwner => "not_owner",
            PeerFault::NotQuiescent(_) => "not_quiescent",
            PeerFault::Device(_) => "device",
        }
    }
}
