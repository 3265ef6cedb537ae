//! Tests of the machine and of the verifier, and the driver that the models' tests play.

mod draw;
mod machine;
pub mod play;
mod properties;
mod small;
mod verify;
