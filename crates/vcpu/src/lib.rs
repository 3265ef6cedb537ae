//! A vCPU from the side of the process that runs it: what a guest does between two device accesses is interpreted on the
//! registers that KVM shares, so that a cluster of accesses takes one exit.
//!
//! ```text
//!   KVM_RUN returns with an access; the VMM answers it and calls KVM_RUN again
//!        |
//!   Interpreter::run  <- GeneralRegisters, SystemRegisters    what kvm_run shares (KVM_CAP_SYNC_REGS)
//!        |            <- GuestSpace: TableWalk over MemorySlots     the guest's memory as the VMM has mapped it
//!        |            <- Platform                              kicks, time, which devices are KVM's own
//!   RunEnd::Access    -> the VMM as if KVM_RUN had returned; or
//!   RunEnd::Stopped   -> KVM_RUN itself
//! ```
//!
//! Unknown means stop, before any state has changed: the processor then runs the instruction in question. Nothing here
//! makes a system call, locks, or allocates during a run.
//!
//! Must not know: the daemon, devices, what a VMM is called. See docs/decisions/0040.

mod arithmetic;
pub mod batch;
mod host;
mod interpreter;
pub mod kvm;
mod memory;
pub mod paging;
pub mod registers;
pub mod segments;
mod slots;
mod space;

pub use arithmetic::OperandSize;
pub use host::resume_refused_access;
pub use interpreter::{Interpreter, PendingAccess, RunEnd, instruction_name};
pub use memory::{Denied, DeviceAccess, INSTRUCTION_BYTES, LinearMemory, Platform, RunBudget, StopReason};
pub use registers::{CodeMode, GeneralRegisters, SystemRegisters, UnsupportedMode};
pub use segments::CachedSegment;
pub use slots::{MemorySlot, MemorySlots, SlotError};
pub use space::{GuestSpace, TranslationCache};
