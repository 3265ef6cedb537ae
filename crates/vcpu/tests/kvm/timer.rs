//! The timer clamp's calls, on a kernel that is made up: one VM, one vCPU that stays in KVM_RUN until it is kicked.
#![allow(unsafe_code)]
// UNSAFETY: system calls give and take addresses.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use ioplane_vcpu::kvm::{
    ClampPage, ClampReport, ClampState, ClusterLimits, ClusterPage, ClusterSwitch, Interposer, Kernel,
    SETTLED, VcpuCounters,
};
use kvm_bindings::{kvm_pit_state2, kvm_regs, kvm_run, kvm_sregs};

use crate::calls::{
    KVM_CHECK_EXTENSION, KVM_CREATE_VCPU, KVM_CREATE_VM, KVM_GET_REGS, KVM_GET_TSC_KHZ,
    KVM_GET_VCPU_MMAP_SIZE, KVM_RUN, SYSTEM, VCPU, VM,
};

const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_GET_PIT2: u64 = 0x8070_ae9f;
const KVM_SET_PIT2: u64 = 0x4070_aea0;
const RUN_BYTES: usize = 3 * 4096;
/// The least count for 100 Hz.
const CLAMPED: u32 = 0x2e9c;

struct Machine {
    page: Box<ClusterPage>,
    run: usize,
    pit: Mutex<kvm_pit_state2>,
    cr0: Mutex<u64>,
    /// Whether vCPUs are followed.
    follows: bool,
    /// What KVM_SET_PIT2 says.
    says: AtomicI32,
    gone: AtomicBool,
    panics: AtomicBool,
    kicks_work: AtomicBool,
    kicked: AtomicBool,
    running: AtomicBool,
    failed: AtomicBool,
}

impl Kernel for Machine {
    fn ioctl(&self, descriptor: i32, request: u64, argument: usize) -> i32 {
        match (descriptor, request) {
            (SYSTEM, KVM_CREATE_VM) => VM,
            (SYSTEM, KVM_GET_VCPU_MMAP_SIZE) => RUN_BYTES as i32,
            (VM, KVM_CHECK_EXTENSION) => 7,
            (VM, KVM_CREATE_VCPU) => VCPU,
            (VCPU, KVM_GET_TSC_KHZ) => 0,
            (VCPU, KVM_RUN) => {
                self.running.store(true, Ordering::SeqCst);
                while !self.kicked.swap(false, Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                self.running.store(false, Ordering::SeqCst);
                -libc::EINTR
            }
            (VM, KVM_GET_PIT2) if self.panics.load(Ordering::SeqCst) => {
                panic!("a fault that the test has made")
            }
            (VM, KVM_GET_PIT2) if self.gone.load(Ordering::SeqCst) => -libc::EBADF,
            (VM, KVM_GET_PIT2) => {
                // SAFETY: the caller's structure.
                unsafe { put(argument, *self.pit.lock().unwrap()) };
                0
            }
            (VM, KVM_SET_PIT2) => {
                assert!(!self.running.load(Ordering::SeqCst), "the guest could program it meanwhile");
                let result = self.says.load(Ordering::SeqCst);
                if result == 0 {
                    let from: *const kvm_pit_state2 = std::ptr::with_exposed_provenance(argument);
                    // SAFETY: the caller's structure.
                    *self.pit.lock().unwrap() = unsafe { from.read() };
                }
                result
            }
            (VCPU, KVM_GET_SREGS) => {
                let special = kvm_sregs { cr0: *self.cr0.lock().unwrap(), ..Default::default() };
                // SAFETY: the caller's structure.
                unsafe { put(argument, special) };
                0
            }
            (VCPU, KVM_GET_REGS) => {
                // SAFETY: the caller's structure.
                unsafe { put(argument, kvm_regs::default()) };
                0
            }
            other => panic!("{other:x?} is not made up"),
        }
    }

    fn map_vcpu(&self, _: i32, bytes: usize) -> Option<*mut kvm_run> {
        assert_eq!(bytes, RUN_BYTES);
        Some(std::ptr::with_exposed_provenance_mut(self.run))
    }

    fn counters(&self) -> Option<&'static VcpuCounters> {
        self.follows.then(|| &*Box::leak(Box::default()))
    }

    fn has_shadow_tables(&self) -> bool {
        false
    }

    fn faults_arrive(&self) -> bool {
        true
    }

    fn switched(&self) -> ClusterSwitch {
        ClusterSwitch::Off
    }

    fn failed(&self) {
        self.failed.store(true, Ordering::SeqCst);
    }

    fn clamp(&self) -> Option<&ClampPage> {
        Some(self.page.clamp())
    }

    fn thread(&self) -> i32 {
        42
    }

    fn kick(&self, thread: i32) -> bool {
        assert_eq!(thread, 42);
        let works = self.kicks_work.load(Ordering::SeqCst);
        self.kicked.fetch_or(works, Ordering::SeqCst);
        works
    }
}

/// # Safety
/// There is room for a `T`.
unsafe fn put<T>(address: usize, value: T) {
    // SAFETY: the caller's.
    unsafe { std::ptr::with_exposed_provenance_mut::<T>(address).write(value) };
}

/// A VM whose guest has set 1,193 in mode 2, to be clamped to 100 Hz.
fn machine(follows: bool) -> Interposer<Machine> {
    // SAFETY: all zeros are a value of it.
    let page = unsafe { Box::<ClusterPage>::new_zeroed().assume_init() };
    let run = Box::leak(vec![0_u64; RUN_BYTES / 8].into_boxed_slice()).as_mut_ptr().expose_provenance();
    let mut pit = kvm_pit_state2::default();
    pit.channels[0].count = 1193;
    (pit.channels[0].mode, pit.channels[0].rw_mode) = (2, 3);
    (pit.channels[0].write_state, pit.channels[0].write_latch) = (3, 0xa9);
    page.clamp().begin(Some(100));
    let kernel = Machine {
        page,
        run,
        pit: Mutex::new(pit),
        cr0: Mutex::new(0x8000_0011),
        follows,
        says: AtomicI32::new(0),
        gone: AtomicBool::new(false),
        panics: AtomicBool::new(false),
        kicks_work: AtomicBool::new(true),
        kicked: AtomicBool::new(false),
        running: AtomicBool::new(false),
        failed: AtomicBool::new(false),
    };
    let limits = ClusterLimits { instructions: 1, accesses: 1, cycles: 1, output_elements: 1 };
    let vmm = Interposer::new(kernel, limits);
    assert_eq!(vmm.ioctl(SYSTEM, KVM_CREATE_VM, 0), VM);
    assert_eq!(vmm.ioctl(VM, KVM_CREATE_VCPU, 0), VCPU);
    vmm
}

/// What the page says, as another process reads it.
fn report(vmm: &Interposer<Machine>) -> ClampReport {
    let page = std::ptr::from_ref(vmm.kernel().page.clamp()).cast::<u8>();
    // SAFETY: the place of one of the page's words.
    ClampPage::report_of(|at| unsafe { page.add(at).cast::<u32>().read_volatile() })
}

/// Looks, and again when the timer has settled.
fn settle(vmm: &Interposer<Machine>, from: Duration) -> ClampReport {
    assert!(vmm.clamp_step(VM, from).is_some());
    assert!(vmm.clamp_step(VM, from + SETTLED).is_some());
    report(vmm)
}

fn count(vmm: &Interposer<Machine>) -> u32 {
    vmm.kernel().pit.lock().unwrap().channels[0].count
}

#[test]
fn a_timer_is_set_while_no_vcpu_runs() {
    let vmm = machine(true);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                assert_eq!(vmm.ioctl(VCPU, KVM_RUN, 0), -libc::EINTR);
            }
        });
        let runs = || {
            while !vmm.kernel().running.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        };
        runs();
        vmm.kernel().kicks_work.store(false, Ordering::SeqCst);
        assert_eq!(settle(&vmm, Duration::ZERO).state, ClampState::DoesNotStop);
        assert_eq!(count(&vmm), 1193);
        vmm.kernel().kicks_work.store(true, Ordering::SeqCst);
        // On a loaded machine it may take more than one attempt, as in earnest.
        let mut now = SETTLED;
        while count(&vmm) == 1193 {
            now += Duration::from_millis(100);
            runs();
            assert!(vmm.clamp_step(VM, now).is_some());
        }
        let report = self::report(&vmm);
        assert_eq!((report.state, report.guest_count, report.count), (ClampState::Clamped, 1193, CLAMPED));
        assert_eq!((count(&vmm), report.changes), (CLAMPED, 1));
        ended.store(true, Ordering::SeqCst);
        vmm.kernel().kicked.store(true, Ordering::SeqCst);
    });
    let mut told = kvm_pit_state2::default();
    assert_eq!(vmm.ioctl(VM, KVM_GET_PIT2, std::ptr::from_mut(&mut told).expose_provenance()), 0);
    assert_eq!(told.channels[0].count, 1193);
}

#[test]
fn what_is_refused_stays_the_guests() {
    let vmm = machine(false);
    assert_eq!((settle(&vmm, Duration::ZERO).state, count(&vmm)), (ClampState::NotFollowed, 1193));
    let vmm = machine(true);
    *vmm.kernel().cr0.lock().unwrap() = 0x10;
    assert_eq!((settle(&vmm, Duration::ZERO).state, count(&vmm)), (ClampState::RealMode, 1193));
    let vmm = machine(true);
    vmm.kernel().says.store(-libc::EINVAL, Ordering::SeqCst);
    let report = settle(&vmm, Duration::ZERO);
    assert_eq!((report.state, report.changes, count(&vmm)), (ClampState::Failed, 0, 1193));
}

#[test]
fn a_vm_that_is_gone_ends_it_and_so_does_a_fault() {
    let vmm = machine(true);
    assert!(vmm.clamp_step(VCPU, Duration::ZERO).is_none() && vmm.clamp_step(99, Duration::ZERO).is_none());
    assert_eq!(settle(&vmm, Duration::ZERO).state, ClampState::Clamped);
    vmm.kernel().panics.store(true, Ordering::SeqCst);
    assert!(vmm.clamp_step(VM, SETTLED).is_some(), "it is looked at once more");
    assert!(vmm.kernel().failed.load(Ordering::SeqCst));
    assert!(vmm.clamp_step(VM, SETTLED).is_none(), "not for ever");
    vmm.kernel().panics.store(false, Ordering::SeqCst);
    assert!(vmm.clamp_step(VM, SETTLED).is_some(), "a look that succeeds puts back what is the guest's");
    assert_eq!((report(&vmm).state, count(&vmm)), (ClampState::Failed, 1193));
    vmm.kernel().gone.store(true, Ordering::SeqCst);
    assert!(vmm.clamp_step(VM, SETTLED).is_none());
}
