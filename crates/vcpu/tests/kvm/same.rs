//! The same programs, the same VMM, with clustering and without.
#![allow(unsafe_code)]
// UNSAFETY: a VMM reads and writes `kvm_run`.

use std::sync::atomic::{AtomicU8, Ordering};

use ioplane_vcpu::GeneralRegisters;
use ioplane_vcpu::kvm::{
    ClusterCounts, ClusterLimits, ClusterObstacle, ClusteredVcpu, InterruptController, RunPage, SharedVm,
    VcpuCounters, VcpuDescriptor, VmState,
};
use kvm_bindings::{KVM_EXIT_HLT, kvm_regs};

use crate::answers::answer;
use crate::fake::{BITS, FakeKvm, general_of, regs_of};
use crate::program::{Random, random_program};

/// What the VMM sees and the guest has at the end.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    accesses: Vec<String>,
    registers: Vec<GeneralRegisters>,
    interrupted: usize,
    end: GeneralRegisters,
    memory: Vec<u8>,
    kernel: usize,
}

/// What the VMM does besides answering, by the number of the access.
#[derive(Clone, Copy, Debug)]
struct Habits {
    /// Sets `immediate_exit` before each such KVM_RUN.
    kick_every: usize,
    /// Asks for registers while it handles each such access.
    look_every: usize,
    /// Writes them back, with another RAX.
    change: bool,
}

const NOTHING: Habits = Habits { kick_every: usize::MAX, look_every: usize::MAX, change: false };

fn due(asked: usize, every: usize) -> bool {
    every != usize::MAX && asked % every == 1
}

pub const LIMITS: ClusterLimits =
    ClusterLimits { instructions: 1000, accesses: 16, cycles: u64::MAX, output_elements: 1 };

pub fn clustered(kvm: &FakeKvm, limits: ClusterLimits, counters: &'static VcpuCounters) -> ClusteredVcpu {
    // SAFETY: the page lives as long as `kvm`, which outlives the vCPU in each test, and all is on this thread.
    let page = unsafe { RunPage::new(kvm.run_page()) };
    ClusteredVcpu::new(page, limits, BITS, counters)
}

/// A VMM: runs the vCPU until HLT.
fn run(code: &[u8], habits: Habits, limits: Option<ClusterLimits>) -> (Seen, ClusterCounts, u64) {
    let mut kvm = FakeKvm::new(code, VmState::default());
    let page = kvm.run_page();
    kvm.vm.interrupt_controller(InterruptController::Kernel);
    let state = kvm.shared_vm();
    let mut vcpu = limits.map(|limits| clustered(&kvm, limits, Box::leak(Box::default())));
    let mut seen = Seen {
        accesses: Vec::new(),
        registers: Vec::new(),
        interrupted: 0,
        end: GeneralRegisters::default(),
        memory: Vec::new(),
        kernel: 0,
    };
    let mut asked = 0_usize;
    let mut calls = 0_usize;
    loop {
        calls += 1;
        assert!(calls < 10_000, "the program does not end");
        // SAFETY: the page lives as long as `kvm`.
        let immediate_exit = unsafe { AtomicU8::from_ptr(&raw mut (*page).immediate_exit) };
        let kick = due(asked, habits.kick_every) && calls.is_multiple_of(2);
        immediate_exit.store(u8::from(kick), Ordering::SeqCst);
        let result = match &mut vcpu {
            Some(vcpu) => vcpu.run(&state, &mut kvm),
            None => kvm.run(),
        };
        assert_eq!(
            immediate_exit.load(Ordering::SeqCst),
            u8::from(kick),
            "the VMM's own wish stays as it was"
        );
        immediate_exit.store(0, Ordering::SeqCst);
        if result == -libc::EINTR {
            assert!(kick, "nobody has asked for EINTR");
            seen.interrupted += 1;
            continue;
        }
        assert_eq!(result, 0);
        asked += 1;
        let Some((access, single_port)) = answer(page, asked) else { break };
        seen.accesses.push(access);
        // KVM shows registers after other accesses or before them, by the emulator's course.
        if due(asked, habits.look_every) && single_port {
            look(&mut kvm, vcpu.as_mut(), habits.change, &mut seen);
        }
    }
    if let Some(vcpu) = &mut vcpu {
        vcpu.before_other_call(&mut kvm);
    }
    seen.end = kvm.general;
    seen.memory = kvm.memory.read(0x7000, 0x4000);
    seen.kernel = kvm.kernel.len();
    (seen, vcpu.map(|vcpu| vcpu.counts()).unwrap_or_default(), kvm.entries)
}

/// The VMM reads registers in the middle of an access, as QEMU does for its port 5658, and may change them.
fn look(kvm: &mut FakeKvm, vcpu: Option<&mut ClusteredVcpu>, change: bool, seen: &mut Seen) {
    if let Some(vcpu) = vcpu {
        vcpu.before_other_call(kvm);
    }
    let mut registers = kvm_regs::default();
    assert_eq!(kvm.registers(&mut registers), 0);
    // OUTS with a count of 1 cannot be told from OUT here, and is written back at a real exit.
    let general = general_of(&registers);
    let before = kvm.memory.read(general.rip - 1, 2);
    if !matches!(before[0], 0x6e | 0x6f) && !matches!(before[1], 0x6c..=0x6f | 0xf3) {
        seen.registers.push(general);
    }
    if change {
        let mut changed = general;
        changed.gpr[3] ^= 0x55;
        assert_eq!(kvm.set_registers(&regs_of(&changed)), 0);
    }
}

fn assert_same(seed: u64, habits: Habits, limits: ClusterLimits) -> ClusterCounts {
    let code = random_program(&mut Random(seed));
    let (plain, _, _) = run(&code, habits, None);
    let (with, counts, _) = run(&code, habits, Some(limits));
    assert_eq!(with.accesses, plain.accesses, "seed {seed}, {habits:?}, {limits:?}, {code:02x?}");
    assert_eq!(with.registers, plain.registers, "seed {seed}, {habits:?}, {limits:?}, {code:02x?}");
    assert!(with == plain, "seed {seed}, {habits:?}, {limits:?}: {:x?} {:x?}", with.end, plain.end);
    counts
}

fn all_limits() -> [ClusterLimits; 4] {
    [
        LIMITS,
        // The end of a cluster at the RIP where it began.
        ClusterLimits { accesses: 1, ..LIMITS },
        ClusterLimits { accesses: 2, ..LIMITS },
        ClusterLimits { instructions: 3, ..LIMITS },
    ]
}

#[test]
fn clustering_changes_nothing_that_the_vmm_sees() {
    let mut made_up = 0;
    for seed in 0..2000 {
        for limits in all_limits() {
            made_up += assert_same(seed, NOTHING, limits).made_up_accesses;
        }
    }
    assert!(made_up > 20_000, "{made_up} made-up exits");
}

#[test]
fn a_kick_is_answered_and_kept() {
    for seed in 0..1000 {
        for every in [2, 3] {
            for limits in all_limits() {
                assert_same(seed, Habits { kick_every: every, ..NOTHING }, limits);
            }
        }
    }
}

/// The VMM's handler writes `immediate_exit` while it is set for a completion.
#[test]
fn a_kick_during_a_completion_is_kept() {
    // MOV EDI, device; MOV EAX, [RDI], which KVM completes; MOV EAX, [RDI]; HLT
    let mut kvm = FakeKvm::new(&[0xbf, 0, 0, 0x20, 0, 0x8b, 0x07, 0x8b, 0x07, 0xf4], VmState::default());
    let state = kvm.shared_vm();
    let mut vcpu = clustered(&kvm, LIMITS, Box::leak(Box::default()));
    assert_eq!(vcpu.run(&state, &mut kvm), 0);
    kvm.kick_while_completing = true;
    assert_eq!(vcpu.run(&state, &mut kvm), -libc::EINTR, "the VMM gets what it asked for");
    let page = kvm.run_page();
    // SAFETY: the page lives as long as `kvm`.
    let wish = unsafe { (*page).immediate_exit };
    assert_eq!(wish, 1, "and clears its wish itself");
    assert_eq!(kvm.general.rip, crate::fake::CODE + 7, "the access is complete");
}

#[test]
fn registers_are_right_whenever_the_vmm_looks() {
    for seed in 0..1000 {
        for (every, change) in [(2, false), (3, false), (2, true), (3, true)] {
            for limits in all_limits() {
                assert_same(seed, Habits { look_every: every, change, ..NOTHING }, limits);
            }
        }
    }
}

/// KVM has done a write to a device's memory before it exits: RIP is at the instruction behind it, which is done once.
#[test]
fn what_follows_a_write_to_a_device_is_done_once() {
    // MOV EDI, device; MOV ESI, 0x8000; then twice: MOV [RDI], EAX; INC DWORD [RSI]; and OUT 0x80, AL; HLT
    let twice = [0x89, 0x07, 0xff, 0x06, 0x89, 0x07, 0xff, 0x06];
    let code = [&[0xbf, 0, 0, 0x20, 0, 0xbe, 0, 0x80, 0, 0][..], &twice, &[0xe6, 0x80, 0xf4]].concat();
    let (plain, _, _) = run(&code, NOTHING, None);
    for limits in all_limits() {
        let (with, _, _) = run(&code, NOTHING, Some(limits));
        assert!(with == plain, "{limits:?}: {:x?} {:x?}", with.accesses, plain.accesses);
    }
}

/// The paper's figure: eleven writes, one exit.
#[test]
fn eleven_writes_take_one_exit() {
    let mut code = Vec::new();
    for port in 0x1f1..0x1fc_u16 {
        code.push(0xba);
        code.extend(u32::from(port).to_le_bytes());
        code.extend([0xb0, 1, 0xee]);
    }
    code.push(0xf4);
    let (_, _, entries) = run(&code, NOTHING, None);
    assert_eq!(entries, 12, "and one for HLT");
    let (_, counts, entries) = run(&code, NOTHING, Some(LIMITS));
    assert_eq!(entries, 2);
    assert_eq!((counts.real_accesses, counts.made_up_accesses, counts.completions), (1, 10, 0));
}

/// Each entry can begin a cluster, whether one has ended there or not.
#[test]
fn a_cluster_may_follow_a_cluster() {
    // Four times four writes, between them CPUID, which only the processor can run.
    let code = [[0xe6, 0x80].repeat(4), vec![0x0f, 0xa2]].concat().repeat(4);
    let (_, counts, entries) = run(&[code, vec![0xf4]].concat(), NOTHING, Some(LIMITS));
    assert_eq!((counts.real_accesses, counts.made_up_accesses), (4, 12));
    assert_eq!(entries, 5);
}

/// A fault of the interposer turns it off, and the VMM does not notice.
#[test]
fn a_panic_leaves_the_guest_to_kvm() {
    // MOV EDI, device; MOV EAX, [RDI], which KVM completes; MOV EAX, [RDI]; OUT 0x80, AL, twice; HLT
    let code = [0xbf, 0, 0, 0x20, 0, 0x8b, 0x07, 0x8b, 0x07, 0xe6, 0x80, 0xe6, 0x80, 0xf4];
    let mut kvm = FakeKvm::new(&code, VmState::default());
    let state = kvm.shared_vm();
    let mut vcpu = clustered(&kvm, LIMITS, Box::leak(Box::default()));
    assert_eq!(vcpu.run(&state, &mut kvm), 0);
    kvm.panic_while_completing = true;
    for _ in 0..4 {
        assert_eq!(vcpu.run(&state, &mut kvm), 0);
    }
    let page = kvm.run_page();
    // SAFETY: the page lives as long as `kvm`.
    let (reason, wish) = unsafe { ((*page).exit_reason, (*page).immediate_exit) };
    assert_eq!((reason, wish), (KVM_EXIT_HLT, 0));
    assert!(state.has_failed());
    assert_eq!((vcpu.counts().made_up_accesses, kvm.entries), (0, 5));
}

/// OUT was KVM's, IN behind it is made up, and the VMM has not answered it. Another OUT and HLT follow.
fn in_waits_for_its_answer() -> (FakeKvm, SharedVm, ClusteredVcpu) {
    let mut kvm = FakeKvm::new(&[0xe6, 0x80, 0xe4, 0x80, 0xe6, 0x80, 0xf4], VmState::default());
    let state = kvm.shared_vm();
    let mut vcpu = clustered(&kvm, LIMITS, Box::leak(Box::default()));
    assert_eq!(vcpu.run(&state, &mut kvm), 0);
    assert_eq!(vcpu.run(&state, &mut kvm), 0);
    assert_eq!(vcpu.counts().made_up_accesses, 1, "IN waits for its answer");
    (kvm, state, vcpu)
}

/// The VMM changes slots for as long as it likes: an answer needs nothing of them to be completed.
#[test]
fn an_answer_does_not_wait_for_a_change_of_slots() {
    let (said, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut kvm, state, mut vcpu) = in_waits_for_its_answer();
        let change = state.change();
        assert_eq!(vcpu.run(&state, &mut kvm), 0);
        drop(change);
        said.send((vcpu.counts().made_up_accesses, kvm.entries, kvm.general.rip)).unwrap();
    });
    let done = hears.recv_timeout(std::time::Duration::from_secs(20));
    assert_eq!(done, Ok((1, 2, crate::fake::CODE + 4)), "the guest was entered behind IN");
}

/// A machine check that the VMM injects while it answers: the registers that KVM is given with the answer do not drop it.
#[test]
fn an_exception_that_the_vmm_injects_is_kept() {
    let (mut kvm, state, mut vcpu) = in_waits_for_its_answer();
    vcpu.before_other_call(&mut kvm);
    kvm.exception = true;
    kvm.leaves_at_once = true;
    assert_eq!(vcpu.run(&state, &mut kvm), -libc::EINTR);
    assert!(kvm.exception);
    assert_eq!(kvm.general.rip, crate::fake::CODE + 4, "IN is complete");
}

/// A VMM that takes many elements gets a page of them at once. KVM itself gives one.
#[test]
fn string_output_by_the_page() {
    // OUT 0x80, AL; MOV ESI, 0x8000; MOV ECX, 3000; MOV EDX, 0x310; REP OUTSB; HLT
    let code =
        [0xe6, 0x80, 0xbe, 0, 0x80, 0, 0, 0xb9, 0xb8, 0x0b, 0, 0, 0xba, 0x10, 0x03, 0, 0, 0xf3, 0x6e, 0xf4];
    let (plain, _, entries) = run(&code, NOTHING, None);
    assert_eq!((plain.accesses.len(), entries), (3001, 3002));
    let limits = ClusterLimits { output_elements: 4096, ..LIMITS };
    let (with, counts, entries) = run(&code, NOTHING, Some(limits));
    assert_eq!((with.accesses.len(), counts.made_up_accesses, entries), (2, 1, 2));
    assert!(with.accesses[1].starts_with("1 310 size 1 count 3000 "));
    assert_eq!((with.end, with.memory), (plain.end, plain.memory));
}

#[test]
fn an_obstacle_leaves_all_to_kvm() {
    const ALONE: ClusterCounts =
        ClusterCounts { returns: 3, real_accesses: 2, made_up_accesses: 0, completions: 0 };
    let mut kvm = FakeKvm::new(&[0xe6, 0x80, 0xe6, 0x80, 0xf4], VmState::default());
    let state = kvm.shared_vm();
    state.change().refuse(ClusterObstacle::GuestDebug);
    let mut vcpu = clustered(&kvm, LIMITS, Box::leak(Box::default()));
    for _ in 0..3 {
        assert_eq!(vcpu.run(&state, &mut kvm), 0);
    }
    assert_eq!((vcpu.counts(), kvm.entries), (ALONE, 3));
    // The VMM shares registers itself.
    let mut kvm = FakeKvm::new(&[0xe6, 0x80, 0xe6, 0x80, 0xf4], VmState::default());
    let state = kvm.shared_vm();
    let page = kvm.run_page();
    // SAFETY: the page lives as long as `kvm`.
    unsafe {
        (*page).kvm_valid_regs = 1;
    }
    let mut vcpu = clustered(&kvm, LIMITS, Box::leak(Box::default()));
    for _ in 0..3 {
        assert_eq!(vcpu.run(&state, &mut kvm), 0);
    }
    assert_eq!((vcpu.counts(), kvm.entries), (ALONE, 3));
}
