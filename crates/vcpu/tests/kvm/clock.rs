//! RDTSC and RDTSCP in a cluster: KVM is asked for what it alone knows, and no oftener than needed.

use std::cell::Cell;

use ioplane_vcpu::kvm::{
    ClusterCounts, ClusterLimits, ClusteredVcpu, GuestCpuid, InterruptController, RunPage, SharedVm,
    VcpuDescriptor, VmState,
};
use kvm_bindings::{KVM_EXIT_HLT, kvm_debugregs, kvm_regs, kvm_vcpu_events};

use crate::fake::{BITS, CODE, FakeKvm, host_cycles};

const LIMITS: ClusterLimits =
    ClusterLimits { instructions: 1000, accesses: 16, cycles: u64::MAX, output_elements: 1 };
const OFFSET: u64 = 1 << 40;
const AUXILIARY: u32 = 7;
const SPEED: u64 = 2_000_000;
const WORDS: u64 = 0x9000;

/// MOV EDI, WORDS; OUT 0x80, AL; RDTSC, stored; OUT 0x80, AL; RDTSCP, stored; OUT 0x80, AL; HLT
const PROGRAM: [u8; 32] = [
    0xbf, 0x00, 0x90, 0, 0, 0xe6, 0x80, 0x0f, 0x31, 0x89, 0x07, 0x89, 0x57, 0x04, 0xe6, 0x80, 0x0f, 0x01,
    0xf9, 0x89, 0x47, 0x08, 0x89, 0x57, 0x0c, 0x89, 0x4f, 0x10, 0xe6, 0x80, 0xf4, 0xf4,
];

/// A KVM that says what it is asked, and counts.
struct Asked {
    kvm: FakeKvm,
    offset: Option<u64>,
    offsets: Cell<u32>,
    auxiliaries: Cell<u32>,
    /// A question about the offset panics, as a fault in what is interpreted would.
    panics: bool,
}

impl VcpuDescriptor for Asked {
    fn run(&mut self) -> i32 {
        self.kvm.run()
    }
    fn registers(&mut self, registers: &mut kvm_regs) -> i32 {
        self.kvm.registers(registers)
    }
    fn set_registers(&mut self, registers: &kvm_regs) -> i32 {
        self.kvm.set_registers(registers)
    }
    fn debug_registers(&mut self, registers: &mut kvm_debugregs) -> i32 {
        self.kvm.debug_registers(registers)
    }
    fn events(&mut self, events: &mut kvm_vcpu_events) -> i32 {
        self.kvm.events(events)
    }
    fn set_events(&mut self, events: &kvm_vcpu_events) -> i32 {
        self.kvm.set_events(events)
    }
    fn time_stamp_offset(&mut self) -> Option<u64> {
        self.offsets.set(self.offsets.get() + 1);
        assert!(!self.panics, "a fault that the test has made");
        self.offset
    }
    fn time_stamp_auxiliary(&mut self) -> Option<u32> {
        self.auxiliaries.set(self.auxiliaries.get() + 1);
        Some(AUXILIARY)
    }
}

struct Machine {
    kvm: Asked,
    vm: SharedVm,
    vcpu: ClusteredVcpu,
}

impl Machine {
    fn new(code: &[u8]) -> Self {
        let mut kvm = FakeKvm::new(code, VmState::default());
        kvm.time_stamp = (OFFSET, AUXILIARY);
        let vm = kvm.shared_vm();
        kvm.vm.interrupt_controller(InterruptController::Kernel);
        let page = run_page(&kvm);
        let mut vcpu = ClusteredVcpu::new(page, LIMITS, BITS, Box::leak(Box::default()));
        vcpu.set_cpuid(&GuestCpuid { physical_bits: BITS, remote_flush: false, rdtscp: true });
        vcpu.set_host_time_stamp_speed(SPEED);
        let kvm = Asked {
            kvm,
            offset: Some(OFFSET),
            offsets: Cell::new(0),
            auxiliaries: Cell::new(0),
            panics: false,
        };
        Self { kvm, vm, vcpu }
    }

    /// Runs to HLT; how often the guest was entered.
    fn run(&mut self) -> (u64, ClusterCounts) {
        for _ in 0..100 {
            assert_eq!(self.vcpu.run(&self.vm, &mut self.kvm), 0);
            if self.kvm.kvm.exit_reason() == KVM_EXIT_HLT {
                return (self.kvm.kvm.entries, self.vcpu.counts());
            }
        }
        panic!("the program does not end");
    }

    fn word(&self, number: u64) -> u64 {
        u64::from_le_bytes(self.kvm.kvm.memory.read(WORDS + 8 * number, 8).try_into().unwrap())
    }
}

#[allow(unsafe_code)]
// UNSAFETY: the vCPU uses the page of the machine that it is in.
fn run_page(kvm: &FakeKvm) -> RunPage {
    // SAFETY: the page's memory stays where it is as long as the machine, and all is on one thread.
    unsafe { RunPage::new(kvm.run_page()) }
}

#[test]
fn the_counter_is_the_hosts_and_what_kvm_says() {
    let mut machine = Machine::new(&PROGRAM);
    let before = host_cycles();
    let (entries, counts) = machine.run();
    let after = host_cycles();
    assert_eq!((entries, counts.made_up_accesses), (2, 2), "all in one cluster");
    let (first, second) = (machine.word(0), machine.word(1));
    assert!(before + OFFSET <= first && first <= second && second <= after + OFFSET, "{first:x} {second:x}");
    assert_eq!(machine.word(2), AUXILIARY.into());
    assert_eq!((machine.kvm.offsets.get(), machine.kvm.auxiliaries.get()), (1, 1), "once each");
}

#[test]
fn after_each_entry_it_is_asked_for_again() {
    // OUT; RDTSC; RDTSC; OUT; and CPUID, which only the processor can run.
    let code = [0xe6, 0x80, 0x0f, 0x31, 0x0f, 0x31, 0xe6, 0x80, 0x0f, 0xa2].repeat(3);
    let mut machine = Machine::new(&[code, vec![0xf4]].concat());
    assert_eq!(machine.run().0, 4);
    assert_eq!((machine.kvm.offsets.get(), machine.kvm.auxiliaries.get()), (3, 0));
}

#[test]
fn another_call_of_the_vmm_may_change_it() {
    let code = [0xe6, 0x80, 0x0f, 0x31].repeat(3);
    let mut machine = Machine::new(&[code, vec![0xf4]].concat());
    for asked in [0, 1, 1] {
        assert_eq!(machine.vcpu.run(&machine.vm, &mut machine.kvm), 0);
        assert_eq!(machine.kvm.offsets.get(), asked);
    }
    machine.vcpu.before_other_call(&mut machine.kvm);
    machine.run();
    assert_eq!(machine.kvm.offsets.get(), 1, "the cluster has ended with the call");
}

#[test]
fn what_is_not_known_is_the_processors() {
    // KVM does not say.
    let mut machine = Machine::new(&PROGRAM);
    machine.kvm.offset = None;
    assert_eq!(machine.run().0, 4);
    assert_eq!(machine.kvm.offsets.get(), 1, "nor is it asked again");
    assert!(machine.word(0) > OFFSET, "the processor has read it");

    // Another speed, and the host's again.
    let mut machine = Machine::new(&PROGRAM);
    machine.vcpu.set_time_stamp_speed(SPEED / 2);
    assert_eq!(machine.run().0, 4);
    assert_eq!(machine.kvm.offsets.get(), 0);
    let mut machine = Machine::new(&PROGRAM);
    machine.vcpu.set_time_stamp_speed(SPEED / 2);
    machine.vcpu.set_time_stamp_speed(SPEED);
    assert_eq!(machine.run().0, 2);

    // Nobody has said what the host's is.
    let mut machine = Machine::new(&PROGRAM);
    machine.vcpu.set_host_time_stamp_speed(0);
    assert_eq!(machine.run().0, 4);

    // Without RDTSCP that instruction is invalid for the guest.
    let mut machine = Machine::new(&PROGRAM);
    machine.vcpu.set_cpuid(&GuestCpuid { physical_bits: BITS, remote_flush: false, rdtscp: false });
    assert_eq!(machine.run().0, 3);
    assert_eq!(machine.kvm.auxiliaries.get(), 0);
    assert_eq!(machine.kvm.kvm.general.rip, CODE + PROGRAM.len() as u64 - 2);
}

/// What a cluster has done before its fault stays done, also if KVM has completed the access before it.
#[test]
fn a_panic_in_the_middle_of_a_cluster_does_nothing_twice() {
    // MOV EDI, device; MOV ESI, WORDS; MOV EAX, [RDI], which KVM completes; INC DWORD [RSI]; RDTSC; HLT
    let code = [0xbf, 0, 0, 0x20, 0, 0xbe, 0x00, 0x90, 0, 0, 0x8b, 0x07, 0xff, 0x06, 0x0f, 0x31, 0xf4];
    let mut machine = Machine::new(&code);
    machine.kvm.panics = true;
    machine.run();
    assert!(machine.vm.has_failed());
    assert_eq!(machine.word(0), 1);
}
