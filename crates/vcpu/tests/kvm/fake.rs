//! A KVM in user space for one vCPU: what KVM_RUN does to registers and `kvm_run`, as api.rst and KVM's sources have it.
//!
//! It runs the guest by an interpreter of its own, so what is tested with it is how accesses are completed and registers
//! handed over, not what instructions do.
#![allow(unsafe_code)]
// UNSAFETY: `kvm_run` and the guest's memory are shared by address, as they are with the kernel.

use std::cell::Cell;

use ioplane_vcpu::kvm::{ClusterSwitch, InterruptController, SharedVm, VcpuDescriptor, VmState};
use ioplane_vcpu::segments;
use ioplane_vcpu::{
    CachedSegment, CodeMode, DeviceAccess, GeneralRegisters, GuestSpace, Interpreter, MemorySlot,
    OperandSize, PendingAccess, RunBudget, RunEnd, StopReason, SystemRegisters, TranslationCache, registers,
};
use kvm_bindings::{
    KVM_EXIT_HLT, KVM_EXIT_IO, KVM_EXIT_MMIO, kvm_debugregs, kvm_regs, kvm_run, kvm_segment, kvm_sregs,
    kvm_vcpu_events,
};
use registers::{cr0, cr4, efer, rflags};

use crate::quiet::Quiet;

pub const MEMORY: usize = 2 << 20;
/// Linear and guest-physical, where no slot is.
pub const DEVICE: u64 = 2 << 20;
pub const CODE: u64 = 0x1_0000;
pub const BITS: u32 = 40;
const EINTR: i32 = -4;
const PORT_DATA: usize = 4096;

/// Pages with an alignment, as `mmap` gives them.
pub struct Pages {
    memory: Vec<u8>,
    start: usize,
}

impl Pages {
    pub fn new(bytes: usize) -> Self {
        let mut memory = vec![0_u8; bytes + 4096];
        let start = memory.as_mut_ptr().expose_provenance().next_multiple_of(4096);
        Self { memory, start }
    }

    pub fn address(&self) -> usize {
        self.start
    }

    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(self.start + usize::try_from(at).unwrap());
        // SAFETY: inside the memory, which nobody borrows.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    pub fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        assert!(!self.memory.is_empty());
        let from: *const u8 = std::ptr::with_exposed_provenance(self.start + usize::try_from(at).unwrap());
        let mut read = vec![0; bytes];
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, read.as_mut_ptr(), bytes) };
        read
    }
}

/// What KVM does at the beginning of the next KVM_RUN.
enum Completion {
    /// Plain IN and OUT: only if RIP is still there.
    AtRip(u64, PendingAccess),
    Always(PendingAccess),
}

pub struct FakeKvm {
    pub memory: Pages,
    pub page: Pages,
    pub vm: VmState,
    pub general: GeneralRegisters,
    pub system: SystemRegisters,
    interpreter: Interpreter,
    cache: TranslationCache,
    completion: Option<Completion>,
    /// Accesses that KVM's own devices have had.
    pub kernel: Vec<DeviceAccess>,
    pub entries: u64,
    /// The registers with which the guest was entered last.
    pub entered_with: GeneralRegisters,
    /// Asking for the offset of the time stamp counter panics, as a fault of the interpreter would.
    pub panic_at_time_stamp: bool,
    /// The VMM's signal arrives in a KVM_RUN that was to leave at once.
    pub kick_while_completing: bool,
    /// The next KVM_RUN that leaves at once panics after what it has to complete, as a fault in the interposer would.
    pub panic_while_completing: bool,
    /// Asking whether clustering is switched on panics then; what is left of the questions until then.
    pub panic_when_asked: Cell<Option<u32>>,
    pub switched: ClusterSwitch,
    pub dr7: u64,
    /// A signal waits: KVM_RUN does what is to be completed and leaves.
    pub leaves_at_once: bool,
    /// A signal arrives when the guest has been entered so often.
    pub leaves_after: Option<u64>,
    /// IN and OUT go through KVM's emulator, which completes them wherever RIP is: VMX that cannot run real mode itself.
    pub emulates_ports: bool,
    /// An exception waits for the next entry. Registers that KVM is given drop it.
    pub exception: bool,
    /// What KVM says of the PDPTEs, and how often it was asked.
    pub pdptes: (Option<[u64; 4]>, u64),
    /// What the guest's counter is ahead of the host's, and IA32_TSC_AUX.
    pub time_stamp: (u64, u32),
}

impl FakeKvm {
    pub fn new(code: &[u8], mut vm: VmState) -> Self {
        const GOOD: u64 = 0x63;
        let mut memory = Pages::new(MEMORY);
        memory.write(0x1000, &(0x2000 | GOOD).to_le_bytes());
        memory.write(0x2000, &(0x3000 | GOOD).to_le_bytes());
        memory.write(0x3000, &(GOOD | 0x80).to_le_bytes());
        memory.write(0x3008, &(DEVICE | GOOD | 0x80).to_le_bytes());
        memory.write(CODE, code);
        let slot = MemorySlot {
            number: 0,
            address: 0,
            size: MEMORY as u64,
            host: memory.address(),
            read_only: false,
            logged: false,
        };
        // SAFETY: the memory lives as long as the slots.
        unsafe { vm.slots.set(slot).unwrap() };
        let mut gpr = [0; 16];
        gpr[registers::RSP] = 0x8000;
        Self {
            memory,
            page: Pages::new(3 * 4096),
            vm,
            general: GeneralRegisters { gpr, rip: CODE, rflags: rflags::ONE },
            system: SystemRegisters {
                cr0: cr0::PE | cr0::PG | cr0::WP,
                cr3: 0x1000,
                cr4: cr4::PAE,
                efer: efer::LMA,
                cpl: 0,
                code_long: true,
                code_default_big: false,
                flat: false,
                segments: [CachedSegment::UNUSABLE; 6],
                pdptes: [0; 4],
            },
            interpreter: Interpreter::new(),
            cache: TranslationCache::new(),
            completion: None,
            kernel: Vec::new(),
            entries: 0,
            entered_with: GeneralRegisters::default(),
            panic_at_time_stamp: false,
            kick_while_completing: false,
            panic_while_completing: false,
            panic_when_asked: Cell::new(None),
            switched: ClusterSwitch::On,
            dr7: 0x400,
            leaves_at_once: false,
            leaves_after: None,
            emulates_ports: false,
            exception: false,
            pdptes: (None, 0),
            time_stamp: (0, 0),
        }
    }

    /// What the interposer knows of a VM with this memory, one vCPU and KVM's interrupt controller.
    pub fn shared_vm(&self) -> SharedVm {
        let vm = SharedVm::default();
        let mut change = vm.change();
        change.interrupt_controller(InterruptController::Kernel);
        change.vcpu_created();
        change.slots = self.vm.slots.clone();
        drop(change);
        vm
    }

    pub fn run_page(&self) -> *mut kvm_run {
        std::ptr::with_exposed_provenance_mut(self.page.address())
    }

    /// KVM_RUN's view of the page.
    #[allow(clippy::mut_from_ref)]
    fn shared(&self) -> &mut kvm_run {
        // SAFETY: the page lives as long as `self`; the other side does not run meanwhile, and keeps no references.
        unsafe { &mut *self.run_page() }
    }

    fn port_data(&self) -> Vec<u8> {
        self.page.read(PORT_DATA as u64, 4096)
    }

    fn finish(&mut self, pending: PendingAccess) {
        let data = self.port_data();
        // SAFETY: all parts of the union are plain numbers.
        let value = u64::from_le_bytes(unsafe { self.shared().__bindgen_anon_1.mmio.data });
        let mut space = GuestSpace::new(&self.vm.slots, &self.system, BITS, &mut self.cache);
        self.interpreter.complete(pending, &mut self.general, &mut space, &data, value);
        self.general.rflags &= !rflags::RF;
    }

    fn store_registers(&self) {
        let shared = self.shared();
        if shared.kvm_valid_regs == 0 {
            return;
        }
        shared.s.regs.sregs = self.special();
        shared.s.regs.regs = regs_of(&self.general);
        shared.s.regs.events = kvm_vcpu_events::default();
        shared.apic_base = 0xfee0_0900;
    }

    /// KVM_GET_SREGS.
    pub fn special(&self) -> kvm_sregs {
        let mut sregs = kvm_sregs {
            cr0: self.system.cr0,
            cr3: self.system.cr3,
            cr4: self.system.cr4,
            efer: self.system.efer,
            ..Default::default()
        };
        sregs.cs.l = u8::from(self.system.code_long);
        sregs.cs.db = u8::from(self.system.code_default_big);
        if self.system.mode() != Some(CodeMode::Long) {
            let places =
                [&mut sregs.es, &mut sregs.cs, &mut sregs.ss, &mut sregs.ds, &mut sregs.fs, &mut sregs.gs];
            for (number, (place, segment)) in places.into_iter().zip(&self.system.segments).enumerate() {
                let code = number == segments::CS && self.system.cr0 & cr0::PE != 0;
                *place = kvm_segment {
                    base: segment.base,
                    limit: segment.limit,
                    selector: segment.selector,
                    // Code that may be read. Data that may be written to, as all segments of real mode.
                    type_: if code { 11 } else { 3 },
                    present: 1,
                    db: u8::from(segment.big),
                    s: 1,
                    ..Default::default()
                };
            }
        }
        sregs
    }

    /// KVM_SET_SREGS, of control registers.
    pub fn set_special(&mut self, sregs: &kvm_sregs) {
        let (cr0, cr3, cr4, efer) = (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer);
        self.system = SystemRegisters { cr0, cr3, cr4, efer, ..self.system };
    }

    fn byte_at_rip(&self) -> Vec<u8> {
        self.memory.read(self.system.linear_rip(self.general.rip), 15)
    }

    /// Enters the guest: until an access that the VMM must answer, or HLT.
    fn enter(&mut self) -> i32 {
        self.entries += 1;
        self.entered_with = self.general;
        loop {
            let mut data = vec![0; 4096];
            let mut space = GuestSpace::new(&self.vm.slots, &self.system, BITS, &mut self.cache);
            let mut budget = RunBudget { instructions: 100_000, accesses: 1, deadline: u64::MAX };
            let end = self.interpreter.run(
                &mut self.general,
                &self.system,
                &mut space,
                // What KVM has itself, it is asked afterwards.
                &mut Quiet::default(),
                &mut data,
                &mut budget,
            );
            let (access, pending) = match end {
                RunEnd::Access(access, pending) => (access, pending),
                RunEnd::Stopped(reason) => {
                    if !self.by_processor(reason) {
                        self.shared().exit_reason = KVM_EXIT_HLT;
                        return 0;
                    }
                    continue;
                }
            };
            if !self.leaves_kernel(&access) {
                self.kernel.push(access);
                self.page.write(PORT_DATA as u64, &[0x5a; 8]);
                self.finish(pending);
                continue;
            }
            self.exit(access, pending, &data);
            return 0;
        }
    }

    /// What the interpreter leaves to the processor; false at HLT.
    fn by_processor(&mut self, reason: StopReason) -> bool {
        match (reason, self.byte_at_rip()[0]) {
            (StopReason::InterruptWindow, 0xfb) => {
                self.general.rflags |= rflags::IF;
                self.general.rip += 1;
                true
            }
            (StopReason::Instruction, 0x0f) if matches!(self.byte_at_rip()[1], 0x31 | 0x01) => {
                self.read_time_stamp();
                true
            }
            // CPUID, without an exit to user space.
            (StopReason::Instruction, 0x0f) => {
                self.general.gpr[registers::RAX] = 0x1234;
                self.general.rip += 2;
                true
            }
            (StopReason::Instruction, 0xf4) => false,
            other => panic!("{other:x?} at {:x}", self.general.rip),
        }
    }

    /// RDTSC and RDTSCP.
    fn read_time_stamp(&mut self) {
        let now = host_cycles().wrapping_add(self.time_stamp.0);
        self.general.gpr[registers::RAX] = now & 0xffff_ffff;
        self.general.gpr[registers::RDX] = now >> 32;
        self.general.rip += 2;
        if self.memory.read(self.general.rip - 1, 1) == [0x01] {
            self.general.gpr[registers::RCX] = self.time_stamp.1.into();
            self.general.rip += 1;
        }
    }

    /// With what KVM_RUN has returned.
    pub fn exit_reason(&self) -> u32 {
        self.shared().exit_reason
    }

    fn leaves_kernel(&self, access: &DeviceAccess) -> bool {
        match *access {
            DeviceAccess::PortRead { port, size, .. } => self.vm.port_leaves_kernel(port, size, false),
            DeviceAccess::PortWrite { port, size, .. } => self.vm.port_leaves_kernel(port, size, true),
            _ => true,
        }
    }

    fn exit(&mut self, access: DeviceAccess, pending: PendingAccess, data: &[u8]) {
        let bytes = |size: OperandSize| u8::try_from(size.bytes()).unwrap();
        let shared = self.shared();
        let mut io = |direction, port, size, count| {
            shared.exit_reason = KVM_EXIT_IO;
            shared.__bindgen_anon_1.io.direction = direction;
            shared.__bindgen_anon_1.io.size = bytes(size);
            shared.__bindgen_anon_1.io.port = port;
            shared.__bindgen_anon_1.io.count = count;
            shared.__bindgen_anon_1.io.data_offset = PORT_DATA as u64;
        };
        match access {
            DeviceAccess::PortRead { port, size, count } => io(0, port, size, count),
            DeviceAccess::PortWrite { port, size, count } => {
                io(1, port, size, count);
                self.page.write(PORT_DATA as u64, &data[..usize::try_from(count).unwrap() << size.shift()]);
            }
            DeviceAccess::MemoryRead { address, size } => {
                shared.exit_reason = KVM_EXIT_MMIO;
                shared.__bindgen_anon_1.mmio.phys_addr = address;
                shared.__bindgen_anon_1.mmio.len = u32::from(bytes(size));
                shared.__bindgen_anon_1.mmio.is_write = 0;
            }
            DeviceAccess::MemoryWrite { address, size, value } => {
                shared.exit_reason = KVM_EXIT_MMIO;
                shared.__bindgen_anon_1.mmio.phys_addr = address;
                shared.__bindgen_anon_1.mmio.len = u32::from(bytes(size));
                shared.__bindgen_anon_1.mmio.is_write = 1;
                shared.__bindgen_anon_1.mmio.data = value.to_le_bytes();
            }
        }
        let port = matches!(access, DeviceAccess::PortRead { .. } | DeviceAccess::PortWrite { .. });
        if matches!(access, DeviceAccess::MemoryWrite { .. }) {
            // KVM has done the instruction before the VMM hears of it.
            return self.finish(pending);
        }
        if !port {
            // The processor's own, of a fault.
            self.general.rflags |= rflags::RF;
        }
        let code = self.byte_at_rip();
        let opcode = code.iter().find(|byte| !matches!(byte, 0x66 | 0xf2 | 0xf3 | 0x40..=0x4f)).unwrap();
        match (port, opcode) {
            // OUTS is written back before the exit.
            (true, 0x6e | 0x6f) => self.finish(pending),
            (true, 0x6c | 0x6d) | (false, _) => self.completion = Some(Completion::Always(pending)),
            _ if self.emulates_ports => self.completion = Some(Completion::Always(pending)),
            _ => self.completion = Some(Completion::AtRip(self.general.rip, pending)),
        }
    }
}

impl VcpuDescriptor for FakeKvm {
    fn run(&mut self) -> i32 {
        if self.shared().kvm_dirty_regs & 1 != 0 {
            // SAFETY: all parts of the union are plain numbers.
            self.general = general_of(unsafe { &self.shared().s.regs.regs });
            self.shared().kvm_dirty_regs = 0;
            self.exception = false;
        }
        match self.completion.take() {
            None => {}
            Some(Completion::AtRip(rip, _)) if rip != self.general.rip => {}
            Some(Completion::AtRip(_, pending) | Completion::Always(pending)) => self.finish(pending),
        }
        let leaves = self.shared().immediate_exit != 0;
        if leaves && self.kick_while_completing {
            // As a VMM's handler does it.
            self.shared().immediate_exit = 1;
        }
        if leaves && std::mem::take(&mut self.panic_while_completing) {
            panic!("a fault that the test has made");
        }
        let signal = self.leaves_at_once || self.leaves_after.is_some_and(|after| self.entries >= after);
        let result = if leaves || signal { EINTR } else { self.enter() };
        self.store_registers();
        let enabled = self.general.rflags & rflags::IF != 0;
        self.shared().if_flag = u8::from(enabled);
        let takes = self.vm.has_interrupt_controller() || enabled;
        self.shared().ready_for_interrupt_injection = u8::from(takes);
        result
    }

    fn registers(&mut self, registers: &mut kvm_regs) -> i32 {
        *registers = regs_of(&self.general);
        0
    }

    fn set_registers(&mut self, registers: &kvm_regs) -> i32 {
        self.general = general_of(registers);
        self.exception = false;
        0
    }

    fn events(&mut self, events: &mut kvm_vcpu_events) -> i32 {
        *events = kvm_vcpu_events::default();
        events.exception.injected = u8::from(self.exception);
        0
    }

    fn set_events(&mut self, events: &kvm_vcpu_events) -> i32 {
        self.exception = events.exception.injected != 0;
        0
    }

    fn time_stamp_offset(&mut self) -> Option<u64> {
        if self.panic_at_time_stamp {
            // As a panic, without its message.
            std::panic::resume_unwind(Box::new("a fault that the test has made"));
        }
        None
    }

    fn pdptes(&mut self) -> Option<[u64; 4]> {
        self.pdptes.1 += 1;
        self.pdptes.0
    }

    fn switched(&self) -> ClusterSwitch {
        match self.panic_when_asked.get() {
            Some(0) => panic!("a fault that the test has made"),
            Some(left) => self.panic_when_asked.set(Some(left - 1)),
            None => {}
        }
        self.switched
    }

    fn debug_registers(&mut self, registers: &mut kvm_debugregs) -> i32 {
        registers.dr7 = self.dr7;
        0
    }
}

pub fn host_cycles() -> u64 {
    // SAFETY: every x86-64 processor has it.
    unsafe { core::arch::x86_64::_rdtsc() }
}

pub fn general_of(r: &kvm_regs) -> GeneralRegisters {
    GeneralRegisters {
        gpr: [
            r.rax, r.rcx, r.rdx, r.rbx, r.rsp, r.rbp, r.rsi, r.rdi, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13,
            r.r14, r.r15,
        ],
        rip: r.rip,
        rflags: r.rflags,
    }
}

pub fn regs_of(general: &GeneralRegisters) -> kvm_regs {
    let g = &general.gpr;
    kvm_regs {
        rax: g[0],
        rcx: g[1],
        rdx: g[2],
        rbx: g[3],
        rsp: g[4],
        rbp: g[5],
        rsi: g[6],
        rdi: g[7],
        r8: g[8],
        r9: g[9],
        r10: g[10],
        r11: g[11],
        r12: g[12],
        r13: g[13],
        r14: g[14],
        r15: g[15],
        rip: general.rip,
        rflags: general.rflags,
    }
}
