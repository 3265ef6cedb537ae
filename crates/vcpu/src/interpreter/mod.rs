//! The interpreter of a vCPU: runs code in 64-bit mode, in flat 32-bit mode and of 16 bits, from the guest's registers until the next device
//! access.
//!
//! ```text
//!   run --> RunEnd::Access(access, pending) -- the VMM answers --> complete(pending) --> run ...
//!       \-> RunEnd::Stopped(reason)          -- registers back to KVM, which enters the guest
//! ```
//!
//! **Unknown means stop, before any state has changed.** An instruction works on a copy of the registers, which is
//! put in place at its end. It stores to memory at most once, as the last thing that can be denied. A device access
//! leaves the registers as they are until it is completed, so dropping the [`PendingAccess`] is a stop as well.
//! String instructions are complete after each element, as they are for the processor.
//!
//! A run allocates nothing: [`Interpreter::new`] has allocated what is needed.

mod alu;
mod control;
mod data;
mod flags;
mod operand;
mod port;
mod string;

use iced_x86::{CodeSize, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};

pub use port::PendingAccess;

use crate::arithmetic::OperandSize;
use crate::memory::{Denied, DeviceAccess, INSTRUCTION_BYTES, LinearMemory, Platform, RunBudget, StopReason};
use crate::registers::{CodeMode, GeneralRegisters, SystemRegisters, rflags};
use crate::segments::{CS, SS};

/// How a run ended.
#[derive(Debug)]
pub enum RunEnd {
    /// A device must answer; then [`Interpreter::complete`], or drop the pending access to stop before it.
    Access(DeviceAccess, PendingAccess),
    /// The processor must go on.
    Stopped(StopReason),
}

/// Why an instruction was not completed.
pub(crate) enum Halt {
    Stop(StopReason),
    Access(DeviceAccess, PendingAccess),
}

impl From<Denied> for Halt {
    /// Where the operand of an instruction turns out to be a device's, and that instruction has no device access.
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Device(_) => Halt::Stop(StopReason::DeviceOperand),
            Denied::Stop(reason) => Halt::Stop(reason),
        }
    }
}

impl From<StopReason> for Halt {
    fn from(reason: StopReason) -> Self {
        Halt::Stop(reason)
    }
}

pub(crate) type Done = Result<(), Halt>;

/// How often the clock and the VMM's kick are looked at, in instructions.
const LOOK_EVERY: u32 = 8;
/// Elements that a string instruction with REP has done at most before all else is looked at again.
const ELEMENTS: u32 = 32;
/// Decoded instructions that are kept; a power of two.
const DECODED: usize = 256;

/// An instruction that was decoded before, with the bytes that it was decoded from.
#[derive(Clone, Copy)]
struct Decoded {
    instruction: Instruction,
    bytes: [u8; INSTRUCTION_BYTES],
}

/// The interpreter of one vCPU.
pub struct Interpreter {
    decoded: Box<[Decoded]>,
    executed: u64,
    last: Mnemonic,
    /// Anything but IN and OUT stops.
    only_ports: bool,
}

impl Default for Interpreter {
    fn default() -> Self {
        Self::new()
    }
}

impl Interpreter {
    /// Allocates, and has the decoder build its tables.
    pub fn new() -> Self {
        let _ = Decoder::new(64, &[0x90], DecoderOptions::NONE).decode();
        let empty = Decoded { instruction: Instruction::default(), bytes: [0; INSTRUCTION_BYTES] };
        let decoded = vec![empty; DECODED].into_boxed_slice();
        Self { decoded, executed: 0, last: Mnemonic::INVALID, only_ports: false }
    }

    /// Instructions completed since [`Interpreter::new`], elements of strings counted singly.
    pub fn executed(&self) -> u64 {
        self.executed
    }

    /// What the last instruction is that was decoded: the one at which a run has stopped, unless it could not be
    /// fetched. The number is the decoder's; [`instruction_name`] knows it.
    pub fn last_instruction(&self) -> usize {
        self.last as usize
    }

    /// Runs instructions until a device access or a stop. `general` is then the state before the instruction that
    /// ended the run. `data` receives what a port write carries.
    pub fn run<M: LinearMemory, P: Platform>(
        &mut self,
        general: &mut GeneralRegisters,
        system: &SystemRegisters,
        memory: &mut M,
        platform: &mut P,
        data: &mut [u8],
        budget: &mut RunBudget,
    ) -> RunEnd {
        let mut until_look = 0_u32;
        loop {
            if until_look == 0 {
                if platform.kicked() {
                    return RunEnd::Stopped(StopReason::Kicked);
                }
                if general.rflags & rflags::IF != 0 && platform.interrupt_waits() {
                    return RunEnd::Stopped(StopReason::InterruptWindow);
                }
                if platform.cycles() >= budget.deadline {
                    return RunEnd::Stopped(StopReason::TimeLimit);
                }
                until_look = LOOK_EVERY;
            }
            until_look -= 1;
            if budget.instructions == 0 {
                return RunEnd::Stopped(StopReason::InstructionLimit);
            }
            match self.step(general, system, memory, platform, data, budget.instructions) {
                Ok(executed) => budget.instructions = budget.instructions.saturating_sub(executed),
                Err(Halt::Stop(reason)) => return RunEnd::Stopped(reason),
                Err(Halt::Access(access, pending)) => {
                    if budget.accesses == 0 {
                        return RunEnd::Stopped(StopReason::AccessLimit);
                    }
                    if platform.kicked() {
                        return RunEnd::Stopped(StopReason::Kicked);
                    }
                    budget.accesses -= 1;
                    return RunEnd::Access(access, pending);
                }
            }
        }
    }

    /// Completes the instruction whose device access has been answered. `data` is the buffer with what ports gave,
    /// `value` what a memory read gave.
    pub fn complete<M: LinearMemory>(
        &mut self,
        pending: PendingAccess,
        general: &mut GeneralRegisters,
        memory: &mut M,
        data: &[u8],
        value: u64,
    ) {
        self.complete_storing(pending, general, data, value, |to, size, value| {
            // It could be stored when the device was asked. If the VMM has taken the memory away in between,
            // a store goes where no device answers, and is lost there too.
            let _ = memory.store(to, size, value);
        });
    }

    /// The same for what stores nothing: all but INS.
    pub(crate) fn complete_in_registers(
        &mut self,
        pending: PendingAccess,
        general: &mut GeneralRegisters,
        data: &[u8],
        value: u64,
    ) {
        debug_assert!(!pending.stores());
        self.complete_storing(pending, general, data, value, |_, _, _| {});
    }

    fn complete_storing(
        &mut self,
        pending: PendingAccess,
        general: &mut GeneralRegisters,
        data: &[u8],
        value: u64,
        store: impl FnMut(u64, OperandSize, u64),
    ) {
        let mut next = *general;
        pending.finish(&mut next, data, value, store);
        *general = next;
        self.executed += 1;
    }

    /// What the instruction at RIP asks of a device, if it is IN or OUT. Another one, which other vCPUs may have put there, is not carried
    /// out.
    pub(crate) fn port_access<M: LinearMemory, P: Platform>(
        &mut self,
        general: &GeneralRegisters,
        system: &SystemRegisters,
        memory: &mut M,
        platform: &mut P,
    ) -> Option<(DeviceAccess, PendingAccess)> {
        let (mut unchanged, mut data) = (*general, [0; 8]);
        self.only_ports = true;
        let end = self.instruction(&mut unchanged, system, memory, platform, &mut data, 1);
        self.only_ports = false;
        match end {
            Err(Halt::Access(access, pending)) => Some((access, pending)),
            _ => None,
        }
    }

    fn step<M: LinearMemory, P: Platform>(
        &mut self,
        general: &mut GeneralRegisters,
        system: &SystemRegisters,
        memory: &mut M,
        platform: &mut P,
        data: &mut [u8],
        most: u32,
    ) -> Result<u32, Halt> {
        let mut done = self.instruction(general, system, memory, platform, data, most)?;
        if done.holds_interrupts {
            // Both or neither: between them no interrupt may be taken, and KVM would not know that.
            let held = self.instruction(&mut done.general, system, memory, platform, data, 1);
            let Ok(held) = held else { return Err(StopReason::InterruptWindow.into()) };
            done = Executed { count: done.count + held.count, ..held };
        }
        *general = done.general;
        self.executed += u64::from(done.count);
        Ok(done.count)
    }

    /// One instruction from these registers, or as many elements of it as allowed. The registers are put in place by the caller, except
    /// those after an element that others follow.
    fn instruction<M: LinearMemory, P: Platform>(
        &mut self,
        general: &mut GeneralRegisters,
        system: &SystemRegisters,
        memory: &mut M,
        platform: &mut P,
        data: &mut [u8],
        most: u32,
    ) -> Result<Executed, Halt> {
        // Each time, since POPF and IRET change the flags that matter here.
        let (Some(mode), None) = (system.mode(), system.unsupported(general.rflags)) else {
            return Err(StopReason::Mode.into());
        };
        let word = word(mode);
        let mut bytes = [0; INSTRUCTION_BYTES];
        self.last = Mnemonic::INVALID;
        let (linear, within) = code_at(mode, system, general.rip)?;
        let length = memory.fetch(linear, &mut bytes)?.min(within);
        let instruction = self.decode(general.rip, word, &bytes, length)?;
        self.last = instruction.mnemonic();
        if self.only_ports && !matches!(self.last, Mnemonic::In | Mnemonic::Out) {
            return Err(StopReason::Instruction.into());
        }
        let mut step = Step {
            instruction: &instruction,
            bytes: &bytes,
            next: *general,
            complete: general,
            word,
            address: if mode == CodeMode::Code16 { address_size(&instruction) } else { word },
            stack: if mode == CodeMode::Code16 && system.segments[SS].big {
                OperandSize::Dword
            } else {
                word
            },
            executed: 1,
            holds_interrupts: false,
            most: most.min(ELEMENTS),
            system,
            memory,
            platform,
        };
        step.next.rip = instruction.next_ip();
        step.check_target(step.next.rip)?;
        step.execute(data)?;
        // A branch; those that store have looked themselves.
        step.check_target(step.next.rip)?;
        let Step { next: general, executed: count, holds_interrupts, .. } = step;
        Ok(Executed { general, count, holds_interrupts })
    }

    /// Decodes, or takes what the same bytes at the same address were decoded to before.
    fn decode(
        &mut self,
        rip: u64,
        word: OperandSize,
        bytes: &[u8; INSTRUCTION_BYTES],
        length: usize,
    ) -> Result<Instruction, StopReason> {
        let size = match word {
            OperandSize::Qword => CodeSize::Code64,
            OperandSize::Dword => CodeSize::Code32,
            OperandSize::Byte | OperandSize::Word => CodeSize::Code16,
        };
        // Of all bits, so that neighbours as well as functions a page apart have places of their own.
        let mixed = rip ^ rip >> 8;
        let index = usize::try_from(mixed & (DECODED as u64 - 1)).unwrap_or(0);
        let Some(place) = self.decoded.get_mut(index) else { return Err(StopReason::Instruction) };
        let known = place.instruction.len();
        if known != 0
            && known <= length
            && place.instruction.ip() == rip
            && place.instruction.code_size() == size
            && place.bytes.get(..known) == bytes.get(..known)
        {
            return Ok(place.instruction);
        }
        let available = bytes.get(..length).unwrap_or(bytes);
        let instruction = Decoder::with_ip(word.bits(), available, rip, DecoderOptions::NONE).decode();
        if instruction.is_invalid() {
            return Err(StopReason::Instruction);
        }
        *place = Decoded { instruction, bytes: *bytes };
        Ok(instruction)
    }
}

/// The name of an instruction by [`Interpreter::last_instruction`], in capitals.
pub fn instruction_name(number: usize) -> String {
    match Mnemonic::try_from(number) {
        Ok(Mnemonic::INVALID) | Err(_) => "unknown".into(),
        Ok(mnemonic) => format!("{mnemonic:?}").to_uppercase(),
    }
}

/// What an instruction has made of the registers.
struct Executed {
    general: GeneralRegisters,
    count: u32,
    holds_interrupts: bool,
}

/// The size of RIP, and of addresses and the stack's words unless the instruction has others.
fn word(mode: CodeMode) -> OperandSize {
    match mode {
        CodeMode::Long => OperandSize::Qword,
        CodeMode::Flat32 => OperandSize::Dword,
        CodeMode::Code16 => OperandSize::Word,
    }
}

/// The last offset at which 16-bit code is interpreted. The processor goes on behind it, where the limit allows.
const LAST_16: u64 = 0xffff;

/// The linear address of an instruction, and how many bytes of it its segment has.
fn code_at(mode: CodeMode, system: &SystemRegisters, rip: u64) -> Result<(u64, usize), StopReason> {
    if mode != CodeMode::Code16 {
        return Ok((rip, INSTRUCTION_BYTES));
    }
    let code = &system.segments[CS];
    let linear = code.linear(rip, 1).filter(|_| rip <= LAST_16).ok_or(StopReason::Exception)?;
    let last = LAST_16.min(code.limit.into());
    Ok((
        linear,
        usize::try_from(last - rip + 1).map_or(INSTRUCTION_BYTES, |bytes| bytes.min(INSTRUCTION_BYTES)),
    ))
}

/// In 16-bit code: of the registers by which a string instruction addresses and counts, or by which LOOP and JCXZ count.
fn address_size(instruction: &Instruction) -> OperandSize {
    let wide = instruction.op_kinds().any(|kind| matches!(kind, OpKind::MemorySegESI | OpKind::MemoryESEDI))
        || control::counts_by_ecx(instruction.code());
    if wide { OperandSize::Dword } else { OperandSize::Word }
}

/// One instruction on its way.
pub(crate) struct Step<'a, M, P> {
    instruction: &'a Instruction,
    bytes: &'a [u8; INSTRUCTION_BYTES],
    /// The registers as they will be.
    next: GeneralRegisters,
    /// Those of the last element that is complete, so that a fault of ours in the next one does nothing twice.
    complete: &'a mut GeneralRegisters,
    /// See [`word`].
    word: OperandSize,
    /// Of registers that hold the addresses of strings, and that count.
    address: OperandSize,
    /// Of the register that holds the address of the stack.
    stack: OperandSize,
    /// What it counts as, and may count as at most: each element of a string instruction is one.
    executed: u32,
    most: u32,
    /// It is an STI that holds interrupts back until the next instruction is done.
    holds_interrupts: bool,
    system: &'a SystemRegisters,
    memory: &'a mut M,
    platform: &'a mut P,
}

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    /// Whether instructions may be at an offset.
    fn check_target(&self, rip: u64) -> Result<(), StopReason> {
        let allowed = match self.word {
            OperandSize::Word => rip <= LAST_16.min(self.system.segments[CS].limit.into()),
            _ => self.system.canonical(rip),
        };
        if allowed { Ok(()) } else { Err(StopReason::Exception) }
    }

    /// Each part knows its instructions and says `None` to others.
    fn execute(&mut self, data: &mut [u8]) -> Done {
        self.data_movement()
            .or_else(|| self.arithmetic())
            .or_else(|| self.control())
            .or_else(|| self.flag_operation())
            .or_else(|| self.string())
            .or_else(|| self.port(data))
            .unwrap_or(Err(Halt::Stop(StopReason::Instruction)))
    }
}
