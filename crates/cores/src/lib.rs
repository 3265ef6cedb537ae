//! ioplane-cores
