//! ioplane-storage
