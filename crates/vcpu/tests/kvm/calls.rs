//! A VMM's calls, from KVM_CREATE_VM on, through the interposer to a kernel that is made up.
#![allow(unsafe_code)]
// UNSAFETY: system calls give and take addresses.

use std::cell::RefCell;

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use ioplane_vcpu::batch::BatchStatus;
use ioplane_vcpu::kvm::{
    ClusterEnd, ClusterLimits, ClusterObstacle, ClusterSwitch, Interposer, InterruptController, Kernel,
    REASONS, VcpuCounters, VcpuDescriptor, VmState,
};
use kvm_bindings::{
    KVM_CAP_SPLIT_IRQCHIP, KVM_EXIT_HLT, KVM_MEM_LOG_DIRTY_PAGES, kvm_cpuid_entry, kvm_cpuid_entry2,
    kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_enable_cap, kvm_guest_debug, kvm_regs, kvm_run,
    kvm_sregs, kvm_sregs2, kvm_userspace_memory_region, kvm_vcpu_events,
};

use crate::fake::{FakeKvm, MEMORY};
use crate::paged32::{self, Tables};

pub(crate) const SYSTEM: i32 = 3;
pub(crate) const VM: i32 = 4;
pub(crate) const VCPU: i32 = 5;
pub(crate) const KVM_CREATE_VM: u64 = 0xae01;
pub(crate) const KVM_CHECK_EXTENSION: u64 = 0xae03;
pub(crate) const KVM_GET_VCPU_MMAP_SIZE: u64 = 0xae04;
pub(crate) const KVM_CREATE_VCPU: u64 = 0xae41;
pub(crate) const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
pub(crate) const KVM_CREATE_IRQCHIP: u64 = 0xae60;
const KVM_IRQ_LINE: u64 = 0x4008_ae61;
const KVM_IRQ_LINE_STATUS: u64 = 0xc008_ae67;
const KVM_SIGNAL_MSI: u64 = 0x4020_aea5;
pub(crate) const KVM_RUN: u64 = 0xae80;
pub(crate) const KVM_GET_REGS: u64 = 0x8090_ae81;
pub(crate) const KVM_SET_REGS: u64 = 0x4090_ae82;
pub(crate) const KVM_GET_SREGS: u64 = 0x8138_ae83;
pub(crate) const KVM_SET_SREGS: u64 = 0x4138_ae84;
pub(crate) const KVM_GET_MP_STATE: u64 = 0x8004_ae98;
pub(crate) const KVM_SET_MP_STATE: u64 = 0x4004_ae99;
const KVM_SET_CPUID: u64 = 0x4008_ae8a;
const KVM_SET_CPUID2: u64 = 0x4008_ae90;
pub(crate) const KVM_GET_DEBUGREGS: u64 = 0x8080_aea1;
pub(crate) const KVM_GET_VCPU_EVENTS: u64 = 0x8040_ae9f;
const KVM_SET_VCPU_EVENTS: u64 = 0x4040_aea0;
const KVM_SET_GUEST_DEBUG: u64 = 0x4048_ae9b;
const KVM_ENABLE_CAP: u64 = 0x4068_aea3;
const KVM_GET_MSRS: u64 = 0xc008_ae88;
const KVM_SET_TSC_KHZ: u64 = 0xaea2;
pub(crate) const KVM_GET_TSC_KHZ: u64 = 0xaea3;
const KVM_GET_DEVICE_ATTR: u64 = 0x4018_aee2;
const KVM_GET_SREGS2: u64 = 0x8140_aecc;
pub(crate) const LIMITS: ClusterLimits =
    ClusterLimits { instructions: 1000, accesses: 64, cycles: u64::MAX, output_elements: 1 };

pub(crate) struct FakeKernel {
    pub(crate) kvm: RefCell<FakeKvm>,
    shares_registers: bool,
    seen: RefCell<Vec<(i32, u64)>>,
    counters: &'static VcpuCounters,
    off: AtomicBool,
    failed: AtomicBool,
    /// No vCPU finds room for its counters.
    full: AtomicBool,
    shadow_tables: AtomicBool,
    faults_blocked: AtomicBool,
    /// What KVM_GET_SREGS2 says of the PDPTEs beside them.
    pdptes: AtomicU64,
    offers_batches: AtomicBool,
    /// What KVM_SET_CPUID2 has been given last, and what it says next instead of 0.
    leaves: RefCell<Vec<kvm_cpuid_entry2>>,
    refuses_leaves: RefCell<Vec<i32>>,
    /// The descriptor of KVM itself, and that of the next VM.
    system: AtomicI32,
    next_vm: AtomicI32,
}

impl FakeKernel {
    fn set_leaves(&self, argument: usize) -> i32 {
        let from: *const kvm_cpuid2 = std::ptr::with_exposed_provenance(argument);
        // SAFETY: the caller's structure: a count, padding, and as many entries.
        let given: Vec<kvm_cpuid_entry2> = unsafe {
            let first = from.add(1).cast::<kvm_cpuid_entry2>();
            (0..usize::try_from((*from).nent).unwrap()).map(|index| first.add(index).read()).collect()
        };
        if let Some(refusal) = self.refuses_leaves.borrow_mut().pop() {
            return refusal;
        }
        *self.leaves.borrow_mut() = given;
        0
    }
}

impl Kernel for FakeKernel {
    fn ioctl(&self, descriptor: i32, request: u64, argument: usize) -> i32 {
        self.seen.borrow_mut().push((descriptor, request));
        let mut kvm = self.kvm.borrow_mut();
        match (descriptor, request) {
            (system, KVM_CREATE_VM) if system == self.system.load(Ordering::Relaxed) => {
                self.next_vm.load(Ordering::Relaxed)
            }
            (system, KVM_GET_VCPU_MMAP_SIZE) if system == self.system.load(Ordering::Relaxed) => 3 * 4096,
            (VM | 7, KVM_CHECK_EXTENSION) if self.shares_registers => 7,
            (VM, KVM_CHECK_EXTENSION) => 0,
            (VM | 9, KVM_CREATE_VCPU) => VCPU,
            (7, KVM_CREATE_VCPU) => 8,
            (8, KVM_GET_TSC_KHZ) => 0,
            (VM, KVM_SET_USER_MEMORY_REGION | KVM_CREATE_IRQCHIP | KVM_ENABLE_CAP)
            | (VM, KVM_IRQ_LINE | KVM_IRQ_LINE_STATUS | KVM_SIGNAL_MSI)
            | (VCPU, KVM_SET_CPUID | KVM_SET_GUEST_DEBUG) => 0,
            (VCPU, KVM_SET_CPUID2) => self.set_leaves(argument),
            (VCPU, KVM_RUN) => kvm.run(),
            (VCPU, KVM_GET_REGS) => {
                let to: *mut kvm_regs = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure.
                kvm.registers(unsafe { &mut *to })
            }
            (VCPU, KVM_SET_REGS) => {
                let from: *const kvm_regs = std::ptr::with_exposed_provenance(argument);
                // SAFETY: the caller's structure.
                kvm.set_registers(unsafe { &*from })
            }
            (VCPU, KVM_GET_SREGS) => {
                let to: *mut kvm_sregs = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure.
                unsafe { *to = kvm.special() };
                0
            }
            (VCPU, KVM_SET_SREGS) => {
                let from: *const kvm_sregs = std::ptr::with_exposed_provenance(argument);
                // SAFETY: the caller's structure.
                kvm.set_special(unsafe { &*from });
                0
            }
            (VCPU, KVM_GET_MP_STATE | KVM_SET_MP_STATE) => 0,
            (VCPU, KVM_GET_DEBUGREGS) => {
                let to: *mut kvm_debugregs = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure.
                kvm.debug_registers(unsafe { &mut *to })
            }
            (VCPU, KVM_GET_VCPU_EVENTS) => {
                let to: *mut kvm_vcpu_events = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure.
                kvm.events(unsafe { &mut *to })
            }
            (VCPU, KVM_SET_VCPU_EVENTS) => {
                let from: *const kvm_vcpu_events = std::ptr::with_exposed_provenance(argument);
                // SAFETY: the caller's structure.
                kvm.set_events(unsafe { &*from })
            }
            (VCPU, KVM_GET_TSC_KHZ) => 2_000_000,
            (VM | VCPU, KVM_SET_TSC_KHZ) => 0,
            (VCPU, KVM_GET_DEVICE_ATTR) => {
                let from: *const kvm_device_attr = std::ptr::with_exposed_provenance(argument);
                // SAFETY: the caller's structures.
                unsafe {
                    assert_eq!(((*from).flags, (*from).group, (*from).attr), (0, 0, 0));
                    let to = std::ptr::with_exposed_provenance_mut((*from).addr.try_into().unwrap());
                    *to = kvm.time_stamp.0;
                }
                0
            }
            (VCPU, KVM_GET_MSRS) => {
                let to: *mut u32 = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure: a count, padding, and one entry.
                unsafe {
                    assert_eq!((*to, *to.add(2)), (1, 0xc000_0103));
                    *to.add(4) = kvm.time_stamp.1;
                }
                1
            }
            (VCPU, KVM_GET_SREGS2) => {
                let to: *mut kvm_sregs2 = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure.
                unsafe {
                    (*to).pdptrs = kvm.pdptes().unwrap_or_default();
                    (*to).flags = self.pdptes.load(Ordering::Relaxed);
                }
                0
            }
            // A terminal's.
            (0, 0x5401) => -libc::ENOTTY,
            other => panic!("{other:x?} is not made up"),
        }
    }

    fn map_vcpu(&self, descriptor: i32, bytes: usize) -> Option<*mut kvm_run> {
        assert_eq!(bytes, 3 * 4096, "of {descriptor}");
        Some(self.kvm.borrow().run_page())
    }

    fn counters(&self) -> Option<&'static VcpuCounters> {
        (!self.full.load(Ordering::Relaxed)).then_some(self.counters)
    }

    fn has_shadow_tables(&self) -> bool {
        self.shadow_tables.load(Ordering::Relaxed)
    }

    fn offers_batches(&self) -> bool {
        self.offers_batches.load(Ordering::Relaxed)
    }

    fn faults_arrive(&self) -> bool {
        !self.faults_blocked.load(Ordering::Relaxed)
    }

    fn switched(&self) -> ClusterSwitch {
        if self.off.load(Ordering::Relaxed) { ClusterSwitch::Off } else { ClusterSwitch::On }
    }

    fn failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }
}

pub(crate) struct Vmm {
    pub(crate) interposer: Interposer<FakeKernel>,
}

pub(crate) fn at<T>(value: &T) -> usize {
    std::ptr::from_ref(value).expose_provenance()
}

/// Eleven writes and HLT.
pub(crate) fn program() -> Vec<u8> {
    let mut code = [0xe6, 0x80].repeat(11);
    code.push(0xf4);
    code
}

impl Vmm {
    pub(crate) fn new(shares_registers: bool) -> Self {
        Self::with(shares_registers, &program())
    }

    pub(crate) fn with(shares_registers: bool, code: &[u8]) -> Self {
        Self::of(shares_registers, FakeKvm::new(code, VmState::default()))
    }

    pub(crate) fn of(shares_registers: bool, kvm: FakeKvm) -> Self {
        let kvm = RefCell::new(kvm);
        let kernel = FakeKernel {
            kvm,
            shares_registers,
            seen: RefCell::default(),
            counters: Box::leak(Box::default()),
            off: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            full: AtomicBool::new(false),
            shadow_tables: AtomicBool::new(false),
            faults_blocked: AtomicBool::new(false),
            pdptes: AtomicU64::new(0),
            offers_batches: AtomicBool::new(false),
            leaves: RefCell::default(),
            refuses_leaves: RefCell::default(),
            system: AtomicI32::new(SYSTEM),
            next_vm: AtomicI32::new(VM),
        };
        Self { interposer: Interposer::new(kernel, LIMITS) }
    }

    pub(crate) fn call(&self, descriptor: i32, request: u64, argument: usize) -> i32 {
        self.interposer.ioctl(descriptor, request, argument)
    }

    fn region(&self, size: u64, flags: u32) {
        let host = self.interposer.kernel().kvm.borrow().memory.address();
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags,
            guest_phys_addr: 0,
            memory_size: size,
            userspace_addr: host as u64,
        };
        assert_eq!(self.call(VM, KVM_SET_USER_MEMORY_REGION, at(&region)), 0);
    }

    pub(crate) fn create(&self) {
        assert_eq!(self.call(SYSTEM, KVM_CREATE_VM, 0), VM);
        assert_eq!(self.call(VM, KVM_CREATE_IRQCHIP, 0), 0);
        self.region(MEMORY as u64, 0);
        assert_eq!(self.call(VM, KVM_CREATE_VCPU, 0), VCPU);
        self.cpuid(0);
    }

    fn cpuid(&self, ebx: u32) {
        #[repr(C)]
        struct Cpuid {
            count: u32,
            padding: u32,
            entries: [kvm_cpuid_entry2; 2],
        }
        let sizes = kvm_cpuid_entry2 { function: 0x8000_0008, eax: 40, ebx, ..Default::default() };
        let rdtscp = kvm_cpuid_entry2 { function: 0x8000_0001, edx: 1 << 27, ..Default::default() };
        let cpuid = Cpuid { count: 2, padding: 0, entries: [sizes, rdtscp] };
        assert_eq!(self.call(VCPU, KVM_SET_CPUID2, at(&cpuid)), 0);
        assert_eq!((cpuid.padding, cpuid.entries.len()), (0, 2));
    }

    /// Runs to HLT; says how often the guest was entered.
    pub(crate) fn entries(&self) -> u64 {
        let page = self.interposer.kernel().kvm.borrow().run_page();
        for exits in 0.. {
            assert_eq!(self.call(VCPU, KVM_RUN, 0), 0);
            // SAFETY: the page lives as long as the kernel.
            if unsafe { (*page).exit_reason } == KVM_EXIT_HLT {
                assert_eq!(exits, 11, "the VMM sees each write");
                break;
            }
        }
        self.interposer.kernel().kvm.borrow().entries
    }
}

#[test]
fn a_vmm_from_beginning_to_end() {
    let vmm = Vmm::new(true);
    vmm.create();
    assert_eq!(vmm.entries(), 2);
    let counts = vmm.interposer.counts(VCPU).unwrap();
    assert_eq!((counts.real_accesses, counts.made_up_accesses), (1, 10));
    assert_eq!(vmm.interposer.counts(VM), None);
    assert_eq!(vmm.call(0, 0x5401, 0), -libc::ENOTTY, "other calls pass");
    // What clustering calls itself: some questions when a vCPU is made, and one for each cluster.
    let seen = vmm.interposer.kernel().seen.borrow();
    assert_eq!(seen.iter().filter(|(_, request)| *request == KVM_RUN).count(), 2);
    assert_eq!(seen.iter().filter(|(_, request)| *request == KVM_GET_DEBUGREGS).count(), 1);
    assert!(!seen.contains(&(VCPU, KVM_GET_REGS)) && !seen.contains(&(VCPU, KVM_SET_REGS)));
}

/// A guest with PAE paging: one more question for each cluster, and its answer counts only if KVM says so.
#[test]
fn pdptes_are_kvms_to_say() {
    for (says, entries) in [(1, 2), (0, 12), (2, 12)] {
        let vmm = Vmm::of(true, paged32::kvm(Tables::Pae, &program()));
        vmm.interposer.kernel().pdptes.store(says, Ordering::Relaxed);
        vmm.create();
        assert_eq!(vmm.entries(), entries, "flags {says}");
        let seen = vmm.interposer.kernel().seen.borrow();
        assert_eq!(seen.iter().filter(|(_, request)| *request == KVM_GET_SREGS2).count(), 1);
    }
}

#[test]
fn without_what_is_needed_all_goes_to_kvm() {
    let vmm = Vmm::new(false);
    vmm.create();
    assert_eq!(vmm.entries(), 12);

    // No interrupt controller in the kernel.
    let vmm = Vmm::new(true);
    assert_eq!(vmm.call(SYSTEM, KVM_CREATE_VM, 0), VM);
    vmm.region(MEMORY as u64, 0);
    assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 0), VCPU);
    assert_eq!(vmm.entries(), 12);

    // A protected type of VM.
    let vmm = Vmm::new(true);
    assert_eq!(vmm.call(SYSTEM, KVM_CREATE_VM, 2), VM);
    assert_eq!(vmm.call(VM, KVM_CREATE_IRQCHIP, 0), 0);
    vmm.region(MEMORY as u64, 0);
    assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 0), VCPU);
    assert_eq!(vmm.entries(), 12);

    // No memory: the code cannot be read.
    let vmm = Vmm::new(true);
    vmm.create();
    vmm.region(0, 0);
    assert_eq!(vmm.entries(), 12);

    // A debugger, a ring of dirty pages.
    let vmm = Vmm::new(true);
    vmm.create();
    let debug = kvm_guest_debug { control: 1, ..Default::default() };
    assert_eq!(vmm.call(VCPU, KVM_SET_GUEST_DEBUG, at(&debug)), 0);
    assert_eq!(vmm.entries(), 12);
    let vmm = Vmm::new(true);
    vmm.create();
    let ring = kvm_enable_cap { cap: 192, ..Default::default() };
    assert_eq!(vmm.call(VM, KVM_ENABLE_CAP, at(&ring)), 0);
    assert_eq!(vmm.entries(), 12);

    // A second vCPU, and translations that are flushed from afar.
    let vmm = Vmm::new(true);
    vmm.create();
    vmm.cpuid(1 << 3);
    assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 1), VCPU);
    assert_eq!(vmm.entries(), 12);
    let why = vmm.interposer.kernel().counters.not_begun();
    let refused = ClusterEnd::Obstacle(ClusterObstacle::RemoteFlush).index();
    assert_eq!(why[refused], 11, "and it is said: {:?}", REASONS.iter().zip(why));
}

/// CPUID as VMMs set it before there were leaves with indexes: Hyper-V's remote flush is refused all the same.
#[test]
fn the_old_call_for_cpuid_is_read_too() {
    #[repr(C)]
    struct OldCpuid {
        count: u32,
        padding: u32,
        entries: [kvm_cpuid_entry; 2],
    }
    let entries = |flush: u32| {
        let name = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let leaf = |function, eax| kvm_cpuid_entry { function, eax, ..Default::default() };
        let maker = kvm_cpuid_entry {
            ebx: name(b"Micr"),
            ecx: name(b"osof"),
            edx: name(b"t Hv"),
            ..leaf(0x4000_0000, 0x4000_0005)
        };
        let cpuid = OldCpuid { count: 2, padding: 0, entries: [maker, leaf(0x4000_0004, flush)] };
        let vmm = Vmm::new(true);
        vmm.create();
        assert_eq!(vmm.call(VCPU, KVM_SET_CPUID, at(&cpuid)), 0);
        assert_eq!((cpuid.padding, cpuid.entries.len()), (0, 2));
        assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 1), VCPU);
        vmm.entries()
    };
    assert_eq!(entries(1 << 2), 12, "refused");
    assert_eq!(entries(0), 2);
}

/// Where the PIC is the VMM's, it hands KVM an interrupt only if `kvm_run` says that it may.
#[test]
fn a_made_up_exit_says_whether_an_interrupt_can_be_taken() {
    // STI; NOP; OUT 0x80; CLI; OUT 0x80; HLT
    let code = [0xfb, 0x90, 0xe6, 0x80, 0xfa, 0xe6, 0x80, 0xf4];
    let shown = |controller: InterruptController| {
        let vmm = Vmm::with(true, &code);
        vmm.interposer.kernel().kvm.borrow_mut().vm.interrupt_controller(controller);
        assert_eq!(vmm.call(SYSTEM, KVM_CREATE_VM, 0), VM);
        match controller {
            InterruptController::Split => {
                let split = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
                assert_eq!(vmm.call(VM, KVM_ENABLE_CAP, at(&split)), 0);
            }
            _ => assert_eq!(vmm.call(VM, KVM_CREATE_IRQCHIP, 0), 0),
        }
        vmm.region(MEMORY as u64, 0);
        assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 0), VCPU);
        let page = vmm.interposer.kernel().kvm.borrow().run_page();
        let said = [(); 2].map(|()| {
            assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
            // SAFETY: the page lives as long as the kernel.
            unsafe { ((*page).if_flag, (*page).ready_for_interrupt_injection) }
        });
        assert_eq!(vmm.interposer.counts(VCPU).unwrap().made_up_accesses, 1, "the second is made up");
        said
    };
    assert_eq!(shown(InterruptController::Split), [(1, 1), (0, 0)]);
    assert_eq!(shown(InterruptController::Kernel), [(1, 1), (0, 1)], "the PIC waits itself");
}

#[test]
fn a_split_controller_and_logged_memory_are_fine() {
    let vmm = Vmm::new(true);
    assert_eq!(vmm.call(SYSTEM, KVM_CREATE_VM, 0), VM);
    let split = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
    assert_eq!(vmm.call(VM, KVM_ENABLE_CAP, at(&split)), 0);
    vmm.region(MEMORY as u64, KVM_MEM_LOG_DIRTY_PAGES);
    assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 0), VCPU);
    assert_eq!(vmm.entries(), 2, "nothing is stored");
}

/// A store to the guest's page tables would leave KVM's own tables as they are; a fault on memory that has gone would end the process.
#[test]
fn shadow_tables_and_threads_that_block_faults_leave_all_to_kvm() {
    let refused = |make: &dyn Fn(&FakeKernel) -> &AtomicBool, why: ClusterEnd| {
        let vmm = Vmm::new(true);
        make(vmm.interposer.kernel()).store(true, Ordering::Relaxed);
        vmm.create();
        assert_eq!(vmm.entries(), 12);
        assert_eq!(vmm.interposer.kernel().counters.not_begun()[why.index()], 11, "{why:?}");
    };
    refused(&|kernel| &kernel.shadow_tables, ClusterEnd::Obstacle(ClusterObstacle::ShadowTables));
    refused(&|kernel| &kernel.faults_blocked, ClusterEnd::FaultsBlocked);
}

/// Numbers of descriptors are used again. What one was before says nothing of what it is.
#[test]
fn a_number_that_is_used_again_is_forgotten() {
    let vmm = Vmm::new(true);
    vmm.create();
    assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    assert!(vmm.interposer.counts(VCPU).is_some());
    // A vCPU that finds no room, in a VM of its own.
    vmm.interposer.kernel().full.store(true, Ordering::Relaxed);
    assert_eq!(vmm.call(SYSTEM, KVM_CREATE_VM, 0), VM);
    assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 0), VCPU);
    assert!(vmm.interposer.counts(VCPU).is_none());
    // The file of KVM itself has a number that a VM, or a vCPU, had before.
    for before in [VM, VCPU] {
        let vmm = Vmm::new(true);
        vmm.create();
        vmm.interposer.kernel().system.store(before, Ordering::Relaxed);
        vmm.interposer.kernel().next_vm.store(7, Ordering::Relaxed);
        assert_eq!(vmm.call(before, KVM_CREATE_VM, 0), 7);
        assert_eq!(vmm.call(7, KVM_CREATE_VCPU, 0), 8);
        assert!(vmm.interposer.counts(8).is_some(), "the VM is known");
    }
    // A VM that is not known: by a descriptor that has come by another way.
    let vmm = Vmm::new(true);
    vmm.create();
    assert_eq!(vmm.call(9, KVM_CREATE_VCPU, 0), VCPU);
    assert!(vmm.interposer.counts(VCPU).is_none());
}

#[test]
fn registers_asked_for_in_a_made_up_exit_are_those_before_it() {
    let vmm = Vmm::new(true);
    vmm.create();
    for _ in 0..3 {
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    }
    let mut registers = kvm_regs::default();
    let address = std::ptr::from_mut(&mut registers).expose_provenance();
    assert_eq!(vmm.call(VCPU, KVM_GET_REGS, address), 0);
    assert_eq!(registers.rip, crate::fake::CODE + 4, "at the third write");
    // The VMM skips two instructions; the one that it was asked for is not done.
    registers.rip += 4;
    assert_eq!(vmm.call(VCPU, KVM_SET_REGS, address), 0);
    assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    assert_eq!(vmm.call(VCPU, KVM_GET_REGS, address), 0);
    assert_eq!(registers.rip, crate::fake::CODE + 8);
}

/// C programs keep the number of a request in an `int`.
#[test]
fn a_request_with_its_sign_repeated_is_the_same() {
    let vmm = Vmm::new(true);
    vmm.create();
    assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    let mut registers = kvm_regs::default();
    let address = std::ptr::from_mut(&mut registers).expose_provenance();
    assert_eq!(vmm.call(VCPU, KVM_GET_REGS | 0xffff_ffff << 32, address), 0);
    assert_eq!(registers.rip, crate::fake::CODE + 2, "the second write");
}

#[test]
fn breakpoints_of_the_guest_leave_all_to_kvm() {
    let vmm = Vmm::new(true);
    vmm.create();
    vmm.interposer.kernel().kvm.borrow_mut().dr7 = 0x402;
    assert_eq!(vmm.entries(), 12);
    let why = vmm.interposer.kernel().counters.not_begun();
    assert_eq!(why[ClusterEnd::DebugRegisters.index()], 11, "{:?}", REASONS.iter().zip(why));
}

#[test]
fn switched_off_in_the_middle_of_a_cluster_and_on_again() {
    let vmm = Vmm::new(true);
    vmm.create();
    for _ in 0..4 {
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    }
    vmm.interposer.kernel().off.store(true, Ordering::Relaxed);
    assert_eq!(vmm.interposer.kernel().kvm.borrow().entries, 1);
    for entries in 2..5 {
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
        assert_eq!(vmm.interposer.kernel().kvm.borrow().entries, entries);
    }
    vmm.interposer.kernel().off.store(false, Ordering::Relaxed);
    // One further entry to find an access with the registers shared.
    for _ in 0..4 {
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
    }
    assert_eq!(vmm.interposer.kernel().kvm.borrow().entries, 5);
}

#[test]
fn counters_say_what_was_done_and_why_it_ended() {
    let vmm = Vmm::new(true);
    vmm.create();
    vmm.entries();
    let counters = vmm.interposer.kernel().counters;
    let sites: Vec<_> = counters.sites().collect();
    assert_eq!(sites.len(), 1, "{sites:?}");
    assert_eq!((sites[0].rip, sites[0].clusters, sites[0].accesses), (crate::fake::CODE, 1, 10));
    assert_eq!(sites[0].ends[ClusterEnd::Stopped(ioplane_vcpu::StopReason::Instruction).index()], 1, "HLT");
    assert!(sites[0].cycles > 0);
}

/// The first of a VM's calls that clustering makes in the middle of a cluster, with their structures.
#[test]
fn a_cluster_goes_on_over_the_time_stamp_counter() {
    // OUT; RDTSCP, whose RDX, RCX stay; OUT; HLT
    let code = [0xe6, 0x80, 0x0f, 0x01, 0xf9, 0xe6, 0x80, 0xf4];
    let made_up = |before: &dyn Fn(&Vmm), after: &dyn Fn(&Vmm)| {
        let vmm = Vmm::with(true, &code);
        vmm.interposer.kernel().kvm.borrow_mut().time_stamp = (5 << 60, 9);
        assert_eq!(vmm.call(SYSTEM, KVM_CREATE_VM, 0), VM);
        assert_eq!(vmm.call(VM, KVM_CREATE_IRQCHIP, 0), 0);
        vmm.region(MEMORY as u64, 0);
        before(&vmm);
        assert_eq!(vmm.call(VM, KVM_CREATE_VCPU, 0), VCPU);
        vmm.cpuid(0);
        after(&vmm);
        for _ in 0..3 {
            assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
        }
        let counts = vmm.interposer.counts(VCPU).unwrap();
        let general = vmm.interposer.kernel().kvm.borrow().general;
        assert_eq!((general.gpr[1], general.gpr[2] >> 28), (9, 5), "what KVM has said");
        counts.made_up_accesses
    };
    let nothing = |_: &Vmm| {};
    assert_eq!(made_up(&nothing, &nothing), 1);
    let set = |descriptor: i32, speed: usize| {
        move |vmm: &Vmm| assert_eq!(vmm.call(descriptor, KVM_SET_TSC_KHZ, speed), 0)
    };
    assert_eq!(made_up(&nothing, &set(VCPU, 1_000_000)), 0, "another speed");
    assert_eq!(made_up(&nothing, &set(VCPU, 2_000_000)), 1, "the same");
    assert_eq!(made_up(&set(VM, 1_000_000), &nothing), 0, "of all vCPUs");
}

/// An interrupt that the VMM raises while it answers an access reaches the guest before anything else is done with interrupts enabled.
#[test]
fn an_interrupt_of_the_vmm_ends_a_cluster() {
    // STI; NOP; OUT; CLI; STI; NOP; OUT; HLT
    let code = [0xfb, 0x90, 0xe6, 0x80, 0xfa, 0xfb, 0x90, 0xe6, 0x80, 0xf4];
    let entries = |raise: &dyn Fn(&Vmm)| {
        let vmm = Vmm::with(true, &code);
        vmm.create();
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
        raise(&vmm);
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
        vmm.interposer.kernel().kvm.borrow().entries
    };
    let line =
        |request: u64, level: u32| move |vmm: &Vmm| assert_eq!(vmm.call(VM, request, at(&[4, level])), 0);
    assert_eq!(entries(&|_| {}), 1, "over CLI and STI");
    assert_eq!(entries(&line(KVM_IRQ_LINE, 1)), 2);
    assert_eq!(entries(&line(KVM_IRQ_LINE_STATUS, 1)), 2);
    assert_eq!(entries(&line(KVM_IRQ_LINE, 0)), 1, "lowered");
    assert_eq!(entries(&|vmm| assert_eq!(vmm.call(VM, KVM_SIGNAL_MSI, at(&[0_u64; 4])), 0)), 2);
}

/// Interrupts of the kernel's own wait until a cluster ends. If they are disabled again by then, the processor has the next time at which
/// they are enabled: a guest that enables them only between accesses gets them.
#[test]
fn what_is_pending_is_not_kept_from_a_guest_again_and_again() {
    // OUT 80; STI; NOP; CLI; OUT B2 (which is left to KVM); OUT 80; STI; NOP; OUT 80; HLT
    let code = [0xe6, 0x80, 0xfb, 0x90, 0xfa, 0xe6, 0xb2, 0xe6, 0x80, 0xfb, 0x90, 0xe6, 0x80, 0xf4];
    let entries = |code: &[u8]| {
        let vmm = Vmm::with(true, code);
        vmm.create();
        (0..4).for_each(|_| assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0));
        vmm.interposer.kernel().kvm.borrow().entries
    };
    assert_eq!(entries(&code), 4, "the second STI is the processor's");
    let enabled = [&code[..4], &[0x90], &code[5..]].concat();
    assert_eq!(entries(&enabled), 3, "entered with interrupts enabled");
}

/// What a VMM gives KVM_SET_CPUID2: a guest that is told of its hypervisor.
#[repr(C)]
struct Leaves {
    count: u32,
    padding: u32,
    entries: [kvm_cpuid_entry2; 2],
}

fn hypervisor() -> Leaves {
    let leaf = |function, ecx| kvm_cpuid_entry2 { function, ecx, ..Default::default() };
    Leaves { count: 2, padding: 0, entries: [leaf(1, 1 << 31), leaf(0x4000_0000, 0)] }
}

/// Rings for a batch at address 0, which is none: EAX has an error if somebody is there.
fn ring_and_halt(vmm: &Vmm) -> u64 {
    let page = vmm.interposer.kernel().kvm.borrow().run_page();
    loop {
        assert_eq!(vmm.call(VCPU, KVM_RUN, 0), 0);
        // SAFETY: the page lives as long as the kernel.
        unsafe {
            if (*page).exit_reason == KVM_EXIT_HLT {
                break;
            }
            // No device is there.
            page.cast::<u8>().add(4096).cast::<u32>().write(u32::MAX);
        }
    }
    let mut registers = kvm_regs::default();
    let address = std::ptr::from_mut(&mut registers).expose_provenance();
    assert_eq!(vmm.call(VCPU, KVM_GET_REGS, address), 0);
    registers.rax
}

const SOMEBODY: u64 = (BatchStatus::Header as u64) << 16;
const NOBODY: u64 = 0xffff_ffff;

/// A VMM whose guest is offered batches, or not.
fn with_batches(offered: bool) -> Vmm {
    // MOV EDX, DOORBELL; XOR EAX, EAX; IN EAX, DX; HLT
    let vmm = Vmm::with(true, &[0xba, 0x60, 0x0e, 0, 0, 0x31, 0xc0, 0xed, 0xf4]);
    vmm.interposer.kernel().offers_batches.store(offered, Ordering::Relaxed);
    vmm.create();
    vmm
}

#[test]
fn cpuid_offers_batches_beside_what_the_vmm_says() {
    for offered in [true, false] {
        let vmm = with_batches(offered);
        let leaves = hypervisor();
        assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&leaves)), 0);
        assert_eq!((leaves.count, leaves.padding), (2, 0), "the VMM's own stay as they are");
        assert_eq!(leaves.entries, hypervisor().entries);
        let seen = vmm.interposer.kernel().leaves.borrow().clone();
        assert_eq!(seen[..2], leaves.entries);
        let added: Vec<u32> = seen[2..].iter().map(|leaf| leaf.function).collect();
        assert_eq!(added, if offered { vec![0x4000_0200, 0x4000_0201] } else { vec![] });
        assert_eq!(ring_and_halt(&vmm), if offered { SOMEBODY } else { NOBODY });
    }
}

/// A guest that is not told of its hypervisor is not offered anything, and neither is one whose KVM does not take the leaves.
#[test]
fn a_guest_that_is_not_offered_batches_finds_nobody() {
    let vmm = with_batches(true);
    assert_eq!(ring_and_halt(&vmm), NOBODY);
    let vmm = with_batches(true);
    // The last first: our leaves, the VMM's.
    vmm.interposer.kernel().refuses_leaves.borrow_mut().extend([-libc::E2BIG, 0]);
    assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&hypervisor())), 0);
    assert_eq!(ring_and_halt(&vmm), NOBODY);
    // Refused as the VMM has given them: so it is told.
    let vmm = with_batches(true);
    vmm.interposer.kernel().refuses_leaves.borrow_mut().push(-libc::EFAULT);
    assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&hypervisor())), -libc::EFAULT);
    assert_eq!(ring_and_halt(&vmm), NOBODY);
}

/// Once a vCPU has run, KVM takes only what it has: a VMM that sets the same again is told that it may.
#[test]
fn leaves_that_are_set_again() {
    let vmm = with_batches(true);
    let leaves = hypervisor();
    // Nothing has been offered yet: the refusal is the VMM's.
    let refuses = &vmm.interposer.kernel().refuses_leaves;
    refuses.borrow_mut().push(-libc::EINVAL);
    assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&leaves)), -libc::EINVAL);
    assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&leaves)), 0);
    refuses.borrow_mut().push(-libc::EINVAL);
    assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&leaves)), 0);
    assert_eq!(vmm.interposer.kernel().leaves.borrow().len(), 4);
    // Others than those that KVM has.
    refuses.borrow_mut().extend([-libc::EINVAL, -libc::EINVAL]);
    assert_eq!(vmm.call(VCPU, KVM_SET_CPUID2, at(&leaves)), -libc::EINVAL);
    assert_eq!(ring_and_halt(&vmm), SOMEBODY);
}
