//! Resets of the guest: the VMM sets all of a vCPU's state between clusters and in the middle of them.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads `kvm_run`.

use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::calls::{
    KVM_GET_REGS, KVM_GET_SREGS, KVM_RUN, KVM_SET_MP_STATE, KVM_SET_REGS, KVM_SET_SREGS, VCPU, Vmm, at,
    program,
};
use crate::fake::{CODE, FakeKvm, MEMORY};
use crate::migration::{get, guest, made_up, page, stop};

/// Page tables at 20000h under which the code is what is at 30000h.
const OTHER_TABLES: u64 = 0x2_0000;
const OTHER_CODE: u64 = 0x3_0000;

fn other_tables(kvm: &mut FakeKvm, code: &[u8]) {
    const GOOD: u64 = 0x63;
    let tables = [0, 0x1000, 0x2000].map(|at| OTHER_TABLES + at);
    for table in tables {
        kvm.memory.write(table, &((table + 0x1000) | GOOD).to_le_bytes());
    }
    for page in (0..MEMORY as u64).step_by(4096) {
        let to = if page == CODE { OTHER_CODE } else { page };
        kvm.memory.write(OTHER_TABLES + 0x3000 + page / 512, &(to | GOOD).to_le_bytes());
    }
    kvm.memory.write(OTHER_CODE, code);
}

/// As QEMU does it: the vCPU leaves KVM_RUN, and gets all of its state.
fn reset(vmm: &Vmm, registers: &kvm_regs, special: &kvm_sregs) {
    stop(vmm);
    let _: kvm_regs = get(vmm, KVM_GET_REGS);
    let _: kvm_sregs = get(vmm, KVM_GET_SREGS);
    assert_eq!(vmm.call(VCPU, KVM_SET_REGS, at(registers)), 0);
    assert_eq!(vmm.call(VCPU, KVM_SET_SREGS, at(special)), 0);
    assert_eq!(vmm.call(VCPU, KVM_SET_MP_STATE, at(&0_u32)), 0);
}

/// Eleven writes: to port 80h, and under the other page tables to port 81h. A reset after each of them, and with none.
#[test]
fn clusters_go_on_after_resets_of_the_guest() {
    let mut kvm = guest(&program());
    let other: Vec<u8> = program().iter().map(|byte| if *byte == 0x80 { 0x81 } else { *byte }).collect();
    other_tables(&mut kvm, &other);
    let vmm = Vmm::of(true, kvm);
    vmm.create();
    let registers: kvm_regs = get(&vmm, KVM_GET_REGS);
    let first: kvm_sregs = get(&vmm, KVM_GET_SREGS);
    let second = kvm_sregs { cr3: OTHER_TABLES, ..first };
    let port = |vmm: &Vmm| {
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
        // SAFETY: the page lives as long as the kernel; all parts of the union are plain numbers.
        unsafe { (*page(vmm)).__bindgen_anon_1.io.port }
    };
    let mut special = (&first, 0x80);
    for round in 0..5 {
        for accesses in 0..12 {
            (0..accesses).for_each(|_| assert_eq!(port(&vmm), special.1));
            special = if special.1 == 0x80 { (&second, 0x81) } else { (&first, 0x80) };
            reset(&vmm, &registers, special.0);
            let before = (made_up(&vmm), vmm.interposer.kernel().kvm.borrow().entries);
            (0..11).for_each(|_| assert_eq!(port(&vmm), special.1, "round {round}, after {accesses}"));
            let entries = vmm.interposer.kernel().kvm.borrow().entries;
            let cluster = (made_up(&vmm) - before.0, entries - before.1);
            assert_eq!(cluster, (10, 1), "round {round}, after {accesses}: still one cluster");
            reset(&vmm, &registers, special.0);
        }
    }
}
