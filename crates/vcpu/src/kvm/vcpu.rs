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
//! KVM remembers that a real access is to be completed at the next KVM_RUN. For a plain IN or OUT in 64-bit mode it drops that if RIP is
//! not where it was, so the access is completed here and the registers are given to KVM with the new RIP. All others are
//! completed by KVM, in a KVM_RUN that enters nothing.
//!
//! While the VMM handles a made-up exit, KVM still has the registers of the last real one. If the VMM asks for any state of
//! the vCPU then, [`ClusteredVcpu::before_other_call`] brings KVM's up to date first.

mod batch;

use std::panic::{AssertUnwindSafe, catch_unwind};

use kvm_bindings::{kvm_debugregs, kvm_regs, kvm_vcpu_events};

use super::counters::{BatchEvent, Cluster, ClusterCounts, ClusterEnd, VcpuCounters};
use super::descriptor::VcpuDescriptor;
use super::gate::SharedVm;
use super::guest_clock::GuestClock;
use super::page::ClusterSwitch;
use super::predictor::Predictor;
use super::run_page::{KvmExit, RunPage, general_of, regs_of};
use super::vm::{GuestCpuid, VmState};
use crate::arithmetic::{OperandSize, cycles};
use crate::interpreter::{Interpreter, PendingAccess, RunEnd};
use crate::memory::{DeviceAccess, LinearMemory, Platform, RunBudget, StopReason};
use crate::paging::pdptes_are_in_memory;
use crate::registers::{CodeMode, GeneralRegisters, SystemRegisters, rflags};
use crate::space::{GuestSpace, TranslationCache};

/// The bits of DR7 that enable breakpoints.
const BREAKPOINTS: u64 = 0xff;

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
    /// An entry of a batch.
    Entry {
        rung: batch::Rung,
        shown: bool,
    },
}

/// How an attempt to go on without KVM ended.
enum Attempt {
    /// The VMM has the next access.
    Access,
    /// The guest is to be entered, and why, if there was anything to begin or to go on with.
    Enter(Option<ClusterEnd>),
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
    counters: &'static VcpuCounters,
    clock: GuestClock,
    /// KVM has been asked for PDPTEs, and does not know them.
    pdptes_refused: bool,
    /// CPUID offers batches.
    batches: bool,
    /// Whether faults reach their handler on the vCPU's thread, if that was asked.
    faults_arrive: Option<bool>,

    exit: Exit,
    /// What the interpreter has made of the registers, and those that go with them.
    general: GeneralRegisters,
    system: SystemRegisters,
    /// `general` when KVM had the same.
    shown: GeneralRegisters,
    /// What KVM has said of its last real exit: it would have taken an interrupt from the VMM.
    takes_interrupts: bool,
    /// `general` is newer than KVM's.
    newer: bool,
    /// RIP of the plain IN or OUT that KVM believes to be incomplete.
    incomplete: Option<u64>,
    budget: RunBudget,
    /// How many interrupts the VMM had raised when the guest was last entered so that it took them.
    interrupts: u32,
    window: Window,
    /// The cluster that has begun and not ended.
    cluster: Option<Cluster>,
}

impl ClusteredVcpu {
    /// Allocates all that will be needed. `physical_bits` as in
    /// [`GuestCpuid`](super::GuestCpuid).
    pub fn new(
        page: RunPage,
        limits: ClusterLimits,
        physical_bits: u32,
        counters: &'static VcpuCounters,
    ) -> Self {
        let system = page.system();
        Self {
            page,
            interpreter: Interpreter::new(),
            cache: TranslationCache::new(),
            predictor: Predictor::default(),
            limits,
            physical_bits,
            counters,
            clock: GuestClock::default(),
            pdptes_refused: false,
            batches: false,
            faults_arrive: None,
            exit: Exit::None,
            general: GeneralRegisters::default(),
            shown: GeneralRegisters::default(),
            system,
            takes_interrupts: false,
            newer: false,
            incomplete: None,
            budget: RunBudget { instructions: 0, accesses: 0, deadline: 0 },
            interrupts: 0,
            window: Window::default(),
            cluster: None,
        }
    }

    /// What has been done so far.
    pub fn counts(&self) -> ClusterCounts {
        self.counters.counts()
    }

    /// KVM_SET_CPUID2 has succeeded.
    pub fn set_cpuid(&mut self, cpuid: &GuestCpuid) {
        self.physical_bits = cpuid.physical_bits;
        self.clock.set_rdtscp(cpuid.rdtscp);
    }

    /// What KVM_GET_TSC_KHZ says of a new vCPU, which counts as the host does; 0 if it says nothing. Until then RDTSC ends
    /// clusters.
    pub fn set_host_time_stamp_speed(&mut self, kilohertz: u64) {
        self.clock.set_host_speed(kilohertz);
    }

    /// KVM_SET_TSC_KHZ has succeeded.
    pub fn set_time_stamp_speed(&mut self, kilohertz: u64) {
        self.clock.set_speed(kilohertz);
    }

    /// The VMM calls KVM_RUN. Returns what it is to get.
    ///
    /// A panic in what is interpreted ends here: the guest goes on from its last complete instruction, and the VM is
    /// [failed](SharedVm::fail). If it was that of an access which the VMM has answered, the access is done again.
    pub fn run(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> i32 {
        let exit = std::mem::replace(&mut self.exit, Exit::None);
        let mut attempt = self.caught(vm, |vcpu| vcpu.attempt(exit, vm, kvm));
        loop {
            let why = match attempt {
                Attempt::Access => return 0,
                Attempt::Returned(result) => return result,
                Attempt::Enter(why) => why,
            };
            self.ended(why);
            let delivers =
                self.interrupts_enabled() || why == Some(ClusterEnd::Stopped(StopReason::InterruptWindow));
            self.window.enter(delivers);
            let result = self.enter(vm, kvm, delivers);
            match self.exit {
                Exit::Real(access) if self.is_doorbell(&access) => {}
                _ => return result,
            }
            // Each turn has called KVM_RUN, which sees the VMM's wishes.
            attempt = self.caught(vm, |vcpu| vcpu.rung(vm, kvm).unwrap_or(Attempt::Returned(result)));
        }
    }

    /// What comes out of `attempt`, also if it panics.
    fn caught(&mut self, vm: &SharedVm, attempt: impl FnOnce(&mut Self) -> Attempt) -> Attempt {
        // After a panic only `general`, `newer` and `incomplete` are used. `general` changes at the end of each step, and `newer` may not say so
        // yet.
        catch_unwind(AssertUnwindSafe(|| attempt(self))).unwrap_or_else(|_| {
            vm.fail();
            self.newer |= self.cluster.is_some() && self.general != self.shown;
            Attempt::Enter(Some(ClusterEnd::Panic))
        })
    }

    fn attempt(&mut self, exit: Exit, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> Attempt {
        match exit {
            Exit::None => Attempt::Enter(None),
            Exit::MadeUp { pending, shown: false } => {
                self.complete(pending);
                self.cluster(vm, kvm)
            }
            Exit::MadeUp { pending, shown: true } => {
                self.complete_shown(kvm, |vcpu| vcpu.complete(pending));
                Attempt::Enter(Some(ClusterEnd::OtherCall))
            }
            Exit::Entry { rung, shown: false } => self.entry_answered(rung, vm, kvm),
            Exit::Entry { rung, shown: true } => {
                self.shown_entry_answered(rung, vm, kvm);
                Attempt::Enter(self.cluster.is_some().then_some(ClusterEnd::OtherCall))
            }
            Exit::Real(access) => self.after_real_exit(vm, access, kvm),
        }
    }

    /// The VMM makes another call on the vCPU's descriptor, or stops using the interposer: brings KVM's registers up to
    /// date. To be called before that call.
    pub fn before_other_call(&mut self, kvm: &mut impl VcpuDescriptor) {
        self.clock.forget();
        if self.newer {
            // Wherever RIP is: the VMM may move it.
            self.forget_incomplete(kvm);
            let _ = kvm.set_registers(&regs_of(&self.general));
            self.shown = self.general;
            self.newer = false;
        }
        match &mut self.exit {
            Exit::MadeUp { shown, .. } | Exit::Entry { shown, .. } => *shown = true,
            // The VMM may change what a cluster would go on from.
            exit => *exit = Exit::None,
        }
    }

    /// IF of the guest, as the interpreter has left it or as KVM had it at its last exit.
    fn interrupts_enabled(&self) -> bool {
        if self.newer { self.general.rflags & rflags::IF != 0 } else { self.page.interrupts_enabled() }
    }

    /// Registers to KVM, and into the guest. `delivers`: it takes interrupts that wait, at once or with its next instruction.
    fn enter(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor, delivers: bool) -> i32 {
        // Before our own registers are put there.
        let in_use = self.page.registers_in_use();
        let declined = self.obstacle(vm, kvm).or(in_use.then_some(ClusterEnd::Busy));
        if self.newer {
            // Elsewhere KVM drops it by itself.
            if self.incomplete == Some(self.general.rip) {
                self.forget_incomplete(kvm);
            }
            self.page.put_general(&self.general);
            self.newer = false;
        }
        if declined.is_none() {
            self.page.share_registers();
        }
        self.clock.forget();
        if delivers {
            self.interrupts = vm.interrupts();
        }
        let result = kvm.run();
        self.incomplete = None;
        self.after_return(result, declined);
        result
    }

    /// Why no cluster may begin or go on.
    fn cluster_obstacle(&self, vm: &SharedVm, kvm: &impl VcpuDescriptor) -> Option<ClusterEnd> {
        self.obstacle_if(vm, kvm, |switched| switched == ClusterSwitch::On)
    }

    /// Why there may be neither clusters nor batches.
    fn obstacle(&self, vm: &SharedVm, kvm: &impl VcpuDescriptor) -> Option<ClusterEnd> {
        self.obstacle_if(vm, kvm, |switched| match switched {
            ClusterSwitch::On => true,
            ClusterSwitch::BatchOnly => self.batches,
            ClusterSwitch::Off => false,
        })
    }

    fn obstacle_if(
        &self,
        vm: &SharedVm,
        kvm: &impl VcpuDescriptor,
        on: impl FnOnce(ClusterSwitch) -> bool,
    ) -> Option<ClusterEnd> {
        if vm.has_failed() {
            return Some(ClusterEnd::Panic);
        }
        if !on(kvm.switched()) {
            return Some(ClusterEnd::SwitchedOff);
        }
        let Some(state) = vm.read() else { return Some(ClusterEnd::Busy) };
        state.obstacle().map(ClusterEnd::Obstacle)
    }

    /// KVM_RUN has returned this. `declined` is why nothing can follow if that is an access.
    fn after_return(&mut self, result: i32, declined: Option<ClusterEnd>) {
        self.exit = Exit::None;
        self.counters.returned();
        if result != 0 {
            return;
        }
        if let KvmExit::Access(access) = self.page.exit() {
            self.counters.real_access();
            if let Some(why) = declined {
                self.counters.declined(why);
                return;
            }
            self.exit = Exit::Real(access);
            self.budget = RunBudget {
                instructions: self.limits.instructions,
                accesses: self.limits.accesses,
                deadline: cycles().saturating_add(self.limits.cycles),
            };
        }
    }

    /// Counts the cluster that has ended, or that none was begun.
    fn ended(&mut self, why: Option<ClusterEnd>) {
        match (self.cluster.take(), why) {
            (Some(cluster), why) => {
                self.counters.ended(&cluster, why.unwrap_or(ClusterEnd::OtherCall));
                self.predictor.learn(cluster.rip, cluster.accesses);
            }
            (None, Some(why)) => self.counters.declined(why),
            (None, None) => {}
        }
    }

    /// The VMM has answered an access that KVM has found.
    fn after_real_exit(
        &mut self,
        vm: &SharedVm,
        access: DeviceAccess,
        kvm: &mut impl VcpuDescriptor,
    ) -> Attempt {
        let declined = |why| Attempt::Enter(Some(why));
        if let Some(why) = self.cluster_obstacle(vm, kvm) {
            return declined(why);
        }
        if self.page.registers_in_use() {
            return declined(ClusterEnd::Busy);
        }
        if self.page.wanted_by_vmm() {
            return declined(ClusterEnd::Stopped(StopReason::Kicked));
        }
        if self.page.event_pending() {
            return declined(ClusterEnd::EventPending);
        }
        let general = self.page.general();
        if general.rflags & rflags::IF != 0 && vm.interrupts() != self.interrupts {
            return declined(ClusterEnd::Stopped(StopReason::InterruptWindow));
        }
        self.system = self.page.system();
        // Offsets in different segments would be the same place.
        let place = self.system.linear_rip(general.rip);
        if !self.predictor.worth_it(place) {
            return declined(ClusterEnd::NotWorthIt);
        }
        self.takes_interrupts = self.page.takes_interrupts();
        // Exits for memory are faults, which set RF (Intel SDM volume 3, 28.3.3); completing the instruction clears it.
        if self.system.unsupported(general.rflags & !rflags::RF).is_some() {
            return declined(ClusterEnd::Stopped(StopReason::Mode));
        }
        if !*self.faults_arrive.get_or_insert_with(|| kvm.faults_arrive()) {
            return declined(ClusterEnd::FaultsBlocked);
        }
        // `kvm_run` does not show them. Breakpoints are the processor's to honour.
        let mut debug = kvm_debugregs::default();
        if kvm.debug_registers(&mut debug) != 0 || debug.dr7 & BREAKPOINTS != 0 {
            return declined(ClusterEnd::DebugRegisters);
        }
        let Some(state) = vm.read() else { return declined(ClusterEnd::Busy) };
        if self.system.uses_pdptes() {
            // With the slots as they are: on SVM KVM reads memory for this, and for years did so while they could change.
            let said = self.ask_pdptes(kvm);
            let cr3 = self.system.cr3;
            let Some(pdptes) = said.filter(|said| pdptes_are_in_memory(*said, cr3, &state.slots)) else {
                return declined(ClusterEnd::Stopped(StopReason::Mode));
            };
            self.system.pdptes = pdptes;
        }
        self.cluster = Some(Cluster { rip: place, ..Cluster::default() });
        self.kvm_has(general);
        let complete = self.complete_plain(vm, &state, access, kvm);
        // KVM may have to wait for a change of the slots.
        drop(state);
        if !complete {
            // KVM has more to do than to move RIP and to fill RAX.
            self.counters.completion();
            let result = self.page.only_complete(|| kvm.run());
            self.incomplete = None;
            if result != -libc::EINTR {
                self.ended(Some(ClusterEnd::KernelExit));
                self.after_return(result, None);
                return Attempt::Returned(result);
            }
            if self.page.event_pending() {
                return Attempt::Enter(Some(ClusterEnd::EventPending));
            }
            if self.page.wanted_by_vmm() {
                return Attempt::Enter(Some(ClusterEnd::Stopped(StopReason::Kicked)));
            }
            self.kvm_has(self.page.general());
            // No instruction has begun that could have loaded others.
            self.system = SystemRegisters { pdptes: self.system.pdptes, ..self.page.system() };
            self.takes_interrupts = self.page.takes_interrupts();
        }
        self.cluster(vm, kvm)
    }

    /// The PDPTEs of PAE paging: `kvm_run` does not show them.
    fn ask_pdptes(&mut self, kvm: &mut impl VcpuDescriptor) -> Option<[u64; 4]> {
        if self.pdptes_refused {
            return None;
        }
        let pdptes = kvm.pdptes();
        self.pdptes_refused = pdptes.is_none();
        pdptes
    }

    fn kvm_has(&mut self, general: GeneralRegisters) {
        self.general = general;
        self.shown = general;
    }

    /// Completes an IN or OUT at RIP that is no string instruction, if that is what KVM has exited for.
    fn complete_plain(
        &mut self,
        vm: &SharedVm,
        state: &VmState,
        access: DeviceAccess,
        kvm: &mut impl VcpuDescriptor,
    ) -> bool {
        let at = self.general.rip;
        let Some(pending) = self.plain_access(vm, state, access, kvm) else { return false };
        let data = self.page.port_data();
        self.interpreter.complete_in_registers(pending, &mut self.general, data, 0);
        self.newer = true;
        self.incomplete = Some(at);
        true
    }

    /// What is left of the IN or OUT at RIP if it is no string instruction, and what KVM has exited for.
    fn plain_access(
        &mut self,
        vm: &SharedVm,
        state: &VmState,
        access: DeviceAccess,
        kvm: &mut impl VcpuDescriptor,
    ) -> Option<PendingAccess> {
        // After a write to a device's memory RIP is beyond it already: what is there has not been done.
        if !is_port(access) {
            return None;
        }
        // Where VMX cannot run real mode itself, KVM emulates that and what of other modes VMX does not take; its emulator completes IN
        // and OUT wherever RIP is, and puts RIP back.
        if self.system.mode() != Some(CodeMode::Long) {
            return None;
        }
        let before = self.system.linear_rip(self.general.rip).wrapping_sub(1);
        let mut space = GuestSpace::new(&state.slots, &self.system, self.physical_bits, &mut self.cache);
        // KVM moves RIP beyond OUTS before it exits; what follows may be an OUT that looks like the one in question.
        match space.load(before, OperandSize::Byte) {
            Ok(0x6e | 0x6f) | Err(_) => return None,
            Ok(_) => {}
        }
        let (page, limits, clock, interrupts) = (&self.page, &self.limits, &mut self.clock, self.interrupts);
        let window = &mut self.window;
        let mut here = Here { page, vm, state, limits, interrupts, window, clock, kvm };
        // The data page has the answer already, so what a write carries is put elsewhere.
        let found = self.interpreter.port_access(&self.general, &self.system, &mut space, &mut here);
        found.filter(|(found, pending)| *found == access && pending.is_plain()).map(|(_, pending)| pending)
    }

    /// Completes the instruction of a made-up exit. The answer of a device must not be lost, so nothing is needed here that others may be
    /// changing: INS, which stores what it reads, is never made up.
    fn complete(&mut self, pending: PendingAccess) {
        let value = self.page.memory_data();
        let data = self.page.port_data();
        self.interpreter.complete_in_registers(pending, &mut self.general, data, value);
        self.newer = true;
    }

    /// The same after the VMM has had KVM's registers, which were those before the instruction. If it has moved RIP, the
    /// instruction is not there any more.
    fn complete_shown(&mut self, kvm: &mut impl VcpuDescriptor, complete: impl FnOnce(&mut Self)) {
        let at = self.general.rip;
        let mut registers = kvm_regs::default();
        if kvm.registers(&mut registers) != 0 || registers.rip != at {
            return;
        }
        self.kvm_has(general_of(&registers));
        complete(self);
        // Registers that KVM is given drop an exception that the VMM has injected meanwhile, such as a machine check.
        let mut events = kvm_vcpu_events::default();
        let injected =
            kvm.events(&mut events) == 0 && (events.exception.injected != 0 || events.exception.pending != 0);
        if injected && kvm.set_registers(&regs_of(&self.general)) == 0 {
            self.newer = false;
            let _ = kvm.set_events(&events);
        }
    }

    /// Interprets until the next access that the VMM is to answer, and makes an exit of it.
    fn cluster(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> Attempt {
        loop {
            // Each turn takes an access of the budget.
            if let Some(attempt) = self.interpret(vm, kvm) {
                return attempt;
            }
        }
    }

    /// Interprets until the next access. `None` if it was a doorbell that has got its answer.
    fn interpret(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> Option<Attempt> {
        let enter = |why| Some(Attempt::Enter(Some(why)));
        if let Some(why) = self.cluster_obstacle(vm, kvm) {
            return enter(why);
        }
        // The host has slept meanwhile, and its counter begins anew: the deadline is nowhere near.
        if self.budget.deadline.saturating_sub(cycles()) > self.limits.cycles {
            return enter(ClusterEnd::Stopped(StopReason::TimeLimit));
        }
        let Some(state) = vm.read() else { return enter(ClusterEnd::Busy) };
        let (before, begun) = (self.interpreter.executed(), cycles());
        let mut space = GuestSpace::new(&state.slots, &self.system, self.physical_bits, &mut self.cache);
        let (page, data) = self.page.with_port_data();
        let end = self.interpreter.run(
            &mut self.general,
            &self.system,
            &mut space,
            &mut Here {
                page,
                vm,
                state: &state,
                limits: &self.limits,
                interrupts: self.interrupts,
                window: &mut self.window,
                clock: &mut self.clock,
                kvm,
            },
            data,
            &mut self.budget,
        );
        let executed = self.interpreter.executed() - before;
        self.newer |= executed != 0;
        let cluster = self.cluster.get_or_insert_default();
        cluster.instructions += executed;
        cluster.cycles += cycles().saturating_sub(begun);
        match end {
            RunEnd::Stopped(reason) => {
                if reason == StopReason::Instruction {
                    self.counters.stopped_at(self.interpreter.last_instruction());
                }
                enter(ClusterEnd::Stopped(reason))
            }
            // What it reads goes to memory when the VMM has answered. If changes of that memory are logged by then, as a migration begins, only KVM can
            // store it so that the log has it.
            RunEnd::Access(_, pending) if pending.stores() => {
                enter(ClusterEnd::Stopped(StopReason::Instruction))
            }
            RunEnd::Access(access, pending) if self.is_doorbell(&access) => {
                self.rung_in_cluster(vm, &state, pending, kvm)
            }
            RunEnd::Access(access, pending) => Some(self.made_up(&access, pending, &state)),
        }
    }

    /// Makes an exit of an access that the interpreter has found.
    fn made_up(&mut self, access: &DeviceAccess, pending: PendingAccess, state: &VmState) -> Attempt {
        self.cluster.get_or_insert_default().accesses += 1;
        self.put_made_up(access, state);
        self.counters.made_up_access();
        // KVM's registers are older even if nothing was interpreted: the access before was completed here.
        self.exit = Exit::MadeUp { pending, shown: false };
        Attempt::Access
    }

    fn put_made_up(&self, access: &DeviceAccess, state: &VmState) {
        // Where the PIC is the VMM's, KVM has said so for the flags of the last real exit. If it said no, it may have
        // other reasons than IF; the VMM then asks for an exit as soon as it is yes, which ends the cluster.
        let enabled = self.general.rflags & rflags::IF != 0;
        let takes = self.takes_interrupts && (enabled || state.has_interrupt_controller());
        self.page.put_exit(access, &self.general, takes);
    }

    /// KVM would complete a plain IN or OUT once more if RIP came back to it: has it do so now, and what that does to the
    /// registers is overwritten.
    fn forget_incomplete(&mut self, kvm: &mut impl VcpuDescriptor) {
        if self.incomplete.take().is_some() {
            self.counters.completion();
            let _ = self.page.only_complete(|| kvm.run());
        }
    }
}

fn is_port(access: DeviceAccess) -> bool {
    matches!(access, DeviceAccess::PortRead { .. } | DeviceAccess::PortWrite { .. })
}

/// The interpreter's surroundings on this vCPU.
struct Here<'a, K> {
    page: &'a RunPage,
    vm: &'a SharedVm,
    state: &'a VmState,
    limits: &'a ClusterLimits,
    interrupts: u32,
    window: &'a mut Window,
    clock: &'a mut GuestClock,
    kvm: &'a mut K,
}

/// Times at which the guest had interrupts enabled, and KVM was not entered: what is pending in the kernel was not delivered.
#[derive(Debug, Default)]
struct Window {
    /// The cluster has set IF.
    opened: bool,
    /// A cluster has set IF and ended with IF clear. The next time at which the guest sets IF is the processor's.
    missed: bool,
}

impl Window {
    /// The guest is entered, and takes what is pending if `delivers`.
    fn enter(&mut self, delivers: bool) {
        self.missed = !delivers && (self.missed || self.opened);
        self.opened = false;
    }
}

impl<K: VcpuDescriptor> Platform for Here<'_, K> {
    fn cycles(&mut self) -> u64 {
        cycles()
    }

    fn kicked(&mut self) -> bool {
        self.page.wanted_by_vmm() || self.vm.change_waits()
    }

    fn may_enable_interrupts(&mut self) -> bool {
        let may = !self.window.missed && !self.interrupt_waits();
        self.window.opened |= may;
        may
    }

    fn interrupt_waits(&mut self) -> bool {
        self.vm.interrupts() != self.interrupts
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

    fn guest_cycles(&mut self) -> Option<u64> {
        self.clock.cycles(self.kvm)
    }

    fn guest_time_stamp_auxiliary(&mut self) -> Option<u32> {
        self.clock.auxiliary(self.kvm)
    }
}
