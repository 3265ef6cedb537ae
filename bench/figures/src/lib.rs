//! What every benchmark shares: the table of goals, the object that `--json` prints, what the machine is, a second host on it, and the comparison of two
//! builds.
//!
//! ```text
//!   bench, e2e's benchmarks --figures--> report::envelope --JSON--> goals: judged against the table
//!                                                           `------> docs/measurements/results/*.json --> goals.md
//! ```
//!
//! Must not know: how anything is measured.
#![allow(missing_docs, reason = "only benchmarks use it: a comment says what a name does not")]

pub mod cable;
pub mod compare;
pub mod goals;
pub mod machine;
pub mod plot;
pub mod report;
