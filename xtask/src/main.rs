//! ioplane-xtask
fn main() {}
