//! What users, their programs and stored data see of ioplane, held against golden files: the HTTP interface, JSON of the command
//! line, help, metrics, configuration and state file. docs/guide/development.md says when such a file may change.

mod api;
mod command_line;
mod configuration;
mod contract;
#[path = "../daemon/mod.rs"]
mod daemon;
mod exits;
mod help;
mod metrics;
mod normalize;
mod recorder;
mod upgrade;
