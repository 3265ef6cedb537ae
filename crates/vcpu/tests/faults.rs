//! A file that shrinks under a memory slot: each access to what is gone is refused, and has changed nothing.
//!
//! Handlers of signals belong to the whole process, so each case is a child: this test, started again.
#![allow(unsafe_code)]
// UNSAFETY: maps a file as a VMM does, and installs a handler.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::ptr;

use ioplane_vcpu::paging::{PAGE, TableMemory, TranslationFault};
use ioplane_vcpu::registers::{RDI, cr0, cr4, efer, rflags};
use ioplane_vcpu::{
    CachedSegment, Denied, GeneralRegisters, GuestSpace, INSTRUCTION_BYTES, Interpreter, LinearMemory,
    MemorySlot, MemorySlots, OperandSize, RunBudget, RunEnd, StopReason, SystemRegisters, TranslationCache,
};

mod quiet;
use quiet::Quiet;

const CASE: &str = "IOPLANE_TEST_FAULT_CASE";
const PAGES: u64 = 8;
/// Code and data; the four levels of page tables are below.
const KEPT: u64 = 4 * PAGE;
/// The first page that is cut off.
const GONE: u64 = 5 * PAGE;
/// A page table that is cut off, for linear addresses from 2 MiB.
const GONE_TABLE: u64 = 6 * PAGE;
const REFUSED: Denied = Denied::Stop(StopReason::HostFault);

/// Linear addresses are guest-physical ones, with pages of 4 KiB.
struct Guest {
    file: File,
    host: usize,
    slots: MemorySlots,
    cache: TranslationCache,
}

impl Guest {
    fn new() -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGES * PAGE).unwrap();
        let bytes = usize::try_from(PAGES * PAGE).unwrap();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, wherever the kernel puts it.
        let mapped =
            unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        let host = mapped.expose_provenance();
        let mut slots = MemorySlots::default();
        let slot =
            MemorySlot { number: 0, address: 0, size: PAGES * PAGE, host, read_only: false, logged: false };
        // SAFETY: the mapping stays until the process ends.
        unsafe { slots.set(slot).unwrap() };
        let mut guest = Self { file, host, slots, cache: TranslationCache::new() };
        guest.tables();
        guest
    }

    fn tables(&mut self) {
        const GOOD: u64 = 0x63;
        let entry = |at: u64, to: u64| self.put(at, &(to | GOOD).to_le_bytes());
        entry(0, PAGE);
        entry(PAGE, 2 * PAGE);
        entry(2 * PAGE, 3 * PAGE);
        entry(2 * PAGE + 8, GONE_TABLE);
        for page in 0..PAGES {
            entry(3 * PAGE + 8 * page, page * PAGE);
        }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        let to: *mut u8 = ptr::with_exposed_provenance_mut(self.host + usize::try_from(at).unwrap());
        // SAFETY: inside the mapping, of which there are no references.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn cut(&self) {
        self.file.set_len(GONE).unwrap();
    }

    fn system() -> SystemRegisters {
        SystemRegisters {
            cr0: cr0::PE | cr0::PG | cr0::WP,
            cr3: 0,
            cr4: cr4::PAE,
            efer: efer::LMA,
            cpl: 0,
            code_long: true,
            code_default_big: false,
            flat: false,
            segments: [CachedSegment::UNUSABLE; 6],
            pdptes: [0; 4],
        }
    }

    fn space(&mut self) -> GuestSpace<'_> {
        GuestSpace::new(&self.slots, &Self::system(), 40, &mut self.cache)
    }
}

extern "C" fn handler(signal: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the third argument of a handler that is running.
    if !unsafe { ioplane_vcpu::resume_refused_access(context) } {
        // SAFETY: the default action ends the process when the instruction runs again.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

fn install() {
    for signal in [libc::SIGSEGV, libc::SIGBUS] {
        // SAFETY: a plain structure, and a handler that is safe to be called at any instruction.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(signal, &raw const action, ptr::null_mut()), 0);
        }
    }
}

/// What runs in the child.
fn accesses() {
    use OperandSize::{Byte, Dword, Qword, Word};
    let mut guest = Guest::new();
    let straddling = GONE - 4;
    guest.put(straddling, &[1, 2, 3, 4, 5, 6, 7, 8]);
    // ADD [RDI], EAX
    guest.put(KEPT, &[0x01, 0x07]);
    guest.cut();
    let mut space = guest.space();
    for size in [Byte, Word, Dword, Qword] {
        assert_eq!(space.load(GONE + 8, size), Err(REFUSED));
        assert_eq!(space.store(GONE + 8, size, 1), Err(REFUSED));
        assert_eq!(space.compare_exchange(GONE + 8, size, 0, 1), Err(REFUSED));
        assert_eq!(space.load(KEPT + 8, size), Ok(0), "others are not concerned");
    }
    assert_eq!(space.compare_exchange_wide(GONE + 16, 0, 1), Err(REFUSED));
    assert_eq!(space.compare_exchange_wide(KEPT + 16, 0, 0), Ok(0));
    assert_eq!(space.check_store(GONE, 1), Err(REFUSED));
    assert_eq!(space.load(straddling, Qword), Err(REFUSED));
    assert_eq!(space.store(straddling, Qword, u64::MAX), Err(REFUSED));
    assert_eq!(space.load(straddling, Dword), Ok(0x0403_0201), "nothing of it was stored");
    let mut bytes = [0; INSTRUCTION_BYTES];
    assert_eq!(space.fetch(GONE, &mut bytes), Err(REFUSED));
    assert_eq!(space.fetch(GONE - 3, &mut bytes), Ok(3));
    let no_table = Denied::Stop(StopReason::Translation(TranslationFault::Table));
    assert_eq!(space.load(2 << 20, Byte), Err(no_table));
    assert_eq!(guest.slots.table_entry(GONE_TABLE), None);

    let mut general = GeneralRegisters { gpr: [0x55; 16], rip: KEPT, rflags: rflags::ONE };
    general.gpr[RDI] = GONE + 12;
    let before = general;
    let mut budget = RunBudget { instructions: 9, accesses: 9, deadline: 1 };
    let end = Interpreter::new().run(
        &mut general,
        &Guest::system(),
        &mut guest.space(),
        &mut Quiet::default(),
        &mut [],
        &mut budget,
    );
    assert!(matches!(end, RunEnd::Stopped(StopReason::HostFault)), "{end:?}");
    assert_eq!(general, before);
}

fn child(case: &str) -> ExitStatus {
    let own = std::env::current_exe().unwrap();
    let words = ["--exact", "what_runs_in_the_child", "--nocapture"];
    Command::new(own).args(words).env(CASE, case).status().unwrap()
}

/// Does nothing unless it is the child.
#[test]
fn what_runs_in_the_child() {
    match std::env::var(CASE).as_deref() {
        Ok("handler") => {
            install();
            accesses();
        }
        Ok("no handler") => accesses(),
        Ok("elsewhere") => {
            install();
            let guest = Guest::new();
            guest.cut();
            guest.put(GONE, &[1]);
        }
        _ => {}
    }
}

#[test]
fn memory_that_is_gone_is_refused() {
    let status = child("handler");
    assert!(status.success(), "{status}");
}

#[test]
fn without_the_handler_the_process_ends() {
    assert_eq!(child("no handler").signal(), Some(libc::SIGBUS));
}

#[test]
fn faults_of_other_instructions_are_not_taken() {
    assert_eq!(child("elsewhere").signal(), Some(libc::SIGBUS));
}
