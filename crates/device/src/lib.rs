//! ioplane-device
