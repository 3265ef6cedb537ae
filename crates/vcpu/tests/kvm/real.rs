//! 16-bit code through KVM_RUN: the same accesses with and without clustering.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads and writes `kvm_run`.

use ioplane_vcpu::kvm::{
    ClusterLimits, ClusteredVcpu, InterruptController, RunPage, VcpuCounters, VcpuDescriptor, VmState,
};
use ioplane_vcpu::{CachedSegment, GeneralRegisters, SystemRegisters, registers};
use kvm_bindings::{KVM_EXIT_HLT, KVM_EXIT_IO, KVM_EXIT_MMIO};

use crate::fake::{BITS, CODE, DEVICE, FakeKvm};

const LIMITS: ClusterLimits =
    ClusterLimits { instructions: 1000, accesses: 64, cycles: u64::MAX, output_elements: 1 };
/// Where the code is in its segment.
const START: u64 = 0x40;

/// CS begins before the code, DS reaches everything.
fn real(code: &[u8]) -> FakeKvm {
    let mut kvm = FakeKvm::new(&[0xf4], VmState::default());
    kvm.vm.interrupt_controller(InterruptController::Kernel);
    let low =
        CachedSegment { selector: 0, base: 0, limit: 0xffff, readable: true, writable: true, big: false };
    let selector = u16::try_from(CODE >> 4).unwrap();
    let at = CachedSegment { selector, base: CODE, ..low };
    let all = CachedSegment { limit: u32::MAX, ..low };
    kvm.system = SystemRegisters {
        cr0: 0,
        cr3: 0,
        cr4: 0,
        efer: 0,
        code_long: false,
        segments: [all, at, low, all, low, low],
        ..kvm.system
    };
    kvm.memory.write(CODE + START, code);
    kvm.general.rip = START;
    kvm
}

/// The accesses, the end, and how often the guest was entered.
fn run(code: &[u8], counters: Option<&'static VcpuCounters>) -> (Vec<String>, GeneralRegisters, u64) {
    let (did, kvm) = run_on(real(code), counters);
    (did, kvm.general, kvm.entries)
}

/// Runs to HLT, with clustering if there are counters; says what the VMM saw.
pub fn run_on(mut kvm: FakeKvm, counters: Option<&'static VcpuCounters>) -> (Vec<String>, FakeKvm) {
    let state = kvm.shared_vm();
    let page = kvm.run_page();
    // SAFETY: the page lives as long as `kvm`, and all is on this thread.
    let mut vcpu =
        counters.map(|counters| unsafe { ClusteredVcpu::new(RunPage::new(page), LIMITS, BITS, counters) });
    let mut did = Vec::new();
    loop {
        let result = match &mut vcpu {
            Some(vcpu) => vcpu.run(&state, &mut kvm),
            None => kvm.run(),
        };
        assert_eq!(result, 0);
        // SAFETY: as above; all parts of the union are plain numbers.
        unsafe {
            match (*page).exit_reason {
                KVM_EXIT_HLT => break,
                KVM_EXIT_IO => {
                    let io = (*page).__bindgen_anon_1.io;
                    let data = std::slice::from_raw_parts_mut(page.cast::<u8>().add(4096), io.size.into());
                    if io.direction == 0 {
                        data.fill(u8::try_from(did.len()).unwrap());
                    }
                    did.push(format!("port {:x} {} {data:x?}", io.port, io.direction));
                }
                KVM_EXIT_MMIO => {
                    let mmio = &mut (*page).__bindgen_anon_1.mmio;
                    if mmio.is_write == 0 {
                        mmio.data = [u8::try_from(did.len()).unwrap(); 8];
                    }
                    let bytes = &mmio.data[..usize::try_from(mmio.len).unwrap()];
                    did.push(format!("memory {:x} {} {bytes:x?}", mmio.phys_addr, mmio.is_write));
                }
                other => panic!("exit {other}"),
            }
        }
    }
    if let Some(vcpu) = &mut vcpu {
        vcpu.before_other_call(&mut kvm);
    }
    (did, kvm)
}

#[test]
fn a_cluster_of_real_mode_takes_one_exit() {
    // MOV CX, 3; MOV DX, 0x3d4; MOV AX, CX; OUT DX, AL; IN AL, DX; PUSH AX; POP BX; MOV EBX, DEVICE (66); MOV [EBX], EAX (66 67);
    // MOV AL, [EBX+8] (67); LOOP to MOV DX
    let mut code = vec![0xb9, 3, 0, 0xba, 0xd4, 0x03, 0x89, 0xc8, 0xee, 0xec, 0x50, 0x5b, 0x66, 0xbb];
    code.extend(u32::try_from(DEVICE).unwrap().to_le_bytes());
    code.extend([0x66, 0x67, 0x89, 0x03, 0x67, 0x8a, 0x43, 0x08, 0xe2]);
    code.push(3_u8.wrapping_sub(u8::try_from(code.len() + 1).unwrap()));
    code.push(0xf4);
    let (plain, end, entries) = run(&code, None);
    assert_eq!((plain.len(), entries), (12, 13));
    let counters: &'static VcpuCounters = Box::leak(Box::default());
    let (with, ended, entries) = run(&code, Some(counters));
    assert_eq!((with, ended), (plain, end));
    assert_eq!(entries, 2);
    assert_eq!((counters.counts().real_accesses, counters.counts().made_up_accesses), (1, 11));
    let sites: Vec<u64> = counters.sites().map(|site| site.rip).collect();
    assert_eq!(sites, [CODE + START + 8], "by linear address");
}

/// The access before the exit may be OUTS, whose RIP has moved: the byte before RIP tells, at its linear address.
#[test]
fn what_follows_outs_in_real_mode_is_done_once() {
    // OUTSB; OUT DX, AL; OUTSB; OUT DX, AL; HLT
    let code = [0x6e, 0xee, 0x6e, 0xee, 0xf4];
    let (plain, end, _) = run(&code, None);
    let counters: &'static VcpuCounters = Box::leak(Box::default());
    let (with, ended, entries) = run(&code, Some(counters));
    assert_eq!((with, ended, entries), (plain, end, 2));
    assert_eq!(counters.counts().completions, 1, "KVM has completed the first");
    assert_eq!(ended.gpr[registers::RSI], 2);
}

/// VMX that cannot run real mode itself has KVM emulate it, and KVM's emulator completes IN and OUT wherever RIP is by then.
#[test]
fn what_kvm_emulates_it_completes() {
    // IN AL, 0x70; INC BX; OUT 0x71, AL; INC BX; IN AL, 0x72; INC BX; HLT
    let code = [0xe4, 0x70, 0x43, 0xe6, 0x71, 0x43, 0xe4, 0x72, 0x43, 0xf4];
    let emulated = || {
        let mut kvm = real(&code);
        kvm.emulates_ports = true;
        kvm
    };
    let (plain, end) = run_on(emulated(), None);
    let counters: &'static VcpuCounters = Box::leak(Box::default());
    let (with, ended) = run_on(emulated(), Some(counters));
    assert_eq!((with, ended.general, ended.entries), (plain, end.general, 2));
}
