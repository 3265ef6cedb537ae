//! ioplane-e2e
