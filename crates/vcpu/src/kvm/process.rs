//! The calls of a VMM's process: which descriptors are VMs and vCPUs, and what their calls say about them.
//!
//! Whatever is not known goes to the kernel as it is. A descriptor that arrives by other ways than KVM_CREATE_VM and
//! KVM_CREATE_VCPU (dup, a socket) is not known, and so is nothing that is done by it.
#![allow(unsafe_code)]
// UNSAFETY: reads what the VMM gives the kernel by address, after the kernel has taken it; and shares vCPUs by descriptor.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::Duration;

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_SPLIT_IRQCHIP, KVM_CAP_SYNC_REGS,
    KVM_MEM_GUEST_MEMFD, KVM_MEM_LOG_DIRTY_PAGES, KVM_MEM_READONLY, KVM_SREGS2_FLAGS_PDPTRS_VALID,
    KVM_SYNC_X86_VALID_FIELDS, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, kvm_cpuid, kvm_cpuid_entry,
    kvm_cpuid_entry2, kvm_cpuid2, kvm_debugregs, kvm_device_attr, kvm_enable_cap, kvm_guest_debug,
    kvm_ioeventfd, kvm_ioeventfd_flag_nr_deassign, kvm_ioeventfd_flag_nr_pio, kvm_msr_entry, kvm_regs,
    kvm_sregs2, kvm_userspace_memory_region, kvm_vcpu_events,
};

use super::abi;
use super::clamp::{RunGate, TimerClamp};
use super::counters::ClusterCounts;
use super::cpuid::{self, BatchOffer};
use super::descriptor::VcpuDescriptor;
use super::gate::{SharedVm, VmChange};
use super::kernel::Kernel;
use super::page::ClusterSwitch;
use super::run_page::RunPage;
use super::vcpu::{ClusterLimits, ClusteredVcpu};
use super::vm::{ClusterObstacle, GuestCpuid, InterruptController};
use crate::slots::MemorySlot;

/// Descriptors that are watched: those below this number.
const DESCRIPTORS: usize = 1 << 16;
/// CPUID leaves that are read at most.
const MOST_LEAVES: u32 = 256;
/// What RDTSCP has in ECX.
const IA32_TSC_AUX: u32 = 0xc000_0103;

enum Descriptor {
    Vm {
        vm: &'static SharedVm,
        /// What KVM_GET_VCPU_MMAP_SIZE says.
        run_bytes: usize,
        timer: &'static TimerClamp,
    },
    Vcpu {
        vm: &'static SharedVm,
        timer: &'static TimerClamp,
        gate: &'static RunGate,
        /// A call is using `vcpu`. Others go to KVM, which has a lock of its own.
        busy: AtomicBool,
        vcpu: Box<UnsafeCell<ClusteredVcpu>>,
    },
}

/// All VMs of a process.
///
/// What it knows of a descriptor stays until the process ends: closing is not seen, and a number that is used
/// again is replaced by what it is then.
pub struct Interposer<K> {
    kernel: K,
    limits: ClusterLimits,
    descriptors: Box<[AtomicPtr<Descriptor>]>,
}

/// One vCPU's descriptor, for the calls that clustering makes.
struct Calls<'a, K> {
    kernel: &'a K,
    descriptor: i32,
    /// Of KVM_RUN; it has none, and it is passed on as it came.
    argument: usize,
    timer: &'static TimerClamp,
    gate: &'static RunGate,
}

impl<K: Kernel> Calls<'_, K> {
    /// A call that fills a structure.
    fn get<T>(&self, request: u64, structure: &mut T) -> i32 {
        self.kernel.ioctl(self.descriptor, request, ptr::from_mut(structure).expose_provenance())
    }

    /// A call that reads a structure.
    fn set<T>(&self, request: u64, structure: &T) -> i32 {
        self.kernel.ioctl(self.descriptor, request, ptr::from_ref(structure).expose_provenance())
    }
}

impl<K: Kernel> VcpuDescriptor for Calls<'_, K> {
    fn run(&mut self) -> i32 {
        let run = || self.kernel.ioctl(self.descriptor, abi::KVM_RUN, self.argument);
        self.timer.hold.run(self.gate, self.kernel.thread(), run)
    }

    fn registers(&mut self, registers: &mut kvm_regs) -> i32 {
        self.get(abi::KVM_GET_REGS, registers)
    }

    fn set_registers(&mut self, registers: &kvm_regs) -> i32 {
        self.set(abi::KVM_SET_REGS, registers)
    }

    fn debug_registers(&mut self, registers: &mut kvm_debugregs) -> i32 {
        self.get(abi::KVM_GET_DEBUGREGS, registers)
    }

    fn events(&mut self, events: &mut kvm_vcpu_events) -> i32 {
        self.get(abi::KVM_GET_VCPU_EVENTS, events)
    }

    fn set_events(&mut self, events: &kvm_vcpu_events) -> i32 {
        self.set(abi::KVM_SET_VCPU_EVENTS, events)
    }

    fn time_stamp_offset(&mut self) -> Option<u64> {
        let mut offset = 0_u64;
        let attribute = kvm_device_attr {
            flags: 0,
            group: KVM_VCPU_TSC_CTRL,
            attr: KVM_VCPU_TSC_OFFSET.into(),
            addr: ptr::from_mut(&mut offset).expose_provenance() as u64,
        };
        let result = self.set(abi::KVM_GET_DEVICE_ATTR, &attribute);
        (result == 0).then_some(offset)
    }

    fn time_stamp_auxiliary(&mut self) -> Option<u32> {
        let entry = kvm_msr_entry { index: IA32_TSC_AUX, reserved: 0, data: 0 };
        let mut msr = abi::OneMsr { count: 1, padding: 0, entry };
        let read = self.get(abi::KVM_GET_MSRS, &mut msr);
        if read == 1 { u32::try_from(msr.entry.data).ok() } else { None }
    }

    fn pdptes(&mut self) -> Option<[u64; 4]> {
        let mut registers = kvm_sregs2::default();
        let result = self.get(abi::KVM_GET_SREGS2, &mut registers);
        let valid = registers.flags & u64::from(KVM_SREGS2_FLAGS_PDPTRS_VALID) != 0;
        (result == 0 && valid).then_some(registers.pdptrs)
    }

    fn switched(&self) -> ClusterSwitch {
        self.kernel.switched()
    }

    fn faults_arrive(&self) -> bool {
        self.kernel.faults_arrive()
    }
}

/// Nobody else uses the vCPU as long as this is there, also if a panic ends its use.
struct Exclusive<'a>(&'a AtomicBool);

impl<'a> Exclusive<'a> {
    fn new(busy: &'a AtomicBool) -> Option<Self> {
        (!busy.swap(true, Ordering::Acquire)).then_some(Self(busy))
    }
}

impl Drop for Exclusive<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl<K: Kernel> Interposer<K> {
    /// Knows no VM yet. Allocates half a megabyte.
    pub fn new(kernel: K, limits: ClusterLimits) -> Self {
        let descriptors = (0..DESCRIPTORS).map(|_| AtomicPtr::new(ptr::null_mut())).collect();
        Self { kernel, limits, descriptors }
    }

    /// The kernel that calls go to.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// A call of the VMM, on any thread. `request` may have its sign repeated in the upper half: C programs keep it in an
    /// `int`.
    pub fn ioctl(&self, descriptor: i32, request: u64, argument: usize) -> i32 {
        let request = request & u64::from(u32::MAX);
        if !abi::is_kvm(request) {
            return self.kernel.ioctl(descriptor, request, argument);
        }
        if request == abi::KVM_CREATE_VM {
            // Only KVM's own file takes it, whatever had its number before.
            return self.create_vm(descriptor, argument);
        }
        match self.known(descriptor) {
            Some(Descriptor::Vm { timer, .. }) if is_timer_state(request) => {
                timer.call(request, argument, || self.kernel.ioctl(descriptor, request, argument))
            }
            Some(Descriptor::Vm { vm, run_bytes, timer }) => {
                self.vm_call((vm, timer), *run_bytes, descriptor, request, argument)
            }
            Some(Descriptor::Vcpu { vm, timer, gate, busy, vcpu }) => {
                let Some(_exclusive) = Exclusive::new(busy) else {
                    return self.kernel.ioctl(descriptor, request, argument);
                };
                let calls = Calls { kernel: &self.kernel, descriptor, argument, timer, gate };
                // SAFETY: the only one that has found `busy` unset.
                self.vcpu_call(vm, unsafe { &mut *vcpu.get() }, calls, request)
            }
            None => {
                let result = self.kernel.ioctl(descriptor, request, argument);
                if request == abi::KVM_CREATE_VCPU && result >= 0 {
                    // Of a VM that is not known.
                    self.forget(result);
                }
                result
            }
        }
    }

    /// Learns from a call that has succeeded. What a panic leaves out is not known of the VM, so that nothing is
    /// interpreted any more.
    fn learn_of(&self, vm: &SharedVm, learn: impl FnOnce()) {
        if catch_unwind(AssertUnwindSafe(learn)).is_err() {
            vm.fail();
            self.kernel.failed();
        }
    }

    /// Looks after the timer of the VM that has this descriptor, on a thread that does nothing else. `now` is of any clock that only goes
    /// forwards. When to look again; `None` if no VM with a PIT has the descriptor.
    pub fn clamp_step(&self, descriptor: i32, now: Duration) -> Option<Duration> {
        let Some(Descriptor::Vm { vm, timer, .. }) = self.known(descriptor) else { return None };
        let step = || timer.step(&self.kernel, vm, descriptor, now);
        catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|_| {
            // The next look puts back what is the guest's, unless that fails too.
            let first = !vm.has_failed();
            vm.fail();
            self.kernel.failed();
            first.then_some(Duration::ZERO)
        })
    }

    /// Registers of a device are mapped into the guest of the VM that has this descriptor, or no longer. To be called before the slot is set, and
    /// after it was removed: when this returns, no vCPU interprets an access there, and none will until the range is removed.
    pub fn device_range(&self, descriptor: i32, address: u64, length: u64, removed: bool) {
        if let Some(Descriptor::Vm { vm, .. }) = self.known(descriptor) {
            self.learn_of(vm, || vm.change().device_range(address, length, removed));
        }
    }

    /// What clustering has done for the vCPU of a descriptor; `None` if it has none, or is in a call.
    pub fn counts(&self, descriptor: i32) -> Option<ClusterCounts> {
        let Some(Descriptor::Vcpu { busy, vcpu, .. }) = self.known(descriptor) else { return None };
        let _exclusive = Exclusive::new(busy)?;
        // SAFETY: the only one that has found `busy` unset.
        Some(unsafe { &*vcpu.get() }.counts())
    }

    fn known(&self, descriptor: i32) -> Option<&'static Descriptor> {
        let place = self.descriptors.get(usize::try_from(descriptor).ok()?)?;
        // SAFETY: null, or from a box that is never freed.
        unsafe { place.load(Ordering::Acquire).as_ref() }
    }

    /// Replaces what the number was before; that is not freed, since a call may be using it.
    fn keep(&self, descriptor: i32, what: Descriptor) {
        let place = usize::try_from(descriptor).ok().and_then(|number| self.descriptors.get(number));
        if let Some(place) = place {
            place.store(Box::leak(Box::new(what)), Ordering::Release);
        }
    }

    /// A number is used again: what it was before, it is no more.
    fn forget(&self, descriptor: i32) {
        let place = usize::try_from(descriptor).ok().and_then(|number| self.descriptors.get(number));
        if let Some(place) = place {
            place.store(ptr::null_mut(), Ordering::Release);
        }
    }

    fn create_vm(&self, descriptor: i32, argument: usize) -> i32 {
        let result = self.kernel.ioctl(descriptor, abi::KVM_CREATE_VM, argument);
        if result >= 0 {
            self.forget(result);
            let vm: &'static SharedVm = Box::leak(Box::new(SharedVm::default()));
            self.learn_of(vm, || {
                if argument != 0 {
                    // Protected by hardware or software, or something newer.
                    vm.change().refuse(ClusterObstacle::Protected);
                }
                if self.kernel.has_shadow_tables() {
                    vm.change().refuse(ClusterObstacle::ShadowTables);
                }
                let bytes = self.kernel.ioctl(descriptor, abi::KVM_GET_VCPU_MMAP_SIZE, 0);
                let run_bytes = usize::try_from(bytes).unwrap_or(0);
                self.keep(result, Descriptor::Vm { vm, run_bytes, timer: Box::leak(Box::default()) });
            });
        }
        result
    }

    fn vm_call(
        &self,
        (vm, timer): (&'static SharedVm, &'static TimerClamp),
        run_bytes: usize,
        descriptor: i32,
        request: u64,
        argument: usize,
    ) -> i32 {
        let call = || self.kernel.ioctl(descriptor, request, argument);
        match request {
            abi::KVM_SET_USER_MEMORY_REGION | abi::KVM_SET_USER_MEMORY_REGION2 | abi::KVM_IOEVENTFD => {
                // Before the call: when it returns, no vCPU may use memory that was there, nor answer what KVM answers
                // from now on.
                let mut change = vm.change();
                let result = call();
                if result == 0 {
                    self.learn_of(vm, || {
                        if request == abi::KVM_IOEVENTFD {
                            // SAFETY: the kernel has read the structure there.
                            event_range(&mut change, unsafe { taken(argument) });
                        } else {
                            // SAFETY: the kernel has read the structure there; both begin alike.
                            memory_region(&mut change, unsafe { taken(argument) });
                        }
                    });
                }
                return result;
            }
            abi::KVM_MEMORY_ENCRYPT_OP => {
                // Before it is known whether it succeeds: what it is meant for is not known here.
                vm.change().refuse(ClusterObstacle::Protected);
            }
            _ => {}
        }
        let result = call();
        let raised = match request {
            abi::KVM_IRQ_LINE | abi::KVM_IRQ_LINE_STATUS if result >= 0 => {
                // SAFETY: the kernel has read the structure there: a number, and the level behind it.
                let [_, level] = unsafe { taken::<[u32; 2]>(argument) };
                level != 0
            }
            abi::KVM_SIGNAL_MSI => result >= 0,
            _ => false,
        };
        if raised {
            vm.interrupt_raised();
            return result;
        }
        if request == abi::KVM_CREATE_VCPU && result >= 0 {
            self.forget(result);
            self.learn_of(vm, || self.vcpu_created((vm, timer), run_bytes, descriptor, result));
        } else if result == 0 {
            self.learn_of(vm, || match request {
                abi::KVM_CREATE_IRQCHIP => vm.change().interrupt_controller(InterruptController::Kernel),
                abi::KVM_SET_TSC_KHZ => vm.change().scale_time_stamp(),
                abi::KVM_CREATE_PIT | abi::KVM_CREATE_PIT2 => vm.change().timer_created(),
                abi::KVM_ENABLE_CAP => {
                    // SAFETY: the kernel has read the structure there.
                    let capability: kvm_enable_cap = unsafe { taken(argument) };
                    match capability.cap {
                        KVM_CAP_SPLIT_IRQCHIP => vm.change().interrupt_controller(InterruptController::Split),
                        KVM_CAP_DIRTY_LOG_RING | KVM_CAP_DIRTY_LOG_RING_ACQ_REL => {
                            vm.change().refuse(ClusterObstacle::DirtyRing);
                        }
                        _ => {}
                    }
                }
                _ => {}
            });
        }
        result
    }

    fn vcpu_created(
        &self,
        (vm, timer): (&'static SharedVm, &'static TimerClamp),
        run_bytes: usize,
        vm_descriptor: i32,
        descriptor: i32,
    ) {
        vm.change().vcpu_created();
        let capability = usize::try_from(KVM_CAP_SYNC_REGS).unwrap_or(0);
        let shared = self.kernel.ioctl(vm_descriptor, abi::KVM_CHECK_EXTENSION, capability);
        let wanted = KVM_SYNC_X86_VALID_FIELDS;
        if u32::try_from(shared).unwrap_or(0) & wanted != wanted || run_bytes < 2 * 4096 {
            return;
        }
        let Some(counters) = self.kernel.counters() else { return };
        if let Some(page) = self.kernel.map_vcpu(descriptor, run_bytes) {
            // SAFETY: a mapping of at least two pages that is never taken away; calls on a vCPU are made by one thread
            // at a time (`busy`).
            let page = unsafe { RunPage::new(page) };
            // Until CPUID is set no guest runs that could have more.
            let mut vcpu = ClusteredVcpu::new(page, self.limits, 36, counters);
            // Before the VMM has set another, it is the host's, unless all new vCPUs have another.
            let scaled = vm.change().time_stamp_scaled();
            let speed = if scaled { 0 } else { self.kernel.ioctl(descriptor, abi::KVM_GET_TSC_KHZ, 0) };
            vcpu.set_host_time_stamp_speed(u64::try_from(speed).unwrap_or(0));
            let vcpu = Box::new(UnsafeCell::new(vcpu));
            let gate = timer.hold.gate(descriptor);
            self.keep(descriptor, Descriptor::Vcpu { vm, timer, gate, busy: AtomicBool::new(false), vcpu });
        }
    }

    fn vcpu_call(
        &self,
        vm: &SharedVm,
        vcpu: &mut ClusteredVcpu,
        mut calls: Calls<'_, K>,
        request: u64,
    ) -> i32 {
        let (descriptor, argument) = (calls.descriptor, calls.argument);
        if request == abi::KVM_RUN {
            let result = vcpu.run(vm, &mut calls);
            if vm.has_failed() {
                self.kernel.failed();
            }
            return result;
        }
        calls.argument = 0;
        vcpu.before_other_call(&mut calls);
        let result = if request == abi::KVM_SET_CPUID2 && self.kernel.offers_batches() {
            self.set_cpuid_with_batches(vm, vcpu, descriptor, argument)
        } else {
            self.kernel.ioctl(descriptor, request, argument)
        };
        if result != 0 {
            return result;
        }
        self.learn_of(vm, || match request {
            abi::KVM_SET_CPUID | abi::KVM_SET_CPUID2 => {
                // SAFETY: the kernel has read the structure there, with as many leaves as it says.
                let cpuid = unsafe {
                    if request == abi::KVM_SET_CPUID { old_leaves(argument) } else { leaves(argument) }
                };
                vcpu.set_cpuid(&cpuid);
                vm.change().cpuid_set(cpuid);
            }
            abi::KVM_SET_TSC_KHZ => {
                // KVM takes another speed only if it can scale the counter, or tolerates the difference.
                vcpu.set_time_stamp_speed(u64::try_from(argument).unwrap_or(0));
            }
            abi::KVM_SET_GUEST_DEBUG => {
                // SAFETY: the kernel has read the structure there.
                let debug: kvm_guest_debug = unsafe { taken(argument) };
                if debug.control != 0 {
                    // Not taken back: another vCPU may still be debugged.
                    vm.change().refuse(ClusterObstacle::GuestDebug);
                }
            }
            _ => {}
        });
        result
    }
}

impl<K: Kernel> Interposer<K> {
    /// KVM_SET_CPUID2 with what the VMM has given, and then with the leaves that offer batches. Returns what the VMM is to get.
    fn set_cpuid_with_batches(
        &self,
        vm: &SharedVm,
        vcpu: &mut ClusteredVcpu,
        descriptor: i32,
        argument: usize,
    ) -> i32 {
        let result = self.kernel.ioctl(descriptor, abi::KVM_SET_CPUID2, argument);
        // Once the vCPU has run, KVM takes what it has and nothing else (Linux 5.16), which is with our leaves.
        let again = result == -libc::EINVAL && vcpu.offers_batches();
        if result != 0 && !again {
            return result;
        }
        let mut accepted = false;
        self.learn_of(vm, || {
            // SAFETY: the kernel has read the structure there before it looked at what the leaves say.
            accepted = match cpuid::offer(unsafe { entries(argument) }) {
                BatchOffer::With(with) => {
                    let with = ptr::from_ref(&*with).expose_provenance();
                    self.kernel.ioctl(descriptor, abi::KVM_SET_CPUID2, with) == 0
                }
                BatchOffer::Already => result == 0,
                BatchOffer::None => false,
            };
        });
        if accepted || result == 0 {
            vcpu.offer_batches(accepted);
            return 0;
        }
        result
    }
}

/// Whether a call, if it succeeds, gives a VM a PIT. The request is as in [`Interposer::ioctl`].
pub fn makes_timer(request: u64) -> bool {
    matches!(request & u64::from(u32::MAX), abi::KVM_CREATE_PIT | abi::KVM_CREATE_PIT2)
}

/// Whether a call reads or sets the PIT.
fn is_timer_state(request: u64) -> bool {
    matches!(request, abi::KVM_GET_PIT | abi::KVM_SET_PIT | abi::KVM_GET_PIT2 | abi::KVM_SET_PIT2)
}

fn event_range(change: &mut VmChange<'_>, event: kvm_ioeventfd) {
    let port = event.flags & 1 << kvm_ioeventfd_flag_nr_pio != 0;
    let removed = event.flags & 1 << kvm_ioeventfd_flag_nr_deassign != 0;
    change.event_range(port, event.addr, event.len, removed);
}

fn memory_region(change: &mut VmChange<'_>, region: kvm_userspace_memory_region) {
    // The other address space is that of system management mode, in which nothing is interpreted.
    if region.slot >> 16 != 0 {
        return;
    }
    if region.flags & KVM_MEM_GUEST_MEMFD != 0 {
        change.refuse(ClusterObstacle::GuestMemfd);
    }
    if region.memory_size == 0 {
        change.slots.remove(region.slot);
        return;
    }
    let slot = MemorySlot {
        number: region.slot,
        address: region.guest_phys_addr,
        size: region.memory_size,
        host: usize::try_from(region.userspace_addr).unwrap_or(0),
        read_only: region.flags & KVM_MEM_READONLY != 0,
        logged: region.flags & KVM_MEM_LOG_DIRTY_PAGES != 0,
    };
    // SAFETY: KVM has taken it as the guest's memory, so the VMM keeps it mapped as long as the slot is there.
    if unsafe { change.slots.set(slot) }.is_err() {
        // What KVM accepts and this does not cannot be followed.
        change.refuse(ClusterObstacle::UnknownMemory);
    }
}

/// # Safety
/// The kernel has just read a `T` at this address for a call that succeeded.
unsafe fn taken<T: Copy>(address: usize) -> T {
    // SAFETY: said above; all `T` here are structures of plain numbers.
    unsafe { ptr::with_exposed_provenance::<T>(address).read_unaligned() }
}

/// # Safety
/// As [`taken`], for a `kvm_cpuid`, whose leaves have no indexes.
unsafe fn old_leaves(address: usize) -> GuestCpuid {
    // SAFETY: said above. The count is the first field.
    let count = unsafe { taken::<u32>(address) }.min(MOST_LEAVES);
    let first = address + size_of::<kvm_cpuid>();
    GuestCpuid::of((0..usize::try_from(count).unwrap_or(0)).map(|number| {
        // SAFETY: one of `count` entries behind the header.
        let entry: kvm_cpuid_entry = unsafe { taken(first + number * size_of::<kvm_cpuid_entry>()) };
        (entry.function, 0, [entry.eax, entry.ebx, entry.ecx, entry.edx])
    }))
}

/// # Safety
/// As [`taken`], for a `kvm_cpuid2`, which stays there as long as the iterator.
unsafe fn entries(address: usize) -> impl Iterator<Item = kvm_cpuid_entry2> {
    // SAFETY: said above. The count is the first field.
    let count = unsafe { taken::<u32>(address) }.min(MOST_LEAVES);
    let first = address + size_of::<kvm_cpuid2>();
    (0..usize::try_from(count).unwrap_or(0)).map(move |index| {
        // SAFETY: one of `count` entries behind the header.
        unsafe { taken(first + index * size_of::<kvm_cpuid_entry2>()) }
    })
}

/// # Safety
/// As [`taken`], for a `kvm_cpuid2`.
unsafe fn leaves(address: usize) -> GuestCpuid {
    // SAFETY: said above.
    let entries = unsafe { entries(address) };
    GuestCpuid::of(
        entries.map(|entry| (entry.function, entry.index, [entry.eax, entry.ebx, entry.ecx, entry.edx])),
    )
}
