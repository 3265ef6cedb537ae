//! A kick and a fault of the interposer at each instruction of a program: the VMM sees the same accesses, and KVM gets the state of
//! complete instructions.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads and writes `kvm_run`, and the guest's memory is shared by address.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU8, Ordering};

use iced_x86::{Decoder, DecoderOptions, OpKind};
use ioplane_vcpu::kvm::{InterruptController, VcpuCounters, VcpuDescriptor, VmState};
use ioplane_vcpu::{GeneralRegisters, MemorySlot};
use kvm_bindings::kvm_run;

use crate::answers::answer;
use crate::fake::{CODE, FakeKvm};
use crate::program::{Random, random_program};
use crate::same::{LIMITS, clustered};

/// Guest-physical and linear, where the guest finds its own `kvm_run`, so that an instruction of it can kick.
const RUN_PAGE: u64 = 0x30_0000;

/// Offsets of the instructions of a program.
fn offsets(code: &[u8]) -> Vec<usize> {
    let decoder = Decoder::with_ip(64, code, 0, DecoderOptions::NONE);
    decoder.into_iter().map(|one| usize::try_from(one.ip()).unwrap()).collect()
}

/// The program with something more at an offset. Loops go on over it.
fn insert(code: &[u8], at: usize, what: &[u8]) -> Vec<u8> {
    let mut longer = code.to_vec();
    for one in Decoder::with_ip(64, code, 0, DecoderOptions::NONE) {
        let (ip, next) = (usize::try_from(one.ip()).unwrap(), usize::try_from(one.next_ip()).unwrap());
        let jumps = one.op_kinds().any(|kind| kind == OpKind::NearBranch64);
        if jumps && one.near_branch_target() < at as u64 && at <= ip {
            longer[next - 1] -= u8::try_from(what.len()).unwrap();
        }
    }
    longer.splice(at..at, what.iter().copied());
    longer
}

struct Seen {
    accesses: Vec<String>,
    end: GeneralRegisters,
    memory: Vec<u8>,
    /// Kicks that a cluster has noticed.
    in_cluster: u64,
    /// The registers with which the guest was entered after the first fault.
    fault: Option<GeneralRegisters>,
}

/// A VMM that takes back its kick when KVM_RUN has returned EINTR, with clustering if there are counters.
fn run(code: &[u8], counters: Option<&'static VcpuCounters>) -> Seen {
    let mut kvm = FakeKvm::new(code, VmState::default());
    kvm.vm.interrupt_controller(InterruptController::Kernel);
    let host = kvm.page.address();
    let slot = MemorySlot { number: 1, address: RUN_PAGE, size: 4096, host, read_only: false, logged: false };
    // SAFETY: the page lives as long as the slots.
    unsafe { kvm.vm.slots.set(slot).unwrap() };
    kvm.panic_at_time_stamp = true;
    let page = kvm.run_page();
    let state = kvm.shared_vm();
    let mut vcpu = counters.map(|counters| clustered(&kvm, LIMITS, counters));
    if let Some(vcpu) = &mut vcpu {
        vcpu.set_host_time_stamp_speed(2_000_000);
    }
    // SAFETY: the page lives as long as `kvm`; the guest writes it while KVM_RUN runs.
    let kick = unsafe { AtomicU8::from_ptr(&raw mut (*page).immediate_exit) };
    let (mut accesses, mut in_cluster, mut fault) = (Vec::new(), 0, None);
    loop {
        let (entries, before) = (kvm.entries, kick.load(Ordering::SeqCst));
        let result = match &mut vcpu {
            Some(vcpu) => vcpu.run(&state, &mut kvm),
            None => kvm.run(),
        };
        if state.has_failed() && fault.is_none() {
            fault = Some(kvm.entered_with);
        }
        if result == -libc::EINTR {
            assert_eq!(kick.swap(0, Ordering::SeqCst), 1, "nobody has asked for EINTR");
            in_cluster += u64::from(before == 0);
            let at = usize::try_from(kvm.general.rip - CODE).unwrap();
            assert!(offsets(code).contains(&at), "{at:x} is inside an instruction of {code:02x?}");
            continue;
        }
        assert_eq!(result, 0);
        let noticed = kick.load(Ordering::SeqCst) == 0 || kvm.entries > entries;
        assert!(noticed, "an access was made up after the kick: {code:02x?}");
        let Some((access, _)) = answer(page, accesses.len() + 1) else { break };
        accesses.push(access);
        assert!(accesses.len() < 10_000, "the program does not end");
    }
    if let Some(vcpu) = &mut vcpu {
        vcpu.before_other_call(&mut kvm);
    }
    Seen { accesses, end: kvm.general, memory: kvm.memory.read(0x7000, 0x4000), in_cluster, fault }
}

/// Runs random programs with something more at each instruction, and compares; returns what was seen with clustering.
fn at_each_instruction(programs: u64, what: &[u8], mut each: impl FnMut(usize, &Seen)) {
    let counters: &'static VcpuCounters = Box::leak(Box::default());
    for seed in 0..programs {
        let code = random_program(&mut Random(seed));
        for at in offsets(&code) {
            let code = insert(&code, at, what);
            let (plain, with) = (run(&code, None), run(&code, Some(counters)));
            assert_eq!(with.accesses, plain.accesses, "seed {seed}, at {at:x}: {code:02x?}");
            assert_eq!(with.end, plain.end, "seed {seed}, at {at:x}: {code:02x?}");
            assert!(with.memory == plain.memory, "seed {seed}, at {at:x}: {code:02x?}");
            each(at, &with);
        }
    }
}

#[test]
fn a_kick_at_each_instruction_is_noticed_before_the_next_access() {
    let immediate_exit = u32::try_from(RUN_PAGE as usize + offset_of!(kvm_run, immediate_exit)).unwrap();
    // MOV BYTE [immediate_exit], 1
    let what = [&[0xc6, 0x04, 0x25][..], &immediate_exit.to_le_bytes(), &[1]].concat();
    let mut in_cluster = 0;
    at_each_instruction(100, &what, |_, seen| in_cluster += seen.in_cluster);
    println!("{in_cluster} kicks in clusters");
    assert!(in_cluster > 1000);
}

#[test]
fn a_fault_at_each_instruction_leaves_the_guest_to_kvm() {
    // MOV R8, RAX; MOV R9, RDX; RDTSC, at which the interposer panics; MOV RAX, R8; MOV RDX, R9
    let before = [0x49, 0x89, 0xc0, 0x49, 0x89, 0xd1];
    let what = [&before[..], &[0x0f, 0x31, 0x4c, 0x89, 0xc0, 0x4c, 0x89, 0xca]].concat();
    let mut faults = 0;
    at_each_instruction(100, &what, |at, seen| {
        let Some(fault) = seen.fault else { return };
        faults += 1;
        assert_eq!(fault.rip, CODE + (at + before.len()) as u64, "at RDTSC");
        assert_eq!((fault.gpr[8], fault.gpr[9]), (fault.gpr[0], fault.gpr[2]), "what is before it is done");
    });
    println!("{faults} faults");
    assert!(faults > 1000);
}
