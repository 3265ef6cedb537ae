//! ioplane-testkit
