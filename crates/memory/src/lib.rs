//! ioplane-memory
