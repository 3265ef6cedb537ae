//! What a pool of cores could not do.

/// What a pool could not do.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No core has that number.
    #[error("there is no I/O core {0}: see `ioplane core list`")]
    NoSuchCore(u32),
    /// A core with that number runs.
    #[error("there is an I/O core {0} already: see `ioplane core list`")]
    Taken(u32),
    /// It still has queues.
    #[error("I/O core {core} still serves {queues} queues: move them away first: `ioplane core drain`")]
    Occupied {
        /// Which core.
        core: u32,
        /// How many queues.
        queues: u32,
    },
    /// The kernel gave no thread or no descriptor.
    #[error(
        "I/O core {core} could not be started: {source} (are the limits on threads or open files too low?)"
    )]
    Start {
        /// Which core.
        core: u32,
        /// What the kernel said.
        source: std::io::Error,
    },
}
