//! `replay MEMORY REGISTERS STEPS`: code of a real guest by the interpreter and, step by step, by the processor.
//!
//! MEMORY is the guest's memory from address 0 on, as QEMU's `memory-backend-file` has it; REGISTERS is what its monitor's `info registers`
//! prints. Both sides have a copy of the memory and get the same answers from devices. After each instruction that is interpreted, all
//! registers are compared, and the pages that either has written. What is not interpreted the processor does alone, and the interpreter goes on with what
//! that has left.
#![allow(unsafe_code, missing_docs, clippy::unwrap_used, clippy::print_stdout)]
// UNSAFETY: KVM's calls take addresses, and `kvm_run` is shared with the kernel.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::ptr;

use ioplane_vcpu::registers::{cr0, rflags};
use ioplane_vcpu::{
    CachedSegment, DeviceAccess, GeneralRegisters, GuestSpace, Interpreter, LinearMemory, MemorySlot,
    MemorySlots, OperandSize, Platform, RunBudget, RunEnd, StopReason, SystemRegisters, TranslationCache,
    instruction_name,
};
use kvm_bindings::{
    KVM_EXIT_DEBUG, KVM_EXIT_IO, KVM_EXIT_IO_IN, KVM_EXIT_MMIO, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_MEM_LOG_DIRTY_PAGES, kvm_cpuid_entry2, kvm_dirty_log, kvm_guest_debug, kvm_regs, kvm_run,
    kvm_segment, kvm_sregs, kvm_translation, kvm_userspace_memory_region,
};

const KVM_CREATE_VM: u64 = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: u64 = 0xae04;
const KVM_GET_SUPPORTED_CPUID: u64 = 0xc008_ae05;
const KVM_CREATE_VCPU: u64 = 0xae41;
const KVM_GET_DIRTY_LOG: u64 = 0x4010_ae42;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
const KVM_SET_TSS_ADDR: u64 = 0xae47;
const KVM_RUN: u64 = 0xae80;
const KVM_GET_REGS: u64 = 0x8090_ae81;
const KVM_SET_REGS: u64 = 0x4090_ae82;
const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_SET_SREGS: u64 = 0x4138_ae84;
const KVM_TRANSLATE: u64 = 0xc018_ae85;
const KVM_SET_CPUID2: u64 = 0x4008_ae90;
const KVM_SET_GUEST_DEBUG: u64 = 0x4048_ae9b;

const PAGE: usize = 4096;
const LEAVES: usize = 256;
/// What single steps leave in flags that the guest saves.
const TF: u64 = 1 << 8;
const RF: u64 = 1 << 16;
const PUSHF: u8 = 0x9c;

fn call(descriptor: c_int, request: u64, argument: usize) -> c_int {
    // SAFETY: each caller passes what the request takes.
    let result = unsafe { libc::ioctl(descriptor, request, argument) };
    assert!(result >= 0, "{request:x}: {}", std::io::Error::last_os_error());
    result
}

fn at<T: ?Sized>(value: &mut T) -> usize {
    ptr::from_mut(value).cast::<u8>().expose_provenance()
}

/// A copy of the guest's memory.
struct Copy(*mut u8, usize);

impl Copy {
    fn of(file: &File) -> Self {
        let bytes = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, whose changes nobody else sees.
        let mapped =
            unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        Self(mapped.cast(), bytes)
    }

    fn page(&self, number: usize) -> *mut u8 {
        assert!((number + 1) * PAGE <= self.1);
        // SAFETY: inside the mapping.
        unsafe { self.0.add(number * PAGE) }
    }

    fn bytes(&self, number: usize) -> Vec<u8> {
        // SAFETY: the guest does not run, and nobody else has the mapping.
        unsafe { std::slice::from_raw_parts(self.page(number), PAGE) }.to_vec()
    }

    fn put(&self, number: usize, bytes: &[u8]) {
        assert!(bytes.len() <= PAGE);
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.page(number), bytes.len()) };
    }
}

#[repr(C)]
struct Cpuid {
    count: u32,
    padding: u32,
    leaves: [kvm_cpuid_entry2; LEAVES],
}

/// The processor: one vCPU that runs one instruction at a time.
struct Processor {
    vm: c_int,
    vcpu: c_int,
    page: *mut kvm_run,
    memory: Copy,
}

/// How a step ended.
#[derive(Debug)]
enum Step {
    Done,
    Access(DeviceAccess),
    Other(u32),
}

impl Processor {
    fn new(memory: Copy, registers: &mut Registers) -> Self {
        let system = File::options().read(true).write(true).open("/dev/kvm").unwrap();
        let vm = call(system.as_raw_fd(), KVM_CREATE_VM, 0);
        call(vm, KVM_SET_TSS_ADDR, 0xfffb_d000);
        let mut region = kvm_userspace_memory_region {
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            memory_size: memory.1 as u64,
            userspace_addr: memory.0.expose_provenance() as u64,
            ..Default::default()
        };
        call(vm, KVM_SET_USER_MEMORY_REGION, at(&mut region));
        let vcpu = call(vm, KVM_CREATE_VCPU, 0);
        let mut cpuid =
            Cpuid { count: LEAVES as u32, padding: 0, leaves: [kvm_cpuid_entry2::default(); LEAVES] };
        call(system.as_raw_fd(), KVM_GET_SUPPORTED_CPUID, at(&mut cpuid));
        call(vcpu, KVM_SET_CPUID2, at(&mut cpuid));
        let bytes = usize::try_from(call(system.as_raw_fd(), KVM_GET_VCPU_MMAP_SIZE, 0)).unwrap();
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        let page = unsafe { libc::mmap(ptr::null_mut(), bytes, access, libc::MAP_SHARED, vcpu, 0) };
        assert_ne!(page, libc::MAP_FAILED);
        call(vcpu, KVM_SET_SREGS, at(&mut registers.system));
        call(vcpu, KVM_SET_REGS, at(&mut registers.general));
        Self { vm, vcpu, page: page.cast(), memory }
    }

    fn step(&self) -> Step {
        // Each time: POPF and IRET take TF away.
        let control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
        let mut debug = kvm_guest_debug { control, ..Default::default() };
        call(self.vcpu, KVM_SET_GUEST_DEBUG, at(&mut debug));
        call(self.vcpu, KVM_RUN, 0);
        // SAFETY: the mapping stays, and the kernel does not use it now.
        unsafe {
            match (*self.page).exit_reason {
                KVM_EXIT_DEBUG => Step::Done,
                KVM_EXIT_IO => {
                    let io = (*self.page).__bindgen_anon_1.io;
                    let (port, size, count) = (io.port, size(io.size.into()), io.count);
                    Step::Access(if u32::from(io.direction) == KVM_EXIT_IO_IN {
                        DeviceAccess::PortRead { port, size, count }
                    } else {
                        DeviceAccess::PortWrite { port, size, count }
                    })
                }
                KVM_EXIT_MMIO => {
                    let mmio = (*self.page).__bindgen_anon_1.mmio;
                    let (address, size) = (mmio.phys_addr, size(mmio.len));
                    Step::Access(if mmio.is_write == 0 {
                        DeviceAccess::MemoryRead { address, size }
                    } else {
                        let value = u64::from_le_bytes(mmio.data) & size.mask();
                        DeviceAccess::MemoryWrite { address, size, value }
                    })
                }
                other => Step::Other(other),
            }
        }
    }

    /// What a port has been written.
    fn port_data(&self) -> [u8; 8] {
        let mut data = [0; 8];
        // SAFETY: as in `step`; the data of ports is in the same mapping, which goes on behind it.
        unsafe {
            let io = (*self.page).__bindgen_anon_1.io;
            let from = self.page.cast::<u8>().add(usize::try_from(io.data_offset).unwrap());
            ptr::copy_nonoverlapping(from, data.as_mut_ptr(), data.len());
        }
        data
    }

    /// Gives the answer to a read, and completes the instruction without the next one.
    fn answer(&self, access: DeviceAccess, value: u64) {
        // SAFETY: as above; the data of ports is in the same mapping.
        unsafe {
            match access {
                DeviceAccess::PortRead { size, count, .. } => {
                    let io = (*self.page).__bindgen_anon_1.io;
                    let data = self.page.cast::<u8>().add(usize::try_from(io.data_offset).unwrap());
                    let one = usize::try_from(size.bytes()).unwrap();
                    for element in 0..usize::try_from(count).unwrap() {
                        let bytes = value.to_le_bytes();
                        ptr::copy_nonoverlapping(bytes.as_ptr(), data.add(element * one), one);
                    }
                }
                DeviceAccess::MemoryRead { .. } => {
                    (*self.page).__bindgen_anon_1.mmio.data = value.to_le_bytes();
                }
                DeviceAccess::PortWrite { .. } | DeviceAccess::MemoryWrite { .. } => {}
            }
            (*self.page).immediate_exit = 1;
            let result = libc::ioctl(self.vcpu, KVM_RUN, 0);
            (*self.page).immediate_exit = 0;
            assert!(result == 0 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EINTR));
        }
    }

    fn registers(&self) -> GeneralRegisters {
        let mut regs = kvm_regs::default();
        call(self.vcpu, KVM_GET_REGS, at(&mut regs));
        general(&regs)
    }

    fn system(&self) -> SystemRegisters {
        let mut special = kvm_sregs::default();
        call(self.vcpu, KVM_GET_SREGS, at(&mut special));
        system(&special)
    }

    fn physical(&self, linear: u64) -> Option<u64> {
        let mut translation = kvm_translation { linear_address: linear, ..Default::default() };
        call(self.vcpu, KVM_TRANSLATE, at(&mut translation));
        (translation.valid != 0).then_some(translation.physical_address)
    }

    /// Pages that the guest has written since the last call.
    fn written(&self) -> Vec<usize> {
        let mut bitmap = vec![0_u64; self.memory.1 / PAGE / 64 + 1];
        let mut log = kvm_dirty_log { slot: 0, ..Default::default() };
        log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
        call(self.vm, KVM_GET_DIRTY_LOG, at(&mut log));
        let pages = (0..bitmap.len() * 64).filter(|page| bitmap[page / 64] >> (page % 64) & 1 != 0);
        pages.collect()
    }

    /// Clears TF, which is the single step's, in flags that have just been pushed, by PUSHF or with an exception.
    fn clean_pushed_flags(&self, flags: u64) {
        let mut regs = kvm_regs::default();
        call(self.vcpu, KVM_GET_REGS, at(&mut regs));
        // PUSHF, an exception without an error code, one with it.
        for place in [0, 16, 24] {
            let physical = self.physical(regs.rsp + place).and_then(|address| usize::try_from(address).ok());
            let Some(address) = physical.filter(|address| address + 8 <= self.memory.1) else { continue };
            // SAFETY: inside the mapping; the guest does not run.
            unsafe {
                let pushed: *mut u64 = self.memory.0.add(address).cast();
                let value = pushed.read_unaligned();
                if value & TF != 0 && value & !(TF | RF) == flags & !(TF | RF) {
                    pushed.write_unaligned(value & !TF);
                }
            }
        }
    }
}

fn size(bytes: u32) -> OperandSize {
    match bytes {
        1 => OperandSize::Byte,
        2 => OperandSize::Word,
        4 => OperandSize::Dword,
        8 => OperandSize::Qword,
        _ => panic!("{bytes} bytes"),
    }
}

fn general(regs: &kvm_regs) -> GeneralRegisters {
    GeneralRegisters {
        gpr: [
            regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8, regs.r9,
            regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
        ],
        rip: regs.rip,
        rflags: regs.rflags & !(TF | RF),
    }
}

/// What 64-bit code needs of them; other code is the processor's here.
fn system(special: &kvm_sregs) -> SystemRegisters {
    let cached = |segment: &kvm_segment| CachedSegment {
        selector: segment.selector,
        base: segment.base,
        limit: segment.limit,
        readable: segment.unusable == 0,
        writable: segment.unusable == 0 && segment.type_ & 10 == 2,
        big: segment.db != 0,
    };
    SystemRegisters {
        cr0: special.cr0,
        cr3: special.cr3,
        cr4: special.cr4,
        efer: special.efer,
        cpl: if special.cr0 & cr0::PE == 0 { 0 } else { special.ss.dpl },
        code_long: special.cs.l != 0,
        code_default_big: special.cs.db != 0,
        flat: false,
        segments: [special.es, special.cs, special.ss, special.ds, special.fs, special.gs]
            .map(|one| cached(&one)),
        pdptes: [0; 4],
    }
}

/// All of it is answered outside of KVM.
struct Nothing;

impl Platform for Nothing {
    fn cycles(&mut self) -> u64 {
        0
    }

    fn kicked(&mut self) -> bool {
        false
    }

    fn port_leaves_kernel(&mut self, _: u16, _: OperandSize, _: bool) -> bool {
        true
    }

    fn address_leaves_kernel(&mut self, _: u64, _: OperandSize, _: bool) -> bool {
        true
    }

    fn may_enable_interrupts(&mut self) -> bool {
        true
    }

    fn output_elements(&mut self) -> u64 {
        1
    }
}

/// As QEMU's monitor prints them.
struct Registers {
    general: kvm_regs,
    system: kvm_sregs,
}

impl Registers {
    fn of(text: &str) -> Self {
        let number = |name: &str| -> u64 {
            let from = text.find(&format!("{name}=")).unwrap_or_else(|| panic!("no {name}: {text}"));
            let word = text[from..].split('=').nth(1).unwrap().split_whitespace().next().unwrap();
            u64::from_str_radix(word, 16).unwrap_or_else(|_| panic!("{name}={word}"))
        };
        // `CS =0010 0000000000000000 ffffffff 00a09b00 DPL=0 CS64 [-RA]`; those of tables have no selector and no flags.
        let words = |name: &str| -> Vec<u64> {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            let numbers = line.split('=').nth(1).unwrap().split_whitespace();
            numbers.map_while(|word| u64::from_str_radix(word, 16).ok()).take(4).collect()
        };
        let segment = |name: &str| {
            let words = words(name);
            let flags = words[3];
            let bit = |at: u64| u8::from(flags >> at & 1 != 0);
            kvm_segment {
                selector: u16::try_from(words[0]).unwrap(),
                base: words[1],
                limit: u32::try_from(words[2]).unwrap(),
                type_: u8::try_from(flags >> 8 & 15).unwrap(),
                s: bit(12),
                dpl: u8::try_from(flags >> 13 & 3).unwrap(),
                present: bit(15),
                avl: bit(20),
                l: bit(21),
                db: bit(22),
                g: bit(23),
                unusable: 1 - bit(15),
                ..Default::default()
            }
        };
        let r = |number_of: &str| number(number_of);
        let general = kvm_regs {
            rax: r("RAX"),
            rbx: r("RBX"),
            rcx: r("RCX"),
            rdx: r("RDX"),
            rsi: r("RSI"),
            rdi: r("RDI"),
            rsp: r("RSP"),
            rbp: r("RBP"),
            r8: r("R8 "),
            r9: r("R9 "),
            r10: r("R10"),
            r11: r("R11"),
            r12: r("R12"),
            r13: r("R13"),
            r14: r("R14"),
            r15: r("R15"),
            rip: r("RIP"),
            rflags: r("RFL"),
        };
        let mut special = kvm_sregs {
            cs: segment("CS"),
            ds: segment("DS"),
            es: segment("ES"),
            fs: segment("FS"),
            gs: segment("GS"),
            ss: segment("SS"),
            tr: segment("TR"),
            ldt: segment("LDT"),
            cr0: number("CR0"),
            cr2: number("CR2"),
            cr3: number("CR3"),
            cr4: number("CR4"),
            efer: number("EFER"),
            apic_base: 0xfee0_0900,
            ..Default::default()
        };
        for (table, name) in [(&mut special.gdt, "GDT"), (&mut special.idt, "IDT")] {
            let words = words(name);
            (table.base, table.limit) = (words[0], u16::try_from(words[1]).unwrap());
        }
        Self { general, system: special }
    }
}

/// What a device says: a drive that is ready, and anything else otherwise.
fn answer_of(access: DeviceAccess, number: u64) -> u64 {
    let any = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
    match access {
        DeviceAccess::PortRead { port: 0x1f7 | 0x3f6, .. } => {
            if number.is_multiple_of(5) {
                0xd0
            } else {
                0x58
            }
        }
        DeviceAccess::PortRead { size, .. } | DeviceAccess::MemoryRead { size, .. } => any & size.mask(),
        _ => 0,
    }
}

#[derive(Default)]
struct Counts {
    compared: u64,
    accesses: u64,
    alone: BTreeMap<String, u64>,
}

struct Replay {
    processor: Processor,
    copy: Copy,
    slots: MemorySlots,
    interpreter: Interpreter,
    cache: TranslationCache,
    general: GeneralRegisters,
    system: SystemRegisters,
    counts: Counts,
}

impl Replay {
    /// One instruction, or what is one to the interpreter. Whether the guest can go on.
    fn step(&mut self) -> bool {
        let before = self.interpreter.executed();
        let mut space = GuestSpace::new(&self.slots, &self.system, 40, &mut self.cache);
        let mut opcode = [0; 15];
        let pushes = space.fetch(self.general.rip, &mut opcode).is_ok() && opcode[0] == PUSHF;
        let mut data = [0; PAGE];
        let mut budget = RunBudget { instructions: 1, accesses: 1, deadline: u64::MAX };
        let mut general = self.general;
        let end = self.interpreter.run(
            &mut general,
            &self.system,
            &mut space,
            &mut Nothing,
            &mut data,
            &mut budget,
        );
        let name = instruction_name(self.interpreter.last_instruction());
        match end {
            RunEnd::Stopped(StopReason::InstructionLimit) => {
                let steps = self.interpreter.executed() - before;
                for step in 0..steps {
                    // After STI processors differ in whether a single step is one instruction or two.
                    if step > 0 && self.processor.registers().rip == general.rip {
                        break;
                    }
                    let done = self.processor.step();
                    assert!(matches!(done, Step::Done), "{name} at {:x}: {done:?}", self.general.rip);
                    if pushes {
                        self.processor.clean_pushed_flags(self.general.rflags);
                    }
                }
            }
            RunEnd::Access(access, pending) if single(access) => {
                let Step::Access(seen) = self.processor.step() else { panic!("{access:?}: no exit") };
                assert_eq!(seen, access, "{name} at {:x}", self.general.rip);
                if let DeviceAccess::PortWrite { size, .. } = access {
                    let written = usize::try_from(size.bytes()).unwrap();
                    assert_eq!(
                        data[..written],
                        self.processor.port_data()[..written],
                        "{name} at {:x}",
                        self.general.rip
                    );
                }
                let value = answer_of(access, self.counts.accesses);
                self.processor.answer(access, value);
                data[..8].copy_from_slice(&value.to_le_bytes());
                self.interpreter.complete(pending, &mut general, &mut space, &data, value);
                self.counts.accesses += 1;
            }
            RunEnd::Access(..) => return self.alone(format!("{name} of several")),
            RunEnd::Stopped(reason) => return self.alone(format!("{name} {reason:?}")),
        }
        let real = self.processor.registers();
        general.rflags &= !(TF | RF);
        assert_eq!(general, real, "{name} at {:x}, from {:x?}", self.general.rip, self.general);
        self.general = general;
        self.counts.compared += 1;
        true
    }

    /// The processor does it.
    fn alone(&mut self, what: String) -> bool {
        self.compare_memory();
        *self.counts.alone.entry(what).or_default() += 1;
        match self.processor.step() {
            Step::Done => {}
            Step::Access(access) => {
                self.processor.answer(access, answer_of(access, self.counts.accesses));
            }
            Step::Other(reason) => {
                println!("exit {reason}");
                return false;
            }
        }
        self.processor.clean_pushed_flags(self.general.rflags);
        for page in self.processor.written() {
            self.copy.put(page, &self.processor.memory.bytes(page));
        }
        self.general = self.processor.registers();
        self.system = self.processor.system();
        true
    }

    /// What the guest has written on the processor is what it has written here.
    fn compare_memory(&self) {
        for page in self.processor.written() {
            let (real, here) = (self.processor.memory.bytes(page), self.copy.bytes(page));
            if let Some(at) = (0..PAGE).find(|at| real[*at] != here[*at]) {
                panic!(
                    "memory at {:x} before {:x}: {:x} and not {:x}",
                    page * PAGE + at,
                    self.general.rip,
                    here[at],
                    real[at]
                );
            }
        }
    }
}

/// Whether an access is of one element; INS and REP OUTS are KVM's.
fn single(access: DeviceAccess) -> bool {
    !matches!(access, DeviceAccess::PortRead { count, .. } | DeviceAccess::PortWrite { count, .. } if count != 1)
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [memory, registers, steps] = &words[..] else { panic!("replay MEMORY REGISTERS STEPS") };
    let file = File::open(memory).unwrap();
    let mut registers = Registers::of(&fs::read_to_string(registers).unwrap());
    assert!(registers.general.rflags & rflags::VM == 0);
    let processor = Processor::new(Copy::of(&file), &mut registers);
    let copy = Copy::of(&file);
    let mut slots = MemorySlots::default();
    let slot = MemorySlot {
        number: 0,
        address: 0,
        size: copy.1 as u64,
        host: copy.0.expose_provenance(),
        read_only: false,
        logged: false,
    };
    // SAFETY: the copy is mapped until the process ends.
    unsafe { slots.set(slot) }.unwrap();
    let (general, system) = (processor.registers(), processor.system());
    let mut replay = Replay {
        processor,
        copy,
        slots,
        interpreter: Interpreter::new(),
        cache: TranslationCache::new(),
        general,
        system,
        counts: Counts::default(),
    };
    replay.processor.written();
    let steps: u64 = steps.parse().unwrap();
    let mut done = 0;
    while done < steps && replay.step() {
        done += 1;
    }
    replay.compare_memory();
    let Counts { compared, accesses, alone } = replay.counts;
    println!("compared {compared} accesses {accesses}");
    println!("by the processor alone: {alone:?}");
}
