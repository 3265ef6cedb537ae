//! ioplane-load
fn main() {}
