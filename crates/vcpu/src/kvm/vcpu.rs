//! KVM_RUN of one vCPU, clustered.
//!
//! ```text
//!   VMM: KVM_RUN --> enter the guest ------------------------------> exit with an access (real)
//!        answers it                                                        |
//!        KVM_RUN --> complete it, here or by KVM --> interpret --> return with the next access (made up)
//!        answers it                                                        |
//!        KVM_RUN --> complete it here ------------> interpret --> nothing further: registers to KVM, enter
//! ```
//!
//! KVM remembers that a real access is to be completed at the next KVM_RUN. For a plain IN or OUT it drops that if RIP is not where
//! it was, so the access is completed here and the registers are given to KVM with the new RIP. All others are
//! completed by KVM, in a KVM_RUN that enters nothing.
//!
//! While the VMM handles a made-up exit, KVM still has the registers of the last real one. If the VMM asks for any state of
//! the vCPU then, [`ClusteredVcpu::before_other_call`] brings KVM's up to date first.

use kvm_bindings::kvm_regs;

use super::gate::{SharedVm, VmRead};
use super::predictor::Predictor;
use super::run_page::{KvmExit, RunPage, general_of, regs_of};
use super::vm::VmState;
use crate::arithmetic::{OperandSize, cycles};
use crate::interpreter::{Interpreter, PendingAccess, RunEnd};
use crate::memory::{DeviceAccess, LinearMemory, Platform, RunBudget};
use crate::registers::{GeneralRegisters, SystemRegisters};
use crate::space::{GuestSpace, TranslationCache};

/// The calls that clustering makes on a vCPU's descriptor: none but those that every VMM makes too. Each returns what the
/// system call would have: 0, or an error number with a minus sign.
pub trait VcpuDescriptor {
    /// KVM_RUN.
    fn run(&mut self) -> i32;
    /// KVM_GET_REGS.
    fn registers(&mut self, registers: &mut kvm_regs) -> i32;
    /// KVM_SET_REGS.
    fn set_registers(&mut self, registers: &kvm_regs) -> i32;
}

/// What one cluster may take until the guest is entered again.
#[derive(Clone, Copy, Debug)]
pub struct ClusterLimits {
    /// Instructions.
    pub instructions: u32,
    /// Made-up exits.
    pub accesses: u32,
    /// Cycles of the time stamp counter since the last real exit, the VMM's share included.
    pub cycles: u64,
    /// See [`Platform::output_elements`].
    pub output_elements: u32,
}

/// What clustering has done for one vCPU since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClusterCounts {
    /// Returns of KVM_RUN with an access that KVM has found.
    pub real_accesses: u64,
    /// Returns with an access that the interpreter has found: exits saved.
    pub made_up_accesses: u64,
    /// Calls of KVM_RUN that entered nothing and only completed an access.
    pub completions: u64,
    /// Instructions interpreted.
    pub instructions: u64,
}

/// An exit that the VMM is handling.
enum Exit {
    /// Not an access, or one that clustering leaves alone.
    None,
    Real(DeviceAccess),
    MadeUp {
        pending: PendingAccess,
        /// The VMM has asked for state since, and may have changed it.
        shown: bool,
    },
}

/// How an attempt to go on without KVM ended.
enum Attempt {
    /// The VMM has the next access.
    Access,
    /// The guest is to be entered.
    Enter,
    /// KVM_RUN has returned this, with another exit.
    Returned(i32),
}

/// The vCPU's half of clustering. One per vCPU; every call on the vCPU's descriptor passes here, on its thread.
pub struct ClusteredVcpu {
    page: RunPage,
    interpreter: Interpreter,
    cache: TranslationCache,
    predictor: Predictor,
    limits: ClusterLimits,
    physical_bits: u32,
    counts: ClusterCounts,

    exit: Exit,
    /// What the interpreter has made of the registers, and those that go with them.
    general: GeneralRegisters,
    system: SystemRegisters,
    /// `general` is newer than KVM's.
    newer: bool,
    /// RIP of the plain IN or OUT that KVM believes to be incomplete.
    incomplete: Option<u64>,
    budget: RunBudget,
    /// Where the cluster began, and how many accesses it has had since.
    cluster: (u64, u32),
}

impl ClusteredVcpu {
    /// Allocates all that will be needed. `physical_bits` as in
    /// [`GuestCpuid`](super::GuestCpuid).
    pub fn new(page: RunPage, limits: ClusterLimits, physical_bits: u32) -> Self {
        let system = page.system();
        Self {
            page,
            interpreter: Interpreter::new(),
            cache: TranslationCache::new(),
            predictor: Predictor::default(),
            limits,
            physical_bits,
            counts: ClusterCounts::default(),
            exit: Exit::None,
            general: GeneralRegisters::default(),
            system,
            newer: false,
            incomplete: None,
            budget: RunBudget { instructions: 0, accesses: 0, deadline: 0 },
            cluster: (0, 0),
        }
    }

    /// What has been done so far.
    pub fn counts(&self) -> ClusterCounts {
        ClusterCounts { instructions: self.interpreter.executed(), ..self.counts }
    }

    /// KVM_SET_CPUID2 has said how many bits an address has.
    pub fn set_physical_bits(&mut self, bits: u32) {
        self.physical_bits = bits;
    }

    /// The VMM calls KVM_RUN. Returns what it is to get.
    pub fn run(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> i32 {
        let attempt = match std::mem::replace(&mut self.exit, Exit::None) {
            Exit::None => Attempt::Enter,
            Exit::MadeUp { pending, shown: false } => {
                self.complete(vm, pending);
                self.cluster(vm)
            }
            Exit::MadeUp { pending, shown: true } => {
                self.complete_shown(vm, pending, kvm);
                Attempt::Enter
            }
            Exit::Real(access) => self.after_real_exit(vm, access, kvm),
        };
        match attempt {
            Attempt::Access => 0,
            Attempt::Enter => self.enter(vm, kvm),
            Attempt::Returned(result) => result,
        }
    }

    /// The VMM makes another call on the vCPU's descriptor, or stops using the interposer: brings KVM's registers up to
    /// date. To be called before that call.
    pub fn before_other_call(&mut self, kvm: &mut impl VcpuDescriptor) {
        if self.newer {
            // Wherever RIP is: the VMM may move it.
            self.forget_incomplete(kvm);
            let _ = kvm.set_registers(&regs_of(&self.general));
            self.newer = false;
        }
        match &mut self.exit {
            Exit::MadeUp { shown, .. } => *shown = true,
            // The VMM may change what a cluster would go on from.
            exit => *exit = Exit::None,
        }
    }

    /// Registers to KVM, and into the guest.
    fn enter(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> i32 {
        if self.newer {
            // Elsewhere KVM drops it by itself.
            if self.incomplete == Some(self.general.rip) {
                self.forget_incomplete(kvm);
            }
            self.page.put_general(&self.general);
            self.newer = false;
        }
        self.learn();
        let allowed = vm.read().is_some_and(|state| state.obstacle().is_none());
        let clustered = allowed && !self.page.registers_in_use();
        if clustered {
            self.page.share_registers();
        }
        let result = kvm.run();
        self.incomplete = None;
        self.after_return(result, clustered);
        result
    }

    fn after_return(&mut self, result: i32, clustered: bool) {
        self.exit = Exit::None;
        if result != 0 || !clustered {
            return;
        }
        if let KvmExit::Access(access) = self.page.exit() {
            self.counts.real_accesses += 1;
            self.exit = Exit::Real(access);
            self.budget = RunBudget {
                instructions: self.limits.instructions,
                accesses: self.limits.accesses,
                deadline: cycles().saturating_add(self.limits.cycles),
            };
        }
    }

    /// What the cluster that has ended was worth.
    fn learn(&mut self) {
        let (rip, accesses) = std::mem::take(&mut self.cluster);
        if rip != 0 {
            self.predictor.learn(rip, accesses);
        }
    }

    /// The VMM has answered an access that KVM has found.
    fn after_real_exit(
        &mut self,
        vm: &SharedVm,
        access: DeviceAccess,
        kvm: &mut impl VcpuDescriptor,
    ) -> Attempt {
        let general = self.page.general();
        let Some(state) = vm.read() else { return Attempt::Enter };
        let permitted = state.obstacle().is_none()
            && !self.page.registers_in_use()
            && !self.page.wanted_by_vmm()
            && !self.page.event_pending();
        if !permitted || !self.predictor.worth_it(general.rip) {
            return Attempt::Enter;
        }
        self.system = self.page.system();
        if self.system.unsupported(general.rflags).is_some() {
            return Attempt::Enter;
        }
        self.cluster = (general.rip, 0);
        self.general = general;
        let complete = self.complete_plain(vm, &state, access);
        // KVM may have to wait for a change of the slots.
        drop(state);
        if !complete {
            // KVM has more to do than to move RIP and to fill RAX.
            self.counts.completions += 1;
            let result = self.page.only_complete(|| kvm.run());
            self.incomplete = None;
            if result != -libc::EINTR {
                self.learn();
                self.after_return(result, true);
                return Attempt::Returned(result);
            }
            if self.page.event_pending() || self.page.wanted_by_vmm() {
                return Attempt::Enter;
            }
            self.general = self.page.general();
            self.system = self.page.system();
        }
        self.cluster(vm)
    }

    /// Completes an IN or OUT at RIP that is no string instruction, if that is what KVM has exited for.
    fn complete_plain(&mut self, vm: &SharedVm, state: &VmState, access: DeviceAccess) -> bool {
        let at = self.general.rip;
        let before = at.wrapping_sub(1);
        let mut space = GuestSpace::new(&state.slots, &self.system, self.physical_bits, &mut self.cache);
        // KVM moves RIP beyond OUTS before it exits; what follows may be an OUT that looks like the one in question.
        match space.load(before, OperandSize::Byte) {
            Ok(0x6e | 0x6f) | Err(_) => return false,
            Ok(_) => {}
        }
        let mut here = Here { page: &self.page, vm, state, limits: &self.limits };
        let mut budget = RunBudget { instructions: 1, accesses: 1, deadline: u64::MAX };
        // The data page has the answer already, so what a write carries is put elsewhere.
        let mut scratch = [0; 8];
        let mut general = self.general;
        let end = self.interpreter.run(
            &mut general,
            &self.system,
            &mut space,
            &mut here,
            &mut scratch,
            &mut budget,
        );
        match end {
            RunEnd::Access(found, pending) if found == access && pending.is_plain() && is_port(access) => {
                let data = self.page.port_data();
                self.interpreter.complete(pending, &mut self.general, &mut space, data, 0);
                self.newer = true;
                self.incomplete = Some(at);
                true
            }
            _ => false,
        }
    }

    /// Completes the instruction of a made-up exit.
    fn complete(&mut self, vm: &SharedVm, pending: PendingAccess) {
        let state = settled(vm);
        let mut space = GuestSpace::new(&state.slots, &self.system, self.physical_bits, &mut self.cache);
        let value = self.page.memory_data();
        let data = self.page.port_data();
        self.interpreter.complete(pending, &mut self.general, &mut space, data, value);
        self.newer = true;
    }

    /// The same after the VMM has had KVM's registers, which were those before the instruction. If it has moved RIP, the
    /// instruction is not there any more.
    fn complete_shown(&mut self, vm: &SharedVm, pending: PendingAccess, kvm: &mut impl VcpuDescriptor) {
        let at = self.general.rip;
        let mut registers = kvm_regs::default();
        if kvm.registers(&mut registers) == 0 && registers.rip == at {
            self.general = general_of(&registers);
            self.complete(vm, pending);
        }
    }

    /// Interprets until the next access, and makes an exit of it.
    fn cluster(&mut self, vm: &SharedVm) -> Attempt {
        let Some(state) = vm.read().filter(|state| state.obstacle().is_none()) else {
            return Attempt::Enter;
        };
        let before = self.interpreter.executed();
        let mut space = GuestSpace::new(&state.slots, &self.system, self.physical_bits, &mut self.cache);
        let (page, data) = self.page.with_port_data();
        let end = self.interpreter.run(
            &mut self.general,
            &self.system,
            &mut space,
            &mut Here { page, vm, state: &state, limits: &self.limits },
            data,
            &mut self.budget,
        );
        self.newer |= self.interpreter.executed() != before;
        match end {
            RunEnd::Stopped(_) => Attempt::Enter,
            RunEnd::Access(access, pending) => {
                self.page.put_exit(&access, &self.general);
                self.counts.made_up_accesses += 1;
                self.cluster.1 += 1;
                // KVM's registers are older even if nothing was interpreted: the access before was completed here.
                self.exit = Exit::MadeUp { pending, shown: false };
                Attempt::Access
            }
        }
    }

    /// KVM would complete a plain IN or OUT once more if RIP came back to it: has it do so now, and what that does to the
    /// registers is overwritten.
    fn forget_incomplete(&mut self, kvm: &mut impl VcpuDescriptor) {
        if self.incomplete.take().is_some() {
            self.counts.completions += 1;
            let _ = self.page.only_complete(|| kvm.run());
        }
    }
}

/// The state once no change is under way: the answer of a device must not be lost. Changes take as long as KVM's own, and
/// KVM_RUN would wait for them too.
fn settled(vm: &SharedVm) -> VmRead<'_> {
    loop {
        if let Some(state) = vm.read() {
            return state;
        }
        std::hint::spin_loop();
    }
}

fn is_port(access: DeviceAccess) -> bool {
    matches!(access, DeviceAccess::PortRead { .. } | DeviceAccess::PortWrite { .. })
}

/// The interpreter's surroundings on this vCPU.
struct Here<'a> {
    page: &'a RunPage,
    vm: &'a SharedVm,
    state: &'a VmState,
    limits: &'a ClusterLimits,
}

impl Platform for Here<'_> {
    fn cycles(&mut self) -> u64 {
        cycles()
    }

    fn kicked(&mut self) -> bool {
        self.page.wanted_by_vmm() || self.vm.change_waits()
    }

    fn output_elements(&mut self) -> u64 {
        u64::from(self.limits.output_elements)
    }

    fn port_leaves_kernel(&mut self, port: u16, size: OperandSize, write: bool) -> bool {
        self.state.port_leaves_kernel(port, size, write)
    }

    fn address_leaves_kernel(&mut self, address: u64, size: OperandSize, write: bool) -> bool {
        self.state.address_leaves_kernel(address, size, write, self.page.apic_page())
    }
}
