//! Migration in the middle of a cluster.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads and writes `kvm_run`.

use ioplane_vcpu::GeneralRegisters;
use ioplane_vcpu::kvm::{InterruptController, VcpuDescriptor, VmState};
use kvm_bindings::{kvm_debugregs, kvm_regs, kvm_run, kvm_sregs, kvm_vcpu_events};

use crate::answers::answer;
use crate::calls::{
    KVM_GET_DEBUGREGS, KVM_GET_MP_STATE, KVM_GET_REGS, KVM_GET_SREGS, KVM_GET_VCPU_EVENTS, KVM_RUN, VCPU, Vmm,
};
use crate::fake::{FakeKvm, general_of};
use crate::program::{Random, random_program};

/// Where random programs keep their data.
const DATA: (u64, usize) = (0x7000, 0x4000);

/// What the VMM sees of a guest without the library until HLT, beside what it has seen already.
pub fn plain(mut kvm: FakeKvm, mut seen: Vec<String>) -> (Vec<String>, GeneralRegisters, Vec<u8>) {
    kvm.vm.interrupt_controller(InterruptController::Kernel);
    loop {
        assert_eq!(kvm.run(), 0);
        let Some((access, _)) = answer(kvm.run_page(), seen.len() + 1) else {
            return (seen, kvm.general, kvm.memory.read(DATA.0, DATA.1));
        };
        seen.push(access);
    }
}

pub fn guest(code: &[u8]) -> FakeKvm {
    FakeKvm::new(code, VmState::default())
}

pub fn page(vmm: &Vmm) -> *mut kvm_run {
    vmm.interposer.kernel().kvm.borrow().run_page()
}

/// As a VMM takes a vCPU out of KVM_RUN before it reads or writes all of its state.
pub fn stop(vmm: &Vmm) {
    let page = page(vmm);
    // SAFETY: the page lives as long as the kernel.
    unsafe { (*page).immediate_exit = 1 };
    assert_eq!(vmm.call(VCPU, KVM_RUN, 0), -libc::EINTR);
    // SAFETY: as above.
    unsafe { (*page).immediate_exit = 0 };
}

pub fn get<T: Default>(vmm: &Vmm, request: u64) -> T {
    let mut structure = T::default();
    assert_eq!(vmm.call(VCPU, request, std::ptr::from_mut(&mut structure).expose_provenance()), 0);
    structure
}

pub fn made_up(vmm: &Vmm) -> u64 {
    vmm.interposer.counts(VCPU).unwrap().made_up_accesses
}

/// Goes on at a destination that has no library.
#[test]
fn a_guest_that_migrates_in_the_middle_of_a_cluster_has_the_same_accesses() {
    let mut moved = 0;
    for seed in 0..150 {
        let code = random_program(&mut Random(seed));
        let wanted = plain(guest(&code), Vec::new());
        for accesses in 1..=wanted.0.len() {
            let vmm = Vmm::with(true, &code);
            vmm.interposer.kernel().kvm.borrow_mut().vm.interrupt_controller(InterruptController::Kernel);
            vmm.create();
            let (mut seen, mut before) = (Vec::new(), 0);
            while seen.len() < accesses {
                before = made_up(&vmm);
                assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
                seen.push(answer(page(&vmm), seen.len() + 1).unwrap().0);
            }
            if made_up(&vmm) == before {
                continue;
            }
            moved += 1;
            stop(&vmm);
            let registers: kvm_regs = get(&vmm, KVM_GET_REGS);
            let special: kvm_sregs = get(&vmm, KVM_GET_SREGS);
            let _: kvm_vcpu_events = get(&vmm, KVM_GET_VCPU_EVENTS);
            let _: kvm_debugregs = get(&vmm, KVM_GET_DEBUGREGS);
            let _: u32 = get(&vmm, KVM_GET_MP_STATE);
            let mut destination = guest(&code);
            let memory = vmm.interposer.kernel().kvm.borrow().memory.read(DATA.0, DATA.1);
            destination.memory.write(DATA.0, &memory);
            destination.general = general_of(&registers);
            destination.set_special(&special);
            assert!(plain(destination, seen) == wanted, "seed {seed}, after {accesses}: {code:02x?}");
        }
    }
    println!("{moved} migrations");
    assert!(moved > 500);
}
