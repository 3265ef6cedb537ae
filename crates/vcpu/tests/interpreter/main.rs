//! The interpreter against the processor, with accesses that are refused, and with devices.

#![allow(missing_docs, clippy::unwrap_used)]

mod arena;
mod clock;
mod code16;
mod coverage;
mod devices;
mod differential;
mod generate;
mod kicks;
mod native;
#[path = "../quiet/mod.rs"]
mod quiet;
mod real;
mod refused;
mod rig;
mod segments32;
mod strings;
