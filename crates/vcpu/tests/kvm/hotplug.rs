//! A vCPU that the VMM adds while another has a cluster.
#![allow(unsafe_code)]
// UNSAFETY: calls take addresses; a file is mapped as the library maps its counters.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ioplane_vcpu::MemorySlot;
use ioplane_vcpu::kvm::{
    ClusterPage, ClusterSwitch, Interposer, InterruptController, Kernel, VcpuCounters, VcpuDescriptor,
};
use kvm_bindings::{kvm_debugregs, kvm_run, kvm_userspace_memory_region};

use crate::answers::answer;
use crate::calls::{
    KVM_CHECK_EXTENSION, KVM_CREATE_IRQCHIP, KVM_CREATE_VCPU, KVM_CREATE_VM, KVM_GET_DEBUGREGS,
    KVM_GET_TSC_KHZ, KVM_GET_VCPU_MMAP_SIZE, KVM_RUN, KVM_SET_USER_MEMORY_REGION, LIMITS, SYSTEM, VCPU, VM,
    at,
};
use crate::fake::{DEVICE, FakeKvm, MEMORY};
use crate::migration::{guest, plain};
use crate::program::{Random, random_program};

/// Two vCPUs of one VM, each with memory of its own.
struct Pair {
    kvms: [Mutex<FakeKvm>; 2],
    page: &'static ClusterPage,
    failed: AtomicBool,
}

/// How long a vCPU may wait for another before the test has failed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Where the memory of the second vCPU begins.
const SECOND: u64 = 4 << 20;

fn region(slot: u32, address: u64, kvm: &FakeKvm) -> kvm_userspace_memory_region {
    kvm_userspace_memory_region {
        slot,
        flags: 0,
        guest_phys_addr: address,
        memory_size: MEMORY as u64,
        userspace_addr: kvm.memory.address() as u64,
    }
}

impl Pair {
    fn new(codes: [&[u8]; 2], page: &'static ClusterPage) -> Self {
        const GOOD: u64 = 0x63;
        let [mut first, mut second] = codes.map(guest);
        // The same linear addresses, at other physical ones.
        for (at, to) in [(0x1000, 0x2000), (0x2000, 0x3000), (0x3000, 0x80)] {
            second.memory.write(at, &((SECOND + to) | GOOD).to_le_bytes());
        }
        assert_eq!(second.memory.read(0x3008, 8), (DEVICE | GOOD | 0x80).to_le_bytes());
        second.system.cr3 += SECOND;
        let slots = [(0, &first), (SECOND, &second)].map(|(address, kvm)| MemorySlot {
            number: u32::from(address != 0),
            address,
            size: MEMORY as u64,
            host: kvm.memory.address(),
            read_only: false,
            logged: false,
        });
        for kvm in [&mut first, &mut second] {
            kvm.vm.interrupt_controller(InterruptController::Kernel);
            // SAFETY: both live as long as the pair.
            slots.iter().for_each(|slot| unsafe { kvm.vm.slots.set(*slot).unwrap() });
        }
        Self { kvms: [first, second].map(Mutex::new), page, failed: AtomicBool::new(false) }
    }

    fn of(&self, descriptor: i32) -> &Mutex<FakeKvm> {
        &self.kvms[usize::try_from(descriptor - VCPU).unwrap()]
    }
}

impl Kernel for Pair {
    fn ioctl(&self, descriptor: i32, request: u64, argument: usize) -> i32 {
        match (descriptor, request) {
            (SYSTEM, KVM_CREATE_VM) => VM,
            (SYSTEM, KVM_GET_VCPU_MMAP_SIZE) => 3 * 4096,
            (VM, KVM_CHECK_EXTENSION) => 7,
            (VM, KVM_CREATE_VCPU) => VCPU + i32::try_from(argument).unwrap(),
            (VM, KVM_SET_USER_MEMORY_REGION | KVM_CREATE_IRQCHIP) => 0,
            (_, KVM_GET_TSC_KHZ) => 0,
            (vcpu, KVM_RUN) => self.of(vcpu).lock().unwrap().run(),
            (vcpu, KVM_GET_DEBUGREGS) => {
                let to: *mut kvm_debugregs = std::ptr::with_exposed_provenance_mut(argument);
                // SAFETY: the caller's structure.
                self.of(vcpu).lock().unwrap().debug_registers(unsafe { &mut *to })
            }
            other => panic!("{other:x?} is not made up"),
        }
    }

    fn map_vcpu(&self, descriptor: i32, _: usize) -> Option<*mut kvm_run> {
        Some(self.of(descriptor).lock().unwrap().run_page())
    }

    fn counters(&self) -> Option<&'static VcpuCounters> {
        self.page.next_vcpu()
    }

    fn has_shadow_tables(&self) -> bool {
        false
    }

    fn faults_arrive(&self) -> bool {
        true
    }

    fn switched(&self) -> ClusterSwitch {
        ClusterSwitch::On
    }

    fn failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }
}

/// Counters in a file, as the library has them.
fn counters() -> (File, &'static ClusterPage) {
    let file = tempfile::tempfile().unwrap();
    let bytes = size_of::<ClusterPage>();
    file.set_len(bytes as u64).unwrap();
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, which stays; zeros are a value of it.
    let page = unsafe {
        let mapped = libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0);
        assert_ne!(mapped, libc::MAP_FAILED);
        &*mapped.cast::<ClusterPage>()
    };
    page.begin(ClusterSwitch::On, false, 1000);
    (file, page)
}

/// Runs a vCPU until so many accesses, or HLT.
fn accesses(interposer: &Interposer<Pair>, vcpu: i32, seen: &mut Vec<String>, most: usize) {
    let page = interposer.kernel().map_vcpu(vcpu, 0).unwrap();
    while seen.len() < most {
        assert_eq!(interposer.ioctl(vcpu, KVM_RUN, 0), 0);
        let Some((access, _)) = answer(page, seen.len() + 1) else { return };
        seen.push(access);
    }
}

#[test]
fn a_vcpu_that_is_added_in_the_middle_of_a_cluster() {
    let mut in_cluster = 0;
    for seed in 0..60 {
        let codes = [seed, seed + 1000].map(|seed| random_program(&mut Random(seed)));
        let wanted = [&codes[0], &codes[1]].map(|code| plain(guest(code), Vec::new()).0);
        let (file, page) = counters();
        let interposer = Arc::new(Interposer::new(Pair::new([&codes[0], &codes[1]], page), LIMITS));
        assert_eq!(interposer.ioctl(SYSTEM, KVM_CREATE_VM, 0), VM);
        assert_eq!(interposer.ioctl(VM, KVM_CREATE_IRQCHIP, 0), 0);
        for (slot, address) in [(0, 0), (1, SECOND)] {
            let kvm = &interposer.kernel().kvms[usize::try_from(slot).unwrap()];
            let region = region(slot, address, &kvm.lock().unwrap());
            assert_eq!(interposer.ioctl(VM, KVM_SET_USER_MEMORY_REGION, at(&region)), 0);
        }
        assert_eq!(interposer.ioctl(VM, KVM_CREATE_VCPU, 0), VCPU);
        let mut first = Vec::new();
        // Until an exit that is made up, if there is one.
        let made_up = || interposer.counts(VCPU).unwrap().made_up_accesses;
        while made_up() == 0 && first.len() < wanted[0].len() {
            let next = first.len() + 1;
            accesses(&interposer, VCPU, &mut first, next);
        }
        in_cluster += made_up();
        let ((said, hears), (ends, ended)) = (mpsc::channel(), mpsc::channel());
        let other = interposer.clone();
        std::thread::spawn(move || {
            assert_eq!(other.ioctl(VM, KVM_CREATE_VCPU, 1), VCPU + 1);
            said.send(()).unwrap();
            let mut second = Vec::new();
            accesses(&other, VCPU + 1, &mut second, usize::MAX);
            ends.send(second).unwrap();
        });
        hears.recv_timeout(PATIENCE).expect("it is created while the exit is handled");
        accesses(&interposer, VCPU, &mut first, usize::MAX);
        let seen = [first, ended.recv_timeout(PATIENCE).unwrap()];
        assert_eq!(seen, wanted, "seed {seed}: {codes:02x?}");
        let report = ClusterPage::read(&file).unwrap();
        let counted =
            report.vcpus.iter().map(|vcpu| vcpu.counts.real_accesses + vcpu.counts.made_up_accesses);
        let counted: Vec<usize> = counted.map(|count| usize::try_from(count).unwrap()).collect();
        assert_eq!(counted, wanted.map(|accesses| accesses.len()), "seed {seed}: what the status shows");
        assert!(!interposer.kernel().failed.load(Ordering::Relaxed));
    }
    println!("{in_cluster} vCPUs were added in made-up exits");
    assert!(in_cluster > 30);
}
