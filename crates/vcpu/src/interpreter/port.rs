//! Port instructions, and how an access that a device has answered is completed.

use iced_x86::{Mnemonic, Register};

use super::operand::{Place, RegisterOperand};
use super::{Done, Halt, Step};
use crate::arithmetic::OperandSize;
use crate::memory::{DeviceAccess, LinearMemory, Platform, StopReason};
use crate::registers::{GeneralRegisters, RCX, RDI, RDX, RSI, rflags};

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);
const PAGE: u64 = 4096;

/// An instruction that waits for its device. The registers are still those before it: dropping this is a stop.
#[derive(Debug)]
#[must_use = "the device has been asked: complete the access, or say why it is dropped"]
pub struct PendingAccess {
    /// Where it goes on.
    pub(super) rip: u64,
    /// Of the registers that hold addresses and count.
    pub(super) address: OperandSize,
    pub(super) destination: Destination,
}

/// What an instruction does with the answer.
#[derive(Debug)]
pub(super) enum Destination {
    /// A write: nothing comes back.
    None,
    /// A read of memory goes to a register.
    Register { register: RegisterOperand, size: OperandSize, signed: bool },
    /// IN goes to AL, AX or EAX.
    Accumulator { size: OperandSize },
    /// INS goes to memory, from this linear address upwards.
    Input { linear: u64, size: OperandSize, count: u32, repeated: bool },
    /// OUTS has been read already.
    Output { size: OperandSize, count: u32, repeated: bool },
}

impl PendingAccess {
    /// Whether the instruction moves one element between RAX and its operand, so that RIP and RAX are all that changes.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self.destination, Destination::None | Destination::Accumulator { .. })
    }

    /// Whether what is read goes to memory (INS).
    pub(crate) fn stores(&self) -> bool {
        matches!(self.destination, Destination::Input { .. })
    }

    /// `store` is called with linear address, size and value of each element that INS has read.
    pub(super) fn finish(
        self,
        next: &mut GeneralRegisters,
        data: &[u8],
        value: u64,
        mut store: impl FnMut(u64, OperandSize, u64),
    ) {
        next.rip = self.rip;
        match self.destination {
            Destination::None => {}
            Destination::Register { register, size, signed } => {
                let value = value & size.mask();
                register.write(next, if signed { size.sign_extend(value) } else { value });
            }
            Destination::Accumulator { size } => {
                RegisterOperand::accumulator(size).write(next, element(data, 0, size));
            }
            Destination::Input { linear, size, count, repeated } => {
                for index in 0..u64::from(count) {
                    let to = linear.wrapping_add(index * size.bytes());
                    store(to, size, element(data, index, size));
                }
                advance(next, self.address, RDI, size, count, repeated);
            }
            Destination::Output { size, count, repeated } => {
                advance(next, self.address, RSI, size, count, repeated);
            }
        }
    }
}

fn advance(
    next: &mut GeneralRegisters,
    address: OperandSize,
    pointer: usize,
    size: OperandSize,
    count: u32,
    repeated: bool,
) {
    let count = u64::from(count);
    let beyond = next.gpr[pointer].wrapping_add(count * size.bytes());
    RegisterOperand::low(pointer, address).write(next, beyond);
    if repeated {
        let left = next.gpr[RCX].wrapping_sub(count);
        RegisterOperand::low(RCX, address).write(next, left);
    }
}

/// An element of the data page. Beyond the buffer there are zeros.
fn element(data: &[u8], index: u64, size: OperandSize) -> u64 {
    let start = usize::try_from(index * size.bytes()).unwrap_or(usize::MAX);
    let bytes = data.iter().skip(start).take(1 << size.shift());
    bytes.enumerate().fold(0, |value, (place, byte)| value | u64::from(*byte) << (8 * place))
}

fn put_element(data: &mut [u8], index: u64, size: OperandSize, value: u64) {
    let start = usize::try_from(index * size.bytes()).unwrap_or(usize::MAX);
    for (to, from) in data.iter_mut().skip(start).zip(value.to_le_bytes()).take(1 << size.shift()) {
        *to = from;
    }
}

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    /// IN, OUT, INS, OUTS: [`Ok`] only if a count of 0 asks for nothing.
    pub(super) fn port(&mut self, data: &mut [u8]) -> Option<Done> {
        Some(match self.instruction.mnemonic() {
            Mnemonic::In => self.port_in(),
            Mnemonic::Out => self.port_out(data),
            Mnemonic::Insb => self.port_string(OperandSize::Byte, false, data),
            Mnemonic::Insw => self.port_string(OperandSize::Word, false, data),
            Mnemonic::Insd => self.port_string(OperandSize::Dword, false, data),
            Mnemonic::Outsb => self.port_string(OperandSize::Byte, true, data),
            Mnemonic::Outsw => self.port_string(OperandSize::Word, true, data),
            Mnemonic::Outsd => self.port_string(OperandSize::Dword, true, data),
            _ => return None,
        })
    }

    /// What is left to do of an instruction that is complete with its answer.
    pub(super) fn pending(&self, destination: Destination) -> PendingAccess {
        PendingAccess { rip: self.next.rip, address: self.address, destination }
    }

    /// The port, if the guest may use it without a look at the TSS and it is the VMM's.
    fn port_number(&mut self, number: u64, size: OperandSize, write: bool) -> Result<u16, Halt> {
        if !self.system.io_privileged(self.next.rflags) {
            return Err(StopReason::Privilege.into());
        }
        let port = u16::try_from(number & 0xffff).map_err(|_| UNKNOWN)?;
        if !self.platform.port_leaves_kernel(port, size, write) {
            return Err(StopReason::KernelDevice.into());
        }
        Ok(port)
    }

    fn port_in(&mut self) -> Done {
        let (Place::Register(to), port) = (self.place(0)?, self.place(1)?) else { return Err(UNKNOWN) };
        let size = to.size();
        let number = self.read(port)?;
        let port = self.port_number(number, size, false)?;
        let pending = self.pending(Destination::Accumulator { size });
        Err(Halt::Access(DeviceAccess::PortRead { port, size, count: 1 }, pending))
    }

    fn port_out(&mut self, data: &mut [u8]) -> Done {
        let (port, Place::Register(from)) = (self.place(0)?, self.place(1)?) else { return Err(UNKNOWN) };
        let size = from.size();
        let number = self.read(port)?;
        let port = self.port_number(number, size, true)?;
        put_element(data, 0, size, from.read(&self.next));
        let pending = self.pending(Destination::None);
        Err(Halt::Access(DeviceAccess::PortWrite { port, size, count: 1 }, pending))
    }

    /// INS and OUTS. With REP, as many elements as one page and the data page have room for, and the VMM takes.
    fn port_string(&mut self, size: OperandSize, write: bool, data: &mut [u8]) -> Done {
        let repeated = self.instruction.has_rep_prefix();
        let known = self.string_operands()
            && !self.instruction.has_repne_prefix()
            && self.next.rflags & rflags::DF == 0;
        if !known {
            return Err(UNKNOWN);
        }
        let port = self.port_number(self.next.gpr[RDX], size, write)?;
        let wanted = if repeated { self.pointer(RCX) } else { 1 };
        if wanted == 0 {
            return Ok(());
        }
        let (segment, offset) = if write {
            (self.instruction.memory_segment(), self.pointer(RSI))
        } else {
            (Register::ES, self.pointer(RDI))
        };
        let linear = if write {
            self.linear(segment, offset, size.bytes())?
        } else {
            self.linear_writable(segment, offset, size.bytes())?
        };
        let mut room = (PAGE - linear % PAGE).min(data.len() as u64) / size.bytes();
        if self.is_checked(segment) {
            // Up to the end of the segment, and to where the offset begins at 0 again.
            let until_end = self.segment(segment)?.elements(offset, size.bytes());
            room = room.min(until_end).min((self.address.mask() + 1 - offset) / size.bytes());
        }
        let most = if write { self.platform.output_elements() } else { u64::MAX };
        let count = wanted.min(room).min(most);
        if count == 0 {
            return Err(UNKNOWN);
        }
        if write {
            for index in 0..count {
                let value = self.memory.load(linear.wrapping_add(index * size.bytes()), size)?;
                put_element(data, index, size, value);
            }
        } else {
            self.memory.check_store(linear, count * size.bytes())?;
        }
        let rip = if count < wanted { self.instruction.ip() } else { self.next.rip };
        let count = u32::try_from(count).map_err(|_| UNKNOWN)?;
        let (destination, access) = if write {
            (Destination::Output { size, count, repeated }, DeviceAccess::PortWrite { port, size, count })
        } else {
            (
                Destination::Input { linear, size, count, repeated },
                DeviceAccess::PortRead { port, size, count },
            )
        };
        Err(Halt::Access(access, PendingAccess { rip, address: self.address, destination }))
    }
}
