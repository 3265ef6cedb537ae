//! A VMM as small as can be, which calls KVM by libc's `ioctl`, with a guest in 64-bit mode at level 3: a KVM that is made of
//! software runs that as it is.
#![allow(unsafe_code)]
// UNSAFETY: KVM's calls take addresses, and `kvm_run` is shared with the kernel.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;

use ioplane_vcpu::batch;
use ioplane_vcpu::kvm::ClusterPage;
use kvm_bindings::{
    KVM_EXIT_IO, KVM_EXIT_IO_OUT, KVM_EXIT_MMIO, kvm_cpuid_entry2, kvm_regs, kvm_run, kvm_segment, kvm_sregs,
    kvm_userspace_memory_region,
};

pub mod pages;
pub mod timer;

const MEMORY: usize = 2 << 20;
/// No memory is here; mapped to itself.
const DEVICE: u64 = 2 << 20;
const CODE: u64 = 0x1_0000;
const BUFFER: u64 = 0x2_0000;
const ROUNDS: u32 = 300;
/// Of all rounds and of the end.
pub const ACCESSES: u64 = 4 * ROUNDS as u64 + 1;

/// Set: the VMM forks while it handles every third access, so while it handles made-up exits of each kind.
pub const FORKS: &str = "IOPLANE_TEST_FORKS";

const KVM_CREATE_VM: u64 = 0xae01;
const KVM_GET_VCPU_MMAP_SIZE: u64 = 0xae04;
const KVM_GET_SUPPORTED_CPUID: u64 = 0xc008_ae05;
const KVM_CREATE_VCPU: u64 = 0xae41;
const KVM_SET_USER_MEMORY_REGION: u64 = 0x4020_ae46;
const KVM_SET_TSS_ADDR: u64 = 0xae47;
const KVM_CREATE_IRQCHIP: u64 = 0xae60;
const KVM_RUN: u64 = 0xae80;
const KVM_GET_REGS: u64 = 0x8090_ae81;
const KVM_SET_REGS: u64 = 0x4090_ae82;
const KVM_GET_SREGS: u64 = 0x8138_ae83;
const KVM_SET_SREGS: u64 = 0x4138_ae84;
const KVM_SET_CPUID2: u64 = 0x4008_ae90;
const KVM_GET_CPUID2: u64 = 0xc008_ae91;

fn call(descriptor: c_int, request: u64, argument: usize) -> Result<c_int, String> {
    // SAFETY: each caller passes what the request takes.
    let result = unsafe { libc::ioctl(descriptor, request, argument) };
    if result < 0 {
        return Err(format!("{request:x}: {}", std::io::Error::last_os_error()));
    }
    Ok(result)
}

fn at<T: ?Sized>(value: &T) -> usize {
    ptr::from_ref(value).cast::<u8>().expose_provenance()
}

fn map(bytes: usize, flags: c_int, file: c_int) -> *mut u8 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping, wherever the kernel puts it.
    let mapped = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, file, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped.cast()
}

/// Each round: a write, a read whose answer goes to memory, a write to a device's memory and a read of it.
fn program() -> Vec<u8> {
    let mut code = vec![0xb9];
    code.extend(ROUNDS.to_le_bytes()); // mov ecx, ROUNDS
    code.push(0xbf);
    code.extend(u32::try_from(BUFFER).unwrap().to_le_bytes()); // mov edi, BUFFER
    code.push(0xbe);
    code.extend(u32::try_from(DEVICE).unwrap().to_le_bytes()); // mov esi, DEVICE
    let top = code.len();
    code.extend([0xba, 0x10, 0x03, 0, 0]); // mov edx, 0x310
    code.extend([0x89, 0xc8, 0xee]); // mov eax, ecx; out dx, al
    code.extend([0xff, 0xc2, 0xed]); // inc edx; in eax, dx
    code.extend([0x89, 0x07, 0x48, 0x83, 0xc7, 0x04]); // mov [rdi], eax; add rdi, 4
    code.extend([0x89, 0x46, 0x10]); // mov [rsi+0x10], eax
    code.extend([0x0f, 0xb6, 0x5e, 0x20]); // movzx ebx, byte [rsi+0x20]
    code.extend([0x01, 0x1f]); // add [rdi], ebx
    code.extend([0xff, 0xc9, 0x75]); // dec ecx; jnz top
    let back = i64::try_from(top).unwrap() - i64::try_from(code.len() + 1).unwrap();
    code.push(i8::try_from(back).unwrap().to_le_bytes()[0]);
    code.extend([0xb0, 0x01, 0xe6, 0xf4]); // mov al, 1; out 0xf4, al
    code
}

fn put(memory: *mut u8, address: u64, bytes: &[u8]) {
    // SAFETY: inside the guest's memory, to which there are no references.
    unsafe {
        ptr::copy_nonoverlapping(bytes.as_ptr(), memory.add(usize::try_from(address).unwrap()), bytes.len())
    };
}

fn segment(kind: u8, long: u8) -> kvm_segment {
    let (selector, big) = if long == 1 { (0x33, 0) } else { (0x2b, 1) };
    kvm_segment {
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        dpl: 3,
        db: big,
        s: 1,
        l: long,
        g: 1,
        ..Default::default()
    }
}

const LEAVES: usize = 256;

/// `kvm_cpuid2` with room.
#[repr(C)]
struct Cpuid {
    count: u32,
    padding: u32,
    leaves: [kvm_cpuid_entry2; LEAVES],
}

fn vcpu(system: c_int, vm: c_int) -> Result<c_int, String> {
    let vcpu = call(vm, KVM_CREATE_VCPU, 0)?;
    let mut cpuid = Cpuid { count: LEAVES as u32, padding: 0, leaves: [kvm_cpuid_entry2::default(); LEAVES] };
    call(system, KVM_GET_SUPPORTED_CPUID, ptr::from_mut(&mut cpuid).expose_provenance())?;
    let count = usize::try_from(cpuid.count).unwrap();
    for leaf in cpuid.leaves[..count].iter_mut().filter(|leaf| leaf.function == 1) {
        // There is a hypervisor.
        leaf.ecx |= 1 << 31;
    }
    let given = cpuid.leaves;
    call(vcpu, KVM_SET_CPUID2, at(&cpuid))?;
    assert_eq!((cpuid.count, cpuid.leaves), (u32::try_from(count).unwrap(), given), "it is the VMM's");
    cpuid.count = LEAVES as u32;
    call(vcpu, KVM_GET_CPUID2, ptr::from_mut(&mut cpuid).expose_provenance())?;
    let kept = &cpuid.leaves[..usize::try_from(cpuid.count).unwrap()];
    let signature = |leaf: &kvm_cpuid_entry2| [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).concat();
    println!("\nbatches {}", kept.iter().any(|leaf| signature(leaf) == batch::SIGNATURE));
    let mut special = kvm_sregs::default();
    call(vcpu, KVM_GET_SREGS, ptr::from_mut(&mut special).expose_provenance())?;
    special.cs = segment(11, 1);
    for data in [&mut special.ds, &mut special.es, &mut special.fs, &mut special.gs, &mut special.ss] {
        *data = segment(3, 0);
    }
    special.cr0 = 0x8001_0033;
    special.cr3 = 0x1000;
    special.cr4 = 0x620;
    special.efer = 0x500;
    call(vcpu, KVM_SET_SREGS, at(&special))?;
    let registers = kvm_regs { rip: CODE, rsp: 0x8000, rflags: 0x3002, ..Default::default() };
    call(vcpu, KVM_SET_REGS, at(&registers))?;
    Ok(vcpu)
}

/// Memory of a VM with page tables and a program.
fn guest_memory(vm: c_int, program: &[u8]) -> Result<*mut u8, String> {
    let memory = map(MEMORY, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1);
    const USER: u64 = 0x67;
    put(memory, 0x1000, &(0x2000 | USER).to_le_bytes());
    put(memory, 0x2000, &(0x3000 | USER).to_le_bytes());
    put(memory, 0x3000, &(USER | 0x80).to_le_bytes());
    put(memory, 0x3008, &(DEVICE | USER | 0x80).to_le_bytes());
    put(memory, CODE, program);
    let region = kvm_userspace_memory_region {
        memory_size: MEMORY as u64,
        userspace_addr: memory.expose_provenance() as u64,
        ..Default::default()
    };
    call(vm, KVM_SET_USER_MEMORY_REGION, at(&region))?;
    Ok(memory)
}

/// Runs it and prints what the guest did, a line for each access.
pub fn run() {
    if let Err(why) = guest() {
        println!("\nno KVM: {why}");
    }
}

fn guest() -> Result<(), String> {
    let system =
        File::options().read(true).write(true).open("/dev/kvm").map_err(|error| error.to_string())?;
    let vm = call(system.as_raw_fd(), KVM_CREATE_VM, 0)?;
    call(vm, KVM_SET_TSS_ADDR, 0xfffb_d000)?;
    call(vm, KVM_CREATE_IRQCHIP, 0)?;
    let memory = guest_memory(vm, &program())?;
    let vcpu = vcpu(system.as_raw_fd(), vm)?;
    let bytes = usize::try_from(call(system.as_raw_fd(), KVM_GET_VCPU_MMAP_SIZE, 0)?).unwrap();
    let page: *mut kvm_run = map(bytes, libc::MAP_SHARED, vcpu).cast();
    let mut did = Vec::new();
    let forks = std::env::var_os(FORKS).is_some();
    println!();
    while did.len() < usize::try_from(ACCESSES).unwrap() {
        call(vcpu, KVM_RUN, 0)?;
        did.push(answer(page, did.len()).map_err(|other| {
            let mut registers = kvm_regs::default();
            let read = call(vcpu, KVM_GET_REGS, ptr::from_mut(&mut registers).expose_provenance());
            format!("exit {other} after {} accesses, {read:?} {registers:x?}", did.len())
        })?);
        if forks && did.len() % 3 == 0 {
            fork();
        }
    }
    did.iter().for_each(|line| println!("did {line}"));
    let mut registers = kvm_regs::default();
    call(vcpu, KVM_GET_REGS, ptr::from_mut(&mut registers).expose_provenance())?;
    // SAFETY: inside the guest's memory; the guest does not run.
    let buffer = unsafe { std::slice::from_raw_parts(memory.add(usize::try_from(BUFFER).unwrap()), 4096) };
    println!("did registers {registers:x?}\ndid memory {buffer:x?}");
    if let Some(file) = super::page() {
        let report = ClusterPage::read(&file).map_err(|error| error.to_string())?;
        let counts: Vec<_> = report.vcpus.iter().map(|vcpu| vcpu.counts).collect();
        println!("{report:?}");
        println!("saved {}", counts.iter().map(|counts| counts.made_up_accesses).sum::<u64>());
    }
    // SAFETY: descriptors of this function's own.
    drop(unsafe { [File::from_raw_fd(vcpu), File::from_raw_fd(vm)] });
    Ok(())
}

/// Makes a child, which ends as programs do, and waits for it.
fn fork() {
    let mut status: c_int = -1;
    // SAFETY: the child runs nothing but what the process has for its end.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::exit(0);
        }
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
    }
    assert_eq!(status, 0, "the child has ended well");
}

/// What was asked, after it was answered; the reason of an exit that is no access.
fn answer(page: *mut kvm_run, number: usize) -> Result<String, u32> {
    // SAFETY: the mapping has two pages and more; the kernel does not use it now.
    unsafe {
        match (*page).exit_reason {
            KVM_EXIT_IO => {
                let io = (*page).__bindgen_anon_1.io;
                let bytes = usize::from(io.size) * usize::try_from(io.count).unwrap();
                let at = page.cast::<u8>().add(usize::try_from(io.data_offset).unwrap());
                let data = std::slice::from_raw_parts_mut(at, bytes);
                if u32::from(io.direction) != KVM_EXIT_IO_OUT {
                    data.iter_mut().for_each(|byte| *byte = number.to_le_bytes()[0]);
                }
                Ok(format!("port {:x} {} {data:x?}", io.port, io.direction))
            }
            KVM_EXIT_MMIO => {
                let mmio = &mut (*page).__bindgen_anon_1.mmio;
                if mmio.is_write == 0 {
                    mmio.data = [number.to_le_bytes()[0]; 8];
                }
                let bytes = &mmio.data[..usize::try_from(mmio.len).unwrap()];
                Ok(format!("memory {:x} {} {bytes:x?}", mmio.phys_addr, mmio.is_write))
            }
            other => Err(other),
        }
    }
}
