//! ioplane-bench
fn main() {}
