//! Tests of the machine, and the driver that others play.

mod machine;
pub mod play;
mod properties;
