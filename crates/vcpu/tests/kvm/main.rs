//! KVM_RUN with and without clustering: the VMM sees the same accesses, the guest the same answers.

#![allow(missing_docs, clippy::unwrap_used)]

mod answers;
mod batch;
mod calls;
mod clock;
mod every_step;
mod fake;
mod hotplug;
mod migration;
mod paged32;
mod program;
#[path = "../quiet/mod.rs"]
mod quiet;
mod real;
mod reset;
mod same;
mod timer;
