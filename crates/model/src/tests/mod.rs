//! Tests of the machine and of the verifier, on made-up tables. Those that need a real card's are in ioplane-passthrough.

mod functions;
mod machine;
mod small;
mod verify;
