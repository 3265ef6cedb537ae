//! Tests of the tables, and the driver that the models' own tests play.

mod draw;
mod knows;
pub mod play;
mod properties;
mod verify;
