//! A batch that the guest has rung for ([`crate::batch`]): each entry becomes an exit, as an access of a cluster does.
//!
//! ```text
//!   VMM: KVM_RUN --> enter the guest ------> exit with the doorbell: the VMM does not see it
//!                                                 |
//!                    return with entry 0 <--------'
//!        answers it
//!        KVM_RUN --> answer into the array --> return with entry 1
//!        answers it
//!        KVM_RUN --> answer into the array --> nothing further: the doorbell's IN gets its answer, enter
//! ```
//!
//! The registers are those before the doorbell's IN until it gets its answer, and the array says what is done. So a vCPU whose state is
//! taken at any moment goes on from there, with this library or without.

use super::*;
use crate::batch::{BatchProgress, BatchStatus, DOORBELL, NoAccess, answer};
use crate::registers::{RAX, RDX};

const DOORBELL_ACCESS: DeviceAccess =
    DeviceAccess::PortRead { port: DOORBELL, size: OperandSize::Dword, count: 1 };

/// A batch whose next entry the VMM is answering.
pub(super) struct Rung {
    batch: BatchProgress,
    access: DeviceAccess,
    /// The doorbell's IN.
    doorbell: PendingAccess,
}

/// What a doorbell leads to.
enum RingOutcome {
    /// The VMM is to answer an entry.
    Entry,
    /// The doorbell's IN is complete.
    Answered,
}

/// The VMM is to answer the doorbell's IN itself: nobody is there.
struct Nobody(PendingAccess);

impl ClusteredVcpu {
    /// Whether CPUID of this vCPU offers batches.
    pub fn offer_batches(&mut self, offered: bool) {
        self.batches = offered;
    }

    /// As [`ClusteredVcpu::offer_batches`] has been told last.
    pub fn offers_batches(&self) -> bool {
        self.batches
    }

    /// Whether an access is the doorbell of a guest that was offered batches.
    pub(super) fn is_doorbell(&self, access: &DeviceAccess) -> bool {
        self.batches && *access == DOORBELL_ACCESS
    }

    /// KVM has exited with the doorbell, which the VMM has not seen. `None` if it is to see it.
    pub(super) fn rung(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> Option<Attempt> {
        let general = self.page.general();
        self.kvm_has(general);
        // What KVM would complete at the next KVM_RUN is completed here. If a fault of ours ends this, the guest rings again.
        self.incomplete = Some(general.rip);
        self.newer = true;
        match self.ring_after_exit(vm, kvm) {
            Some(RingOutcome::Entry) => Some(Attempt::Access),
            Some(RingOutcome::Answered) => Some(Attempt::Enter(None)),
            None => {
                self.counters.batch(BatchEvent::Left);
                // KVM has the same registers, and completes the IN with what the VMM answers.
                self.incomplete = None;
                self.newer = false;
                None
            }
        }
    }

    /// The same as [`ClusteredVcpu::ring`], if a cluster could begin here or could if clusters were switched on.
    fn ring_after_exit(&mut self, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) -> Option<RingOutcome> {
        self.system = self.page.system();
        self.takes_interrupts = self.page.takes_interrupts();
        let may = self.obstacle(vm, kvm).is_none()
            && !self.page.registers_in_use()
            && !self.page.event_pending()
            && self.system.unsupported(self.general.rflags).is_none()
            && *self.faults_arrive.get_or_insert_with(|| kvm.faults_arrive());
        let state = vm.read().filter(|_| may)?;
        let doorbell = self.plain_access(vm, &state, DOORBELL_ACCESS, kvm)?;
        self.ring(vm, &state, doorbell, kvm).ok()
    }

    /// The interpreter has found the doorbell. `None` if its IN is complete, so that the cluster goes on.
    pub(super) fn rung_in_cluster(
        &mut self,
        vm: &SharedVm,
        state: &VmState,
        doorbell: PendingAccess,
        kvm: &mut impl VcpuDescriptor,
    ) -> Option<Attempt> {
        match self.ring(vm, state, doorbell, kvm) {
            Ok(RingOutcome::Entry) => Some(Attempt::Access),
            Ok(RingOutcome::Answered) => None,
            Err(Nobody(doorbell)) => {
                self.counters.batch(BatchEvent::Left);
                Some(self.made_up(&DOORBELL_ACCESS, doorbell, state))
            }
        }
    }

    /// Looks at the array that RAX tells.
    fn ring(
        &mut self,
        vm: &SharedVm,
        state: &VmState,
        doorbell: PendingAccess,
        kvm: &impl VcpuDescriptor,
    ) -> Result<RingOutcome, Nobody> {
        // A program at level 3 that may use all ports may not use all memory.
        if self.system.cpl != 0 || self.system.mode() != Some(CodeMode::Long) {
            return Err(Nobody(doorbell));
        }
        match BatchProgress::begin(&state.slots, self.general.gpr[RAX]) {
            Ok(batch) => self.next_entry(vm, state, batch, doorbell, true, kvm),
            Err(NoAccess::Nobody) => Err(Nobody(doorbell)),
            Err(NoAccess::Answer(status)) => Ok(self.answer_doorbell(doorbell, status, 0, None)),
        }
    }

    /// Makes an exit of the next entry, or gives the doorbell its answer.
    fn next_entry(
        &mut self,
        vm: &SharedVm,
        state: &VmState,
        batch: BatchProgress,
        doorbell: PendingAccess,
        first: bool,
        kvm: &impl VcpuDescriptor,
    ) -> Result<RingOutcome, Nobody> {
        let done = batch.done();
        if batch.is_complete() {
            return Ok(self.answer_doorbell(doorbell, BatchStatus::Done, done, None));
        }
        if !self.may_go_on(vm, first, kvm) {
            return Ok(self.cut_short(doorbell, done));
        }
        let apic_page = self.page.apic_page();
        let leaves = |access: &DeviceAccess| match *access {
            DeviceAccess::PortRead { port, size, .. } => state.port_leaves_kernel(port, size, false),
            DeviceAccess::PortWrite { port, size, .. } => state.port_leaves_kernel(port, size, true),
            DeviceAccess::MemoryRead { address, size } => {
                state.address_leaves_kernel(address, size, false, apic_page)
            }
            DeviceAccess::MemoryWrite { address, size, .. } => {
                state.address_leaves_kernel(address, size, true, apic_page)
            }
        };
        let bits = self.physical_bits;
        let checked = if first { batch.check(&state.slots, bits) } else { Ok(()) };
        match checked.and_then(|()| batch.access(&state.slots, bits, leaves)) {
            Ok((access, value)) => {
                if let DeviceAccess::PortWrite { .. } = access {
                    let bytes = value.to_le_bytes();
                    self.page.port_data().iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
                }
                self.budget.accesses = self.budget.accesses.saturating_sub(1);
                self.put_made_up(&access, state);
                self.exit = Exit::Entry { rung: Rung { batch, access, doorbell }, shown: false };
                Ok(RingOutcome::Entry)
            }
            Err(NoAccess::Nobody) => Err(Nobody(doorbell)),
            Err(NoAccess::Answer(status)) => Ok(self.answer_doorbell(doorbell, status, done, None)),
        }
    }

    /// Whether another entry may follow before the guest is entered. The first one may whatever time it is, so that each ring gets
    /// further.
    fn may_go_on(&self, vm: &SharedVm, first: bool, kvm: &impl VcpuDescriptor) -> bool {
        let wanted = self.page.wanted_by_vmm() || vm.change_waits() || self.obstacle(vm, kvm).is_some();
        let enabled = self.general.rflags & rflags::IF != 0;
        let interrupted = enabled && vm.interrupts() != self.interrupts;
        let left = self.budget.deadline.saturating_sub(cycles());
        // More than the limit: the host has slept, and its counter has begun anew.
        let in_time = self.budget.accesses > 0 && left > 0 && left <= self.limits.cycles;
        !wanted && (first || in_time && !interrupted)
    }

    /// The VMM has answered an entry.
    pub(super) fn entry_answered(
        &mut self,
        rung: Rung,
        vm: &SharedVm,
        kvm: &mut impl VcpuDescriptor,
    ) -> Attempt {
        let Rung { mut batch, access, doorbell } = rung;
        let state = vm.read();
        let read = self.read(access);
        self.counters.batch(BatchEvent::Entry);
        if let Err(status) = batch.answered(state.as_deref().map(|state| &state.slots), read) {
            self.answer_doorbell(doorbell, status, batch.done(), Some(read));
        } else if let Some(state) = &state {
            match self.next_entry(vm, state, batch, doorbell, false, kvm) {
                Ok(RingOutcome::Entry) => return Attempt::Access,
                Ok(RingOutcome::Answered) => {}
                Err(Nobody(doorbell)) => {
                    // The guest rings once more, and is told then.
                    self.cut_short(doorbell, batch.done());
                }
            }
        }
        drop(state);
        if self.cluster.is_some() { self.cluster(vm, kvm) } else { Attempt::Enter(None) }
    }

    /// The same after the VMM has had KVM's registers: no further entry follows.
    pub(super) fn shown_entry_answered(&mut self, rung: Rung, vm: &SharedVm, kvm: &mut impl VcpuDescriptor) {
        let Rung { mut batch, access, doorbell } = rung;
        self.complete_shown(kvm, |vcpu| {
            let state = vm.read();
            let read = vcpu.read(access);
            vcpu.counters.batch(BatchEvent::Entry);
            match batch.answered(state.as_deref().map(|state| &state.slots), read) {
                Ok(()) if batch.is_complete() => {
                    vcpu.answer_doorbell(doorbell, BatchStatus::Done, batch.done(), None)
                }
                Ok(()) => vcpu.cut_short(doorbell, batch.done()),
                Err(status) => vcpu.answer_doorbell(doorbell, status, batch.done(), Some(read)),
            };
        });
    }

    /// What the VMM has answered, if it was a read.
    fn read(&mut self, access: DeviceAccess) -> Option<u64> {
        match access {
            DeviceAccess::PortRead { size, .. } => {
                let mut bytes = [0; 8];
                bytes.iter_mut().zip(self.page.port_data().iter()).for_each(|(to, from)| *to = *from);
                Some(u64::from_le_bytes(bytes) & size.mask())
            }
            DeviceAccess::MemoryRead { size, .. } => Some(self.page.memory_data() & size.mask()),
            DeviceAccess::PortWrite { .. } | DeviceAccess::MemoryWrite { .. } => None,
        }
    }

    /// Completes the doorbell's IN. `unstored`: the last entry is not in the array, and this is what it has read.
    fn answer_doorbell(
        &mut self,
        doorbell: PendingAccess,
        status: BatchStatus,
        done: u16,
        unstored: Option<Option<u64>>,
    ) -> RingOutcome {
        let bytes = answer(status, done).to_le_bytes();
        self.interpreter.complete_in_registers(doorbell, &mut self.general, &bytes, 0);
        if let Some(read) = unstored {
            self.general.gpr[RDX] = read.unwrap_or(0);
        }
        self.newer = true;
        self.counters.batch(match status {
            BatchStatus::Done => BatchEvent::Answered,
            BatchStatus::NotStored => BatchEvent::NotStored,
            _ => BatchEvent::Refused,
        });
        RingOutcome::Answered
    }

    /// The same with entries left: the guest rings again.
    fn cut_short(&mut self, doorbell: PendingAccess, done: u16) -> RingOutcome {
        self.counters.batch(BatchEvent::CutShort);
        self.answer_doorbell(doorbell, BatchStatus::Done, done, None)
    }
}
