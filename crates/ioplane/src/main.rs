//! ioplane
fn main() {}
