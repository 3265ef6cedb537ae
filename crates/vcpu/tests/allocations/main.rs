//! A run allocates nothing and frees nothing: the allocator of the VMM's process may wait for a lock, or make a system call that the
//! VMM's filter forbids.
#![allow(missing_docs, unsafe_code, clippy::unwrap_used)]
// UNSAFETY: an allocator that counts, and a VMM that reads and writes `kvm_run`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use ioplane_vcpu::batch::{
    BatchEntry, BatchHeader, DOORBELL, MAGIC, READ_MEMORY, READ_PORT, VERSION, WRITE_MEMORY, WRITE_PORT,
};
use ioplane_vcpu::kvm::{
    ClusterLimits, ClusteredVcpu, InterruptController, RunPage, VcpuCounters, VcpuDescriptor, VmState,
};
use kvm_bindings::{KVM_EXIT_HLT, kvm_debugregs, kvm_regs, kvm_vcpu_events};

#[path = "../kvm/answers.rs"]
mod answers;
#[allow(dead_code)]
#[path = "../kvm/fake.rs"]
mod fake;
#[path = "../kvm/program.rs"]
mod program;
#[path = "../quiet/mod.rs"]
mod quiet;

use fake::{BITS, DEVICE, FakeKvm};
use program::{Random, random_program};

thread_local! {
    /// Calls of the allocator on this thread, while they are counted.
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

struct Counting;

fn count() {
    // No destructor, so it is there as long as the thread.
    let _ = COUNTED.try_with(|counted| counted.set(counted.get().map(|calls| calls + 1)));
}

// SAFETY: the system's allocator does all of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The calls of the allocator that `work` makes, but for those in [`uncounted`].
fn counted(work: impl FnOnce()) -> u64 {
    COUNTED.set(Some(0));
    work();
    COUNTED.take().unwrap()
}

fn uncounted<R>(work: impl FnOnce() -> R) -> R {
    let calls = COUNTED.take();
    let result = work();
    COUNTED.set(calls);
    result
}

/// A KVM whose own allocations do not count.
struct Kernel {
    kvm: FakeKvm,
    /// Asking for debug registers allocates, as if the interposer did.
    allocates: bool,
}

impl VcpuDescriptor for Kernel {
    fn run(&mut self) -> i32 {
        uncounted(|| self.kvm.run())
    }
    fn registers(&mut self, registers: &mut kvm_regs) -> i32 {
        uncounted(|| self.kvm.registers(registers))
    }
    fn set_registers(&mut self, registers: &kvm_regs) -> i32 {
        uncounted(|| self.kvm.set_registers(registers))
    }
    fn debug_registers(&mut self, registers: &mut kvm_debugregs) -> i32 {
        if self.allocates {
            std::hint::black_box(Box::new(0_u64));
        }
        uncounted(|| self.kvm.debug_registers(registers))
    }
    fn events(&mut self, events: &mut kvm_vcpu_events) -> i32 {
        uncounted(|| self.kvm.events(events))
    }
    fn set_events(&mut self, events: &kvm_vcpu_events) -> i32 {
        uncounted(|| self.kvm.set_events(events))
    }
}

/// Where the array of the batch is.
const ARRAY: u64 = 0xc000;
const ENTRIES: usize = 12;

/// Accesses of each kind by one doorbell.
fn put_batch(kvm: &mut FakeKvm, random: &mut Random) {
    let header = BatchHeader { magic: MAGIC, version: VERSION, count: ENTRIES as u16, ..Default::default() };
    let entries: [BatchEntry; ENTRIES] = std::array::from_fn(|index| BatchEntry {
        kind: [READ_PORT, WRITE_PORT, READ_MEMORY, WRITE_MEMORY][index % 4],
        width: 4,
        address: [0x340, 0x340, DEVICE, DEVICE][index % 4] + 8 * random.below(8),
        value: random.next(),
        ..Default::default()
    });
    // SAFETY: plain numbers without padding.
    let bytes = unsafe {
        let header = std::slice::from_raw_parts((&raw const header).cast::<u8>(), size_of_val(&header));
        [header, std::slice::from_raw_parts(entries.as_ptr().cast(), size_of_val(&entries))].concat()
    };
    kvm.memory.write(ARRAY, &bytes);
}

/// A random program, a string instruction on memory, and a batch.
fn code(random: &mut Random) -> Vec<u8> {
    let mut code = random_program(random);
    code.pop();
    // OUT 0x80, AL; MOV ESI, 0x9000; MOV EDI, 0xa000; MOV ECX, 200; REP MOVSB; OUT 0x80, AL
    code.extend([0xe6, 0x80, 0xbe, 0, 0x90, 0, 0, 0xbf, 0, 0xa0, 0, 0, 0xb9, 200, 0, 0, 0, 0xf3, 0xa4]);
    code.extend([0xe6, 0x80]);
    // MOV RAX, ARRAY; MOV EDX, DOORBELL; IN EAX, DX; HLT
    code.extend([&[0x48, 0xb8][..], &ARRAY.to_le_bytes()].concat());
    code.extend([&[0xba][..], &u32::from(DOORBELL).to_le_bytes(), &[0xed, 0xf4]].concat());
    code
}

/// Runs to HLT; the calls of the allocator in all runs.
fn allocator_calls(seed: u64, allocates: bool, counters: &'static VcpuCounters) -> u64 {
    let mut random = Random(seed);
    let mut kvm = FakeKvm::new(&code(&mut random), VmState::default());
    put_batch(&mut kvm, &mut random);
    kvm.vm.interrupt_controller(InterruptController::Kernel);
    let vm = kvm.shared_vm();
    let page = kvm.run_page();
    let limits = ClusterLimits { instructions: 1000, accesses: 64, cycles: u64::MAX, output_elements: 1 };
    // SAFETY: the page lives as long as `kvm`, and all is on this thread.
    let mut vcpu = ClusteredVcpu::new(unsafe { RunPage::new(page) }, limits, BITS, counters);
    vcpu.offer_batches(true);
    let mut kernel = Kernel { kvm, allocates };
    let mut calls = 0;
    for asked in 1.. {
        assert!(asked < 10_000, "the program does not end");
        calls += counted(|| assert_eq!(vcpu.run(&vm, &mut kernel), 0));
        if answers::answer(page, asked).is_none() {
            break;
        }
    }
    assert_eq!(kernel.kvm.exit_reason(), KVM_EXIT_HLT);
    calls
}

#[test]
fn a_run_allocates_nothing() {
    let counters: &'static VcpuCounters = Box::leak(Box::default());
    for seed in 0..500 {
        assert_eq!(allocator_calls(seed, false, counters), 0, "seed {seed}");
    }
    let (counts, batches) = (counters.counts(), counters.batches());
    let instructions: u64 = counters.sites().map(|site| site.instructions).sum();
    println!("{counts:?} {batches:?}, {instructions} instructions");
    assert!(counts.made_up_accesses > 5000 && batches.answered == 500, "{counts:?} {batches:?}");
    assert!(instructions > 500 * 200, "the strings are among them: {instructions}");
}

#[test]
fn what_allocates_in_a_run_is_counted() {
    assert!(allocator_calls(1, true, Box::leak(Box::default())) >= 2, "a box, and its end");
}
