//! Arithmetic on operands: where they come from and where the result goes. What it is, the processor says.

use iced_x86::{Mnemonic, OpKind};

use super::operand::Place;
use super::{Done, Halt, Step};
use crate::arithmetic::{self, Binary, OperandSize, Shift, Unary, Wide};
use crate::memory::{LinearMemory, Platform, StopReason};
use crate::registers::{RAX, RBX, RCX, RDX, rflags};

const UNKNOWN: Halt = Halt::Stop(StopReason::Instruction);

impl<M: LinearMemory, P: Platform> Step<'_, M, P> {
    pub(super) fn arithmetic(&mut self) -> Option<Done> {
        use Mnemonic as N;
        Some(match self.instruction.mnemonic() {
            N::Add => self.binary(Binary::Add),
            N::Or => self.binary(Binary::Or),
            N::Adc => self.binary(Binary::Adc),
            N::Sbb => self.binary(Binary::Sbb),
            N::And => self.binary(Binary::And),
            N::Sub => self.binary(Binary::Sub),
            N::Xor => self.binary(Binary::Xor),
            N::Cmp => self.compare(Binary::Cmp),
            N::Test => self.compare(Binary::Test),
            N::Inc => self.unary(Unary::Inc),
            N::Dec => self.unary(Unary::Dec),
            N::Neg => self.unary(Unary::Neg),
            N::Not => self.unary(Unary::Not),
            N::Rol => self.shift(Shift::Rol),
            N::Ror => self.shift(Shift::Ror),
            N::Rcl => self.shift(Shift::Rcl),
            N::Rcr => self.shift(Shift::Rcr),
            N::Shl => self.shift(Shift::Shl),
            N::Shr => self.shift(Shift::Shr),
            N::Sar => self.shift(Shift::Sar),
            N::Shld => self.shift(Shift::ShlDouble),
            N::Shrd => self.shift(Shift::ShrDouble),
            N::Bsf => self.scan(Wide::ScanForward),
            N::Bsr => self.scan(Wide::ScanReverse),
            N::Tzcnt => self.scan(Wide::CountTrailing),
            N::Lzcnt => self.scan(Wide::CountLeading),
            N::Popcnt if !std::arch::is_x86_feature_detected!("popcnt") => Err(UNKNOWN),
            N::Popcnt => self.scan(Wide::Population),
            N::Bt => self.bit(Wide::BitTest),
            N::Bts => self.bit(Wide::BitSet),
            N::Btr => self.bit(Wide::BitReset),
            N::Btc => self.bit(Wide::BitComplement),
            N::Mul => self.multiply(false),
            N::Imul if self.instruction.op_count() == 1 => self.multiply(true),
            N::Imul => self.multiply_operands(),
            N::Div => self.divide(false),
            N::Idiv => self.divide(true),
            N::Xadd => self.exchange_add(),
            N::Cmpxchg => self.compare_exchange(),
            N::Cmpxchg8b => self.compare_exchange_pair(),
            N::Cmpxchg16b => self.compare_exchange_pair(),
            _ => return None,
        })
    }

    /// Reads the destination, computes and writes it back, in one atomic step if the prefix says so. `compute` gives
    /// the new value and RFLAGS from the old one.
    fn modify(
        &mut self,
        to: Place,
        size: OperandSize,
        compute: impl Fn(u64) -> (u64, u64),
    ) -> Result<u64, Halt> {
        let (old, flags) = match to {
            Place::Memory(linear, _) if self.instruction.has_lock_prefix() => {
                let old = self.update_locked(linear, size, |old| compute(old).0)?;
                (old, compute(old).1)
            }
            _ => {
                let old = self.read(to)?;
                let (new, flags) = compute(old);
                self.write(to, new)?;
                (old, flags)
            }
        };
        self.next.rflags = flags;
        Ok(old)
    }

    fn binary(&mut self, op: Binary) -> Done {
        let (to, from) = (self.place(0)?, self.place(1)?);
        let size = to.size().ok_or(UNKNOWN)?;
        let operand = self.read(from)?;
        let flags = self.next.rflags;
        self.modify(to, size, |old| arithmetic::binary(op, size, old, operand, flags))?;
        Ok(())
    }

    /// CMP and TEST, which write nothing.
    fn compare(&mut self, op: Binary) -> Done {
        let (first, second) = (self.place(0)?, self.place(1)?);
        let size = first.size().ok_or(UNKNOWN)?;
        let (a, b) = (self.read(first)?, self.read(second)?);
        self.next.rflags = arithmetic::binary(op, size, a, b, self.next.rflags).1;
        Ok(())
    }

    fn unary(&mut self, op: Unary) -> Done {
        let to = self.place(0)?;
        let size = to.size().ok_or(UNKNOWN)?;
        let flags = self.next.rflags;
        self.modify(to, size, |old| arithmetic::unary(op, size, old, flags))?;
        Ok(())
    }

    fn shift(&mut self, op: Shift) -> Done {
        let to = self.place(0)?;
        let size = to.size().ok_or(UNKNOWN)?;
        let double = matches!(op, Shift::ShlDouble | Shift::ShrDouble);
        let mut from = 0;
        if double {
            let place = self.place(1)?;
            from = self.read(place)?;
        }
        let place = self.place(if double { 2 } else { 1 })?;
        let count = self.read(place)? & 0xff;
        let flags = self.next.rflags;
        self.modify(to, size, |old| arithmetic::shift(op, size, old, from, count, flags))?;
        Ok(())
    }

    /// Instructions that write a whole register from another operand.
    fn scan(&mut self, op: Wide) -> Done {
        let (Place::Register(register), from) = (self.place(0)?, self.place(1)?) else {
            return Err(UNKNOWN);
        };
        let source = self.read(from)?;
        let before = self.next.gpr[register.index()];
        let (after, flags) = arithmetic::wide(op, register.size(), before, source, self.next.rflags);
        self.next.gpr[register.index()] = after;
        self.next.rflags = flags;
        Ok(())
    }

    /// BT and its kin. A bit number in a register reaches beyond a memory operand, in both directions.
    fn bit(&mut self, op: Wide) -> Done {
        let (mut to, from) = (self.place(0)?, self.place(1)?);
        let size = to.size().ok_or(UNKNOWN)?;
        if size == OperandSize::Byte {
            return Err(UNKNOWN);
        }
        let number = self.read(from)?;
        if let (Place::Memory(..), Place::Register(_)) = (to, from) {
            let words = size.sign_extend(number).cast_signed() >> size.bits().trailing_zeros();
            let bytes = words.wrapping_mul(size.bytes().cast_signed());
            to = Place::Memory(self.linear_beyond(bytes.cast_unsigned(), size.bytes())?, size);
        }
        let number = number & u64::from(size.bits() - 1);
        let flags = self.next.rflags;
        if op == Wide::BitTest {
            let value = self.read(to)?;
            self.next.rflags = arithmetic::wide(op, size, value, number, flags).1;
            return Ok(());
        }
        self.modify(to, size, |old| arithmetic::wide(op, size, old, number, flags))?;
        Ok(())
    }

    fn multiply(&mut self, signed: bool) -> Done {
        let place = self.place(0)?;
        let size = place.size().ok_or(UNKNOWN)?;
        let operand = self.read(place)?;
        let (rax, rdx) = (self.next.gpr[RAX], self.next.gpr[RDX]);
        let (rax, rdx, flags) = arithmetic::multiply(signed, size, rax, rdx, operand, self.next.rflags);
        self.next.gpr[RAX] = rax;
        self.next.gpr[RDX] = rdx;
        self.next.rflags = flags;
        Ok(())
    }

    fn multiply_operands(&mut self) -> Done {
        let Place::Register(register) = self.place(0)? else { return Err(UNKNOWN) };
        let last = self.instruction.op_count() - 1;
        let first = if last == 2 { self.place(1)? } else { Place::Register(register) };
        let second = self.place(last)?;
        let (a, b) = (self.read(first)?, self.read(second)?);
        let (product, flags) = arithmetic::wide(Wide::Multiply, register.size(), a, b, self.next.rflags);
        register.write(&mut self.next, product);
        self.next.rflags = flags;
        Ok(())
    }

    fn divide(&mut self, signed: bool) -> Done {
        let place = self.place(0)?;
        let size = place.size().ok_or(UNKNOWN)?;
        let operand = self.read(place)?;
        let (rax, rdx) = (self.next.gpr[RAX], self.next.gpr[RDX]);
        let (rax, rdx, flags) = arithmetic::divide(signed, size, rax, rdx, operand, self.next.rflags)
            .ok_or(Halt::Stop(StopReason::Exception))?;
        self.next.gpr[RAX] = rax;
        self.next.gpr[RDX] = rdx;
        self.next.rflags = flags;
        Ok(())
    }

    fn exchange_add(&mut self) -> Done {
        let (to, Place::Register(register)) = (self.place(0)?, self.place(1)?) else {
            return Err(UNKNOWN);
        };
        let size = register.size();
        let operand = register.read(&self.next);
        let flags = self.next.rflags;
        if let Place::Register(first) = to {
            // Of one register with itself the sum stays.
            let old = first.read(&self.next);
            let (sum, flags) = arithmetic::binary(Binary::Add, size, old, operand, flags);
            register.write(&mut self.next, old);
            first.write(&mut self.next, sum);
            self.next.rflags = flags;
            return Ok(());
        }
        let old = self.modify(to, size, |old| arithmetic::binary(Binary::Add, size, old, operand, flags))?;
        register.write(&mut self.next, old);
        Ok(())
    }

    fn compare_exchange(&mut self) -> Done {
        let (to, Place::Register(register)) = (self.place(0)?, self.place(1)?) else {
            return Err(UNKNOWN);
        };
        let size = register.size();
        let (expected, new) = (self.next.gpr[RAX] & size.mask(), register.read(&self.next));
        let found = match to {
            // Locked even without the prefix: no guest can tell.
            Place::Memory(linear, _) => {
                self.check_operand_writable()?;
                self.memory.compare_exchange(linear, size, expected, new)?
            }
            _ => self.read(to)?,
        };
        self.next.rflags = arithmetic::binary(Binary::Cmp, size, expected, found, self.next.rflags).1;
        let accumulator = super::operand::RegisterOperand::accumulator(size);
        if found == expected {
            if let Place::Register(_) = to {
                self.write(to, new)?;
            }
        } else {
            accumulator.write(&mut self.next, found);
        }
        Ok(())
    }

    /// CMPXCHG8B and CMPXCHG16B: of flags, only ZF changes.
    fn compare_exchange_pair(&mut self) -> Done {
        if self.instruction.op_kind(0) != OpKind::Memory {
            return Err(UNKNOWN);
        }
        let half = if self.instruction.mnemonic() == Mnemonic::Cmpxchg16b { 64 } else { 32 };
        let linear = self.linear_address(half / 4)?;
        self.check_operand_writable()?;
        let mask = u64::MAX >> (64 - half);
        let registers = self.next.gpr;
        let pair = |high: usize, low: usize| {
            u128::from(registers[high] & mask) << half | u128::from(registers[low] & mask)
        };
        let (expected, new) = (pair(RDX, RAX), pair(RCX, RBX));
        let found = if half == 64 {
            self.memory.compare_exchange_wide(linear, expected, new)?
        } else {
            let low = |value: u128| u64::try_from(value & u128::from(u64::MAX)).unwrap_or(0);
            let size = OperandSize::Qword;
            u128::from(self.memory.compare_exchange(linear, size, low(expected), low(new))?)
        };
        if found == expected {
            self.next.rflags |= rflags::ZF;
        } else {
            let part = |value: u128| u64::try_from(value & u128::from(mask)).unwrap_or(0);
            self.next.rflags &= !rflags::ZF;
            self.next.gpr[RAX] = part(found);
            self.next.gpr[RDX] = part(found >> half);
        }
        Ok(())
    }
}
