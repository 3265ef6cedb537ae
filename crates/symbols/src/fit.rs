//! How far the guest's kernel has moved, from nothing but the addresses at which it exits.
//!
//! An exit happens at an instruction that can exit: OUT, HLT, WRMSR. With the kernel's bytes at hand, each candidate offset is
//! tried: the right one puts such an instruction under (nearly) every address seen, a wrong one under few. With names only, functions
//! that are known to do such things serve in place of the bytes, and the answer is less sure.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Origin, Symbols};

/// Where Linux on x86-64 puts its own text, and how it moves it.
const TEXT: std::ops::Range<u64> = 0xffff_ffff_8000_0000..0xffff_ffff_c000_0000;
/// Modules of a running kernel lie behind that.
const MODULES: u64 = 0xffff_ffff_ff00_0000;
const STEP: u64 = 2 << 20;
const SPAN: u64 = 1 << 30;
/// So many addresses are looked at.
const ENOUGH: usize = 256;

/// How sure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Confidence {
    /// No offset stands out: no names are given.
    None,
    /// It stands out, from few addresses or by names only. A running kernel's: it may be, and little or nothing shows it.
    Low,
    /// Half of the addresses and twice the next best. A running kernel's: two functions that are known to exit, and half of all.
    Fair,
    /// Nearly all addresses, and three times the next best. A running kernel's: three functions that are known to exit, and half.
    High,
}

/// A sort of instructions that can exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Instruction {
    /// IN, OUT and their string forms.
    Port,
    /// RDMSR, WRMSR.
    Msr,
    /// HLT, MWAIT.
    Halt,
    /// CPUID.
    Cpuid,
    /// VMCALL, VMMCALL.
    Hypercall,
    /// PAUSE.
    Pause,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fit {
    /// How far the kernel has moved.
    pub slide: u64,
    /// So many different addresses fit.
    pub matched: usize,
    /// Of so many in the kernel's text.
    pub seen: usize,
    /// So many fit the next best offset.
    pub next: usize,
    /// Of a running kernel's symbols: so many addresses that fit lie in functions that are known to exit so.
    pub known: Option<usize>,
    /// How sure that makes it.
    pub confidence: Confidence,
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fit { slide, matched, seen, next, known, .. } = self;
        let confidence = match self.confidence {
            Confidence::None => {
                return write!(
                    f,
                    "symbols do not fit: of {seen} kernel addresses at which exits happened, no offset explains more than \
                     {matched} (the next one {next}); is the file of this guest's kernel?"
                );
            }
            Confidence::Low => "not very sure",
            Confidence::Fair => "fairly sure",
            Confidence::High => "sure",
        };
        write!(f, "symbols: kernel moved by {slide:#x}, {confidence} ({matched} of {seen} addresses fit, ")?;
        match known {
            None => write!(f, "the next best offset {next})"),
            Some(0) if *seen > 0 => write!(
                f,
                "none in a function that is known to exit so: if the guest has another kernel since, the names are wrong)"
            ),
            Some(known) => write!(f, "{known} in functions that are known to exit so)"),
        }
    }
}

impl Symbols {
    /// Finds out how far the kernel has moved from where the file has it, from addresses at which such instructions have exited, and
    /// uses that from now on unless nothing stands out. Symbols of a running kernel must fit as they are.
    pub fn fit(&mut self, seen: impl IntoIterator<Item = (u64, Instruction)>) -> Fit {
        let end = if self.origin == Origin::Kallsyms { MODULES } else { TEXT.end };
        let kernel = TEXT.start..end;
        let mut seen: Vec<(u64, Instruction)> =
            seen.into_iter().filter(|(rip, _)| kernel.contains(rip)).collect();
        seen.sort_unstable();
        seen.dedup_by_key(|(rip, _)| *rip);
        // Evenly over all of them.
        let every = seen.len().div_ceil(ENOUGH).max(1);
        let seen: Vec<(u64, Instruction)> = seen.into_iter().step_by(every).collect();
        let steps = if self.origin == Origin::Kallsyms { 1 } else { SPAN / STEP };
        let mut scores: Vec<(usize, u64)> = (0..steps)
            .map(|step| step * STEP)
            .map(|slide| (seen.iter().filter(|(rip, kind)| self.explains(*rip, *kind, slide)).count(), slide))
            .collect();
        // The best first, and of equals the one that moves least.
        scores.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        let (matched, slide) = scores.first().copied().unwrap_or_default();
        let next = scores.get(1).map_or(0, |score| score.0);
        let running = self.origin == Origin::Kallsyms;
        let known = running.then(|| seen.iter().filter(|(rip, kind)| self.sounds(*rip, *kind)).count());
        let confidence = self.confidence(matched, seen.len(), next, known.unwrap_or(0));
        // Without kernel addresses there is nothing to be wrong about.
        self.slide = if confidence == Confidence::None { 0 } else { slide };
        Fit { slide: self.slide, matched, seen: seen.len(), next, known, confidence }
    }

    fn confidence(&self, matched: usize, seen: usize, next: usize, known: usize) -> Confidence {
        if seen == 0 && self.origin == Origin::Kallsyms {
            // Nothing speaks for it, and nothing against it.
            Confidence::Low
        } else if matched == 0 || matched == next {
            Confidence::None
        } else if self.origin == Origin::Kallsyms {
            match known {
                _ if matched * 10 < seen * 9 => Confidence::None,
                3.. if known * 2 >= matched => Confidence::High,
                2.. if known * 2 >= matched => Confidence::Fair,
                _ => Confidence::Low,
            }
        } else if matched * 10 >= seen * 8 && matched >= 5 && matched >= 3 * next && self.text.is_some() {
            Confidence::High
        } else if matched * 2 >= seen && matched >= 3 && matched >= 2 * next {
            Confidence::Fair
        } else if matched * 2 > seen {
            // Of a few addresses two may fit a wrong offset by chance, most of them do not.
            Confidence::Low
        } else {
            Confidence::None
        }
    }

    fn explains(&self, rip: u64, kind: Instruction, slide: u64) -> bool {
        let Some(at) = rip.checked_sub(slide) else { return false };
        if self.find(at).is_none() {
            return false;
        }
        match &self.text {
            _ if self.origin == Origin::Kallsyms => true,
            Some(text) => can_exit(text.at(at), kind),
            None => self.sounds(at, kind),
        }
    }

    /// Whether the function there, as the file has it, is known to exit so.
    fn sounds(&self, at: u64, kind: Instruction) -> bool {
        let Some(symbol) = self.find(at) else { return false };
        let (start, length) = (symbol.name.0 as usize, symbol.name.1 as usize);
        self.names.get(start..start + length).is_some_and(|name| sounds_like(name, kind))
    }
}

/// Whether `bytes` begin with such an instruction.
fn can_exit(bytes: &[u8], kind: Instruction) -> bool {
    // Operand size, repetition, segments and REX.
    let prefixes = bytes
        .iter()
        .take(4)
        .take_while(|byte| matches!(byte, 0x66 | 0x67 | 0xf2 | 0xf3 | 0x3e | 0x48))
        .count();
    match (kind, &bytes[prefixes..]) {
        (Instruction::Port, [opcode, ..]) => matches!(opcode, 0x6c..=0x6f | 0xe4..=0xe7 | 0xec..=0xef),
        (Instruction::Msr, [0x0f, 0x30 | 0x32, ..]) => true,
        (Instruction::Halt, [0xf4, ..] | [0x0f, 0x01, 0xc9, ..]) => true,
        (Instruction::Cpuid, [0x0f, 0xa2, ..]) => true,
        (Instruction::Hypercall, [0x0f, 0x01, 0xc1 | 0xd9, ..]) => true,
        (Instruction::Pause, [0x90, ..]) => prefixes > 0,
        _ => false,
    }
}

/// Whether a function of Linux by that name does such things.
fn sounds_like(name: &str, kind: Instruction) -> bool {
    let words: &[&str] = match kind {
        Instruction::Port => &[
            "ioread",
            "iowrite",
            "pio",
            "outb",
            "outw",
            "outl",
            "inb",
            "inw",
            "inl",
            "_in",
            "_out",
            "io_delay",
            "pm_read",
            "pci_conf1",
            "i8042",
            "cmos",
            "8259",
            "pit_",
            "port",
            "vp_",
            "ata_",
            "insw",
            "outsw",
        ],
        Instruction::Msr => &["msr", "x2apic", "apic", "kvm_", "tsc"],
        Instruction::Halt => &["halt", "idle", "mwait"],
        Instruction::Cpuid => &["cpuid", "sync_core", "identify", "cpu_init"],
        Instruction::Hypercall => &["kvm", "hypercall", "kick"],
        Instruction::Pause => &["spin", "relax", "delay", "lock"],
    };
    words.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_that_exit() {
        assert!(can_exit(&[0x66, 0xef], Instruction::Port));
        assert!(can_exit(&[0xf3, 0x6c], Instruction::Port));
        assert!(!can_exit(&[0x90], Instruction::Port));
        assert!(can_exit(&[0x0f, 0x30], Instruction::Msr));
        assert!(can_exit(&[0xf3, 0x90], Instruction::Pause));
        assert!(!can_exit(&[0x90], Instruction::Pause));
        assert!(!can_exit(&[], Instruction::Halt));
    }
}
