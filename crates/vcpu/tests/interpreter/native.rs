//! Runs instructions on this processor, from given registers, one by one.
//!
//! A signal handler puts the registers in place and takes them back: `int3` enters it, it returns into the instructions
//! with the trap flag set, and each instruction enters it again. Whatever the instructions do to registers and flags,
//! or which fault they raise, comes back here.
#![allow(unsafe_code)]
// UNSAFETY: a mapping at a fixed address, signal handlers, and code that is made at run time.

use std::cell::UnsafeCell;
use std::sync::{Mutex, MutexGuard};

use ioplane_vcpu::{GeneralRegisters, registers::rflags};

use crate::arena::{BASE, SIZE};

/// Where `gregs` has RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
const PLACES: [i32; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];
const SIGNALS: [i32; 5] = [libc::SIGTRAP, libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];

/// Linux's selectors for programs of 64 and of 32 bits, and for data.
const CODE_64: u16 = 0x33;
const CODE_32: u16 = 0x23;
const DATA_32: u16 = 0x2b;

/// How the processor takes the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Of 64 bits.
    Long,
    /// Of 32 bits.
    Flat32,
    /// With these selectors in ES, CS, SS, DS and GS, whose segments [`Native::segment`] has set.
    Segments([u16; 5]),
}

impl Program {
    pub fn selectors(self) -> [u16; 5] {
        match self {
            Self::Long => [DATA_32, CODE_64, DATA_32, DATA_32, DATA_32],
            Self::Flat32 => [DATA_32, CODE_32, DATA_32, DATA_32, DATA_32],
            Self::Segments(selectors) => selectors,
        }
    }
}

/// `struct user_desc` of Linux.
#[repr(C)]
struct UserDescriptor {
    number: u32,
    base: u32,
    limit: u32,
    /// 1: addresses of 32 bits; 2: data that grows downwards; 4: code; 8: not writable, or not readable; 16: the limit counts
    /// pages; 32: not present; 64: for the user.
    kind: u32,
}

/// A segment of this process's own.
#[derive(Clone, Copy, Debug)]
pub struct OwnSegment {
    pub number: u16,
    pub base: u64,
    pub limit: u32,
    pub code: bool,
    pub writable: bool,
    pub big: bool,
}

impl OwnSegment {
    /// Its selector: of the local table, for level 3.
    pub fn selector(&self) -> u16 {
        self.number << 3 | 7
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Nobody expects a signal.
    Quiet,
    /// The next `int3` starts.
    Entering,
    /// Instructions are being run.
    Running,
}

struct Exchange {
    phase: Phase,
    steps: u64,
    program: Program,
    registers: GeneralRegisters,
    /// The signal that ended the run; SIGTRAP if all steps were made.
    signal: i32,
    saved: [i64; 23],
}

struct Shared(UnsafeCell<Exchange>);
// SAFETY: used by the thread that holds `ONE`, and by the handler on that thread.
unsafe impl Sync for Shared {}

static EXCHANGE: Shared = Shared(UnsafeCell::new(Exchange {
    phase: Phase::Quiet,
    steps: 0,
    program: Program::Long,
    registers: GeneralRegisters { gpr: [0; 16], rip: 0, rflags: 0 },
    signal: 0,
    saved: [0; 23],
}));
static ONE: Mutex<()> = Mutex::new(());

/// The processor, for one thread at a time.
pub struct Native {
    _one: MutexGuard<'static, ()>,
    _stack: Vec<u8>,
}

/// The time stamp counter, and the number that RDTSCP gives with it.
pub fn time_stamp() -> (u64, u32) {
    let mut number = 0;
    // SAFETY: the processors that this is for have the instruction, and user space may run it.
    let now = unsafe { core::arch::x86_64::__rdtscp(&raw mut number) };
    (now, number)
}

/// This thread stays where it is.
pub fn stay_on_one_processor() {
    // SAFETY: a set of plain numbers, of this thread.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(usize::try_from(libc::sched_getcpu()).unwrap(), &mut set);
        assert_eq!(libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set), 0);
    }
}

/// What came of a run.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    Complete(GeneralRegisters),
    Fault(i32),
}

impl Native {
    pub fn new() -> Self {
        let one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut stack = vec![0_u8; 1 << 18];
        // SAFETY: the stack lives as long as `Native`, the handler only touches EXCHANGE and its context, and the mapping
        // replaces nothing but the one of a test before.
        unsafe {
            let alternative =
                libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: stack.len() };
            assert_eq!(libc::sigaltstack(&raw const alternative, std::ptr::null_mut()), 0);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            for signal in SIGNALS {
                assert_eq!(libc::sigaction(signal, &raw const action, std::ptr::null_mut()), 0);
            }
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
            let wanted = std::ptr::without_provenance_mut(usize::try_from(BASE).unwrap());
            let got = libc::mmap(wanted, SIZE, all, flags, -1, 0);
            assert_eq!(got.addr(), wanted.addr(), "the addresses of the arena are in use");
            // In 64-bit mode they mean nothing, and Linux leaves them empty.
            std::arch::asm!("mov ds, {0:e}", "mov es, {0:e}", in(reg) u32::from(DATA_32));
        }
        Self { _one: one, _stack: stack }
    }

    /// Sets a segment of this process (modify_ldt).
    pub fn segment(&mut self, segment: &OwnSegment) {
        let pages = segment.limit > 0xf_ffff;
        let descriptor = UserDescriptor {
            number: segment.number.into(),
            base: u32::try_from(segment.base).unwrap(),
            limit: if pages { segment.limit >> 12 } else { segment.limit },
            kind: u32::from(segment.big)
                | u32::from(segment.code) << 2
                | u32::from(!segment.code && !segment.writable) << 3
                | u32::from(pages) << 4
                | 1 << 6,
        };
        // SAFETY: the system call reads the descriptor; nobody uses the segment yet.
        let set = unsafe {
            libc::syscall(libc::SYS_modify_ldt, 0x11, &raw const descriptor, size_of::<UserDescriptor>())
        };
        assert_eq!(set, 0, "{segment:?}: {}", std::io::Error::last_os_error());
    }

    /// Runs `steps` instructions on `memory`, which becomes what they have left.
    pub fn run(
        &mut self,
        start: &GeneralRegisters,
        program: Program,
        steps: u64,
        memory: &mut [u8],
    ) -> Ended {
        let arena: *mut u8 = std::ptr::with_exposed_provenance_mut(usize::try_from(BASE).unwrap());
        // SAFETY: the arena is mapped and ours alone; EXCHANGE is ours by `ONE`. `int3` comes back with all registers as
        // they were, since the handler puts them back.
        unsafe {
            std::ptr::copy_nonoverlapping(memory.as_ptr(), arena, SIZE);
            let exchange = EXCHANGE.0.get();
            (*exchange).steps = steps;
            (*exchange).program = program;
            (*exchange).registers = *start;
            (*exchange).phase = Phase::Entering;
            let [es, _, _, ds, gs] = program.selectors();
            std::arch::asm!(
                "mov ds, {ds:e}", "mov es, {es:e}", "mov gs, {gs:e}",
                "int3",
                "mov ds, {flat:e}", "mov es, {flat:e}", "mov gs, {flat:e}",
                ds = in(reg) u32::from(ds), es = in(reg) u32::from(es), gs = in(reg) u32::from(gs),
                flat = in(reg) u32::from(DATA_32),
            );
            std::ptr::copy_nonoverlapping(arena, memory.as_mut_ptr(), SIZE);
            match (*exchange).signal {
                libc::SIGTRAP => Ended::Complete((*exchange).registers),
                fault => Ended::Fault(fault),
            }
        }
    }
}

extern "C" fn handler(signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel gives a valid context, and the interrupted thread is the one that holds `ONE` unless nobody
    // expects a signal.
    unsafe {
        let gregs = &mut (*context).uc_mcontext.gregs;
        let exchange = EXCHANGE.0.get();
        match (*exchange).phase {
            Phase::Quiet => {
                // A fault of the test itself: without the handler it ends the process.
                libc::signal(signal, libc::SIG_DFL);
            }
            Phase::Entering => {
                (*exchange).saved = *gregs;
                let start = (*exchange).registers;
                for (place, value) in PLACES.into_iter().zip(start.gpr) {
                    gregs[place as usize] = value.cast_signed();
                }
                gregs[libc::REG_RIP as usize] = start.rip.cast_signed();
                let selectors = &mut gregs[libc::REG_CSGSFS as usize];
                let [_, code, stack, ..] = (*exchange).program.selectors();
                // CS is the first of four, SS the last.
                let others = selectors.cast_unsigned() & 0x0000_ffff_ffff_0000;
                *selectors = (u64::from(stack) << 48 | others | u64::from(code)).cast_signed();
                gregs[libc::REG_EFL as usize] = (start.rflags | rflags::TF).cast_signed();
                (*exchange).phase = Phase::Running;
            }
            Phase::Running => {
                (*exchange).steps -= 1;
                if signal == libc::SIGTRAP && (*exchange).steps > 0 {
                    gregs[libc::REG_EFL as usize] |= rflags::TF.cast_signed();
                    return;
                }
                let mut gpr = [0; 16];
                for (place, value) in PLACES.into_iter().zip(&mut gpr) {
                    *value = gregs[place as usize].cast_unsigned();
                }
                (*exchange).registers = GeneralRegisters {
                    gpr,
                    rip: gregs[libc::REG_RIP as usize].cast_unsigned(),
                    rflags: gregs[libc::REG_EFL as usize].cast_unsigned(),
                };
                (*exchange).signal = signal;
                *gregs = (*exchange).saved;
                (*exchange).phase = Phase::Quiet;
            }
        }
    }
}
