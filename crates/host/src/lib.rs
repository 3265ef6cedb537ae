//! ioplane-host
