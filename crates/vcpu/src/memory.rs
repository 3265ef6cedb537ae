//! What the interpreter asks of its surroundings: the guest's linear memory, and what is decided outside of it.

use crate::arithmetic::OperandSize;
use crate::paging::TranslationFault;

/// The longest instruction, in bytes.
pub const INSTRUCTION_BYTES: usize = 15;

/// Why the interpreter stops. The state is that before the instruction at RIP, which the processor then runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The mode is not one that is interpreted.
    Mode,
    /// The instruction is not in the list, or not with these operands.
    Instruction,
    /// It would raise an exception: a divide error, a target that is not canonical, a misaligned operand.
    Exception,
    /// It is not allowed at this privilege level, or the TSS has to be asked.
    Privilege,
    /// It enables interrupts, or they are enabled, and one may wait: KVM delivers it when the guest is entered.
    InterruptWindow,
    /// The page tables do not allow the access as they stand.
    Translation(TranslationFault),
    /// An instruction other than a plain load or store touches a device.
    DeviceOperand,
    /// The device is KVM's own, or a write wakes an eventfd.
    KernelDevice,
    /// The page is logged, read-only or leaves its slot: a store must be KVM's.
    Slot,
    /// Nothing is behind the VMM's mapping: a file that was truncated, a page that is not mapped any more.
    HostFault,
    /// A locked operation crosses a cache line, or others changed the word in every attempt.
    Atomic,
    /// As many instructions as the budget has.
    InstructionLimit,
    /// As many device accesses as the budget has.
    AccessLimit,
    /// The time of the budget is up: interrupts that KVM holds are seen only when the guest is entered.
    TimeLimit,
    /// The VMM wants the vCPU: `immediate_exit` or `request_interrupt_window`.
    Kicked,
}

/// Why an access to linear memory was not carried out. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// No slot has this guest-physical address: a device has it, or nothing.
    Device(u64),
    /// The processor must do it.
    Stop(StopReason),
}

/// The guest's memory by linear address, as the vCPU sees it now.
///
/// Each method either does all of what it says or returns [`Denied`] and has changed nothing. An operand is accessed
/// by a single instruction of its size unless it crosses a page. An address that is not canonical is denied.
pub trait LinearMemory {
    /// Copies instruction bytes and returns how many follow `linear` without a fault, at most 15.
    fn fetch(&mut self, linear: u64, bytes: &mut [u8; INSTRUCTION_BYTES]) -> Result<usize, Denied>;

    /// Loads an operand, zero-extended.
    fn load(&mut self, linear: u64, size: OperandSize) -> Result<u64, Denied>;

    /// Stores the low bits of `value`.
    fn store(&mut self, linear: u64, size: OperandSize, value: u64) -> Result<(), Denied>;

    /// Writes `new` if `current` is there, as one atomic step and a full fence, and returns what was there.
    fn compare_exchange(
        &mut self,
        linear: u64,
        size: OperandSize,
        current: u64,
        new: u64,
    ) -> Result<u64, Denied>;

    /// The same for 16 bytes. An address that is no multiple of 16 is denied.
    fn compare_exchange_wide(&mut self, linear: u64, current: u128, new: u128) -> Result<u128, Denied>;

    /// Whether `bytes` bytes, all in one page, could be stored now.
    fn check_store(&mut self, linear: u64, bytes: u64) -> Result<(), Denied>;
}

/// What is known outside the interpreter. Called on the vCPU's thread; nothing here may make a system call that
/// the VMM would not make.
pub trait Platform {
    /// The host's time stamp counter.
    fn cycles(&mut self) -> u64;

    /// Whether the VMM wants the vCPU back.
    fn kicked(&mut self) -> bool;

    /// Whether an access to these ports leaves KVM for the VMM: not PIC, PIT, ELCR, nor an ioeventfd.
    fn port_leaves_kernel(&mut self, port: u16, size: OperandSize, write: bool) -> bool;

    /// Whether an access to this guest-physical address leaves KVM for the VMM: not the APICs', nor an ioeventfd.
    fn address_leaves_kernel(&mut self, address: u64, size: OperandSize, write: bool) -> bool;

    /// Whether the guest may go on here after it has enabled interrupts: none is known to wait. One that KVM raises itself is
    /// taken when the run ends.
    fn may_enable_interrupts(&mut self) -> bool {
        false
    }

    /// Whether an interrupt is known to wait, so that a guest that has them enabled is not to be kept from it.
    fn interrupt_waits(&mut self) -> bool {
        false
    }

    /// How many elements an access of REP OUTS may carry. KVM's own carry one, so that is all that some VMMs expect; QEMU takes
    /// a page full.
    fn output_elements(&mut self) -> u64;

    /// The guest's time stamp counter now, if it is known exactly.
    fn guest_cycles(&mut self) -> Option<u64> {
        None
    }

    /// What RDTSCP gives in ECX, if the guest has that instruction and the number is known.
    fn guest_time_stamp_auxiliary(&mut self) -> Option<u32> {
        None
    }
}

/// An access that a device must answer. What a port access carries is in the buffer given to
/// [`Interpreter::run`](crate::Interpreter::run), as in the data page of `kvm_run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceAccess {
    /// `count` reads of `port`, to be put into the buffer one after the other.
    PortRead {
        /// The port.
        port: u16,
        /// Of one element.
        size: OperandSize,
        /// How many; more than one for INS with REP.
        count: u32,
    },
    /// `count` writes to `port` of what is in the buffer.
    PortWrite {
        /// The port.
        port: u16,
        /// Of one element.
        size: OperandSize,
        /// How many; more than one for OUTS with REP.
        count: u32,
    },
    /// A read of a guest-physical address.
    MemoryRead {
        /// Guest-physical.
        address: u64,
        /// Of the operand.
        size: OperandSize,
    },
    /// A write to a guest-physical address.
    MemoryWrite {
        /// Guest-physical.
        address: u64,
        /// Of the operand.
        size: OperandSize,
        /// What is written.
        value: u64,
    },
}

/// What one cluster may spend. It is carried from one device access to the next and made anew when the guest has
/// been entered.
#[derive(Clone, Copy, Debug)]
pub struct RunBudget {
    /// Instructions left; each element of a string instruction counts as one.
    pub instructions: u32,
    /// Device accesses left.
    pub accesses: u32,
    /// When to stop, by [`Platform::cycles`].
    pub deadline: u64,
}
